"""The ratio of two medians, with a confidence interval that accounts for noise: pure statistics.

Invariant: deterministic (fixed seed), and exchanging the two sides inverts every figure exactly.

Consecutive decodes share disturbances (a neighbour's burst, a clock step), so decodes are not drawn
one by one. Each side is cut into consecutive blocks, none across two runs, and whole blocks are
drawn with replacement: the non-overlapping block bootstrap (Carlstein, "The Use of Subseries Values
for Estimating the Variance of a General Statistic", Annals of Statistics 14, 1986). Decodes become
slower as the cache fills, which is not noise. So if a session has several runs, the first block of
a run is replaced only by other first blocks, and so on (strata).

The result is the standard error of log(median) within a session. A median also varies between
processes (memory layout, other processes), which one log cannot show. PROCESS and TICK_NS account
for it; `python -m benchmarks.diff_noise` measured them. With few blocks, percentiles of the draws
are too narrow, so the interval is that of Welch's t (Biometrika 34, 1947) on the log scale. The
intervals of a family hold simultaneously: the error rate is divided by their number (Dunn, Journal
of the American Statistical Association 56, 1961).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

ERROR = 0.05
"""the probability that any interval of a family excludes 1 although only noise differs"""
BLOCKS = 12
"""number of blocks of a side; with fewer blocks, longer bursts count as noise"""
MIN_BLOCKS = 5
"""with fewer blocks, the noise is unknown"""
DRAWS = 400
"""with this many, the relative error of the standard error is 1 / sqrt(2 * 400) = 3.5 %"""
KEPT = 50_000
"""samples whose draws are cached, with DRAWS numbers each: most rows lack the same samples"""
PROCESS = 0.02
"""standard deviation of log(median) between processes; with 0.01, 3 of 12 pairs of equal sessions
on a shared machine with 2 cores seemed to differ in their steps"""
TOO_SPREAD = 2.0
"""times the expected deviation: beyond that, a few processes do not show what theirs is; two of
them exceed it by chance in 5 % of the cases"""
TOO_NOISY = 2.0
"""an interval that reaches this many times as far says nothing about a difference"""
TICK_NS = 10.0
"""systematic error of one timed interval: resolution of the clock, code alignment"""


@dataclass(frozen=True)
class Median:
    """The median of one side in ns, and its error."""

    value: float
    log_error: float | None
    """standard error of log(value); None with fewer than MIN_BLOCKS blocks"""
    n_blocks: int
    freedom: int
    """degrees of freedom of that error: blocks minus strata"""
    each: tuple[float, ...] = ()
    """for a group: the median of each process"""


@dataclass(frozen=True)
class SampleBlocks:
    """The block and the stratum of every sample, each counted from 0."""

    block: Int64
    stratum: Int64


@dataclass(frozen=True)
class Ratio:
    """B / A of two medians; `low` and `high` are None if the noise is unknown."""

    a: float
    b: float
    value: float | None
    """None if only A's median is 0"""
    low: float | None
    high: float | None

    @property
    def differs(self) -> bool:
        """Whether the interval excludes 1."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high

    @property
    def verdict(self) -> str:
        """How B compares with A, in words."""
        if self.value is None or self.low is None or self.high is None:
            return "too few to tell"
        if self.differs:
            return "slower" if self.low > 1 else "faster"
        return "within noise" if self.high < self.value * TOO_NOISY else "too noisy to tell"


def cut_blocks(run: Int64, n_blocks: int = BLOCKS) -> SampleBlocks:
    """The blocks of samples in order of time; `run` has each sample's run.

    Blocks are consecutive, of about equal length, and none spans two runs. If there are more than
    `n_blocks` / 2 runs, each run is one block. If there are at least three runs, the i-th blocks of
    all runs are a stratum.
    """
    block, stratum = np.zeros(len(run), np.int64), np.zeros(len(run), np.int64)
    runs = _groups(run)
    each = max(1, n_blocks // max(1, len(runs)))
    n = 0
    for inside in runs:
        parts = min(each, len(inside))
        part = np.arange(len(inside)) * parts // len(inside)
        block[inside] = n + part
        stratum[inside] = part if len(runs) >= 3 else 0
        n += parts
    return SampleBlocks(block, stratum)


def _groups(names: Int64) -> list[Int64]:
    """For each name, in order, the indices where it occurs."""
    order = np.argsort(names, kind="stable")
    _, first = np.unique(names[order], return_index=True)
    return np.split(order, first[1:]) if len(names) else []


def join_blocks(runs: Sequence[Int64]) -> SampleBlocks:
    """The blocks of several sessions' samples, one session after the other; `runs` has the run of
    every sample by session. Runs do not span sessions."""
    numbered = [run + 1_000_000 * i for i, run in enumerate(runs)]
    return cut_blocks(np.concatenate([np.zeros(0, np.int64), *numbered]))


def compute_medians(samples: Float64, blocks: SampleBlocks, n_timed: Sequence[int]) -> list[Median]:
    """The median of every row of `samples` (rows, samples) in ns; NaN means that a row lacks the
    sample. `n_timed` has the number of timed intervals in a row's sum."""
    medians: list[Median] = []
    known: dict[bytes, tuple[Int64 | None, int, int, float]] = {}
    for row, n in zip(samples, n_timed, strict=True):
        present = ~np.isnan(row)
        values = row[present]
        if not len(values):
            medians.append(Median(math.nan, None, 0, 0))
            continue
        key = present.tobytes()
        if key not in known:
            if len(known) * len(row) > KEPT:
                known.clear()
            known[key] = _draw(blocks.block[present], blocks.stratum[present])
        draws, n_blocks, freedom, scale = known[key]
        value = float(np.median(values))
        error = None
        if draws is not None and value > 0:
            spread = np.log(np.maximum(np.median(values[draws], axis=1), 1.0))
            # rounding adds the variance of a uniform distribution over one step
            tick = (TICK_NS * n / value) ** 2 / 12
            error = math.sqrt(float(np.var(spread)) * scale + tick + PROCESS**2)
        medians.append(Median(value, error, n_blocks, freedom))
    return medians


def disturb(median: Median, taken: float) -> Median:
    """The median with the error that a disturbed machine adds: if the share `taken` of the time was
    taken evenly, every step took 1 / (1 - taken) times as long."""
    if median.log_error is None or taken <= 0:
        return median
    return replace(median, log_error=math.hypot(median.log_error, -math.log1p(-min(taken, 0.99))))


def median_of_group(medians: Sequence[Median]) -> Median:
    """The geometric mean of a group of medians in ns, one of each process; NaN means that a process
    lacks it. Each process is a block.

    From MIN_BLOCKS processes on, their spread is the error. Fewer do not show how much processes
    differ: then the error is at least that within the processes, and unknown if their spread
    exceeds TOO_SPREAD times that.
    """
    present = [of for of in medians if not math.isnan(of.value)]
    n = len(present)
    if not n:
        return Median(math.nan, None, 0, 0)
    logs = np.log(np.maximum([of.value for of in present], 1.0))
    spread, freedom = _deviation(logs), n - 1
    error: float | None = spread
    if n < MIN_BLOCKS:
        within = [of.log_error for of in present if of.log_error is not None]
        expected = float(np.sqrt(np.mean(np.square(within)))) if len(within) == n else 0.0
        known = expected > 0 and spread <= TOO_SPREAD * expected
        error = max(spread, expected) if known else None
        freedom = sum(of.freedom for of in present)
    if error is not None:
        error /= math.sqrt(n)
    each = tuple(of.value for of in medians)
    return Median(float(np.exp(logs.mean())), error, n, max(freedom, 1), each)


def _deviation(logs: Float64) -> float:
    """The standard deviation of some logarithms; 0 for a single one."""
    # equal numbers would make any difference significant; no clock is that exact
    return max(float(logs.std(ddof=1)), 1e-4) if len(logs) > 1 else 0.0


def describe(ratio: Ratio, verb: str, who: str = "B", other: str = "") -> str:
    """The ratio of times as a clause with its direction: "B decodes 2.84 times as fast (2.80 to
    2.88)"; an empty text if it is unknown or noise. `verb` is that of `step_times.verb`, `other`
    the name of the other side, if the clause must name it."""
    if ratio.value is None or ratio.low is None or ratio.high is None or not ratio.differs:
        return ""
    low, high = 1 / ratio.high, 1 / ratio.low
    fast = f"as fast as {other}" if other else "as fast"
    return f"{who} {verb} {1 / ratio.value:.3g} times {fast} ({low:.3g} to {high:.3g})"


def compare(a: Median, b: Median, n_family: int, *, in_turns: bool = False) -> Ratio:
    """The ratio of two medians with its interval, one of a family of `n_family`. If the processes
    of two groups took turns, the i-th ones of both are a pair, and the interval is that of the
    pairs' ratios: what disturbs both members of a pair is not noise."""
    if a.value == b.value:
        value: float | None = 1.0
    else:
        value = b.value / a.value if a.value > 0 else None
    if value is None or value == 0 or a.log_error is None or b.log_error is None:
        return Ratio(a.value, b.value, value, None, None)
    error = math.hypot(a.log_error, b.log_error)
    # the degrees of freedom of Welch and Satterthwaite, rounded down
    va, vb = a.log_error**2, b.log_error**2
    freedom = max(1, int((va + vb) ** 2 / (va**2 / a.freedom + vb**2 / b.freedom)))
    if in_turns:
        pairs = np.log(np.maximum(b.each, 1.0)) - np.log(np.maximum(a.each, 1.0))
        if not np.isnan(pairs).any():
            error, freedom = _deviation(pairs) / math.sqrt(len(pairs)), len(pairs) - 1
    reach = _reach(error, freedom, n_family)
    return Ratio(a.value, b.value, value, value / reach, value * reach)


def interval(median: Median, n_family: int) -> tuple[float, float] | None:
    """The interval of a median in ns, one of a family of `n_family`; None if the noise is
    unknown."""
    if median.log_error is None:
        return None
    reach = _reach(median.log_error, median.freedom, n_family)
    return median.value / reach, median.value * reach


def _reach(error: float, freedom: int, n_family: int) -> float:
    """The factor from a figure to the end of its interval; `error` is that of its logarithm."""
    return math.exp(student_quantile(1 - ERROR / 2 / max(1, n_family), freedom) * error)


def student_quantile(p: float, freedom: int) -> float:
    """The quantile of Student's t for p > 0.5, by bisection of `_student_inside`."""
    low, high = 0.0, 1.0
    while _student_inside(high, freedom) < 2 * p - 1 and high < 1e6:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if _student_inside(middle, freedom) < 2 * p - 1:
            low = middle
        else:
            high = middle
    return high


def _student_inside(t: float, freedom: int) -> float:
    """P(|T| < t): Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4."""
    theta = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(theta), math.sin(theta)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    return 2 / math.pi * (theta + sine * total) if odd else sine * total


def _draw(block: Int64, stratum: Int64) -> tuple[Int64 | None, int, int, float]:
    """DRAWS rows of sample indices (whole blocks drawn with replacement within each stratum), None
    if the blocks are too few; the number of blocks, the degrees of freedom, and a factor for the
    variance.

    Rows have equal length: draws are truncated, or repeated from their beginning. A bootstrap's
    variance is (n - 1) / n of the variance it estimates, where n is the number of blocks in a
    stratum (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section 6.4).
    """
    members = _groups(block)
    strata = _groups(stratum[[of[0] for of in members]])
    fewest = min(map(len, strata))
    freedom = len(members) - len(strata) if fewest > 1 else 0
    if len(members) < MIN_BLOCKS or not freedom:
        return None, len(members), freedom, math.inf
    random = np.random.default_rng(1)
    chosen = np.hstack([of[random.integers(0, len(of), (DRAWS, len(of)))] for of in strata])
    draws = np.array(
        [np.resize(np.concatenate([members[i] for i in row]), len(block)) for row in chosen]
    )
    return draws, len(members), freedom, fewest / (fewest - 1)
