r"""The angular Fisher score: how compact classes are beside how far apart, by angle alone."""

from __future__ import annotations

import torch
from torch import Tensor

from hypersphere import sphere
from hypersphere.functions.menu import require

__all__ = ["angular_fisher_score", "smallest_angle"]


def angular_fisher_score(features: Tensor, labels: Tensor) -> float:
    r"""AFS = S_w/S_b; lower is more discriminative (thesis, A.1).

    S_w = Σ_i Σ_{x∈X_i} (1 − cos⟨x, m_i⟩) over the classes i with mean features m_i, and
    S_b = Σ_i n_i (1 − cos⟨m_i, m⟩) with m the mean of all features.

    Example:
        >>> angular_fisher_score(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0, 1]))
        0.0
    """
    require(features.ndim == 2 and len(features) > 0, "features", "a non-empty matrix (N, d)", tuple(features.shape))
    require(labels.shape == features.shape[:1], "labels", f"{len(features)} labels", tuple(labels.shape))
    sphere.require_finite_rows("features", features)
    x = features.detach().double()
    classes, index, counts = labels.unique(return_inverse=True, return_counts=True)
    require(len(classes) >= 2, "labels", "labels of at least two classes", classes.tolist())
    sums = torch.zeros(len(classes), x.shape[1], dtype=x.dtype, device=x.device).index_add_(0, index, x)
    means = sums / counts[:, None]
    within = (1 - sphere.cosine(x, means[index])).sum()
    between = (counts * (1 - sphere.cosine(means, x.mean(0, keepdim=True).expand_as(means)))).sum()
    return float(within / between)


def smallest_angle(w: Tensor) -> float:
    """The smallest angle, in radians, between two rows of `w`: the separation of neurons or class vectors.

    >>> round(smallest_angle(torch.eye(3)), 4)
    1.5708
    """
    require(w.ndim == 2 and len(w) >= 2, "w", "a matrix (N, d) with at least two rows", tuple(w.shape))
    c = sphere.cosines(w.detach().double(), w.detach().double()).fill_diagonal_(-2.0)
    return float(sphere.angle(c.max()))
