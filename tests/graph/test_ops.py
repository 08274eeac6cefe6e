"""Ops and names: cases worked out by hand, and names from llama.cpp."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest

from llamacpp_instr.debugger.tensors import ggml, tensor_at
from llamacpp_instr.llama.native import POINTER, declare
from llamacpp_instr.log.graph.kernels import plan_kernels
from llamacpp_instr.log.graph.ops import (
    block_of,
    blocks_of,
    bytes_moved,
    bytes_written,
    flops,
    op_params,
    role_of,
)
from llamacpp_instr.log.schema import Leaf, Plan
from llamacpp_instr.prediction.probe.measure import F32, Graph
from tests.graph.test_copies import graph_of


@pytest.mark.parametrize(
    ("op", "name", "weights", "layer", "block"),
    [
        ("GET_ROWS", "embd", ["token_embd.weight", "inp_tokens"], -1, "embedding"),
        ("GET_ROWS", "pos_embd", ["position_embd.weight"], -1, "embedding"),
        ("RMS_NORM", "norm-0", [], 0, "norm"),
        ("MUL", "attn_norm-0", ["blk.0.attn_norm.weight"], 0, "norm"),
        ("MUL", "Qcur_normed-0", ["blk.0.attn_q_norm.weight"], 0, "norm"),
        ("ADD", "norm_w", ["output_norm.bias"], -1, "norm"),
        ("MUL_MAT", "Qcur-0", ["blk.0.attn_q.weight"], 0, "attention"),
        ("MUL_MAT", "node_7", ["blk.0.attn_output.weight"], 0, "attention"),
        ("ROPE", "Qcur-0", ["inp_pos"], 0, "attention"),
        ("MUL_MAT", "kq-3", [], 3, "attention"),
        ("SOFT_MAX", "kq_soft_max-3", ["attn_inp_kq_mask"], 3, "attention"),
        ("FLASH_ATTN_EXT", "node_21", [], 3, "attention"),
        ("CONT", "kqv_out-3", [], 3, "attention"),
        ("ADD", "ffn_inp-3", [], 3, "attention"),
        ("SET_ROWS", "cache_k_l3 (view)", ["attn_inp_k_idxs"], 3, "kv"),
        ("CPY", "node_9", ["cache_v_l3"], 3, "kv"),
        ("GET_ROWS", "node_9", ["cache_s_l0 (reshaped)", "rs_s_copy"], 0, "kv"),
        ("ROPE", "cache_k_l3 (view)", [], -1, "kv"),
        ("MUL_MAT", "ffn_gate-3", ["blk.3.ffn_gate.weight"], 3, "feed-forward"),
        ("MUL_MAT_ID", "ffn_moe_up-3", ["blk.3.ffn_up_exps.weight"], 3, "feed-forward"),
        ("SOFT_MAX", "ffn_moe_probs-3", [], 3, "feed-forward"),
        ("DIV", "ffn_moe_weights_norm-3", [], 3, "feed-forward"),
        ("GLU", "ffn_swiglu-3", [], 3, "feed-forward"),
        ("ADD", "l_out-3", [], 3, "feed-forward"),
        ("MUL_MAT", "node_5", ["blk.0.ssm_in.weight"], 0, "attention"),
        ("SSM_SCAN", "node_5", ["blk.0.ssm_a"], 0, "attention"),
        ("RWKV_WKV6", "node_5", [], 0, "attention"),
        ("MUL_MAT", "node_5", ["blk.0.channel_mix_key.weight"], 0, "feed-forward"),
        ("MUL_MAT", "node_5", ["blk.0.time_mix_key.weight"], 0, "attention"),
        ("MUL_MAT", "enc_q", ["enc.blk.0.attn_q.weight"], 0, "attention"),
        ("MUL", "result_norm", ["output_norm.weight"], -1, "norm"),
        ("MUL_MAT", "result_output", ["output.weight"], -1, "output"),
        ("MUL_MAT", "node_99", ["token_embd.weight"], -1, "output"),
        ("GET_ROWS", "node_30", ["out_ids"], 3, "output"),
        ("ADD", "node_30", [], 3, "other"),
    ],
)
def test_block_of(op, name, weights, layer, block):
    assert block_of(op, name, weights, layer) == block


def test_a_node_that_says_nothing_goes_with_what_it_reads():
    op = ["SCALE", "MUL_MAT", "SCALE", "MUL_MAT", "ADD", "SCALE", "SCALE"]
    name = [f"node_{i}" for i in range(7)]
    layer = [-1, 0, 0, 0, 0, 0, -1]
    leafs = ["inp", "blk.0.attn_q.weight", "blk.0.ffn_up.weight"]
    src = [[-1], [-2, 0], [1], [-3, 2], [3], [1], [5]]
    assert blocks_of(op, name, layer, src, leafs) == [
        "embedding",  # before the first layer
        "attention",
        "attention",
        "feed-forward",
        "feed-forward",
        "attention",
        "output",  # after the last layer
    ]


def test_a_node_between_two_layers_or_without_layers_belongs_to_no_block():
    op, name, src = ["SCALE"] * 5, [f"node_{i}" for i in range(5)], [[-1]] * 5
    blocks = blocks_of(op, name, [-1, 0, -1, 0, -1], src, ["inp"])
    assert blocks == ["embedding", "other", "other", "other", "output"]
    assert blocks_of(op[:2], name[:2], [-1, -1], src[:2], ["inp"]) == ["embedding"] * 2


def test_a_node_that_reads_nothing_goes_with_the_one_before_it_in_its_layer():
    """Not with that of another layer, nor with a norm, nor with one that comes later."""
    op = ["MUL_MAT", "SCALE", "SCALE", "RMS_NORM", "SCALE"]
    name = ["ffn_up-0", *(f"node_{i}" for i in range(1, 5))]
    src = [[-2], [-1], [-1, 0], [-1], [-1]]
    leafs = ["inp", "blk.0.ffn_up.weight"]
    assert blocks_of(op, name, [0, 0, 1, 1, 1], src, leafs) == [
        "feed-forward", "feed-forward", "other", "norm", "other"
    ]  # fmt: skip
    late = blocks_of(op[1:3], name[1:3], [0, 0], [[1], [-1]], leafs)
    assert late == ["other", "other"]


def test_a_view_tells_its_reader_what_it_is_a_view_of():
    op, name = ["VIEW", "CPY", "SCALE", "CPY"], ["cache_v_l0 (view)", "a", "cache_v_l0", "b"]
    blocks = blocks_of(op, name, [0] * 4, [[-1], [0], [-1], [2]], ["inp"])
    assert blocks[1] == "kv"
    assert blocks[3] == "other", "a result of that name, not the cache"


def word(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def test_parameters_of_rope():
    words = [0, 128, 2, 0, 4096, word(10000.0), word(0.5), 0, word(1.0), word(32.0), word(1.0)]
    assert op_params("ROPE", words) == {
        "n_dims": 128,
        "mode": "NEOX",
        "n_ctx_orig": 4096,
        "freq_base": 10000.0,
        "freq_scale": 0.5,
        "ext_factor": 0.0,
        "attn_factor": 1.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "n_offs": 0,
    }


def test_parameters_of_others():
    assert op_params("RMS_NORM", [925353388])["eps"] == pytest.approx(1e-5)
    assert op_params("SOFT_MAX", [word(0.125)]) == {"scale": 0.125, "max_bias": 0.0}
    assert op_params("FLASH_ATTN_EXT", [word(0.25), 0, word(50.0), 10]) == {
        "scale": 0.25,
        "max_bias": 0.0,
        "logit_softcap": 50.0,
        "prec": "F32",
        "n_kv_max": 0,
    }
    assert op_params("SCALE", [word(-2.0)]) == {"scale": -2.0, "bias": 0.0}
    assert op_params("GLU", [2]) == {"kind": "SWIGLU", "swapped": 0}
    assert op_params("UNARY", [10])["kind"] == "SILU"
    assert op_params("UNARY", [999])["kind"] == "999"
    assert op_params("VIEW", [1, 2]) == {}


@pytest.mark.parametrize(
    ("op", "words", "name", "value"),
    [
        *(("ROPE", [0, 0, number], "mode", kind) for number, kind in (
            (0, "NORMAL"), (2, "NEOX"), (8, "MROPE"), (24, "VISION"), (40, "IMROPE"), (3, "3"))),
        *(("MUL_MAT", [number], "prec", kind) for number, kind in (
            (0, "UNDEFINED"), (10, "F32"), (15, "BF16"), (20, "F16"), (30, "Q8"), (40, "Q4"))),
        ("MUL_MAT", [0, 1, 0, 20], "hint", "SRC0_IS_HADAMARD"),
        ("MUL_MAT", [0, 1, 0, 20], "src1_prec", "F16"),
        ("MUL_MAT", [0, 0], "hint", "NONE"),
        ("MUL_MAT_ID", [10, 0, 0, 40], "prec", "F32"),
        ("MUL_MAT_ID", [10, 0, 0, 40], "src1_prec", "Q4"),
        ("FLASH_ATTN_EXT", [0, word(8.0), 0, 0, 512], "max_bias", 8.0),
        ("FLASH_ATTN_EXT", [0, word(8.0), 0, 0, 512], "n_kv_max", 512),
        ("ROPE_BACK", [0] * 15 + [7], "n_offs", 7),
        ("GROUP_NORM", [32, word(0.5)], "n_groups", 32),
        ("GROUP_NORM", [32, word(0.5)], "eps", 0.5),
        ("NORM", [word(0.25)], "eps", 0.25),
        ("L2_NORM", [word(0.25)], "eps", 0.25),
        ("SCALE", [word(2.0), word(0.5)], "bias", 0.5),
        ("CLAMP", [word(-2.0), word(3.0)], "min", -2.0),
        ("CLAMP", [word(-2.0), word(3.0)], "max", 3.0),
        ("LEAKY_RELU", [word(0.5)], "negative_slope", 0.5),
        ("CONCAT", [2], "dim", 2),
        ("ARGSORT", [1], "order", "DESC"),
        ("GLU", [0, 1], "swapped", 1),
    ],
)  # fmt: skip
def test_the_words_of_parameters(op: str, words: list[int], name: str, value: Any):
    """As `ggml_<op>_impl` and the enums of ggml.h have them."""
    assert op_params(op, words)[name] == value


def test_flops_by_hand():
    # weight of 4 rows with 3 columns, 5 tokens: 20 results of 3 products and sums
    assert flops("MUL_MAT", [4, 5], [[3, 4], [3, 5]]) == 120
    # grouped queries: 8 matrices [7,5] from 2 of the weight's
    assert flops("MUL_MAT", [7, 5, 8], [[3, 7, 2], [3, 5, 8]]) == 2 * 3 * 7 * 5 * 8
    # 2 of 16 experts for each of 5 tokens
    assert flops("MUL_MAT_ID", [4, 2, 5], [[3, 4, 16], [3, 1, 5], [2, 5]]) == 2 * 3 * 4 * 2 * 5
    # 6 heads, 2 queries, 10 keys, keys of 8, values of 4
    shapes = [[8, 2, 6], [8, 10, 3], [4, 10, 3], [10, 2]]
    assert flops("FLASH_ATTN_EXT", [4, 6, 2], shapes) == 2 * 6 * 2 * 10 * (8 + 4)
    # of three streams
    shapes = [[8, 2, 6, 3], [8, 10, 3, 3], [4, 10, 3, 3], [10, 2]]
    assert flops("FLASH_ATTN_EXT", [4, 6, 2, 3], shapes) == 3 * 2 * 6 * 2 * 10 * (8 + 4)
    # 7 columns times 5 rows, over 3 rows of both
    assert flops("OUT_PROD", [7, 5], [[7, 3], [5, 3]]) == 2 * 7 * 5 * 3
    # 6 channels, 9 tokens, 2 sequences, each result from 4 positions
    assert flops("SSM_CONV", [6, 9, 2], [[12, 6, 2], [4, 6]]) == 6 * 9 * 2 * (4 + 4)
    for op in ("ADD", "ADD1", "ADD_ID", "ACC", "SUB", "MUL", "DIV", "SCALE", "SQR"):
        assert flops(op, [4, 5], [[4, 5], [4]]) == 20
    for op in ("GET_ROWS", "SET_ROWS", "CPY", "CONT", "VIEW", "SOFT_MAX", "ROPE"):
        assert flops(op, [4, 5], [[4, 100], [5]]) == 0
    # damaged graphs, whose nodes lack sources
    for op in ("MUL_MAT", "MUL_MAT_ID", "OUT_PROD"):
        assert flops(op, [4, 5], []) == 0
    assert flops("FLASH_ATTN_EXT", [4, 6, 2], shapes[:2]) == 0
    assert flops("SSM_CONV", [6, 9], [[12, 6]]) == 0
    assert flops("OUT_PROD", [7, 5], [[7], [5]]) == 2 * 7 * 5


PARAMETERS = {
    # function, what it gets beside a tensor of [256, 4]: what ggml must have stored
    ("ggml_norm", 1e-5): ("NORM", {"eps": 1e-5}),
    ("ggml_rms_norm", 1e-6): ("RMS_NORM", {"eps": 1e-6}),
    ("ggml_l2_norm", 1e-4): ("L2_NORM", {"eps": 1e-4}),
    ("ggml_group_norm", 2, 1e-3): ("GROUP_NORM", {"n_groups": 2, "eps": 1e-3}),
    ("ggml_scale", 3.0): ("SCALE", {"scale": 3.0, "bias": 0.0}),
    ("ggml_scale_bias", 3.0, 0.5): ("SCALE", {"scale": 3.0, "bias": 0.5}),
    ("ggml_clamp", -2.0, 7.0): ("CLAMP", {"min": -2.0, "max": 7.0}),
    ("ggml_leaky_relu", 0.25, False): ("LEAKY_RELU", {"negative_slope": 0.25}),
    ("ggml_argsort", 1): ("ARGSORT", {"order": "DESC"}),
    ("ggml_argsort", 0): ("ARGSORT", {"order": "ASC"}),
    ("ggml_soft_max_ext", None, 0.5, 0.0): ("SOFT_MAX", {"scale": 0.5, "max_bias": 0.0}),
}


@pytest.mark.native
@pytest.mark.parametrize("call", PARAMETERS, ids=str)
def test_parameters_are_those_that_ggml_stores(call: tuple[Any, ...]) -> None:
    op, wanted = PARAMETERS[call]
    kinds: dict[type, Any] = {
        float: ctypes.c_float, int: ctypes.c_int, bool: ctypes.c_bool, type(None): POINTER,
    }  # fmt: skip
    function, *arguments = call
    types = [POINTER, POINTER, *(kinds[type(argument)] for argument in arguments)]
    with Graph(1 << 16) as graph:
        declare({function: (POINTER, types)})
        node = tensor_at(graph.node(function, graph.filled(F32, 256, 4), *arguments))
        assert ggml().ggml_op_name(node.op).decode() == op
        assert op_params(op, list(node.op_params)) == pytest.approx(wanted)


@pytest.mark.native
@pytest.mark.parametrize("op", ["UNARY", "GLU"])
def test_kinds_of_functions_are_named_as_ggml_names_them(op: str) -> None:
    function = f"ggml_{op.lower()}_op_name"
    name_of = getattr(declare({function: (ctypes.c_char_p, [ctypes.c_int])}), function)
    for number in range(22 if op == "UNARY" else 7):
        assert op_params(op, [number])["kind"] == name_of(number).decode()


def test_bytes_by_hand():
    # f16 weight, f32 activations
    assert bytes_moved("MUL_MAT", [4, 5], 80, [[3, 4], [3, 5]], [24, 60]) == 24 + 60 + 80
    # 5 rows of an f16 table of 1000 rows with 4 columns, 5 indices
    assert bytes_moved("GET_ROWS", [4, 5], 80, [[4, 1000], [5]], [8000, 20]) == 40 + 20 + 80
    # 2 rows of f32 into an f16 cache of 512 rows, 8-byte indices; the cache itself is not read
    cache = ("SET_ROWS", [4, 512], 4096, [[4, 2], [2], [4, 512]], [32, 16, 4096])
    assert bytes_moved(*cache) == 32 + 16 + 16
    assert bytes_moved("CPY", [4, 5], 40, [[4, 5], [4, 5]], [80, 40]) == 80 + 40
    # 2 experts of 16 for one token, then for 20 tokens: never more than 16
    one = ("MUL_MAT_ID", [4, 2, 1], 32, [[3, 4, 16], [3, 1, 1], [2, 1]], [384, 12, 8])
    assert bytes_moved(*one) == 2 * 24 + 12 + 8 + 32
    many = ("MUL_MAT_ID", [4, 2, 20], 640, [[3, 4, 16], [3, 1, 20], [2, 20]], [384, 240, 160])
    assert bytes_moved(*many) == 384 + 240 + 160 + 640
    assert bytes_moved("VIEW", [4], 16, [[8]], [32]) == 0
    assert bytes_moved("ADD", [4], 16, [], []) == 0
    # more rows than the table has count as the whole table
    assert bytes_moved("GET_ROWS", [4, 5], 80, [[4, 2], [5]], [16, 20]) == 16 + 20 + 80
    # without the numbers of the rows or experts, all
    assert bytes_moved("GET_ROWS", [4, 5], 80, [[4, 1000]], [8000]) == 8000 + 80
    assert bytes_moved("MUL_MAT_ID", [4, 5], 80, [[3, 4, 16], [3, 5]], [384, 60]) == 524


def test_what_a_node_writes_is_a_part_of_what_it_moves():
    assert bytes_written("MUL_MAT", [4, 5], 80, [[3, 4], [3, 5]]) == 80
    # a cache of 1000 rows of 4 bytes, of which two are written
    assert bytes_written("SET_ROWS", [4, 1000], 4000, [[4, 2], [2]]) == 8
    assert bytes_written("VIEW", [4], 16, [[8]]) == 0


def test_fused_kernels_move_nothing_between_their_nodes():
    leafs = ["inp_embd", "blk.0.attn_norm.weight", "blk.0.attn_q.weight"]
    names = ["norm-0", "attn_norm-0", "Qcur-0"]
    graph = graph_of(leafs, names, [[-1], [0, -2], [-3, 1]])
    graph.leafs[2] = Leaf(name=leafs[2], type="q4_K", ne=[256, 2], bytes=288)
    assert graph.nodes is not None
    graph.nodes.op = ["RMS_NORM", "MUL", "MUL_MAT"]
    graph.nodes.ne[2], graph.nodes.bytes[2] = [2], 8
    kernels = plan_kernels(graph, Plan(t=0, plan=0, graph=0, node=[0, 2], n=[2, 1]))
    assert kernels.label == ["RMS_NORM+MUL", "MUL_MAT q4_K"]
    assert kernels.block == ["norm", "attention"]
    assert kernels.layer.tolist() == [0, 0]
    assert kernels.flops.tolist() == [4, 2 * 256 * 2]
    # input, weight and result; then weight, input and result
    assert kernels.bytes.tolist() == [16 + 16 + 16, 288 + 16 + 8]


@pytest.mark.parametrize(
    ("op", "name", "weight", "role"),
    [
        ("MUL_MAT", "ffn_out-3", "blk.3.ffn_down.weight", "ffn_down"),
        ("MUL_MAT", "result_output", "output.weight", "output"),
        ("ADD", "Qcur-1", "blk.1.attn_q.bias", "attn_q.bias"),
        ("ROPE", "Qcur-1", "rope_freqs.weight", "Qcur"),
        ("SET_ROWS", "cache_k_l11 (view)", None, "cache_k"),
        ("ADD", "l_out-11", None, "l_out"),
        ("FLASH_ATTN_EXT", "node_21", None, ""),
    ],
)
def test_a_role_is_the_same_in_every_layer(
    op: str, name: str, weight: str | None, role: str
) -> None:
    assert role_of(op, name, weight) == role


def test_what_an_adapter_adds_is_a_block_of_its_own():
    """As `build_lora_mm` makes it, twice: for the queries, which are scaled afterwards, and for the
    output, to whose residual sum nothing is added."""
    leafs = ["inp", "blk.0.attn_q.weight", "blk.0.attn_q.weight.lora_a"]
    leafs += ["blk.0.attn_q.weight.lora_b", "scale"]
    nodes = [
        ("MUL_MAT", "node_0", [-2, -1], "attention"),
        ("MUL_MAT", "node_1", [-3, -1], "adapter"),
        ("MUL_MAT", "node_2", [-4, 1], "adapter"),
        ("SCALE", "node_3", [2], "adapter"),
        ("ADD", "Qcur-0", [0, 3], "adapter"),
        ("SCALE", "Qcur-0", [4], "attention"),
        ("ADD", "node_6", [5, 4], "attention"),
        ("CONT", "node_7", [4], "attention"),
        ("MUL_MAT_ID", "node_8", [-3, 6, -1], "adapter"),
        ("MUL_MAT_ID", "node_9", [-4, 8, -1], "adapter"),
        ("SCALE", "node_10", [9], "adapter"),
        ("ADD", "ffn_moe_up-0", [6, 10], "adapter"),
        ("ADD", "ffn_inp-0", [11, 5], "attention"),
    ]
    op, name, src, blocks = (list(of) for of in zip(*nodes, strict=True))
    assert blocks_of(op, name, [0] * len(nodes), src, leafs) == blocks
    assert role_of("MUL_MAT", "node_1", leafs[2]) == "attn_q.lora_a"
    assert role_of("MUL_MAT", "node_2", "output.weight.lora_b") == "output.lora_b"
