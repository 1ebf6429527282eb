import math

import numpy as np
import pytest

from hypersphere.evaluation import error_vs_discard, roc


def rated_pairs(seed=0, count=300):
    rng = np.random.default_rng(seed)
    same = rng.random(count) < 0.5
    quality = rng.uniform(0, 1, count)
    scores = 0.5 * rng.standard_normal(count) + 1.5 * same * quality
    return scores, same, quality


@pytest.mark.parametrize("decimals", [None, 1])
def test_error_vs_discard_matches_a_loop_over_fractions(decimals):
    scores, same, quality = rated_pairs()
    quality = quality if decimals is None else quality.round(decimals)
    fractions = [0, 0.1, 0.29, 0.5, 0.9]
    result = error_vs_discard(scores, same, quality, far=0.05, fractions=fractions)
    assert result.threshold == roc(scores, same).at(0.05).threshold
    order = sorted(quality)
    for i, fraction in enumerate(fractions):
        cut = order[int(fraction * 300 + 1e-9)]
        remaining = [k for k in range(300) if quality[k] >= cut]
        rejected = [scores[k] < result.threshold for k in remaining if same[k]]
        accepted = [scores[k] >= result.threshold for k in remaining if not same[k]]
        assert result.frr[i].item() == pytest.approx(np.mean(rejected))
        assert result.far[i].item() == pytest.approx(np.mean(accepted))
        assert result.discarded[i].item() == pytest.approx(1 - len(remaining) / 300)
        assert result.discarded[i] <= fraction + 1e-12


def test_error_vs_discard_falls_for_a_useful_quality_only():
    scores, same, quality = rated_pairs(count=3000)
    useful = error_vs_discard(scores, same, quality, far=0.05).frr
    assert useful[10] < 0.8 * useful[0]
    random = error_vs_discard(scores, same, np.random.default_rng(9).random(3000), far=0.05).frr
    assert abs(random[10] - random[0]) < 0.05
    constant = error_vs_discard(scores, same, np.ones(3000), far=0.05)
    assert constant.frr.tolist() == [constant.frr[0].item()] * 20
    assert constant.discarded.tolist() == [0] * 20


def test_error_vs_discard_uses_the_worse_side_and_reports_what_is_gone():
    scores, same = [0.9, 0.2, 0.1, 0.8], [1, 1, 0, 0]
    sides = ([3.0, 1.0, 5.0, 6.0], [4.0, 9.0, 5.0, 2.0])
    one = error_vs_discard(scores, same, sides, threshold=0.5, fractions=[0, 0.25, 0.5, 0.75])
    two = error_vs_discard(scores, same, np.minimum(*sides), threshold=0.5, fractions=[0, 0.25, 0.5, 0.75])
    assert one.frr[:3].tolist() == two.frr[:3].tolist() == [0.5, 0, 0]
    assert one.far.tolist() == two.far.tolist() == [0.5, 0.5, 0, 0]
    assert math.isnan(one.frr[3])  # no same pair remains
    assert repr(one).startswith("ErrorVersusDiscard(FRR 0.5000 and nan at discarded fractions 0 and 0.75")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of far and threshold must be given, not None and None"),
        ({"far": 0.1, "threshold": 0.5}, "exactly one of far and threshold must be given, not 0.1 and 0.5"),
        ({"far": 1.5}, r"far must be a rate in \(0, 1\)"),
        ({"threshold": math.nan}, "threshold must be a number, not nan"),
        ({"threshold": 0.5, "fractions": [1.0]}, r"fractions must be at least one number in \[0, 1\)"),
        ({"threshold": 0.5, "quality": [1.0]}, "quality must be a vector of 3 numbers"),
    ],
)
def test_error_vs_discard_rejects_invalid_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        error_vs_discard(**{"scores": [0.1, 0.2, 0.3], "same": [0, 1, 1], "quality": [1.0, 2.0, 3.0], **arguments})


def test_qualities_of_both_sides_may_be_one_array():
    scores, same, sides = [0.9, 0.8, 0.2, 0.1], [1, 1, 1, 0], [[5.0, 5.0, 1.0, 3.0], [9.0, 4.0, 2.0, 6.0]]
    first = error_vs_discard(scores, same, (sides[0], sides[1]), threshold=0.5)
    second = error_vs_discard(scores, same, np.array(sides), threshold=0.5)
    assert first.frr.tolist() == second.frr.tolist()
