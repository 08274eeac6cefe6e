"""CUDA without a GPU. NVIDIA's compiler takes the patched backend, for two GPUs. The recorder's own
part runs in real sessions, with stand-ins for a device, which computes on the CPU, and for
libcupti, which reports it as CUPTI does (`tests/native/standin`). None of it ever ran on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamacpp_instr.log.check import check_log
from tests.conftest import log_parts, read_events
from tests.kit.cuda import compile_backend, record_with, standin, toolkit
from tests.kit.device_logs import Event, check_coverage, check_times, kernels_of
from tests.kit.native_kit import DEMO, ROOT

pytestmark = pytest.mark.native

MODES = [
    "", "graphs", "two", "graphs,two", "shuffled", "graphs,shuffled", "late", "graphs,late",
    "graphs,late,shuffled,two",
]  # fmt: skip
"""launches or CUDA graphs, on one device or two; how CUPTI's records come"""


def test_nvidias_compiler_takes_it(tmp_path: Path) -> None:
    """For two GPUs, with CUPTI's headers, without a warning."""
    output, seconds = compile_backend(tmp_path)
    print(f"{seconds:.0f} CPU s")
    assert output.strip() == ""


@pytest.mark.parametrize("level", ["detailed", "verbose"])
@pytest.mark.parametrize("mode", MODES)
def test_every_node_is_timed_once_and_no_logit_changes(
    tmp_path: Path, mode: str, level: str
) -> None:
    session = record_with(tmp_path / "cuda.log", mode, level=level)
    assert session.equal is True
    assert session.stderr == ""
    events = session.events()
    devices = {"CUDA0", "CUDA1"} if "two" in mode else {"CUDA0"}
    found = check_coverage(events)
    assert found.keys() - {""} == devices
    assert sum(found[name] for name in devices) > 400
    assert events[-1]["dropped_ops"] == 0
    check_times(events, least=0.1)  # meanwhile the stand-in also delivers records
    assert list(check_log(session.log)) == []
    for device in session.events("device"):
        assert device["clock"] == "cupti"
        assert device["description"] == session.devices[device["name"]]


@pytest.mark.parametrize("mode", ["", "graphs", "graphs,late,shuffled"])
def test_times_are_those_of_the_device(tmp_path: Path, mode: str) -> None:
    """To the nanosecond. A product of matrices is a memset and two kernels: its time goes from the
    start of the first to the end of the last. A norm and the product after it are one kernel."""
    truth = tmp_path / "truth"
    session = record_with(tmp_path / "cuda.log", mode, environment={"STANDIN_TRUTH": str(truth)})
    ran = set(intervals(truth))
    several = fused = 0
    for kernels in kernels_of(session.events()):
        if "device" in kernels.line:
            ops = kernels.graph["nodes"]["op"]
            assert set(kernels.spans) <= ran
            several += sum(ops[node] == "MUL_MAT" for node in kernels.firsts)
            fused += len(kernels.nodes) - len(kernels.firsts)
    assert several > 100
    assert fused > 20


def intervals(truth: Path) -> Iterator[tuple[int, int]]:
    """When the device began and ended with what belongs to the same node, one after the other."""
    last, begin, end = "", 0, 0
    for line in truth.read_text().splitlines():
        of, *times = line.split()
        if of != last:
            yield begin, end
            last, begin = of, int(times[0])
        end = int(times[1])
    yield begin, end


def test_a_session_begins_while_graphs_are_in_use_and_they_change(tmp_path: Path) -> None:
    """Two sessions of one process. Before, between and in them, CUDA graphs are captured, launched
    and updated."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs.cuda_sessions", str(DEMO), str(tmp_path)],
        cwd=ROOT, check=True, capture_output=True, text=True,
        env={
            **os.environ, "GGML_BACKEND_PATH": str(standin() / "libggml-cuda.so"),
            "STANDIN_CUDA": "graphs", "LD_LIBRARY_PATH": str(standin() / "cupti"),
        },
    )  # fmt: skip
    assert done.stderr == ""
    for log in (tmp_path / "first.log", tmp_path / "second.log"):
        events = read_events(log)
        assert check_coverage(events)["CUDA0"] > 400
        assert events[-1]["dropped_ops"] == 0
        assert list(check_log(log)) == []


def test_two_contexts_on_one_device(tmp_path: Path) -> None:
    session = record_with(tmp_path / "two.log", "graphs,shuffled,late", contexts=2)
    events = session.events()
    assert check_coverage(events)["CUDA0"] > 400
    assert {event["ctx"] for event in session.events("compute")} == {0, 1}
    assert list(check_log(session.log)) == []


@pytest.mark.parametrize(
    "mode", ["dropped", "graphs,dropped", "unstamped", "graphs,unstamped", "graphs,untold"]
)
def test_runs_with_lost_records_are_counted(tmp_path: Path, mode: str) -> None:
    """What is incomplete in a run is not in the log, nor is what belongs to unknown nodes."""
    session = record_with(tmp_path / "lost.log", mode)
    assert session.equal is True
    events = session.events()
    dropped = events[-1]["dropped_ops"]
    assert dropped == executed(events) - timed(events) > 0
    (finding,) = check_log(session.log)
    assert f"{dropped} ops dropped" in str(finding)


def timed(events: list[Event]) -> int:
    return sum(len(kernels.nodes) for kernels in kernels_of(events) if "device" in kernels.line)


def executed(events: list[Event]) -> int:
    """The nodes of all computes that a device executed."""
    graphs = {event["graph"]: event for event in events if event["event"] == "graph"}
    return sum(
        sum(graph["nodes"]["exec"][split["start"] : split["end"]])
        for event in events
        if event["event"] == "compute"
        for graph in [graphs[event["graph"]]]
        for split in graph["splits"]
        if split["backend"] != "CPU"
    )


def test_what_a_device_has_not_computed_when_a_session_ends_is_dropped(tmp_path: Path) -> None:
    session = record_with(tmp_path / "early.log", contexts=0)
    events = session.events()
    assert timed(events) == 0
    assert events[-1]["dropped_ops"] == executed(events) > 50


def test_a_part_of_a_rotated_log_has_the_kernels_of_its_computes(tmp_path: Path) -> None:
    log = tmp_path / "rotated.log"
    record_with(
        log, "graphs,late,slow", level="exec", contexts=2,
        environment={"LLAMA_INSTR_LOG": str(log), "LLAMA_INSTR_ROTATE": "12000"},
    )  # fmt: skip
    parts = log_parts(log)
    assert len(parts) > 1
    assert sum(check_coverage(read_events(part))["CUDA0"] for part in parts) > 400


def test_a_clock_that_disagrees_with_the_hosts_is_uncertain(tmp_path: Path) -> None:
    """A kernel that seems to begin before its submission shows by how much times may be wrong."""
    session = record_with(tmp_path / "skewed.log", "skewed")
    assert 10_000 < max(event["uncertainty"] for event in session.events("device")) <= 100_002
    assert list(check_log(session.log)) == []


@pytest.mark.parametrize(
    ("why", "reason"),
    [
        ("held", "another profiler uses CUPTI"),
        ("old", "CUPTI is too old: it has no cuptiActivityRegisterTimestampCallback"),
        ("damaged", "install CUPTI, or add its folder to LD_LIBRARY_PATH"),
        ("no driver", "CUPTI cannot be used"),
    ],
)
def test_without_cupti_a_session_has_no_kernels_and_one_line_says_why(
    tmp_path: Path, why: str, reason: str
) -> None:
    """NVIDIA's own libcupti is the one without a driver."""
    (tmp_path / "libcupti.so.13").touch()
    folders = {
        "held": standin() / "cupti",
        "old": standin(old=True) / "cupti",
        "damaged": tmp_path,
        "no driver": toolkit() / "lib",
    }
    session = record_with(tmp_path / "none.log", why, cupti=folders[why])
    assert session.equal is True
    (line,) = session.stderr.splitlines()
    assert line.startswith("llama-instr: the kernels of CUDA are not timed: ")
    assert reason in line
    events = session.events()
    assert session.events("device") == []
    assert timed(events) == events[-1]["dropped_ops"] == 0
    assert list(check_log(session.log)) == []


def test_the_plan_of_a_model_allows_for_the_memory_of_the_driver(tmp_path: Path) -> None:
    """With a driver that takes more than a dry run may. Whether any driver does is not known."""
    environment = {
        **os.environ, "GGML_BACKEND_PATH": str(standin() / "libggml-cuda.so"),
        "STANDIN_CUDA": "large",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "llamacpp_instr", "memory", "demo", "--json"],
        cwd=tmp_path, env=environment, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "CUDA0" in done.stdout


def test_doctor_says_that_this_never_ran_on_a_gpu() -> None:
    environment = {**os.environ, "GGML_BACKEND_PATH": str(standin() / "libggml-cuda.so")}
    done = subprocess.run(
        [sys.executable, "-m", "llamacpp_instr", "doctor", "--json"],
        env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    devices = {of["name"]: of["timed"] for of in json.loads(done.stdout)["library"]["devices"]}
    assert devices["CUDA0"] == "every op, by CUPTI; the timing has never run on a GPU"


def test_at_the_lowest_level_cupti_is_left_alone(tmp_path: Path) -> None:
    session = record_with(tmp_path / "minimal.log", "held", level="minimal")
    assert session.equal is True
    assert session.stderr == ""
    assert session.events("device") == session.events("ops") == []
