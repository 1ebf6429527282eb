r"""What random neurons would show: the energy of independent, uniformly distributed directions (Gaussian rows).

The cosines of two different pairs are independent, also when the pairs share a vector, so one integral over
θ ∈ [0, π] with density ∝ sin^{d−2}θ gives mean and variance of a mean over pairs exactly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hypersphere._validation import is_integer, require

__all__ = ["angle_density"]

_POINTS = 20_000


def angle_density(d: int, points: int = _POINTS) -> tuple[Tensor, Tensor]:
    """Return angles in (0, π) and the probability of each between two random directions of R^d.

    >>> theta, share = angle_density(3)
    >>> round(float((share * theta.cos().square()).sum()), 6)  # 1/d
    0.333333
    """
    require(is_integer(d, 2), "d", "an integer >= 2", d)
    theta = (torch.arange(points, dtype=torch.float64) + 0.5) * (math.pi / points)
    return theta, torch.softmax((d - 2) * theta.sin().log(), 0)
