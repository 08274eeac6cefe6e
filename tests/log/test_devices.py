"""The kernels of devices in a log: who may give them, when, and what `check` says if they do not
fit. `devices.log` is made by hand; the other logs are recordings (docs/explanation/devices.md)."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from llamacpp_instr.base.errors import LogError
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.devices import RUNS_KEPT
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.runs import find_runs
from llamacpp_instr.log.session import load_parts, load_session
from llamacpp_instr.log.steps import Account, counted_steps, untimed_splits
from tests.kit.device_log import with_devices
from tests.kit.log_readers import findings
from tests.kit.made_log import encode, make_log

FIXTURES = Path(__file__).parent.parent / "fixtures"
LOG = FIXTURES / "devices.log"
EVENTS = [event for _, event in read_events(LOG)]
COMPUTE_T, SUBMITTED, WAITED = 81_005_020_000, 81_005_020_900 + 1_100 + 2_000, 81_005_109_000


def place(kind: type[s.Event], number: int = 0) -> int:
    return [i for i, event in enumerate(EVENTS) if isinstance(event, kind)][number]


PLAN, OPS, DEVICE, SYNC = place(s.Plan, 1), place(s.Ops, 1), place(s.Device), place(s.Sync)


def counted(events: list[s.Event]) -> list[s.Event]:
    """With an end that fits."""
    end = events[-1]
    assert isinstance(end, s.SessionEnd)
    counts: dict[str, int] = {}
    for event in events[:-1]:
        counts[s.event_name(event)] = counts.get(s.event_name(event), 0) + 1
    return [*events[:-1], replace(end, events=counts, bytes=len(encode(events[:-1])))]


def found(path: Path, changes: dict[int, dict[str, Any] | None], *more: s.Event) -> list[str]:
    """The messages for the log with changed (None: left out) and more events before its end."""
    events = [
        replace(event, **(changes.get(i) or {}))
        for i, event in enumerate(EVENTS)
        if changes.get(i, {}) is not None
    ]
    events[-1:-1] = more
    return [message for _, message in findings(path, encode(counted(events)))]


@pytest.mark.parametrize(
    "name", ["devices.log", "vulkan-timed.log.gz", "vulkan-partly.log.gz", "blas.log.gz"]
)
def test_a_log_with_kernels_of_devices_is_clean(name: str) -> None:
    assert list(map(str, check_log(FIXTURES / name))) == []


def test_a_line_of_a_device_lies_between_submission_and_wait(path: Path) -> None:
    """Within the uncertainty of the device, here 40 ns, plus what two clocks may differ by."""
    slack = 40 + 1000
    assert found(path, {OPS: {"t": SUBMITTED - slack}}) == []
    early = ["ops: begins 1041 ns before split 1 of compute 0 was submitted"]
    assert found(path, {OPS: {"t": SUBMITTED - slack - 1}}) == early
    late = WAITED - 60_000 + slack
    assert found(path, {OPS: {"t": late}}) == []
    message = "the ops of split 1 of compute 0 end 1 ns after the wait"
    assert found(path, {OPS: {"t": late + 1}}) == [f"sync: {message}"]
    # even if the line comes after the wait
    ops, sync = EVENTS[OPS], EVENTS[SYNC]
    order = [*EVENTS[:OPS], sync, replace(ops, t=late + 1), *EVENTS[SYNC + 1 :]]
    assert [message for _, message in findings(path, encode(counted(order)))] == [f"ops: {message}"]
    assert found(path, {DEVICE: {"uncertainty": 41}, OPS: {"t": late + 1}}) == []


def test_a_line_has_the_nodes_of_its_split_once(path: Path) -> None:
    assert found(path, {OPS: {"split": 2}}) == [
        "ops: split 2, the graph has 2",
        "1 split of Vulkan0 came without ops, of 1 that it ran",
    ]
    (on_cpu, *_) = found(path, {OPS: {"split": 0}})
    assert on_cpu == "ops: of Vulkan0, but split 0 is of CPU"
    (outside, *_) = found(path, {PLAN: {"node": [0, 3, 4]}})
    assert outside == "ops: node 0, split 1 has the nodes 1..4"
    fewer = {PLAN: {"node": [1, 3], "n": [2, 1]}, OPS: {"dur": [30000, 25000]}}
    (few,) = found(path, fewer)
    assert few == "ops: plan 1 has 3 nodes of 4 to compute of split 1"
    # a device passes over a node without elements
    graph = EVENTS[place(s.Graph)]
    assert isinstance(graph, s.Graph)
    nodes = replace(graph.whole, bytes=[*graph.whole.bytes[:-1], 0])
    assert found(path, {**fewer, place(s.Graph): {"nodes": nodes}}) == []
    again = EVENTS[OPS]
    assert found(path, {}, again) == ["ops: split 1 of compute 0 was given before"]
    # where values are read, it is computed in pieces
    assert found(path, {0: {"perturbed": True}}, again) == []
    # thread 0 cannot also have computed them
    of_thread = place(s.Ops)
    plan = {"node": [0, 1, 3, 4], "n": [1, 2, 1, 1]}
    durations = {"dur": [900, 1, 1, 1]}
    layers = place(s.Layers)
    twice = found(path, {place(s.Plan): plan, of_thread: durations, layers: None})
    assert twice == ["ops: thread 0 also has kernels of split 1 of compute 0"]


def test_what_is_missing_is_named_at_the_end(path: Path) -> None:
    assert found(path, {OPS: None}) == ["1 split of Vulkan0 came without ops, of 1 that it ran"]
    # those in flight were dropped, come in the next part, or the device is not timed
    for end in ({"dropped_ops": 3}, {"reason": "rotated"}):
        messages = found(path, {OPS: None, len(EVENTS) - 1: end})
        assert not any("without ops" in message for message in messages)
    assert found(path, {OPS: None, DEVICE: None}) == []
    assert found(path, {DEVICE: None}) == ["ops: device Vulkan0 was never described"]


def test_what_belongs_to_threads_is_no_device_s(path: Path) -> None:
    for other in ({"thread": 1}, {"tail": 5}):
        assert "belong to threads" in " ".join(found(path, {OPS: other}))


def test_a_device_may_be_late_but_not_for_ever(path: Path) -> None:
    """It may name one of the last 64 computes, even after their step has ended."""
    made = make_log(Random(3).randint, n_contexts=1, level="detailed")
    for n in (1, RUNS_KEPT, RUNS_KEPT + 1):
        events = _many(n)
        path.write_bytes(encode(events))
        if n > RUNS_KEPT:
            with pytest.raises(LogError, match="compute 0 is over"):
                load_session(path)
        else:
            (of,) = load_session(path).device_ops
            assert of.compute.tolist() == [0]
    assert made


def _many(n: int) -> list[s.Event]:
    """`devices.log` with n steps, and the line of the first at the end."""
    begin, end = place(s.StepBegin), place(s.StepEnd)
    compute, sync = place(s.Compute), EVENTS[SYNC]
    events = EVENTS[: end + 1]
    for i in range(1, n):
        shift = i * 1_000_000
        events += [
            replace(EVENTS[begin], t=EVENTS[begin].t + shift, step=i, seq_pos=[3 * i], pos=3 * i),
            replace(EVENTS[compute], t=EVENTS[compute].t + shift, compute=i, step=i, reused=True),
            replace(EVENTS[end], t=EVENTS[end].t + shift, step=i),
        ]
    return [*events, EVENTS[DEVICE], EVENTS[PLAN], EVENTS[OPS], sync]


def test_a_line_may_come_in_the_next_part(tmp_path: Path) -> None:
    """Together the parts are the session; the later part alone lacks that compute."""
    start, *facts = EVENTS[: place(s.StepBegin)]
    assert isinstance(start, s.SessionStart)
    start = replace(start, producer=replace(start.producer, abi=2))
    graph = place(s.Graph)
    end = EVENTS[-1]
    first = [start, *EVENTS[1 : place(s.StepEnd) + 1], replace(end, reason="rotated")]
    second = [
        replace(start, part=2), *facts, EVENTS[DEVICE], replace(EVENTS[graph], graph=1),
        replace(EVENTS[PLAN], plan=7, graph=1), replace(EVENTS[OPS], plan=7), EVENTS[SYNC], end,
    ]  # fmt: skip
    paths = [tmp_path / "a.log", tmp_path / "a.part2.log"]
    for path, events in zip(paths, (first, second), strict=True):
        path.write_bytes(encode(counted(events)))
    (run,) = find_runs(paths)
    session = load_session(run)
    account = Account(session, counted_steps(session)[0])
    ((device, (ran, _)),) = account.devices.items()
    assert (device, ran.tolist()) == ("Vulkan0", [60_000])
    assert untimed_splits(session) == {}
    for path in paths:
        assert list(map(str, check_log(path))) == []
    assert load_session(paths[1]).device_ops == []


def test_parts_of_a_large_log_have_their_late_kernels(tmp_path: Path) -> None:
    """Each part has the kernels of its steps: their times add up to those of the whole log."""
    events = make_log(Random(8).randint, n_contexts=2, level="detailed")
    log = tmp_path / "a.log"
    log.write_bytes(encode(with_devices(events, Random(2))))
    session = load_session(log)
    whole = Account(session, counted_steps(session)[0])
    sums = {name: int(ran.sum()) for name, (ran, _) in whole.devices.items()}
    assert len(sums) == 2
    parts = list(load_parts(log, part_rows=100))
    assert len(parts) > 1
    for part in parts:
        for name, (ran, _) in Account(part, counted_steps(part)[0]).devices.items():
            sums[name] -= int(ran.sum())
    assert set(sums.values()) == {0}


def test_what_is_timed_follows_from_what_is_covered(tmp_path: Path) -> None:
    """Never from a backend's name: BLAS computes in thread 0, and a device may lack kernels."""
    blas = load_session(FIXTURES / "blas.log.gz")
    backends = {split.backend for graph in blas.graphs.values() for split in graph.splits}
    assert backends == {"CPU", "BLAS"}
    assert untimed_splits(blas) == {}
    for timed in (True, False):
        events = make_log(Random(4).randint, n_contexts=1, level="detailed")
        log = tmp_path / f"{timed}.log"
        log.write_bytes(encode(with_devices(events, Random(3), timed=timed)))
        session = load_session(log)
        graph_of = dict(session.computes.tuples("compute", "graph"))
        devices = {
            compute: {
                i
                for i, split in enumerate(session.graphs[graph].splits)
                if split.backend in ("Vulkan0", "CUDA0")
                and any(session.graphs[graph].whole.exec[split.start : split.end])
            }
            for compute, graph in graph_of.items()
        }
        expected = {} if timed else {compute: of for compute, of in devices.items() if of}
        assert untimed_splits(session) == expected
        assert any(devices.values())
