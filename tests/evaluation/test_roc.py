import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics

from hypersphere.evaluation import det_curve, roc

from . import reference


@st.composite
def scored_pairs(draw):
    """Draw a few pairs of both kinds, with scores from a short list, so that most of them tie."""
    size = draw(st.integers(2, 30))
    scores = draw(st.lists(st.integers(-4, 4), min_size=size, max_size=size))
    same = draw(st.lists(st.booleans(), min_size=size - 2, max_size=size - 2))
    return [s / 4 for s in scores], [True, False, *same]


@given(scored_pairs())
@settings(max_examples=80, deadline=None)
def test_roc_matches_scikit_learn_and_brute_force(pairs):
    scores, same = pairs
    curve = roc(scores, same)
    far, tar, thresholds = metrics.roc_curve(same, scores, drop_intermediate=False)
    np.testing.assert_allclose(curve.far, far, atol=1e-15)
    np.testing.assert_allclose(curve.tar, tar, atol=1e-15)
    np.testing.assert_array_equal(curve.thresholds, thresholds)
    assert curve.auc == pytest.approx(metrics.roc_auc_score(same, scores), abs=1e-12)
    assert curve.auc == pytest.approx(reference.auc(scores, same), abs=1e-12)
    assert curve.eer == pytest.approx(reference.eer(scores, same), abs=1e-9)
    assert curve.best_accuracy == pytest.approx(reference.best_accuracy(scores, same), abs=1e-12)
    accepted = [s >= curve.best_threshold for s in scores]
    assert np.mean(np.array(accepted) == np.array(same)) == pytest.approx(curve.best_accuracy)
    for rate in (0.5, 0.1, 1 / 3, 0.01):
        assert curve.tar_at(rate) == pytest.approx(reference.tar_step(scores, same, rate), abs=1e-12)
        assert curve.tar_at(rate, rule="linear") == pytest.approx(reference.tar_linear(scores, same, rate), abs=1e-9)


@given(scored_pairs(), st.sampled_from([math.exp, lambda s: s**3 - 7, lambda s: 1e-3 * s, lambda s: 1e6 * s + 1]))
@settings(max_examples=40, deadline=None)
def test_roc_depends_only_on_the_order_of_scores(pairs, increasing):
    scores, same = pairs
    original, mapped = roc(scores, same), roc([increasing(s) for s in scores], same)
    assert (original.auc, original.eer, original.best_accuracy) == (mapped.auc, mapped.eer, mapped.best_accuracy)
    assert original.tar_at(0.1) == mapped.tar_at(0.1)


@given(scored_pairs())
@settings(max_examples=40, deadline=None)
def test_roc_metrics_do_not_change_if_scores_and_labels_are_negated(pairs):
    scores, same = pairs
    original, negated = roc(scores, same), roc([-s for s in scores], [not f for f in same])
    assert original.auc == pytest.approx(negated.auc)
    assert original.eer == pytest.approx(negated.eer)
    assert original.best_accuracy == pytest.approx(negated.best_accuracy)


def test_roc_marks_rates_below_one_negative_as_not_resolved():
    curve = roc([0.9, 0.8, 0.7, 0.6, 0.1], [1, 1, 0, 1, 0])
    point = curve.at(1e-3)
    assert (point.true_rate, point.false_rate, point.threshold, point.resolved) == (2 / 3, 0.0, 0.8, False)
    assert curve.at(0.5).resolved
    assert curve.tar_at(0.25, rule="linear") == pytest.approx(2 / 3)  # the line to the next point is horizontal
    assert 2 / 3 <= curve.tar_at(0.25) <= curve.tar_at(0.5) == 1


@pytest.mark.parametrize("negatives", [10, 49, 103, 1000])
def test_roc_resolves_the_rate_of_exactly_one_negative(negatives):
    # (1/49)·49 and (1/103)·103 are less than 1 in floating point.
    point = roc([2.0, *np.linspace(0, 1, negatives)], [True] + [False] * negatives).at(1 / negatives)
    assert point.false_rate == point.requested_rate == 1 / negatives
    assert point.resolved


def test_operating_point_forwards_its_deprecated_name():
    point = roc([1.0, 0.0], [1, 0]).at(0.5)
    with pytest.warns(DeprecationWarning, match=r"OperatingPoint.asked is deprecated, use OperatingPoint.requested_ra"):
        assert point.asked == point.requested_rate == 0.5


def test_roc_of_degenerate_scores():
    constant = roc([0.5] * 6, [1, 0] * 3)
    assert (constant.auc, constant.eer, constant.best_accuracy) == (0.5, 0.5, 0.5)
    assert constant.at(0.1).true_rate == 0
    assert constant.at(0.1).threshold == math.inf
    assert constant.at(0.1, rule="linear").true_rate == pytest.approx(0.1)
    separated = roc([2.0, 1.0], [True, False])
    assert (separated.auc, separated.eer, separated.best_accuracy, separated.best_threshold) == (1, 0, 1, 1.5)
    inverted = roc([1.0, 2.0], [True, False])
    assert (inverted.auc, inverted.eer, inverted.best_accuracy) == (0, 1, 0.5)
    next_above_one = np.nextafter(1.0, 2.0)
    assert roc([next_above_one, 1.0], [True, False]).best_threshold == next_above_one
    assert roc([1e308, -1e308], [True, False]).best_threshold == 0


@pytest.mark.parametrize("make", [list, np.array, torch.tensor, lambda v: torch.tensor(v, dtype=torch.float64)])
def test_roc_accepts_lists_arrays_and_tensors(make):
    scores, same = [0.5, 0.25, 0.75, 0.125], [1, 0, 1, 1]
    assert repr(roc(make(scores), make(same))) == repr(roc(scores, [bool(s) for s in same]))
    narrow = torch.tensor(scores, dtype=torch.float16, requires_grad=True)
    assert roc(narrow, same).auc == roc(scores, same).auc


@pytest.mark.parametrize(
    ("scores", "same", "message"),
    [
        ([], [], "scores must be a non-empty vector"),
        ([0.1, math.nan], [1, 0], "scores must be finite, but row 1 is not"),
        ([0.1, math.inf], [1, 0], "scores must be finite, but row 1 is not"),
        ([[0.1, 0.2]], [1, 0], "scores must be a non-empty vector"),
        ([0.1, 0.2], [1, 0, 1], r"same must be a vector of 2 flags, not \(3,\)"),
        ([0.1, 0.2], [1, 1], "at least one negative"),
        ([0.1, 0.2], [0, 0], "at least one positive"),
        ([0.1, 0.2], [1, 2], r"zeros and ones, not \[2\]"),
        (["a", "b"], [1, 0], "scores must be a tensor or an array of numbers"),
    ],
)
def test_roc_rejects_invalid_pairs(scores, same, message):
    with pytest.raises(ValueError, match=message):
        roc(scores, same)


@pytest.mark.parametrize("far", [0, 1, -0.1, 2, math.nan])
def test_roc_rejects_rates_outside_the_open_interval(far):
    with pytest.raises(ValueError, match=r"far must be a rate in \(0, 1\)"):
        roc([1.0, 0.0], [1, 0]).tar_at(far)
    with pytest.raises(ValueError, match="rule must be 'step' or 'linear', not 'cubic'"):
        roc([1.0, 0.0], [1, 0]).tar_at(0.1, rule="cubic")


def test_det_curve_matches_scikit_learn():
    rng = np.random.default_rng(0)
    same = rng.random(200) < 0.4
    scores = (rng.standard_normal(200) + 1.5 * same).round(1)
    curve = det_curve(scores, same)
    far, frr, thresholds = metrics.det_curve(same, scores, drop_intermediate=False)
    # scikit-learn ascends, and has only one point without a false accept and one without a false reject.
    first, last = int((curve.far == 0).sum()) - 1, int((curve.frr > 0).sum())
    np.testing.assert_allclose(curve.far[first : last + 1].flip(0), far, atol=1e-15)
    np.testing.assert_allclose(curve.frr[first : last + 1].flip(0), frr, atol=1e-15)
    np.testing.assert_array_equal(curve.thresholds[first : last + 1].flip(0), thresholds)
    assert curve.far[-1] == 1
    assert curve.frr[0] == 1


def test_det_curve_is_a_straight_line_for_normal_scores():
    quantiles = stats.norm.ppf((np.arange(4000) + 0.5) / 4000)
    scores, same = np.concatenate([quantiles, 2 + quantiles]), np.arange(8000) >= 4000
    curve = det_curve(scores, same)
    finite = (curve.far > 0.001) & (curve.far < 0.999) & (curve.frr > 0.001) & (curve.frr < 0.999)
    np.testing.assert_allclose(curve.probit_far[finite], stats.norm.ppf(curve.far[finite]), rtol=1e-9, atol=1e-9)
    # FAR = Φ(−t) and FRR = Φ(t − 2) add up to −2 on probit axes.
    np.testing.assert_allclose(curve.probit_far[finite] + curve.probit_frr[finite], -2, atol=0.05)
    assert curve.probit_far[0] == -torch.inf
    assert curve.probit_frr[0] == torch.inf
    assert repr(curve) == f"DetCurve({len(curve.far)} points)"
