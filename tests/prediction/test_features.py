"""What the times of kernels depend on, from graphs that are made by hand."""

from __future__ import annotations

import pytest

from llamacpp_instr.log.graph.attention import Seen, Span, Ubatch
from llamacpp_instr.log.graph.kernels import cpu_plan
from llamacpp_instr.log.schema import Graph, Plan
from llamacpp_instr.prediction.model import Other, Product, features, ubatch_of
from tests.graph.test_copies import graph_of
from tests.graph.test_kernels import attention_graph
from tests.prediction.test_model import product_graph


def kernels_of(graph: Graph, threads: int = 1, ubatch: Ubatch | None = None) -> list[object]:
    return list(features(graph, cpu_plan(graph), ubatch, threads).kernels)


def product_of(graph: Graph) -> Product:
    product = kernels_of(graph)[0]
    assert isinstance(product, Product)
    return product


def test_a_product_multiplies_its_activations_by_a_weight_and_reads_it() -> None:
    """Six rows of eight F16 weights, for three tokens."""
    product, add = kernels_of(product_graph(8, 6, 3))
    assert product == Product(
        "F16", False, False, 3, macs=8 * 6 * 3, inputs=8 * 3, bytes=8 * 6 * 2, dots=6 * 3
    )
    assert add == Other("ADD", rows=3, units=3 * (6 * 3 * 4), flops=0, bytes=0)


def test_the_working_set_is_all_that_a_compute_reads_and_writes() -> None:
    graph = product_graph(8, 6, 3)
    weight, inputs, result = 8 * 6 * 2, 8 * 3 * 4, 6 * 3 * 4
    found = features(graph, cpu_plan(graph), None, 1)
    assert found.working_set == (weight + inputs + result) + 3 * result


def test_a_weight_in_the_buffer_of_repacked_ones_is_repacked() -> None:
    graph = product_graph(8, 6)
    graph.buffers = ["CPU", "CPU_REPACK"]
    for buffer, repacked in (("CPU_REPACK", True), ("CPU", False), ("CPU_REPACK_2", False)):
        graph.leafs[0].buffer = buffer
        product = kernels_of(graph)[0]
        assert isinstance(product, Product)
        assert product.repacked is repacked


@pytest.mark.parametrize(("used", "tokens", "each"), [(2, 8, 4), (1, 1, 1), (2, 9, 4), (2, 11, 6)])
def test_an_expert_has_its_share_of_the_tokens(used: int, tokens: int, each: int) -> None:
    """Four experts: on average, each gets a quarter, rounded, and at least one."""
    graph = product_graph(8, 6)
    nodes, weight = graph.whole, graph.leafs[0]
    nodes.op[0], weight.ne = "MUL_MAT_ID", [8, 6, 4]
    nodes.ne[0] = nodes.ne[1] = [6, used, tokens]
    product = kernels_of(graph)[0]
    assert isinstance(product, Product)
    assert (product.experts, product.tokens) == (True, each)
    assert product.macs == 8 * 6 * used * tokens


def test_a_product_of_two_activations_is_another_op_with_its_operations() -> None:
    graph = graph_of(["x"], ["a", "b", "c"], [[-1], [0, -1], [1]])
    graph.whole.op[:] = ["SCALE", "MUL_MAT", "SCALE"]
    scale, product, _ = kernels_of(graph)
    assert isinstance(product, Other)
    assert isinstance(scale, Other)
    assert (product.op, product.flops) == ("MUL_MAT, one token", 2 * 4 * 4)
    assert scale.flops == 0


def test_ops_of_one_token_have_a_name_of_their_own() -> None:
    """As many as the largest product has; without products, one."""
    assert [getattr(of, "op", "") for of in kernels_of(product_graph(8, 6, 1))] == [
        "", "ADD, one token"
    ]  # fmt: skip
    assert [getattr(of, "op", "") for of in kernels_of(product_graph(8, 6, 2))] == ["", "ADD"]
    alone = graph_of(["x"], ["a"], [[-1, -1]])
    assert kernels_of(alone) == [Other("ADD, one token", 1, 48, 0, 48)]


@pytest.mark.parametrize(
    ("op", "words", "name"),
    [
        ("GLU", [2, 0], "GLU SWIGLU"), ("GLU", [1, 0], "GLU GEGLU"), ("GLU", [99, 0], "GLU 99"),
        ("UNARY", [8], "UNARY GELU"), ("ROPE", [0, 4, 2, *[0] * 13], "ROPE NEOX"),
        ("SCALE", [0, 0], "SCALE"),
    ],
)  # fmt: skip
def test_an_op_of_several_functions_is_named_by_its_own(
    op: str, words: list[int], name: str
) -> None:
    graph = product_graph(8, 6, 2)
    graph.whole.op[1], graph.whole.params[1] = op, words
    assert getattr(kernels_of(graph)[1], "op", "") == name


@pytest.mark.parametrize(
    ("rows", "threads", "busiest"), [(1, 1, 1), (1, 2, 1), (4, 2, 2), (5, 2, 3), (7, 3, 3)]
)
def test_the_busiest_thread_computes_whole_rows(rows: int, threads: int, busiest: int) -> None:
    add = kernels_of(product_graph(8, 6, rows), threads)[1]
    assert isinstance(add, Other)
    assert add.rows == pytest.approx(busiest)
    assert add.units == pytest.approx(3 * (6 * 4) * busiest)


@pytest.mark.parametrize(
    ("rows", "cells", "types", "label"),
    [
        (2, 16, {}, "FLASH_ATTN_EXT 4 short alone"),
        (2, 256, {}, "FLASH_ATTN_EXT 4 short alone"),
        (2, 257, {}, "FLASH_ATTN_EXT 4 long alone"),
        (64, 512, {}, "FLASH_ATTN_EXT 4 long tiled alone"),
    ],
)
def test_attention_is_named_by_its_keys_its_window_and_its_way(
    rows: int, cells: int, types: dict[str, str], label: str
) -> None:
    """The graph has no product, so that it counts as one of a single token."""
    graph = attention_graph(rows, **types)
    for leaf in graph.leafs[1:3]:
        leaf.ne = [leaf.ne[0], cells, 3]
    _, attention = kernels_of(graph)
    assert isinstance(attention, Other)
    assert attention.op == label
    assert attention.rows == rows * 3
    assert attention.units == (rows * 3 * cells if "tiled" in label else 0)
    assert attention.flops > 0


@pytest.mark.parametrize(
    ("head", "heads", "apart"),
    [(128, 4, True), (256, 2, True), (128, 2, False), (64, 16, False), (512, 1, False)],
)
def test_keys_of_a_head_may_lie_far_apart(head: int, heads: int, apart: bool) -> None:
    """256 bytes or more, each after 1,024 or more, most of them of other heads."""
    graph = attention_graph()
    keys = graph.leafs[1]
    keys.ne, keys.bytes = [head, 512, heads], 2 * head * 512 * heads
    _, attention = kernels_of(graph)
    assert isinstance(attention, Other)
    assert attention.op == f"FLASH_ATTN_EXT 4 long alone{' apart' * apart}"


@pytest.mark.parametrize(("known", "bound"), [(True, False), (False, True)])
def test_attention_whose_cells_are_not_known_is_a_bound(known: bool, bound: bool) -> None:
    ubatch = ubatch_of(2, 3, 1, 48) if known else None
    _, attention = kernels_of(attention_graph(), 1, ubatch)
    assert isinstance(attention, Other)
    assert attention.bound is bound


def test_an_embedding_as_output_lies_where_its_file_begins() -> None:
    """Two megabytes of it, and of a larger one 48 MiB."""
    small, large = (product_graph(1024, rows) for rows in (1024, 32_768))
    assert product_of(small).start == 0
    for graph in (small, large):
        graph.leafs[0].name = "token_embd.weight"
    assert product_of(small).start == 2 << 20
    assert product_of(large).start == 48 << 20
    large.buffers = ["CPU", "CPU_REPACK"]
    large.leafs[0].buffer = "CPU_REPACK"
    assert product_of(large).start == 0, "a copy, which is not mapped from the file"


def test_attention_of_several_tokens_is_not_alone() -> None:
    graph = attention_graph()
    graph.whole.op[0], graph.whole.ne[0], graph.whole.src[0] = "MUL_MAT", [4, 2], [-2, -1]
    _, attention = kernels_of(graph, threads=4)
    assert isinstance(attention, Other)
    assert (attention.op, attention.rows) == ("FLASH_ATTN_EXT 4 short", 2)


def test_what_the_tokens_see_is_what_attention_computes() -> None:
    graph = attention_graph()
    few, many = (kernels_of(graph, 1, ubatch_of(2, past, 1, 48))[1] for past in (3, 8))
    assert isinstance(few, Other)
    assert isinstance(many, Other)
    assert (few.flops, many.flops) == (2 * (4 + 5) * 30, 2 * (9 + 10) * 30)


def test_the_tokens_of_a_planned_step_follow_each_other_in_one_sequence() -> None:
    seen = Seen(13, (Span(8, 5),), dense=True, in_order=True, size=256)
    assert ubatch_of(5, 8, 3, 256) == Ubatch(
        n_threads=3, n_tokens=5, alone=(Span(0, 5),), caches=(seen,), causal=True, window=0,
        uniform=True,
    )  # fmt: skip


def test_a_plan_without_kernels_has_no_features() -> None:
    found = features(graph_of([], [], []), Plan(t=0, plan=0, graph=0, node=[]), None, 1)
    assert (found.kernels, found.working_set) == ([], 0)
