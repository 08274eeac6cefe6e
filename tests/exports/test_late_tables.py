"""The tables of requests, of the machine and of disturbed steps, against the log's lines and
`instr requests`. `test_tables` checks that parts give the same."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pandas as pd
from hypothesis import given, settings
from msgspec.structs import replace

from llamacpp_instr.converters.exports.tables import load_tables
from llamacpp_instr.log import schema as s
from tests.kit.in_process import json_reports
from tests.kit.made_log import encode, make_log
from tests.kit.strategies import logs, unclosed_logs


def none(value: Any) -> Any:
    return None if pd.isna(value) else value


@given(events=logs() | unclosed_logs())
@settings(max_examples=10)
def test_they_are_those_of_the_log(events, tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "session.log"
    path.write_bytes(encode(events))
    tables = load_tables(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    machine = [line for line in lines if line["event"] == "machine"]
    for name in ("dur", "cpu", "delay", "nvcsw", "nivcsw", "load", "running", "steal"):
        assert tables.machine[name].tolist() == [event[name] for event in machine], name
    assert tables.machine.end.tolist() == [event["t"] for event in machine]
    bad = [
        (event["t"] - event["dur"], event["t"])
        for event in machine
        if event["delay"] > 0.05 * (event["delay"] + event["cpu"])
    ]
    for step in tables.steps.itertuples():
        assert step.disturbed == any(b < step.end and step.begin < e for b, e in bad)
    check_requests(path, tables.requests)


def test_a_mark_gives_a_request_its_name_and_arrival(tmp_path):
    made = make_log(Random(3).randint, 1, "minimal")
    marked = [
        replace(e, seq=0, name="<b>", t=e.t - 7) if isinstance(e, s.Mark) else e for e in made
    ]
    path = tmp_path / "session.log"
    path.write_bytes(encode(marked))
    requests = load_tables(path).requests
    assert {"<b>"} == set(requests.name.dropna())
    assert set(requests.queued.dropna()) == {7}
    check_requests(path, requests)


def check_requests(path: Path, table: pd.DataFrame) -> None:
    """Every request has the numbers that the command prints."""
    latency, *slowest = json_reports("requests", path, "--top", 1_000_000)
    shown = {row["Request"]: row for row in (slowest[-1]["rows"] if slowest else [])}
    assert table.request.tolist() == sorted(shown)
    assert table.output.sum() == latency["figures"].get("output tokens", {"value": 0})["value"]
    arrivals = table.arrival.fillna(table.begin)
    for i, row in enumerate(table.to_dict("records")):
        of = shown[row["request"]]
        same = {"context": "ctx", "sequence": "sequence", "queued": "queued", "prompt": "prompt"}
        same |= {"reused": "reused", "output": "output"}
        assert {k: of[k] for k in same} == {k: none(row[v]) for k, v in same.items()}
        assert (of["name"] or None) == none(row["name"])
        assert of["from"] == arrivals[i] - arrivals.min()
        assert of["total"] == row["end"] - arrivals[i]
        assert of["first token"] == none(row["first_token"] - arrivals[i])
