import math

import numpy as np
import pytest
from scipy import stats

from hypersphere.evaluation import rank_correlation


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
