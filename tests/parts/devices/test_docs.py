"""The commands of README and docs that use a device do what their page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.backends import vulkan_environment, vulkan_module
from tests.kit.commands_kit import Line
from tests.parts.pages.test_docs import RUNNABLE, named, quick, run_block, stock, uses_device

__all__ = ["quick", "stock"]  # fixtures
pytestmark = pytest.mark.native


@pytest.mark.parametrize("block", [block for block in RUNNABLE if uses_device(block)], ids=named)
def test_the_commands_of_a_block_work_on_a_device(
    block: list[Line], stock: Path, tmp_path: Path, environment: dict[str, str], quick: str
) -> None:
    device = {**vulkan_environment(), "GGML_BACKEND_PATH": str(vulkan_module())}
    run_block(block, stock, tmp_path, environment | device, quick)
