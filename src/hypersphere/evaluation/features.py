r"""Features at test time: concatenation of several views of an image (mirror image, patches), and PCA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils import parametrize

from hypersphere import _numerics, sphere
from hypersphere._deprecation import deprecated_attribute
from hypersphere._modes import evaluation_mode
from hypersphere._validation import is_integer, require
from hypersphere.evaluation._arrays import Array, as_features, as_tensor, blocks

__all__ = ["Pca", "concatenate", "fit_pca", "mirrored_features", "patch_features"]

Embedding: TypeAlias = Callable[[Tensor], Tensor]


# Several views of an image -------------------------------------------------------------------------------------------


def concatenate(*features: Array, unit: bool = False) -> Float[Tensor, "samples total_dim"]:
    """Concatenate the features of several views of the same N images to (N, d₁ + d₂ + …), in float32 or wider.

    Args:
        features: (N, dᵢ) for each view, for example of the images and of their mirror images.
        unit: normalise the features of each view first, so that all views have the same weight in the cosine.

    Example:
        >>> concatenate(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]]), unit=True)
        tensor([[0.6000, 0.8000, 0.0000, 1.0000]])
    """
    if not features:
        raise ValueError("features must be given for at least one view")
    views = [as_features(f"features[{i}]", view) for i, view in enumerate(features)]
    for i, view in enumerate(views):
        accepted = f"a matrix with {len(views[0])} rows, as many as features[0]"
        require(len(view) == len(views[0]), f"features[{i}]", accepted, tuple(view.shape))
    wide = [sphere.row_directions(view) if unit else _numerics.widen(view) for view in views]
    return torch.cat([view.to(wide[0].device) for view in wide], dim=1)


def mirrored_features(
    model: Embedding, images: Array, *, unit: bool = False, batch: int = 256
) -> Float[Tensor, "samples total_dim"]:
    """Concatenate the features of images and of their mirror images to (N, 2d), as in the thesis, section 2.3.6.

    A module is put into evaluation mode during the call, and gradients are disabled.

    Args:
        model: maps images (N, channels, height, width) to features (N, d).
        images: mirrored along their last dimension. Images of dtype uint8 are scaled to [0, 1], as by
            `data.Batches`; others are passed to the model unchanged.
        unit: normalise the features of each view first, so that both views have the same weight in the cosine.
        batch: number of images per call of the model.

    Example:
        >>> mirrored_features(lambda images: images.flatten(1), torch.tensor([[[[1.0, 2.0]]]]))
        tensor([[1., 2., 2., 1.]])
    """
    pixels = as_tensor("images", images)
    return concatenate(*(_embed(model, pixels, flip, batch) for flip in (False, True)), unit=unit)


def patch_features(
    models: Embedding | Sequence[Embedding],
    images: Array,
    boxes: Sequence[tuple[int, int, int, int]],
    *,
    mirror: bool = False,
    unit: bool = False,
    batch: int = 256,
) -> Float[Tensor, "samples total_dim"]:
    """Concatenate the features of several patches of each image.

    With three patches this is the ensemble of the thesis (appendix A.8), which concatenates features as they are.

    Args:
        models: one model for all patches, or one per patch.
        images: (N, channels, height, width). Images of dtype uint8 are scaled to [0, 1].
        boxes: (top, left, height, width) of each patch.
        mirror: use the `mirrored_features` of each patch.
        unit: normalise the features of each patch first, so that all patches have the same weight in the cosine.
        batch: number of images per call of a model.

    Example:
        >>> image = torch.tensor([[[[3.0, 4.0, 0.0]]]])
        >>> boxes = [(0, 0, 1, 2), (0, 1, 1, 2)]
        >>> patch_features(lambda patch: patch.flatten(1), image, boxes)
        tensor([[3., 4., 4., 0.]])
        >>> patch_features(lambda patch: patch.flatten(1), image, boxes, unit=True)
        tensor([[0.6000, 0.8000, 1.0000, 0.0000]])
    """
    are_boxes = isinstance(boxes, (list, tuple)) and len(boxes) > 0 and all(np.shape(box) == (4,) for box in boxes)
    require(are_boxes, "boxes", "a list with at least one (top, left, height, width)", boxes)
    model_per_box = [models] * len(boxes) if callable(models) else list(models)
    accepted = f"one model or one for each of the {len(boxes)} boxes"
    require(len(model_per_box) == len(boxes), "models", accepted, len(model_per_box))
    pixels = as_tensor("images", images)
    views = []
    for model, box in zip(model_per_box, boxes, strict=True):
        top, left, height, width = box
        is_inside = min(top, left) >= 0 and min(height, width) >= 1
        is_inside = is_inside and top + height <= pixels.shape[-2] and left + width <= pixels.shape[-1]
        require(is_inside, "boxes", f"(top, left, height, width) inside {tuple(pixels.shape[-2:])}", box)
        patch = pixels[..., top : top + height, left : left + width]
        views.append(mirrored_features(model, patch, batch=batch) if mirror else _embed(model, patch, False, batch))
    return concatenate(*views, unit=unit)


@torch.no_grad()
def _embed(model: Embedding, images: Tensor, flip: bool, batch: int) -> Tensor:
    """Return the features of all images, or of their mirror images."""
    require(callable(model), "model", "a callable that maps images to features", model)
    require(images.ndim >= 2 and len(images) > 0, "images", "a non-empty batch (N, …)", tuple(images.shape))
    require(is_integer(batch, 1), "batch", "an integer >= 1", batch)
    features = []
    with evaluation_mode(model), parametrize.cached():
        for _, rows in blocks(images, batch):
            pixels = rows.float() / 255 if rows.dtype == torch.uint8 else rows
            features.append(model(pixels.flip(-1) if flip else pixels))
    return torch.cat(features)


# Principal components ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Pca:
    """A projection onto principal directions. Call it with features.

    Attributes:
        mean: float64, subtracted from features: the mean of the training features, or zeros.
        directions: float64, orthonormal rows. The entry of largest magnitude in each row is positive.
        variances: float64, of the training features along the directions, descending.
        total_variance: the sum of the variances along all directions, including those that were dropped.
        whiten: True if outputs are divided by the standard deviations.
    """

    mean: Float[Tensor, " dim"]
    directions: Float[Tensor, "components dim"]
    variances: Float[Tensor, " components"]
    total_variance: float
    whiten: bool = False

    kept = deprecated_attribute("kept", "explained_variance_ratio")

    @property
    def explained_variance_ratio(self) -> float:
        """Fraction of the total variance of the training features that the directions explain together."""
        return float(self.variances.sum()) / self.total_variance if self.total_variance else 1.0

    def __call__(self, features: Array) -> Float[Tensor, "samples components"]:
        """Project (N, d) features to (N, k), in float32 or wider."""
        x = as_features("features", features, like=self.directions)
        dtype = _numerics.compute_dtype(x.dtype)
        mean, scale = self.mean.to(x.device), self._output_scale().to(x.device)
        # Scaling the small basis instead of the outputs whitens without a second pass over the features.
        basis = self.directions.to(x.device) / scale[:, None]
        return torch.cat([((rows.double() - mean) @ basis.mT).to(dtype) for _, rows in blocks(x)])

    def inverse(self, projected: Array) -> Float[Tensor, "samples dim"]:
        """Return the (N, d) features closest to the mean whose projection is `projected`."""
        z = as_features("projected", projected, like=self.directions.mT)  # k columns
        mean, scale = self.mean.to(z.device), self._output_scale().to(z.device)
        x = (z.double() * scale) @ self.directions.to(z.device) + mean
        return x.to(_numerics.compute_dtype(z.dtype))

    def _output_scale(self) -> Tensor:
        """Return the standard deviation along each direction if outputs are whitened, else ones."""
        return self.variances.sqrt() if self.whiten else torch.ones_like(self.variances)

    def __repr__(self) -> str:
        k, d = self.directions.shape
        whitened = ", whitened" if self.whiten else ""
        return f"Pca({d} -> {k}{whitened}, {self.explained_variance_ratio:.1%} of the variance)"


def fit_pca(
    features: Array, components: int | float | None = None, *, whiten: bool = False, center: bool = True
) -> Pca:
    """Fit a principal component analysis to training features.

    Args:
        features: (N, d) with N ≥ 2.
        components: the number of directions. A float in (0, 1) selects the fewest directions with at least that
            fraction of the variance; None selects min(N, d).
        whiten: scale outputs to unit variance. The number of directions must then not exceed the rank of the features.
        center: subtract the mean of the features. If False, variances are about the origin, so that angles between
            projected features still refer to the origin of the feature space.

    Example:
        >>> pca = fit_pca([[0.0, 1.0], [2.0, 1.0], [4.0, 1.0]], components=1)
        >>> pca
        Pca(2 -> 1, 100.0% of the variance)
        >>> pca([[5.0, 1.0]])
        tensor([[3.]], dtype=torch.float64)
    """
    x = as_features("features", features)
    n, d = x.shape
    require(n >= 2, "features", "a matrix with at least two rows", tuple(x.shape))
    if center:
        mean = torch.stack([rows.double().sum(0) for _, rows in blocks(x)]).sum(0) / n
    else:
        mean = torch.zeros(d, dtype=torch.float64, device=x.device)
    if n >= d:
        # The (d, d) scatter matrix can be summed block by block, so the features may be memory-mapped.
        scatter = torch.zeros(d, d, dtype=torch.float64, device=x.device)
        for _, rows in blocks(x):
            centered = rows.double() - mean
            scatter.addmm_(centered.mT, centered)
        values, vectors = torch.linalg.eigh(scatter)
        scatter_values, directions = values.flip(0).clamp_min(0), vectors.mT.flip(0)  # eigh sorts ascending
    else:
        # With fewer samples than dimensions the (n, d) matrix is smaller than the scatter matrix.
        _, singular_values, directions = torch.linalg.svd(x.double() - mean, full_matrices=False)
        scatter_values = singular_values.square()
    variances = scatter_values / (n - 1 if center else n)  # the mean uses up one degree of freedom
    count = _component_count(components, variances)
    if whiten:
        floor = _numerics.rank_tolerance(variances.dtype, max(n, d)) * float(variances[0])
        rank = int((variances > floor).sum())
        require(count <= rank, "components", f"at most {rank}, the rank of the features, when whitening", count)
    directions = directions[:count]
    # The sign of an eigenvector is arbitrary. Fix it, so that results do not depend on the linear algebra library.
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    return Pca(mean, directions * largest.sign(), variances[:count], float(variances.sum()), whiten)


def _component_count(components: int | float | None, variances: Tensor) -> int:
    maximum = len(variances)
    if components is None:
        return maximum
    if isinstance(components, float) and 0 < components < 1:
        # All prefixes that explain less are too short. Rounding of the sums may count one prefix too many.
        return min(int((variances.cumsum(0) < components * variances.sum()).sum()) + 1, maximum)
    accepted = f"an integer from 1 to {maximum}, a fraction in (0, 1) or None"
    require(is_integer(components, 1, maximum), "components", accepted, components)
    return int(components)
