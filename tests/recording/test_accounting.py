"""Times add up: ops fill their compute, and a step spans the time that its caller waits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import quantiles

import pytest

from llamacpp_instr.log import schema
from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.session import load_session
from tests.kit.log_readers import whole_events
from tests.kit.native_kit import DEMO, random_model, run_probe
from tests.kit.programs import native_program

pytestmark = pytest.mark.native

DECODES = 60


def undisturbed(shares: list[float]) -> float:
    """The share that a tenth of the computes or steps reach. What other processes take from a
    thread makes shares smaller, but not all of them; time that is never recorded would."""
    return quantiles(shares, n=10)[-1]


def record(tmp_path: Path, model: Path, threads: int, level: str) -> list[schema.Event]:
    log = tmp_path / "session.log"
    run_probe(
        tmp_path / "out.npz", model, "--threads", str(threads), "--level", level,
        "--log", str(log), "--decodes", str(DECODES),
    )  # fmt: skip
    return whole_events(log)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("level", ["detailed", "verbose"])
@pytest.mark.parametrize("name", ["demo", "qwen3next-moe"])
def test_ops_and_their_gaps_cover_the_compute(
    tmp_path: Path, name: str, threads: int, level: str
) -> None:
    model = DEMO if name == "demo" else random_model(name)
    events = record(tmp_path, model, threads, level)
    ops = {e.compute: e for e in events if isinstance(e, schema.Ops) and e.thread == 0}
    computes = [e for e in events if isinstance(e, schema.Compute)]
    assert any(c.reused for c in computes)
    shares = []
    for compute in computes:
        begin = compute.t + compute.start
        run = ops[compute.compute]
        end = run.t + sum(run.dur) + sum(run.gap or []) + run.tail
        assert begin <= run.t
        assert end <= begin + compute.dur
        # the launch (waking threads, making the plan) is before the first op: a gap like others
        shares.append((end - begin) / compute.dur)
    assert undisturbed(shares) >= 0.99, shares


@pytest.mark.parametrize("threads", [1, 2])
def test_the_spans_of_a_step_add_up_to_what_the_caller_waits_for(
    tmp_path: Path, threads: int
) -> None:
    log = tmp_path / "session.log"
    program = native_program("decode_times", tmp_path)
    printed = subprocess.run(
        [program, DEMO, log, str(threads), str(DECODES)], check=True, capture_output=True, text=True
    ).stdout
    outside = [int(line) for line in printed.split()]
    events = [event for _, event in read_events(log)]
    ends = [e for e in events if isinstance(e, schema.StepEnd)]
    assert len(ends) == len(outside) == DECODES + 1
    spans = {end.step: end.prepare + end.readback + end.recorder for end in ends}
    for e in events:
        if isinstance(e, schema.Compute):
            spans[e.step] += e.apply + e.build + e.alloc + e.inputs + e.dur
    assert all(spans[end.step] <= waited for end, waited in zip(ends, outside, strict=True))
    assert sum(end.n_reused for end in ends) >= DECODES - 1
    shares = [spans[end.step] / waited for end, waited in zip(ends, outside, strict=True)]
    assert undisturbed(shares) >= 0.98, shares


def test_looking_for_the_layers_of_a_graph_is_the_recorders_time(tmp_path: Path) -> None:
    log, program = tmp_path / "session.log", native_program("decode_times", tmp_path)
    slow = native_program("slow_tensors", tmp_path, flags=["-shared", "-fPIC"])
    subprocess.run(
        [program, DEMO, log, "1", "3"], check=True, capture_output=True,
        env=os.environ | {"LD_PRELOAD": str(slow)},
    )  # fmt: skip
    events = [event for _, event in read_events(log)]
    nodes = {e.graph: e.n_nodes for e in events if isinstance(e, schema.Graph)}
    ends = {e.step: e for e in events if isinstance(e, schema.StepEnd)}
    built = [e for e in events if isinstance(e, schema.Compute) and not e.reused]
    assert built
    for compute in built:
        assert ends[compute.step].recorder >= nodes[compute.graph] * 100_000


def test_the_last_wait_of_every_thread_and_compute_is_in_the_log(tmp_path: Path) -> None:
    """All threads leave the last barrier of a compute at once, also those of a threadpool, which
    live on while the call returns."""
    log, program = tmp_path / "session.log", native_program("threadpool", tmp_path)
    subprocess.run([program, DEMO, log, "2", "10"], check=True, capture_output=True)
    assert list(check_log(log)) == []
    left: dict[int, list[int]] = {}
    for _, e in read_events(log):
        if isinstance(e, schema.Ops):
            left.setdefault(e.compute, []).append(e.t + sum(e.dur) + sum(e.gap or []) + e.tail)
    assert len(left) == 20
    assert all(len(ends) == 2 and len(set(ends)) == 1 for ends in left.values()), left


def test_layers_are_the_sums_of_their_ops(tmp_path: Path) -> None:
    events = record(tmp_path, DEMO, 2, "detailed")
    graphs = {e.graph: e for e in events if isinstance(e, schema.Graph)}
    plans = {e.plan: e for e in events if isinstance(e, schema.Plan)}
    ops = {e.compute: e for e in events if isinstance(e, schema.Ops) and e.thread == 0}
    for layers in (e for e in events if isinstance(e, schema.Layers)):
        run = ops[layers.compute]
        plan = plans[run.plan]
        nodes = graphs[plan.graph].nodes
        assert nodes is not None
        own = dict.fromkeys(layers.layer, 0)
        gaps = run.gap or [0] * len(run.dur)
        previous = None
        for node, gap, dur in zip(plan.node, gaps, run.dur, strict=True):
            layer = nodes.layer[node]
            own[layer] += dur + (gap if layer == previous else 0)
            previous = layer
        recorded = dict.fromkeys(layers.layer, 0)
        for layer, dur in zip(layers.layer, layers.dur, strict=True):
            recorded[layer] += dur
        assert recorded == own


@pytest.mark.parametrize("threads", [1, 2])
def test_an_op_costs_at_most_sixteen_bytes_of_log(tmp_path: Path, threads: int) -> None:
    # everything that a kernel adds at `detailed`: its share of `ops`, `layers` and `plan` lines
    record(tmp_path, DEMO, threads, "detailed")
    size = ops = 0
    for line in (tmp_path / "session.log").read_bytes().splitlines(keepends=True):
        event = json.loads(line)
        if event["event"] in ("ops", "layers", "plan"):
            size += len(line)
        if event["event"] == "ops":
            ops += len(event["dur"])
    assert ops > 50 * DECODES
    assert size / ops <= 16, f"{size / ops:.1f} bytes an op"
    print(f"{size / ops:.2f} bytes an op")


def test_a_kernel_that_takes_seconds_has_its_whole_duration(tmp_path):
    """Longer than 32 bits of the counter's ticks: the process is stopped during a kernel."""
    still = 2.8
    longest = 0
    for attempt in range(8):  # it may be stopped outside of a compute
        log = tmp_path / f"{attempt}.log"
        command = [
            sys.executable, "-m", "llamacpp_instr", "run", "demo", "--prompt", "Once upon a time",
            "-n", "400", "--repeat", "40", "--level", "verbose", "--threads", "1",
                "--log", str(log),
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
            deadline = time.monotonic() + 300
            while not (log.exists() and log.stat().st_size > 200_000):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            begin = time.monotonic()
            run.send_signal(signal.SIGSTOP)
            time.sleep(still)
            grown = log.stat().st_size
            run.send_signal(signal.SIGCONT)
            while run.poll() is None and log.stat().st_size < grown + 200_000:
                time.sleep(0.01)
            most = time.monotonic() - begin + 1
            run.send_signal(signal.SIGINT)  # the rest of the run is not needed
            _, stderr = run.communicate(timeout=60)
        assert run.returncode == 130, stderr
        assert list(check_log(log)) == []
        ops = load_session(log).ops
        longest = max(int(max(op.dur.max(), 0 if op.gap is None else op.gap.max())) for op in ops)
        if longest >= still * 1e9:
            break
    assert still * 1e9 <= longest < most * 1e9
