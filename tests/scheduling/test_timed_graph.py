"""What a recording says about its times, which steps it has, and what its kernels are called."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.scheduling.sources import Recorded, recorded_graph
from llamacpp_instr.converters.scheduling.timed_graph import (
    Axes,
    TimedGraph,
    kind_of,
    leaf_below,
    timed_graph,
    written_cache,
)
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.session import Session, load_session
from tests.kit.steady_log import steady_log, write

EVERY_EVENT = Path(__file__).parent.parent / "fixtures" / "every-event.log"
LINES = EVERY_EVENT.read_text()


def changed(tmp_path: Path, *changes: tuple[str, str]) -> Session:
    text = LINES
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    (tmp_path / "a.log").write_text(text)
    return load_session(tmp_path / "a.log")


def recorded(session: Session, **chosen: Any) -> Recorded:
    return recorded_graph(session, **{"phase": "prefill", **chosen})


def test_the_times_of_one_compute_are_those_of_the_log() -> None:
    found = recorded(load_session(EVERY_EVENT))
    timed = found.timed
    assert timed.ns.tolist() == [900, 1140, 24_000]
    assert [column.tolist() for column in found.quartiles] == [[900, 1140, 24_000]] * 2
    assert timed.bytes.tolist() == [1540, 3072, 133_120]
    # a row of the embedding, the norm's weight, the matrix
    assert timed.load.tolist() == [512, 1024, 131_072]
    assert timed.chosen == (0, 1, 2)
    assert timed.cells == {}
    assert timed.inside == [[0], [1, 2], [3]]
    assert timed.kernel_of == {0: 0, 1: 1, 2: 1, 3: 2}
    assert timed.names == ["embd", "attn_norm-0", "Qcur-0"]
    titles = [op.title for op in timed.timeline.ops]
    assert titles == ["GET_ROWS token_embd", "RMS_NORM+MUL attn_norm", "MUL_MAT attn_q"]
    rest = 30_000 - 26_040
    assert (found.rest_ns, found.n_computes, found.n_threads) == (rest, 1, 2)
    assert found.notes[:3] == [
        "Times are those of one compute of 1 prefill, recorded with 2 threads.",
        "A task's time is that of thread 0, which shares a kernel with 1 more: one engine here is"
        " as fast as all threads of the recording together.",
        "A compute took 4.0 µs more between its kernels, 13.2 % of the compute; no task includes"
        " that.",
    ]


def test_one_thread_and_no_rest_need_no_note(tmp_path: Path) -> None:
    session = changed(
        tmp_path, ('"n_threads":2,"apply"', '"n_threads":1,"apply"'), ('"dur":30000', '"dur":26040')
    )
    assert recorded(session).notes[:1] == [
        "Times are those of one compute of 1 prefill, recorded with 1 thread."
    ]
    notes = " ".join(recorded(session).notes)
    assert "shares a kernel" not in notes
    assert "between its kernels" not in notes


def test_what_kernels_took_beyond_their_compute_is_no_rest(tmp_path: Path) -> None:
    found = recorded(changed(tmp_path, ('"dur":30000', '"dur":20000')))
    assert found.rest_ns == 0


def test_a_kernel_of_no_time_takes_one_nanosecond(tmp_path: Path) -> None:
    found = recorded(changed(tmp_path, ('"dur":[900,1140,24000]', '"dur":[0,1,24000]')))
    assert found.timed.ns.tolist() == [1, 1, 24_000]


def test_medians_of_many_computes_say_how_far_they_spread(tmp_path: Path) -> None:
    events = steady_log(1)
    for event in events:
        # of three computes one takes half as long, one as long, and one twice as long
        if isinstance(event, s.Ops):
            factor = (1, 2, 4)[event.compute % 3]
            event.dur = [dur // 2 * factor for dur in event.dur]
    found = recorded_graph(load_session(write(tmp_path / "a.log", events)))
    assert found.n_computes == 120
    first = next(event for event in events if isinstance(event, s.Ops) and event.compute == 1)
    assert found.timed.ns.tolist() == first.dur
    assert [column.tolist() for column in found.quartiles] == [
        [dur // 2 for dur in first.dur], [dur * 2 for dur in first.dur],
    ]  # fmt: skip
    assert found.notes[0] == (
        "Times are medians of 120 computes of 120 decodes, recorded with 1 thread; the middle half"
        " of a kernel's times spans 150 % of its median on average."
    )


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"phase": None}, "no decode to schedule; it has prefill: choose with --phase"),
        ({"phase": "encode"}, "no encode to schedule; it has prefill: choose with --phase"),
        ({"step": 1}, "no step 1; its steps are 0 to 0"),
        ({"layers": (3, 4)}, "no layer 3 to schedule; its layers are 0 to 0"),
    ],
)
def test_what_a_recording_lacks_is_named(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"every-event.log: {message}$"):
        recorded(load_session(EVERY_EVENT), **chosen)


def test_a_step_that_failed_is_none(tmp_path: Path) -> None:
    session = changed(tmp_path, ('"status":0,"n_ubatch"', '"status":1,"n_ubatch"'))
    with pytest.raises(UsageError, match="no step 0; it has no steps"):
        recorded(session, step=0)
    with pytest.raises(UsageError, match="no prefill to schedule; no step counts"):
        recorded(session)


def test_steps_have_a_first_and_a_last(tmp_path: Path) -> None:
    session = load_session(write(tmp_path / "a.log", steady_log(1)))
    with pytest.raises(UsageError, match="no step 120; its steps are 0 to 119"):
        recorded_graph(session, step=120)
    assert recorded_graph(session, step=119).n_computes == 1


@pytest.mark.parametrize(
    ("layers", "chosen"),
    [((0, 0), (1, 2)), ((-1, -1), (0,)), ((-1, 0), (0, 1, 2)), ((0, 5), (1, 2))],
)
def test_layers_are_chosen_with_both_ends(layers: tuple[int, int], chosen: tuple[int, ...]) -> None:
    assert recorded(load_session(EVERY_EVENT), layers=layers).timed.chosen == chosen


def test_a_graph_without_layers_says_so() -> None:
    session = load_session(EVERY_EVENT)
    timed = recorded(session).timed
    nodes = timed.nodes
    nodes.layer = [-1] * 4
    work = session.work(session.ops[0]).total([0])
    with pytest.raises(UsageError, match="x: no layer 0 to schedule; its graph has no layers"):
        timed_graph(timed.graph, timed.plan, timed.ns, work, (0, 1), "x")


@pytest.mark.parametrize(
    ("op", "kind"),
    [("MUL_MAT", "matrix"), ("FLASH_ATTN_EXT", "matrix"), ("SET_ROWS", "memory"), ("CPY", "memory"),
     ("ADD", "vector"), ("RMS_NORM", "vector")],
)  # fmt: skip
def test_an_op_is_of_a_kind(op: str, kind: str) -> None:
    assert kind_of(op) == kind


def nodes_of(*rows: tuple[str, list[int], int]) -> Any:
    ops, sources, runs = zip(*rows, strict=True)
    return SimpleNamespace(op=ops, src=sources, exec=runs)


def test_views_are_looked_through() -> None:
    nodes = nodes_of(
        ("MUL_MAT", [-1, -2], 1), ("VIEW", [0], 0), ("RESHAPE", [1], 0), ("VIEW", [-3], 0),
        ("VIEW", [4], 0), ("VIEW", [], 0),
    )  # fmt: skip
    assert [leaf_below(nodes, of) for of in (-7, 0, 1, 2, 3, 4, 5)] == [-7, 0, 0, 0, -3, 4, 5]


@pytest.mark.parametrize(
    ("op", "n_sources", "which"),
    [("SET_ROWS", 3, 2), ("SET_ROWS", 2, None), ("CPY", 2, 1), ("CPY", 1, None), ("SET", 2, 0),
     ("ACC", 1, 0), ("ADD", 2, None)],
)  # fmt: skip
def test_some_ops_write_to_one_of_their_sources(op: str, n_sources: int, which: int | None) -> None:
    assert written_cache(nodes_of((op, [-1] * n_sources, 1)), 0) == which


def test_kernels_of_one_name_have_their_op_and_a_number() -> None:
    timed = recorded(load_session(EVERY_EVENT)).timed
    timed.nodes.name[:] = ["x", "norm", "x", "x"]
    fresh = TimedGraph(timed.graph, timed.plan, timed.timeline, timed.ns, timed.bytes, timed.load,
                       timed.chosen, timed.cells)  # fmt: skip
    assert fresh.names == ["x GET_ROWS", "x RMS_NORM", "x MUL_MAT"]
    timed.nodes.op[3] = "GET_ROWS"
    timed.nodes.name[2] = ""
    fresh = TimedGraph(timed.graph, timed.plan, timed.timeline, timed.ns, timed.bytes, timed.load,
                       timed.chosen, timed.cells)  # fmt: skip
    assert fresh.names == ["x GET_ROWS", "node_2", "x GET_ROWS 2"]


def test_what_a_kernel_needs_of_those_before_it() -> None:
    axes = Axes(recorded(load_session(EVERY_EVENT)).timed)
    assert [[tuple(need) for need in axes.needs(kernel, None)] for kernel in range(3)] == [
        [], [(0, 0, None)], [(1, 1, None)],
    ]  # fmt: skip
