"""The GGUF reader: header, arrays, items, and the model made of them."""

from __future__ import annotations

from pathlib import Path

from llamacpp_instr.errors import InstrError
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.model.header import read_array, read_header, read_items
from tests.fuzz.guard import check_message

KIND = "gguf"


def attempt(path: Path) -> None:
    try:
        header = read_header(path)
        for array in header.arrays.values():
            read_array(path, array, 100)
            read_items(path, array, (0, 3, 2**40, array.count - 1))
    except InstrError as error:
        check_message(error)
    model = load_model_file(path)
    for weight in model.weights:
        assert weight.offset + weight.n_bytes <= path.stat().st_size
        assert weight.n_rows >= 0
        assert weight.layer >= -1
        assert isinstance(weight.role, str)
