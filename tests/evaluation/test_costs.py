import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.isotonic import IsotonicRegression

from hypersphere.evaluation import actual_dcf, calibration_loss, cllr, min_cllr, min_dcf
from hypersphere.evaluation._isotonic import pool_adjacent_violators


@st.composite
def scored_pairs(draw):
    """Draw a few pairs of both kinds, with scores from a short list, so that most of them tie."""
    size = draw(st.integers(2, 25))
    scores = draw(st.lists(st.integers(-6, 6), min_size=size, max_size=size))
    same = draw(st.lists(st.booleans(), min_size=size - 2, max_size=size - 2))
    return np.array(scores) / 2, np.array([True, False, *same])


def dcf(scores, same, threshold, prior, c_miss, c_fa):
    miss = np.mean([s < threshold for s, f in zip(scores, same, strict=True) if f])
    false = np.mean([s >= threshold for s, f in zip(scores, same, strict=True) if not f])
    return (c_miss * prior * miss + c_fa * (1 - prior) * false) / min(c_miss * prior, c_fa * (1 - prior))


@given(scored_pairs(), st.sampled_from([0.01, 0.3, 0.5, 0.9]), st.sampled_from([1, 0.1, 10]))
@settings(max_examples=60, deadline=None)
def test_min_dcf_matches_brute_force(pairs, prior, c_miss):
    scores, same = pairs
    expected = min(dcf(scores, same, t, prior, c_miss, 1) for t in [*scores, np.inf])
    assert min_dcf(scores, same, prior, c_miss) == pytest.approx(expected, abs=1e-12)
    assert min_dcf(scores, same, prior, c_miss) <= 1 + 1e-12
    bayes = math.log((1 - prior) / (c_miss * prior))
    actual = actual_dcf(scores, same, prior, c_miss)
    assert actual == pytest.approx(dcf(scores, same, bayes, prior, c_miss, 1), abs=1e-12)
    assert actual >= min_dcf(scores, same, prior, c_miss) - 1e-12


def test_min_dcf_of_a_toy_case():
    # Threshold 0.9 misses one of two same pairs; threshold 0.7 also accepts one of two different pairs.
    scores, same = [0.9, 0.8, 0.7, 0.3], [1, 0, 1, 0]
    assert min_dcf(scores, same) == pytest.approx(0.5)  # 0.01·½ / 0.01
    assert min_dcf(scores, same, prior=0.9) == pytest.approx(0.5)  # 0.1·½ / 0.1
    assert actual_dcf(scores, same, threshold=0.7) == pytest.approx(49.5)  # 0.99·½ / 0.01


@given(scored_pairs())
@settings(max_examples=60, deadline=None)
def test_pool_adjacent_violators_matches_scikit_learn(pairs):
    scores, same = pairs
    blocks = pool_adjacent_violators(torch.tensor(scores), torch.tensor(same))
    fractions = (blocks.same / (blocks.same + blocks.different)).numpy()
    block = np.searchsorted(blocks.high.numpy(), scores)
    np.testing.assert_allclose(fractions[block], IsotonicRegression().fit_transform(scores, same), atol=1e-12)
    assert (np.diff(fractions) > 0).all()
    assert (blocks.low <= blocks.high).all()
    weights = torch.tensor(np.random.default_rng(len(scores)).integers(0, 3, len(scores)))
    if bool((weights > 0).any()):
        weighted = pool_adjacent_violators(torch.tensor(scores), torch.tensor(same), weights)
        repeated = pool_adjacent_violators(*(torch.tensor(x).repeat_interleave(weights) for x in (scores, same)))
        assert weighted.same.tolist() == repeated.same.tolist()
        assert weighted.low.tolist() == repeated.low.tolist()


def test_pool_adjacent_violators_of_many_rising_blocks_and_one_low_end():
    scores = torch.arange(20_000, dtype=torch.float64)
    same = torch.rand(20_000, generator=torch.Generator().manual_seed(0)) < scores / 20_000
    same[-4000:] = False
    blocks = pool_adjacent_violators(scores, same)
    expected = IsotonicRegression().fit_transform(scores, same.double())
    fractions = (blocks.same / (blocks.same + blocks.different))[torch.searchsorted(blocks.high, scores)]
    np.testing.assert_allclose(fractions, expected, atol=1e-12)


@given(scored_pairs())
@settings(max_examples=60, deadline=None)
def test_cllr_matches_its_definition_and_pav_minimises_it(pairs):
    scores, same = pairs
    expected = (
        np.mean([math.log2(1 + math.exp(-s)) for s in scores[same]])
        + np.mean([math.log2(1 + math.exp(s)) for s in scores[~same]])
    ) / 2
    assert cllr(scores, same) == pytest.approx(expected)
    posterior = IsotonicRegression().fit_transform(scores, same)
    with np.errstate(divide="ignore"):
        llrs = np.log(posterior) - np.log(1 - posterior) - math.log(same.sum() / (~same).sum())
    optimal = (np.logaddexp(0, -llrs[same]).mean() + np.logaddexp(0, llrs[~same]).mean()) / (2 * math.log(2))
    assert min_cllr(scores, same) == pytest.approx(optimal, abs=1e-12)
    assert calibration_loss(scores, same) == pytest.approx(expected - optimal, abs=1e-12)
    for slope in (0.3, 2.0):
        assert min_cllr(scores, same) <= cllr(slope * scores - 0.2, same) + 1e-12
    assert min_cllr(np.exp(scores), same) == pytest.approx(min_cllr(scores, same))


def test_pav_ratios_have_the_minimal_cost_for_every_prior():
    rng = np.random.default_rng(0)
    same = rng.random(300) < 0.4
    scores = rng.standard_normal(300) + same
    blocks = pool_adjacent_violators(torch.tensor(scores), torch.tensor(same))
    llrs = blocks.llrs.clamp(-50, 50)[torch.searchsorted(blocks.high, torch.tensor(scores))]
    for prior in (0.001, 0.01, 0.2, 0.5, 0.8, 0.99):
        assert actual_dcf(llrs, same, prior) == pytest.approx(min_dcf(scores, same, prior), abs=1e-12)


def test_cllr_of_huge_ratios_is_finite():
    assert cllr([1e6, -1e6], [1, 0]) == 0
    assert cllr([-1e6, 1e6], [1, 0]) == pytest.approx(1e6 / math.log(2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prior": 0}, r"prior must be a probability in \(0, 1\), not 0"),
        ({"prior": math.nan}, r"prior must be a probability in \(0, 1\), not nan"),
        ({"c_miss": -1}, "c_miss must be a positive number, not -1"),
        ({"c_fa": 0}, "c_fa must be a positive number, not 0"),
        ({"same": [1, 1]}, "at least one negative"),
        ({"scores": [0.1, math.nan]}, "scores must be finite, but row 1 is not"),
    ],
)
def test_min_dcf_rejects_invalid_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        min_dcf(**{"scores": [0.1, 0.2], "same": [0, 1], **arguments})
