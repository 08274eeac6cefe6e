"""Kernels of graphs that are made by hand: what is wrong with one, and what it computes."""

from __future__ import annotations

from typing import Any

import pytest

from llamacpp_instr.log.devices import other_backends
from llamacpp_instr.log.graph.attention import Attention, Seen, Span, Ubatch, attentions
from llamacpp_instr.log.graph.kernels import (
    graph_problems,
    kernel_nodes,
    node_backends,
    plan_kernels,
    plan_problems,
    weight_read,
)
from llamacpp_instr.log.schema import Graph, Plan, Split
from tests.graph.test_copies import graph_of


def plan_of(*node: int, n: list[int] | None = None) -> Plan:
    return Plan(t=0, plan=0, graph=0, node=[*node], n=n)


def splits(*of: tuple[int, int, str]) -> list[Split]:
    return [Split(start=start, end=end, backend=backend) for start, end, backend in of]


# --- what is wrong ---


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (-3, "leaf 2"),
        (-2, None),
        (-1, None),
        (0, None),
        (1, None),
        (2, "node 2"),
        (-100, "leaf 99"),
    ],
)
def test_a_node_reads_leafs_and_nodes_of_its_graph(source: int, what: str | None) -> None:
    graph = graph_of(["a", "b"], ["c", "d"], [[], [-1, source]])
    expected = [f"node 1 reads {what}, the graph has 2 nodes, 2 leafs"] if what else []
    assert list(graph_problems(graph)) == expected


def test_a_column_of_another_length_is_named_and_its_sources_are_not_followed() -> None:
    graph = graph_of(["a"], ["b", "c"], [[-9], [0], [0]])
    assert list(graph_problems(graph)) == ["column `src` has 3 entries, `n_nodes` is 2"]


@pytest.mark.parametrize(
    ("of", "problem"),
    [
        ([], None),
        ([(0, 3)], None),
        ([(0, 1), (1, 1), (1, 3)], None),
        ([(0, 1), (2, 3)], "split 1 is 2..3, the previous one ends at 1"),
        ([(1, 3)], "split 0 is 1..3, the previous one ends at 0"),
        ([(0, 4), (4, 3)], "split 1 is 4..3, the previous one ends at 4"),
        ([(0, 2)], "the splits end at node 2, the graph at 3"),
    ],
)
def test_splits_are_all_nodes_one_after_the_other(
    of: list[tuple[int, int]], problem: str | None
) -> None:
    graph = graph_of(["a"], ["b", "c", "d"], [[-1]] * 3)
    graph.splits = splits(*((start, end, "CPU") for start, end in of))
    assert list(graph_problems(graph)) == [problem] * (problem is not None)


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (plan_of(), None),
        (plan_of(0, 2), None),
        (plan_of(0, 2, n=[2, 1]), None),
        (plan_of(0, 1, n=[2, 1]), "node 1 is repeated or out of order"),
        (plan_of(1, 1), "node 1 is repeated or out of order"),
        (plan_of(2, 0), "node 0 is repeated or out of order"),
        (plan_of(0, 2, n=[1, 2]), "node 3 of graph 0, which has 3"),
        (plan_of(3), "node 3 of graph 0, which has 3"),
        (plan_of(0, 1, n=[1]), "column `n` has 1 entries, `node` has 2"),
    ],
)
def test_the_kernels_of_a_plan_are_nodes_of_its_graph_in_order(
    plan: Plan, problem: str | None
) -> None:
    graph = graph_of(["a"], ["b", "c", "d"], [[-1]] * 3)
    assert list(plan_problems(plan, graph)) == [problem] * (problem is not None)
    graph.nodes = None
    assert "graph 0 was given without its nodes" in list(plan_problems(plan, graph))


# --- nodes and weights of kernels ---


def test_the_backend_of_a_node_is_that_of_its_split() -> None:
    graph = graph_of(["a"], ["b", "c", "d", "e"], [[-1]] * 4)
    graph.splits = splits((0, 1, "CPU"), (1, 3, "CUDA0"))
    assert node_backends(graph) == ["CPU", "CUDA0", "CUDA0", None]


def test_only_the_kernels_of_the_cpu_are_timed() -> None:
    graph = graph_of([], [], [])
    graph.splits = splits((0, 0, "RPC0"), (0, 0, "CPU"), (0, 0, "CUDA0"), (0, 0, "RPC0"))
    assert other_backends(graph) == ["RPC0", "CUDA0"]


def test_the_weight_of_a_kernel_is_the_first_that_its_nodes_read() -> None:
    graph = graph_of(["inp", "w", "v"], ["b", "c", "d"], [[-1], [0, -2], [-3, -2]])
    graph.leafs[1].tensor, graph.leafs[1].type = 0, "q4_0"
    graph.leafs[2].tensor = 1
    assert weight_read(graph, [0]) == (None, None)
    assert weight_read(graph, [0, 1, 2]) == ("w", "q4_0")
    assert weight_read(graph, [2]) == ("v", "f32")
    graph.leafs[0].tensor = 7
    assert weight_read(graph, [0]) == ("inp", "f32")


def test_a_kernel_has_the_nodes_that_compute_or_its_first() -> None:
    graph = graph_of(["a"], ["b", "c", "d"], [[-1]] * 3)
    graph.whole.exec[:] = [0, 1, 0]
    assert kernel_nodes(graph, plan_of(0, 2, n=[2, 1])) == [[1], [2]]


def test_what_passes_inside_of_a_fused_kernel_is_not_moved() -> None:
    """16 bytes each: two sources and the result, of three nodes that each read two."""
    graph = graph_of(["a", "b"], ["c", "d"], [[-1, -2], [0, -2]])
    apart = plan_kernels(graph, plan_of(0, 1))
    fused = plan_kernels(graph, plan_of(0, n=[2]))
    assert apart.bytes.tolist() == [48, 48]
    assert fused.bytes.tolist() == [96 - 2 * 16]
    assert fused.flops.tolist() == [int(apart.flops.sum())]
    assert (apart.label, fused.label) == (["ADD", "ADD"], ["ADD+ADD"])


def test_the_type_of_its_first_source_is_behind_a_matrix_product() -> None:
    graph = graph_of(["w", "x"], ["a", "b", "c", "d"], [[-1, -2], [-2, -1], [], [-1]])
    graph.leafs[0].type = "q4_0"
    graph.whole.op[:] = ["MUL_MAT", "MUL_MAT_ID", "MUL_MAT", "MUL"]
    wanted = ["MUL_MAT q4_0", "MUL_MAT_ID f32", "MUL_MAT", "MUL"]
    assert [plan_kernels(graph, plan_of(i)).label for i in range(4)] == [[of] for of in wanted]


# --- attention ---

KEYS = {"q": ("f32", [4, 2, 3]), "cache_k_l0": ("f16", [4, 16, 3]),
        "cache_v_l0": ("f16", [6, 16, 3]), "attn_inp_kq_mask": ("f16", [16, 2])}  # fmt: skip


def attention_graph(rows: int = 2, mask: str = "attn_inp_kq_mask", **types: str) -> Graph:
    """Three heads attend a window of 16 cells."""
    graph = graph_of([*list(KEYS)[:3], mask], ["x", "attn"], [[-1, -1], [-1, -2, -3, -4]])
    size = {"f32": 4, "f16": 2, "q8_0": 1}
    for leaf, letter, (type_, ne) in zip(graph.leafs, "qkvm", KEYS.values(), strict=True):
        leaf.type = types.get(letter, type_)
        leaf.ne = [ne[0], rows, *ne[2:]] if letter == "q" else ne
        leaf.bytes = size[leaf.type] * leaf.ne[0] * leaf.ne[1] * 3
    graph.whole.op[1], graph.whole.ne[1] = "FLASH_ATTN_EXT", [6, 3, rows]
    graph.whole.bytes[1] = 4 * 6 * 3 * rows
    return graph


def found_in(graph: Graph, backend: str | None = "CPU") -> Attention:
    ((node, found),) = attentions(graph, [backend, backend]).items()
    assert node == 1
    return found


def test_the_shape_of_attention_is_that_of_its_sources() -> None:
    of_cell = 2 * (4 + 6) * 3
    assert found_in(attention_graph()) == Attention(
        rows=2, heads=3, streams=1, n_kv=16, width=10, cell_bytes=of_cell, tiled=False,
        mask="cache", size=48, masks=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "types", "tiled"),
    [
        (64, {}, True),
        (63, {}, False),
        (64, {"k": "f32", "v": "f32"}, True),
        (64, {"k": "f32"}, False),
        (64, {"v": "f32"}, False),
        (64, {"q": "f16"}, False),
        (64, {"k": "q8_0", "v": "q8_0"}, False),
    ],
)
def test_ggml_computes_tiles_for_64_tokens_and_floats_of_one_type(
    rows: int, types: dict[str, str], tiled: bool
) -> None:
    assert found_in(attention_graph(rows, **types)).tiled is tiled


@pytest.mark.parametrize(
    ("mask", "backend", "known"),
    [
        ("attn_inp_kq_mask", "CPU", ("cache", 48)),
        ("attn_inp_kq_mask", None, ("cache", 48)),
        ("attn_inp_kq_mask", "CUDA0", ("other", 0)),
        ("self_kq_mask", "CPU", ("none", 0)),
        ("self_kq_mask_swa", "CPU", ("none", 0)),
        ("something", "CPU", ("other", 0)),
    ],
)
def test_the_name_of_a_mask_tells_what_it_hides(
    mask: str, backend: str | None, known: tuple[str, int]
) -> None:
    found = found_in(attention_graph(mask=mask), backend)
    assert (found.mask, found.size) == known


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"exec": 0, "op": "VIEW"}, "cache"),
        ({"exec": 1, "op": "CPY"}, "cache"),
        ({"exec": 1, "op": "CONT"}, "cache"),
        ({"exec": 1, "op": "ADD"}, "other"),
        ({"exec": 0, "op": "VIEW", "src": []}, "other"),
        ({"exec": 0, "op": "VIEW", "src": [0]}, "other"),
        ({"exec": 0, "op": "VIEW", "src": [1]}, "other"),
    ],
)
def test_keys_are_of_the_cache_through_views_and_casts(changes: dict[str, Any], kind: str) -> None:
    graph = attention_graph()
    nodes = graph.whole
    nodes.src[0], nodes.src[1] = [-2], [-1, 0, -3, -4]
    nodes.ne[0], nodes.type[0], nodes.bytes[0] = KEYS["cache_k_l0"][1], "f16", 2 * 4 * 16 * 3
    for name, value in changes.items():
        getattr(nodes, name)[0] = value
    assert found_in(graph).mask == kind


def test_attention_needs_keys_and_values_and_may_have_no_mask() -> None:
    graph = attention_graph()
    graph.whole.src[1] = [-1, -2, -3]
    assert found_in(graph).mask == "other"
    graph.whole.src[1] = [-1, -2]
    assert attentions(graph, ["CPU", "CPU"]) == {}


def test_masks_of_a_graph_are_counted_once_each() -> None:
    graph = attention_graph()
    graph.whole.op[0], graph.whole.src[0] = "FLASH_ATTN_EXT", [-1, -2, -3, -4]
    assert [of.masks for of in attentions(graph, ["CPU", "CPU"]).values()] == [1, 1]
    graph.whole.src[0] = [-1, -2, -3, -3]
    assert [of.masks for of in attentions(graph, ["CPU", "CPU"]).values()] == [2, 2]


def test_the_work_of_attention_is_that_of_the_cells_that_its_tokens_see() -> None:
    """Two tokens at positions 8 and 9 see 9 and 10 cells, and read 10 of 16."""
    kernels = plan_kernels(attention_graph(), plan_of(0, 1))
    seen = Seen(10, (Span(8, 2),), dense=True, in_order=True, size=48)
    ubatch = Ubatch(1, 2, (), (seen,), causal=True, window=0, uniform=True)
    work, whole = kernels.work(ubatch), kernels.work(None)
    assert work.flops.tolist() == [kernels.flops[0], 2 * (9 + 10) * 3 * 10]
    assert work.bytes.tolist() == [kernels.bytes[0], kernels.bytes[1] - 6 * 60]
    assert work.bound.tolist() == [False, False]
    assert whole.flops.tolist() == [kernels.flops[0], 2 * (16 + 16) * 3 * 10]
    assert whole.bytes.tolist() == kernels.bytes.tolist()
    assert whole.bound.tolist() == [False, True]
    plain = plan_kernels(attention_graph(), plan_of(0))
    assert plain.work(ubatch).bound.tolist() == [False]


def test_attention_inside_of_a_fused_kernel_is_counted_over_its_whole_window() -> None:
    kernels = plan_kernels(attention_graph(), plan_of(0, n=[2]))
    assert kernels.attention == {}
