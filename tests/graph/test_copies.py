"""The copies that a scheduler makes where a graph is split among backends."""

from __future__ import annotations

import pytest

from llamacpp_instr.log.graph.kernels import is_copy, weight_read, without_copies
from llamacpp_instr.log.schema import Graph, Leaf, Nodes


def graph_of(leafs: list[str], names: list[str], src: list[list[int]]) -> Graph:
    """Vectors of four floats."""
    n = len(names)
    nodes = Nodes(
        name=names, op=["ADD"] * n, layer=[0] * n, type=["f32"] * n, ne=[[4]] * n, bytes=[16] * n,
        src=src, buffer=[-1] * n, params=[[]] * n, exec=[1] * n,
    )  # fmt: skip
    return Graph(
        t=0, graph=0, ctx=0, uid=0, source="decode", why="first", n_nodes=n, n_exec=n, splits=[],
        leafs=[Leaf(name=name, type="f32", ne=[4], bytes=16) for name in leafs], nodes=nodes,
    )  # fmt: skip


def sources(graph: Graph) -> list[list[int]]:
    assert graph.nodes is not None
    return graph.nodes.src


@pytest.mark.parametrize(
    ("name", "copied"),
    [
        ("CUDA0#inp_pos#0", True),
        ("RPC0[host:1]#l_out-1#3", True),
        ("inp_pos", False),
        ("#1", False),
    ],
)
def test_a_copy_is_recognized_by_its_name(name: str, copied: bool) -> None:
    assert is_copy(name) == copied


def test_a_copy_of_a_node_is_the_latest_node_of_that_name_before_its_reader() -> None:
    graph = graph_of(["x", "GPU#h#0"], ["h", "h", "y", "h"], [[-1], [0], [-2, -1], [2]])
    assert sources(without_copies(graph)) == [[-1], [0], [1, -1], [2]]


def test_a_copy_of_an_input_is_the_input_if_the_graph_has_it() -> None:
    leafs = ["pos", "x", "GPU#x#0", "GPU#mask#0"]
    graph = graph_of(leafs, ["a", "b"], [[-2], [-3, -4, -1]])
    assert sources(without_copies(graph)) == [[-2], [-2, -4, -1]]


def test_a_node_or_leaf_without_a_name_is_no_source_of_what_is_not_a_copy() -> None:
    graph = graph_of(["x", "", "GPU#h#0"], ["h", "", "y"], [[-1], [0], [-1, 0, -3]])
    assert sources(without_copies(graph)) == [[-1], [0], [-1, 0, 0]]


def test_a_tensor_of_another_shape_is_another_tensor() -> None:
    graph = graph_of(["GPU#h#0"], ["h", "y"], [[], [-1]])
    graph.leafs[0].ne = [8]
    assert sources(without_copies(graph)) == [[], [-1]]
    graph.leafs[0].ne, graph.leafs[0].type = [4], "f16"
    assert sources(without_copies(graph)) == [[], [-1]]


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("Vulkan0#blk.0.attn_q.weight#0", "blk.0.attn_q.weight"),
        ("Vulkan0#inp_pos#0", None),
        ("blk.0.attn_q.weight", None),
    ],
)
def test_a_copy_of_a_weight_is_that_weight(name: str, weight: str | None) -> None:
    """A device that computes a layer of the CPU gets its weights. A name alone is not one."""
    graph = graph_of([name], ["Qcur-0"], [[-1]])
    assert weight_read(graph, [0])[0] == weight


def test_a_graph_without_copies_stays_as_it_is() -> None:
    graph = graph_of(["x"], ["a"], [[-1]])
    assert without_copies(graph) is graph
