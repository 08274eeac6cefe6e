"""Exploring draws other examples in each run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.profiles import EXPLORE
from tests.test_examples import IMPORT, examples


@pytest.mark.native
def test_exploring_draws_other_examples(tmp_path: Path, environment: dict[str, str]) -> None:
    draw = f"print_examples({EXPLORE!r})"
    first, second = (examples(tmp_path, environment, "1", IMPORT, draw) for _ in range(2))
    assert first != second
