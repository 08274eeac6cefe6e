"""Times are recorded as ticks of the processor's counter and converted to ns in the log."""

from __future__ import annotations

import random
import subprocess
from bisect import bisect_right
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import pytest

from tests.kit.programs import native_program

pytestmark = pytest.mark.native

Moment = tuple[int, int]  # ticks, ns


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return native_program("ticks", tmp_path_factory.mktemp("ticks"))


def _answers(program: Path, commands: Iterable[str]) -> list[int]:
    done = subprocess.run(
        [program], input="\n".join(commands), check=True, capture_output=True, text=True
    )
    return [int(line) for line in done.stdout.split()]


def _nanoseconds(program: Path, moments: list[Moment], ticks: Iterable[int]) -> list[int]:
    given = [f"moment {at} {ns}" for at, ns in moments]
    return _answers(program, [*given, *(f"ns {at}" for at in ticks)])


def _moments(n: int, ticks_per_ns: float, seed: int) -> list[Moment]:
    """A counter of that rate, read about every 100 ms, up to 20 ns too early or too late."""
    rng = random.Random(seed)
    times = [10**15 + int(i * 1e8 + rng.uniform(-1e7, 1e7)) for i in range(n)]
    return [(int(ns * ticks_per_ns) + rng.randint(-20, 20), ns) for ns in times]


def _on_the_line(moments: list[Moment], ticks: int) -> tuple[Fraction, float]:
    """Linear interpolation between two moments; before the first and after the last, extrapolation
    from the nearest two. And the error of fixed point: 2**-40 ns per tick, plus half a ns."""
    after = bisect_right(moments, (ticks, 2**64))
    (ticks_0, ns_0), (ticks_1, ns_1) = moments[max(0, min(after - 1, len(moments) - 2)) :][:2]
    line = ns_0 + Fraction((ticks - ticks_0) * (ns_1 - ns_0), ticks_1 - ticks_0)
    nearest = moments[max(0, after - 1)][0]
    return line, 1 + (abs(nearest - ticks_0) + abs(ticks - nearest)) / 2**40


@pytest.mark.parametrize("ticks_per_ns", [0.0245, 1.0, 2.596, 5.7])
@pytest.mark.parametrize("n", [2, 3, 1023])
def test_ticks_lie_on_the_line_through_the_moments_around_them(
    n: int, ticks_per_ns: float, program: Path
) -> None:
    moments = _moments(n, ticks_per_ns, seed=n)
    rng = random.Random(n)
    spread = moments[-1][0] - moments[0][0]
    asked = [moments[0][0] + int(rng.uniform(-0.01, 1.01) * spread) for _ in range(2000)]
    asked += [at for at, _ in moments]
    for at, ns in zip(asked, _nanoseconds(program, moments, asked), strict=True):
        line, tolerance = _on_the_line(moments, at)
        assert abs(ns - line) <= tolerance


@pytest.mark.parametrize("n", [1, 2, 1024, 1025, 5000, 100_000])
def test_time_never_runs_backwards_and_is_never_far_off(n: int, program: Path) -> None:
    """However many moments a long recording has; some of the older ones are dropped."""
    moments = _moments(n, 2.596, seed=n)
    rng = random.Random(n)
    asked = sorted(rng.randint(moments[0][0], moments[-1][0]) for _ in range(5000))
    asked = sorted({*asked, moments[0][0], moments[-1][0]})
    times = _nanoseconds(program, moments, asked)
    assert times == sorted(times)
    assert (times[0], times[-1]) == (moments[0][1], moments[-1][1])
    for at, ns in zip(asked, times, strict=True):
        assert abs(ns - at / 2.596) < 20


def test_a_moment_that_is_not_later_is_left_out(program: Path) -> None:
    moments = [(100, 1000), (200, 1100), (200, 5000), (150, 9000), (300, 1200)]
    assert _nanoseconds(program, moments, [100, 150, 250, 300]) == [1000, 1050, 1150, 1200]


def test_a_kernel_is_kept_to_the_tick_for_a_second_and_to_4096_beyond(program: Path) -> None:
    rng = random.Random(0)
    short = [0, 1, 2**31 - 1, *(rng.randrange(2**31) for _ in range(1000))]
    long = [2**31, 2**32, 2**43 - 1, *(rng.randrange(2**31, 2**43) for _ in range(1000))]
    assert _answers(program, (f"packed {ticks}" for ticks in short)) == short
    kept = _answers(program, (f"packed {ticks}" for ticks in long))
    assert all(0 <= ticks - got < 4096 for ticks, got in zip(long, kept, strict=True))


def test_a_kernel_of_hours_is_kept_as_the_longest_and_one_that_ran_backwards_as_none(
    program: Path,
) -> None:
    longest = (2**31 - 1) * 4096
    commands = [f"packed {ticks}" for ticks in (2**43, 2**60, 2**64 - 5)]
    assert _answers(program, commands) == [longest, longest, 0]


@pytest.mark.parametrize("khz", [19_200, 24_000, 54_000, 1_000_000, 2_596_000])
@pytest.mark.parametrize("delay", [0, 5_000, 30_000, 10**7])
@pytest.mark.parametrize("attempts", [0, 1, 3, 4])
def test_an_interrupted_reading_of_both_clocks_is_repeated_whatever_the_rate(
    khz: int, delay: int, attempts: int, program: Path
) -> None:
    """A bound of 1,000 ticks would be 42 µs at 24 MHz, longer than most interrupts."""
    ticks, ns = _answers(program, [f"read {khz} {delay} {attempts}"])
    tick = 1e6 / khz
    disturbed = delay if attempts == 4 else 0
    assert -tick - 30 <= ticks * tick - ns <= disturbed / 2 + 30


def test_the_cpu_states_the_length_of_a_tick_or_nothing(program: Path) -> None:
    ns, ticks, stated = _answers(program, [f"rate {5 * 10**7}"])
    assert stated == 0 or stated / 1e6 == pytest.approx(ns / ticks, rel=1e-3)
