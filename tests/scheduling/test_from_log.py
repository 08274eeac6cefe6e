"""The tasks of a log have its own times and its graph's dependencies; wrong logs are one line."""

from __future__ import annotations

import copy
from pathlib import Path

import msgspec
import numpy as np
import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.scheduling.sources import recorded_graph
from llamacpp_instr.converters.scheduling.split import Divided, divide
from llamacpp_instr.converters.scheduling.tasks import (
    beside,
    equal_engines,
    several_sequences,
    several_tokens,
)
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.graph.timeline import plan_timeline
from llamacpp_instr.log.session import Session, load_session
from llamacpp_instr.log.steps import counted_steps
from tests.kit.computes import one_by_one
from tests.kit.made_log import encode
from tests.kit.schedule_kit import edges
from tests.kit.steady_log import steady_log, write

FIXTURES = Path(__file__).parent.parent / "fixtures"


@pytest.fixture(scope="module")
def session() -> Session:
    return load_session(FIXTURES / "demo-verbose.log")


def whole(session: Session, layers: tuple[int, int] | None = None) -> Divided:
    return divide(recorded_graph(session, layers=layers).timed, "none", equal_engines(1))


def test_the_times_are_the_medians_of_the_counted_decodes(tmp_path: Path) -> None:
    session = load_session(write(tmp_path / "a.log", steady_log(3, noise=0.2)))
    steps, _ = counted_steps(session)
    counted = set(steps["step"].tolist())
    computes = zip(session.computes["compute"], session.computes["step"], strict=True)
    inside = {compute for compute, step in computes if step in counted}
    durations = [ops.dur for ops in one_by_one(session.ops) if ops.compute in inside]
    assert len(durations) == len(counted) > 10
    expected = np.median(durations, axis=0).round()
    tasks = whole(session).tasks
    assert tasks.ns.tolist() == expected.tolist()
    found = recorded_graph(session)
    low, high = found.quartiles
    assert (low <= found.timed.ns).all()
    assert (found.timed.ns <= high).all()
    assert (low < high).any()


def test_one_step_has_its_own_times(session: Session) -> None:
    steps = session.steps.rows(session.steps["phase"] == "decode")["step"].tolist()
    for step in steps[:3]:
        (compute,) = session.computes.rows(session.computes["step"] == step)["compute"].tolist()
        (ops,) = [of for of in one_by_one(session.ops) if of.compute == compute and of.thread == 0]
        found = recorded_graph(session, step=step)
        assert found.timed.ns.tolist() == np.maximum(ops.dur, 1).tolist()


def test_what_no_task_has_is_named(session: Session) -> None:
    """For one compute: the time between its kernels, and its share."""
    steps = session.steps.rows(session.steps["phase"] == "decode")["step"].tolist()
    for step in steps[:3]:
        (row,) = np.flatnonzero(session.computes["step"] == step)
        compute, dur = (int(session.computes[name][row]) for name in ("compute", "dur"))
        (ops,) = [of for of in one_by_one(session.ops) if of.compute == compute and of.thread == 0]
        rest = dur - int(ops.dur.sum())
        note = (
            f"A compute took {rest / 1000:.1f} µs more between its kernels,"
            f" {100 * rest / dur:.1f} % of the compute; no task includes that."
        )
        assert note in recorded_graph(session, step=step).notes


def test_the_edges_are_the_graphs_and_those_through_the_cache(session: Session) -> None:
    timed = recorded_graph(session).timed
    found = edges(whole(session).tasks)
    of_graph = set(plan_timeline(timed.graph, timed.plan).edges)
    assert of_graph < found
    titles = [op.title for op in timed.timeline.ops]
    added = {(titles[a], titles[b]) for a, b in found - of_graph}
    assert added == {
        ("SET_ROWS cache_k", "FLASH_ATTN_EXT"),
        ("SET_ROWS cache_v", "FLASH_ATTN_EXT"),
    }
    writers = [b for a, b in sorted(found - of_graph)]
    assert len(writers) == 2 * sum(title == "FLASH_ATTN_EXT" for title in titles)


def test_layers_choose_tasks_and_drop_the_edges_of_others(session: Session) -> None:
    everything, of_one = whole(session), whole(session, (1, 1))
    chosen = [i for i, label in enumerate(everything.tasks.labels) if label.layer == 1]
    assert of_one.kernel == chosen
    assert {label.layer for label in of_one.tasks.labels} == {1}
    number = {task: i for i, task in enumerate(chosen)}
    assert edges(of_one.tasks) == {
        (number[a], number[b]) for a, b in edges(everything.tasks) if {a, b} <= number.keys()
    }


def test_loads_are_the_weights_and_the_cells_that_are_read(session: Session) -> None:
    timed = recorded_graph(session).timed
    tasks = whole(session).tasks
    assert (tasks.load <= tasks.bytes).all()
    size = {tensor.name: tensor.bytes for tensor in session.tensors}
    product = [label.name for label in tasks.labels].index("ffn_out-1")
    assert tasks.load[product] == size["blk.1.ffn_down.weight"]
    (attention, *_) = timed.cells
    cell = session.kernels(timed_plan(session)).attention[attention].cell_bytes
    assert tasks.load[attention] == timed.cells[attention] * cell
    lookup = [label.op for label in tasks.labels].index("GET_ROWS")
    assert 0 < tasks.load[lookup] < size["token_embd.weight"] / 100


def timed_plan(session: Session) -> int:
    plan = recorded_graph(session).timed.plan
    return next(number for number, of in session.plans.items() if of is plan)


def test_tokens_follow_each_other_and_sequences_do_not(session: Session) -> None:
    one = whole(session, (0, 0)).tasks
    n = len(one)
    tasks = several_sequences(several_tokens(one, 3), 2)
    assert len(tasks) == 6 * n
    assert tasks.copy.tolist() == np.repeat(np.arange(6), n).tolist()
    found = edges(tasks)
    roots = [i for i in range(n) if one.first[i] == one.first[i + 1]]
    ends = sorted(set(range(n)) - set(one.sources.tolist()))
    for copy_ in range(6):
        inside = {(a - copy_ * n, b - copy_ * n) for a, b in found if a // n == b // n == copy_}
        assert inside == edges(one)
        before = {(a % n, b % n) for a, b in found if a // n != b // n and b // n == copy_}
        assert before == ({(a, b) for a in ends for b in roots} if copy_ % 3 else set())
    assert all(b // n - a // n in (0, 1) for a, b in found)
    both = beside(tasks, one, "prefill")
    assert edges(both) == found | {(a + 6 * n, b + 6 * n) for a, b in edges(one)}
    assert both.labels[both.label[-1]].name == f"prefill {one.labels[one.label[-1]].name}"
    assert len(set(both.copy.tolist())) == 7


def with_start(events: list[s.Event], **changed: object) -> bytes:
    events = copy.deepcopy(events)
    events[0] = msgspec.structs.replace(events[0], **changed)
    return encode(events)


def test_logs_without_true_times_are_refused(tmp_path: Path) -> None:
    events = steady_log(1)
    log = tmp_path / "a.log"
    log.write_bytes(with_start(events, perturbed=True))
    with pytest.raises(UsageError, match=r"a\.log: .*--stats or by the debugger"):
        recorded_graph(load_session(log))
    without = [event for event in events if not isinstance(event, s.Ops | s.Plan)]
    log.write_bytes(with_start(without, level="minimal"))
    with pytest.raises(UsageError, match=r"a\.log: no ops at level minimal"):
        recorded_graph(load_session(log))
    with pytest.raises(
        UsageError, match=r"vulkan-mixed\.log\.gz: .*Vulkan.* ran part of the graph"
    ):
        recorded_graph(load_session(FIXTURES / "vulkan-mixed.log.gz"))
