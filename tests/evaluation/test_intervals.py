import math

import pytest
import torch
from sklearn import metrics

from hypersphere.evaluation import bootstrap, roc
from hypersphere.evaluation.intervals import as_groups, percentile_interval, resampled_weights


def test_bootstrap_over_pairs_matches_the_large_sample_formula():
    generator = torch.Generator().manual_seed(1)
    same = torch.arange(600) % 2 == 0
    scores = torch.randn(600, generator=generator) + 1.0 * same
    result = bootstrap(scores, same, samples=400, generator=torch.Generator().manual_seed(2))
    a = result.value  # Hanley and McNeil 1982
    q1, q2 = a / (2 - a), 2 * a * a / (1 + a)
    error = math.sqrt((a * (1 - a) + 299 * (q1 - a * a) + 299 * (q2 - a * a)) / 300**2)
    assert result.value == pytest.approx(metrics.roc_auc_score(same, scores))
    assert (result.high - result.low) / 2 == pytest.approx(1.96 * error, rel=0.2)
    again = bootstrap(scores, same, samples=400, generator=torch.Generator().manual_seed(2))
    assert result == again
    assert str(result).endswith("(95 %)")


def test_bootstrap_over_identities_is_wider_if_people_differ():
    generator = torch.Generator().manual_seed(3)
    people = 30
    bias = torch.randn(people, generator=generator)  # all pairs of a person score high or low
    first = torch.randint(people, (1500,), generator=generator)
    second = torch.where(torch.arange(1500) % 2 == 0, first, torch.randint(people, (1500,), generator=generator))
    same = first == second
    scores = bias[first] + bias[second] + 1.0 * same + 0.3 * torch.randn(1500, generator=generator)

    def width(**more):
        result = bootstrap(scores, same, "eer", samples=200, generator=torch.Generator().manual_seed(4), **more)
        assert result.low <= result.value <= result.high
        return result.high - result.low

    assert width(identities=(first, second)) > 1.5 * width()
    with pytest.raises(ValueError, match="identities must be equal exactly where same is True"):
        width(identities=(first, first))


def test_bootstrap_accepts_callables_and_rejects_invalid_arguments():
    scores, same = torch.arange(40.0), torch.arange(40) % 3 > 0
    result = bootstrap(scores, same, lambda curve: curve.tar_at(0.1), samples=20)
    assert result.value == roc(scores, same).tar_at(0.1)
    for arguments, message in (
        ({"statistic": "tar"}, r"such as lambda roc: roc.tar_at\(1e-3\), not 'tar'"),
        ({"statistic": "auk"}, "statistic must be one of 'auc', 'eer', 'best_accuracy'"),
        ({"samples": 1}, "samples must be an integer >= 2"),
        ({"level": 95}, r"level must be a fraction in \(0, 1\)"),
        ({"level": "high"}, r"level must be a fraction in \(0, 1\), not 'high'"),
        ({"identities": 3}, "identities must be two vectors of labels or one vector of 40 labels, not 3"),
    ):
        with pytest.raises(ValueError, match=message):
            bootstrap(scores, same, **arguments)
    few = bootstrap([0.1, 0.2], [1, 0], identities=([0, 0], [0, 1]), samples=20)  # half of the samples lack one kind
    assert (few.low, few.high) == (0, 0)


def test_bootstrap_over_groups_is_the_cluster_bootstrap_of_pairs():
    # All pairs of a group are copies, so that resampling groups is resampling one pair of each.
    generator = torch.Generator().manual_seed(5)
    scores, same = torch.randn(200, generator=generator), torch.arange(200) % 2 == 0
    scores = scores + 1.0 * same
    groups = torch.arange(200)
    copies = [x.repeat_interleave(20) for x in (scores, same, groups)]

    def width(scores, same, groups=None):
        result = bootstrap(scores, same, identities=groups, samples=300, generator=torch.Generator().manual_seed(6))
        return result.high - result.low

    assert width(*copies) == pytest.approx(width(scores, same), rel=0.25)
    assert width(*copies[:2]) < 0.4 * width(*copies)


def test_resampled_weights_count_people_and_groups():
    same = torch.tensor([True, False, False, True])
    first, second = torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1, 2, 2])
    people = as_groups("groups", (first, second), same)
    draws = resampled_weights(same, people, torch.Generator().manual_seed(0))
    for _ in range(20):
        a, b, c, d = next(draws).tolist()
        # With n₀ + n₁ + n₂ = 3 draws of people: n₀, n₀·n₁, n₁·n₂, n₂.
        counts = (a, 3 - a - d, d)
        assert (b, c) == (counts[0] * counts[1], counts[1] * counts[2])
    grouped = resampled_weights(same, as_groups("groups", [5, 5, 6, 6], same), torch.Generator().manual_seed(0))
    for _ in range(20):
        weights = next(grouped).tolist()
        assert weights[0] == weights[1]
        assert weights[2] == weights[3]
        assert sum(weights) == 4


def test_percentile_interval_of_infinite_values_has_no_nan():
    values = iter([math.inf, math.inf, 1.0, 2.0] * 25)
    draws = iter([torch.ones(1)] * 100)
    interval = percentile_interval(1.0, lambda weights: next(values), draws, 100, 0.9)
    assert (interval.low, interval.high) == (1.0, math.inf)
