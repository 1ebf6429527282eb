"""Project high-dimensional features to three dimensions for a sphere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hypersphere._numerics import require_finite_rows
from hypersphere._validation import require
from hypersphere.evaluation import fit_pca
from hypersphere.report.arrays import Array, as_array
from hypersphere.sphere import polar


@dataclass(frozen=True, eq=False)
class Projection:
    """Points and class vectors in three dimensions, and the fraction of the squared norm that is kept."""

    points: NDArray
    vectors: NDArray | None
    kept: float


def project(features: Array, vectors: Array | None = None) -> Projection:
    """Project unit features and class vectors to the three principal directions of the features, for a `Sphere`.

    The principal directions are computed about the origin rather than about the mean, because angles are measured from
    the origin.

    Args:
        features: features (N, d); zero rows have no direction and remain zero.
        vectors: class vectors (C, d), or None.

    Example:
        >>> projection = project(np.eye(4)[[0, 0, 1, 2]])
        >>> projection.points.shape, round(projection.kept, 2)
        ((4, 3), 1.0)
    """
    x = _unit_rows("features", features)
    # Zero rows do not change moments about the origin, and three more rows guarantee three directions.
    at_least_three = np.concatenate([x, np.zeros((3, x.shape[1]))])
    pca = fit_pca(at_least_three, 3, center=False)
    basis = pca.directions.numpy().T
    points, kept = x @ basis, pca.explained_variance_ratio
    if vectors is None:
        return Projection(points, None, kept)
    w = _unit_rows("vectors", vectors)
    require(w.shape[1] == x.shape[1], "vectors", f"a matrix with {x.shape[1]} columns, like features", w.shape[1])
    return Projection(points, w @ basis, kept)


def _unit_rows(name: str, values: Array) -> NDArray:
    rows = as_array(name, values)
    require(rows.ndim == 2 and rows.shape[1] >= 3, name, "an array of shape (N, d) with d >= 3", rows.shape)
    require(rows.dtype.kind in "fiu", name, "real numbers", rows.dtype)
    wide = torch.from_numpy(rows.astype(np.float64))
    require_finite_rows(name, wide)
    return polar(wide)[1].numpy()
