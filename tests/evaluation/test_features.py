import math

import numpy as np
import pytest
import torch
from sklearn import decomposition
from torch import nn

import oracle
from hypersphere import evaluation
from hypersphere.evaluation import (
    angular_fisher_score,
    angular_visual_hardness,
    class_angles,
    concatenate,
    fit_pca,
    inter_class_angle,
    intra_class_angle,
    mirrored_features,
    pair_angles,
    patch_features,
    smallest_angle,
    smallest_margin,
)
from hypersphere.training import Batches

from . import reference


def labelled(n=60, d=5, classes=4, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, d)) + 0.5, rng.integers(0, classes, n)


def test_fisher_score():
    x, y = labelled()
    assert angular_fisher_score(x, y) == pytest.approx(reference.fisher(x, y))
    assert angular_fisher_score(torch.tensor(x), torch.tensor(y)) == pytest.approx(reference.fisher(x, y))
    assert angular_fisher_score(x * 2.0, y + 5) == pytest.approx(reference.fisher(x, y))
    tight = [[1.0, 0.0], [1.0, 0.01], [0.0, 1.0], [0.01, 1.0]]
    assert angular_fisher_score(tight, [0, 0, 1, 1]) < 0.01 < angular_fisher_score(tight, [0, 1, 0, 1])
    assert angular_fisher_score(np.ones((4, 2)), [0, 0, 1, 1]) == math.inf
    for seed in range(5):
        x, y = labelled(40, 3 + seed, 2 + seed, seed)
        assert angular_fisher_score(x, y) == pytest.approx(reference.fisher(x, y))
    x, y = labelled()
    for bad, words in (
        ((x, y[:3]), "60 integers"),
        ((x, y * 0), "at least two classes"),
        ((x[:0], y[:0]), "non-empty"),
    ):
        with pytest.raises(ValueError, match=words):
            angular_fisher_score(*bad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [2, 64, 512])
def test_the_fisher_score_of_collapsed_features_is_infinite_and_not_noise(dtype, dim):
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


def test_visual_hardness():
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
    with pytest.raises(ValueError, match=r"labels must be in \[0, 4\), not '9 \(row 1\)'"):
        angular_visual_hardness(x[:2], [0, 9], w)


def test_visual_hardness_in_blocks():
    rng = np.random.default_rng(1)
    x, w, y = rng.standard_normal((1030, 3)), rng.standard_normal((4100, 3)), rng.integers(0, 4100, 1030)
    theta = np.arccos(np.clip(reference.unit(x) @ reference.unit(w).T, -1, 1))
    np.testing.assert_allclose(angular_visual_hardness(x, y, w), theta[np.arange(1030), y] / theta.sum(1), atol=1e-9)


@pytest.mark.parametrize("rows", [7, 1024])
def test_angles_of_all_pairs(monkeypatch, rows):
    monkeypatch.setattr("hypersphere.evaluation.angles.ROWS", rows)
    x, y = labelled()
    found = class_angles(x, y, bins=12)
    angles = {True: [], False: []}
    for i in range(len(x)):
        for j in range(i):
            angles[bool(y[i] == y[j])].append(oracle.angle(x[i], x[j]))
    for kind, mine in ((True, found.positive), (False, found.negative)):
        counts, edges = np.histogram(angles[kind], 12, (0, math.pi))
        assert mine.histogram.tolist() == counts.tolist()
        np.testing.assert_allclose(found.edges, edges)
        assert mine.count == len(angles[kind])
        expected = [np.mean(angles[kind]), np.std(angles[kind]), min(angles[kind]), max(angles[kind])]
        assert [mine.mean, mine.std, mine.least, mine.greatest] == pytest.approx(expected)
    assert found.margin == pytest.approx(min(angles[False]) - max(angles[True]))
    assert 0 < found.overlap < 1
    assert smallest_angle(x) == pytest.approx(min(angles[True] + angles[False]))


def test_angles_of_given_pairs():
    x, y = labelled()
    first, second = np.triu_indices(len(x), 1)
    one, two = class_angles(x, y), pair_angles(x[first], x[second], y[first] == y[second])
    assert one.positive.histogram.tolist() == two.positive.histogram.tolist()
    assert repr(one) == repr(two)
    assert one.overlap == two.overlap
    opposite = pair_angles([[1.0, 0.0]] * 2, [[-1.0, 0.0], [1.0, 0.0]], [False, True], bins=4)
    assert opposite.negative.histogram.tolist() == [0, 0, 0, 1]  # pi itself is in the last bin
    for bad, words in (
        (lambda: class_angles(x, np.arange(60)), r"labels must be such that there is a positive \(same\) pair"),
        (lambda: class_angles(x, y * 0), r"there is a negative \(different\) pair"),
        (lambda: class_angles(x, y, bins=0), "bins must be a whole number >= 1"),
        (lambda: pair_angles(x, x, np.ones(60)), "at least one negative"),
        (lambda: smallest_angle(x[:1]), "at least two rows"),
    ):
        with pytest.raises(ValueError, match=words):
            bad()


def satisfied(m, classes):
    """Whether classes are tighter than close for every angle that class vectors may have."""
    angles = [2 * math.pi / classes] if classes > 2 else np.linspace(0.01, math.pi, 4001)
    return all(intra_class_angle(m, a, classes=classes) <= inter_class_angle(m, a) + 1e-9 for a in angles)


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_margin_bounds_are_where_the_inequalities_begin_to_hold(classes):
    bound = smallest_margin(classes)
    assert bound == (evaluation.M_MIN_BINARY if classes == 2 else evaluation.M_MIN_MULTICLASS)
    assert satisfied(bound + 1e-6, classes)
    assert not satisfied(bound - 1e-3, classes)
    for m in np.linspace(1.1, bound - 1e-3, 20):
        assert not satisfied(m, classes)


def test_the_angle_between_classes_is_what_the_decision_rule_leaves():
    """In the plane: samples with m·θ₁ < θ₂ of two class vectors, as close as they come."""
    m, between = 3.0, 1.2
    t = np.linspace(-math.pi, math.pi, 40_001)
    to_first = np.abs(t)
    to_second = np.abs((t - between + math.pi) % (2 * math.pi) - math.pi)
    one, two = t[m * to_first < to_second], t[m * to_second < to_first]
    assert two.min() - one.max() == pytest.approx(inter_class_angle(m, between), abs=1e-3)
    assert one.max() - one.min() == pytest.approx(intra_class_angle(m, between), abs=1e-3)
    for bad in (lambda: inter_class_angle(0.5, 1.0), lambda: inter_class_angle(2, 4.0), lambda: smallest_margin(1)):
        with pytest.raises(ValueError, match="must be"):
            bad()


@pytest.mark.parametrize(("n", "d"), [(80, 6), (6, 6), (5, 12)])
@pytest.mark.parametrize("whiten", [False, True])
def test_pca_is_scikit_learns(n, d, whiten):
    rng = np.random.default_rng(0)
    x, new = rng.standard_normal((n, d)) @ rng.standard_normal((d, d)) + 3, rng.standard_normal((7, d))
    mine, theirs = fit_pca(x, 3, whiten=whiten), decomposition.PCA(3, whiten=whiten, svd_solver="full").fit(x)
    sign = np.sign((mine.directions.numpy() * theirs.components_).sum(1))
    np.testing.assert_allclose(mine.directions.numpy() * sign[:, None], theirs.components_, atol=1e-9)
    np.testing.assert_allclose(mine.variances, theirs.explained_variance_, rtol=1e-9)
    np.testing.assert_allclose(mine(new).numpy() * sign, theirs.transform(new), atol=1e-8)
    np.testing.assert_allclose(mine.inverse(mine(new)), theirs.inverse_transform(theirs.transform(new)), atol=1e-8)
    assert mine.kept == pytest.approx(theirs.explained_variance_ratio_.sum())
    assert (mine.directions.amax(1) == mine.directions.abs().amax(1)).all()


def test_pca_by_share_of_variance_and_types():
    x = np.random.default_rng(0).standard_normal((50, 6)) * [5, 4, 3, 1, 0.5, 0.1]
    for share in (0.3, 0.8, 0.99):
        theirs = decomposition.PCA(share, svd_solver="full").fit(x)
        assert len(fit_pca(x, share).variances) == theirs.n_components_
    whole = fit_pca(x)
    assert whole.kept == pytest.approx(1)
    narrow = whole(torch.tensor(x).half())
    assert narrow.dtype == torch.float32
    np.testing.assert_allclose(whole.inverse(whole(x)), x, atol=1e-9)
    white = fit_pca(x, whiten=True)(x)
    np.testing.assert_allclose(torch.cov(white.T), np.eye(6), atol=1e-9)
    flat = x * [1, 1, 1, 1, 0, 0]
    for bad, words in (
        (lambda: fit_pca(x, 7), "components must be a whole number from 1 to 6, a share"),
        (lambda: fit_pca(x, 1.5), "not 1.5"),
        (lambda: fit_pca(x[:1]), "at least two rows"),
        (lambda: fit_pca(flat, 5, whiten=True), "components must be at most 4, the rank of the features"),
        (lambda: whole(x[:, :3]), "features must be a matrix with 6 columns"),
        (lambda: whole.inverse(x[:, :3]), "projected must be a matrix with 6 columns"),
    ):
        with pytest.raises(ValueError, match=words):
            bad()
    assert fit_pca(flat, 5).variances[-1] >= 0
    assert "6 -> 4, whitened, 100.0% of the variance" in repr(fit_pca(flat, 4, whiten=True))


class Probe(nn.Module):
    """Features that tell whether batch norm was in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.frozen = nn.Dropout(0.9)

    def forward(self, images):
        assert not torch.is_grad_enabled()
        return self.frozen(self.norm(images)).flatten(1)


def test_mirror_images():
    model, images = Probe(), torch.randn(5, 1, 2, 3)
    model.frozen.eval()
    found = mirrored_features(model, images, batch=2)
    torch.testing.assert_close(found[:, :6], images.flatten(1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[:, 6:], images.flip(-1).flatten(1), atol=1e-4, rtol=1e-4)
    assert (model.training, model.norm.training, model.frozen.training) == (True, True, False)
    unit = mirrored_features(model, images, unit=True)
    torch.testing.assert_close(unit.square().sum(1), torch.full((5,), 2.0))
    # the cosine of two such embeddings does not change when an image is mirrored and both halves with it
    flipped = mirrored_features(model, images.flip(-1))
    torch.testing.assert_close(flipped, torch.cat([found[:, 6:], found[:, :6]], 1))


def test_images_of_bytes_are_scaled_as_in_training_and_arrays_are_taken():
    images = np.random.default_rng(0).integers(0, 256, (5, 1, 4, 6), dtype=np.uint8)
    scaled = next(iter(Batches(torch.from_numpy(images), torch.zeros(5), 5)))[0]
    model, boxes = nn.Flatten(), [(0, 0, 4, 4), (1, 1, 2, 4)]
    for given in (images, torch.from_numpy(images), scaled, scaled.numpy()):
        torch.testing.assert_close(
            mirrored_features(model, given, batch=np.int64(2)), mirrored_features(model, scaled), rtol=0, atol=0
        )
        torch.testing.assert_close(
            patch_features(model, given, boxes), patch_features(model, scaled, boxes), rtol=0, atol=0
        )
    with pytest.raises(ValueError, match="images must be a tensor or an array of numbers"):
        mirrored_features(model, "faces")


def test_a_model_that_fails_gets_its_mode_back():
    model = nn.Linear(3, 3).train()
    with pytest.raises(RuntimeError):
        mirrored_features(model, torch.zeros(2, 1, 2, 2))
    assert model.training


def test_patches():
    images = torch.randn(4, 1, 4, 6)
    boxes = [(0, 0, 4, 4), (0, 2, 4, 4), (1, 1, 2, 4)]
    found = patch_features(lambda patch: 7 * patch.flatten(1), images, boxes, batch=3)
    assert found.shape == (4, 16 + 16 + 8)
    expected = [reference.unit(p.flatten(1)) for p in (images[..., :4], images[..., 2:], images[..., 1:3, 1:5])]
    np.testing.assert_allclose(found, np.concatenate(expected, 1), atol=1e-6)
    three = patch_features([torch.nn.Flatten()] * 3, images, boxes, mirror=True)
    assert three.shape == (4, 80)
    torch.testing.assert_close(three.square().sum(1), torch.full((4,), 3.0))
    for bad, words in (
        (([nn.Flatten()] * 2, images, boxes), "models must be one model or one for each of the 3 boxes, not 2"),
        ((nn.Flatten(), images, [(0, 3, 4, 4)]), r"inside \(4, 6\), not \(0, 3, 4, 4\)"),
        ((nn.Flatten(), images, []), "boxes must be at least one"),
        ((nn.Flatten(), images[:0], boxes), "images must be a non-empty batch"),
    ):
        with pytest.raises(ValueError, match=words):
            patch_features(*bad)


def test_concatenation():
    a, b = np.random.default_rng(0).standard_normal((2, 3, 4))
    np.testing.assert_array_equal(concatenate(a, b), np.concatenate([a, b], 1))
    np.testing.assert_allclose(concatenate(a, b, unit=True), np.concatenate([reference.unit(a), reference.unit(b)], 1))
    with pytest.raises(ValueError, match=r"features\[1\] must be 3 rows like the first, not 2"):
        concatenate(a, b[:2])
    with pytest.raises(ValueError, match="at least one view"):
        concatenate()


def test_every_public_name_is_documented_with_an_example_or_is_a_result():
    for name in evaluation.__all__:
        thing = getattr(evaluation, name)
        if callable(thing):
            assert thing.__doc__, name
            assert ">>>" in thing.__doc__ or isinstance(thing, type), name
