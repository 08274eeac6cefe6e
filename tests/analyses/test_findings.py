"""Findings: each fires where it was provoked, and nowhere else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from converters.analyses.clock import compute_clock
from converters.analyses.findings import find_causes
from converters.analyses.findings.facts import Finding
from converters.analyses.machine import compute_machine
from converters.exports.tables import load_tables
from converters.report.report import shown
from llamacpp_instr import schema as s
from llamacpp_instr.log.session import Session, load_session
from llamacpp_instr.log.steps import counted_steps
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.probe.file import Bandwidth, Probe, read_probe
from tests.kit.made_log import make_log
from tests.kit.made_probe import probe_of_caches
from tests.kit.native_kit import DEMO, ROOT
from tests.kit.provoke import KINDS
from tests.kit.reports import session_of

OTHERS = {"disturbed-machine", "waiting-threads"}
"""what other tests on the same machine may really cause"""
TIMED = {"slow-application", "cold-start", "waiting-threads"}
"""what a thread without a CPU looks like, so that a disturbed machine hides it"""
REPACKED = {"held-twice", "no-interleaved-kernel"}


def causes(session: Session, probe: Probe | None = None) -> dict[str, Finding]:
    found = find_causes(session, counted_steps(session)[0], probe)
    return {finding.rule: finding for finding in found}


def provoke(kind: str, log: Path) -> str:
    """Records a session, and returns what the program printed."""
    command = [sys.executable, "-m", "tests.kit.provoke", kind, str(DEMO), str(log)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout


def need(*, missing: str, where: bool) -> None:
    """Skips a test on a machine that lacks something."""
    if where:
        assert not os.environ.get("CI"), missing
        pytest.skip(missing)


@pytest.mark.native
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"memory-bound"}))
def test_a_finding_fires_where_it_was_provoked(kind: str, tmp_path: Path) -> None:
    if kind in REPACKED:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
        need(missing="ggml repacks nothing for this CPU", where="avx2" not in flags)
    if kind == "waiting-threads":
        need(missing="one CPU has no other to wait for", where=(os.cpu_count() or 1) < 2)
    log = tmp_path / "provoked.log"
    printed = provoke(kind, log)
    session = load_session(log)
    found = causes(session, probe_of_caches(session.start.host.cpu))
    if kind in TIMED and "disturbed-machine" in found:
        return
    assert found.keys() - OTHERS <= {kind}
    assert kind in {*found, "nothing"}
    if kind == "held-twice":
        repacked = sum(t.bytes for t in session.tensors if t.buffer == "CPU_REPACK")
        in_place = sum(t.bytes for t in session.tensors if t.buffer == "CPU_Mapped")
        assert shown(repacked, "bytes") in found[kind].what
        assert 0.8 * repacked < int(printed) - in_place < 1.05 * repacked, "what Linux counts"


@pytest.mark.native
def test_a_decode_is_bound_by_memory_at_a_share_of_the_measured_bandwidth(tmp_path: Path) -> None:
    """The share, from the bytes of the weights in the file, which the kernels of each decode read,
    and the time of these kernels. The roof is what this machine gave, or one that is made from the
    share, so that the result does not depend on the machine."""
    log = tmp_path / "provoked.log"
    provoke("memory-bound", log)
    weights = load_model_file(log.with_suffix(".gguf")).weights
    read = sum(w.n_bytes for w in weights if w.name != "token_embd.weight")
    ops = load_tables(log).ops
    ops = ops[ops.phase == "decode"]
    rate = read * ops["compute"].nunique() / int(ops.dur.sum()) * 1e9

    session = load_session(log)
    measured = replace(read_probe(log.with_suffix(".probe")), load=0.0)
    for roof in (measured.bandwidth_of(1, read).bytes_per_second, rate / 0.73, rate / 0.67):
        found = causes(session, replace(measured, bandwidth=[Bandwidth(1, read, roof)]))
        if abs(rate / roof - 0.7) > 0.02:
            assert ("memory-bound" in found) is (rate / roof > 0.7)
        if "memory-bound" in found:
            (percent,) = re.findall(r"(\d+) %", found["memory-bound"].what)
            assert int(percent) == pytest.approx(100 * rate / roof, abs=2, rel=0.02)
    assert "memory-bound" not in causes(session)
    low = replace(measured, bandwidth=[Bandwidth(1, read, rate)])
    assert "memory-bound" in causes(session, low)
    assert "memory-bound" not in causes(session, replace(low, cpu="another"))
    assert "memory-bound" not in causes(session, replace(low, load=measured.cores * 0.6))


def _made(tmp_path: Path, **machine: int) -> Session:
    """A session in which each step has one interval of the machine."""
    events: list[s.Event] = []
    for event in make_log(Random(3).randint, n_contexts=3, level="minimal"):
        if isinstance(event, s.Machine | s.SessionEnd):
            continue
        if isinstance(event, s.Compute):
            event.n_threads = 2  # no more than the machine's CPUs
        events.append(event)
        if isinstance(event, s.StepEnd):
            events.append(s.Machine(t=event.t, dur=1000, nvcsw=0, nivcsw=3, load=9.5, **machine))
    return session_of(tmp_path / "made.log", events)


@pytest.mark.parametrize(
    ("machine", "share"),
    [
        ({"cpu": 900, "delay": 100, "steal": 0}, 0.1),
        ({"cpu": 1000, "delay": 0, "steal": 0}, 0),
        ({"cpu": 960, "delay": 40, "steal": 0}, 0.04),
        ({"cpu": 900, "delay": 100, "busy": 900}, 0),
        ({"cpu": 900, "delay": 100, "busy": 20_000_000}, 0.1),
    ],
)
def test_the_share_that_was_taken_is_the_delay_that_others_can_have_caused(
    machine: dict[str, int], share: float, tmp_path: Path
) -> None:
    session = _made(tmp_path, **machine)
    steps, _ = counted_steps(session)
    found = compute_machine(session, steps)
    assert found is not None
    assert found.share == pytest.approx(share)
    assert found.switches == 3 * len(steps)
    assert (found.disturbed == len(steps)) is (share > 0.05)
    assert ("disturbed-machine" in causes(session)) is (share > 0.05)
    assert f"{found.switches} times" in found.sentence()
    assert "load 9.5" in found.sentence()


def test_stolen_time_counts_for_the_cpus_that_were_used(tmp_path: Path) -> None:
    session = _made(tmp_path, cpu=1000, delay=0, steal=800)
    steps, _ = counted_steps(session)
    found = compute_machine(session, steps)
    assert found is not None
    cores = session.start.host.cores
    assert found.taken == pytest.approx(len(steps) * 800 / cores, abs=len(steps))


def test_a_log_that_does_not_tell_has_no_disturbance(tmp_path: Path) -> None:
    session = _made(tmp_path, cpu=1)
    assert compute_machine(session, counted_steps(session)[0]) is None


def test_the_clock_counts_overlapping_steps_once(tmp_path: Path) -> None:
    """Against a clock that asks for every nanosecond whether something runs then."""
    events = make_log(Random(3).randint, n_contexts=3, level="minimal")
    session = session_of(tmp_path / "made.log", events)
    steps, _ = counted_steps(session)
    clock = compute_clock(session, steps)
    begin = int(steps["begin"].min())
    in_step: set[int] = set()
    busy: set[int] = set()
    for first, last in zip(steps["begin"].tolist(), steps["end"].tolist(), strict=True):
        in_step.update(range(first, last))
    tokens = session.tokens
    for t, dur in zip(tokens["t"].tolist(), tokens["dur"].tolist(), strict=True):
        busy.update(range(t, t + dur))
    assert clock.steps == len(in_step)
    assert clock.sampling == len(busy - in_step)
    assert clock.total == max(busy | in_step) + 1 - begin
    assert clock.steps + clock.sampling + clock.outside == clock.total
    assert clock.n_tokens == len(tokens)
