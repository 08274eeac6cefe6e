"""What statistics group by, and what threads and requests wait for, in logs written by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses.clock import compute_requests, concurrency
from llamacpp_instr.converters.analyses.stats import (
    BYS,
    NO_MARK,
    NONE_KNOWN,
    SEVERAL,
    compute_stats,
    layer_filter,
    op_filter,
    parse_by,
    step_values,
    thread_report,
    where_filter,
)
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.requests import Request, find_requests
from llamacpp_instr.log.session import Session, Table
from llamacpp_instr.log.waits import Waits, waits_of
from tests.kit.batched_log import PERIOD_NS, STEP_NS, Batch, batched_log
from tests.kit.reports import session_of

# --- keys and filters ---


@pytest.mark.parametrize("text", [*BYS, "layer,op", " op , phase"])
def test_one_key_or_two(text: str) -> None:
    assert list(parse_by(text)) == [name.strip() for name in text.split(",")]


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "give one of"), ("ops", "give one of"), ("op,op", "give one of"),
     ("op,layer,phase", "give one of"), ("op,", "give one of"),
     ("thread,op", "thread cannot be combined"), ("op,thread", "thread cannot be combined")],
)  # fmt: skip
def test_other_keys_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_by(text)


def test_a_filter_by_layer_includes_both_ends() -> None:
    kept = layer_filter(1, 3)
    assert kept.key == "layer"
    assert [layer for layer in range(-1, 6) if kept.accepts(layer)] == [1, 2, 3]
    assert [layer for layer in range(-2, 3) if layer_filter(-1, 0).accepts(layer)] == [-1, 0]


@pytest.mark.parametrize(
    ("text", "kept"),
    [("mul_mat", ["MUL_MAT f16"]), ("MUL", ["RMS_NORM+MUL", "MUL"]),
     (" rms_norm , add", ["ADD", "RMS_NORM+MUL"]), ("f16", [])],
)  # fmt: skip
def test_a_filter_by_op_knows_the_parts_of_a_fused_kernel(text: str, kept: list[str]) -> None:
    labels = ["MUL_MAT f16", "ADD", "RMS_NORM+MUL", "MUL"]
    assert [label for label in labels if op_filter(text).accepts(label)] == kept


def test_a_filter_by_a_pattern() -> None:
    kept = where_filter("tensor=blk.?.up*=1")
    assert kept.key == "tensor"
    assert kept.accepts("blk.1.up.weight=1")
    assert not kept.accepts("blk.12.up=1")
    assert not kept.accepts("BLK.1.up=1")
    assert where_filter("context=3").accepts(3)
    for text in ("tensor", "thread=1", "=x", "name=x"):
        with pytest.raises(UsageError, match="give COLUMN=PATTERN"):
            where_filter(text)


TWO = Batch([(0, 0, 4), (1, 0, 3)], sampled=[(0, 1, "a"), (1, 2, "b")])
ONE = Batch([(1, 3, 1)], sampled=[(1, 3, "c")])


def test_a_step_of_several_sequences_is_of_several(tmp_path: Path) -> None:
    unknown = Batch([(4, 9, 1)], status=1)
    session = session_of(tmp_path / "a.log", batched_log([TWO, ONE, unknown]))
    assert step_values(session, session.steps, "sequence") == [SEVERAL, 1, 4]
    assert step_values(session, session.steps, "request") == [SEVERAL, 2, NONE_KNOWN]
    assert step_values(session, session.steps, "context") == [0, 0, 0]
    assert step_values(session, session.steps, "phase")[:2] == ["prefill", "decode"]


def marked(path: Path, *marks: tuple[str, int, int | None]) -> Session:
    """Three steps of 500 ns, which begin at 0, 1000 and 2000; a mark has a start and an end."""
    events = batched_log([Batch([(0, 0, 4)]), Batch([(0, 4, 1)]), Batch([(0, 5, 1)])])
    t = next(event.t for event in events if isinstance(event, s.StepBegin))
    for number, (name, begin, end) in enumerate(marks):
        events.append(s.Mark(t=t + begin, mark=number, name=name, phase="begin"))
        if end is not None:
            events.append(s.Mark(t=t + end, mark=number, name=name, phase="end"))
    return session_of(path, events)


@pytest.mark.parametrize(
    ("marks", "inner"),
    [
        ([], [NO_MARK] * 3),
        ([("a", 0, 1000)], ["a", NO_MARK, NO_MARK]),
        ([("a", 0, 1001)], ["a", "a", NO_MARK]),
        ([("a", 1, 2001)], [NO_MARK, "a", "a"]),
        ([("a", 0, None), ("b", 1000, 1100)], ["a", "b", "a"]),
        ([("a", 0, None), ("b", 10, None)], ["a", "b", "b"]),
        ([("b", 500, 1500), ("a", 0, 2500)], ["a", "b", "a"]),
        ([("a", 0, 0), ("b", 1000, 1000)], [NO_MARK] * 3),
    ],
)  # fmt: skip
def test_the_mark_of_a_step_is_the_innermost_when_it_begins(
    marks: list[tuple[str, int, int | None]], inner: list[str], tmp_path: Path
) -> None:
    session = marked(tmp_path / "a.log", *marks)
    assert step_values(session, session.steps, "mark") == inner


def test_a_filter_of_steps_leaves_the_others_out(tmp_path: Path) -> None:
    session = session_of(tmp_path / "a.log", batched_log([TWO, ONE, ONE]))
    (report,) = compute_stats(session, "phase", filters=[where_filter("sequence=1")])
    assert [row[:3] for row in report.rows] == [["decode", 2, 2 * STEP_NS]]
    with pytest.raises(UsageError, match="the filters leave nothing; "):
        compute_stats(session, "phase", filters=[where_filter("sequence=9")])
    with pytest.raises(UsageError, match="no encode step to count; the log has 3 steps"):
        compute_stats(session, "phase", phase="encode")


# --- threads ---


def threads(*rows: tuple[int, int, int, int, int]) -> Table:
    """Rows of `Session.threads`: compute, thread, kernels, busy and waiting ns."""
    names = ("compute", "thread", "kernels", "busy", "waiting")
    columns = np.array(rows, np.int64).reshape(-1, len(names)).T
    return Table(dict(zip(names, columns, strict=True)))


def test_threads_work_and_wait() -> None:
    report = thread_report(
        threads((0, 1, 2, 27, 10), (0, 0, 2, 90, 0), (1, 0, 1, 0, 7), (1, 1, 1, 20, 10))
    )
    assert report.rows == [
        [0, 3, 90, 7, 7 / 97], [1, 3, 47, 20, 20 / 67],
    ]  # fmt: skip
    # the busiest took 90 and 20, the mean is (90 + 27) / 2 and (0 + 20) / 2
    longest, mean = 110, 68.5
    assert report.figures == {
        "imbalance": (longest / mean, "ratio"),
        "busiest thread beyond the mean one": (longest - mean, "ns"),
    }
    assert report.notes[0] == "Waiting is time in barriers, inside kernels and between them."
    assert report.notes[1].startswith(f"Imbalance {longest / mean:.3f}: ")


def test_one_thread_has_no_imbalance() -> None:
    report = thread_report(threads((0, 0, 1, 0, 5)))
    assert report.rows == [[0, 1, 0, 5, 1]]
    assert (len(report.notes), report.figures) == (1, {})
    idle = thread_report(threads((0, 0, 1, 0, 0), (0, 1, 1, 0, 0)))
    assert [row[-1] for row in idle.rows] == [None, None]
    assert idle.figures == {}
    nothing = thread_report(threads())
    assert (nothing.rows, nothing.notes) == ([], [])


# --- requests ---


def test_steps_for_others_are_waited_for(tmp_path: Path) -> None:
    """Sequence 0 has the first and the last step; those between serve sequence 1."""
    batches = [
        Batch([(0, 0, 4)], sampled=[(0, 1, "a")]), Batch([(1, 0, 3)], sampled=[(1, 2, "b")]),
        Batch([(1, 3, 1)], sampled=[(1, 3, "c")]), Batch([(0, 4, 1)], sampled=[(0, 4, "d")]),
    ]  # fmt: skip
    session = session_of(tmp_path / "a.log", batched_log(batches))
    steps, requests = find_requests(session)
    sampled = 10 + 9
    first, second = waits_of(requests, steps)
    gap = PERIOD_NS - STEP_NS
    assert first == Waits(0, STEP_NS, STEP_NS, 2 * STEP_NS, 3 * gap + sampled)
    assert second == Waits(0, STEP_NS, STEP_NS, 0, gap + sampled)
    assert concurrency(requests) == (
        pytest.approx((4 * PERIOD_NS + 2 * PERIOD_NS - 2 * (gap - sampled)) /
                      (4 * PERIOD_NS - (gap - sampled))), 2,
    )  # fmt: skip
    assert first.longest == "sampling, application"
    _, _, shown = compute_requests(session, top=2)
    assert shown.title == "Requests, the slowest first"
    assert len(shown.notes) == 1


@pytest.mark.parametrize(
    ("waits", "longest"),
    [(Waits(2, 1, 1, 1, 1), "the queue"), (Waits(1, 2, 1, 1, 1), "its prompt"),
     (Waits(1, 1, 2, 1, 1), "its tokens"), (Waits(1, 1, 1, 2, 1), "other requests"),
     (Waits(1, 1, 1, 1, 2), "sampling, application"), (Waits(1, 1, 1, 1, 1), "the queue")],
)  # fmt: skip
def test_the_longest_wait_is_named(waits: Waits, longest: str) -> None:
    assert waits.longest == longest


def test_a_request_without_a_token_has_only_its_prompt() -> None:
    steps = Table({name: np.array(of) for name, of in {
        "begin": [10, 30], "end": [20, 45], "ctx": [0, 0], "step": [0, 1]}.items()})  # fmt: skip
    request = Request(0, 0, arrival=4, begin=10, end=50, steps=[0, 1])
    assert waits_of([request], steps) == [Waits(6, 25, 0, 0, 15)]


def test_a_session_without_requests_says_so(tmp_path: Path) -> None:
    (report,) = compute_requests(session_of(tmp_path / "a.log", batched_log([])))
    assert (report.rows, report.notes[0]) == ([], "The log has no requests.")


@pytest.mark.parametrize(("first", "there"), [(0, False), (1, True)])
def test_requests_over_time_need_several(first: int, there: bool, tmp_path: Path) -> None:
    batch = Batch([(seq, 0, 4) for seq in range(first + 1)])
    session = session_of(tmp_path / "a.log", batched_log([batch]))
    titles = [report.title for report in compute_requests(session)]
    assert ("Requests at once, over time" in titles) == there
