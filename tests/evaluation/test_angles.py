import math

import numpy as np
import pytest
import torch

import oracle
from hypersphere import evaluation
from hypersphere.evaluation import (
    angular_fisher_score,
    angular_visual_hardness,
    class_angles,
    inter_class_angle,
    intra_class_angle,
    pair_angles,
    smallest_angle,
    smallest_margin,
)

from . import reference


def labelled(n=60, d=5, classes=4, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, d)) + 0.5, rng.integers(0, classes, n)


def test_angular_fisher_score_matches_reference():
    x, y = labelled()
    assert angular_fisher_score(x, y) == pytest.approx(reference.fisher(x, y))
    assert angular_fisher_score(torch.tensor(x), torch.tensor(y)) == pytest.approx(reference.fisher(x, y))
    assert angular_fisher_score(x * 2.0, y + 5) == pytest.approx(reference.fisher(x, y))
    for seed in range(5):
        x, y = labelled(40, 3 + seed, 2 + seed, seed)
        assert angular_fisher_score(x, y) == pytest.approx(reference.fisher(x, y))


def test_angular_fisher_score_is_lower_for_compact_classes():
    x = [[1.0, 0.0], [1.0, 0.01], [0.0, 1.0], [0.01, 1.0]]
    assert angular_fisher_score(x, [0, 0, 1, 1]) < 0.01 < angular_fisher_score(x, [0, 1, 0, 1])


def test_angular_fisher_score_rejects_invalid_arguments():
    x, y = labelled()
    for arguments, message in (
        ((x, y[:3]), "60 integers"),
        ((x, y * 0), "at least two classes"),
        ((x[:0], y[:0]), "non-empty"),
        ((x[:3], [0, 1, 2]), "labels must contain a class with two or more samples"),
    ):
        with pytest.raises(ValueError, match=message):
            angular_fisher_score(*arguments)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [2, 64, 512])
def test_angular_fisher_score_is_infinite_for_collapsed_features(dtype, dim):
    generator = torch.Generator().manual_seed(dim)
    for classes in (2, 10):
        point = torch.randn(1, dim, generator=generator, dtype=torch.float64)
        x = (point * torch.linspace(0.5, 2, 200, dtype=torch.float64)[:, None]).to(dtype)
        labels = torch.randint(classes, (200,), generator=generator)
        assert angular_fisher_score(x, labels) == math.inf
        apart = point.expand(classes, dim) + 0.2 * torch.randn(classes, dim, generator=generator, dtype=torch.float64)
        spread = 0.05 * torch.randn(200, dim, generator=generator, dtype=torch.float64)
        near = (apart[labels] + spread).to(dtype)
        expected = reference.fisher(near.double().numpy(), labels.numpy())
        assert angular_fisher_score(near, labels) == pytest.approx(expected)


def test_angular_visual_hardness_matches_reference():
    x, y = labelled()
    w = np.random.default_rng(1).standard_normal((4, 5))
    expected = [oracle.angle(w[k], v) / sum(oracle.angle(u, v) for u in w) for v, k in zip(x, y, strict=True)]
    assert angular_visual_hardness(x, y, w).tolist() == pytest.approx(expected)
    half = angular_visual_hardness(torch.tensor(x).bfloat16(), y, torch.tensor(w).float().requires_grad_())
    assert half.dtype == torch.float32
    assert not half.requires_grad
    assert half.tolist() == pytest.approx(expected, abs=0.02)
    assert angular_visual_hardness(np.zeros((1, 5)), [2], w).tolist() == [0.25]
    assert angular_visual_hardness([[2.0, 0.0]], [0], [[1.0, 0.0]] * 3).tolist() == pytest.approx([1 / 3])
    with pytest.raises(ValueError, match=r"labels must be in \[0, 4\), not 9 \(row 1\)"):
        angular_visual_hardness(x[:2], [0, 9], w)


def test_angular_visual_hardness_matches_reference_over_several_blocks():
    rng = np.random.default_rng(1)
    x, w, y = rng.standard_normal((1030, 3)), rng.standard_normal((4100, 3)), rng.integers(0, 4100, 1030)
    theta = np.arccos(np.clip(reference.unit(x) @ reference.unit(w).T, -1, 1))
    np.testing.assert_allclose(angular_visual_hardness(x, y, w), theta[np.arange(1030), y] / theta.sum(1), atol=1e-9)


@pytest.mark.parametrize("block_rows", [7, 1024])
def test_class_angles_match_reference(monkeypatch, block_rows):
    monkeypatch.setattr("hypersphere.evaluation.angles.BLOCK_ROWS", block_rows)
    x, y = labelled()
    histograms = class_angles(x, y, bins=12)
    angles = {True: [], False: []}
    for i in range(len(x)):
        for j in range(i):
            angles[bool(y[i] == y[j])].append(oracle.angle(x[i], x[j]))
    for kind, distribution in ((True, histograms.positive), (False, histograms.negative)):
        counts, edges = np.histogram(angles[kind], 12, (0, math.pi))
        assert distribution.histogram.tolist() == counts.tolist()
        np.testing.assert_allclose(histograms.edges, edges)
        assert distribution.count == len(angles[kind])
        expected = [np.mean(angles[kind]), np.std(angles[kind]), min(angles[kind]), max(angles[kind])]
        assert [distribution.mean, distribution.std, distribution.min, distribution.max] == pytest.approx(expected)
    assert histograms.margin == pytest.approx(min(angles[False]) - max(angles[True]))
    assert 0 < histograms.overlap < 1
    assert smallest_angle(x) == pytest.approx(min(angles[True] + angles[False]))


def test_angle_distribution_forwards_deprecated_names():
    distribution = class_angles(np.eye(3), [0, 0, 1]).negative
    with pytest.warns(DeprecationWarning, match=r"AngleDistribution.least is deprecated, use AngleDistribution.min"):
        assert distribution.least == distribution.min
    with pytest.warns(DeprecationWarning, match="greatest"):
        assert distribution.greatest == distribution.max


def test_pair_angles_match_class_angles():
    x, y = labelled()
    first, second = np.triu_indices(len(x), 1)
    by_class, by_pair = class_angles(x, y), pair_angles(x[first], x[second], y[first] == y[second])
    assert by_class.positive.histogram.tolist() == by_pair.positive.histogram.tolist()
    assert repr(by_class) == repr(by_pair)
    assert by_class.overlap == by_pair.overlap
    opposite = pair_angles([[1.0, 0.0]] * 2, [[-1.0, 0.0], [1.0, 0.0]], [False, True], bins=4)
    assert opposite.negative.histogram.tolist() == [0, 0, 0, 1]  # the angle π is in the last bin


def test_angle_histograms_reject_invalid_arguments():
    x, y = labelled()
    for call, message in (
        (lambda: class_angles(x, np.arange(60)), r"labels must give at least one positive \(same\) pair"),
        (lambda: class_angles(x, y * 0), r"at least one negative \(different\) pair"),
        (lambda: class_angles(x, y, bins=0), "bins must be an integer >= 1"),
        (lambda: pair_angles(x, x, np.ones(60)), "at least one negative"),
        (lambda: smallest_angle(x[:1]), "at least two rows"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def classes_are_separated(m, classes):
    """Return True if classes are narrower than the gap between them, for every angle between the class vectors."""
    angles = [2 * math.pi / classes] if classes > 2 else np.linspace(0.01, math.pi, 4001)
    return all(intra_class_angle(m, a, classes=classes) <= inter_class_angle(m, a) + 1e-9 for a in angles)


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_smallest_margin_is_the_smallest_that_separates_classes(classes):
    bound = smallest_margin(classes)
    assert bound == (evaluation.M_MIN_BINARY if classes == 2 else evaluation.M_MIN_MULTICLASS)
    assert classes_are_separated(bound + 1e-6, classes)
    assert not classes_are_separated(bound - 1e-3, classes)
    for m in np.linspace(1.1, bound - 1e-3, 20):
        assert not classes_are_separated(m, classes)


def test_class_angle_formulas_reject_invalid_arguments():
    for call in (lambda: inter_class_angle(0.5, 1.0), lambda: inter_class_angle(2, 4.0), lambda: smallest_margin(1)):
        with pytest.raises(ValueError, match="must be"):
            call()
