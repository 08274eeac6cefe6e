"""The work of attention against a mask that is filled in and counted, cell by cell."""

from __future__ import annotations

from random import Random

import pytest

from llamacpp_instr.log.graph.attention import (
    TILE,
    Attention,
    Seen,
    Span,
    Ubatch,
    Work,
    attention_work,
    hiding,
    scope,
)

WIDTH = 10


def shape(rows: int, n_kv: int, **known: object) -> Attention:
    of = {"rows": rows, "heads": 3, "streams": 1, "n_kv": n_kv, "width": WIDTH, "cell_bytes": 7,
          "tiled": False, "mask": "cache", "size": n_kv, "masks": 1, **known}  # fmt: skip
    return Attention(**of)  # type: ignore[arg-type]


def ubatch(tokens: int, *seen: Seen, **known: object) -> Ubatch:
    of = {"n_threads": 2, "n_tokens": tokens, "alone": (), "caches": seen, "causal": True,
          "window": 0, "uniform": True, **known}  # fmt: skip
    return Ubatch(**of)  # type: ignore[arg-type]


def one(first: int, n: int, size: int) -> Seen:
    return Seen(first + n, (Span(first, n),), dense=True, in_order=True, size=size)


def visible(position: int, end: int, window: int, causal: bool) -> range:
    """The cells that a token sees, of those up to `end`."""
    last = position + 1 if causal else end
    return range(max(0, position + 1 - window) if window else 0, last)


def rows_of_tiles(rows: int, heads: int, threads: int) -> list[tuple[int, int]]:
    """`ggml_compute_forward_flash_attn_ext_f16`: chunks of rows of all heads, four a thread."""
    whole = rows * heads
    size = -(-whole // (4 * threads))
    n_chunks = -(-whole // size)
    if threads == 1 or n_chunks < threads:
        n_chunks = threads
    size = -(-whole // n_chunks)
    found: list[list[int]] = []
    for row in range(whole):
        is_new = row % size == 0 or row % rows == 0 or found[-1][1] == TILE
        if is_new:
            found.append([row % rows, 0])
        found[-1][1] += 1
    return [(first, n) for first, n in found]


@pytest.mark.parametrize("seed", range(60))
def test_a_kernel_without_tiles_computes_each_visible_pair(seed: int) -> None:
    random = Random(seed)
    window = random.choice((0, 0, 5, 40))
    causal = window > 0 or random.random() < 0.7
    spans, first = [], random.randrange(60)
    streams = random.choice((1, 1, 3))
    n = random.randrange(1, 30)
    for _ in range(streams):
        spans.append(Span(first, n))
        first = random.randrange(60)
    size = 128
    seen = Seen(99, tuple(spans), dense=True, in_order=streams == 1, size=size)
    mask = "cache" if causal else "none"
    of = ubatch(n * streams, seen, causal=causal, window=window, alone=tuple(spans))
    attention = shape(n, size, streams=streams, mask=mask)
    pairs = cells = 0
    for span in spans:
        end = span.first + span.n
        each = [visible(p, end, window, causal) for p in range(span.first, end)]
        pairs += sum(map(len, each))
        cells += len(set().union(*each))
    found = attention_work(attention, of)
    if window and mask == "cache":
        # a cache of the same size may also be that of layers without a window
        every = sum(p + 1 for span in spans for p in range(span.first, span.first + span.n))
        assert found.bound == (every != pairs)
        assert found.flops == 2 * every * 3 * WIDTH
    else:
        assert found == Work(2 * pairs * 3 * WIDTH, cells, False)


@pytest.mark.parametrize("seed", range(40))
def test_a_kernel_with_tiles_computes_those_with_a_visible_pair(seed: int) -> None:
    random = Random(seed)
    n, first, threads = (
        random.randrange(TILE, 3 * TILE),
        random.randrange(150),
        random.choice((1, 2, 3, 7)),
    )
    window, causal = random.choice((0, 30, 100)), True
    if not window:
        causal = random.random() < 0.6
    mask = "cache" if causal else "none"
    end = first + n if causal else n
    begin = first if causal else 0
    n_kv = -(-end // 256) * 256
    # layers with a window have a cache of another size
    caches = [one(first, n, 999), one(first, n, n_kv)] if window else [one(first, n, n_kv)]
    of = ubatch(n, *caches, n_threads=threads, causal=causal, window=window, alone=(Span(0, n),))
    columns, read = 0, set()
    for row, size in rows_of_tiles(n, 3, threads):
        seen = set()
        for p in range(begin + row, begin + row + size):
            seen |= {cell // TILE for cell in visible(p, end, window, causal)}
        columns += len(seen)
        read |= seen
    found = attention_work(shape(n, n_kv, tiled=True, mask=mask), of)
    assert not found.bound
    assert found.flops == 2 * columns * TILE * TILE * WIDTH
    assert found.cells == len(read) * TILE


@pytest.mark.parametrize(
    ("attention", "of", "cells"),
    [
        # nothing is known of the compute
        (shape(4, 256), None, 256),
        # nor of another mask
        (shape(4, 256, mask="other"), ubatch(4, one(0, 4, 256)), 256),
        # no cache of this size
        (shape(4, 256), ubatch(4, one(0, 4, 255)), 256),
        # it is not known which tokens see what; 9 cells are in use
        (shape(4, 256), ubatch(4, Seen(9, (), True, True, 256)), 9),
        # fewer tokens than rows
        (shape(4, 256), ubatch(4, Seen(9, (Span(5, 3),), True, True, 256)), 9),
        # tokens of a cache that see each other
        (shape(4, 256), ubatch(4, one(5, 4, 256), causal=False), 9),
        # a window that hides what the log does not tell
        (shape(4, 256, mask="none"),
         ubatch(4, alone=(Span(0, 4),), window=3, uniform=False), 4),
    ],
)  # fmt: skip
def test_what_is_not_known_is_a_bound(attention: Attention, of: Ubatch | None, cells: int) -> None:
    if attention.mask == "none":
        attention = shape(4, 256, mask="none", masks=2)
    found = attention_work(attention, of)
    assert found == Work(2 * 4 * 3 * cells * WIDTH, cells, True)


def test_tiles_that_are_not_known_are_all() -> None:
    """Used cells may lie anywhere in the window."""
    for of, threads in ((None, 1), (ubatch(70, Seen(9, (), True, True, 300), n_threads=3), 3)):
        found = attention_work(shape(70, 300, tiled=True), of)
        n = len(rows_of_tiles(70, 3, threads))
        assert found == Work(2 * n * TILE * 320 * WIDTH, 300, True)


def test_a_window_hides_what_is_as_far_away() -> None:
    seen = one(5, 4, 256)
    for window, uniform, hidden in ((0, True, 0), (9, True, 0), (8, True, 8), (18, False, 0),
                                    (17, False, None)):  # fmt: skip
        assert hiding(ubatch(4, seen, uniform=uniform), seen, window) == hidden
    assert hiding(ubatch(4, seen, causal=False), seen, 8) is None
    sparse = Seen(9, seen.spans, dense=False, in_order=True, size=256)
    assert hiding(ubatch(4, sparse), sparse, 8) is None
    assert hiding(ubatch(4), Seen(9), 8) == 0


def test_the_cache_of_another_size_tells_which_layer_has_the_window() -> None:
    whole, sliding = one(0, 4, 512), one(0, 4, 256)
    of = ubatch(4, whole, sliding, window=100)
    assert scope(shape(4, 512), of) == ([whole], (0,))
    assert scope(shape(4, 256), of) == ([sliding], (100,))
    assert scope(shape(4, 99), of) == ([], (0,))
    alike = ubatch(4, whole, one(0, 4, 512), window=100)
    assert scope(shape(4, 512), alike) == (list(alike.caches), (0, 100))
    assert scope(shape(4, 512), ubatch(4, whole, sliding)) == ([whole], (0,))
    assert scope(shape(4, 512), ubatch(4, whole, window=100)) == ([whole], (0, 100))
    alone = ubatch(4, alone=(Span(0, 4),), window=100)
    seen = Seen(4, alone.alone, True, True)
    assert scope(shape(4, 4, mask="none"), alone) == ([seen], (0,))
    assert scope(shape(4, 4, mask="none", masks=2), alone) == ([seen], (0, 100))
    several = ubatch(4, window=0)
    assert scope(shape(4, 4, mask="none"), several) == ([Seen(4, (), True, False)], (0,))
