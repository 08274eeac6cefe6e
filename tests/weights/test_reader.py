"""Parts of tensors of a file, against all of their numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from llamacpp_instr.lab.weights.measure import WeightReader
from llamacpp_instr.model.file import load_model_file
from tests.kit.block_models import random_rows, write_blocks

PARTS = [(0, 5), (1, 31), (31, 32), (32, 64), (0, 96), (40, 70), (95, 96), (64, 96)]


@pytest.mark.parametrize("columns", PARTS)
@pytest.mark.parametrize("rows", [(0, 4), (1, 3), (3, 4)])
def test_a_part_is_a_slice_of_the_whole(
    rows: tuple[int, int], columns: tuple[int, int], tmp_path: Path
) -> None:
    stored = random_rows("Q8_0", 4, 3)
    stored[:, 1::34] &= 0x3F  # scales are finite
    floats = np.random.default_rng(1).normal(0, 1, (4, 96)).astype(np.float32)
    path = write_blocks(tmp_path / "m.gguf", {"q": ("Q8_0", stored), "f": ("F32", floats)})
    model = load_model_file(path)
    reader = WeightReader(model)
    whole = {"q": dequantize(stored, GGMLQuantizationType.Q8_0), "f": floats}
    for name, numbers in whole.items():
        found = reader.read(model.by_name[name], *rows, *columns)
        expected = numbers[slice(*rows), slice(*columns)]
        assert found.shape == expected.shape
        assert np.array_equal(found, expected, equal_nan=True)
        pieces = np.concatenate(list(reader.pieces(model.by_name[name])))
        assert np.array_equal(pieces, numbers.ravel(), equal_nan=True)
        raw = stored if name == "q" else floats.view(np.uint8)
        assert (reader.raw(model.by_name[name]) == raw).all()
        assert (np.concatenate(list(reader.bytes(model.by_name[name]))) == raw.ravel()).all()
