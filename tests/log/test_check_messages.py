"""The strict check: each rule has its message, at the line where the rule is broken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from llamacpp_instr.log import schema as s
from tests.kit.log_readers import findings
from tests.kit.made_log import encode, make_log

EVENTS = make_log(Random(3).randint, n_contexts=1, level="verbose")


def change(kind: type[s.Event], **changes: Any) -> Callable[[list[s.Event]], int]:
    """Changes the first event of a kind; the number of its line."""

    def do(events: list[s.Event]) -> int:
        at = next(i for i, event in enumerate(events) if type(event) is kind)
        for key, value in changes.items():
            new = value(getattr(events[at], key)) if callable(value) else value
            setattr(events[at], key, new)
        return at + 1

    return do


def again(kind: type[s.Event]) -> Callable[[list[s.Event]], int]:
    """Repeats the first event of a kind."""

    def do(events: list[s.Event]) -> int:
        at = next(i for i, event in enumerate(events) if type(event) is kind)
        events.insert(at + 1, events[at])
        return at + 2

    return do


def in_nodes(**changes: Callable[[Any], Any]) -> Callable[[list[s.Event]], int]:
    """Changes columns of the first graph's nodes."""

    def nodes(old: s.Nodes) -> s.Nodes:
        return msgspec.structs.replace(
            old, **{key: new(getattr(old, key)) for key, new in changes.items()}
        )

    return change(s.Graph, nodes=nodes)


def first(value: Any) -> Callable[[list[Any]], list[Any]]:
    """A column with another first entry."""
    return lambda column: [value, *column[1:]]


SPLIT = s.Split(start=1, end=2, backend="CPU")
N_NODES = next(e.n_nodes for e in EVENTS if isinstance(e, s.Graph))
N_EXEC = next(e.n_exec for e in EVENTS if isinstance(e, s.Graph))
N_KERNELS = next(len(e.node) for e in EVENTS if isinstance(e, s.Plan))
MESSAGES: list[tuple[Callable[[list[s.Event]], int], str]] = [
    (again(s.SessionStart), "session_start: occurs a second time"),
    (again(s.SessionEnd), "session_end: comes after session_end (line"),
    (change(s.SessionEnd, dropped=3), "session_end: the log is not complete: 3 events dropped"),
    (
        change(s.SessionEnd, dropped_ops=3),
        "session_end: 3 ops dropped: a buffer was full, or results of a device are missing",
    ),
    (change(s.SessionEnd, decode_ns=-1), "session_end: Expected `int` >= 0 - at `decode_ns`"),
    (change(s.SessionEnd, bytes=5), "session_end: `bytes` is 5, "),
    (change(s.SessionEnd, events={}), "session_end: `events` has 0 "),
    (change(s.SessionEnd, t=lambda t: t - 10**5), "session_end: `t` is "),
    (change(s.Context, t=5), "context: `t` is "),
    (again(s.Model), "model: model 0 was given before"),
    (change(s.Model, dur=-1), "model: Expected `int` >= 0 - at `dur`"),
    (again(s.Tensor), "tensor: tensor 0 of model 0 was given before"),
    (change(s.Tensor, model=9), "tensor: model 9 was never given"),
    (change(s.Tensor, tensor=10**9), "tensor: tensor 1000000000 of a model of"),
    (again(s.Context), "context: context 0 was given before"),
    (change(s.Context, model=9), "context: model 9 was never given"),
    (change(s.Memory, ctx=9), "memory: context 9 was never given"),
    (again(s.Graph), "graph: graph 0 was given before"),
    (change(s.Graph, ctx=9), "graph: context 9 was never given"),
    (change(s.Graph, nodes=None), "graph: without nodes at level verbose"),
    (change(s.Graph, n_nodes=5), "graph: column `name` has"),
    (change(s.Graph, n_exec=5), "graph: `n_exec` is 5, column `exec` has"),
    (change(s.Graph, splits=[SPLIT]), "graph: split 0 is 1..2, the previous one ends at 0"),
    (change(s.Graph, splits=lambda old: [*old, SPLIT]), "graph: split 1 is 1..2"),
    (in_nodes(op=lambda op: op[1:]), "graph: column `op` has"),
    (in_nodes(src=first([N_NODES])), f"graph: node 0 reads node {N_NODES}"),
    (in_nodes(src=first([-999])), "graph: node 0 reads leaf 998"),
    (in_nodes(buffer=first(7)), "graph: node 0 is in buffer 7"),
    (in_nodes(layer=first(-2)), "graph: Expected `int` >= -1 - at `nodes.layer[0]`"),
    (in_nodes(exec=first(2)), "graph: Expected `int` <= 1 - at `nodes.exec[0]`"),
    (in_nodes(bytes=first(-8)), "graph: Expected `int` >= 0 - at `nodes.bytes[0]`"),
    (in_nodes(ne=first([1] * 5)), "graph: Expected `array` of length <= 4 - at `nodes.ne[0]`"),
    (in_nodes(ne=first([])), "graph: node 0 has shape []"),
    (again(s.Plan), "plan: plan 0 was given before"),
    (change(s.Plan, graph=9), "plan: graph 9 was never given"),
    (change(s.Plan, node=lambda node: [*node, node[0]]), "plan: node 0 is repeated or out of"),
    (change(s.Plan, node=lambda node: [*node[:-1], 5000]), "plan: node 5000 of graph 0, which"),
    (change(s.Plan, n=[1]), "plan: column `n` has 1 entries, `node` has"),
    (again(s.StepBegin), "step_begin: step 0 was given before"),
    (change(s.StepBegin, ctx=9), "step_begin: context 9 was never given"),
    (change(s.StepBegin, t=lambda t: t - 10**7), "step_begin: `t` is"),
    (change(s.StepEnd, step=77), "step_end: step 77 was never begun"),
    (again(s.StepEnd), "step_end: step 0 was ended before"),
    (change(s.StepEnd, t=10**12 + 10**6 + 9), "step_end: step 0 ends"),
    (change(s.StepEnd, prepare=10**9), "step_end: `prepare`, `readback` and `recorder` take"),
    (change(s.StepEnd, readback=-1), "step_end: Expected `int` >= 0 - at `readback`"),
    (change(s.StepEnd, n_ubatch=9), "step_end: `n_ubatch` is 9, the step has"),
    (change(s.StepEnd, n_reused=9), "step_end: `n_reused` is 9"),
    (again(s.Compute), "compute: compute 0 was given before"),
    (change(s.Compute, graph=9), "compute: graph 9 was never given"),
    (change(s.Compute, step=99), "compute: step 99 never began"),
    (change(s.Compute, reused=True), "compute: `reused` is True, graph 0 was not computed"),
    (change(s.Compute, build=10**9), "compute: its stages take"),
    (change(s.Compute, dur=-1), "compute: Expected `int` >= 0 - at `dur`"),
    (change(s.Compute, t=2**62), "compute: Expected `int` <= 4611686018427387903 - at `t`"),
    (change(s.Compute, t=lambda t: t - 10**6), "compute: begins"),
    (change(s.Layers, compute=99), "layers: compute 99 was never given"),
    (again(s.Layers), "layers: the layers of compute 0 were given before"),
    (change(s.Layers, layer=lambda layer: layer[1:]), "layers: column `layer` has"),
    (change(s.Layers, layer=lambda layer: [-1] * len(layer)), "layers: runs 0 and 1 are of one"),
    (change(s.Ops, compute=99), "ops: compute 99 was never given"),
    (change(s.Ops, plan=3), "ops: plan 3 was never given"),
    (change(s.Ops, thread=7), "ops: thread 7, the compute has"),
    (again(s.Ops), "ops: thread 0 of compute 0 was given before"),
    (change(s.Ops, dur=lambda dur: dur[1:]), "ops: column `wait` has"),
    (change(s.Ops, dur=[1], gap=None, wait=None), f"ops: 1 kernels, plan 0 has {N_KERNELS}"),
    (change(s.Ops, dur=first(-5)), "ops: Expected `int` >= 0 - at `dur[0]`"),
    (change(s.Ops, dur=first(2**53)), "ops: Expected `int` <= 9007199254740991 - at `dur[0]`"),
    (change(s.Ops, dur=first(10**9)), "ops: ends "),
    (change(s.Ops, t=lambda t: t - 10**5), "ops: begins "),
    (change(s.Ops, gap=lambda _: [7] * N_KERNELS), "ops: `gap[0]` is 7"),
    (change(s.Ops, wait=first(10**9)), "ops: `wait[0]` is 1000000000, more than its `dur`"),
    (change(s.Kv, used=513), "kv: 513 cells are used of 512"),
    (change(s.Kv, cells=[512]), "kv: cell 512 of 512"),
    (change(s.Kv, step=99), "kv: step 99 never began"),
    (change(s.Kv, ctx=9), "kv: context 9 was never given"),
    (change(s.Token, index=7), "token: `index` is 7, the context's next token is 0"),
    (change(s.Token, step=99), "token: step 99 never began"),
    (change(s.Token, p=1.5), "token: probability 1.5"),
    (change(s.Token, hex="zz"), "token: `hex` is not a hexadecimal number"),
    (change(s.Token, text="a", hex="62"), "token: `hex` and `text` are not the same bytes"),
]


@pytest.mark.parametrize(("do", "expected"), MESSAGES, ids=[m for _, m in MESSAGES])
def test_message(do, expected, path):
    events: list[s.Event] = msgspec.convert(msgspec.to_builtins(EVENTS), list[s.AnyEvent])
    line = do(events)
    found = findings(path, encode(events))
    assert [text for number, text in found if number == line and text.startswith(expected)], found


def fewer_kernels(events: list[s.Event], status: int) -> tuple[str, list[s.Event]]:
    """The last compute of a log with all but its first kernel left out."""
    out = events[:-1]
    compute = max(i for i, event in enumerate(out) if isinstance(event, s.Compute))
    event, plan = out[compute], next(e for e in out if isinstance(e, s.Plan))
    assert isinstance(event, s.Compute)
    ops = next(e for e in out[compute:] if isinstance(e, s.Ops))
    plan = s.Plan(t=plan.t, plan=900, graph=event.graph, node=plan.node[:1])
    out[compute] = msgspec.structs.replace(event, status=status)
    kept = [e for e in out if getattr(e, "compute", -1) != event.compute or e is out[compute]]
    at = kept.index(out[compute]) + 1
    kept[at:at] = [plan, s.Ops(t=ops.t, compute=event.compute, plan=900, dur=ops.dur[:1])]
    return f"ops: plan 900 has 1 nodes of {N_EXEC} to compute", kept


def test_only_an_aborted_compute_leaves_kernels_out(path):
    expected, log = fewer_kernels(EVENTS, status=0)
    assert expected in [message for _, message in findings(path, encode(log))]
    _, log = fewer_kernels(EVENTS, status=1)
    assert [message for _, message in findings(path, encode(log))] == [
        "was not closed: no session_end"
    ]


def added(path: Path, *events: s.Event) -> list[str]:
    """The findings at events put before the end, `session_end`'s totals left out."""
    log = [*EVENTS[:-1], *events]
    return [text for line, text in findings(path, encode(log)) if line > len(EVENTS) - 1][:-1]


T = EVENTS[-1].t


def test_marks(path):
    begin = s.Mark(t=T, mark=50, name="a", phase="begin")
    end = s.Mark(t=T + 1, mark=50, name="a", phase="end")
    assert added(path, begin, end) == []
    assert added(path, begin, begin, end) == ["mark: mark 50 was given before"]
    assert added(path, end) == ["mark: mark 50 ends and was not begun"]
    end.name = "b"
    assert added(path, begin, end) == ["mark: mark 50 ends as `b`, it began as `a`"]
    end.name, end.t = "a", T - 1
    assert added(path, begin, end) == ["mark: mark 50 ends 1 ns before it begins"]


def test_what_is_left_open_in_a_closed_log_is_named_where_it_began(path):
    events = [event for event in EVENTS if not isinstance(event, s.StepEnd)]
    found = findings(path, encode(events))
    begin = next(i for i, event in enumerate(events) if isinstance(event, s.StepBegin))
    assert (begin + 1, "step_begin: step 0 is never ended") in found


def test_a_step_that_begins_among_open_ones_is_one_finding(path):
    begin = next(e for e in EVENTS if isinstance(e, s.StepBegin))
    more = [msgspec.structs.replace(begin, t=T + i, step=500 + i) for i in range(3)]
    found = added(path, *more)
    steps = [text for text in found if text.startswith("step_begin: begins while")]
    assert steps == [
        "step_begin: begins while step 500 of context 0 is open",
        "step_begin: begins while step 501 of context 0 is open",
    ]


def test_tensor_stats(path):
    graph = next(e for e in reversed(EVENTS) if isinstance(e, s.Graph))
    compute = next(e for e in reversed(EVENTS) if isinstance(e, s.Compute))
    assert graph.nodes
    right = {"node": 3, "layer": graph.nodes.layer[3], "n": 10, "hist": [4, 4], "nan": 1, "inf": 1}
    common: dict[str, Any] = {"t": T, "name": "x", "zero": 2}
    common |= {"compute": compute.compute, "graph": graph.graph}
    values = {"min": -1.0, "max": 1.0, "mean": 0.5, "std": 0.1}

    def problems(**wrong: Any) -> list[str]:
        return added(path, s.TensorStats(**common, **{**right, **values, **wrong}))

    assert problems() == []
    assert problems(n=11)[0].startswith("tensor_stats: `nan`, `inf` and `hist` count 10 elements")
    assert problems(mean=2.0) == ["tensor_stats: the mean 2.0 is not between -1.0 and 1.0"]
    assert problems(std=-1.0) == ["tensor_stats: the deviation is -1.0"]
    assert problems(node=10**6)[0].startswith("tensor_stats: node 1000000 of graph ")
    assert problems(layer=77)[0].startswith("tensor_stats: node 3 has layer 77")


def test_splits_and_sync(path):
    compute = [e for e in EVENTS if isinstance(e, s.Compute)][-1]
    t = compute.t + compute.start
    right: dict[str, Any] = {"t": t, "compute": compute.compute, "asynchronous": [0]}
    splits = s.Splits(**right, split=[0], dur=[1])
    assert added(path, splits) == []
    twice = f"splits: the splits of compute {compute.compute} were given before"
    assert added(path, splits, splits) == [twice]
    assert added(path, s.Splits(**right, split=[4], dur=[1])) == [
        "splits: split 4, the graph has 1"
    ]
    assert added(path, s.Splits(**right, split=[0], dur=[10**9]))[0].startswith("splits: ends ")
    assert added(path, s.Sync(t=T, ctx=0, dur=-1)) == ["sync: Expected `int` >= 0 - at `dur`"]
    assert added(path, s.Sync(t=T, ctx=9, dur=1)) == ["sync: context 9 was never given"]


def test_a_line_that_cannot_be_decoded_is_one_finding_among_others(path):
    lines = encode(EVENTS).splitlines(keepends=True)
    lines[20] = b'{"event":"sync","t":1,"ctx":0,"dur":1,"more":1}\n'
    found = findings(path, b"".join(lines))
    assert found[0] == (21, "sync: unknown field `more`")
    assert found[-1][0] == len(lines)
