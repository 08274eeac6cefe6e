"""A model in another file type, without its weights: for llama.cpp's dry run.

Invariant: the file has the source's metadata and tensors, in the types of the quantization's plan;
its data is a hole, so it takes no room on the disk.
"""

from __future__ import annotations

import struct
from pathlib import Path

from llamacpp_instr.model.file import ModelFile, load_model_file
from llamacpp_instr.model.types import GgmlType
from llamacpp_instr.quantize.plan import QuantizationPlan


def write_retyped(source: ModelFile, plan: QuantizationPlan, folder: Path) -> ModelFile:
    """The model that the plan describes; its files are in `folder`, named like the source's."""
    types = {tensor.name: tensor.type for tensor in plan.tensors}
    for path in source.headers:
        _write_part(source, path, types, folder / path.name)
    return load_model_file(folder / source.path.name)


def _write_part(source: ModelFile, path: Path, types: dict[str, GgmlType], target: Path) -> None:
    header = source.headers[path]
    with path.open("rb") as file:
        infos = bytearray(file.read(header.infos_start))
    end = 0
    for tensor in header.tensors:
        name, type_ = tensor.name.encode(), types[tensor.name]
        infos += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(tensor.ne))
        infos += struct.pack(f"<{len(tensor.ne)}Q", *tensor.ne)
        infos += struct.pack("<IQ", type_.number, end)
        rows = 1
        for n in tensor.ne[1:]:
            rows *= n
        n_bytes = type_.row_bytes(tensor.ne[0] if tensor.ne else 1) * rows
        end += -(-n_bytes // header.alignment) * header.alignment
    start = -(-len(infos) // header.alignment) * header.alignment
    with target.open("wb") as file:
        file.write(infos)
        file.truncate(start + end)
