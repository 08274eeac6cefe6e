"""The kernels of a Vulkan device, stamped inside of its command buffers: Mesa's lavapipe, which
runs the real shaders on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.conftest import read_events
from tests.kit.backends import (
    blas_module,
    needs_openblas,
    needs_vulkan,
    vulkan_environment,
    vulkan_module,
)
from tests.kit.device_logs import (
    DeviceSession,
    Event,
    check_coverage,
    kernels_of,
    record_on,
    splits_of,
)
from tests.kit.native_kit import DEMO, random_models

pytestmark = [pytest.mark.native, needs_vulkan]

ALL, PART = -1, 2
MODES: dict[str, tuple[str, int, Mapping[str, str]]] = {
    "detailed": ("detailed", ALL, {}),
    "verbose": ("verbose", ALL, {}),
    "two layers": ("detailed", PART, {}),
    "one node per submission": ("verbose", ALL, {"GGML_VK_MAX_NODES_PER_SUBMIT": "1"}),
    "five nodes per submission": ("detailed", ALL, {"GGML_VK_MAX_NODES_PER_SUBMIT": "5"}),
    "one submission after the other": ("detailed", ALL, {"GGML_VK_SERIALIZE_SUBMISSIONS": "1"}),
    "not asynchronous": ("detailed", PART, {"GGML_VK_DISABLE_ASYNC": "1"}),
    "not fused": ("detailed", ALL, {"GGML_VK_DISABLE_FUSION": "1"}),
    "not reordered": ("detailed", ALL, {"GGML_VK_DISABLE_GRAPH_OPTIMIZE": "1"}),
    "not calibrated": ("detailed", ALL, {"GGML_VK_DISABLE_CALIBRATED_TIMESTAMPS": "1"}),
}


def record(log: Path, mode: str, contexts: int = 1) -> DeviceSession:
    level, layers, environment = MODES[mode]
    return record_on(
        [vulkan_module()], log, DEMO, level=level, layers=layers, contexts=contexts,
        environment={**vulkan_environment(), **environment},
    )  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_every_node_is_timed_once_and_no_logit_changes(tmp_path: Path, mode: str) -> None:
    session = record(tmp_path / "vulkan.log", mode)
    assert session.equal is True
    events = session.events()
    on_device = check_coverage(events)["Vulkan0"]
    assert on_device > (100 if MODES[mode][1] == PART else 400)
    assert events[-1]["dropped_ops"] == 0
    check_times(events)
    (device, *_) = session.events("device")
    assert device["description"] == session.devices["Vulkan0"]
    assert device["clock"] == ("bounded" if mode == "not calibrated" else "calibrated")
    assert device["tick"] == 1, "lavapipe stamps with the clock of the system"


def check_times(events: list[Event], least: float = 0.7) -> None:
    """Kernels run after their submission has begun, and before the wait for them has ended, one
    after the other. They are at least that share of what the device does meanwhile, which is small
    for models whose kernels are as short as the time between two."""
    splits = splits_of(events)
    waits = [(of["t"], of["t"] + of["dur"]) for of in events if of["event"] == "sync"]
    uncertainty = max(event["uncertainty"] for event in events if event["event"] == "device")
    busy = whole = 0
    for kernels in kernels_of(events):
        if "device" not in kernels.line:
            continue
        submitted, _ = splits[kernels.compute["compute"], kernels.line["split"]]
        computed = kernels.compute["t"] + kernels.compute.get("start", 0) + kernels.compute["dur"]
        begin, end = kernels.span
        assert begin >= submitted - uncertainty
        assert end <= next(until for at, until in waits if at >= computed) + uncertainty
        busy, whole = busy + kernels.busy, whole + end - begin
    assert busy > least * whole


def test_two_contexts_on_one_device(tmp_path: Path) -> None:
    session = record(tmp_path / "two.log", "detailed", contexts=2)
    events = session.events()
    assert check_coverage(events)["Vulkan0"] > 400
    assert {event["ctx"] for event in session.events("compute")} == {0, 1}
    assert len({event["name"] for event in session.events("device")}) == 1


def test_what_a_device_has_not_computed_when_a_session_ends_is_dropped(tmp_path: Path) -> None:
    session = record(tmp_path / "early.log", "detailed", contexts=0)
    (compute,) = session.events("compute")
    (graph,) = session.events("graph")
    (split,) = [of for of in graph["splits"] if of["backend"] == "Vulkan0"]
    runs = sum(graph["nodes"]["exec"][split["start"] : split["end"]])
    last = session.events()[-1]
    assert compute.get("status", 0) == 0
    assert [of for of in session.events("ops") if "device" in of] == []
    assert last["dropped_ops"] == runs > 50


def test_a_part_of_a_rotated_log_has_the_kernels_of_its_computes(tmp_path: Path) -> None:
    """A part stays open until the device is done with what was submitted in it."""
    log = tmp_path / "rotated.log"
    recording = {"LLAMA_INSTR_LOG": str(log), "LLAMA_INSTR_ROTATE": "30000"}
    record_on(
        [vulkan_module()], log, DEMO, level="exec", contexts=2,
        environment={**vulkan_environment(), **recording},
    )  # fmt: skip
    parts = [log, *tmp_path.glob("rotated.part*.log")]
    assert len(parts) > 1
    computes = [event for part in parts for event in read_events(part, "compute")]
    assert len(computes) == len({event["compute"] for event in computes}) > 8
    assert sum(check_coverage(read_events(part))["Vulkan0"] for part in parts) > 400


@pytest.mark.parametrize("name", ["llama4-moe", "gemma3-dense", "mamba-dense"])
def test_other_architectures(tmp_path: Path, name: str) -> None:
    """A mixture of experts, whose choice is one kernel of many nodes; a recurrent model, some of
    whose nodes have no elements."""
    session = record_on(
        [vulkan_module()], tmp_path / "a.log", random_models() / f"{name}.gguf",
        environment=vulkan_environment(),
    )  # fmt: skip
    assert session.equal is True
    events = session.events()
    assert check_coverage(events)["Vulkan0"] > 100
    check_times(events, least=0.2)


def test_at_the_lowest_level_nothing_is_stamped(tmp_path: Path) -> None:
    session = record_on(
        [vulkan_module()], tmp_path / "minimal.log", DEMO, level="minimal",
        environment=vulkan_environment(),
    )  # fmt: skip
    assert session.equal is True
    assert session.events("device") == session.events("ops") == []
    assert session.events()[-1]["dropped_ops"] == 0


@needs_openblas
def test_a_device_and_blas_in_one_run(tmp_path: Path) -> None:
    session = record_on(
        [vulkan_module(), blas_module()], tmp_path / "both.log", DEMO, layers=PART,
        environment=vulkan_environment(),
    )  # fmt: skip
    assert session.equal is True
    events = session.events()
    check_coverage(events)
    check_times(events)
    backends = {split["backend"] for event in session.events("graph") for split in event["splits"]}
    assert backends == {"CPU", "BLAS", "Vulkan0"}
