"""The JSON trace of a log and its Perfetto trace, both read by Perfetto's trace_processor, have the
same requests, waits, phases and tokens, at the same times and with the same arguments."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings

from llamacpp_instr.converters.exports.chrome import write_chrome
from llamacpp_instr.converters.exports.perfetto import Options, write_perfetto
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.reader import read_events
from tests.kit.made_log import encode, make_log
from tests.kit.native_kit import DEMO, ROOT
from tests.kit.perfetto_recordings import device_log
from tests.kit.served_log import served
from tests.kit.strategies import logs
from tests.kit.trace_processor import PROBLEMS, ask

pytestmark = pytest.mark.native

FIXTURES = Path(__file__).parents[2] / "fixtures"
DRAWN = ("request", "wait", "phase", "token")
SLICES = (
    "select s.id, s.ts, s.dur, s.name, s.category, substr(a.key, instr(a.key, '.') + 1),"
    " coalesce(a.string_value, a.int_value, a.real_value) from slice s left join args a"
    " on a.arg_set_id = s.arg_set_id"
)
LANES = "select s.name from slice s where s.category = 'request' and s.depth <> 0"


def drawn(trace: Path, start: int) -> Counter[Any]:
    """The slices of DRAWN, and the wait in each op; times count from `start` on the log's clock."""
    rows, nested, problems = ask(trace, SLICES, LANES, PROBLEMS)
    assert problems == []
    assert nested == [], "requests that overlap have lanes"
    whole: dict[int, tuple[Any, ...]] = {}
    args: defaultdict[int, dict[str, Any]] = defaultdict(dict)
    for number, ts, dur, name, category, key, value in rows:
        whole[number] = ts - start, dur, name, category
        if key is not None:
            args[number][key] = value
    found = Counter[Any]()
    for number, (*where, category) in whole.items():
        if category == "token":
            found[(*where, category)] += 1
        elif category in DRAWN:
            found[(*where, category, *sorted(args[number].items()))] += 1
        elif "wait_ns" in args[number]:
            found[(*where, "wait_ns", args[number]["wait_ns"])] += 1
    return found


def agree(log: Path, folder: Path) -> Counter[str]:
    """Compares both traces of a log; returns how many slices of each kind they have."""
    events = [event for _, event in read_events(log)]
    start = events[0].t
    traces = folder / "a.json", folder / "a.pftrace"
    with traces[0].open("wb") as file:
        write_chrome(read_events(log), file)
    with traces[1].open("wb") as file:
        write_perfetto(read_events(log), file, Options())
    json, perfetto = drawn(traces[0], 0), drawn(traces[1], start)
    assert json == perfetto
    kinds = Counter[str]()
    for row, n in json.items():
        kinds[row[2] if row[2] == "synchronize" else row[3]] += n
    assert kinds["synchronize"] == sum(isinstance(event, s.Sync) for event in events)
    of_threads = [e for e in events if isinstance(e, s.Ops) and e.wait is not None]
    assert kinds["wait_ns"] == sum(len(of.dur) for of in of_threads)
    assert kinds["wait"] == sum(len(of.dur) for of in of_threads if of.gap is not None)
    return kinds


@given(events=logs())
@settings(max_examples=4)
def test_traces_of_any_log_agree(
    events: list[s.Event], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / "a.log").write_bytes(encode(events))
    agree(folder / "a.log", folder)


def test_traces_of_threads_agree(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(encode(make_log(Random(8).randint, n_contexts=2, level="verbose")))
    kinds = agree(log, tmp_path)
    assert min(kinds[of] for of in ("request", "wait", "wait_ns", "phase", "token")) > 0


def test_traces_of_requests_that_fail_warm_up_or_overlap_agree(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(encode(served(Random(5))))
    assert agree(log, tmp_path)["request"] > 50


def test_traces_of_a_server_agree(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    command = [sys.executable, "-m", "tests.kit.batch_server", str(DEMO), str(log)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    kinds = agree(log, tmp_path)
    assert kinds["request"] == 24
    assert kinds["token"] > kinds["request"], "of several sequences, below one step"


@pytest.mark.parametrize("name", ["vulkan.log.gz", "vulkan-mixed.log.gz", "every-event.log"])
def test_traces_of_waits_for_a_device_agree(name: str, tmp_path: Path) -> None:
    assert agree(FIXTURES / name, tmp_path)["synchronize"] > 0


def test_traces_of_a_device_s_log_agree(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(encode(device_log()))
    assert agree(log, tmp_path)["synchronize"] > 0


def test_traces_of_an_unclosed_log_agree(tmp_path: Path) -> None:
    """Its last step ends with the last compute, which ended after the last event began."""
    events = make_log(Random(8).randint, n_contexts=1, level="detailed")
    last = max(i for i, event in enumerate(events) if isinstance(event, s.Compute))
    log = tmp_path / "a.log"
    log.write_bytes(encode(events[: last + 1]))
    assert agree(log, tmp_path)["phase"] > 0
