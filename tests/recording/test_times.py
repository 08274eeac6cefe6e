"""Times in a log lie within what the caller's own clock measured around them."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import pytest

from llamacpp_instr.log.check import check_log
from tests.conftest import read_events
from tests.kit.native_kit import DEMO
from tests.kit.programs import native_program

pytestmark = pytest.mark.native
Span = tuple[int, int]
PHASES = ("prepare", "build", "alloc", "inputs", "recorder", "compute", "readback", "sample")
CLOSE = 50_000
"""nanoseconds that the counter's time may differ from the clock's"""


@pytest.fixture(scope="module")
def decodes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Span]]]:
    """A log, and for each decode when it and the waits in its phases began and ended."""
    folder = tmp_path_factory.mktemp("phases")
    program, log = native_program("phases", folder, flags=("-ldl",)), folder / "a.log"
    done = subprocess.run([program, DEMO, log], check=True, capture_output=True, text=True)
    assert list(check_log(log)) == []
    spans = []
    for line in done.stdout.splitlines():
        numbers = [int(word) for word in line.split()]
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        spans.append(dict(zip(("decode", *PHASES), pairs, strict=True)))
    return log, spans


def in_order(*times: int) -> bool:
    return all(a <= b + CLOSE for a, b in pairwise(times))


def length(span: Span) -> int:
    return span[1] - span[0]


def test_each_phase_has_its_own_time(decodes: tuple[Path, list[dict[str, Span]]]) -> None:
    log, spans = decodes
    names = ("step_begin", "compute", "step_end", "token", "kv")
    events = zip(spans, *(read_events(log, name) for name in names), strict=True)
    reused = 0
    for of, begin, compute, end, token, kv in events:
        decode, start = of["decode"], compute["t"] + compute["start"]
        assert in_order(decode[0], begin["t"], of["prepare"][0])
        assert in_order(of["prepare"][1], begin["t"] + end["prepare"], compute["t"])
        assert end["prepare"] >= length(of["prepare"]) - CLOSE
        # each lap ends before the next one's wait
        at = compute["t"] + compute["apply"]
        assert compute["apply"] >= kv["t"] - compute["t"] - end["recorder"] - CLOSE
        reused += compute["reused"]
        for phase in ("inputs",) if compute["reused"] else ("build", "alloc", "inputs"):
            assert in_order(at, of[phase][0]), phase
            assert compute[phase] >= length(of[phase]) - CLOSE, phase
            at += compute[phase]
        assert in_order(at, start)
        assert in_order(of["inputs"][1], start, of["compute"][0])
        if not compute["reused"]:
            assert in_order(at, of["recorder"][0], of["recorder"][1], start)
        computed = start + compute["dur"]
        assert in_order(of["compute"][1], computed, of["readback"][0])
        assert end["readback"] >= length(of["readback"]) - CLOSE
        assert in_order(of["readback"][1], end["t"], decode[1])
        waited = sum(length(of[phase]) for phase in PHASES if phase not in ("recorder", "sample"))
        assert length(of["recorder"]) - CLOSE <= end["recorder"] <= length(decode) - waited
        parts = sum(compute.get(phase, 0) for phase in ("apply", "build", "alloc", "inputs", "dur"))
        whole = end["prepare"] + parts + end["readback"] + end["recorder"]
        assert whole <= length(decode) + CLOSE, "nothing is counted twice"
        assert in_order(decode[1], token["t"], of["sample"][0])
        assert in_order(of["sample"][1], token["t"] + token["dur"])
    assert reused == 2
    for (_, after), token in zip(pairwise(spans), read_events(log, "token"), strict=False):
        assert in_order(token["t"] + token["dur"], after["decode"][0])


def test_kernels_run_inside_of_the_compute(decodes: tuple[Path, list[dict[str, Span]]]) -> None:
    log, spans = decodes
    computes = {compute["compute"]: compute for compute in read_events(log, "compute")}
    waits = 0
    for ops in read_events(log, "ops"):
        compute, of = computes[ops["compute"]], spans[ops["compute"]]
        end = ops["t"] + sum(ops["dur"]) + sum(ops.get("gap", [])) + ops.get("tail", 0)
        finished = compute["t"] + compute["start"] + compute["dur"]
        assert in_order(of["compute"][1], ops["t"], end, finished)
        assert len(ops["wait"]) == len(ops["dur"])
        assert all(0 <= wait <= dur for wait, dur in zip(ops["wait"], ops["dur"], strict=True))
        waits += sum(wait > 0 for wait in ops["wait"])
    assert waits > 0
    assert {ops.get("thread", 0) for ops in read_events(log, "ops")} == {0, 1}
    first = {ops["compute"]: ops["t"] for ops in read_events(log, "ops") if "thread" not in ops}
    for layers in read_events(log, "layers"):
        assert layers["t"] == first[layers["compute"]]
    assert sorted(first) == sorted(computes)


def test_no_kernel_begins_before_every_thread_has_ended_the_one_before(
    decodes: tuple[Path, list[dict[str, Span]]],
) -> None:
    """ggml's threads wait for each other after each kernel, and after the last."""
    log, _ = decodes
    runs: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for ops in read_events(log, "ops"):
        runs[ops["compute"]].append(ops)
    for threads in runs.values():
        begins, ends = [], []
        for ops in threads:
            gaps = [ops["t"], *ops.get("gap", [0] * len(ops["dur"]))[1:], ops.get("tail", 0)]
            at = list(accumulate(chain.from_iterable(zip(gaps, [*ops["dur"], 0], strict=True))))
            begins.append(at[:-2:2])
            ends.append(at[1:-1:2])
            if "thread" not in ops:
                over = at[-1]  # others do not say when the last barrier ended
        assert len(threads) == 2
        after = [*list(zip(*begins, strict=True))[1:], (over,)]
        for ended, begun in zip(zip(*ends, strict=True), after, strict=True):
            assert max(ended) <= min(begun) + CLOSE


def test_the_totals_are_the_sums(decodes: tuple[Path, list[dict[str, Span]]]) -> None:
    log, spans = decodes
    (end,) = read_events(log, "session_end")
    begins, ends = read_events(log, "step_begin"), read_events(log, "step_end")
    steps = sum(b["t"] - a["t"] for a, b in zip(begins, ends, strict=True))
    assert steps - CLOSE <= end["decode_ns"] <= sum(length(of["decode"]) for of in spans)
    recorder = sum(step["recorder"] for step in ends)
    # and what its own thread took, which ran meanwhile
    whole = end["t"] - read_events(log, "session_start")[0]["t"]
    assert recorder < end["overhead_ns"] < recorder + whole
