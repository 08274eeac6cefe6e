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


def write_two_parts(directory: Path) -> list[Path]:
    """A model of two tensors in two parts, as gguf-py splits it."""
    writer = gguf.GGUFWriter(directory / "split.gguf", "llama", split_max_tensors=1)
    for name in ("a", "b"):
        writer.add_tensor(name, np.zeros(32, np.float32))
    save(writer)
    return sorted(directory.glob("split-*.gguf"))
