"""Writes model files whose tensors contain given blocks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.model.types import BY_NAME
from tests.kit.gguf_files import save


def half(*numbers: float) -> bytes:
    with np.errstate(over="ignore"):
        return np.array(numbers, "<f2").tobytes()


def write_blocks(
    path: Path, tensors: Mapping[str, tuple[str, NDArray[np.generic]]], arch: str = "llama"
) -> Path:
    """A model file with tensors of a type, given as bytes; the last dimension is the row."""
    writer = gguf.GGUFWriter(path, arch)
    for name, (type_name, data) in tensors.items():
        number = gguf.GGMLQuantizationType(BY_NAME[type_name].number)
        writer.add_tensor(name, data, raw_dtype=number if data.dtype == np.uint8 else None)
    save(writer)
    return path


def rows_of(blocks: list[bytes], per_row: int) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(blocks), np.uint8).reshape(len(blocks) // per_row, -1)


def random_rows(type_name: str, n_rows: int, per_row: int) -> NDArray[np.uint8]:
    size = BY_NAME[type_name].block_bytes * per_row
    return np.random.default_rng(5).integers(0, 256, (n_rows, size), np.uint8)
