import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.model_selection import KFold

from hypersphere.evaluation import cosine_scores, make_folds, pair_scores, verification, verify, verify_scores

from . import reference


def pairs(count=120, dim=6, seed=0, shift=0.0):
    rng = np.random.default_rng(seed)
    same = np.arange(count) % 2 == 0
    first = rng.standard_normal((count, dim))
    second = np.where(same[:, None], first + 1.2 * rng.standard_normal((count, dim)), rng.standard_normal((count, dim)))
    return first + shift, second + shift, same


@pytest.mark.parametrize("subtract_mean", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_verify_fold_accuracies_match_brute_force(subtract_mean, seed):
    first, second, same = pairs(seed=seed, shift=2.0)
    fold = np.random.default_rng(seed).permutation(np.arange(len(same)) % 5)
    result = verify(first, second, same, folds=fold, subtract_mean=subtract_mean)
    expected = reference.fold_accuracies(first, second, same, fold, subtract_mean=subtract_mean)
    # The middle of an even number of best thresholds depends on the direction of the search.
    for value, candidates in zip(result.accuracies.tolist(), expected, strict=True):
        assert min(abs(value - e) for e in candidates) < 1e-12
    assert result.accuracy == pytest.approx(result.accuracies.mean().item())
    assert result.best_accuracy >= result.accuracy - 1e-12


def test_verify_subtracts_the_mean_of_the_other_folds():
    first, second, same = pairs(shift=5.0)
    original, centred = (verify(first, second, same, subtract_mean=flag) for flag in (False, True))
    assert centred.auc > original.auc
    fold = make_folds(same)
    train = (fold != 3).numpy()
    center = np.concatenate([first[train], second[train]]).mean(0)
    expected = cosine_scores(first - center, second - center)[fold == 3]
    torch.testing.assert_close(centred.scores[fold == 3], expected)


def test_make_folds_gives_the_official_folds_of_lfw():
    same = np.tile(np.repeat([True, False], 300), 10)
    assert make_folds(same).tolist() == np.repeat(np.arange(10), 600).tolist()
    k_fold = [test.tolist() for _, test in KFold(10).split(same)]
    assert [(make_folds(same) == k).nonzero().flatten().tolist() for k in range(10)] == k_fold


@given(st.integers(2, 12), st.integers(0, 40), st.integers(0, 40), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_make_folds_balances_both_kinds(folds, more, others, random):
    same = [True] * (folds + more) + [False] * (folds + others)
    random.shuffle(same)
    fold, flags = make_folds(same, folds), torch.tensor(same)
    for kind in (flags, ~flags):
        counts = fold[kind].bincount(minlength=folds)
        assert counts.min() >= 1
        assert counts.max() - counts.min() <= 1


@given(st.floats(0.1, 100), st.floats(-10, 10))
@settings(max_examples=20, deadline=None)
def test_verify_scores_is_invariant_to_scale_and_offset(scale, offset):
    first, second, same = pairs()
    scores = cosine_scores(first, second)
    one, two = verify_scores(scores, same), verify_scores(scores * scale + offset, same)
    assert one.accuracies.tolist() == two.accuracies.tolist()


def test_verify_is_invariant_to_norms_and_matches_verify_scores():
    first, second, same = pairs()
    one = verify(first, second, same)
    two = verify(first * 7, second * np.random.default_rng(0).uniform(0.1, 9, (len(same), 1)), same)
    three = verify_scores(
        np.array([a @ b for a, b in zip(reference.unit(first), reference.unit(second), strict=True)]), same
    )
    assert one.accuracies.tolist() == two.accuracies.tolist() == three.accuracies.tolist()
    np.testing.assert_allclose(one.scores, (reference.unit(first) * reference.unit(second)).sum(1), atol=1e-12)
    assert one.tar == three.tar
    assert list(one.tar) == [1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6]


def test_verify_scores_does_not_choose_thresholds_on_the_test_fold():
    """On random scores the best threshold gives more than 50 % accuracy, a threshold from other folds does not."""
    rng = np.random.default_rng(0)
    same = np.arange(400) % 2 == 0
    results = [verify_scores(rng.standard_normal(400), same) for _ in range(12)]
    assert np.mean([f.best_accuracy for f in results]) > 0.52
    assert abs(np.mean([f.accuracy for f in results]) - 0.5) < 0.02


@pytest.mark.parametrize("make", [torch.tensor, lambda v: torch.tensor(v).bfloat16(), lambda v: v.astype(np.float16)])
def test_verify_accepts_arrays_tensors_and_half_precision(make):
    first, second, same = pairs()
    result = verify(make(first), make(second), same)
    assert result.accuracy == pytest.approx(verify(first, second, same).accuracy, abs=0.05)
    assert result.scores.dtype == torch.float64


def test_verification_repr_labels_accuracies_and_thresholds():
    result = verify_scores([0.9, 0.3, 0.8, 0.1, 0.2, 0.4], [1, 0, 1, 0, 1, 0], folds=3, far=[])
    lines = repr(result).splitlines()
    assert lines[1].split()[:2] == ["accuracy", f"{result.accuracy:.4f}"]
    # With a threshold of 0.6 only the same pair with score 0.2 is wrong.
    assert lines[2].split()[:3] == ["best", "accuracy", f"{5 / 6:.4f}"]
    assert "(threshold 0.6000, chosen on the test pairs)" in lines[2]
    assert result.best_threshold == pytest.approx(0.6)


def test_verification_repr_and_intervals():
    first, second, same = pairs()
    result = verify(first, second, same)
    text = repr(result)
    assert "threshold chosen on the other folds" in text
    assert "TAR" in text
    for point, line in zip(result.points, text.splitlines()[-len(result.points) :], strict=True):
        rates = f"TAR {point.true_rate:.4f} at FAR {point.requested_rate:g}, threshold {point.threshold:.4f}"
        assert line.strip().startswith(rates)
        assert ("(not resolved by 60 different pairs)" in line) == (point.requested_rate < 1 / 60)
    for statistic in ("accuracy", "auc", lambda curve: curve.tar_at(0.1)):
        interval = result.interval(statistic, samples=100, generator=torch.Generator().manual_seed(0))
        assert interval.low <= interval.value <= interval.high
    assert result.interval(samples=10).value == result.accuracy
    with pytest.raises(ValueError, match="statistic must be one of 'accuracy', 'auc'"):
        result.interval("mean")


def test_cosine_scores_of_zero_and_huge_embeddings():
    scores = cosine_scores([[0.0, 0.0], [1e300, 0.0], [3.0, 4.0]], [[1.0, 0.0], [1e300, 0.0], [4.0, 3.0]])
    assert scores.tolist() == pytest.approx([0.0, 1.0, 0.96])


def test_verify_accepts_numpy_numbers():
    first, second, same = pairs()
    plain = verify(first, second, same, folds=5, far=[0.25])
    for folds, far in ((np.int64(5), np.array([0.25])), (np.array(5), np.array([0.25], np.float32))):
        result = verify(first, second, same, folds=folds, far=far)
        assert torch.equal(result.fold, plain.fold)
        assert result.tar == plain.tar
        assert torch.equal(make_folds(same, folds), plain.fold)
    for invalid in (True, 5.0, np.float64(5), "5"):
        with pytest.raises(ValueError, match="folds must be an integer >= 2, or the fold of each pair"):
            verify(first, second, same, folds=invalid)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"second": np.ones((119, 6))}, "second must be a matrix with 120 rows, as many as first"),
        ({"second": np.ones((120, 5))}, "second must be a matrix with 6 columns"),
        ({"first": np.ones((0, 6))}, "first must be a non-empty matrix"),
        ({"same": np.ones(7, bool)}, "same must be a vector of 120 flags"),
        ({"same": np.ones(120, bool)}, "at least one negative"),
        ({"folds": 1}, "folds must be an integer >= 2"),
        ({"folds": 61}, "folds must be at most 60, the number of same pairs"),
        ({"folds": np.zeros(120, int)}, "folds must be at least two folds"),
        (
            {"folds": np.arange(120) % 2},
            "folds must each contain same and different pairs, but fold 1 has no same pair",
        ),
        ({"folds": np.arange(120) % 3 * 2}, "fold 1 has no same pair"),
        ({"folds": np.full(120, -1)}, "folds must be integers >= 0, not -1"),
        ({"folds": np.zeros(7, int)}, "folds must be a vector of 120 integers"),
        ({"same": 1}, "same must be a vector of 120 flags"),
        ({"far": 0.1}, "far must be a sequence of numbers, not 0.1"),
        ({"far": [0.1, 1.0]}, r"far must be a rate in \(0, 1\), not 1.0"),
    ],
)
def test_verify_rejects_invalid_input(change, message):
    first, second, same = pairs()
    with pytest.raises(ValueError, match=message):
        verify(**({"first": first, "second": second, "same": same} | change))


def test_verify_names_a_row_that_is_not_finite():
    first, second, same = pairs()
    second[17, 3] = np.nan
    with pytest.raises(ValueError, match="second must be finite, but row 17 is not"):
        verify(first, second, same)


def test_pair_scores_equals_cosine_scores_of_gathered_rows(monkeypatch):
    monkeypatch.setattr(verification, "SCORE_ROWS", 7)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(20, 5, generator=generator)
    first, second = torch.randint(20, (2, 50), generator=generator)
    assert torch.equal(pair_scores(features, first, second), cosine_scores(features[first], features[second]))
    for arguments, message in (
        (([0, 20], [0, 1]), r"first must be row numbers in 0\.\.19, not 20"),
        (([0, 1], [0, -1]), r"second must be row numbers in 0\.\.19, not -1"),
        (([0, 1], [0]), "second must be a vector of 2 integers"),
    ):
        with pytest.raises(ValueError, match=message):
            pair_scores(features, *arguments)
