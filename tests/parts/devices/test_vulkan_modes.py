"""Modes of the Vulkan backend beside those of `test_devices_vulkan.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.kit.backends import vulkan_environment, vulkan_module
from tests.kit.device_logs import check_coverage, check_times, record_on
from tests.kit.native_kit import DEMO

pytestmark = pytest.mark.native

ALL, PART = -1, 2
MODES: dict[str, tuple[int, Mapping[str, str]]] = {
    "one node per submission": (ALL, {"GGML_VK_MAX_NODES_PER_SUBMIT": "1"}),
    "five nodes per submission": (ALL, {"GGML_VK_MAX_NODES_PER_SUBMIT": "5"}),
    "one submission after the other": (ALL, {"GGML_VK_SERIALIZE_SUBMISSIONS": "1"}),
    "not asynchronous": (PART, {"GGML_VK_DISABLE_ASYNC": "1"}),
    "not fused": (ALL, {"GGML_VK_DISABLE_FUSION": "1"}),
    "not reordered": (ALL, {"GGML_VK_DISABLE_GRAPH_OPTIMIZE": "1"}),
}
"""layers on the device, environment"""


@pytest.mark.parametrize("level", ["detailed", "verbose"])
@pytest.mark.parametrize("mode", MODES)
def test_every_node_is_timed_once_and_no_logit_changes(
    tmp_path: Path, mode: str, level: str
) -> None:
    layers, environment = MODES[mode]
    session = record_on(
        [vulkan_module()], tmp_path / "vulkan.log", DEMO, level=level, layers=layers,
        environment={**vulkan_environment(), **environment},
    )  # fmt: skip
    assert session.equal is True
    events = session.events()
    assert check_coverage(events)["Vulkan0"] > (100 if layers == PART else 400)
    assert events[-1]["dropped_ops"] == 0
    check_times(events)
