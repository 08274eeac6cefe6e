"""The strict check at its bounds: what is just right, and what is one beyond."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from llamacpp_instr.log import check
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.check import (
    COUNTER_SLACK,
    _Checker,
    _OfStep,
    check_log,
    missing_parts,
)
from llamacpp_instr.log.graph.kernels import runs
from llamacpp_instr.log.known import KnownCompute, KnownGraph, KnownStep
from tests.kit.log_readers import findings
from tests.kit.made_log import encode, make_log
from tests.kit.split_log import split_log
from tests.kit.steady_log import write

STATS: dict[str, Any] = {
    "t": 0, "compute": 0, "graph": 0, "node": 0, "name": "x", "n": 10, "nan": 1, "inf": 2,
    "zero": 3, "hist": [3, 4], "min": -1.0, "max": 2.0, "mean": 0.5, "std": 0.1,
}  # fmt: skip
OPS: dict[str, Any] = {"t": 0, "compute": 0, "plan": 0}
KV: dict[str, Any] = {"t": 0, "ctx": 0, "op": "apply", "used": 3, "size": 8}
TOKEN: dict[str, Any] = {"t": 0, "ctx": 0, "index": 0, "id": 1, "text": "ab", "dur": 1}
STEP_END: dict[str, Any] = {"t": 0, "step": 0, "status": 0, "prepare": 0, "readback": 0}
COMPUTE: dict[str, Any] = {
    "t": 0, "compute": 0, "graph": 0, "ctx": 0, "step": 0, "source": "decode", "reused": False,
    "n_threads": 1, "apply": 1, "build": 2, "alloc": 3, "inputs": 4, "dur": 9,
}  # fmt: skip
END: dict[str, Any] = {
    "t": 0, "reason": "closed", "events": {}, "bytes": 0, "dropped": 0, "dropped_ops": 0,
    "decode_ns": 0, "overhead_ns": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (s.Kv(**KV), None),
        (s.Kv(**KV | {"used": 8}), None),
        (s.Kv(**KV | {"used": 9}), "9 cells are used of 8"),
        (s.Kv(**KV, cells=[0, 7]), None),
        (s.Kv(**KV, cells=[7, 8]), "cell 8 of 8"),
        (s.Token(**TOKEN), None),
        (s.Token(**TOKEN, p=0.0), None),
        (s.Token(**TOKEN, p=1.0), None),
        (s.Token(**TOKEN, p=1.001), "probability 1.001"),
        (s.Token(**TOKEN, p=-0.001), "probability -0.001"),
        (s.Token(**TOKEN, hex="6162"), None),
        (s.Token(**TOKEN, hex="6163"), "`hex` and `text` are not the same bytes"),
        (s.Token(**TOKEN, hex="6"), "`hex` is not a hexadecimal number"),
        (s.Token(**TOKEN | {"text": "a\ufffd"}, hex="61ff"), None),
        (s.Token(**TOKEN | {"text": "a\ufffd\ufffd"}, hex="61ff"), None),
        (s.StepEnd(**STEP_END, n_ubatch=2, n_reused=2), None),
        (s.StepEnd(**STEP_END, n_ubatch=2, n_reused=3),
         "`n_reused` is 3, more than `n_ubatch` (2)"),
        (s.Compute(**COMPUTE, start=10), None),
        (s.Compute(**COMPUTE, start=9), "its stages take 10 ns, the compute starts at 9"),
        (s.Layers(t=0, compute=0, layer=[0, 1, 0], dur=[1, 1, 1]), None),
        (s.Layers(t=0, compute=0, layer=[0, 1, 1], dur=[1, 1, 1]),
         "runs 1 and 2 are of one layer (1)"),
        (s.Layers(t=0, compute=0, layer=[0, 1], dur=[1, 1], gap=[0, 5]), None),
        (s.Layers(t=0, compute=0, layer=[0, 1], dur=[1, 1], gap=[5, 0]),
         "`gap[0]` is 5: the first interval begins at `t`"),
        (s.Ops(**OPS, dur=[4, 5], wait=[4, 5]), None),
        (s.Ops(**OPS, dur=[4, 5], wait=[4, 6]), "`wait[1]` is 6, more than its `dur` (5)"),
        (s.Ops(**OPS, dur=[4, 5], gap=[1, 0]), "`gap[0]` is 1: the first interval begins at `t`"),
        (s.SessionEnd(**END), None),
        (s.SessionEnd(**END | {"dropped": 1}), "the log is not complete: 1 event dropped"),
        (
            s.SessionEnd(**END | {"dropped_ops": 1}),
            "1 op dropped: a buffer was full, or results of a device are missing",
        ),
        (s.TensorStats(**STATS), None),
        (s.TensorStats(**STATS | {"n": 11}),
         "`nan`, `inf` and `hist` count 10 elements, `n` is 11"),
        (s.TensorStats(**STATS | {"zero": 10}), None),
        (s.TensorStats(**STATS | {"zero": 11}), "11 zeros in 10 elements"),
        (s.TensorStats(**STATS | {"mean": 2.0}), None),
        (s.TensorStats(**STATS | {"mean": -1.0}), None),
        (s.TensorStats(**STATS | {"mean": 2.000001}), None),
        (s.TensorStats(**STATS | {"mean": 2.000003}),
         "the mean 2.000003 is not between -1.0 and 2.0"),
        (s.TensorStats(**STATS | {"mean": -1.000001}), None),
        (s.TensorStats(**STATS | {"mean": -1.000003}),
         "the mean -1.000003 is not between -1.0 and 2.0"),
        (s.TensorStats(**STATS | {"min": -5e6, "mean": -5000004.0}), None),
        (s.TensorStats(**STATS | {"min": None, "mean": 7.0}), None),
        (s.TensorStats(**STATS | {"max": None, "mean": 7.0}), None),
        (s.TensorStats(**STATS | {"mean": None}), None),
        (s.TensorStats(**STATS | {"std": 0.0}), None),
        (s.TensorStats(**STATS | {"std": None}), None),
        (s.TensorStats(**STATS | {"std": -1e-9}), "the deviation is -1e-09"),
        (s.TensorStats(**STATS | {"std": float("nan")}), "the deviation is nan"),
    ],
)  # fmt: skip
def test_an_event_on_its_own(event: s.Event, message: str | None) -> None:
    checker = _Checker()
    checker._level = "verbose"
    refs = checker._refs
    for made in make_log(Random(3).randint, n_contexts=1, level="verbose"):
        refs.take(1, made)
        if isinstance(made, s.Ops):
            break
    # all other events fit any event of this test
    refs.graph = KnownGraph(replace(refs.graph.event, nodes=None), refs.context)
    compute = replace(refs.compute.event, t=0, start=0, dur=10**9)
    refs.compute = KnownCompute(compute, refs.graph, refs.compute.ubatch)
    refs.step = None
    if isinstance(event, s.StepEnd):
        begin = s.StepBegin(t=0, step=0, ctx=0, kind="decode", phase="decode", n_tokens=1,
                            n_outputs=1, n_seqs=1)  # fmt: skip
        refs.step = KnownStep(begin, 1, [])
        checker._of_step[refs.step] = _OfStep(0, event.n_ubatch, event.n_reused)
    assert list(getattr(checker, f"_{s.event_name(event)}")(event)) == (
        [message] if message else []
    )


def test_a_graph_on_its_own() -> None:
    made = make_log(Random(3).randint, n_contexts=1, level="verbose")
    checker = _Checker()
    for graph in made:
        checker._refs.take(1, graph)
        if isinstance(graph, s.Graph):
            break
    checker._level = "minimal"
    rule = checker._graph
    assert list(rule(replace(graph, nodes=None, n_exec=graph.n_nodes))) == []
    more = graph.n_nodes + 1
    expected = f"`n_exec` is {more}, more than `n_nodes` ({graph.n_nodes})"
    assert list(rule(replace(graph, nodes=None, n_exec=more))) == [expected]
    checker._level = "verbose"
    n = len(graph.buffers)
    for buffer, problem in ((-1, False), (n - 1, False), (n, True)):
        nodes = replace(graph.whole, buffer=[buffer, *graph.whole.buffer[1:]])
        wanted = [f"node 0 is in buffer {buffer}, the graph has {n}"] if problem else []
        assert list(rule(replace(graph, nodes=nodes))) == wanted


def test_runs_of_layers() -> None:
    assert runs([-1, 0, 0, 0, 1, 0]) == [(-1, 0, 1), (0, 1, 4), (1, 4, 5), (0, 5, 6)]
    assert runs([]) == []


# --- events against each other ---

SEED = 3


def log(clock: str = "monotonic", seed: int = SEED) -> list[s.Event]:
    """A clean log at verbose without its end, so that its counts do not matter."""
    made = make_log(Random(seed).randint, n_contexts=1, level="verbose")
    start = made[0]
    assert isinstance(start, s.SessionStart)
    return [replace(start, clock=clock), *made[1:-1]]


def messages(path: Path, events: list[s.Event]) -> list[str]:
    return [text for _, text in findings(path, encode(events)) if "was not closed" not in text]


def moved(kind: type[s.Event], **by: int) -> list[s.Event]:
    """The log with numbers of the first event of a kind changed by these amounts."""
    events = log()
    at = next(i for i, event in enumerate(events) if type(event) is kind)
    new: dict[str, Any] = {name: getattr(events[at], name) + n for name, n in by.items()}
    events[at] = replace(events[at], **new)
    return events


def test_a_step_ends_after_its_compute_and_its_parts(path: Path) -> None:
    events = log()
    begin = next(event for event in events if isinstance(event, s.StepBegin))
    end = next(event for event in events if isinstance(event, s.StepEnd))
    computes = [e for e in events if isinstance(e, s.Compute) and e.step == begin.step]
    last = max(of.t + of.start + of.dur for of in computes)
    at = events.index(end)

    def problems(**new: int) -> list[str]:
        return messages(path, [*events[:at], replace(end, **new), *events[at + 1 :]])

    assert problems(t=last, prepare=0, readback=0) == []
    late = problems(t=last - 1, prepare=0, readback=0)
    assert late == [f"step_end: step {end.step} ends 1 ns before its compute"]
    whole = end.t - begin.t
    assert problems(prepare=whole, readback=0, recorder=0) == []
    assert problems(prepare=whole - 3, readback=2, recorder=1) == []
    assert problems(prepare=whole - 3, readback=2, recorder=2) == [
        f"step_end: `prepare`, `readback` and `recorder` take {whole + 1} ns of {whole}"
    ]


@pytest.mark.parametrize(
    ("clock", "slack"), [("monotonic", 0), ("tsc", COUNTER_SLACK), ("cntvct", COUNTER_SLACK)]
)
def test_layers_lie_in_their_compute_as_exactly_as_the_clock_is(
    clock: str, slack: int, path: Path
) -> None:
    """A counter of cycles may be a microsecond off the clock."""
    assert COUNTER_SLACK == 1000
    events = [e for e in log(clock) if not isinstance(e, s.Ops | s.TensorStats)]
    compute = next(event for event in events if isinstance(event, s.Compute))
    at = next(i for i, event in enumerate(events) if isinstance(event, s.Layers))
    layers = events[at]
    assert isinstance(layers, s.Layers)
    begin, n = compute.t + compute.start, len(layers.dur)

    def problems(t: int, dur: int) -> list[str]:
        changed = replace(layers, t=t, dur=[*[0] * (n - 1), dur], gap=None)
        return messages(path, [*events[:at], changed, *events[at + 1 :]])

    assert problems(begin - slack, 0) == []
    assert problems(begin - slack - 1, 0) == [f"layers: begins {slack + 1} ns before its compute"]
    assert problems(begin, compute.dur + slack) == []
    assert problems(begin, compute.dur + slack + 1) == [
        f"layers: ends {slack + 1} ns after its compute"
    ]


def test_a_mark_ends_when_it_begins_or_later(path: Path) -> None:
    for late, problem in ((0, False), (-1, True)):
        marks = [s.Mark(t=10**15, mark=900, name="m", phase="begin"),
                 s.Mark(t=10**15 + late, mark=900, name="m", phase="end")]  # fmt: skip
        wanted = ["mark: mark 900 ends 1 ns before it begins"] if problem else []
        assert messages(path, [*log(), *marks]) == wanted


def test_a_mark_that_never_ends_is_named_where_it_began(path: Path) -> None:
    made = make_log(Random(SEED).randint, n_contexts=1, level="minimal")
    *events, end = made
    at = len(events) + 1
    begun = s.Mark(t=events[-1].t, mark=900, name="m", phase="begin")
    found = findings(path, encode([*events, begun, end]))
    assert (at, "mark: mark 900 (`m`) is never ended") in found
    ended = replace(begun, phase="end")
    found = findings(path, encode([*events, begun, ended, end]))
    assert not [text for _, text in found if text.startswith("mark")]


def test_a_kernel_of_a_node_that_does_not_run_is_named(path: Path) -> None:
    events = log()
    at = next(i for i, event in enumerate(events) if isinstance(event, s.Graph))
    graph = events[at]
    plan = next(event for event in events if isinstance(event, s.Plan))
    assert isinstance(graph, s.Graph)
    node = plan.node[1]
    runs = [0 if i == node else n for i, n in enumerate(graph.whole.exec)]
    events[at] = replace(graph, nodes=replace(graph.whole, exec=runs), n_exec=sum(runs), splits=[])
    expected = f"plan: node {node} has a kernel, but in its graph none runs for it"
    assert expected in messages(path, events)


def test_a_plan_has_all_nodes_of_a_graph_of_the_cpu_alone(path: Path) -> None:
    """A last kernel that is missing is a finding, unless the compute was aborted."""
    events = [e for e in log() if not isinstance(e, s.Layers | s.TensorStats)]
    at = next(i for i, event in enumerate(events) if isinstance(event, s.Plan))
    plan = events[at]
    assert isinstance(plan, s.Plan)
    n = len(plan.counts)
    whole = sum(plan.counts)
    events[at] = replace(plan, node=plan.node[:-1], n=plan.counts[:-1])
    short = [
        replace(e, dur=e.dur[:-1], gap=e.gap and e.gap[:-1], wait=e.wait and e.wait[:-1])
        if isinstance(e, s.Ops) and e.plan == plan.plan
        else e
        for e in events
    ]
    assert n > 1
    found = set(messages(path, short))
    assert found == {
        f"ops: plan {plan.plan} has {whole - plan.counts[-1]} nodes of {whole} to compute"
    }
    aborted = [replace(e, status=2) if isinstance(e, s.Compute) else e for e in short]
    assert messages(path, aborted) == []
    start = short[0]
    assert isinstance(start, s.SessionStart)
    assert messages(path, [replace(start, perturbed=True), *short[1:]]) == []


def test_tokens_of_a_context_follow_each_other(path: Path) -> None:
    events = log()
    tokens = [event for event in events if isinstance(event, s.Token)]
    last = tokens[-1]
    more = replace(last, index=last.index + 1)
    assert messages(path, [*events, more]) == []
    early = messages(path, [*events, replace(more, t=last.t - 1)])
    assert early == ["token: `t` is 1 ns before the context's previous token"]
    again = messages(path, [*events, last])
    index = last.index
    assert again == [f"token: `index` is {index}, the context's next token is {index + 1}"]


def test_a_model_has_as_many_tensors_as_it_says(path: Path) -> None:
    events = log()
    tensors = [event for event in events if isinstance(event, s.Tensor)]
    n, last = len(tensors), tensors[-1]
    without = messages(path, [event for event in events if event is not last])
    assert f"context: model 0 has {n} tensors, the log {n - 1}" in without
    beyond = messages(path, moved(s.Model, n_tensors=-1))
    assert beyond == [f"tensor: tensor {n - 1} of a model of {n - 1} tensors"]
    none = [event for event in events if not isinstance(event, s.Tensor)]
    assert not [text for text in messages(path, none) if text.startswith("context")]


# --- findings ---


def test_after_the_last_finding_shown_the_rest_is_not_checked(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = b'{"event":"sync"}\n'
    monkeypatch.setattr(check, "MAX_FINDINGS", 3)
    for n, more in ((2, False), (3, True)):  # the unclosed log is also one
        path.write_bytes(encode(log()) + bad * n)
        found = list(check_log(path))
        assert len(found) == 3 + more
        assert ("more than 3 findings" in found[-1].message) is more
    assert found[-1].line == found[-2].line


def test_a_missing_part_is_named_at_the_next_one(tmp_path: Path) -> None:
    whole = make_log(Random(9).randint, n_contexts=2, level="minimal")
    parts = split_log(whole, 4, Random(5))
    assert len(parts) == 4
    paths = [write(tmp_path / f"{i}.log", part) for i, part in enumerate(parts)]
    assert list(missing_parts(paths)) == []
    found = list(missing_parts([paths[0], paths[3]]))
    assert [(of.path, of.line) for of in found] == [(str(paths[3]), 1)] * 2
    assert [of.message for of in found] == [
        f"session_start: part {number} of this session is missing" for number in (2, 3)
    ]
