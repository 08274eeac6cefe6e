"""`instr probe --device` measures a device and adds it to the machine's file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamacpp_instr.base.cpus import cpu_name
from llamacpp_instr.prediction.probe.file import probe_json, read_probe
from tests.conftest import Instr, assert_refused
from tests.kit.backends import vulkan_environment, vulkan_module
from tests.kit.made_probe import MIB, probe_of
from tests.kit.native_kit import ROOT


def on_lavapipe(*options: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The command of the pages, again if Mesa 22.3 ends it: see `tests/programs/lavapipe.py`."""
    words = [sys.executable, "-m", "tests.programs.probe_device", *options]
    for _ in range(8):
        done = subprocess.run(
            words, cwd=ROOT, env=environment, check=False, capture_output=True, text=True
        )
        if done.returncode >= 0 and "llama.cpp ended the process" not in done.stderr:
            break
    return done


@pytest.mark.native
def test_a_device_is_measured_and_added_to_a_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    started_instr: Instr,
) -> None:
    """With Mesa's device, which computes on the CPU: it copies and multiplies no faster than all
    CPUs, and no slower than a thousandth of them. The speed of its copies is near that which
    `tests/programs/probe_device.py` times by its own clock."""
    for name, value in {
        **vulkan_environment(),
        "GGML_BACKEND_PATH": str(vulkan_module()),
    }.items():
        monkeypatch.setitem(environment, name, value)
    path = tmp_path / "probe.json"
    path.write_bytes(probe_json(probe_of(cpu_name())))
    done = on_lavapipe("-o", str(path), environment={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    expected = json.loads(done.stdout.partition("\n")[0])
    (limits,) = read_probe(path).devices
    assert (limits.device, limits.description) == ("Vulkan0", expected["description"])
    assert [of.bytes for of in limits.bandwidth] == [MIB, 16 * MIB]
    assert {(of.type, of.tokens) for of in limits.kernels} == {
        (name, tokens) for name in ("F32", "F16") for tokens in (1, 8)
    }
    assert limits.bandwidth[1].bytes_per_second == pytest.approx(expected["copied"], rel=1)
    assert all(1e6 < of.flops_per_second < 1e13 for of in limits.kernels)
    (barrier,) = limits.barriers
    assert barrier.ns < 5e6
    refused = started_instr("probe", "--device", "Vulkan7", "-o", path)
    assert_refused(refused, "--device Vulkan7: there is no such device, only Vulkan0")
    path.write_bytes(probe_json(probe_of("another CPU")))
    assert_refused(started_instr("probe", "--device", "Vulkan0", "-o", path), "is for another CPU")
