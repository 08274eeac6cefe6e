"""Fixtures for the tests of logs."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test writes its log."""
    return tmp_path / "session.log"
