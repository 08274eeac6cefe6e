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
    compare,
    compute_medians,
    cut_blocks,
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
