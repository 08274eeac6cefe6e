"""TensorBoard's profiler plugin and Holistic Trace Analysis read what `instr to-torch` writes, and
their sums are the log's.

Not part of `make test`: it needs these packages. `make test-all PARTS=peers` runs it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch_tb_profiler.profiler.data import RunProfileData
from torch_tb_profiler.profiler.run_generator import RunGenerator

from llamacpp_instr.log.session import Session, load_session
from tests.kit import steady_log
from tests.kit.native_kit import ROOT
from tests.parts.peers.run_instr import instr
from tests.parts.peers.tensorboard_kit import views


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torch")
    words = ("run", "demo", "-p", "Once upon a time", "-n", 12, "--threads", 2)
    instr(*words, "--log", "session.log", cwd=folder)
    instr("to-torch", "session.log", "-o", "profile", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def session(exported: Path) -> Session:
    return load_session(exported / "session.log")


@pytest.fixture(scope="module")
def ns_by_op(exported: Path) -> dict[str, tuple[int, int]]:
    return stats_by_op(exported)


def stats_by_op(folder: Path) -> dict[str, tuple[int, int]]:
    """Calls and ns of each op, as `instr stats` has them."""
    (stats,) = json.loads(instr("stats", "session.log", "--json", cwd=folder))
    return {row["op"]: (row["count"], row["total"]) for row in stats["rows"]}


@pytest.fixture(scope="module")
def profile(exported: Path) -> Any:
    """What the plugin's own loader makes of the trace."""
    (trace,) = (exported / "profile").glob("*.pt.trace.json.gz")
    return RunProfileData.parse("worker", "span", str(trace), str(exported))


def test_the_operators_of_the_plugin_are_those_of_stats(
    profile: Any, ns_by_op: dict[str, tuple[int, int]]
) -> None:
    found = {of.name: of for of in profile.op_list_groupby_name}
    assert found.keys() == ns_by_op.keys()
    for name, (calls, ns) in ns_by_op.items():
        assert found[name].calls == calls
        for us in (found[name].self_host_duration, found[name].device_duration):
            assert us * 1000 == pytest.approx(ns, rel=1e-9, abs=1)


def test_the_kernels_of_the_plugin_belong_to_their_operators(
    profile: Any, ns_by_op: dict[str, tuple[int, int]]
) -> None:
    found = {(of.name, of.op_name): of for of in profile.kernel_list_groupby_name_op}
    assert found.keys() == {(name, name) for name in ns_by_op}
    assert {of.name: of.calls for of in found.values()} == {
        name: calls for name, (calls, _) in ns_by_op.items()
    }


def test_the_steps_of_the_plugin_are_those_of_the_log(profile: Any, session: Session) -> None:
    steps = session.steps
    assert profile.steps_names == [str(step) for step in steps["step"].tolist()]
    kernels = sum(of.costs[0] for of in profile.steps_costs)
    assert kernels * 1000 == pytest.approx(sum(int(of.dur.sum()) for of in session.ops), rel=1e-9)


def test_the_plugin_has_every_view(profile: Any, session: Session) -> None:
    run = RunGenerator("worker", "span", profile).generate_run_profile()
    names = [view.display_name for view in run.views]
    assert names == ["Overview", "Operator", "Kernel", "Trace", "Memory"]
    held = sum(use.model + use.context + use.compute for of in session.memory for use in of.buffers)
    assert max(profile.memory_snapshot.get_peak_memory().values()) == held


def test_the_plugin_finds_a_device_as_busy_as_the_log_does(tmp_path: Path) -> None:
    """A session on lavapipe, which has one queue."""
    log = ROOT / "tests" / "fixtures" / "vulkan-timed.log.gz"
    instr("to-torch", log, "-o", "profile", cwd=tmp_path)
    (trace,) = (tmp_path / "profile").glob("*.pt.trace.json.gz")
    metrics = RunProfileData.parse("worker", "span", str(trace), str(tmp_path)).gpu_metrics_parser
    session = load_session(log)
    whole = int(session.steps["end"].max() - session.steps["begin"].min())
    cpu, device = (
        sum(int(of.dur.sum()) for of in ops) for ops in (session.ops, session.device_ops)
    )
    assert metrics.gpu_ids == {0, 1}
    assert [metrics.gpu_utilization[of] * whole for of in (0, 1)] == pytest.approx(
        [cpu, device], rel=1e-6
    )
    assert device > 0.5 * whole


def kernel_breakdown(analysis: Any) -> dict[str, float]:
    """Nanoseconds of each kernel, as trace analysis sums them."""
    _, kernels = analysis.get_gpu_kernel_breakdown(
        visualize=False, num_kernels=100, duration_ratio=1.0
    )
    return {row["name"]: row["sum (us)"] * 1000 for row in kernels.to_dict("records")}


@pytest.mark.filterwarnings("ignore:The inplace keyword")
def test_trace_analysis_breaks_time_down_as_the_log_does(
    exported: Path,
    session: Session,
    ns_by_op: dict[str, tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # it cuts times to whole microseconds otherwise
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
    from hta.trace_analysis import TraceAnalysis

    analysis = TraceAnalysis(trace_dir=str(exported / "profile"), include_last_profiler_step=True)
    (temporal,) = analysis.get_temporal_breakdown(visualize=False).to_dict("records")
    begins = [int(of.begin.min()) for of in session.ops]
    ends = [int(of.end.max()) for of in session.ops]
    spent = sum(int(of.dur.sum()) for of in session.ops)
    assert temporal["compute_time(us)"] * 1000 == pytest.approx(spent, rel=1e-9)
    whole = max(ends) - min(begins)
    assert temporal["kernel_time(us)"] * 1000 == pytest.approx(whole, rel=1e-9)
    assert temporal["idle_time(us)"] * 1000 == pytest.approx(whole - spent, rel=1e-9)
    assert temporal["non_compute_time(us)"] == pytest.approx(0, abs=1e-3)

    assert kernel_breakdown(analysis) == pytest.approx(
        {name: ns for name, (_, ns) in ns_by_op.items()}, rel=1e-9
    )


@pytest.mark.parametrize("decodes", [2, 400])
def test_trace_analysis_reads_any_number_of_kernels(
    decodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its columns have 8, 16 or 32 bits, as the numbers of the trace need."""
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
    monkeypatch.setattr(steady_log, "N_RUNS", 1)
    monkeypatch.setattr(steady_log, "N_DECODES", decodes)
    steady_log.write(tmp_path / "session.log", steady_log.steady_log(1))
    instr("to-torch", "session.log", "-o", "profile", cwd=tmp_path)
    from hta.trace_analysis import TraceAnalysis

    analysis = TraceAnalysis(trace_dir=str(tmp_path / "profile"), include_last_profiler_step=True)
    assert kernel_breakdown(analysis) == pytest.approx(
        {name: ns for name, (_, ns) in stats_by_op(tmp_path).items()}, rel=1e-9
    )


def test_tensorboard_reads_the_scalars(exported: Path, session: Session) -> None:
    events = EventAccumulator(str(exported / "profile"))
    events.Reload()
    steps = session.steps
    decodes = steps.rows(steps["phase"] == "decode")
    found = events.Scalars("ms per step/decode")
    assert [of.step for of in found] == decodes["step"].tolist()
    spent = ((decodes["end"] - decodes["begin"]) / 1e6).tolist()
    assert [of.value for of in found] == pytest.approx(spent, rel=1e-6)
    cells = [of.value for of in events.Scalars("KV cells/cache 0 of context 0")]
    assert cells == session.kv["used"].tolist()
    weights = events.Scalars("memory in bytes/weights")[-1].value
    assert weights == sum(of.bytes for of in session.tensors)


def test_tensorboard_shows_every_view_in_a_browser(
    exported: Path, ns_by_op: dict[str, tuple[int, int]]
) -> None:
    seen = views(exported / "profile")
    assert seen["errors"] == []
    assert set(seen["views"]) == {
        "Overview", "Operator", "Kernel", "Trace", "Memory", "Scalars",
    }  # fmt: skip
    for name, (calls, ns) in ns_by_op.items():
        for view in ("Operator", "Kernel"):
            (row,) = (
                line.split("\t")
                for line in seen["views"][view].splitlines()
                if line.startswith(f"{name}\t")
            )
            assert str(calls) in row
            assert str(round(ns / 1000)) in row
    assert "ggml's kernels on" in seen["views"]["Trace"]
    assert "memory in bytes" in seen["views"]["Scalars"]
