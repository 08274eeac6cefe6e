"""The ONNX graph computes what llama.cpp computes: every node, from the inputs that it had."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import pytest

from converters.exports.onnx.builder import CUSTOM
from converters.exports.onnx.export import export_graph
from tests.kit.native_kit import random_models
from tests.kit.onnx_kit import Computed, compute, nmse, run_onnx, with_weights

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
