"""Upstream's llama-quantize, models of any width with tensor names for every recipe, and importance
matrices with known values."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from llamacpp_instr.lab.quantize.plan import QuantizationPlan, QuantizeOptions
from llamacpp_instr.lab.quantize.runner import Quantizer
from llamacpp_instr.model.file import ModelFile, load_model_file
from tests.kit.gguf_files import save
from tests.kit.native_kit import unpatched_library

LAYERS, ROWS = 8, 8
"""eight layers, because several recipes treat the first eighth differently"""

_DEFAULT = QuantizeOptions()
_IN_LAYER = (
    "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "ffn_gate_inp",
)  # fmt: skip


def llama_quantize(*arguments: object) -> None:
    """Run upstream's own program, from the unpatched source."""
    subprocess.run(
        [unpatched_library() / "llama-quantize", *map(str, arguments)],
        capture_output=True, check=True,
    )  # fmt: skip


def plan_quantization(
    source: ModelFile, file_type: str, options: QuantizeOptions = _DEFAULT
) -> QuantizationPlan:
    with Quantizer(source, options) as quantizer:
        return quantizer.plan(file_type)


class Quantized(NamedTuple):
    path: Path
    plan: QuantizationPlan


def quantize_model(
    source: ModelFile,
    file_type: str,
    output: Path,
    options: QuantizeOptions = _DEFAULT,
    **how: Any,
) -> Quantized:
    with Quantizer(source, options) as quantizer:
        plan = quantizer.plan(file_type)
        quantizer.write([plan], [output], **how)
    return Quantized(output, plan)


def write_model(
    path: Path,
    width: int = 256,
    *,
    tied: bool = False,
    shapes: dict[str, tuple[int, ...]] | None = None,
    alignment: int | None = None,
) -> Path:
    """A llama that satisfies the quantizer: names and hyper-parameters, rows of `width`. `shapes`
    adds tensors, with shapes in numpy's order."""
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(width)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    tensors: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (ROWS, width),
        "output_norm.weight": (width,),
    }
    if not tied:
        tensors["output.weight"] = (ROWS, width)
    for i in range(LAYERS):
        tensors |= {f"blk.{i}.{name}.weight": (ROWS, width) for name in _IN_LAYER}
        tensors[f"blk.{i}.attn_norm.weight"] = (width,)
    random = np.random.default_rng(4)
    for name, shape in (tensors | (shapes or {})).items():
        writer.add_tensor(name, random.normal(0, 1, shape).astype(np.float32))
    save(writer)
    return path


def importances(model: Path, without: Collection[str] = ()) -> dict[str, np.ndarray]:
    """Made-up sums of squares for every matrix of a model: a row, or one per expert."""
    random = np.random.default_rng(5)
    return {
        weight.name: random.uniform(0.1, 9, (*weight.ne[2:], weight.ne[0])).astype(np.float32)
        for weight in load_model_file(model).weights
        if len(weight.ne) > 1 and weight.name not in without
    }


def write_imatrix(path: Path, sums: dict[str, np.ndarray], count: float = 3) -> Path:
    """An importance matrix in llama-imatrix's format, of two chunks of a text "wörds.txt". Each
    expert has seen one token less than the previous one."""
    writer = gguf.GGUFWriter(path, "")
    writer.add_string("general.type", "imatrix")
    writer.add_array("imatrix.datasets", ["wörds.txt", "more.txt"])
    writer.add_uint32("imatrix.chunk_count", 2)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, values in sums.items():
        rows = np.atleast_2d(values)
        counts = np.arange(count, count - len(rows), -1, np.float32)
        writer.add_tensor(f"{name}.in_sum2", rows)
        writer.add_tensor(f"{name}.counts", counts[:, None])
    save(writer)
    return path


def legacy_imatrix(sums: dict[str, np.ndarray], calls: int = 3) -> bytes:
    """The same in the older format that ends in `.dat`."""
    data = struct.pack("<i", len(sums))
    for name, values in sums.items():
        data += struct.pack("<i", len(name)) + name.encode()
        data += struct.pack("<ii", calls, values.size) + values.tobytes()
    return data + struct.pack("<ii", 2, 9) + b"words.txt"
