"""What a kernel does is explained in a learner's words, for models of several kinds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llamacpp_instr.log import schema as s
from llamacpp_instr.log.graph.timeline import OpSlice, plan_timeline
from llamacpp_instr.log.graph.words import describe
from tests.kit.log_readers import whole_events
from tests.kit.perfetto_recordings import record

DEMO = Path(__file__).parent.parent / "fixtures" / "demo-verbose.log"

# one layer of a Llama in order of execution, and the ops around the layers
LLAMA = [
    "root-mean-square norm, norm weight",
    "query projection",
    "rotary position embedding of the queries",
    "value projection",
    "key projection",
    "rotary position embedding of the keys",
    "write keys to the KV cache",
    "write values to the KV cache",
    "flash attention (scores, softmax and values in one kernel), reads keys and values from the"
    " KV cache",
    "attention output projection",
    "residual add",
    "root-mean-square norm, norm weight",
    "feed-forward gate projection",
    "feed-forward up projection",
    "gated activation of the feed-forward",
    "feed-forward down projection",
    "residual add",
]
AROUND = [
    "embedding lookup",
    "root-mean-square norm, norm weight",
    "output: a score for every token of the vocabulary (logits)",
]

EXPERTS = [
    "router: scores of the experts",
    "probabilities of the experts",
    "bias of the choice of experts",
    "choose the best experts",
    "scores of the chosen experts",
    "gate and up projection of the chosen experts",
    "gated activation of the feed-forward",
    "down projection of the chosen experts",
    "results of the experts, each times its score",
    "sum of the results of the experts",
    "gate projection of the shared expert",
    "up projection of the shared expert",
    "gated activation of the feed-forward",
    "down projection of the shared expert",
    "sum of the parts of the feed-forward",
    "residual add",
]
STATE_SPACE = [
    "input projection of the state space layer",
    "write the recurrent state",
    "convolution over the last positions",
    "projection to step size, input and output weights of the state (dt, B, C)",
    "projection of the step size (dt)",
    "state space scan over the positions",
    "write the recurrent state",
    "output projection of the state space layer",
    "residual add",
]
IMPORTANT = {
    "MUL_MAT", "MUL_MAT_ID", "FLASH_ATTN_EXT", "SOFT_MAX", "ROPE", "GET_ROWS", "SET_ROWS", "CPY",
    "SSM_CONV", "SSM_SCAN", "GATED_DELTA_NET", "ARGSORT", "TOP_K",
}  # fmt: skip
"""ops that a learner looks for: each must be named by its purpose"""
SAYS_NOTHING = {
    "matrix product", "matrix product with the chosen experts", "softmax", "pick rows", "copy",
    "sort",
}  # fmt: skip


def timelines(log: Path) -> Iterator[list[OpSlice]]:
    """The kernels of every plan of a log."""
    graphs: dict[int, s.Graph] = {}
    for event in whole_events(log):
        if isinstance(event, s.Graph):
            graphs[event.graph] = event
        elif isinstance(event, s.Plan):
            yield plan_timeline(graphs[event.graph], event).ops


def words(ops: list[OpSlice], layer: int) -> list[object]:
    return [op.args["what"] for op in ops if op.layer == layer]


def test_a_llama_reads_like_its_drawing_in_a_textbook() -> None:
    for ops in timelines(DEMO):
        assert words(ops, 0) == LLAMA
        assert words(ops, 1) == LLAMA
        assert words(ops, -1) == AROUND


@pytest.mark.native
def test_experts_and_state_space_layers_are_explained_in_their_order(models, tmp_path) -> None:
    for name, layer, expected in (("deepseek2-moe", 1, EXPERTS), ("mamba-dense", 0, STATE_SPACE)):
        (tmp_path / name).mkdir()
        log = record(name, "detailed", models, tmp_path / name)
        for ops in timelines(log):
            explanations = words(ops, layer)
            at = explanations.index(expected[0])
            found = [what for what in explanations[at:] if what in expected]
            # consecutive repeats count once
            once = [what for i, what in enumerate(found) if i == 0 or what != found[i - 1]]
            assert once == expected


@pytest.mark.native
@pytest.mark.parametrize("name", ["deepseek2-moe", "mamba-dense", "jamba-dense", "gemma3-dense",
                                  "qwen3moe-moe", "llama4-moe", "gpt2", "t5"])  # fmt: skip
def test_every_important_op_is_explained_by_what_it_is_for(name, models, tmp_path) -> None:
    log = record(name, "detailed", models, tmp_path)
    n = 0
    for ops in timelines(log):
        for op in ops:
            explanation = str(op.args["what"])
            for one, what in zip(op.name.split("+"), explanation.split(", "), strict=False):
                assert what, op
                # a bare name of ggml's, in upper or lower case
                assert what.lower().replace(" ", "_") != one.lower(), op
            # the scales of the experts' weights, which only models of this test have
            scales = (
                str(op.args.get("source_1")).startswith("ffn_moe_topk-")
                and explanation == "pick rows"
            )
            if op.name in IMPORTANT and not scales:
                n += 1
                assert explanation not in SAYS_NOTHING, op
    assert n


@pytest.mark.parametrize(
    ("op", "name", "leaf", "expected"),
    [
        # shifting the cache rotates the keys in place
        ("ROPE", "cache_k_l0 (view)", "cache_k_l0", "shift positions of keys in the KV cache"),
        ("CONT", "v_cont-0", "cache_v_l0", "read values from the KV cache"),
        ("SET_ROWS", "", "cache_k_l0", "write keys to the KV cache"),
        ("GET_ROWS", "node_5", "cache_r_l0", "read the recurrent state"),
        ("SCALE", "cache_s_l0 (view)", "cache_s_l0", "clear the recurrent state of new sequences"),
        ("MUL_MAT", "Qcur-0", "dec.blk.0.cross_attn_q.weight",
         "cross-attention: query projection"),
        ("GET_ROWS", "node_9", "enc.blk.0.attn_rel_b.weight", "relative position bias lookup"),
        ("ADD", "Qcur-0", "blk.0.attn_q.bias", "bias of the query projection"),
        ("MUL", "node_9", "blk.0.attn_q.scale", "scale of the query projection"),
        ("NO_SUCH_OP", "node_9", "inp_pos", "no such op"),
        ("ADD_ID", "node_9", "blk.0.ffn_gate_exps.bias",
         "bias of the gate projection of the chosen experts"),
        ("MUL", "node_9", "blk.0.attn_q.weight", "product, element by element"),
        ("SCALE", "node_9", "cache_k_l0", "scale by a number"),
        ("ROPE", "node_9", "cache_idx_k_l12 (view)", "shift positions of keys in the KV cache"),
        ("MUL_MAT", "kq-0", "cache_k_l0",
         "attention scores: queries times keys, reads keys from the KV cache"),
        ("SOFT_MAX", "kq_soft_max-0", "cache_k_l0", "softmax of attention scores"),
        ("ROPE", "Kcur-0", "inp_pos", "rotary position embedding of the keys"),
        ("ROPE", "q", "inp_pos", "rotary position embedding of the queries"),
        ("ROPE", "vcur", "inp_pos", "rotary position embedding of the values"),
        ("ROPE", "query-0", "inp_pos", "rotary position embedding"),
        ("RMS_NORM", "Qcur_normed-0", "inp", "root-mean-square norm of the queries"),
        ("MUL_MAT", "k_pe (view) (cont)", "inp", "matrix product of the keys"),
        ("MUL_MAT", "ffn_moe_weights (reshaped)-0", "inp", "matrix product"),
    ],
)  # fmt: skip
def test_what_caches_and_weights_tell(op, name, leaf, expected) -> None:
    assert describe(op, name, [leaf], 0) == expected


def test_outside_of_layers_a_name_tells_no_queries() -> None:
    assert describe("ROPE", "Qcur", ["inp_pos"], -1) == "rotary position embedding"
    assert describe("ROPE", "Qcur", ["inp_pos"], 1) == "rotary position embedding of the queries"


def test_several_caches_are_named_together() -> None:
    read = describe("FLASH_ATTN_EXT", "", ["cache_v_l0", "cache_k_l0"], 0)
    assert read.endswith(", reads keys and values from the KV cache")
    state = describe("SET", "", ["cache_v_l0", "cache_r_l0"], 0)
    assert state == "write the recurrent state"


def test_the_first_leaf_whose_name_says_something_decides() -> None:
    leafs = ["inp", "blk.1.attn_k.weight", "blk.1.attn_q.weight"]
    assert describe("MUL_MAT", "node_3", leafs, 1) == "key projection"
    assert describe("ADD", "ffn_inp-1", ["inp"], 1) == "residual add"
