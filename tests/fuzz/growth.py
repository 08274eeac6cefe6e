"""Inputs that are long in one respect: twice the size may not take much more than twice the time.

    python -m tests.fuzz.growth [SURFACE...]      most of a quarter of an hour, by the CPU's clock

Fuzzers' inputs are small, so what grows with the square of something looks quick there. Prints a
line for each surface and respect whose CPU time grows faster; exit code 1 when there is one.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from llamacpp_instr import schema as s
from llamacpp_instr.errors import InstrError
from tests.fuzz.guard import workspace
from tests.fuzz.targets import SURFACES
from tests.made_log import encode, make_log

WORTH = 0.5
"""CPU seconds; below, noise decides"""
MOST = 2.9
"""times the CPU time that twice the size may take"""
LONGEST = 60.0
"""CPU seconds, at which growing ends"""


def _log() -> list[s.Event]:
    """A small sound log at `verbose`, without its end."""
    return make_log(Random(2).randint, n_contexts=1, level="verbose")[:-1]


def _of(events: list[s.Event], kind: type[s.Event]) -> s.Event:
    return next(event for event in events if type(event) is kind)


def _more(event: s.Event, n: int, **changes: Callable[[int], object]) -> list[s.Event]:
    """`n` copies of an event, each with other values."""
    copies = []
    for i in range(n):
        copy = type(event)(**{k: getattr(event, k) for k in event.__struct_fields__})
        for key, value in changes.items():
            setattr(copy, key, value(i))
        copies.append(copy)
    return copies


def _marks_open(n: int) -> list[s.Event]:
    events = _log()
    t = events[-1].t
    return [*events, *(s.Mark(t=t + i, mark=i, name="m", phase="begin") for i in range(n))]


def _marks_nested(n: int) -> list[s.Event]:
    events = _marks_open(n)
    t = events[-1].t
    ends = (s.Mark(t=t + i, mark=i, name="m", phase="end") for i in range(n))
    return [*events, *ends]


def _marks_apart(n: int) -> list[s.Event]:
    events = _log()
    t = events[-1].t
    for i in range(n):
        for phase in ("begin", "end"):
            t += 1
            events.append(s.Mark(t=t, mark=i, name=f"m{i}", phase=phase))  # type: ignore[arg-type]
    return events


def _steps_open(n: int) -> list[s.Event]:
    events = _log()
    return events + _more(_of(events, s.StepBegin), n, step=lambda i: 1000 + i)


def _steps_in_marks(n: int) -> list[s.Event]:
    events = _log()
    begin, end = _of(events, s.StepBegin), _of(events, s.StepEnd)
    t = events[-1].t
    for i in range(n):
        events.append(s.Mark(t=t + 4 * i, mark=i, name="run", phase="begin"))
        events += _more(begin, 1, step=lambda _, i=i: 1000 + i, t=lambda _, i=i: t + 4 * i + 1)
        events += _more(end, 1, step=lambda _, i=i: 1000 + i, t=lambda _, i=i: t + 4 * i + 2)
        events.append(s.Mark(t=t + 4 * i + 3, mark=i, name="run", phase="end"))
    return events


def _contexts(n: int) -> list[s.Event]:
    events = _log()
    for kind in (s.Context, s.Memory, s.Graph, s.Kv):
        events += _more(_of(events, kind), n, ctx=lambda i: 1 + i)
        if kind is s.Graph:
            for i, event in enumerate(events[-n:]):
                event.graph = 1000 + i  # type: ignore[attr-defined]
    compute = _of(events, s.Compute)
    return events + _more(
        compute, n, ctx=lambda i: 1 + i, graph=lambda i: 1000 + i, compute=lambda i: 1000 + i,
        step=lambda _: -1,
    )  # fmt: skip


def _models(n: int) -> list[s.Event]:
    events = _log()
    events += _more(_of(events, s.Model), n, model=lambda i: 1 + i, name=lambda i: f"m{i}")
    return events + _more(_of(events, s.Tensor), n, model=lambda i: 1 + i, tensor=lambda _: 0)


def _tensors(n: int) -> list[s.Event]:
    events = _log()
    many = _more(
        _of(events, s.Tensor), n, tensor=lambda i: 100 + i, name=lambda i: f"blk.{i}.attn_q.weight",
        layer=lambda i: i,
    )  # fmt: skip
    at = next(i for i, event in enumerate(events) if type(event) is s.Context)
    return events[:at] + many + events[at:]


def _graphs(n: int) -> list[s.Event]:
    events = _log()
    events += _more(_of(events, s.Graph), n, graph=lambda i: 1000 + i)
    return events + _more(_of(events, s.Plan), n, graph=lambda i: 1000 + i, plan=lambda i: 1000 + i)


def _wide(n: int, op: str, src: Callable[[int], list[int]], ran: Callable[[int], int]) -> s.Nodes:
    return s.Nodes(
        name=[f"n-{i}" for i in range(n)], op=[op] * n, layer=[i // 10 for i in range(n)],
        type=["f32"] * n, ne=[[1]] * n, bytes=[4] * n, src=[src(i) for i in range(n)],
        buffer=[-1] * n, params=[[]] * n, exec=[ran(i) for i in range(n)],
    )  # fmt: skip


def _with_graph(nodes: s.Nodes, plan: s.Plan, splits: list[s.Split]) -> list[s.Event]:
    """One more graph, with its plan and one compute of it."""
    events = _log()
    n = len(nodes.name)
    compute, ops = _of(events, s.Compute), _of(events, s.Ops)
    graph = s.Graph(
        t=events[-1].t, graph=900, ctx=0, uid=9, source="decode", why="changed", n_nodes=n,
        n_exec=sum(nodes.exec), splits=splits, nodes=nodes,
        leafs=[s.Leaf(name="blk.0.attn_q.weight", type="f32", ne=[1], bytes=4, tensor=0)],
    )  # fmt: skip
    events += [graph, plan]
    events += _more(compute, 1, graph=lambda _: 900, compute=lambda _: 900, step=lambda _: -1)
    events += _more(
        ops, 1, compute=lambda _: 900, plan=lambda _: 900, dur=lambda _: [1] * len(plan.node),
        gap=lambda _: None, wait=lambda _: None,
    )  # fmt: skip
    return events


def _plan(node: list[int], n: list[int] | None = None) -> s.Plan:
    return s.Plan(t=0, plan=900, graph=900, node=node, n=n)


def _views(n: int) -> list[s.Event]:
    """A chain of views, and as many nodes that read its end."""
    nodes = _wide(
        2 * n,
        "ADD",
        lambda i: [i - 1] if 0 < i < n else [n - 1] if i else [],
        lambda i: int(i >= n),
    )
    return _with_graph(nodes, _plan([*range(n, 2 * n)]), [])


def _fused(n: int) -> list[s.Event]:
    """A kernel of all nodes."""
    return _with_graph(
        _wide(n, "ADD", lambda i: [i - 1][: i > 0], lambda _: 1), _plan([0], [n]), []
    )


def _overlapping(n: int) -> list[s.Event]:
    """As many kernels, all of them of all nodes."""
    nodes = _wide(n, "ADD", lambda i: [i - 1][: i > 0], lambda _: 1)
    return _with_graph(nodes, _plan([0] * n, [n] * n), [])


def _sources(n: int) -> list[s.Event]:
    """A node that reads as many leafs."""
    return _with_graph(_wide(2, "ADD", lambda _: [-1] * n, lambda _: 1), _plan([0, 1]), [])


def _splits(n: int) -> list[s.Event]:
    nodes = _wide(n, "ADD", lambda i: [i - 1][: i > 0], lambda _: 1)
    splits = [s.Split(start=i, end=i + 1, backend="CPU") for i in range(n)]
    return _with_graph(nodes, _plan([*range(n)]), splits)


def _name(text: str) -> Callable[[int], list[s.Event]]:
    """One long name, wherever a name stands."""

    def make(n: int) -> list[s.Event]:
        events = _log()
        long = (text * (100 * n // len(text) + 1))[: 100 * n]
        for event in events:
            if isinstance(event, s.Graph) and event.nodes is not None:
                event.nodes.name[3] = event.leafs[0].name = long
            elif isinstance(event, s.Tensor) and event.tensor < 3:
                event.name = long
        t = events[-1].t
        return [*events, s.Mark(t=t, mark=0, name=long, phase="instant")]

    return make


def _tokens(n: int) -> list[s.Event]:
    events = _log()
    return events + _more(_of(events, s.Token), n, step=lambda i: i, index=lambda i: 100 + i)


def _messages(n: int) -> list[s.Event]:
    events = _log()
    t = events[-1].t
    return [*events, *(s.Message(t=t, level="warn", text=f"m{i}") for i in range(n))]


def _notes(n: int) -> list[s.Event]:
    events = _log()
    t = events[-1].t
    return [*events, *(s.Note(t=t, name=f"n{i}", data={str(i): i}) for i in range(n))]


def _computes(n: int) -> list[s.Event]:
    events = _log()
    compute, ops, layers = (_of(events, kind) for kind in (s.Compute, s.Ops, s.Layers))
    for i in range(n):
        for event in (compute, layers, ops):
            events += _more(event, 1, compute=lambda _, i=i: 1000 + i)
    return events


LOGS: dict[str, Callable[[int], list[s.Event]]] = {
    "marks that are open": _marks_open,
    "marks inside marks": _marks_nested,
    "marks": _marks_apart,
    "steps that are open": _steps_open,
    "steps in marks": _steps_in_marks,
    "contexts": _contexts,
    "models": _models,
    "tensors": _tensors,
    "graphs": _graphs,
    "views of views": _views,
    "nodes of a kernel": _fused,
    "kernels of the same nodes": _overlapping,
    "sources of a node": _sources,
    "splits": _splits,
    "computes": _computes,
    "tokens": _tokens,
    "messages": _messages,
    "notes": _notes,
    **{f"a name of {text!r}": _name(text) for text in ("a", "_", "-", "9", "-1", ".", " (", "a_")},
    "a layer of 9s": _name("blk." + "9" * 5000),
}


def measure(surface: str, path: Path) -> float:
    """CPU seconds of one surface."""
    target = importlib.import_module(f"tests.fuzz.targets.{surface}")
    begin = time.process_time()
    with contextlib.suppress(InstrError):
        target.attempt(path)
    return time.process_time() - begin


def main(surfaces: list[str]) -> int:
    found = 0
    of_logs = [
        name
        for name in surfaces or SURFACES
        if importlib.import_module(f"tests.fuzz.targets.{name}").KIND == "log"
    ]
    with workspace() as directory:
        path = directory / "input"
        for respect, make in LOGS.items():
            for surface in of_logs:
                n, took, before = 250, 0.0, 0.0
                while took < WORTH * 4 and n < 64_000:
                    n *= 2
                    path.write_bytes(encode(make(n)))
                    before, took = took, measure(surface, path)
                    if took > LONGEST:
                        break
                size = path.stat().st_size
                if took > WORTH * 4 and before > WORTH / 2 and took > MOST * before:
                    found += 1
                    print(f"{surface}: {n} {respect}: {size:,} bytes, {before:.1f} -> {took:.1f} s")
                    sys.stdout.flush()
                elif took > 1e-5 * size + 1:
                    print(f"  slow: {surface}: {n} {respect}: {size:,} bytes, {took:.1f} s")
                    sys.stdout.flush()
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
