"""The ONNX graph computes what llama.cpp computes: every node, from the inputs that it had."""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, numpy_helper

from llamacpp_instr.converters.exports.onnx.builder import CUSTOM
from llamacpp_instr.converters.exports.onnx.export import Exported, export_graph
from llamacpp_instr.debugger.stop import Stop, debug
from llamacpp_instr.debugger.tensors import is_weight, read, tensor_at
from llamacpp_instr.lab.weights.measure import WeightReader
from llamacpp_instr.llama.engine import ContextOptions, ModelContext
from llamacpp_instr.llama.native import declare
from llamacpp_instr.log.schema import Graph
from llamacpp_instr.log.session import load_session
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.model.types import TYPES
from tests.exports.test_onnx_graph import return_every_node
from tests.graph.test_copies import graph_of
from tests.kit.debugger_kit import opened, prompt_of
from tests.kit.tiny_models import write_gemma3

Values = dict[int, np.ndarray]


@dataclass
class Computed:
    """One compute of llama.cpp."""

    inputs: Values
    """by leaf, -1 minus its number: all but weights, as they were before the compute"""
    values: Values = field(default_factory=dict)
    """by node: what each kernel computed"""
    graph: Graph | None = None


def compute(model: Path, log: Path, prompt: int = 9, flash_attn: str = "auto") -> list[Computed]:
    """A prefill and a decode, stopped after every kernel."""
    found: dict[int, Computed] = {}

    def keep(stop: Stop) -> None:
        leafs = stop.graph.leaf_addresses
        if stop.compute not in found:
            inputs = {-1 - i: read(a) for i, a in enumerate(leafs) if not is_weight(tensor_at(a))}
            found[stop.compute] = Computed(inputs)
        if stop.node.op != "SET_ROWS":  # its value is the whole cache
            found[stop.compute].values[stop.node.index] = stop.values()

    options = ContextOptions(ctx=256, threads=1, flash_attn=flash_attn)
    with (
        opened(model) as loaded,
        debug(log, level="verbose", force=True) as debugging,
        ModelContext(loaded, options) as context,
    ):
        debugging.on_stop = keep
        debugging.add("*")
        for tokens in (prompt_of(loaded, prompt), prompt_of(loaded, 1)):
            context.decode(tokens, False)
    session = load_session(log)
    for compute_, graph in zip(
        session.computes["compute"].tolist(), session.computes["graph"].tolist(), strict=True
    ):
        found[compute_].graph = session.graphs[graph]
    return list(found.values())


def with_weights(exported: Exported, graph: Graph, model: Path) -> ModelProto:
    """The ONNX model with the weights of a small model inside."""
    file = load_model_file(model)
    reader = WeightReader(file)
    for leaf, name in exported.weights.items():
        of = graph.leafs[-1 - leaf]
        values = np.concatenate(list(reader.pieces(file.by_name[of.name])))
        values = values.astype(np.float16 if of.type == "f16" else np.float32)
        tensor = numpy_helper.from_array(values.reshape(of.ne[::-1]), name)
        exported.model.graph.initializer.append(tensor)
    return exported.model


def run_onnx(model: ModelProto | Path, exported: Exported, inputs: Values) -> dict[str, Any]:
    """All outputs by name, computed by ONNX Runtime on the CPU."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    leaf = {name: leaf for leaf, name in exported.inputs.items()}
    types = {"float": np.float32, "float16": np.float16, "int32": np.int32, "int64": np.int64}
    feeds = {
        of.name: inputs[leaf[of.name]].astype(types[of.type[7:-1]]).reshape(of.shape)
        for of in session.get_inputs()
    }
    names = [of.name for of in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def nmse(found: np.ndarray, real: np.ndarray) -> float:
    """The squared error relative to the square of the real values, as test-backend-ops has it."""
    a, b = (values.astype(np.float64).ravel() for values in (found, real))
    finite = np.isfinite(b)
    assert np.array_equal(a[~finite], b[~finite], equal_nan=True)
    error = ((a[finite] - b[finite]) ** 2).sum()
    return float(error / max((b[finite] ** 2).sum(), 1e-30))


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
    exported = export_graph(graph)
    assert set(exported.missing) == WITHOUT_MAPPING.get(architecture, set()), architecture
    whole = with_weights(exported, graph, model)
    return_every_node(whole, exported.names)
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
