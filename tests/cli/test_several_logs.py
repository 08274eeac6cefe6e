"""Every reading command takes several logs: parts are joined, sessions stay side by side."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from pathlib import Path
from random import Random

import click
import pandas as pd
import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from llamacpp_instr.cli import COMMANDS, main
from llamacpp_instr.log.schema import SessionStart
from tests.kit.in_process import instr_here, json_reports, printed
from tests.kit.made_log import make_log
from tests.kit.split_log import split_log
from tests.kit.steady_log import write

FIXTURES = Path(__file__).parent.parent / "fixtures"


@pytest.fixture
def logs(tmp_path: Path) -> list[str]:
    """Two parts of a session, the second first, and the log of another process. Their CPU has no
    name, so any probe fits it."""
    rotated = make_log(lambda _low, high: high, n_contexts=2, level="detailed")
    other = make_log(Random(3).randint, n_contexts=1, level="detailed")
    paths = [tmp_path / name for name in ("a.log", "a.part2.log", "b.log")]
    for path, events in zip(paths, [*split_log(rotated, 2, Random(5)), other], strict=True):
        assert isinstance(events[0], SessionStart)
        events[0].host.cpu = ""
        write(path, events)
    return [str(paths[1]), str(paths[2]), str(paths[0])]


def test_reports_are_headed_by_their_logs(logs: list[str]) -> None:
    second, other, first = logs
    name = f"{first} and 1 more part"
    roofline = ["roofline", "--machine", FIXTURES / "probe.json"]
    for command in (["summary"], ["stats"], ["memory"], roofline):
        all_of_them, alone = json_reports(*command, *logs), json_reports(*command, other)
        joined = json_reports(*command, first, second)
        assert [report["title"] for report in all_of_them] == [
            *(f"{name}: {report['title']}" for report in joined),
            *(f"{other}: {report['title']}" for report in alone),
        ]
        assert [report["rows"] for report in all_of_them] == [
            report["rows"] for report in (*joined, *alone)
        ]
    (head, *rows) = csv.reader(printed("stats", *logs, "--csv").splitlines())
    assert head[:2] == ["log", "op"]
    assert {row[0] for row in rows} == {name, other}


def test_a_trace_has_the_tracks_of_every_session(logs: list[str], tmp_path: Path) -> None:
    def slices(*chosen: str) -> tuple[dict[int, str], int]:
        out = tmp_path / "out.pftrace"
        printed("to-perfetto", *chosen, "--flows", "--force", "-o", out)
        trace = pb.Trace()
        trace.ParseFromString(out.read_bytes())
        described = [p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")]
        names = {of.uuid: of.name for of in described}
        assert len(names) == len(described)
        begin = pb.TrackEvent.TYPE_SLICE_BEGIN
        events = [p.track_event for p in trace.packet if p.HasField("track_event")]
        assert {event.track_uuid for event in events} <= set(names)
        return names, sum(event.type == begin for event in events)

    second, other, first = logs
    names, n_slices = slices(*logs)
    assert f"session, {other}" in names.values()
    assert f"session, {first}" in names.values()
    assert n_slices == slices(first, second)[1] + slices(other)[1]


def test_a_chrome_trace_has_the_processes_of_every_session(logs: list[str], tmp_path: Path) -> None:
    """Each has what it has without the others, at the time of its own wall clock."""
    second, other, first = logs
    path = Path(other)
    (wall,) = re.findall(rb'"wall":(\d+)', path.read_bytes())
    path.write_bytes(path.read_bytes().replace(wall, b"%d" % (int(wall) - 7_000_000)))

    def records(*chosen: str, ms: int = 0) -> dict[str, Counter[str]]:
        """What the processes have, by name; all times are `ms` later."""
        out = tmp_path / "out.json"
        printed("to-perfetto", *chosen, "--format", "json", "--force", "-o", out)
        events = json.loads(out.read_bytes())["traceEvents"]
        named = [event for event in events if event["name"] == "process_name"]
        names = {event["pid"]: event["args"]["name"] for event in named}
        assert len(names) == len(named)
        tracks = {(e["pid"], e["tid"]): e["args"] for e in events if e["name"] == "thread_name"}
        found: dict[str, Counter[str]] = {name: Counter() for name in names.values()}
        for event in events:
            if event["name"] != "process_name":
                pid, tid = event.pop("pid"), event.pop("tid", 0)
                event["track"] = tracks.get((pid, tid))
                if "ts" in event:
                    event["ts"] = round(event["ts"] + 1000 * ms, 3)
                found[names[pid]][json.dumps(event, sort_keys=True)] += 1
        return found

    wanted = {f"{name}, {first}": of for name, of in records(first, second, ms=7).items()}
    wanted |= {f"{name}, {other}": of for name, of in records(other).items()}
    assert records(first, second, other) == records(other, first, second) == wanted


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_tables_name_the_log_of_each_row(form: str, logs: list[str], tmp_path: Path) -> None:
    second, other, first = logs
    Path(other).write_bytes(Path(other).read_bytes().rpartition(b'{"event":"session_end"')[0])

    def tables(*chosen: str) -> dict[str, pd.DataFrame]:
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        done = instr_here("to-parquet", *chosen, *["--csv"] * (form == "csv"), "-o", str(out))
        assert done.stderr.count(f"{other}: the log was not closed") == (other in chosen)
        read = pd.read_csv if form == "csv" else pd.read_parquet
        return {path.stem: read(path) for path in out.iterdir()}

    whole, joined, alone = tables(*logs), tables(first, second), tables(other)
    assert whole.keys() == joined.keys() == alone.keys()
    for name, table in whole.items():
        of_log = table.pop("log")
        for log, wanted in ((f"{first} and 1 more part", joined), (other, alone)):
            got = table[of_log == log].reset_index(drop=True)
            assert list(got) == list(wanted[name])
            assert got.to_csv() == wanted[name].to_csv(), name
        assert len(table) == len(joined[name]) + len(alone[name])


def test_parts_are_printed_as_one_log(logs: list[str], tmp_path: Path) -> None:
    second, _, first = logs
    joined = tmp_path / "joined.log"
    printed("cat", second, first, "-o", joined)
    asked = json_reports("summary", first, second)
    assert [of["rows"] for of in json_reports("summary", joined)][1:] == [
        of["rows"] for of in asked
    ][1:]
    assert printed("cat", joined, "--expand") == printed("cat", *logs[::2], "--expand")


LENIENT = [
    "summary LOG", "stats LOG", "requests LOG", "tree LOG", "cat LOG --expand", "page LOG -o OUT",
    "diff LOG LOG", "compare LOG LOG", "values LOG", "memory LOG", "ops LOG",
    "roofline LOG --machine PROBE", "schedule LOG --phase prefill",
    "to-perfetto LOG --format json -o OUT", "to-parquet LOG --csv -o OUT",
    *(f"{name} LOG -o OUT" for name in COMMANDS if name.startswith("to-") and name != "to-onnx"),
]  # fmt: skip


@pytest.mark.parametrize("line", LENIENT)
def test_a_damaged_line_costs_only_that_line(line: str, tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    whole = (FIXTURES / "every-event.log").read_bytes()
    log.write_bytes(whole.replace(b'"event":"note"', b'"event":"not"', 1))
    out = tmp_path / "out"
    places = {"LOG": log, "OUT": out, "PROBE": FIXTURES / "probe.json"}
    words = [places.get(word, word) for word in line.split()]
    refused = instr_here(*words)
    assert refused.returncode == 2
    assert "a.log:" in refused.stderr
    assert not out.exists()
    done = instr_here(*words, "--lenient")
    assert done.returncode == 0, done.stderr
    output = done.stdout + done.stderr + (out.read_text(errors="replace") if out.is_file() else "")
    assert "1 damaged line was skipped" in " ".join(output.split())


def test_every_command_that_reads_logs_is_lenient() -> None:
    """Except `check`, which reports what is damaged, and `live`, which skips it without being
    asked. `live` and `view` serve until Ctrl-C, and `to-onnx` needs strides, which this log does
    not have; `collect` goes on with the other logs (tests/fleet), `capacity` needs the log of a
    server (tests/scheduling), and `merge` those of a client and its servers (test_merge.py)."""
    found = set()
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        arguments = [of for of in command.params if isinstance(of, click.Argument)]
        if any("LOG" in (of.metavar or "") for of in arguments) or name == "diff":
            found.add(name)
            never = name in ("check", "live")
            assert never != any("--lenient" in of.opts for of in command.params)
    others = {"capacity", "check", "collect", "live", "merge", "view", "to-onnx"}
    assert found - others == {line.split()[0] for line in LENIENT}
