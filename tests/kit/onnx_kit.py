"""What llama.cpp computed from which inputs, and what ONNX Runtime computes from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnx import ModelProto, numpy_helper

from llamacpp_instr.converters.exports.onnx.export import Exported
from llamacpp_instr.debugger.api import debug
from llamacpp_instr.debugger.ggml import tensor_at
from llamacpp_instr.debugger.stop import Stop
from llamacpp_instr.debugger.tensors import is_weight, read
from llamacpp_instr.lab.weights.measure import WeightReader
from llamacpp_instr.llama.engine import ContextOptions, ModelContext
from llamacpp_instr.log.schema import Graph
from llamacpp_instr.log.session import load_session
from llamacpp_instr.model.file import load_model_file
from tests.kit.debugger_kit import opened, prompt_of

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
