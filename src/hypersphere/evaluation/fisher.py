r"""The angular Fisher score: how compact classes are beside how far apart, by angle alone."""

from __future__ import annotations

import math

import torch

from hypersphere import _numerics, sphere
from hypersphere._validation import require
from hypersphere.evaluation.arrays import Array, as_features, as_labels

__all__ = ["angular_fisher_score"]


def angular_fisher_score(features: Array, labels: Array) -> float:
    r"""AFS = S_w/S_b; lower is more discriminative (thesis, A.1).

    S_w = Σ_i Σ_{x∈X_i} (1 − cos⟨x, m_i⟩) over the classes i with mean features m_i, and
    S_b = Σ_i n_i (1 − cos⟨m_i, m⟩) with m the mean of all features. It is ∞ where all class means point one way, as
    those of collapsed features do: where S_b is no more than the rounding of the features' type brings about.

    Example:
        >>> angular_fisher_score(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0, 1]))
        0.0
    """
    given = as_features("features", features)
    x = given.double()
    y = as_labels("labels", labels, len(x), x.device)
    classes, index, counts = y.unique(return_inverse=True, return_counts=True)
    require(len(classes) >= 2, "labels", "labels of at least two classes", classes.tolist())
    sums = torch.zeros(len(classes), x.shape[1], dtype=x.dtype, device=x.device).index_add_(0, index, x)
    means = sums / counts[:, None]
    within = (1 - sphere.cosine(x, means[index])).sum()
    between = float((counts * (1 - sphere.cosine(means, x.mean(0, keepdim=True).expand_as(means)))).sum())
    apart = between > len(x) * _numerics.parallel_tolerance(given.dtype)
    return max(float(within) / between, 0.0) if apart else math.inf
