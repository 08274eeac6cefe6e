"""docs/how-to/choose-a-quantization.md has the figures of the demo model's files."""

from __future__ import annotations

import re

import pytest

from llamacpp_instr.lab.weights.figures import Sums
from llamacpp_instr.lab.weights.measure import compute_weight_errors
from llamacpp_instr.model.file import load_model_file
from tests.kit.quantized_kit import quantized_demo
from tools.quantization_page import FILE_TYPES, PAGE, PICTURE, bits, mib


def rows() -> dict[str, list[str]]:
    """The cells of the page's table by file type."""
    lines = re.findall(r"^\| (\w+) \|(.*)\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: [cell.strip() for cell in rest.split("|")] for name, rest in lines}


def first(cell: str) -> float:
    """A cell's number without its error or interval."""
    return float(cell.split()[0])


def test_the_page_has_every_type_and_a_picture() -> None:
    assert list(rows()) == ["F16", *FILE_TYPES]
    assert PICTURE.read_bytes().startswith(b"\x89PNG")


@pytest.mark.native
@pytest.mark.parametrize("file_type", FILE_TYPES)
def test_sizes_and_errors_are_those_of_the_files(file_type: str) -> None:
    file = load_model_file(quantized_demo(file_type))
    errors = compute_weight_errors(load_model_file("demo"), file)
    sqnr = sum((error.sums for error in errors), Sums()).sqnr_db
    assert rows()[file_type][:3] == [mib(file), bits(file), f"{sqnr:.1f}"]


def test_fewer_bits_cost_more() -> None:
    table = [rows()[name] for name in FILE_TYPES]
    for column, sign in ((1, -1), (2, -1), (4, 1), (5, -1)):
        values = [sign * first(row[column]) for row in table]
        assert values == sorted(values), f"column {column}"
