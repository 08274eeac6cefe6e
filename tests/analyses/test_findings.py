"""Findings: each fires where it was provoked, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from llamacpp_instr.converters.analyses.clock import compute_clock, compute_machine
from llamacpp_instr.converters.analyses.findings import RULES, Facts, Finding, find_causes
from llamacpp_instr.converters.analyses.summary import compute_summary
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.session import Session
from llamacpp_instr.log.steps import Account, counted_steps, disturbed_steps
from llamacpp_instr.model.types import BY_NAME
from llamacpp_instr.prediction.probe.file import Probe
from tests.kit.made_log import make_log
from tests.kit.reports import by_title, session_of
from tests.kit.sketched_log import Sketch


def causes(session: Session, probe: Probe | None = None) -> dict[str, Finding]:
    found = find_causes(Facts(Account(session, counted_steps(session)[0]), probe))
    return {finding.rule: finding for finding in found}


def waiting(percent: int) -> Sketch:
    """Thread 0 waits in barriers."""
    log = Sketch()
    for _ in range(4):
        log.step(1000, sampled=1, ops=([500, 400], [2 * percent, 8 * percent]), threads=2)
    return log


def slow(percent: int, *slow_ones: int, threads: int = 2, parts: int = 5) -> Sketch:
    """In products, the other threads wait for the slow ones `percent` of the time, in `parts` of
    five parts of the session. Thread 0 does everything else alone."""
    log = Sketch()
    start = log.events[0]
    assert isinstance(start, s.SessionStart)
    log.events[0] = replace(start, host=replace(start.host, cores=8))
    for i in range(20):
        waits = [0 if t in slow_ones or i // 4 >= parts else 5 * percent for t in range(threads)]
        ops = [([500, 100], [wait, 100 * (t > 0)]) for t, wait in enumerate(waits)]
        log.step(700, sampled=1, ops=ops[0], others=ops[1:], threads=threads)
    return log


def batches(n: int, tokens: int) -> Sketch:
    """A prompt in `n` steps of 100 µs, then a step as long as all of them."""
    log = Sketch()
    for i in range(n):
        log.step(100_000, tokens=tokens, sampled=1 if i == n - 1 else None)
    log.step(100_000 * n, sampled=1)
    return log


def ubatches(n: int, tokens: int) -> Sketch:
    """The same in one step of `n` computes."""
    log = Sketch()
    each = [{"n_tokens": tokens, "dur": 100_000}] * n
    log.step(100_000 * n, tokens=tokens * n, sampled=1, computes=each)
    log.step(100_000 * n, sampled=1)
    return log


def rebuilt(per_cent_built: int, per_mille_cost: int, waited: int = 0) -> Sketch:
    """`waited` of the steps had no CPU for most of their time."""
    log = Sketch()
    log.step(1000, tokens=2, sampled=1)
    for i in range(101):
        new = i % 100 < per_cent_built
        cost = per_mille_cost * 100_000 // per_cent_built  # of 1 ms, for those that build
        compute = {"reused": not new, "build": new * cost // 3, "alloc": new * (cost - cost // 3)}
        log.step(100_000_000 if i < waited else 1_000_000, sampled=1, computes=[compute])
    return log


def repacked(percent: int, mapped: bool = True, buffer: str = "CPU_REPACK") -> Sketch:
    log = Sketch()
    log.weight(percent * 100, "Q4_0", buffer)
    log.weight((100 - percent) * 100, "F32", "CPU_Mapped" if mapped else "CPU")
    log.step(1000, sampled=1)
    return log


def not_repacked(percent: int) -> Sketch:
    """`percent` of the kernels' time reads a weight of another type than the repacked one."""
    log = Sketch("q5_0")
    log.weight(100, "q4_0", "CPU_REPACK")
    log.step(1000, sampled=1, ops=([percent * 9, (100 - percent) * 9], [0, 0]))
    return log


def cold(percent: int, faults: int = 1000) -> Sketch:
    log = Sketch()
    log.pos = 5  # all are decodes
    for i in range(100):
        log.step(1_000_000 + (i == 0) * percent * 1_000_000, faults=faults if i == 0 else 10,
                 sampled=1)  # fmt: skip
    return log


def sampling(percent: int, interrupted: int = 0) -> Sketch:
    """Tokens whose sampler takes `percent` of the time; one is `interrupted` for that many ms."""
    log = Sketch()
    for i in range(100):
        log.step((100 - percent) * 1000, sampled=percent * 1000 + (i == 50) * interrupted * 10**6)
    return log


def application(percent: int, ns: int, tokens: int) -> Sketch:
    """`ns` outside of llama.cpp before each of the tokens, which are `percent` of the time."""
    log = Sketch()
    for _ in range(tokens + 1):
        log.step(ns * (100 - percent) // percent, sampled=0)
        log.pause(ns)
    return log


@pytest.mark.parametrize(
    ("log", "rule", "share"),
    [
        (waiting(19), None, 0), (waiting(21), "waiting-threads", 0.21),
        (slow(19, 1), None, 0), (slow(21, 1), "slow-threads", 0.21),
        (slow(60, 1), "slow-threads", 0.6), (slow(60, 0), "slow-threads", 0.6),
        (slow(26, 2, 3, threads=4), "slow-threads", 0.26), (slow(20), None, 0),
        (slow(60, 1, parts=4), "waiting-threads", 300 / 700 * 4 / 5),
        (batches(4, 63), "small-batches", 0.5), (batches(4, 64), None, 0),
        (batches(3, 32), None, 0), (ubatches(4, 63), "small-batches", 0.5),
        (ubatches(4, 64), None, 0), (ubatches(3, 63), None, 0),
        (rebuilt(49, 30), None, 0), (rebuilt(51, 30), "rebuilt-graphs", 0.03),
        (rebuilt(90, 19), None, 0), (rebuilt(90, 21), "rebuilt-graphs", 0.021),
        (rebuilt(90, 30, waited=5), "rebuilt-graphs", 0.03 * 101 / (96 + 500)),
        (repacked(19), None, 0), (repacked(21), "held-twice", 0.21),
        (repacked(90, mapped=False), None, 0),
        (repacked(90, buffer="CPU_KLEIDIAI"), "held-twice", 0.9),
        (not_repacked(19), None, 0), (not_repacked(21), "no-interleaved-kernel", 0.21),
        (cold(5), None, 0), (cold(6), "cold-start", 6 / 106),
        (cold(50, faults=99), None, 0), (cold(50, faults=39), None, 0),
        (sampling(9), None, 0), (sampling(11), "costly-sampling", 0.11),
        (sampling(2, interrupted=100), None, 0),
        (sampling(40, interrupted=100), "costly-sampling", 4360 / 10360),
        (application(29, 600_000, 30), None, 0),
        (application(31, 600_000, 30), "slow-application", 0.31),
        (application(40, 490_000, 30), None, 0),
        (application(40, 510_000, 30), "slow-application", 0.4),
        (application(40, 600_000, 9), None, 0),
        (application(40, 600_000, 10), "slow-application", 0.4),
    ],
)  # fmt: skip
def test_a_rule_fires_at_its_limit(
    log: Sketch, rule: str | None, share: float, tmp_path: Path
) -> None:
    found = causes(session_of(tmp_path / "sketched.log", log.events))
    assert found.keys() == ({rule} if rule else set())
    if rule:
        assert found[rule].share == pytest.approx(share, rel=0.02)


def test_slow_threads_are_counted_and_the_others_are_advised(tmp_path: Path) -> None:
    log = slow(26, 0, 2, 3, threads=5)
    found = causes(session_of(tmp_path / "sketched.log", log.events))["slow-threads"]
    assert "slower 3 of 5 threads" in found.what
    assert "26 % of the time of matrix products" in found.what
    assert "--threads 2" in found.advice


def test_threads_that_are_not_in_each_compute_are_left_out(tmp_path: Path) -> None:
    """A context may use more threads for prompts."""
    log = slow(30, 1)
    for _ in range(4):
        log.step(700, sampled=1, ops=([500, 100], [450, 0]), threads=2)
    found = causes(session_of(tmp_path / "sketched.log", log.events))
    assert found["slow-threads"].share == pytest.approx(0.3)


@pytest.mark.parametrize("log", [sampling(50), application(40, 600_000, 30), waiting(50)])
def test_a_thread_without_a_cpu_is_not_to_blame(log: Sketch, tmp_path: Path) -> None:
    half = log.t // 2
    log.events.append(
        s.Machine(t=log.t, dur=log.t, cpu=half, delay=half, steal=0, nvcsw=0, nivcsw=3, load=9.5)
    )
    assert causes(session_of(tmp_path / "busy.log", log.events)).keys() == {"disturbed-machine"}


def test_the_five_that_cost_most_are_reported_costliest_first(tmp_path: Path) -> None:
    log = Sketch("q5_0")
    log.weight(300, "q4_0", "CPU_REPACK")
    log.weight(700, "f32", "CPU_Mapped")
    ops = [100_000, 100_000], [100_000, 90_000]
    for i in range(8):
        first, sampled = i == 0, 5 if i == 7 else None
        log.step(700_000 + first * 300_000, 20, sampled, ops=ops, threads=2, faults=5000 * first)
    for _ in range(30):
        built = {"reused": False, "build": 50_000}
        log.step(500_000, sampled=150_000, ops=ops, threads=2, computes=[built])
        log.pause(600_000)
    session = session_of(tmp_path / "sketched.log", log.events)
    (report,) = (of for of in compute_summary(session) if of.title == "Findings")
    shares = [row[1] for row in report.rows]
    assert len(shares) == 5
    assert shares == sorted(shares, reverse=True)
    facts = Facts(Account(session, counted_steps(session)[0]))
    every = [cause for _, _, rule in RULES if (cause := rule(facts))]
    assert len(every) > 5
    assert min(shares) >= sorted(share for _, share, _ in every)[-5]


def _made(tmp_path: Path, **machine: int) -> Session:
    """A session in which each step has one interval of the machine."""
    events: list[s.Event] = []
    for event in make_log(Random(3).randint, n_contexts=3, level="minimal"):
        if isinstance(event, s.Machine):
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
    assert disturbed_steps(session, steps).all() == (share > 0.05)
    assert ("disturbed-machine" in causes(session)) is (share > 0.05)
    recorder = by_title(compute_summary(session))["Recorder"]
    assert any("Other work had the CPU" in note for note in recorder.notes) is (share > 0.05)
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
    """Compared with a clock that checks for every nanosecond whether a step is running."""
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


@pytest.mark.parametrize(
    ("row", "repacked", "advised"),
    [
        (512, "q4_K", "Q4_K"),
        (640, "q4_K", "Q4_0"),
        (640, "iq4_nl", "IQ4_NL"),
        (640, "q8_0", "Q8_0"),
        (512, "q6_K", "Q6_K"),
        (40, "q4_K", None),
    ],
)
def test_the_type_to_try_holds_the_rows_of_the_weights(
    row: int, repacked: str, advised: str | None, tmp_path: Path
) -> None:
    events = make_log(Random(3).randint, n_contexts=1, level="detailed")
    for event in events:
        for of in [event] if isinstance(event, s.Tensor) else getattr(event, "leafs", []):
            if "ffn_down" in of.name:
                of.type, of.buffer = repacked, "CPU_REPACK"
            elif ".weight" in of.name and "norm" not in of.name:
                of.type, of.ne = "q5_1", [row, 256]
    found = causes(session_of(tmp_path / "made.log", events))["no-interleaved-kernel"]
    if advised is None:
        assert "None of the types with one" in found.advice
        return
    assert f"to {advised} and compare" in found.advice
    assert row % BY_NAME[advised].block == 0


@pytest.mark.parametrize(("allowed", "advice"), [(16, "Raise n_batch"), (512, "Pass more")])
def test_larger_limits_are_advised_where_limits_made_batches_small(
    allowed: int, advice: str, tmp_path: Path
) -> None:
    events = make_log(lambda _, most: most, n_contexts=1, level="minimal")
    events = [event for event in events if not isinstance(event, s.Token | s.SessionEnd)]
    for event in events:
        if isinstance(event, s.Context):
            event.n_batch = event.n_ubatch = allowed
        if isinstance(event, s.StepBegin):
            event.phase, event.n_outputs, event.seq_outputs = "prefill", 0, [0]
    found = causes(session_of(tmp_path / "made.log", events))
    assert advice in found["small-batches"].advice


@pytest.mark.parametrize(("outputs", "advice"), [(1, "kept their size"), (2, "Keep the number")])
def test_rebuilt_graphs_are_explained_by_what_changed(
    outputs: int, advice: str, tmp_path: Path
) -> None:
    """Each decode builds a graph; those of one context have a different number of outputs."""
    events = make_log(lambda _, most: 0 if most == 2 else most, n_contexts=6, level="minimal")[:-1]
    for event in events:
        if isinstance(event, s.Compute):
            event.build += 3000
        elif isinstance(event, s.StepBegin) and event.ctx == 0 and event.phase == "decode":
            event.n_outputs, event.seq_outputs = outputs, [outputs]
    found = causes(session_of(tmp_path / "made.log", events))
    assert advice in found["rebuilt-graphs"].advice
