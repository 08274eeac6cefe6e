"""A model in another file type, without its weights: for llama.cpp's dry run.

Invariant: the file has the source's metadata and tensors, in the types of the quantization's plan;
its data is a hole, so it takes no room on the disk.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

from llamacpp_instr.lab.quantize.plan import QuantizationPlan, TensorPlan
from llamacpp_instr.model.file import ModelFile, load_model_file


def write_retyped(source: ModelFile, plan: QuantizationPlan, folder: Path) -> ModelFile:
    """The model that the plan describes; its files are in `folder`, named like the source's. The
    quantizer would write one file, and the same weights."""
    for path in source.headers:
        tensors = [tensor for tensor in plan.tensors if tensor.weight.path == path]
        _write_part(source, path, tensors, folder / path.name)
    return load_model_file(folder / source.path.name)


def _write_part(source: ModelFile, path: Path, tensors: Sequence[TensorPlan], target: Path) -> None:
    header = source.headers[path]
    with path.open("rb") as file:
        infos = bytearray(file.read(header.infos_start))
    end = 0
    for tensor in tensors:
        name, ne = tensor.name.encode(), tensor.weight.ne
        infos += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(ne))
        infos += struct.pack(f"<{len(ne)}QIQ", *ne, tensor.type.number, end)
        end += -(-tensor.n_bytes // header.alignment) * header.alignment
    start = -(-len(infos) // header.alignment) * header.alignment
    with target.open("wb") as file:
        file.write(infos)
        file.truncate(start + end)
