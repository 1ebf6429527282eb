r"""Principal components of features: fitted on training features, applied to any."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hypersphere import _numerics
from hypersphere._validation import is_integer, require
from hypersphere.evaluation.arrays import Array, as_features, blocks

__all__ = ["Pca", "fit_pca"]


@dataclass(frozen=True, eq=False, repr=False)
class Pca:
    """A projection on principal directions; call it on features.

    Attributes:
        mean: (d,) float64, of the training features.
        directions: (k, d) float64, orthonormal rows; the largest entry of each is positive.
        variances: (k,) float64, descending: those of the training features along the directions.
        total_variance: over all directions, kept or not.
        whiten: whether outputs are divided by the standard deviations.
    """

    mean: Tensor
    directions: Tensor
    variances: Tensor
    total_variance: float
    whiten: bool = False

    @property
    def kept(self) -> float:
        """The share of the training features' variance that is kept."""
        return float(self.variances.sum()) / self.total_variance if self.total_variance else 1.0

    def __call__(self, features: Array) -> Tensor:
        """Project (N, d) features to (N, k), in float32 or wider."""
        x = as_features("features", features, like=self.directions)
        wide = _numerics.widen(x[:0]).dtype
        basis = self._scaled().to(x.device)
        pieces = [((rows.double() - self.mean.to(x.device)) @ basis.mT).to(wide) for _, rows in blocks(x)]
        return torch.cat(pieces)

    def inverse(self, projected: Array) -> Tensor:
        """The (N, d) features whose projection is `projected`, nearest to the mean."""
        z = as_features("projected", projected, like=self.directions[:, :1].mT)
        scale = self.variances.sqrt() if self.whiten else torch.ones_like(self.variances)
        x = (z.double() * scale.to(z.device)) @ self.directions.to(z.device) + self.mean.to(z.device)
        return x.to(_numerics.widen(z[:0]).dtype)

    def _scaled(self) -> Tensor:
        return self.directions / self.variances.sqrt()[:, None] if self.whiten else self.directions

    def __repr__(self) -> str:
        k, d = self.directions.shape
        return f"Pca({d} -> {k}{', whitened' if self.whiten else ''}, {self.kept:.1%} of the variance)"


def fit_pca(features: Array, components: int | float | None = None, *, whiten: bool = False) -> Pca:
    """Fit principal components to training features.

    Args:
        features: (N, d) with N ≥ 2.
        components: how many directions are kept; a share in (0, 1) keeps the fewest with that share of the variance;
            None keeps min(N, d).
        whiten: scale outputs to unit variance; directions without variance cannot be kept then.

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
    mean = torch.stack([rows.double().sum(0) for _, rows in blocks(x)]).sum(0) / n
    if n >= d:
        scatter = torch.zeros(d, d, dtype=torch.float64, device=x.device)
        for _, rows in blocks(x):
            centered = rows.double() - mean
            scatter.addmm_(centered.mT, centered)
        values, vectors = torch.linalg.eigh(scatter / (n - 1))
        variances, directions = values.flip(0).clamp_min(0), vectors.mT.flip(0)
    else:
        _, values, directions = torch.linalg.svd(x.double() - mean, full_matrices=False)
        variances = values.square() / (n - 1)
    total = float(variances.sum())
    count = _count(components, variances)
    if whiten:
        floor = _numerics.rank_tolerance(variances.dtype, max(n, d)) * float(variances[0])
        rank = int((variances > floor).sum())
        require(count <= rank, "components", f"at most {rank}, the rank of the features, when whitening", count)
    directions = directions[:count]
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    return Pca(mean, directions * largest.sign(), variances[:count], total, whiten)


def _count(components: int | float | None, variances: Tensor) -> int:
    most = len(variances)
    if components is None:
        return most
    if isinstance(components, float) and 0 < components < 1:
        return min(int((variances.cumsum(0) < components * variances.sum()).sum()) + 1, most)
    accepted = f"a whole number from 1 to {most}, a share in (0, 1) or None"
    require(is_integer(components, 1, most), "components", accepted, components)
    return int(components)
