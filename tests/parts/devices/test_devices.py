"""What must hold on every device: architectures, a real model, llama-bench's own figures, a wheel.
It takes minutes, so it is a suite of its own: `make test-all PARTS=devices`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from llamacpp_instr.converters.analyses.bench import find_repetitions
from llamacpp_instr.converters.exports.perfetto import Options, write_perfetto
from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.session import load_session
from llamacpp_instr.log.steps import counted_steps
from tests.conftest import Instr
from tests.conftest import read_events as read_lines
from tests.kit.backends import (
    blas_module,
    vulkan_environment,
    vulkan_module,
    wheel_with_backends,
)
from tests.kit.device_logs import DeviceSession, check_coverage, check_times, record_on
from tests.kit.llama_programs import programs
from tests.kit.native_kit import DEMO, ROOT, random_model, smollm2
from tests.kit.trace_processor import check

pytestmark = pytest.mark.native


class Backend(NamedTuple):
    module: Callable[[], Path]
    environment: Mapping[str, str]


BLAS, VULKAN = Backend(blas_module, {}), Backend(vulkan_module, vulkan_environment())
EACH = pytest.mark.parametrize("backend", [BLAS, VULKAN], ids=["blas", "vulkan"])

ARCHITECTURES = [
    "bloom-dense", "cohere2-dense", "falcon-h1-dense", "gemma3-dense", "glm4-dense", "gpt-oss-moe",
    "gpt2-dense", "granitehybrid-dense", "jamba-dense", "lfm2-dense", "llama-dense", "llama4-moe",
    "mamba-dense", "mamba2-dense", "minimax-m2-moe", "nemotron_h-dense", "olmoe-moe", "phi3-dense",
    "plamo2-dense", "qwen3moe-moe",
]  # fmt: skip
"""Dense and with experts, whose choice is one kernel of many nodes; recurrent, some of whose nodes
have no elements, and hybrid; several kinds of attention. qwen3next is left out: its process ends on
lavapipe with SIGSEGV also without a session."""

SMALL = 0.77
"""kernels of less than a third of a millisecond: the time between two counts"""


def check_session(session: DeviceSession, least: float) -> None:
    """Asserts what every log of a device must have: each node once, in its split, between
    submission and wait; kernels that are at least that share of the device's span; equal logits."""
    assert session.equal is not False
    events = session.events()
    assert events[-1]["dropped_ops"] == 0
    on_device = check_coverage(events)
    if "Vulkan0" in session.devices:
        assert on_device["Vulkan0"] > 100
        check_times(events, least)
    assert list(check_log(session.log)) == []
    trace = session.log.with_suffix(".pftrace")
    with trace.open("wb") as file:
        write_perfetto(read_events(session.log), file, Options(flows=True))
    (imported,) = check(trace)
    assert imported["problems"] == []
    assert imported["slices"] > 100


@EACH
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture(tmp_path: Path, backend: Backend, name: str) -> None:
    session = record_on(
        [backend.module()], tmp_path / "a.log", random_model(name),
        environment=backend.environment,
    )  # fmt: skip
    check_session(session, SMALL)
    assert {split["backend"] for e in session.events("graph") for split in e["splits"]} == {
        "CPU", *(name for name in session.devices if name != "CPU")
    }  # fmt: skip


@EACH
def test_a_real_model(tmp_path: Path, backend: Backend) -> None:
    session = record_on(
        [backend.module()], tmp_path / "real.log", smollm2(), environment=backend.environment
    )
    check_session(session, 0.95)


def test_a_real_model_in_parts_on_a_device_blas_and_the_cpu(tmp_path: Path) -> None:
    session = record_on(
        [vulkan_module(), blas_module()], tmp_path / "parts.log", smollm2(), layers=8,
        environment=VULKAN.environment,
    )  # fmt: skip
    check_session(session, 0.95)
    splits = [of["backend"] for e in session.events("graph") for of in e["splits"]]
    assert set(splits) == {"CPU", "BLAS", "Vulkan0"}


def test_two_contexts_of_a_real_model_share_a_device(tmp_path: Path) -> None:
    session = record_on(
        [vulkan_module()], tmp_path / "two.log", smollm2(), contexts=2,
        environment=VULKAN.environment,
    )  # fmt: skip
    check_session(session, 0.95)
    assert {event["ctx"] for event in session.events("compute")} == {0, 1}


@EACH
@pytest.mark.parametrize("test", [("-p", "64", "-n", "0"), ("-p", "0", "-n", "24")], ids=" ".join)
def test_tokens_per_second_are_those_that_llama_bench_measures(
    tmp_path: Path, backend: Backend, test: tuple[str, ...]
) -> None:
    """By the steps in the log. The median of the repetitions, since the machine may stop the
    process between two steps of one."""
    log = tmp_path / "bench.log"
    recorded = {"GGML_BACKEND_PATH": str(backend.module()), "LLAMA_INSTR_LOG": str(log)}
    done = subprocess.run(
        [programs() / "llama-bench", "-m", DEMO, *test, "-r", "7", "-t", "2", "-o", "json"],
        env={**os.environ, **backend.environment, **recorded}, check=True, capture_output=True,
        text=True,
    )  # fmt: skip
    (printed,) = json.loads(done.stdout)
    assert printed["backends"] in ("BLAS", "Vulkan")
    session = load_session(log)
    steps, _ = counted_steps(session)
    _, ends = find_repetitions(session)
    ours = []
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        own = steps.rows((steps["begin"] >= begin) & (steps["end"] <= end))
        ours.append(1e9 * own["n_tokens"].sum() / (own["end"] - own["begin"]).sum())
    assert len(ours) == 7
    assert np.median(np.divide(ours, printed["samples_ts"])) == pytest.approx(1, abs=0.02)
    assert list(check_log(log)) == []


@pytest.fixture
def failing_device(
    tmp_path_factory: pytest.TempPathFactory,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`instr` uses a Vulkan device that fails as SUBMITS or BYTES say."""
    library = tmp_path_factory.mktemp("failing") / "failing_device.so"
    source = ROOT / "tests" / "native" / "failing_device.cpp"
    flags = ("-std=c++17", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *flags, source, "-o", library, "-ldl"], check=True)
    failing = {"LD_PRELOAD": str(library), "GGML_BACKEND_PATH": str(vulkan_module())}
    for name, value in {**VULKAN.environment, **failing}.items():
        monkeypatch.setitem(environment, name, value)


@pytest.mark.usefixtures("failing_device")
def test_a_device_that_disappears_is_one_line_and_leaves_whole_lines(
    started_instr: Instr,
    tmp_path: Path,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(environment, "SUBMITS", "60")
    done = started_instr("run", "demo", "-p", "Once upon", "-n", "99", "--log", "a.log")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "recorded in a.log: llama.cpp ended the process: vk::Queue::submit: ErrorDeviceLost"
    )
    (finding,) = check_log(tmp_path / "a.log")
    assert finding.message == "was not closed: no session_end"
    events = read_lines(tmp_path / "a.log")
    lost = max(of["compute"] for of in events if of["event"] == "compute")
    before = [of for of in events if of.get("compute") != lost]
    assert check_coverage(before)["Vulkan0"] > 200


@pytest.mark.usefixtures("failing_device")
@pytest.mark.parametrize("n_bytes", [3_000_000, 10_000_000], ids=["weights", "compute buffer"])
def test_more_layers_than_fit_are_one_line(
    started_instr: Instr,
    tmp_path: Path,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    n_bytes: int,
) -> None:
    monkeypatch.setitem(environment, "BYTES", str(n_bytes))
    done = started_instr("run", "demo", "-p", "Once upon", "-n", "9", "--log", "a.log")
    assert done.returncode == 2
    *ggmls, line = done.stderr.splitlines()
    assert line.startswith("Error: ")
    assert re.search(r"failed to allocate Vulkan0 buffer of size \d+; put fewer layers", line)
    assert all(of.startswith("ggml_vulkan: ") for of in ggmls), "it writes them past its own log"
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_with_backends_records_in_an_environment_of_its_own(tmp_path: Path) -> None:
    new = tmp_path / "new"

    def run(*command: str | Path) -> str:
        clean = {name: of for name, of in os.environ.items() if not name.startswith("PYTHON")}
        env = {**clean, **VULKAN.environment}
        done = subprocess.run(
            command, cwd=tmp_path, env=env, check=True, capture_output=True, text=True
        )
        return done.stdout

    run(sys.executable, "-m", "venv", new)
    run(new / "bin" / "pip", "install", "-q", ROOT, *wheel_with_backends().glob("*.whl"))
    instr = new / "bin" / "instr"
    found = json.loads(run(instr, "doctor", "--json"))["library"]["devices"]
    assert {of["name"]: of["timed"] for of in found} == {
        "CPU": "every op", "BLAS": "every op",
        "Vulkan0": "every op, by the device's time stamps",
    }  # fmt: skip
    long = "Once upon a time there was a very small model that wrote its story twice. " * 4
    run(instr, "run", "demo", "-p", long, "-n", "4", "--gpu-layers", "2", "--log", "a.log")
    events = read_lines(tmp_path / "a.log")
    assert check_coverage(events)["Vulkan0"] > 100
    check_times(events, SMALL)
    splits = {of["backend"] for e in events if e["event"] == "graph" for of in e["splits"]}
    assert splits == {"CPU", "BLAS", "Vulkan0"}
    assert list(check_log(tmp_path / "a.log")) == []
