"""Sessions over several machines in traces: a process for each machine with its commands and
kernels, and arrows over the wire and back."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from llamacpp_instr.converters.exports.chrome import write_chrome
from llamacpp_instr.converters.exports.perfetto import Options
from llamacpp_instr.converters.exports.torch import write_torch
from llamacpp_instr.log.graph.timeline import Selection
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.schema import RPC_COMMANDS
from tests.kit.machines import HOSTS, Made, Wire, over_machines
from tests.kit.made_log import encode

BOUND = 7_000


@pytest.fixture
def made() -> Made:
    random = Random(2)
    wires = [Wire(0, random), Wire(1, random, (300_000, 500_000))]
    return over_machines(wires, [2_000_000, 1_000_000], n_steps=12)


@pytest.fixture(params=[True, False], ids=["merged", "client alone"])
def log(made: Made, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "session.log"
    path.write_bytes(encode(made.log(merged=request.param)))
    return path


def slices(rows: list[dict[str, int]], begin: str, *ends: str) -> Counter[tuple[Any, ...]]:
    """Name, start and duration of each command."""
    return Counter(
        (RPC_COMMANDS[row["command"]], row[begin], max(row.get(e, -1) for e in ends) - row[begin])
        for row in rows
    )


def test_chrome_has_them_too(made: Made, log: Path) -> None:
    merged = '"arrive"' in log.read_text()
    written = io.BytesIO()
    write_chrome(read_events(log), written)
    trace = json.loads(written.getvalue())
    events, start = trace["traceEvents"], trace["otherData"]["t0_monotonic_ns"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    names = [f"machine {host}" for host in HOSTS if merged]
    assert set(processes.values()) == {"session", *names}
    at = {
        e["tid"]: (processes[e["pid"]], e["args"]["name"])
        for e in events if e["name"] == "thread_name"
    }  # fmt: skip
    drawn = [e for e in events if e["ph"] == "X" and e["cat"] == "command"]

    def of(process: str, track: str) -> Counter[tuple[Any, ...]]:
        return Counter(
            (e["name"], start + round(e["ts"] * 1000), round(e["dur"] * 1000))
            for e in drawn if at[e["tid"]] == (process, track)
        )  # fmt: skip

    for wire, host in zip(made.wires, HOSTS, strict=True):
        mine = slices(wire.rows, "sent", "written", "answered")
        assert of("session", f"commands to {host}") == mine
        executed = slices(wire.rows, "started", "done") if merged else Counter()
        assert of(f"machine {host}", "commands") == executed
    flows = {
        kind: {e["id"]: e["ts"] for e in events if e["ph"] == kind and e["name"] != "run"}
        for kind in "sf"
    }
    n = sum(1 + ("answered" in row) for row in made.rows)
    assert len(flows["s"]) == len(flows["f"]) == (n if merged else 0)
    assert all(ts <= flows["f"][of] + BOUND / 1000 for of, ts in flows["s"].items())


def test_a_command_says_how_sure_its_times_are(log: Path) -> None:
    merged = '"arrive"' in log.read_text()
    written = io.BytesIO()
    write_chrome(read_events(log), written)
    commands = [
        e for e in json.loads(written.getvalue())["traceEvents"] if e.get("cat") == "command"
    ]
    bounds = {e["args"].get("uncertainty_ns") for e in commands}
    assert bounds == ({BOUND} if merged else {None})


def test_commands_of_other_steps_are_left_out(log: Path) -> None:
    written = io.BytesIO()
    write_chrome(read_events(log), written, Options(selection=Selection(steps=(3, 4))))
    events = json.loads(written.getvalue())["traceEvents"]
    steps = Counter(e["args"]["step"] for e in events if e.get("cat") == "command")
    assert set(steps) == {3, 4}


def test_torch_takes_such_a_log(log: Path, tmp_path: Path) -> None:
    write_torch(read_events(log), tmp_path)
    assert [*tmp_path.glob("*.json.gz")]
