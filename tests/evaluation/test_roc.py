import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics

from hypersphere.evaluation import bootstrap, roc

from . import reference


@st.composite
def scored_pairs(draw):
    """A few pairs of either kind; scores from a short list, so that most of them tie."""
    size = draw(st.integers(2, 30))
    scores = draw(st.lists(st.integers(-4, 4), min_size=size, max_size=size))
    same = draw(st.lists(st.booleans(), min_size=size - 2, max_size=size - 2))
    return [s / 4 for s in scores], [True, False, *same]


@given(scored_pairs())
@settings(max_examples=80, deadline=None)
def test_the_curve_is_scikit_learns_and_its_numbers_are_those_of_brute_force(pairs):
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
def test_only_the_order_of_scores_matters(pairs, rising):
    scores, same = pairs
    one, two = roc(scores, same), roc([rising(s) for s in scores], same)
    assert (one.auc, one.eer, one.best_accuracy) == (two.auc, two.eer, two.best_accuracy)
    assert one.tar_at(0.1) == two.tar_at(0.1)


@given(scored_pairs())
@settings(max_examples=40, deadline=None)
def test_exchanging_the_kinds_and_the_sign_changes_no_number(pairs):
    scores, same = pairs
    one, two = roc(scores, same), roc([-s for s in scores], [not f for f in same])
    assert one.auc == pytest.approx(two.auc)
    assert one.eer == pytest.approx(two.eer)
    assert one.best_accuracy == pytest.approx(two.best_accuracy)


def test_a_rate_below_one_negative_is_said_not_to_be_resolved():
    curve = roc([0.9, 0.8, 0.7, 0.6, 0.1], [1, 1, 0, 1, 0])
    point = curve.at(1e-3)
    assert (point.true_rate, point.false_rate, point.threshold, point.resolved) == (2 / 3, 0.0, 0.8, False)
    assert curve.at(0.5).resolved
    assert curve.tar_at(0.25, rule="linear") == pytest.approx(2 / 3)  # the line to the next point is level
    assert 2 / 3 <= curve.tar_at(0.25) <= curve.tar_at(0.5) == 1


def test_degenerate_scores():
    level = roc([0.5] * 6, [1, 0] * 3)
    assert (level.auc, level.eer, level.best_accuracy) == (0.5, 0.5, 0.5)
    assert level.at(0.1).true_rate == 0
    assert level.at(0.1).threshold == math.inf
    assert level.at(0.1, rule="linear").true_rate == pytest.approx(0.1)
    apart = roc([2.0, 1.0], [True, False])
    assert (apart.auc, apart.eer, apart.best_accuracy, apart.best_threshold) == (1, 0, 1, 1.5)
    upside_down = roc([1.0, 2.0], [True, False])
    assert (upside_down.auc, upside_down.eer, upside_down.best_accuracy) == (0, 1, 0.5)
    close = np.nextafter(1.0, 2.0)
    assert roc([close, 1.0], [True, False]).best_threshold == close
    assert roc([1e308, -1e308], [True, False]).best_threshold == 0


@pytest.mark.parametrize("make", [list, np.array, torch.tensor, lambda v: torch.tensor(v, dtype=torch.float64)])
def test_lists_arrays_and_tensors_are_the_same(make):
    scores, same = [0.5, 0.25, 0.75, 0.125], [1, 0, 1, 1]
    assert repr(roc(make(scores), make(same))) == repr(roc(scores, [bool(s) for s in same]))
    narrow = torch.tensor(scores, dtype=torch.float16, requires_grad=True)
    assert roc(narrow, same).auc == roc(scores, same).auc


@pytest.mark.parametrize(
    ("scores", "same", "words"),
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
def test_bad_pairs_are_named(scores, same, words):
    with pytest.raises(ValueError, match=words):
        roc(scores, same)


@pytest.mark.parametrize("far", [0, 1, -0.1, 2, math.nan])
def test_a_rate_outside_the_open_interval_is_named(far):
    with pytest.raises(ValueError, match=r"far must be a rate in \(0, 1\)"):
        roc([1.0, 0.0], [1, 0]).tar_at(far)
    with pytest.raises(ValueError, match="rule must be 'step' or 'linear', not 'cubic'"):
        roc([1.0, 0.0], [1, 0]).tar_at(0.1, rule="cubic")


def test_bootstrap_by_pair_agrees_with_the_large_sample_formula():
    generator = torch.Generator().manual_seed(1)
    same = torch.arange(600) % 2 == 0
    scores = torch.randn(600, generator=generator) + 1.0 * same
    found = bootstrap(scores, same, samples=400, generator=torch.Generator().manual_seed(2))
    a = found.value  # Hanley and McNeil 1982
    q1, q2 = a / (2 - a), 2 * a * a / (1 + a)
    error = math.sqrt((a * (1 - a) + 299 * (q1 - a * a) + 299 * (q2 - a * a)) / 300**2)
    assert found.value == pytest.approx(metrics.roc_auc_score(same, scores))
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * error, rel=0.2)
    again = bootstrap(scores, same, samples=400, generator=torch.Generator().manual_seed(2))
    assert found == again
    assert str(found).endswith("(95 %)")


def test_bootstrap_by_identity_is_wider_where_people_differ():
    generator = torch.Generator().manual_seed(3)
    people = 30
    bias = torch.randn(people, generator=generator)  # a person scores high or low throughout
    first = torch.randint(people, (1500,), generator=generator)
    second = torch.where(torch.arange(1500) % 2 == 0, first, torch.randint(people, (1500,), generator=generator))
    same = first == second
    scores = bias[first] + bias[second] + 1.0 * same + 0.3 * torch.randn(1500, generator=generator)

    def width(**more):
        found = bootstrap(scores, same, "eer", samples=200, generator=torch.Generator().manual_seed(4), **more)
        assert found.low <= found.value <= found.high
        return found.high - found.low

    assert width(identities=(first, second)) > 1.5 * width()
    with pytest.raises(ValueError, match="identities must be equal exactly where same is True"):
        width(identities=(first, first))


def test_bootstrap_takes_callables_and_names_bad_arguments():
    scores, same = torch.arange(40.0), torch.arange(40) % 3 > 0
    found = bootstrap(scores, same, lambda curve: curve.tar_at(0.1), samples=20)
    assert found.value == roc(scores, same).tar_at(0.1)
    for bad, words in (
        ({"statistic": "tar"}, r"such as lambda roc: roc.tar_at\(1e-3\), not 'tar'"),
        ({"statistic": "auk"}, "statistic must be one of 'auc', 'eer', 'best_accuracy'"),
        ({"samples": 1}, "samples must be a whole number >= 2"),
        ({"level": 95}, r"level must be a share in \(0, 1\)"),
    ):
        with pytest.raises(ValueError, match=words):
            bootstrap(scores, same, **bad)
    few = bootstrap([0.1, 0.2], [1, 0], identities=([0, 0], [0, 1]), samples=20)  # half of the draws lack a kind
    assert (few.low, few.high) == (0, 0)
