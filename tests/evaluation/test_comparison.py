import math

import numpy as np
import pytest
from scipy import stats

from hypersphere.evaluation import paired_difference, rank_correlation, student_quantile


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 10, 29, 120])
@pytest.mark.parametrize("probability", [0.05, 0.5, 0.9, 0.975, 0.999])
def test_student_quantile_agrees_with_scipy(probability, degrees):
    expected = stats.t.ppf(probability, degrees)
    assert student_quantile(probability, degrees) == pytest.approx(expected, rel=1e-8, abs=1e-9)


def test_paired_difference_agrees_with_scipy():
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=7), rng.normal(1.0, size=7)
    interval = stats.ttest_rel(first, second).confidence_interval(0.9)
    difference = paired_difference(first.tolist(), second.tolist(), confidence=0.9)
    assert (difference.low, difference.high) == pytest.approx((interval.low, interval.high))
    assert difference.mean == pytest.approx((first - second).mean())
    assert difference.pairs == 7


@pytest.mark.parametrize(
    ("first", "higher", "expected"),
    [
        ([2.0, 2.1, 1.9], True, "yes"),
        ([2.0, 2.1, 1.9], False, "no"),
        ([0.1, -0.1, 0.05], True, "not resolved"),
        ([5.0], True, "not resolved"),
    ],
)
def test_paired_difference_verdict_depends_on_the_interval_and_the_direction(first, higher, expected):
    assert paired_difference(first, [0.0] * len(first)).verdict(higher) == expected


def test_paired_difference_of_equal_values_has_an_empty_interval():
    difference = paired_difference([1.0, 2.0], [1.0, 2.0])
    assert (difference.mean, difference.low, difference.high) == (0, 0, 0)
    assert difference.verdict(True) == "not resolved"


def test_paired_difference_of_one_pair_has_an_infinite_interval():
    assert paired_difference([1.0], [0.5]).high == math.inf


def test_paired_difference_rejects_unequal_numbers():
    with pytest.raises(ValueError, match="first and second must have the same length"):
        paired_difference([1.0], [1.0, 2.0])


def test_paired_difference_rejects_values_that_are_not_finite():
    with pytest.raises(ValueError, match=r"second must be finite numbers, not \[nan\]"):
        paired_difference([1.0, 2.0], [1.0, math.nan])


@pytest.mark.parametrize("levels", [4, 1000])
def test_rank_correlation_agrees_with_scipy_also_for_ties(levels):
    generator = np.random.default_rng(0)
    first = generator.integers(0, levels, 200).astype(float)
    second = first + generator.integers(0, levels, 200)
    assert rank_correlation(first, second) == pytest.approx(stats.spearmanr(first, second).statistic, rel=1e-12)


def test_rank_correlation_of_a_constant_is_nan():
    assert math.isnan(rank_correlation([1.0, 1.0], [1.0, 2.0]))


def test_rank_correlation_requires_equal_lengths():
    with pytest.raises(ValueError, match="first and second must have the same length >= 2"):
        rank_correlation([1.0, 2.0], [1.0, 2.0, 3.0])
