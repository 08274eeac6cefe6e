"""Inputs that are long in one respect: doubling the size must not much more than double the time.

    python -m tests.fuzz.growth [SURFACE...]      minutes of CPU time for each

Fuzzers' inputs are small, so quadratic time is not visible there. Prints a line for each surface
and respect whose CPU time grows faster; exits with status 1 if there are any.
"""

from __future__ import annotations

import contextlib
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from msgspec.structs import replace

from llamacpp_instr.base.errors import InstrError
from llamacpp_instr.log import schema as s
from tests.fuzz.guard import workspace
from tests.fuzz.targets import SURFACES, attempt_of
from tests.kit.made_log import encode, make_log

WORTH = 0.4
"""CPU seconds; below this, noise dominates"""
MOST = 2.8
"""maximum factor of CPU time for twice the size"""
LARGEST = 30_000
"""maximum number of one thing"""


def _log() -> list[s.Event]:
    """A small valid log at `verbose`, without its end."""
    return make_log(Random(2).randint, n_contexts=1, level="verbose")[:-1]


def _of(events: list[s.Event], kind: type[s.Event]) -> s.Event:
    return next(event for event in events if type(event) is kind)


def _more(event: s.Event, n: int, **changes: Callable[[int], object]) -> list[s.Event]:
    """`n` copies of an event, each with other values."""
    return [replace(event, **{key: of(i) for key, of in changes.items()}) for i in range(n)]


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
        at = t + 4 * i
        events += [
            s.Mark(t=at, mark=i, name="run", phase="begin"),
            replace(begin, step=1000 + i, t=at + 1),
            replace(end, step=1000 + i, t=at + 2),
            s.Mark(t=at + 3, mark=i, name="run", phase="end"),
        ]
    return events


def _contexts(n: int) -> list[s.Event]:
    events = _log()
    kinds = [_of(events, kind) for kind in (s.Context, s.Memory, s.Graph, s.Kv, s.Compute)]
    for i in range(n):
        numbers = {"ctx": 1 + i, "graph": 1000 + i, "compute": 1000 + i, "step": -1}
        for event in kinds:
            known = {k: v for k, v in numbers.items() if k in event.__struct_fields__}
            events.append(replace(event, **known))
    return events


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
    graph, plan = _of(events, s.Graph), _of(events, s.Plan)
    for i in range(n):
        events.append(replace(graph, graph=1000 + i))
        events.append(replace(plan, graph=1000 + i, plan=1000 + i))
    return events


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
    plan.t = graph.t
    compute = replace(compute, graph=900, compute=900, step=-1)
    ops = replace(ops, compute=900, plan=900, dur=[1] * len(plan.node), gap=None, wait=None)
    return [*events, graph, plan, compute, ops]


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
    """Kernels with as many nodes as a kernel may have."""
    nodes = _wide(n, "ADD", lambda i: [i - 1][: i > 0], lambda _: 1)
    first = [*range(0, n, 1000)]
    return _with_graph(nodes, _plan(first, [min(1000, n - i) for i in first]), [])


def _overlapping(n: int) -> list[s.Event]:
    """As many kernels, each with all nodes."""
    nodes = _wide(n, "ADD", lambda i: [i - 1][: i > 0], lambda _: 1)
    return _with_graph(nodes, _plan([0] * n, [n] * n), [])


def _sources(n: int) -> list[s.Event]:
    """Nodes that read as many leafs as a node may."""
    return _with_graph(_wide(n, "ADD", lambda _: [-1] * 64, lambda _: 1), _plan([*range(n)]), [])


def _splits(n: int) -> list[s.Event]:
    nodes = _wide(n, "ADD", lambda i: [i - 1][: i > 0], lambda _: 1)
    splits = [s.Split(start=i, end=i + 1, backend="CPU") for i in range(n)]
    return _with_graph(nodes, _plan([*range(n)]), splits)


def _name(text: str) -> Callable[[int], list[s.Event]]:
    """One long name in every place, and the longest that a tensor may have."""

    def make(n: int) -> list[s.Event]:
        events = _log()
        long = (text * (100 * n // len(text) + 1))[: 100 * n]
        for event in events:
            if isinstance(event, s.Graph) and event.nodes is not None:
                event.nodes.name[3] = event.leafs[0].name = long[:1000]
            elif isinstance(event, s.Tensor) and event.tensor < 3:
                event.name = long[:1000]
            elif isinstance(event, s.Model):
                event.name = event.path = long
        t = events[-1].t
        return [*events, s.Mark(t=t, mark=0, name=long, phase="instant")]

    return make


def _tokens(n: int) -> list[s.Event]:
    events = _log()
    return events + _more(_of(events, s.Token), n, index=lambda i: 100 + i)


def _messages(n: int) -> list[s.Event]:
    events = _log()
    t = events[-1].t
    return [*events, *(s.Message(t=t, level="warn", text=f"m{i}") for i in range(n))]


def _notes(n: int) -> list[s.Event]:
    events = _log()
    t = events[-1].t
    return [*events, *(s.Note(t=t, name=f"n{i}", data={str(i): i}) for i in range(n))]


def _layers(n: int) -> list[s.Event]:
    events = _log()
    compute = replace(_of(events, s.Compute), compute=900, step=-1)
    layers = replace(_of(events, s.Layers), compute=900, layer=[*range(n)], dur=[1] * n, gap=None)
    return [*events, compute, layers]


def _types(n: int) -> list[s.Event]:
    """Tensors with a type and a layer each."""
    events = _tensors(n)
    for i, event in enumerate(events):
        if isinstance(event, s.Tensor):
            event.type = f"t{i}"
    return events


def _computes(n: int) -> list[s.Event]:
    events = _log()
    compute = replace(_of(events, s.Compute), step=-1)
    ops, layers = _of(events, s.Ops), _of(events, s.Layers)
    for i in range(n):
        events += [replace(event, compute=1000 + i) for event in (compute, layers, ops)]
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
    "types": _types,
    "layers": _layers,
    "graphs": _graphs,
    "views of views": _views,
    "nodes of large kernels": _fused,
    "kernels of the same nodes": _overlapping,
    "nodes with many sources": _sources,
    "splits": _splits,
    "computes": _computes,
    "tokens": _tokens,
    "messages": _messages,
    "notes": _notes,
    **{f"a name of {text!r}": _name(text) for text in ("a", "_", "-", "9", "-1", ".", " (", "a_")},
    "a layer of 9s": _name("blk." + "9" * 5000),
}


def _logs(make: Callable[[int], list[s.Event]]) -> Callable[[int], bytes]:
    return lambda n: encode(make(n))


# --- models ---


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def _entry(key: str, type_: int, value: bytes) -> bytes:
    return _text(key) + struct.pack("<I", type_) + value


def _model(entries: list[bytes], names: list[str]) -> bytes:
    """A model of these metadata entries and of tensors with one block of Q8_0 each."""
    entries = [_entry("general.architecture", 8, _text("llama")), *entries]
    infos = [_text(name) + struct.pack("<IQIQ", 1, 32, 8, 64 * i) for i, name in enumerate(names)]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(names), len(entries))
    header = head + b"".join(entries) + b"".join(infos)
    return header + bytes(-len(header) % 32 + 64 * len(names))


_NAMES = ("attn_q", "attn_k", "ffn_up", "ffn_down")


def _arrays(n: int) -> bytes:
    item = struct.pack("<IQ", 4, 2) + bytes(8)
    return _model([_entry(f"a.{i}", 9, item) for i in range(n)], ["token_embd.weight"])


def _vocabulary(n: int) -> bytes:
    tokens = struct.pack("<IQ", 8, n) + b"".join(_text(f"t{i}") for i in range(n))
    scores = struct.pack("<IQ", 6, n) + bytes(4 * n)
    entries = [
        _entry("tokenizer.ggml.tokens", 9, tokens), _entry("tokenizer.ggml.scores", 9, scores),
        _entry("tokenizer.ggml.model", 8, _text("llama")),
    ]  # fmt: skip
    return _model(entries, ["token_embd.weight"])


MODELS: dict[str, Callable[[int], bytes]] = {
    "tensors of a layer each": lambda n: _model([], [f"blk.{i}.ffn_up.weight" for i in range(n)]),
    "tensors of few layers": lambda n: _model(
        [], [f"blk.{i % 4}.{_NAMES[i // 4 % 4]}{i}.weight" for i in range(n)]
    ),
    "tensors outside of layers": lambda n: _model([], [f"t{i}.weight" for i in range(n)]),
    "tensors of one name": lambda n: _model([], [f"blk.0.{i}" for i in range(n)]),
    "metadata": lambda n: _model([_entry(f"k.{i}", 4, bytes(4)) for i in range(n)], ["a.weight"]),
    "texts": lambda n: _model(
        [_entry(f"k.{i}", 8, _text("<b>" * 40)) for i in range(n)], ["a.weight"]
    ),
    "arrays": _arrays,
    "tokens": _vocabulary,
    "letters of a text": lambda n: _model([_entry("k", 8, _text("<" * 100 * n))], ["a.weight"]),
}

INPUTS: dict[str, dict[str, Callable[[int], bytes]]] = {
    "log": {respect: _logs(make) for respect, make in LOGS.items()},
    "gguf": MODELS,
    "imatrix": {},
    "dap": {},
}


def measure(surface: str, path: Path) -> float:
    attempt = attempt_of(surface)
    begin = time.process_time()
    with contextlib.suppress(InstrError):
        attempt(path)
    return time.process_time() - begin


def main(surfaces: list[str]) -> int:
    found = 0
    with workspace() as directory:
        path = directory / "input"
        for surface in surfaces or SURFACES:
            for respect, make in INPUTS[SURFACES[surface]].items():
                n, before = 500, 0.0
                while before < WORTH and n < LARGEST:
                    n *= 4 if before < WORTH / 8 else 2
                    path.write_bytes(make(n))
                    before = measure(surface, path)
                path.write_bytes(make(2 * n))
                took = measure(surface, path)
                if took > MOST * max(before, WORTH):
                    found += 1
                    size = path.stat().st_size
                    print(
                        f"{surface}: {2 * n:,} {respect}, {size:,} bytes:"
                        f" {before:.1f} s became {took:.1f} s",
                        flush=True,
                    )
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
