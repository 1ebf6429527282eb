r"""The energy of random directions: moments of the kernels in closed form or by quadrature."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from hypersphere._validation import is_integer, require
from hypersphere.functions.kernel import CallableKernel, Kernel, Logarithmic, Riesz, kernel_of

__all__ = ["random_energy"]

# Beyond this dimension, the closed forms of second moments are differences of nearly equal numbers.
_LARGEST_CLOSED_FORM = 256


@lru_cache(maxsize=4096)
def random_energy(
    n: int, d: int, power: float = 2, distance: str = "euclidean", half_space: bool = False
) -> tuple[float, float]:
    r"""Return mean and standard deviation of the mean energy of `n` independent uniform directions in R^d.

    Gaussian rows have such directions. The chord z of two of them has, with m = d − 1 the dimension of the sphere,

        E z^−s = 2^{m−s−1}·Γ((m+1)/2)·Γ((m−s)/2) / (√π·Γ(m−s/2)),   s < m,

    and E log(1/z) is its derivative at s = 0. The angular distance has no closed form and is integrated numerically to
    about 12 digits. The energies of two different pairs are uncorrelated, also if the pairs share a vector, so the
    variance of the mean is the variance of one pair divided by the number of pairs.

    Args:
        n: the number of directions, at least 2 (1 in half space).
        d: the number of coordinates, at least 2.
        power: s ≥ 0 or a kernel.
        distance: "euclidean" or "angular".
        half_space: add the opposite of every direction.

    Returns:
        Mean and standard deviation. The mean is infinite for s ≥ d − 1, the deviation for 2s ≥ d − 1.

    Example:
        >>> mean, deviation = random_energy(100, 50, power=2)
        >>> round(mean, 4), round(deviation, 5)
        (0.5106, 0.00109)
    """
    kernel = kernel_of(power)
    require(not isinstance(kernel, CallableKernel), "power", "a number >= 0 or a kernel", power)
    require(is_integer(n, 1 if half_space else 2), "n", "at least 2 (1 in half space)", n)
    require(is_integer(d, 2), "d", "an integer >= 2", d)
    require(distance in ("euclidean", "angular"), "distance", "'euclidean' or 'angular'", distance)
    mean, variance, covariance = _pair_moments(kernel, d, distance)
    pairs = n * (n - 1) / 2
    if half_space:
        # Each unordered pair of directions gives 4 unordered pairs of signed directions, two at z and two at z′, the
        # distance to the opposite. There are also n pairs of a direction and its opposite.
        largest_square = torch.tensor(math.pi**2 if distance == "angular" else 4.0, dtype=torch.float64)
        antipodal = float(kernel.floored_value_at_square(largest_square))
        signed_pairs = n * (2 * n - 1)
        mean = (4 * pairs * mean if pairs else 0.0) / signed_pairs + n * antipodal / signed_pairs
        variance = (2 * variance + 2 * covariance) * (2 * pairs / signed_pairs) ** 2
    return mean, math.sqrt(max(variance, 0.0) / pairs) if pairs else 0.0


def _pair_moments(kernel: Kernel, d: int, distance: str) -> tuple[float, float, float]:
    """Return E f(z), Var f(z) and Cov(f(z), f(z′)) of a random pair; z′ is the distance to the opposite direction."""
    theta, opposite, share = _angle_quadrature(d)

    def integrate(values: Tensor) -> float:
        return float((share * values).sum())

    def evaluate(angles: Tensor, form: str) -> Tensor:
        return kernel.value_at_square(angles.square() if form == "angular" else 4 * (angles / 2).sin().square())

    if type(kernel) not in (Riesz, Logarithmic):
        # No closed form is known: integrate everything.
        values, mirrored = evaluate(theta, distance), evaluate(opposite, distance)
        mean = integrate(values)
        return mean, integrate((values - mean).square()), integrate((values - mean) * (mirrored - mean))
    chord_mean, chord_variance, chord_covariance = _chord_moments(kernel.power, d)
    chords, mirrored_chords = evaluate(theta, "euclidean"), evaluate(opposite, "euclidean")
    if d > _LARGEST_CLOSED_FORM and kernel.power:  # the closed forms of the second moments would cancel
        chord_variance = integrate((chords - chord_mean).square())
        chord_covariance = integrate((chords - chord_mean) * (mirrored_chords - chord_mean))
    if distance == "euclidean" or not math.isfinite(chord_mean):
        return chord_mean, chord_variance, chord_covariance
    # Integrate the difference to the Euclidean moments, which is less singular at z = 0 than the moments themselves.
    arcs, mirrored_arcs = evaluate(theta, "angular"), evaluate(opposite, "angular")
    mean = chord_mean + integrate(arcs - chords)
    variance = chord_variance + integrate((arcs - mean).square() - (chords - chord_mean).square())
    return mean, variance, integrate((arcs - mean) * (mirrored_arcs - mean))


def _chord_moments(s: float, d: int) -> tuple[float, float, float]:
    """Return E f(z), Var f(z) and Cov(f(z), f(z′)) in closed form: z²/4 has the Beta(m/2, m/2) distribution."""
    m = d - 1
    if s == 0:
        psi_half, psi = (float(torch.special.digamma(torch.tensor(x).double())) for x in (m / 2, float(m)))
        tri_half, tri = (float(torch.special.polygamma(1, torch.tensor(x).double())) for x in (m / 2, float(m)))
        return (psi - psi_half) / 2 - math.log(2), (tri_half - tri) / 4, -tri / 4

    def log_beta(a: float, b: float) -> float:
        return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

    def moment(p: float, q: float) -> float:
        """Return E z^−p·z′^−q."""
        if max(p, q) >= m:
            return math.inf
        return math.exp(log_beta((m - p) / 2, (m - q) / 2) - log_beta(m / 2, m / 2) - (p + q) * math.log(2))

    mean = moment(s, 0)
    if math.isinf(mean):
        return math.inf, math.inf, math.inf
    return mean, moment(2 * s, 0) - mean**2, moment(s, s) - mean**2


@lru_cache(maxsize=64)
def _angle_quadrature(d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return nodes θ, π − θ and weights for expectations over the angle θ of two random directions of R^d.

    The density is proportional to sin^{d−2}θ. The substitution θ = π/(1 + exp(−π·sinh x)) (double exponential) moves
    both ends to infinity. There the trapezoidal rule converges exponentially, also for integrands with singular ends.
    """
    # The density has a width of 1/√d in θ, 0.4/√d in x. Two nodes per width give all digits.
    step = min(1 / 32, 0.2 / math.sqrt(d))
    x = torch.arange(-4.5, 4.5, step, dtype=torch.float64)
    exponent = math.pi * x.sinh()
    theta, opposite = math.pi * exponent.sigmoid(), math.pi * (-exponent).sigmoid()
    smaller = torch.minimum(theta, opposite)  # sin θ = sin(π − θ), which is accurate at both ends
    jacobian = torch.nn.functional.logsigmoid(exponent) + torch.nn.functional.logsigmoid(-exponent) + x.cosh().log()
    return theta, opposite, torch.softmax((d - 2) * smaller.sin().log() + jacobian, 0)
