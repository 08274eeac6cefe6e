"""A stamp of a device becomes a time on the log's clock, wrong by no more than the log says."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.kit.programs import native_program

pytestmark = pytest.mark.native

SECOND = 10**9


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return native_program("device_clock", tmp_path_factory.mktemp("device_clock"))


def _answers(program: Path, tick: float, bits: int, commands: Iterable[str]) -> list[int]:
    done = subprocess.run(
        [program, str(tick), str(bits)], input="\n".join(commands),
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return [int(line) for line in done.stdout.split()]


class Clock:
    """A device's clock, whose rate differs from what its driver says."""

    def __init__(self, tick: float, bits: int, drift: float, offset: int) -> None:
        self.tick, self.bits, self.offset = tick, bits, offset
        self.rate = 1 / (tick * (1 + drift))

    def stamp(self, ns: int) -> int:
        return int(self.offset + ns * self.rate) % 2**self.bits


@pytest.mark.parametrize("bits", [36, 48, 64])
@pytest.mark.parametrize("tick", [1.0, 10.0, 52.08333206176758, 1000 / 27])
@pytest.mark.parametrize("drift", [0.0, 3e-5, -3e-5])
def test_a_calibrated_time_is_right(program: Path, tick: float, bits: int, drift: float) -> None:
    """Also where the counter wraps, and after a pause in which it wraps any number of times. The
    driver reads both clocks up to 500 ns apart, and a run lasts up to a second."""
    rng = random.Random(f"{tick} {bits} {drift}")
    # not at the end of 64 bits: no device has run for that long
    clock = Clock(tick, bits, drift, 2**bits - 2**34 if bits < 64 else 2**40)
    now, commands, truth = 10**13, [], []
    for i in range(200):
        now += 3600 * SECOND if i == 100 else rng.randrange(SECOND // 10, SECOND // 2)
        host = now + rng.randrange(-500, 500)
        commands.append(f"calibrate {host} {clock.stamp(now)} 500")
        for ago in (0, SECOND // 1000, SECOND):
            commands += [f"ns {clock.stamp(now - ago)}", "uncertainty"]
            truth.append((now - ago, ago, i))
    answers = _answers(program, tick, bits, commands)
    settled = [
        (ns, uncertainty, at)
        for ns, uncertainty, (at, ago, i) in zip(answers[::2], answers[1::2], truth, strict=True)
        if i % 100 >= 8 or (ago == 0 and i != 100)
    ]
    assert len(settled) > 500
    assert max(abs(ns - at) - uncertainty for ns, uncertainty, at in settled) <= 0
    assert max(uncertainty for _, uncertainty, _ in settled) < 40_000


@pytest.mark.parametrize("drift", [0.0, 1e-5, -1e-5])
def test_runs_bound_a_clock_that_is_not_calibrated(program: Path, drift: float) -> None:
    """A run lies between its submission and the end of the wait, which the program reads from the
    real clock. A second run, which the device began at once, narrows that down."""
    clock = Clock(1.0, 64, drift, 2**40)
    begin = time.monotonic_ns()
    late = [f"run {begin} {clock.stamp(begin + 900_000)} {clock.stamp(begin + 950_000)}"]
    at_once = [f"run {begin} {clock.stamp(begin + 10)} {clock.stamp(begin + 950_000)}"]
    stamp = clock.stamp(begin + 500_000)
    asked = [f"ns {stamp}", "uncertainty"]
    first, wide, second, narrow = _answers(program, 1.0, 64, [*late, *asked, *at_once, *asked])
    assert abs(first - (begin + 500_000)) <= wide
    assert abs(second - (begin + 500_000)) <= narrow <= wide + 1000
