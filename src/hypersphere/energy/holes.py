r"""The largest hole between points on a circle or a sphere: how far a direction can be from the nearest of them."""

from __future__ import annotations

import torch
from torch import Tensor

from hypersphere import _numerics, sphere

__all__ = ["hole_radius"]

_MOST = 128


def hole_radius(unit: Tensor) -> float | None:
    r"""Return max_x min_i θ(x, ŵᵢ) for unit rows (N, d), exactly; None for d > 3, no rows, or too many of them.

    The centre of the largest hole is opposite to a point, or to the middle of two, or as far from three of them: all
    such directions are tried.

    >>> round(hole_radius(torch.cat([torch.eye(3), -torch.eye(3)])), 4)  # arccos 1/√3
    0.9553
    """
    n, d = unit.shape
    if not 1 <= n <= _MOST or d not in (2, 3):
        return None
    points = _numerics.to_float64(unit)
    i, j = torch.triu_indices(n, n, device=points.device)
    middles = points[i] + points[j]
    nearest = [_nearest(points, middles), _nearest(points, -middles)]
    if d == 3:
        for k in range(n - 2):
            first, second = torch.triu_indices(n - k - 1, n - k - 1, 1, device=points.device) + k + 1
            normals = torch.linalg.cross(points[first] - points[k], points[second] - points[k])
            nearest += [_nearest(points, normals), _nearest(points, -normals)]
    return float(sphere.angle(torch.stack(nearest).amin()))


def _nearest(points: Tensor, centres: Tensor) -> Tensor:
    """The least over centres of the cosine with the nearest point; a centre without a direction does not count."""
    directions = sphere.normalize(centres)
    cosines = (directions @ points.mT).amax(1)
    return cosines.masked_fill((directions == 0).all(1), 1.0).amin() if len(cosines) else points.new_ones(())
