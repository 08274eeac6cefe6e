"""Which slices of a source a slice of a result needs, and along which axes an op is cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from llamacpp_instr.converters.scheduling.split import by_heads, by_rows, by_tiles
from llamacpp_instr.converters.scheduling.timed_graph import Axes, Slice
from llamacpp_instr.log import schema as s

Row = tuple[str, list[int], list[int]]
"""op, shape, sources"""


def timed(
    rows: list[Row],
    leafs: list[tuple[str, list[int]]],
    params: dict[int, list[int]] | None = None,
    views: tuple[int, ...] = (),
) -> Any:
    """A kernel for each node except `views`. Leafs have the numbers -1, -2 …; a name with `weight`
    is a weight."""
    n = len(rows)
    nodes = s.Nodes(
        name=[f"n{i}" for i in range(n)],
        op=[op for op, _, _ in rows],
        layer=[0] * n,
        type=["f32"] * n,
        ne=[ne for _, ne, _ in rows],
        bytes=[4] * n,
        src=[sources for _, _, sources in rows],
        buffer=[0] * n,
        params=[(params or {}).get(i, []) for i in range(n)],
        exec=[int(i not in views) for i in range(n)],
    )
    graph = s.Graph(
        t=0, graph=0, ctx=0, uid=0, source="decode", why="first", n_nodes=n, n_exec=n, nodes=nodes,
        splits=[s.Split(start=0, end=n, backend="CPU")], buffers=["CPU"],
        leafs=[
            s.Leaf(name=name, type="f32", ne=ne, bytes=4, tensor=i if "weight" in name else -1)
            for i, (name, ne) in enumerate(leafs)
        ],
    )  # fmt: skip
    inside = [[i] for i in range(n) if i not in views]
    kernel_of = {node: kernel for kernel, (node,) in enumerate(inside)}
    return SimpleNamespace(graph=graph, nodes=nodes, inside=inside, kernel_of=kernel_of)


def needed(
    op: str, ne: list[int], sources: list[list[int]], k: int, axis: int, params: list[int]
) -> int | None:
    """The axis of source `k` that is sliced with `axis` of the result."""
    leafs = [(f"x{i}", shape) for i, shape in enumerate(sources)]
    rows = [(op, ne, [-1 - i for i in range(len(sources))])]
    found = Axes(timed(rows, leafs, {0: params})).to_source(0, k, Slice(axis, 2))
    return None if found is None else found.axis


SAME, ROW = [8, 6, 4, 2], [8, 1, 1, 1]
PRODUCT = [[16, 8, 2, 2], [16, 6, 4, 2]]
EXPERTS = [[16, 8, 4], [16, 1, 6], [2, 6]]
ATTENTION = [[16, 6, 4, 2], [16, 32, 2, 2], [16, 32, 2, 2], [32, 6]]


@pytest.mark.parametrize(
    ("op", "ne", "sources", "k", "axes", "params"),
    [
        ("ADD", SAME, [SAME, SAME], 0, [0, 1, 2, 3], []),
        ("ADD", SAME, [SAME, SAME], 1, [0, 1, 2, 3], []),
        ("MUL", SAME, [SAME, ROW], 1, [0, None, None, None], []),
        ("RMS_NORM", SAME, [SAME], 0, [None, 1, 2, 3], []),
        ("ROPE", SAME, [SAME, [6]], 0, [None, 1, 2, 3], []),
        ("SOFT_MAX", SAME, [SAME, SAME], 1, [None, None, None, None], []),
        ("MUL_MAT", SAME, PRODUCT, 0, [1, None, 2, 3], []),
        ("MUL_MAT", SAME, PRODUCT, 1, [None, 1, 2, 3], []),
        ("MUL_MAT_ID", [8, 2, 6], EXPERTS, 0, [1, None, None, None], []),
        ("MUL_MAT_ID", [8, 2, 6], EXPERTS, 1, [None, None, 2, None], []),
        ("MUL_MAT_ID", [8, 2, 6], EXPERTS, 2, [None, 0, 1, None], []),
        ("FLASH_ATTN_EXT", [16, 4, 6, 2], ATTENTION, 0, [None, 2, 1, 3], []),
        ("FLASH_ATTN_EXT", [16, 4, 6, 2], ATTENTION, 1, [None, 2, None, 3], []),
        ("FLASH_ATTN_EXT", [16, 4, 6, 2], ATTENTION, 2, [None, 2, None, 3], []),
        ("FLASH_ATTN_EXT", [16, 4, 6, 2], ATTENTION, 3, [None, None, None, None], []),
        ("SET_ROWS", SAME, [SAME, [6], SAME], 0, [0, 1, 2, 3], []),
        ("SET_ROWS", SAME, [SAME, [6], SAME], 1, [None, None, None, None], []),
        ("PERMUTE", [8, 4, 6, 2], [SAME], 0, [0, 2, 1, 3], [0, 2, 1, 3]),
        ("PERMUTE", [4, 8, 6, 2], [SAME], 0, [2, 0, 1, 3], [1, 2, 0, 3]),
        ("PERMUTE", SAME, [SAME], 0, [None, None, None, None], [0, 0, 1, 3]),
        ("TRANSPOSE", [6, 8, 4, 2], [SAME], 0, [1, 0, 2, 3], []),
        ("GET_ROWS", [8, 6, 4], [[8, 99], [6, 4]], 1, [None, 0, 1, None], []),
        ("GET_ROWS", [8, 6, 4], [[8, 99], [6, 4]], 0, [None, None, None, None], []),
        ("CONCAT", [8, 12, 4, 2], [SAME, SAME], 0, [0, None, 2, 3], [1]),
        ("CONCAT", [16, 6, 4, 2], [SAME, SAME], 1, [None, 1, 2, 3], []),
        ("RESHAPE", [48, 4, 2], [SAME], 0, [1, 2, 3, None], []),
        ("RESHAPE", [8, 24, 2], [SAME], 0, [0, 2, 3, None], []),
        ("RESHAPE", [4, 2, 48], [[8, 48]], 0, [None, 0, 1, None], []),
        ("RESHAPE", [8, 6, 4], [SAME], 0, [None, None, None, None], []),
        ("VIEW", [8, 6, 2], [SAME], 0, [None, None, None, None], []),
        ("SSM_SCAN", SAME, [SAME], 0, [None, None, None, None], []),
    ],
)
def test_a_slice_of_a_result_needs_a_slice_of_a_source(
    op: str, ne: list[int], sources: list[list[int]], k: int, axes: list[int | None],
    params: list[int],
) -> None:  # fmt: skip
    assert [needed(op, ne, sources, k, axis, params) for axis in range(4)] == axes


def test_slices_that_share_a_slice_of_a_source_need_fewer() -> None:
    axes = Axes(timed([("FLASH_ATTN_EXT", [16, 12, 6], [-1, -2, -3])],
                      [("q", [16, 6, 12]), ("k", [16, 32, 4]), ("v", [16, 32, 1])]))  # fmt: skip
    assert axes.to_source(0, 0, Slice(1, 12)) == Slice(2, 12)
    assert axes.to_source(0, 1, Slice(1, 12)) == Slice(2, 4)
    assert axes.to_source(0, 1, Slice(1, 6)) == Slice(2, 2)
    assert axes.to_source(0, 2, Slice(1, 12)) is None, "one head, which all share"
    assert axes.to_source(0, 0, None) is None


@pytest.mark.parametrize(
    ("op", "params", "along"),
    [
        ("ADD", [], [True] * 4),
        ("MUL_MAT", [], [True] * 4),
        ("RMS_NORM", [], [False, True, True, True]),
        ("GET_ROWS", [], [False, True, True, True]),
        ("REPEAT", [], [False, True, True, True]),
        ("FLASH_ATTN_EXT", [], [False, True, True, True]),
        ("SET_ROWS", [], [True, True, False, False]),
        ("CONCAT", [2], [True, True, False, True]),
        ("CONCAT", [], [False, True, True, True]),
        ("SSM_SCAN", [], [False] * 4),
    ],
)
def test_an_op_is_computed_slice_by_slice_along_some_axes(
    op: str, params: list[int], along: list[bool]
) -> None:
    axes = Axes(timed([(op, SAME, [-1])], [("x", SAME)], {0: params}))
    assert [axes.divisible(0, axis) for axis in range(4)] == along


def test_what_is_read_through_views_is_a_slice_of_what_made_it() -> None:
    rows: list[Row] = [
        ("MUL_MAT", [32, 5], [-1, -2]),
        ("RESHAPE", [8, 4, 5], [0]),
        ("PERMUTE", [8, 5, 4], [1]),
        ("FLASH_ATTN_EXT", [8, 4, 5], [2, -3, -4]),
    ]
    leafs = [("weight", [64, 32]), ("x", [64, 5]), ("k", [8, 9, 4]), ("v", [8, 9, 4])]
    axes = Axes(timed(rows, leafs, {2: [0, 2, 1, 3]}, views=(1, 2)))
    assert [tuple(need) for need in axes.needs(1, Slice(1, 4))] == [(0, 0, Slice(0, 4))]
    assert [tuple(need) for need in axes.needs(1, Slice(2, 5))] == [(0, 0, Slice(1, 5))]
    assert [tuple(need) for need in axes.needs(1, None)] == [(0, 0, None)]


ENGINES = 3


def cut(
    op: str, ne: list[int], source: list[int] | None = None, engines: int = ENGINES
) -> dict[int, list[int]]:
    """By axis, where rows are cut."""
    made = timed([(op, ne, [-1, -2])], [("weight", source or ne), ("x", ne)])
    return by_rows(made, Axes(made), lambda _: engines).get(0, {})


@pytest.mark.parametrize(
    ("op", "ne", "source", "found"),
    [
        ("MUL_MAT", [9, 6], None, {0: [0, 3, 6, 9]}),
        ("MUL_MAT", [6, 6], None, {1: [0, 2, 4, 6]}),
        ("MUL_MAT", [6, 7], None, {1: [0, 2, 4, 7]}),
        ("MUL_MAT", [6, 3, 4], None, {2: [0, 1, 2, 4]}),
        ("MUL_MAT", [6, 3, 2, 4], None, {3: [0, 1, 2, 4]}),
        ("MUL_MAT_ID", [6, 3, 4], None, {0: [0, 2, 4, 6]}),
        ("FLASH_ATTN_EXT", [8, 3, 9], None, {1: [0, 1, 2, 3]}),
        ("FLASH_ATTN_EXT", [8, 1, 9], None, {2: [0, 3, 6, 9]}),
        ("CONCAT", [8, 3, 9], None, {2: [0, 3, 6, 9]}),
        ("RMS_NORM", [8, 6, 9], None, {1: [0, 2, 4, 6]}),
        ("RMS_NORM", [8, 1, 9], None, {}),
        ("CPY", [8, 6], [8, 6], {1: [0, 2, 4, 6]}),
        ("CPY", [6, 8], [8, 6], {0: [0, 2, 4, 6]}),
        ("CPY", [8, 2, 3], [8, 6], {1: [0, 1, 2]}),
        ("CPY", [6, 8], [48, 1], {1: [0, 2, 5, 8]}),
        ("ROPE", [8, 6, 9], None, {2: [0, 3, 6, 9]}),
        ("ROPE", [8, 6, 2], None, {1: [0, 2, 4, 6]}),
        ("ROPE", [8, 2, 2], None, {2: [0, 1, 2]}),
        ("ROPE", [8, 4, 4, 4], None, {3: [0, 1, 2, 4]}),
        ("ADD", [8], None, {}),
        ("SUM_ROWS", [1, 6], None, {}),
        ("REPEAT", [8, 6], None, {}),
    ],
)
def test_rows_are_cut_along_the_axis_that_ggml_cuts(
    op: str, ne: list[int], source: list[int] | None, found: dict[int, list[int]]
) -> None:
    assert cut(op, ne, source) == found


def test_one_engine_has_whole_kernels_and_many_have_a_row_each() -> None:
    assert cut("MUL_MAT", [9, 6], engines=1) == {}
    assert cut("MUL_MAT", [9, 6], engines=2) == {0: [0, 4, 9]}
    assert cut("ADD", [8, 3], engines=8) == {1: [0, 1, 2, 3]}


@pytest.mark.parametrize(
    ("ne", "engines", "found"),
    [
        ([12, 9], 6, {0: [0, 4, 8, 12], 1: [0, 4, 9]}),
        ([12, 9], 4, {0: [0, 6, 12], 1: [0, 4, 9]}),
        ([12, 9], 9, {0: [0, 4, 8, 12], 1: [0, 3, 6, 9]}),
        ([12, 9], 5, {0: [0, 2, 4, 7, 9, 12]}),
        ([12, 9], 2, {0: [0, 6, 12]}),
        ([12, 1], 4, {0: [0, 3, 6, 9, 12]}),
        ([12, 9, 4], 4, {0: [0, 6, 12], 2: [0, 2, 4]}),
        ([12, 9, 2], 4, {0: [0, 6, 12], 2: [0, 1, 2]}),
        ([1, 9], 4, {1: [0, 4, 9]}),
    ],
)
def test_tiles_are_as_square_as_the_number_of_engines_allows(
    ne: list[int], engines: int, found: dict[int, list[int]]
) -> None:
    made = timed([("MUL_MAT", ne, [-1, -2])], [("weight", [16, ne[0]]), ("x", [16, *ne[1:]])])
    assert by_tiles(made, Axes(made), lambda _: engines) == {0: found}


def test_tiles_of_one_engine_are_whole() -> None:
    made = timed([("MUL_MAT", [12, 9], [-1, -2])], [("weight", [16, 12]), ("x", [16, 9])])
    assert by_tiles(made, Axes(made), lambda _: 1) == {}


@pytest.mark.parametrize(
    ("op", "ne", "first", "heads"),
    [
        ("FLASH_ATTN_EXT", [8, 4, 5], "k", {0: {1: [0, 1, 2, 3, 4]}}),
        ("FLASH_ATTN_EXT", [8, 2, 5], "k", {0: {1: [0, 1, 2]}}),
        ("FLASH_ATTN_EXT", [8, 1, 5], "k", {}),
        ("FLASH_ATTN_EXT", [8, 1025, 5], "k", {}),
        ("MUL_MAT", [8, 5, 3], "k", {0: {2: [0, 1, 2, 3]}}),
        ("MUL_MAT", [8, 5, 3], "weight", {}),
        ("ADD", [8, 5, 3], "k", {}),
    ],
)
def test_what_attends_has_a_part_for_each_head(
    op: str, ne: list[int], first: str, heads: dict[int, dict[int, list[int]]]
) -> None:
    made = timed([(op, ne, [-1, -2, -3])], [(first, ne), ("x", ne), ("y", ne)])
    assert by_heads(made, Axes(made)) == heads


def test_what_reads_all_heads_is_whole_and_what_reads_one_is_divided_like_it() -> None:
    rows: list[Row] = [
        ("FLASH_ATTN_EXT", [8, 4, 5], [-1, -2, -3]),
        ("SCALE", [8, 4, 5], [0]),
        ("RESHAPE", [32, 5], [1]),
        ("MUL_MAT", [16, 5], [-4, 2]),
    ]
    leafs = [("q", [8, 5, 4]), ("k", [8, 9, 4]), ("v", [8, 9, 4]), ("weight", [32, 16])]
    made = timed(rows, leafs, views=(2,))
    heads = {1: [0, 1, 2, 3, 4]}
    assert by_heads(made, Axes(made)) == {0: heads, 1: heads}
