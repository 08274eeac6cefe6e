"""`instr validate`: quantized kernels of every type are within their tolerance."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamacpp_instr.converters.validate.run import Validation, judge
from tests.kit.quantized_kit import QUANTIZED_FILE_TYPES, quantized_demo
from tests.validate.test_validate import check

pytestmark = pytest.mark.native


@pytest.mark.parametrize("file_type", QUANTIZED_FILE_TYPES)
def test_quantized_kernels_are_within_their_tolerance(file_type: str, tmp_path: Path) -> None:
    found = check(quantized_demo(file_type), tmp_path / "a.log")
    assert judge(Validation(found, [])).passed
    assert len(found) == 2 * 82
