"""Small files with much content: logs of a few kB that gzip expands to megabytes.

Half of them expand further than any recorded log, which a reader refuses. The others contain noise,
so that they stay just below the limit and are read to their end.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from random import Random

import msgspec

from llamacpp_instr.log import schema as s
from llamacpp_instr.log.reader import MAX_EXPANSION
from tests.kit.made_log import encode, make_log

READ_TO_THE_END = 3 << 20
"""bytes of a log whose file has about a hundredth of that"""
ROWS = 1 << 20
"""bytes of a log in which each line becomes a row of a table"""


def write_hostile(directory: Path) -> None:
    """Write all of them, each kind into a folder, named after their content."""
    for kind in ("log", "gguf", "imatrix"):
        (directory / kind).mkdir()
    for name, parts in _BOMBS.items():
        (directory / "log" / f"bomb-{name}.log.gz").write_bytes(_compressed(parts()))
    for name, events in _MANY.items():
        (directory / "log" / f"many-{name}.log.gz").write_bytes(_with_noise(events()))


def _compressed(parts: Iterator[bytes]) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    packed = [packer.compress(encode(_facts())), *map(packer.compress, parts), packer.flush()]
    return b"".join(packed)


_BOMBS: dict[str, Callable[[], Iterator[bytes]]] = {
    "newlines": lambda: repeat(b"\n" * 1_000_000, 200),
    "list": lambda: repeat(b"[]" * 500_000, 63),
    "lists": lambda: iter([b"[", *repeat(b"[]," * 333_333, 63), b"[]]\n"]),
    "marks": lambda: repeat(_MARK * 20_000, 60),
    "spaces": lambda: repeat(b" " * 1_000_000, 200),
}
_MARK = b'{"event":"mark","t":1,"mark":1,"name":"","phase":"instant"}\n'


def _facts() -> list[s.Event]:
    """The beginning of a valid log at `verbose`: what measurements refer to."""
    events = make_log(Random(2).randint, n_contexts=1, level="verbose")
    return events[: next(i for i, event in enumerate(events) if type(event) is s.StepBegin)]


def _with_noise(lines: bytes) -> bytes:
    """Compressed, with noise, so that it expands just less than a log may."""
    facts = encode(_facts())
    noise = Random(1).randbytes((len(facts) + len(lines)) // (MAX_EXPANSION * 2 // 3))
    text = noise.translate(bytes(35 + byte % 56 for byte in range(256)))
    note = b'{"event":"note","t":1,"name":"noise","data":"%s"}\n' % text.replace(b"\\", b"x")
    packed = gzip.compress(facts + note + lines, mtime=0)
    assert len(facts + note + lines) < MAX_EXPANSION * len(packed)
    return packed


def _lines(line: str, size: int = READ_TO_THE_END) -> bytes:
    """Repeats a line up to `size` bytes; `%d` in it is replaced by the number of the line."""
    n = size // (len(line) + 4 * line.count("%d") + 1)
    count = line.count("%d")
    return b"".join(b"%s\n" % (line % ((i,) * count)).encode() for i in range(n))


def _one(before: str, unit: str, after: str) -> bytes:
    """One long line of comma-separated units."""
    n = READ_TO_THE_END // (len(unit) + 1)
    return f"{before}{','.join([unit] * n)}{after}\n".encode()


def _kernels() -> bytes:
    """A graph and a plan of many nodes, and computes whose measurements have two bytes per node."""
    n = 20_000
    nodes = s.Nodes(
        name=[""] * n, op=[""] * n, layer=[i // 100 for i in range(n)], type=[""] * n,
        ne=[[]] * n, bytes=[0] * n, src=[[]] * n, buffer=[-1] * n, params=[[]] * n, exec=[1] * n,
    )  # fmt: skip
    graph = s.Graph(
        t=9, graph=900, ctx=0, uid=9, source="decode", why="changed", n_nodes=n, n_exec=n,
        splits=[], nodes=nodes,
    )  # fmt: skip
    lines = [encode([graph, s.Plan(t=9, plan=900, graph=900, node=list(range(n)))])]
    measured = '{"event":"%s","t":9,"compute":%d,%s"dur":[' + ",".join("0" * n) + "]}\n"
    for i in range((READ_TO_THE_END - 2_000_000) // (2 * n) + 1):
        compute = s.Compute(
            t=9, compute=900 + i, graph=900, ctx=0, source="decode", reused=True, n_threads=1, dur=9
        )
        lines.append(encode([compute]))
        lines.append((measured % ("ops", 900 + i, '"plan":900,')).encode())
    return b"".join(lines)


def _layers() -> bytes:
    compute = s.Compute(
        t=9, compute=900, graph=0, ctx=0, source="decode", reused=False, n_threads=1, dur=9
    )
    n = ROWS // 10
    layers = s.Layers(t=9, compute=900, layer=list(range(n)), dur=[0] * n)
    return encode([compute, layers])


def _contexts() -> bytes:
    """Contexts, each with its own model and memory."""
    kinds = (s.Model, s.Tensor, s.Context, s.Memory)
    model, tensor, context, memory = (
        next(event for event in _facts() if type(event) is kind) for kind in kinds
    )
    lines: list[bytes] = []
    for i in range(100, 100 + ROWS // 2400):
        changes = {"model": i, "tensor": 0, "ctx": i, "n_ctx": i}
        for event in (model, tensor, context, memory):
            known = {k: v for k, v in changes.items() if k in event.__struct_fields__}
            lines.append(encode([msgspec.structs.replace(event, **known)]))
    return b"".join(lines)


def _nodes() -> bytes:
    n = READ_TO_THE_END // 30
    texts, zeros, lists = (",".join([unit] * n) for unit in ('""', "0", "[]"))
    columns = {
        "name": texts, "op": texts, "layer": zeros, "type": texts, "ne": lists, "bytes": zeros,
        "src": lists, "buffer": zeros, "params": lists, "exec": zeros, "nb": lists,
    }  # fmt: skip
    nodes = ",".join(f'"{name}":[{column}]' for name, column in columns.items())
    return (
        '{"event":"graph","t":9,"graph":900,"ctx":0,"uid":9,"source":"decode","why":"changed",'
        f'"n_nodes":{n},"n_exec":0,"splits":[],"buffers":[""],"nodes":{{{nodes}}}}}\n'
    ).encode()


_MANY: dict[str, Callable[[], bytes]] = {
    "newlines": lambda: b"\n" * READ_TO_THE_END,
    "marks": lambda: _lines('{"event":"mark","t":%d,"mark":%d,"name":"","phase":"begin"}'),
    "notes": lambda: _lines('{"event":"note","t":1,"name":"","data":{}}'),
    "steps": lambda: _lines(
        '{"event":"step_begin","t":9,"step":%d,"ctx":0,"kind":"decode","phase":"decode",'
        '"n_tokens":1,"n_outputs":1,"n_seqs":1}'
    ),
    "tensors": lambda: _lines(
        '{"event":"tensor","t":1,"model":0,"tensor":%d,"name":"%d","type":"%d","ne":[],"bytes":0,'
        '"buffer":"","layer":%d}',
        ROWS,
    ),
    "tokens": lambda: _lines('{"event":"token","t":1,"ctx":0,"index":%d,"id":1,"text":"","dur":0}'),
    "graphs": lambda: _lines(
        '{"event":"graph","t":9,"graph":%d,"ctx":0,"uid":9,"source":"decode","why":"changed",'
        '"n_nodes":0,"n_exec":0,"splits":[],"nodes":{"name":[],"op":[],"layer":[],"type":[],'
        '"ne":[],"bytes":[],"src":[],"buffer":[],"params":[],"exec":[]}}'
    ),
    "objects": lambda: _one('{"event":"note","t":1,"name":"","data":[', "{}", "]}"),
    "lists": lambda: _one('{"event":"note","t":1,"name":"","data":[', "[]", "]}"),
    "types": lambda: _lines(
        '{"event":"tensor","t":1,"model":0,"tensor":%d,"name":"blk.%d.a","type":"%d","ne":[],'
        '"bytes":0,"buffer":""}',
        ROWS,
    ),
    "contexts": _contexts,
    "layers": _layers,
    "nodes": _nodes,
    "kernels": _kernels,
}
