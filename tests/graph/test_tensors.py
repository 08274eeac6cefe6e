"""The bytes of tensors against the addresses that their strides name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from llamacpp_instr.log.graph.kernels import node_work, plan_kernels
from llamacpp_instr.log.graph.ops import tensor
from llamacpp_instr.log.schema import Graph, Plan
from llamacpp_instr.log.session import load_session
from tests.conftest import Instr
from tests.graph.test_copies import graph_of

ITEM = {"f32": 4, "f16": 2, "i32": 4, "i64": 8}


def addresses(graph: Graph, number: int) -> int:
    """Different bytes of a tensor, from its strides; leafs have none, and no gaps."""
    if number < 0:
        return graph.leafs[-1 - number].bytes
    nodes = graph.nodes
    assert nodes is not None
    assert nodes.nb is not None
    ne, item = nodes.ne[number], ITEM[nodes.type[number]]
    nb = nodes.nb[number][: len(ne)]
    ends = sum((n - 1) * step for n, step in zip(ne, nb, strict=True)) + 1
    # bytes as places in one large array, of which each element takes `item`
    places = as_strided(np.arange(ends), [*ne], [8 * step for step in nb])
    return len(np.unique(places)) * item


@pytest.mark.parametrize("ctx", [512, 2048])
def test_a_view_with_gaps_has_the_bytes_of_its_elements(instr: Instr, tmp_path: Path, ctx: int):
    """Without flash attention, values are columns of a cache as long as the context."""
    settings = ("-n", 3, "--flash-attn", "off", "--level", "verbose", "--ctx", ctx)
    instr("run", "demo", "--prompt", "Once upon a time", *settings, "--log", "a.log")
    session = load_session(tmp_path / "a.log")
    seen = 0
    for graph in session.graphs.values():
        nodes = graph.nodes
        assert nodes is not None
        for i, op in enumerate(nodes.op):
            if op in ("MUL_MAT", "SOFT_MAX", "CONT", "GLU", "ADD", "RMS_NORM", "ROPE"):
                own = sum(addresses(graph, of) for of in (*nodes.src[i], i))
                assert node_work(graph, i)[1] == own, nodes.name[i]
                seen += op == "MUL_MAT" and any(
                    s >= 0 and addresses(graph, s) < nodes.bytes[s] for s in nodes.src[i]
                )
    assert seen  # products that read a view with gaps


def test_the_cells_of_several_streams_have_no_gap_between_them() -> None:
    """Each sequence has a cache of its own, of which attention reads the first 256 of 512 cells."""
    graph = graph_of(["q", "k", "v", "mask"], ["node_0"], [[-1, -2, -3, -4]])
    nodes = graph.nodes
    assert nodes is not None
    nodes.op[0], nodes.ne[0], nodes.bytes[0] = "FLASH_ATTN_EXT", [64, 4, 1, 3], 4 * 64 * 4 * 3
    for leaf, type_, ne in zip(
        graph.leafs,
        ("f32", "f16", "f16", "f16"),
        ([64, 1, 4, 3], [64, 256, 2, 3], [64, 256, 2, 3], [256, 1, 1, 3]),
        strict=True,
    ):
        leaf.type, leaf.ne, leaf.bytes = type_, ne, int(np.prod(ne)) * ITEM[type_]
    for leaf in graph.leafs[1:3]:
        leaf.bytes = 2 * 64 * 2 * (2 * 512 + 256)  # from the first cell to the last
    cached = 2 * (2 * 64 * 256 * 2 * 3)
    kernels = plan_kernels(graph, Plan(t=0, plan=0, graph=0, node=[0]))
    assert kernels.bytes.tolist() == [4 * 64 * 4 * 3 * 2 + cached + 2 * 256 * 3]
    assert kernels.attention[0].cell_bytes == cached // 256


def test_leafs_count_down_from_minus_one_and_nodes_up_from_zero() -> None:
    graph = graph_of(["a", "b"], ["c", "d"], [[-1, -2], [0, -2]])
    names = [tensor(graph, number).name for number in (-2, -1, 0, 1)]
    assert names == ["b", "a", "c", "d"]


@pytest.mark.parametrize(
    ("type_", "ne", "span", "n_bytes"),
    [
        ("f32", [8, 2], 64, 64),
        ("f32", [8, 2], 900, 64),
        ("f32", [8, 2], 40, 40),
        ("q4_0", [64, 3], 500, 6 * 18),
        ("q4_0", [64, 3], 100, 100),
        ("of_tomorrow", [64, 3], 500, 500),
    ],
)
@pytest.mark.parametrize("number", [-1, 0])
def test_a_tensor_has_the_bytes_of_its_elements_but_no_more_than_its_span(
    type_: str, ne: list[int], span: int, n_bytes: int, number: int
) -> None:
    """Gaps do not count. Elements that overlap have no more than their span, and for a type that is
    not known the span is all that there is."""
    graph = graph_of(["a"], ["b"], [[-1]])
    nodes, leaf = graph.whole, graph.leafs[0]
    nodes.type[0], nodes.ne[0], nodes.bytes[0] = type_, ne, span
    leaf.type, leaf.ne, leaf.bytes = type_, ne, span
    assert tensor(graph, number)[1:] == (type_, ne, n_bytes)
