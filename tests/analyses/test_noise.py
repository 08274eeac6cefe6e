"""The interval of a ratio of medians, against scipy and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from converters.analyses.noise import (
    PROCESS,
    TICK_NS,
    Blocks,
    Median,
    Ratio,
    compare,
    compute_medians,
    cut_blocks,
    describe,
    disturb,
    join_blocks,
    median_of_group,
    student_quantile,
)


@pytest.mark.parametrize("p", [0.9, 0.975, 0.9984])
@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 22, 101])
def test_students_quantile_is_that_of_scipy(p, freedom):
    assert student_quantile(p, freedom) == pytest.approx(stats.t.ppf(p, freedom), rel=1e-6)


def test_independent_samples_have_the_error_that_scipy_finds():
    samples = np.random.default_rng(5).lognormal(14, 0.2, 60)
    blocks = Blocks(np.arange(60), np.zeros(60, np.int64))
    found = compute_medians(samples[None], blocks, [1])[0]
    peer = stats.bootstrap(
        (samples,), lambda x, axis: np.log(np.median(x, axis=axis)), n_resamples=4000,
        method="percentile", random_state=np.random.default_rng(6),
    )  # fmt: skip
    assert found.log_error is not None
    seen = math.sqrt(found.log_error**2 - PROCESS**2 - (TICK_NS / found.value) ** 2 / 12)
    # either error is known to a few percent
    assert seen == pytest.approx(peer.standard_error * math.sqrt(60 / 59), rel=0.12)


def test_samples_that_go_together_count_as_one():
    """20 bursts of 10 equal samples have the information of 20 samples."""
    bursts = np.random.default_rng(5).lognormal(14, 0.2, 20)
    run = np.repeat(np.arange(20), 10)
    together = compute_medians(np.repeat(bursts, 10)[None], cut_blocks(run), [1])[0]
    alone = compute_medians(bursts[None], cut_blocks(np.arange(20)), [1])[0]
    assert together.log_error == pytest.approx(alone.log_error)


def test_blocks_stay_within_a_run_and_strata_are_their_places():
    blocks = cut_blocks(np.repeat([1, 2, 3], 8), n_blocks=12)
    assert blocks.block.tolist() == [i // 2 for i in range(24)]
    assert blocks.stratum.tolist() == [0, 0, 1, 1, 2, 2, 3, 3] * 3


def test_two_runs_are_no_strata_and_sessions_are_apart():
    assert set(cut_blocks(np.repeat([1, 2], 8)).stratum.tolist()) == {0}
    # the same numbers of runs in two sessions are four runs
    joined = join_blocks([np.repeat([1, 2], 4), np.repeat([1, 2], 4)])
    assert joined.block.tolist() == [0, 0, 1, 2, 3, 3, 4, 5, 6, 6, 7, 8, 9, 9, 10, 11]
    assert len(set(joined.stratum.tolist())) == 3
    # more runs than half of the blocks: each is one
    assert cut_blocks(np.repeat(np.arange(7), 3)).block.tolist() == [i // 3 for i in range(21)]
    assert len(set(cut_blocks(np.repeat(np.arange(6), 3)).block.tolist())) == 12


def test_the_degrees_of_freedom_are_blocks_without_strata():
    found = compute_medians(np.full((1, 48), 1e6), cut_blocks(np.repeat([1, 2, 3], 16)), [1])[0]
    assert (found.n_blocks, found.freedom) == (12, 12 - 4)


def test_the_clock_is_inexact_for_every_interval():
    """Rounding to 10 ns, uniformly, of each of 200 intervals that take 100 us together."""
    found = compute_medians(np.full((1, 48), 1e5), cut_blocks(np.arange(48)), [200])[0]
    tick = 200 * TICK_NS / 1e5 / math.sqrt(12)
    assert found.log_error == pytest.approx(math.hypot(PROCESS, tick), rel=1e-3)


def test_time_that_was_taken_is_noise():
    """With 30 % taken, a step takes up to 1 / 0.7 times as long."""
    quiet = Median(100.0, 0.03, 12, 10)
    assert disturb(quiet, 0.3).log_error == pytest.approx(math.hypot(0.03, math.log(1 / 0.7)))
    assert disturb(quiet, 0.0) == quiet
    assert disturb(Median(100.0, None, 3, 1), 0.3).log_error is None


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.01, 1.2, "slower"), (0.9, 0.99, "faster"), (0.6, 1.99, "within noise"),
        (0.4, 2.01, "too noisy to tell"), (None, None, "too few to tell"),
    ],
)  # fmt: skip
def test_what_an_interval_says(low, high, verdict):
    assert Ratio(100.0, 100.0, 1.0, low, high).verdict == verdict


def test_a_ratio_in_words_has_the_speeds_and_the_smaller_bound_first():
    slower = Ratio(100.0, 200.0, 2.0, 1.6, 2.5)
    assert describe(slower, "prefills 512 tokens") == (
        "B prefills 512 tokens 0.5 times as fast (0.4 to 0.625)"
    )
    assert (
        describe(slower, "decodes", "C", "B") == "C decodes 0.5 times as fast as B (0.4 to 0.625)"
    )
    assert describe(Ratio(100.0, 200.0, 2.0, 0.9, 4.0), "decodes") == ""


def test_a_group_by_hand():
    """From five processes on the spread alone counts; with fewer, what their samples show."""
    values = [100.0, 110.0, 90.0, 105.0, 95.0]
    logs = np.log(values)
    many = median_of_group([Median(of, None, 1, 0) for of in values])
    assert many.value == pytest.approx(math.exp(logs.mean()))
    assert many.log_error == pytest.approx(logs.std(ddof=1) / math.sqrt(5))
    assert (many.n_blocks, many.freedom, many.each) == (5, 4, tuple(values))
    deviation = logs[:3].std(ddof=1)
    for within, error in (
        (deviation * 1.1, deviation * 1.1), (deviation / 1.9, deviation), (deviation / 2.1, None),
    ):  # fmt: skip
        few = median_of_group([Median(of, within, 12, 10) for of in values[:3]])
        assert few.log_error == (None if error is None else pytest.approx(error / math.sqrt(3)))
        assert few.freedom == 30
    quiet = median_of_group([Median(100.0, 0.04, 12, 10)] * 2)
    assert quiet.log_error == pytest.approx(0.04 / math.sqrt(2))
    assert median_of_group([Median(of, None, 3, 1) for of in values[:4]]).log_error is None
    lacking = median_of_group([Median(math.nan, None, 0, 0), *[Median(7.0, None, 1, 0)] * 5])
    assert (lacking.value, lacking.n_blocks) == (pytest.approx(7.0), 5)


def test_a_trend_along_the_run_is_no_noise():
    samples = np.tile(np.linspace(1e6, 2e6, 12), 6)[None]
    found = compute_medians(samples, cut_blocks(np.repeat(np.arange(6), 12)), [1])[0]
    assert found.log_error == pytest.approx(PROCESS, rel=1e-3)


def test_the_interval_by_hand():
    # errors 0.03 and 0.04: together 0.05; 10 degrees of freedom each give
    # 0.05^4 / (0.03^4 / 10 + 0.04^4 / 10) = 18.5 -> 18; t(0.975, 18) = 2.100922
    a, b = Median(100.0, 0.03, 11, 10), Median(110.0, 0.04, 11, 10)
    ratio = compare(a, b, 1)
    assert ratio.value == pytest.approx(1.1)
    assert ratio.low == pytest.approx(1.1 * math.exp(-2.100922 * 0.05))
    assert ratio.high == pytest.approx(1.1 * math.exp(2.100922 * 0.05))
    assert not ratio.differs
    assert compare(a, b, 8).high > ratio.high, "more rows, wider intervals"  # type: ignore[operator]


def test_too_few_samples_have_no_interval():
    found = compute_medians(np.full((1, 4), 100.0), cut_blocks(np.arange(4)), [1])[0]
    assert found.log_error is None
    assert compare(found, found, 1).low is None
    assert not compare(found, found, 1).differs
