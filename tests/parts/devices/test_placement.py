"""`instr run` puts layers on the devices that its options name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_placement import RUN
from tests.conftest import Instr, assert_refused, read_events
from tests.kit.backends import vulkan_environment, vulkan_module

pytestmark = pytest.mark.native


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        ("", 81),
        ("--gpu-layers 0", 0),
        ("--gpu-layers 99 --device Vulkan0 --tensor-split 1", 81),
        ("--device none", 0),
        ("--device Vulkan1", "there is no such device, only Vulkan0"),
    ],
)
def test_layers_go_where_the_options_say(
    started_instr: Instr,
    tmp_path: Path,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    nodes: int | str,
) -> None:
    more = {**vulkan_environment(), "GGML_BACKEND_PATH": str(vulkan_module())}
    for name, value in more.items():
        monkeypatch.setitem(environment, name, value)
    done = started_instr(*RUN, *words.split())
    if isinstance(nodes, str):
        assert_refused(done, nodes)
        return
    assert done.returncode == 0, done.stderr
    (graph, *_) = read_events(tmp_path / "a.log", "graph")
    on_device = [split for split in graph["splits"] if split["backend"] == "Vulkan0"]
    runs = graph["nodes"]["exec"]
    assert sum(sum(runs[split["start"] : split["end"]]) for split in on_device) == nodes


def test_the_plan_is_what_llama_cpp_allocates(
    started_instr: Instr,
    tmp_path: Path,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan gives a device the same bytes as the log of a run."""
    more = {**vulkan_environment(), "GGML_BACKEND_PATH": str(vulkan_module())}
    for name, value in more.items():
        monkeypatch.setitem(environment, name, value)
    assert started_instr(*RUN, "--gpu-layers", "2").returncode == 0
    (memory, *_) = read_events(tmp_path / "a.log", "memory")
    planned = reports(started_instr, "memory", "demo", "--gpu-layers", "2")
    (on_device,) = planned["devices"]["rows"]
    (use,) = [buffer for buffer in memory["buffers"] if buffer.get("device") == "Vulkan0"]
    (device,) = memory["devices"]
    parts = [use[kind] for kind in ("model", "context", "compute")]
    cells = list(on_device.values())
    assert cells == ["Vulkan0", *parts, sum(parts), device["free"], device["total"]]
    again = reports(started_instr, "memory", "a.log")["memory"]["rows"]
    assert {row["buffer"]: row["difference"] for row in again if row["buffer"] == "Vulkan0"} == {
        "Vulkan0": 0
    }


def reports(instr: Instr, *words: str) -> dict[str, Any]:
    """The tables of a command by id."""
    done = instr(*words, "--json")
    assert done.returncode == 0, done.stderr
    return {table["id"]: table for table in json.loads(done.stdout)}


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("loader", "; install Vulkan's loader (Debian, Ubuntu: apt install libvulkan1)"),
        ("driver", "libggml-vulkan.so finds no driver here, or belongs to another ggml"),
        ("device", "--device Vulkan0: vulkan is built and finds no such device here"),
    ],
)
def test_a_backend_without_its_loader_driver_or_device_is_one_line(
    started_instr: Instr,
    tmp_path: Path,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    missing: str,
    message: str,
) -> None:
    module = vulkan_module()
    variables = vulkan_environment()
    if missing == "loader":  # linked with one that does not exist
        for path in module.parent.iterdir():
            data = path.read_bytes().replace(b"libvulkan.so.1\0", b"libvulkan.so.9\0")
            (tmp_path / path.name).write_bytes(data)
        module = tmp_path / module.name
    elif missing == "driver":
        variables |= dict.fromkeys(
            ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"), str(tmp_path / "none.json")
        )
    else:
        del variables["GGML_VK_VISIBLE_DEVICES"]
    for name, value in {**variables, "GGML_BACKEND_PATH": str(module)}.items():
        monkeypatch.setitem(environment, name, value)
    assert_refused(started_instr(*RUN, "--device", "Vulkan0"), message)
