"""A session holds all that its log has, as columns, and nothing that cannot be followed."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamacpp_instr.base.errors import LogError
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.session import Table, load_parts, load_session
from llamacpp_instr.log.steps import steps_inside
from tests.kit.computes import one_by_one
from tests.kit.made_log import encode, make_log
from tests.kit.strategies import logs, unclosed_logs

EVENTS = make_log(Random(2).randint, n_contexts=2, level="verbose")


def load(directory: Path, events: list[s.Event]):
    path = directory / "session.log"
    path.write_bytes(encode(events))
    return load_session(path)


def of(events: list[s.Event], kind: type):
    return [event for event in events if isinstance(event, kind)]


@given(events=logs())
@settings(max_examples=30)
def test_everything_measured_is_in_the_columns(events, tmp_path_factory):
    session = load(tmp_path_factory.mktemp("log"), events)
    begins = {e.step: e for e in of(events, s.StepBegin)}
    ends = of(events, s.StepEnd)
    assert session.steps["step"].tolist() == [e.step for e in ends]
    assert session.steps["begin"].tolist() == [begins[e.step].t for e in ends]
    assert session.steps["end"].tolist() == [e.t for e in ends]
    assert session.steps["n_tokens"].tolist() == [begins[e.step].n_tokens for e in ends]
    for table, kind in (
        (session.computes, s.Compute),
        (session.kv, s.Kv),
        (session.tokens, s.Token),
        (session.syncs, s.Sync),
    ):
        for name in kind.__struct_fields__:
            assert table[name].tolist() == [getattr(e, name) for e in of(events, kind)]
    ops = of(events, s.Ops)
    every = load_session(session.path, every_thread=True)
    assert [timed.dur.tolist() for timed in one_by_one(every.ops)] == [e.dur for e in ops]
    first = [e.dur for e in ops if e.thread == 0]
    assert [timed.dur.tolist() for timed in one_by_one(session.ops)] == first
    seen = session.threads.tuples("compute", "thread", "kernels", "busy", "waiting")
    assert list(seen) == [
        (e.compute, e.thread, len(e.dur), sum(e.dur) - sum(e.wait), sum(e.wait) + sum(e.gap or ()))
        for e in ops
        if e.wait is not None
    ]
    assert [timed.label.tolist() for timed in one_by_one(session.layers)] == [
        e.layer for e in of(events, s.Layers)
    ]
    assert list(session.graphs.values()) == of(events, s.Graph)
    assert session.end == events[-1]
    steps_only = load_session(session.path, computes=False)
    for name in ("steps", "sequences", "tokens", "marks", "syncs", "machine"):
        columns = getattr(steps_only, name).columns
        assert {key: of.tolist() for key, of in columns.items()} == {
            key: of.tolist() for key, of in getattr(session, name).columns.items()
        }
    for name in ("computes", "kv", "ubatches", "ops", "threads", "layers", "splits"):
        assert not len(getattr(steps_only, name))
    assert not len(steps_only.experts.node)


def test_intervals_begin_and_end_where_the_schema_says(tmp_path):
    session = load(tmp_path, EVENTS)
    timed, event = one_by_one(session.ops)[0], of(EVENTS, s.Ops)[0]
    gap = event.gap or [0] * len(event.dur)
    for i in range(len(event.dur)):
        begin = event.t + sum(gap[: i + 1]) + sum(event.dur[:i])
        assert (timed.begin[i], timed.end[i]) == (begin, begin + event.dur[i])


@given(events=unclosed_logs())
@settings(max_examples=30)
def test_an_unclosed_log_is_a_session_too(events, tmp_path_factory):
    session = load(tmp_path_factory.mktemp("log"), events)
    assert session.end is None
    assert session.log_end.state == "unclosed"
    n_ended = len(of(events, s.StepEnd))
    assert len(session.open_steps) == len(of(events, s.StepBegin)) - n_ended


def test_marks_are_spans_instants_and_open_ends(tmp_path):
    t = EVENTS[-1].t
    marks = [
        s.Mark(t=t, mark=90, name="span", phase="begin", thread=7),
        s.Mark(t=t + 1, mark=91, name="now", phase="instant"),
        s.Mark(t=t + 2, mark=92, name="open", phase="begin"),
        s.Mark(t=t + 3, mark=90, name="span", phase="end"),
    ]
    session = load(tmp_path, [*[e for e in EVENTS if not isinstance(e, s.Mark)], *marks])
    rows = zip(*(session.marks[c] for c in ("name", "begin", "end", "thread")), strict=True)
    assert sorted(rows) == [("now", t + 1, t + 1, 0), ("open", t + 2, -1, 0), ("span", t, t + 3, 7)]


@pytest.mark.parametrize(
    ("dur", "reason"),
    [
        ([s.MOST + 1], r"Expected `int` <= 9007199254740991 - at `dur\[0\]`"),
        ([-1], r"Expected `int` >= 0 - at `dur\[0\]`"),
        ([s.MOST] * 600, "an impossible time"),
    ],
)
def test_times_that_nothing_can_have_taken_are_an_error_with_their_line(dur, reason, tmp_path):
    compute = of(EVENTS, s.Compute)[0]
    at = EVENTS.index(compute) + 1
    wrong = s.Layers(t=compute.t, compute=0, layer=[*range(len(dur))], dur=dur)
    with pytest.raises(LogError, match=f":{at + 1}: layers: {reason}"):
        load(tmp_path, [*EVENTS[:at], wrong])


@pytest.mark.parametrize(("node", "n"), [([0, 0], None), ([0, 1], [2, 1]), ([1, 0], None)])
def test_a_plan_whose_kernels_share_nodes_is_an_error(node, n, tmp_path):
    plan = of(EVENTS, s.Plan)[0]
    at = EVENTS.index(plan)
    wrong = s.Plan(t=plan.t, plan=0, graph=plan.graph, node=node, n=n)
    with pytest.raises(LogError, match=f":{at + 1}: plan: node [01] is repeated or out of order"):
        load(tmp_path, [*EVENTS[:at], wrong])


@given(data=st.data())
@settings(max_examples=50)
def test_the_steps_inside_marks_are_those_that_begin_in_them(data):
    time = st.integers(0, 20)
    begins = np.array(sorted(data.draw(st.lists(time))), np.int64)
    spans = data.draw(st.lists(st.tuples(time, time | st.just(-1))))
    columns = {"begin": [b for b, _ in spans], "end": [e for _, e in spans]}
    marks = Table({name: np.array(column, np.int64) for name, column in columns.items()})
    for (begin, end), first, behind in zip(spans, *steps_inside(marks, begins), strict=True):
        inside = [t for t in begins.tolist() if t >= begin and (end < 0 or t < end)]
        assert begins[first:behind].tolist() == inside


def test_the_latest_and_longest_times_are_still_of_64_bits(tmp_path):
    compute = of(EVENTS, s.Compute)[0]
    at = EVENTS.index(compute) + 1
    n = 255
    most = {"dur": [s.MOST] * n, "gap": [s.MOST] * n}
    layers = s.Layers(t=s.LATEST, compute=0, layer=[*range(n)], **most)
    (timed,) = load(tmp_path, [*EVENTS[:at], layers]).layers
    assert timed.end[0, -1] == s.LATEST + 2 * n * s.MOST
    assert (timed.begin[0, 1:] > timed.begin[0, :-1]).all()


@given(events=logs() | unclosed_logs())
@settings(max_examples=30)
def test_the_parts_of_a_log_have_each_of_its_events_once(events, tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "session.log"
    path.write_bytes(encode(events))
    parts = list(load_parts(path, part_rows=1))
    whole = load_session(path)
    for name in ("steps", "computes", "kv", "tokens", "syncs", "marks"):
        n_rows = len(getattr(whole, name))
        assert sum(len(getattr(part, name)) for part in parts) == n_rows
    for name in ("tensors", "memory", "stats", "notes", "messages"):
        assert sum(len(getattr(part, name)) for part in parts) == len(getattr(whole, name))
    for name in ("ops", "layers", "splits"):
        n_rows = sum(map(len, getattr(whole, name)))
        assert sum(len(of) for part in parts for of in getattr(part, name)) == n_rows
    assert {number for part in parts for number in part.graphs} == set(whole.graphs)
    assert parts[-1].log_end == whole.log_end
    for part in parts:
        assert set(part.computes["graph"].tolist()) <= set(part.graphs)
        assert set(part.steps["ctx"].tolist()) <= set(part.contexts)
        assert all(part.plans[ops.plan].graph in part.graphs for ops in part.ops)
    for part in parts[:-1]:
        assert not part.open_steps
        assert part.end is None
