"""Findings: each fires where it was provoked, and nowhere else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from converters.analyses.clock import compute_clock
from converters.analyses.findings import find_causes
from converters.analyses.machine import compute_machine
from llamacpp_instr import schema as s
from llamacpp_instr.log.session import Session, load_session
from llamacpp_instr.log.steps import counted_steps
from tests.kit.made_log import encode, make_log
from tests.kit.native_kit import DEMO, ROOT
from tests.kit.provoke import KINDS

OTHERS = {"disturbed-machine", "waiting-threads"}
"""what other tests on the same machine may really cause"""


def causes(session: Session) -> set[str]:
    return {finding.rule for finding in find_causes(session, counted_steps(session)[0])}


@pytest.mark.native
@pytest.mark.parametrize("kind", KINDS)
def test_a_finding_fires_where_it_was_provoked(kind: str, tmp_path: Path) -> None:
    log = tmp_path / "provoked.log"
    command = [sys.executable, "-m", "tests.kit.provoke", kind, str(DEMO), str(log)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    found = causes(load_session(log))
    assert found - OTHERS <= {kind}
    if kind in ("slow-application", "cold-start") and "disturbed-machine" in found:
        return  # a thread without a CPU looks like that
    assert kind in {*found, "nothing"}


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
    log = tmp_path / "made.log"
    log.write_bytes(encode(events))
    return load_session(log)


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
    log = tmp_path / "made.log"
    log.write_bytes(encode(events))
    session = load_session(log)
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
