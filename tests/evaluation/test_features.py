import numpy as np
import pytest
import torch
from sklearn import decomposition
from torch import nn

from hypersphere import evaluation
from hypersphere.evaluation import (
    concatenate,
    fit_pca,
    mirrored_features,
    patch_features,
)
from hypersphere.training import Batches

from . import reference


@pytest.mark.parametrize(("n", "d"), [(80, 6), (6, 6), (5, 12)])
@pytest.mark.parametrize("whiten", [False, True])
def test_fit_pca_matches_scikit_learn(n, d, whiten):
    rng = np.random.default_rng(0)
    x, new = rng.standard_normal((n, d)) @ rng.standard_normal((d, d)) + 3, rng.standard_normal((7, d))
    ours, theirs = fit_pca(x, 3, whiten=whiten), decomposition.PCA(3, whiten=whiten, svd_solver="full").fit(x)
    sign = np.sign((ours.directions.numpy() * theirs.components_).sum(1))
    np.testing.assert_allclose(ours.directions.numpy() * sign[:, None], theirs.components_, atol=1e-9)
    np.testing.assert_allclose(ours.variances, theirs.explained_variance_, rtol=1e-9)
    np.testing.assert_allclose(ours(new).numpy() * sign, theirs.transform(new), atol=1e-8)
    np.testing.assert_allclose(ours.inverse(ours(new)), theirs.inverse_transform(theirs.transform(new)), atol=1e-8)
    assert ours.explained_variance_ratio == pytest.approx(theirs.explained_variance_ratio_.sum())
    assert (ours.directions.amax(1) == ours.directions.abs().amax(1)).all()


def six_dimensional_features():
    return np.random.default_rng(0).standard_normal((50, 6)) * [5, 4, 3, 1, 0.5, 0.1]


def test_fit_pca_selects_components_by_fraction_of_variance():
    x = six_dimensional_features()
    for fraction in (0.3, 0.8, 0.99):
        theirs = decomposition.PCA(fraction, svd_solver="full").fit(x)
        assert len(fit_pca(x, fraction).variances) == theirs.n_components_
    assert fit_pca(x).explained_variance_ratio == pytest.approx(1)


def test_pca_forwards_its_deprecated_name():
    pca = fit_pca(six_dimensional_features(), 2)
    with pytest.warns(DeprecationWarning, match=r"Pca.kept is deprecated, use Pca.explained_variance_ratio"):
        assert pca.kept == pca.explained_variance_ratio


def test_pca_returns_float32_for_half_precision_and_inverts_exactly():
    x = six_dimensional_features()
    pca = fit_pca(x)
    assert pca(torch.tensor(x).half()).dtype == torch.float32
    np.testing.assert_allclose(pca.inverse(pca(x)), x, atol=1e-9)


def test_pca_whitening_gives_unit_covariance():
    x = six_dimensional_features()
    np.testing.assert_allclose(torch.cov(fit_pca(x, whiten=True)(x).T), np.eye(6), atol=1e-9)


def test_fit_pca_handles_rank_deficiency_and_rejects_invalid_arguments():
    x = six_dimensional_features()
    pca, flat = fit_pca(x), x * [1, 1, 1, 1, 0, 0]
    for call, message in (
        (lambda: fit_pca(x, 7), "components must be an integer from 1 to 6, a fraction"),
        (lambda: fit_pca(x, 1.5), "not 1.5"),
        (lambda: fit_pca(x[:1]), "at least two rows"),
        (lambda: fit_pca(flat, 5, whiten=True), "components must be at most 4, the rank of the features"),
        (lambda: pca(x[:, :3]), "features must be a matrix with 6 columns"),
        (lambda: pca.inverse(x[:, :3]), "projected must be a matrix with 6 columns"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert fit_pca(flat, 5).variances[-1] >= 0
    assert "6 -> 4, whitened, 100.0% of the variance" in repr(fit_pca(flat, 4, whiten=True))


@pytest.mark.parametrize(("n", "d"), [(80, 6), (5, 12)])
def test_fit_pca_without_centring_matches_a_singular_value_decomposition(n, d):
    x = np.random.default_rng(0).standard_normal((n, d)) + 3
    pca = fit_pca(x, 3, center=False)
    _, singular_values, rows = np.linalg.svd(x, full_matrices=False)
    signs = np.sign((pca.directions.numpy() * rows[:3]).sum(1))
    np.testing.assert_allclose(pca.directions.numpy() * signs[:, None], rows[:3], atol=1e-9)
    np.testing.assert_allclose(pca.variances, singular_values[:3] ** 2 / n)
    np.testing.assert_allclose(pca(x).numpy() * signs, x @ rows[:3].T, atol=1e-9)
    assert pca.explained_variance_ratio == pytest.approx((singular_values[:3] ** 2).sum() / (x**2).sum())
    assert not pca.mean.any()


class ModeProbe(nn.Module):
    """A model whose features depend on the modes of its submodules."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.frozen = nn.Dropout(0.9)

    def forward(self, images):
        assert not torch.is_grad_enabled()
        return self.frozen(self.norm(images)).flatten(1)


def test_mirrored_features_concatenate_both_views():
    model, images = ModeProbe(), torch.randn(5, 1, 2, 3)
    model.frozen.eval()
    features = mirrored_features(model, images, batch=2)
    torch.testing.assert_close(features[:, :6], images.flatten(1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(features[:, 6:], images.flip(-1).flatten(1), atol=1e-4, rtol=1e-4)
    assert (model.training, model.norm.training, model.frozen.training) == (True, True, False)
    unit = mirrored_features(model, images, unit=True)
    torch.testing.assert_close(unit.square().sum(1), torch.full((5,), 2.0))
    # Mirroring the images exchanges the two halves.
    flipped = mirrored_features(model, images.flip(-1))
    torch.testing.assert_close(flipped, torch.cat([features[:, 6:], features[:, :6]], 1))


def test_mirrored_features_scale_bytes_and_accept_arrays():
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


def test_mirrored_features_restore_the_mode_after_an_error():
    model = nn.Linear(3, 3).train()
    with pytest.raises(RuntimeError):
        mirrored_features(model, torch.zeros(2, 1, 2, 2))
    assert model.training


IMAGES = torch.randn(4, 1, 4, 6, generator=torch.Generator().manual_seed(0))
BOXES = [(0, 0, 4, 4), (0, 2, 4, 4), (1, 1, 2, 4)]
PATCHES = [IMAGES[..., :4], IMAGES[..., 2:], IMAGES[..., 1:3, 1:5]]


def test_patch_features_concatenate_without_normalisation():
    features = patch_features(lambda patch: 7 * patch.flatten(1), IMAGES, BOXES, batch=3)
    assert features.shape == (4, 16 + 16 + 8)
    np.testing.assert_array_equal(features, np.concatenate([7 * patch.flatten(1) for patch in PATCHES], 1))


def test_patch_features_normalise_each_patch_on_request():
    features = patch_features(lambda patch: 7 * patch.flatten(1), IMAGES, BOXES, unit=True, batch=3)
    expected = np.concatenate([reference.unit(patch.flatten(1)) for patch in PATCHES], 1)
    np.testing.assert_allclose(features, expected, atol=1e-6)
    mirrored = patch_features([nn.Flatten()] * 3, IMAGES, BOXES, mirror=True, unit=True)
    assert mirrored.shape == (4, 80)
    torch.testing.assert_close(mirrored.square().sum(1), torch.full((4,), 3.0))


@pytest.mark.parametrize(
    ("models", "images", "boxes", "message"),
    [
        ([nn.Flatten()] * 2, IMAGES, BOXES, "models must be one model or one for each of the 3 boxes, not 2"),
        (nn.Flatten(), IMAGES, [(0, 3, 4, 4)], r"inside \(4, 6\), not \(0, 3, 4, 4\)"),
        (nn.Flatten(), IMAGES, [], "boxes must be a list with at least one"),
        (nn.Flatten(), IMAGES[:0], BOXES, "images must be a non-empty batch"),
    ],
)
def test_patch_features_reject_invalid_arguments(models, images, boxes, message):
    with pytest.raises(ValueError, match=message):
        patch_features(models, images, boxes)


def test_concatenate_matches_numpy():
    a, b = np.random.default_rng(0).standard_normal((2, 3, 4))
    np.testing.assert_array_equal(concatenate(a, b), np.concatenate([a, b], 1))
    np.testing.assert_allclose(concatenate(a, b, unit=True), np.concatenate([reference.unit(a), reference.unit(b)], 1))
    with pytest.raises(ValueError, match=r"features\[1\] must be a matrix with 3 rows, as many as features\[0\], not"):
        concatenate(a, b[:2])
    with pytest.raises(ValueError, match="at least one view"):
        concatenate()


def test_public_functions_have_an_example():
    for name in evaluation.__all__:
        thing = getattr(evaluation, name)
        if callable(thing):
            assert thing.__doc__, name
            assert ">>>" in thing.__doc__ or isinstance(thing, type), name
