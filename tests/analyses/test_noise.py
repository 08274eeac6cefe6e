"""The interval of a ratio of medians, against scipy and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from llamacpp_instr.converters.analyses.noise import (
    PROCESS,
    TICK_NS,
    Median,
    Ratio,
    SampleBlocks,
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
    blocks = SampleBlocks(np.arange(60), np.zeros(60, np.int64))
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
    """Each of 200 intervals, 100 us in all, is rounded to 10 ns: a uniform error."""
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
    """From five processes on, only their spread counts; with fewer, what their samples show."""
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


def test_bounds_that_touch_one_exclude_nothing():
    for low, high, differs in ((1.0, 1.2, False), (0.8, 1.0, False), (1.001, 1.2, True)):
        assert Ratio(1.0, 1.0, 1.0, low, high).differs == differs
    assert Ratio(1.0, 2.0, 2.0, 0.5, 3.99).verdict == "within noise"
    assert Ratio(1.0, 2.0, 2.0, 0.5, 4.0).verdict == "too noisy to tell"


def test_a_ratio_needs_both_medians():
    none, some = Median(0.0, 0.1, 12, 10), Median(5.0, 0.1, 12, 10)
    assert compare(none, some, 1) == Ratio(0.0, 5.0, None, None, None)
    assert compare(some, none, 1) == Ratio(5.0, 0.0, 0.0, None, None)
    both = compare(none, none, 1)
    assert both.value == 1
    assert both.low is not None
    assert compare(some, Median(5.0, None, 3, 1), 1) == Ratio(5.0, 5.0, 1.0, None, None)


def test_a_family_divides_the_error_among_its_intervals():
    a, b = Median(100.0, 0.03, 11, 10), Median(110.0, 0.04, 11, 10)
    for n in (1, 2, 8):
        reach = stats.t.ppf(1 - 0.05 / 2 / n, 18) * 0.05
        found = compare(a, b, n)
        assert found.low == pytest.approx(1.1 * math.exp(-reach), rel=1e-6)
        assert found.high == pytest.approx(1.1 * math.exp(reach), rel=1e-6)
    assert compare(a, b, 0) == compare(a, b, 1)
    # degrees of freedom are at least one
    few = compare(Median(1.0, 0.1, 2, 1), Median(2.0, 0.001, 12, 10), 1)
    assert few.high == pytest.approx(2 * math.exp(stats.t.ppf(0.975, 1) * math.hypot(0.1, 0.001)))


def test_pairs_have_the_error_of_their_ratios():
    """What disturbs both sides of a pair is not noise. Without a side, both errors count."""
    of_a, of_b = (100.0, 200.0, 150.0, 120.0, 90.0), (110.0, 230.0, 160.0, 130.0, 100.0)
    a, b = (median_of_group([Median(v, None, 1, 0) for v in of]) for of in (of_a, of_b))
    logs = np.log(of_b) - np.log(of_a)
    reach = stats.t.ppf(0.975, 4) * logs.std(ddof=1) / math.sqrt(5)
    paired = compare(a, b, 1, in_turns=True)
    ratio = math.exp(logs.mean())
    assert paired.value == pytest.approx(ratio)
    assert paired.low == pytest.approx(ratio * math.exp(-reach))
    assert paired.high == pytest.approx(ratio * math.exp(reach))
    apart = compare(a, b, 1)
    assert apart.high is not None
    assert apart.high > 1.5 * paired.high
    lacking = median_of_group(
        [Median(math.nan, None, 0, 0), *[Median(v, None, 1, 0) for v in of_b]]
    )
    whole = median_of_group([Median(v, None, 1, 0) for v in (100.0, *of_a)])
    assert compare(whole, lacking, 1, in_turns=True) == compare(whole, lacking, 1)
    equal = compare(a, a, 1, in_turns=True)
    assert equal.high == pytest.approx(math.exp(stats.t.ppf(0.975, 4) * 1e-4 / math.sqrt(5)))


def test_all_time_that_was_taken_is_at_most_99_percent():
    quiet = Median(100.0, 0.03, 12, 10)
    for taken in (0.99, 0.995, 1.0):
        error = math.hypot(0.03, math.log(100))
        assert disturb(quiet, taken).log_error == pytest.approx(error)
    assert disturb(quiet, 0.98).log_error == pytest.approx(math.hypot(0.03, math.log(50)))
    assert disturb(quiet, -0.1) == quiet


@pytest.mark.parametrize(("n", "known"), [(4, False), (5, True)])
def test_from_five_blocks_on_the_noise_is_known(n, known):
    found = compute_medians(np.linspace(90, 110, n)[None] * 1e4, cut_blocks(np.arange(n)), [1])[0]
    assert (found.log_error is not None) == known
    assert (found.n_blocks, found.freedom) == (n, n - 1)
    group = median_of_group([Median(100.0 + i, None, 1, 0) for i in range(n)])
    assert (group.log_error is not None) == known


def test_rows_lack_samples_of_their_own():
    """A row's median and blocks are those of the samples that it has."""
    samples = np.full((3, 24), 1e6)
    samples[0, :12] = np.nan
    samples[1] = np.nan
    samples[2, ::2] = 3e6
    half, none, all_ = compute_medians(samples, cut_blocks(np.repeat(np.arange(12), 2)), [1] * 3)
    assert (half.value, half.n_blocks) == (1e6, 6)
    assert math.isnan(none.value)
    assert (none.log_error, none.n_blocks, none.freedom) == (None, 0, 0)
    assert (all_.value, all_.n_blocks) == (2e6, 12)


def test_a_stratum_of_one_block_shows_no_noise():
    """One of three runs is longer: its last blocks have no others to be replaced with."""
    run = np.repeat([1, 2, 3], [4, 4, 12])
    blocks = cut_blocks(run)
    assert len(set(blocks.block.tolist())) == 12
    uneven = SampleBlocks(np.arange(6), np.array([0, 0, 0, 1, 1, 2]))
    found = compute_medians(np.linspace(1e6, 2e6, 6)[None], uneven, [1])[0]
    assert (found.log_error, found.n_blocks, found.freedom) == (None, 6, 0)
    pairs = SampleBlocks(np.arange(6), np.array([0, 0, 1, 1, 2, 2]))
    found = compute_medians(np.full((1, 6), 1e6), pairs, [1])[0]
    assert (found.n_blocks, found.freedom) == (6, 3)
    assert found.log_error == pytest.approx(PROCESS, rel=1e-3)


def test_the_variance_of_draws_is_that_of_few_blocks():
    """A bootstrap's variance of a mean of n blocks is (n - 1) / n of what it estimates: twice as
    much for two in each stratum."""
    values = np.tile([1.0, 1.2], 6) * 1e6
    strata = SampleBlocks(np.arange(12), np.repeat(np.arange(6), 2))
    one = compute_medians(values[None], strata, [1])[0]
    assert one.log_error is not None
    assert one.freedom == 6
    # the median of 12 samples, six of each value, drawn in pairs: simulated apart
    random = np.random.default_rng(3)
    draws = [np.log(np.median(np.concatenate([random.choice([1.0, 1.2], 2) for _ in range(6)])))
             for _ in range(4000)]  # fmt: skip
    seen = one.log_error**2 - PROCESS**2
    assert seen == pytest.approx(2 * np.var(draws), rel=0.2)
