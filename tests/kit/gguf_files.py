"""Small GGUF files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np


def save(writer: gguf.GGUFWriter) -> None:
    """Write what was added, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def split_model(source: Path, prefix: Path, tensors: int) -> list[Path]:
    """A model in parts of `tensors` tensors each, as gguf-py splits it; returns their paths in
    order. The names of the parts begin with `prefix`."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(prefix.with_suffix(".gguf"), architecture, split_max_tensors=tensors)
    for name, field in reader.fields.items():
        if name != "general.architecture" and not name.startswith("GGUF."):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    save(writer)
    return sorted(prefix.parent.glob(f"{prefix.name}-*.gguf"))


def write_two_parts(directory: Path) -> list[Path]:
    """A model of two tensors in two parts, as gguf-py splits it."""
    writer = gguf.GGUFWriter(directory / "split.gguf", "llama", split_max_tensors=1)
    for name in ("a", "b"):
        writer.add_tensor(name, np.zeros(32, np.float32))
    save(writer)
    return sorted(directory.glob("split-*.gguf"))
