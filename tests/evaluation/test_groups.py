import math

import numpy as np
import pytest
import torch
from scipy import stats

from hypersphere.evaluation import rates_by_group, roc


@pytest.mark.parametrize("target", [{"threshold": 0.4}, {"far": 0.1}])
@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_rates_by_group_matches_a_loop_over_pairs(target, make):
    rng = np.random.default_rng(0)
    same = rng.random(200) < 0.5
    scores, groups = rng.standard_normal(200) + same, rng.integers(3, size=200) * 10
    rates = rates_by_group(scores, same, make(groups.tolist()), **target)
    threshold = target.get("threshold", roc(scores, same).at(0.1).threshold)
    assert list(rates) == [0, 10, 20]
    for group, rate in rates.items():
        members = [k for k in range(200) if groups[k] == group]
        assert rate.frr == np.mean([scores[k] < threshold for k in members if same[k]])
        assert rate.far == np.mean([scores[k] >= threshold for k in members if not same[k]])
        assert (rate.same, rate.different) == (sum(same[members]), sum(~same[members]))
        assert rate.threshold == threshold


def test_group_rates_have_wilson_intervals():
    scores, same = [0.0] * 20 + [1.0] * 3 + [0.0] * 7, [False] * 20 + [True] * 10
    rate = rates_by_group(scores, same, ["a"] * 30, threshold=0.5)["a"]
    for interval, errors, pairs in ((rate.frr_interval(), 7, 10), (rate.far_interval(0.9), 0, 20)):
        expected = stats.binomtest(errors, pairs).proportion_ci(interval.level, method="wilson")
        assert (interval.value, interval.low, interval.high) == pytest.approx((errors / pairs, *expected), abs=1e-12)


def test_rates_by_group_gives_nan_without_pairs_of_a_kind():
    rates = rates_by_group([0.9, 0.1, 0.8], [1, 0, 1], ["b", "b", "a"], threshold=0.5)
    assert list(rates) == ["a", "b"]
    assert (rates["a"].frr, rates["b"].far) == (0, 0)
    assert math.isnan(rates["a"].far)
    assert math.isnan(rates["a"].far_interval().low)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": ["a", "b"]}, "groups must be a vector of 3 texts or integers"),
        ({"groups": [0.5, 1.0, 2.0]}, "groups must be a vector of 3 texts or integers, not 'float64"),
        ({"threshold": None}, "exactly one of far and threshold must be given"),
    ],
)
def test_rates_by_group_rejects_invalid_input(arguments, message):
    given = {"scores": [0.1, 0.2, 0.3], "same": [0, 1, 1], "groups": [0, 0, 1], "threshold": 0.5, **arguments}
    with pytest.raises(ValueError, match=message):
        rates_by_group(**given)


def test_groups_may_be_a_column_of_pandas():
    scores, same, names = [0.9, 0.4, 0.8, 0.3], [1, 1, 0, 0], ["b", "a", "a", "b"]
    column = np.array(names, dtype=object)
    assert rates_by_group(scores, same, column, threshold=0.5) == rates_by_group(scores, same, names, threshold=0.5)
