r"""What random neurons would show: the energy of independent, uniformly distributed directions (Gaussian rows).

The cosines of two different pairs are independent, also when the pairs share a vector, so one integral over
θ ∈ [0, π] with density ∝ sin^{d−2}θ gives mean and variance of a mean over pairs exactly.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from hypersphere._validation import is_integer, require
from hypersphere.functions.kernel import Kernel, Logarithmic, Riesz, kernel_of

__all__ = ["angle_density", "random_energy"]

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


@lru_cache(maxsize=4096)
def random_energy(
    n: int, d: int, power: float = 2, distance: str = "euclidean", half_space: bool = False
) -> tuple[float, float]:
    r"""Mean and standard deviation of the mean energy of `n` random directions in R^d.

    They are infinite where the integrals are: the mean for s ≥ d−1, the deviation for 2s ≥ d−1.

    >>> mean, deviation = random_energy(100, 50, power=2)
    >>> round(mean, 4), round(deviation, 5)
    (0.5106, 0.00109)
    """
    kernel = kernel_of(power)
    require(isinstance(kernel, Kernel), "power", "a number >= 0 or a kernel", power)
    assert isinstance(kernel, Kernel)
    require(is_integer(n, 1 if half_space else 2), "n", "at least 2 (1 in half space)", n)
    require(distance in ("euclidean", "angular"), "distance", "'euclidean' or 'angular'", distance)
    singular = kernel.power if isinstance(kernel, Riesz) else 0
    theta, share = angle_density(d)

    def repulsion(theta: Tensor) -> Tensor:
        return kernel.of_square(theta.square() if distance == "angular" else 4 * (theta / 2).sin().square())

    pairs = n * (n - 1) / 2
    values = repulsion(theta) + repulsion(math.pi - theta) if half_space else repulsion(theta)
    mean = float((share * values).sum())
    deviation = math.sqrt(float((share * (values - mean).square()).sum()) / pairs) if pairs else 0.0
    if half_space:  # 4 ordered signed pairs a pair hold `values` twice; each of n vectors meets its opposite
        opposite = float(repulsion(torch.tensor(math.pi, dtype=torch.float64)))
        whole = 2 * n * (2 * n - 1)
        mean, deviation = (4 * pairs * mean + 2 * n * opposite) / whole, deviation * 4 * pairs / whole
    if singular >= d - 1:
        return math.inf, math.inf
    if 2 * singular >= d - 1 and not isinstance(kernel, Logarithmic):
        return mean, math.inf
    return mean, deviation
