"""A part of `make test-all` runs only where everything that it needs is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.suite_parts import PARTS, table

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ends the run with the command that installs what a part lacks; no test of it is skipped."""
    folders = {item.path.relative_to(FOLDER).parts[0] for item in items if _is_in_a_part(item)}
    lacking = [part for part in PARTS if part.name in folders and part.missing]
    if lacking:
        pytest.exit(f"this machine lacks what these tests need:\n{table(lacking)}", 2)


def _is_in_a_part(item: pytest.Item) -> bool:
    return item.path.is_relative_to(FOLDER)
