"""flashinfer-bench loads what `instr to-flashinfer` writes, and its references compute what
llama.cpp computed.

Not part of `make test`: it needs PyTorch and flashinfer-bench. `make test-all PARTS=peers` runs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flashinfer_bench.bench.utils import gen_inputs, load_safetensors
from flashinfer_bench.data import TraceSet
from safetensors.torch import load_file

from llamacpp_instr.converters.exports.flashinfer.workloads import OUTPUT
from llamacpp_instr.converters.validate.follow import error_of
from tests.parts.peers.peer_models import DECODERS, make_gemma2
from tests.parts.peers.run_instr import instr

TOLERANCE = 5e-4
"""NMSE, as test-backend-ops allows for products"""
OF_QUANTIZED = 1e-3
"""with quantized weights, for which ggml also rounds activations to 8 bits"""


def _demo(_folder: Path) -> str:
    return "demo"


def _quantized(folder: Path) -> str:
    instr("quantize", "demo", "--types", "Q4_K_M", "-o", "quantized.gguf", cwd=folder)
    return "quantized.gguf"


def _imported(make: Any) -> Any:
    def model(folder: Path) -> str:
        make(folder / "model")
        instr("import", "model", "-o", "model.gguf", "--type", "F16", cwd=folder)
        return "model.gguf"

    return model


MODELS = {
    "demo": _demo,
    "quantized": _quantized,
    "mixtral": _imported(DECODERS["mixtral"]),
    "gemma3": _imported(DECODERS["gemma3"]),
    "gemma2": _imported(make_gemma2),
}


@pytest.fixture(scope="module", params=MODELS)
def exported(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a log, and of its export with captured tensors."""
    folder = tmp_path_factory.mktemp(request.param)
    model = MODELS[request.param](folder)
    prompt = "Once upon a time there was a little kernel that computed all day long."
    # caches of different sizes: the log then tells which layers have the window
    sizes = "--ctx", 512, "--ubatch", 64
    instr("run", model, "-p", prompt, "-n", 4, *sizes, "--log", "session.log", cwd=folder)
    instr("to-flashinfer", "session.log", "-o", "dataset", "--capture", cwd=folder)
    return folder


def test_its_loader_accepts_the_data_set(exported: Path) -> None:
    """Its models validate every definition and every workload."""
    loaded = TraceSet.from_path(str(exported / "dataset"))
    assert loaded.definitions
    assert set(loaded.workloads) == set(loaded.definitions)
    for name, definition in loaded.definitions.items():
        assert set(definition.axes) >= set(definition.var_axes_bindings), name
        for trace in loaded.workloads[name]:
            assert set(trace.workload.axes) == set(definition.var_axes), name


def test_each_reference_runs_on_each_workload(exported: Path) -> None:
    """With inputs that are made by flashinfer-bench itself where they are random."""
    root = exported / "dataset"
    loaded = TraceSet.from_path(str(root))
    for name, definition in loaded.definitions.items():
        run = _reference(definition)
        for trace in loaded.workloads[name]:
            workload = trace.workload
            stored = load_safetensors(definition, workload, root)
            found = run(*gen_inputs(definition, workload, "cpu", stored))
            shapes = definition.get_output_shapes(workload.axes)
            outputs = found if isinstance(found, tuple) else (found,)
            assert [list(of.shape) for of in outputs] == shapes, name
            assert [of.dtype for of in outputs] == definition.torch_output_dtypes, name


def test_references_compute_what_llama_cpp_computed(exported: Path) -> None:
    root = exported / "dataset"
    loaded = TraceSet.from_path(str(root))
    worst: dict[str, float] = {}
    for name, definition in loaded.definitions.items():
        run, quantized = _reference(definition), False
        for tag in definition.tags:
            quantized |= tag.startswith("quantization:")
        for trace in loaded.workloads[name]:
            workload = trace.workload
            files = [of.path for of in workload.inputs.values() if of.type == "safetensors"]
            tensors = load_file(root / files[0]) if files else {}
            expected = {key: of for key, of in tensors.items() if key.startswith(OUTPUT)}
            if not expected:
                continue
            stored = load_safetensors(definition, workload, root)
            inputs = gen_inputs(definition, workload, "cpu", stored)
            found = run(*inputs)
            outputs = found if isinstance(found, tuple) else (found,)
            names = [OUTPUT + of for of in definition.outputs]
            for key, value in expected.items():
                both = [of.numpy() for of in (outputs[names.index(key)], value)]
                if definition.op_type == "topk":
                    # equal numbers may be in any order
                    rows = inputs[0].numpy()
                    both = [np.take_along_axis(rows, of.astype(int), 1) for of in both]
                worst[name] = max(worst.get(name, 0.0), error_of(*both))
        assert name in worst, "every definition has captured tensors"
        assert worst[name] < (OF_QUANTIZED if quantized else TOLERANCE), (name, worst[name])
    print(exported.name, {name: f"{error:.1e}" for name, error in worst.items()})


def _reference(definition: Any) -> Any:
    module: dict[str, Any] = {}
    exec(compile(definition.reference, definition.name, "exec"), module)
    run = module["run"]
    return torch.no_grad()(run)
