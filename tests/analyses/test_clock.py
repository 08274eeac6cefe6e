"""The time by the clock and the facts of findings, from times that are written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from llamacpp_instr.converters.analyses.clock import (
    Clock,
    clock_report,
    clock_sentences,
    compute_clock,
)
from llamacpp_instr.converters.analyses.findings import (
    Facts,
    compute_findings,
    find_causes,
)
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.requests import Request, find_requests
from llamacpp_instr.log.session import Session
from llamacpp_instr.log.steps import Account, counted_steps
from tests.kit.made_probe import probe_of
from tests.kit.reports import session_of
from tests.kit.sketched_log import Sketch


def clock(**of: Any) -> Clock:
    known = {"total": 100, "steps": 60, "sampling": 30, "outside": 10, "n_tokens": 4}
    return Clock(**{**known, "gaps": np.zeros(0, np.int64), **of})


def request(first: int, *times: int) -> Request:
    found = Request(0, 0, begin=first)
    found.token_times.extend(times)
    return found


def test_the_parts_of_the_clock(tmp_path: Path) -> None:
    """A sampler of 5 ns after each step, then a pause."""
    sketch = Sketch()
    for ns, tokens, pause in ((100, 6, 20), (40, 1, 1), (30, 1, 0)):
        sketch.step(ns, tokens, sampled=5)
        sketch.pause(pause)
    session = session_of(tmp_path / "a.log", sketch.events)
    found = compute_clock(session, counted_steps(session)[0])
    assert (found.total, found.steps, found.sampling, found.outside) == (206, 170, 15, 21)
    assert found.gaps.tolist() == [25, 6]
    assert found.n_tokens == 3
    assert found.rate == pytest.approx(3 / 206e-9)


def test_without_sampled_tokens_those_of_decodes_count(tmp_path: Path) -> None:
    sketch = Sketch()
    sketch.pos = 1
    for ns in (40, 30):
        sketch.step(ns, sampled=0)
    sketch.step(100, tokens=6)
    events = [event for event in sketch.events if not isinstance(event, s.Token)]
    for event in events:
        if isinstance(event, s.StepBegin) and event.n_tokens == 1:
            event.seq_outputs = [1]
    session = session_of(tmp_path / "a.log", events)
    assert compute_clock(session, counted_steps(session)[0]).n_tokens == 2


def test_a_session_without_steps_has_no_time(tmp_path: Path) -> None:
    session = session_of(tmp_path / "a.log", Sketch().events)
    steps, _ = counted_steps(session)
    found = compute_clock(session, steps)
    assert (found.total, found.n_tokens, found.rate, len(found.gaps)) == (0, 0, None, 0)
    report = clock_report(found, [])
    assert (report.rows, report.notes) == ([], [])
    assert clock_sentences(report, 0) == []
    assert find_causes(Facts(Account(session, steps))) == []


@pytest.mark.parametrize(
    ("of", "rate"), [({"n_tokens": 0}, None), ({"total": 0}, None), ({}, 4e9 / 100)]
)
def test_a_rate_needs_tokens_and_time(of: dict[str, int], rate: float | None) -> None:
    assert clock(**of).rate == rate


def test_the_shares_of_the_clock() -> None:
    assert clock_report(clock(), []).rows == [
        ["steps", 60, 0.6], ["sampling", 30, 0.3], ["outside of llama.cpp", 10, 0.1],
    ]  # fmt: skip


@pytest.mark.parametrize("n", [0, 1, 2, 101])
def test_gaps_are_reported_if_there_are_several(n: int) -> None:
    gaps = np.arange(n, dtype=np.int64)[::-1] * 1000
    report = clock_report(clock(gaps=gaps), [])
    figures = {name: of for name, of in report.figures.items() if name.startswith("gap")}
    if n < 2:
        assert (figures, report.notes) == ({}, [])
        return
    points = (("median", 0.5), ("p90", 0.9), ("p99", 0.99), ("longest", 1))
    assert figures == {f"gap, {of}": (pytest.approx(share * (n - 1) * 1000), "ns")
                       for of, share in points}  # fmt: skip
    if n == 101:
        assert report.notes[0].startswith(
            "Between two steps, 50.0 µs (median), 90.0 µs (p90), 99.0 µs (p99) and at most 100 µs"
            " passed:"
        )


@pytest.mark.parametrize(
    ("requests", "first", "between", "sentence"),
    [
        ([], None, None, None),
        ([request(1000)], None, None, None),
        ([request(1000, 6000)], 5000, None, "first token after 5.00 µs (one request)"),
        ([request(1000, 6000, 8000, 12_000, 14_000)], 5000, 2000,
         "first token after 5.00 µs, then 2.00 µs each (one request)"),
        ([request(0, 1000), request(0, 3000, 4000), request(0)], 2000, 1000,
         "first token after 2.00 µs, then 1.00 µs each (medians of 3 requests)"),
    ],
)  # fmt: skip
def test_what_requests_waited_for(
    requests: list[Request], first: float | None, between: float | None, sentence: str | None
) -> None:
    report = clock_report(clock(), requests)
    found = [report.figures.get(f"{name}, median", (None,))[0]
             for name in ("to the first token", "between tokens")]  # fmt: skip
    assert found == [first, between]
    speed, *waiting = clock_sentences(report, len(requests))
    assert speed == ["speed", "40,000,000 tokens/s by the clock (4 in 100 ns)"]
    assert waiting == ([["waiting", sentence]] if sentence else [])


# --- facts of findings ---


def facts_of(session: Session, **of: Any) -> Facts:
    return Facts(Account(session, counted_steps(session)[0]), **of)


def threaded(path: Path, threads: int) -> Session:
    sketch = Sketch()
    sketch.step(1000, 4, sampled=1, ops=([10, 20], [0, 0]), threads=threads)
    other = s.Ops(t=sketch.t, compute=0, plan=0, thread=1, dur=[1, 1], wait=[0, 0])
    sketch.events.insert(-2, other)
    return session_of(path, sketch.events)


@pytest.mark.parametrize(
    ("cores", "threads", "crowded"), [(2, 1, False), (2, 2, False), (2, 3, True), (0, 3, False)]
)
def test_threads_are_crowded_if_there_are_more_than_cpus(
    cores: int, threads: int, crowded: bool, tmp_path: Path
) -> None:
    session = threaded(tmp_path / "a.log", threads)
    session.start.host.cores = cores
    facts = facts_of(session)
    assert facts.n_threads == threads
    assert (facts.is_crowded, facts.lacks_cpus) == (crowded, crowded)


def test_facts_have_the_kernels_of_the_first_thread_in_steps_that_count(tmp_path: Path) -> None:
    session = threaded(tmp_path / "a.log", 2)
    assert session.threads["thread"].tolist() == [0, 1]
    facts = facts_of(session)
    assert [of.thread for of in facts.account.ops] == [0]
    assert facts.step_time == 1000
    assert facts.computes["phase"].tolist() == ["prefill"]
    assert facts.requests == find_requests(session)[1]
    nothing = Facts(Account(session, session.steps.rows(session.steps["step"] < 0)))
    assert (nothing.account.ops, nothing.step_time, nothing.n_threads) == ([], 1, 0)
    assert compute_findings(nothing).rows == []


@pytest.mark.parametrize(
    ("cpu", "load", "used"),
    [("A CPU", 0.0, True), ("another", 0.0, False), ("A CPU", 2.0, True), ("A CPU", 2.1, False)],
)
def test_a_probe_counts_if_the_same_machine_was_idle(
    cpu: str, load: float, used: bool, tmp_path: Path
) -> None:
    """A machine is idle if at most half of its CPUs are busy, here of four."""
    probe = replace(probe_of(cpu), cores=4, load=load)
    facts = facts_of(threaded(tmp_path / "a.log", 1), probe=probe)
    assert (facts.probe is probe, facts.probe is None) == (used, not used)
