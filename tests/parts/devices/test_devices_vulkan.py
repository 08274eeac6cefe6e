"""The kernels of a Vulkan device, stamped inside of its command buffers: Mesa's lavapipe, which
runs the real shaders on the CPU."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from llamacpp_instr.log.check import check_log
from tests.conftest import Instr, log_parts, read_events
from tests.kit import memory_truth
from tests.kit.backends import (
    blas_module,
    vulkan_environment,
    vulkan_module,
)
from tests.kit.commands_kit import one_line
from tests.kit.device_logs import DeviceSession, check_coverage, check_times, record_on
from tests.kit.native_kit import DEMO

pytestmark = pytest.mark.native

RUN = one_line("docs/how-to/record-a-gpu.md", "instr run model.gguf --gpu-layers ")

ALL, PART = -1, 2
MODES: dict[str, tuple[str, int, Mapping[str, str]]] = {
    "detailed": ("detailed", ALL, {}),
    "verbose": ("verbose", ALL, {}),
    "two layers": ("detailed", PART, {}),
    "not calibrated": ("detailed", ALL, {"GGML_VK_DISABLE_CALIBRATED_TIMESTAMPS": "1"}),
}
"""level, layers on the device, environment; `test_vulkan_modes.py` has more"""


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
    assert list(check_log(session.log)) == []
    (device, *_) = session.events("device")
    assert device["description"] == session.devices["Vulkan0"]
    assert device["clock"] == ("bounded" if mode == "not calibrated" else "calibrated")
    assert device["tick"] == 1, "lavapipe stamps with the clock of the system"


def test_the_memory_of_a_device_is_what_llama_cpp_prints(tmp_path: Path) -> None:
    session = record(tmp_path / "part.log", "two layers")
    event, *_ = session.events("memory")
    before, *_, recorded = "".join(session.messages).split("constructing llama_context\n")
    weights, sizes = memory_truth.buffers([before])["weights"], memory_truth.buffers([recorded])
    for name, of_kind in (("model", weights), ("context", sizes["cache"]),
                          ("compute", sizes["compute"])):  # fmt: skip
        sums = {use["buffer"]: use[name] / 2**20 for use in event["buffers"] if use[name]}
        assert sums == pytest.approx(of_kind, abs=0.02), name
    assert {use["buffer"]: use.get("device") for use in event["buffers"]} == {
        "CPU": None, "CPU_Mapped": None, "Vulkan0": "Vulkan0", "Vulkan_Host": None,
    }  # fmt: skip
    total, free = session.memory["Vulkan0"]
    assert event["devices"] == [{"device": "Vulkan0", "total": total, "free": free}]


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
    parts = log_parts(log)
    assert len(parts) > 1
    computes = [event for part in parts for event in read_events(part, "compute")]
    assert len(computes) == len({event["compute"] for event in computes}) > 8
    assert sum(check_coverage(read_events(part))["Vulkan0"] for part in parts) > 400


def test_at_the_lowest_level_nothing_is_stamped(tmp_path: Path) -> None:
    session = record_on(
        [vulkan_module()], tmp_path / "minimal.log", DEMO, level="minimal",
        environment=vulkan_environment(),
    )  # fmt: skip
    assert session.equal is True
    assert session.events("device") == session.events("ops") == []
    assert session.events()[-1]["dropped_ops"] == 0


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


def test_the_command_of_the_page_records_a_device(
    started_instr: Instr,
    tmp_path: Path,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copyfile(DEMO, tmp_path / "model.gguf")
    there = {**vulkan_environment(), "GGML_BACKEND_PATH": str(vulkan_module())}
    for name, value in there.items():
        monkeypatch.setitem(environment, name, value)
    done = started_instr(*shlex.split(RUN.text)[1:], "-n", "4")
    assert done.returncode == 0, done.stderr
    events = read_events(tmp_path / "gpu.log")
    assert check_coverage(events)["Vulkan0"] > 100
    check_times(events)
    assert list(check_log(tmp_path / "gpu.log")) == []
