"""`instr validate` finds nothing in a quarter of all architectures."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamacpp_instr.converters.validate.run import Validation, judge
from tests.kit.native_kit import random_models
from tests.validate.test_validate import check

pytestmark = pytest.mark.native


def test_a_quarter_of_the_architectures_is_sound(tmp_path: Path) -> None:
    """All of them are compared as whole graphs (tests/exports/test_onnx.py)."""
    for model in sorted(random_models().glob("*.gguf"))[::4]:
        found = check(model, tmp_path / f"{model.stem}.log")
        rows = judge(Validation(found, [])).reports[0].rows
        assert [row for row in rows if row[-1] == "fault"] == [], model.stem
