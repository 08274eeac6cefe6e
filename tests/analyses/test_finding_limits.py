"""What findings say: their figures, and causes that need a probe or more threads than CPUs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from llamacpp_instr.log import schema as s
from llamacpp_instr.prediction.probe.file import Bandwidth, Probe
from tests.analyses.test_findings import (
    application,
    batches,
    causes,
    cold,
    not_repacked,
    rebuilt,
    repacked,
    sampling,
    ubatches,
    waiting,
)
from tests.kit.made_probe import probe_of
from tests.kit.reports import session_of
from tests.kit.sketched_log import Sketch


@pytest.mark.parametrize(
    ("log", "rule", "words"),
    [
        (waiting(50), "waiting-threads", "thread 0 spent 2.00 µs in barriers."),
        (batches(4, 60), "small-batches", "small batches, 60 tokens at a time;"),
        (ubatches(4, 50), "small-batches", "small batches, 50 tokens at a time;"),
        (rebuilt(60, 30), "rebuilt-graphs",
         "60 of 100 decodes built a new graph, which took 3.00 ms."),
        (repacked(25), "held-twice", "Up to 2.44 KiB of weights are in memory twice"),
        (not_repacked(30), "no-interleaved-kernel",
         "Weights of q5_0 have no interleaved kernel on this machine; q4_0 have one."),
        (cold(20, 1234), "cold-start",
         "took 20.0 ms longer than others like it, with 1,234 minor and 0 major page faults."),
        (sampling(40), "costly-sampling", "Sampling takes 40.0 µs a token."),
        (sampling(60), "costly-sampling", "Sampling takes 60.0 µs a token, more than the model."),
        (application(40, 600_000, 30), "slow-application",
         "Between tokens, 18.0 ms pass outside of llama.cpp."),
    ],
)  # fmt: skip
def test_a_finding_has_its_figures(log: Sketch, rule: str, words: str, tmp_path: Path) -> None:
    assert words in causes(session_of(tmp_path / "a.log", log.events))[rule].what


def crowded(threads: int, machine: bool) -> Sketch:
    """Decodes with `threads` threads on two CPUs; with `machine`, other work is known to have
    taken a fifth of their time."""
    log = Sketch()
    for _ in range(4):
        log.step(1000, sampled=1, ops=([500, 500], [0, 0]), threads=threads)
    if machine:
        log.events.append(
            s.Machine(
                t=log.t, dur=log.t, cpu=8000, delay=2000, steal=0, nvcsw=0, nivcsw=3, load=9.5
            )
        )
    return log


@pytest.mark.parametrize(
    ("threads", "machine", "found"),
    [(2, False, {}), (3, False, {"too-many-threads": 1 / 3}),
     (8, False, {"too-many-threads": 0.75}), (8, True, {"too-many-threads": 0.2}),
     (2, True, {"disturbed-machine": 0.2})],
)  # fmt: skip
def test_more_threads_than_cpus(
    threads: int, machine: bool, found: dict[str, float], tmp_path: Path
) -> None:
    session = session_of(tmp_path / "a.log", crowded(threads, machine).events)
    by_rule = causes(session)
    assert {rule: of.share for rule, of in by_rule.items()} == pytest.approx(found)
    if "too-many-threads" in by_rule:
        assert by_rule["too-many-threads"].what.startswith(f"{threads} threads share 2 CPUs")
        assert "at most 2 threads" in by_rule["too-many-threads"].advice


MOVED = 64 + 16 + 32 + 32 + 16 + 32
"""bytes of a step of a sketch: a matrix and a row of 4 floats make 8; those and 4 make 8"""


def probe_with(bytes_per_second: float) -> Probe:
    return replace(probe_of("A CPU"), bandwidth=[Bandwidth(1, MOVED, bytes_per_second)])


@pytest.mark.parametrize(("share", "bound"), [(0.69, False), (0.71, True), (0.99, True)])
def test_decodes_that_memory_bounds(share: float, bound: bool, tmp_path: Path) -> None:
    """Each step of 1 µs spends 800 ns in kernels."""
    log = Sketch()
    log.step(9000, tokens=6, sampled=1, ops=([4000, 4000], [0, 0]))
    for _ in range(5):
        log.step(1000, sampled=1, ops=([600, 200], [0, 0]))
    session = session_of(tmp_path / "a.log", log.events)
    rate = MOVED / 800e-9
    found = causes(session, probe_with(rate / share))
    assert ("memory-bound" in found) == bound
    if bound:
        (percent,) = re.findall(r"(\d+) % of what", found["memory-bound"].what)
        assert int(percent) == round(100 * share)
        assert f"move {rate / 1e6:.0f} MB a second" in found["memory-bound"].what
        assert found["memory-bound"].share == pytest.approx(5 * 800 / (9000 + 5 * 1000))
    assert "memory-bound" not in causes(session)


def test_only_tensors_that_cost_time_limit_the_type_to_try(tmp_path: Path) -> None:
    """Q4_K has blocks of 256: rows of 40 do not matter in unread tensors and in other types."""
    log = Sketch("q5_0")
    log.weight(100, "q4_K", "CPU_REPACK")
    for name, type_, row in (
        ("blk.0.attn_q.weight", "q5_0", 512), ("unread.weight", "q5_0", 40),
        ("blk.0.attn_q.bias", "f32", 40),
    ):  # fmt: skip
        log.weight(100, type_, "CPU")
        tensor = log.events[-1]
        assert isinstance(tensor, s.Tensor)
        tensor.name, tensor.ne = name, [row]
    log.step(1000, sampled=1, ops=([800, 100], [0, 0]))
    found = causes(session_of(tmp_path / "a.log", log.events))["no-interleaved-kernel"]
    assert found.share == pytest.approx(8 / 9)
    assert "to Q4_K and compare" in found.advice


@pytest.mark.parametrize(
    ("tokens", "advice"),
    [(31, "Pass more of a prompt at once: a batch can have 64 tokens."),
     (32, "Pass more of a prompt at once: a batch can have 64 tokens."), (33, "Raise n_batch")],
)  # fmt: skip
@pytest.mark.parametrize("limits", [(64, 512), (512, 64)])
def test_advice_for_small_batches_follows_from_the_limits(
    tokens: int, advice: str, limits: tuple[int, int], tmp_path: Path
) -> None:
    """Batches of up to half the limit are the application's choice, larger ones the limit's."""
    log = batches(4, tokens)
    for event in log.events:
        if isinstance(event, s.Context):
            event.n_batch, event.n_ubatch = limits
    found = causes(session_of(tmp_path / "a.log", log.events))["small-batches"]
    assert found.advice.startswith(advice)
