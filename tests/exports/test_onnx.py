"""The ONNX graph computes what llama.cpp computes: every node, from the inputs that it had."""

from __future__ import annotations

import ctypes
from collections import Counter
from pathlib import Path

import onnx
import pytest

from llamacpp_instr.converters.exports.onnx.builder import CUSTOM
from llamacpp_instr.converters.exports.onnx.export import export_graph
from llamacpp_instr.llama.ggml import declare
from llamacpp_instr.model.types import TYPES
from tests.graph.test_copies import graph_of
from tests.kit.native_kit import random_models
from tests.kit.onnx_kit import Computed, compute, nmse, run_onnx, with_weights
from tests.kit.tiny_models import write_gemma3

pytestmark = pytest.mark.native

WITHOUT_MAPPING = {
    "deepseek4-moe": {"DSV4_HC_COMB", "DSV4_HC_POST", "DSV4_HC_PRE"},
    "glm5-next-moe": {"DSV4_HC_COMB", "DSV4_HC_POST", "DSV4_HC_PRE"},
    "kimi-k3-moe": {"DSV4_HC_PRE"},
    "minimax-m3-moe": {"POOL_2D"},
    "qwen4exp-moe": {"DSV4_HC_POST", "DSV4_HC_PRE"},
}
"""ops for which standard operators are not written yet, by architecture"""
TOLERANCE = 5e-4
"""NMSE of a node, as test-backend-ops allows for products; errors of earlier nodes add up"""
OF_LOGITS = 1e-5


def architectures() -> list[str]:
    return sorted(model.stem for model in random_models().glob("*.gguf"))


@pytest.mark.parametrize("part", range(8))
def test_every_node_of_every_architecture(part: int, tmp_path: Path) -> None:
    for architecture in architectures()[part::8]:
        model = random_models() / f"{architecture}.gguf"
        for computed in compute(model, tmp_path / f"{architecture}.log"):
            check(architecture, model, computed)


@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_a_model_in_the_shape_of_a_small_gemma(tmp_path: Path, flash_attn: str) -> None:
    """One head of keys and values, and heads longer than the embedding divided by their number."""
    model = write_gemma3(tmp_path / "gemma.gguf")
    for computed in compute(model, tmp_path / "gemma.log", 40, flash_attn):
        check("gemma", model, computed)


@pytest.mark.parametrize("number", TYPES)
def test_a_weight_of_any_type_that_ggml_has(number: int) -> None:
    """By the name that ggml writes into a log: `q4_K`, but `q8_0`."""
    ggml = declare({"ggml_type_name": (ctypes.c_char_p, [ctypes.c_int])})
    graph = graph_of(["weight", "input"], ["node_0"], [[-1, -2]])
    graph.leafs[0].type = ggml.ggml_type_name(number).decode()
    graph.leafs[0].ne, graph.leafs[0].tensor, graph.leafs[1].ne = [256, 8], 0, [256]
    assert graph.nodes is not None
    graph.nodes.op, graph.nodes.ne, graph.nodes.nb = ["MUL_MAT"], [[8]], [[4]]
    exported = export_graph(graph)
    assert (exported.missing, exported.weights) == ({}, {-1: "weight"})


def check(architecture: str, model: Path, computed: Computed) -> None:
    graph = computed.graph
    assert graph is not None
    assert graph.nodes is not None
    exported = export_graph(graph, outputs=range(graph.n_nodes))
    assert set(exported.missing) == WITHOUT_MAPPING.get(architecture, set()), architecture
    whole = with_weights(exported, graph, model)
    onnx.checker.check_model(whole, full_check=True)
    if exported.missing:
        found = [node.op_type for node in whole.graph.node if node.domain == CUSTOM]
        assert Counter(found) == exported.missing, architecture
        return
    outputs = run_onnx(whole, exported, computed.inputs)
    # the order of equal scores is open; what is chosen by them is compared
    indices = {i for i, type_ in enumerate(graph.nodes.type) if type_ == "i32"}
    errors = {
        name: nmse(outputs[name], computed.values[node])
        for node, name in exported.names.items()
        if name in outputs and node not in indices
    }
    assert len(errors) > 0.9 * len(computed.values.keys() - indices) - 5, architecture
    assert {name: error for name, error in errors.items() if error > TOLERANCE} == {}, architecture
    assert errors[exported.names[max(exported.names)]] < OF_LOGITS, architecture
