"""The work of FLASH_ATTN_EXT: the cells that ggml's kernel attends, not the window it is given.

The cache's window is padded to 256 cells, and the mask hides those that a token must not see. The
kernel of ggml-cpu (`ggml_compute_forward_flash_attn_ext` in ggml/src/ggml-cpu/ops.cpp) works in one
of two ways:

- rows: it skips each masked cell of each token. Used for few tokens, and for quantized caches.
- tiles of 64 tokens by 64 cells: it skips a tile if all of it is masked, and computes all of every
  other tile, including what lies beyond the last token. Used only where tokens, keys and values are
  floats and there are at least 64 tokens.

Invariant: a count that is not a bound equals the multiplications and additions of both products.
The softmax is left out. Where the log does not record what the mask lets through, the count is that
of a mask that hides as little as the log allows, and is marked as a bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from llamacpp_instr.log.graph.experts import Used
from llamacpp_instr.log.graph.ops import tensor
from llamacpp_instr.log.schema import Graph

TILE = 64
"""GGML_FA_TILE_Q and GGML_FA_TILE_KV: ggml/src/ggml-cpu/common.h"""


class Span(NamedTuple):
    """Consecutive tokens of one sequence: positions `first` to `first + n - 1`."""

    first: int
    n: int


class Seen(NamedTuple):
    """What the tokens of a ubatch find in one cache."""

    used: int
    """cells in use, including those of other sequences"""
    spans: tuple[Span, ...] = ()
    """the tokens, if each of them sees as many cells as its position says; empty if not known"""
    dense: bool = False
    """all positions that a sliding window shows are in the cache"""
    in_order: bool = False
    """position i is in cell i"""
    size: int = 0
    """cells in total"""


class Ubatch(NamedTuple):
    """What is known of a compute, of its masks and of its experts."""

    n_threads: int
    n_tokens: int
    alone: tuple[Span, ...]
    """the tokens, if they are of one sequence and see only each other; for models without cache"""
    caches: tuple[Seen, ...]
    causal: bool
    window: int
    """of the layers that have a sliding one, 0 if the model has none"""
    uniform: bool
    """the window moves with the token; not chunks, and not to both sides"""
    experts: Used = Used()


@dataclass(frozen=True)
class Attention:
    """The shape of one FLASH_ATTN_EXT."""

    rows: int
    """tokens of each stream"""
    heads: int
    streams: int
    n_kv: int
    """cells of the window, padding included"""
    width: int
    """length of a key and a value together"""
    cell_bytes: int
    """of the keys and values of one cell of all streams"""
    tiled: bool
    mask: str
    """`cache`, `none` (models without one) or `other`: a mask without facts in the log"""
    size: int
    """cells of the cache in total"""
    masks: int
    """different masks in the graph"""


class Work(NamedTuple):
    """Of one kernel."""

    flops: int
    cells: int
    """cells whose keys and values are read"""
    bound: bool
    """whether these are upper bounds"""


def attentions(graph: Graph, backends: Sequence[str | None]) -> dict[int, Attention]:
    """The attention of every node that computes it; the graph must have its nodes, whose backends
    are `backends`."""
    nodes = graph.whole
    found = [i for i, op in enumerate(nodes.op) if op == "FLASH_ATTN_EXT" and len(nodes.src[i]) > 2]
    masks = {_mask(graph, i) for i in found}
    return {i: _attention(graph, i, backends[i], len(masks)) for i in found}


def _attention(graph: Graph, node: int, backend: str | None, n_masks: int) -> Attention:
    nodes = graph.whole
    read = [tensor(graph, source) for source in nodes.src[node][:3]]
    types = [of.type for of in read]
    q, k, v = ((*of.ne, 1, 1, 1, 1)[:4] for of in read)
    same_floats = types[0] == "f32" and types[1] == types[2] and types[1] in ("f16", "f32")
    key, mask = _leaf(graph, nodes.src[node][1]), _mask(graph, node)
    kind, size = "other", 0
    if backend in ("CPU", None) and mask is not None:
        name = graph.leafs[mask].name
        if name == "attn_inp_kq_mask" and key and key[0].startswith("cache_k_l"):
            kind, size = "cache", key[1]
        elif name.startswith("self_kq_mask"):
            kind = "none"
    return Attention(
        rows=q[1],
        heads=q[2],
        streams=q[3],
        n_kv=k[1],
        width=q[0] + v[0],
        cell_bytes=sum(of.bytes for of in read[1:]) // max(1, k[1]),
        tiled=same_floats and q[1] >= TILE,
        mask=kind,
        size=size,
        masks=n_masks,
    )


def _leaf(graph: Graph, source: int) -> tuple[str, int] | None:
    """Name and cells (of all streams) of the leaf that a source is a view or a cast of, or None."""
    nodes = graph.whole
    while source >= 0:
        looks_through = not nodes.exec[source] or nodes.op[source] in ("CPY", "CONT")
        if not looks_through or not nodes.src[source] or nodes.src[source][0] >= source:
            return None
        source = nodes.src[source][0]
    leaf = graph.leaf(source)
    return leaf.name, prod(leaf.ne[1:])


def _mask(graph: Graph, node: int) -> int | None:
    """The number of the leaf that is a node's mask, or None for another one."""
    nodes = graph.whole
    sources = nodes.src[node]
    return -1 - sources[3] if len(sources) > 3 and sources[3] < 0 else None


def attention_work(attention: Attention, ubatch: Ubatch | None) -> Work:
    """The work of one kernel; `ubatch` is None if nothing is known of its compute."""
    seen, windows = scope(attention, ubatch) if ubatch else ([], ())
    if ubatch is None or not seen:
        return _most(attention, attention.n_kv, ubatch)
    works = {_work(attention, ubatch, of, window) for of in seen for window in windows}
    most = max(works)
    return most._replace(bound=most.bound or len(works) > 1)


def scope(attention: Attention, ubatch: Ubatch) -> tuple[list[Seen], tuple[int, ...]]:
    """The caches that the tokens may see, none if nothing is known, and the windows that the layer
    may have, 0 for none. One of each if the log records it."""
    cached = attention.mask == "cache"
    if attention.mask == "none":
        seen = [Seen(ubatch.n_tokens, ubatch.alone, True, bool(ubatch.alone))]
    else:
        # layers with a window have a cache of their own, which its size identifies if it differs
        seen = [of for of in ubatch.caches if cached and of.size == attention.size]
    if not seen or not ubatch.window:
        return seen, (0,)
    if cached and len(ubatch.caches) == 2 and len(seen) == 1:
        # llama_kv_cache_iswa: the first cache is that of the layers without a window
        return seen, (ubatch.window if seen[0] is ubatch.caches[1] else 0,)
    return seen, (0, ubatch.window) if attention.masks > 1 or cached else (0,)


def _work(a: Attention, ubatch: Ubatch, seen: Seen, window: int) -> Work:
    spans = seen.spans
    known = hiding(ubatch, seen, window)
    unknown = (
        sum(span.n for span in spans) != a.rows * a.streams
        or known is None
        or (not ubatch.causal and a.mask == "cache")
        or (a.tiled and not (seen.in_order and a.streams == 1 and len(spans) == 1))
        or (a.tiled and _most_tiles(a, ubatch.n_threads) > MOST_TILES)
    )
    if unknown:
        return _most(a, min(a.n_kv, seen.used), ubatch)
    if a.tiled:
        flops, first, end = _tiled(a, spans[0], ubatch, window)
        return Work(flops, min(end, a.n_kv) - first, False)
    pairs = cells = 0
    for span in spans:
        end = span.first + span.n
        low = _low(span.first, window)
        cells += end - low
        if ubatch.causal:
            # token p sees p + 1 cells, at most the window
            full = max(0, min(span.n, end - window)) if window else 0
            part = span.n - full
            pairs += part * span.first + part * (part + 1) // 2 + full * window
        else:
            pairs += span.n * end
    return Work(2 * pairs * a.heads * a.width, min(cells, a.n_kv * a.streams), False)


def hiding(ubatch: Ubatch, seen: Seen, window: int) -> int | None:
    """The window if it hides a position from a token, 0 if none is so far away; None if the log
    does not record which it hides."""
    last = max((span.first + span.n for span in seen.spans), default=0)
    # a window to both sides hides what is further away than half of it
    limit = window if ubatch.uniform else window // 2
    if not 0 < limit < last:
        return 0
    return window if seen.dense and ubatch.uniform and ubatch.causal else None


def _low(position: int, window: int) -> int:
    return max(0, position + 1 - window) if window else 0


def _tiled(a: Attention, span: Span, ubatch: Ubatch, window: int) -> tuple[int, int, int]:
    """FLOPs, the first cell that is read, and the one after the last."""
    columns = 0
    for (row, n), times in tiles(a.rows, a.heads * a.streams, ubatch.n_threads).items():
        end = span.first + (row + n if ubatch.causal else span.n)
        low = _low(span.first + row, window)
        columns += times * (-(-end // TILE) - low // TILE)
    low = _low(span.first, window) // TILE * TILE
    end = -(-(span.first + span.n) // TILE) * TILE
    return 2 * columns * TILE * TILE * a.width, low, end


def _most(a: Attention, cells: int, ubatch: Ubatch | None) -> Work:
    """The work if every token sees `cells` cells."""
    rows = a.rows * a.heads * a.streams
    if a.tiled:
        n_threads = ubatch.n_threads if ubatch else 1
        n = _most_tiles(a, n_threads)
        if n <= MOST_TILES:
            n = tiles(a.rows, a.heads * a.streams, n_threads).total()
        # used cells may lie anywhere
        return Work(2 * n * TILE * -(-a.n_kv // TILE) * TILE * a.width, a.n_kv, True)
    return Work(2 * rows * cells * a.width, min(a.n_kv, cells), True)


MOST_TILES = 1 << 15
"""beyond which they are not counted one by one; 8,192 tokens with 128 heads have half as many"""


def _most_tiles(a: Attention, n_threads: int) -> int:
    """Each end of a head or of a chunk adds at most one tile."""
    rows = a.rows * a.heads * a.streams
    return rows // TILE + a.heads * a.streams + min(rows, 4 * max(1, n_threads)) + 1


@lru_cache(16)
def tiles(rows: int, heads: int, n_threads: int) -> Counter[tuple[int, int]]:
    """How often each tile of rows (the first, and how many) occurs over all heads.

    The kernel divides the rows of all heads among chunks, four for each thread, and a tile does not
    go beyond its chunk or its head. On a machine with NUMA enabled in ggml, chunks are larger.
    """
    found: Counter[tuple[int, int]] = Counter()
    total, n_threads = rows * heads, max(1, n_threads)
    chunk = max(1, -(-total // (4 * n_threads)))
    n_chunks = -(-total // chunk)
    if n_threads == 1 or n_chunks < n_threads:
        n_chunks = n_threads
    per_chunk = max(1, -(-total // n_chunks))
    for begin in range(0, total, per_chunk):
        end = min(begin + per_chunk, total)
        while begin < end:
            row = begin % rows
            n = min(TILE, end - begin, rows - row)
            found[row, n] += 1
            begin += n
    return found
