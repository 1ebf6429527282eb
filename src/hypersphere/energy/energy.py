r"""Hyperspherical energy: low if directions are spread evenly over the sphere.

E_s(w_1, …, w_N) = Σ_{i≠j} f_s(dist(ŵ_i, ŵ_j)),   f_s(z) = z^−s (s > 0), log(1/z) (s = 0)   (thesis, 5.1)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hypersphere import _numerics
from hypersphere._layer_selection import layers_of
from hypersphere._validation import is_integer, require
from hypersphere.functions._pairwise import PairSum, pair_energy
from hypersphere.functions.kernel import CallableKernel, Kernel, Logarithmic, PairPotential, Riesz, kernel_of

__all__ = [
    "MAX_NEURONS",
    "check_weights",
    "data_dependent_energy",
    "hyperspherical_energy",
    "layer_energies",
    "mean_energy",
    "random_batch_energy",
    "random_energy",
]

# Statistics of pairs use at most this many neurons of a layer, because their cost grows with the square.
MAX_NEURONS = 2048
# Beyond this dimension, the closed forms of second moments of random energies are differences of nearly equal numbers.
_LARGEST_CLOSED_FORM = 256


def hyperspherical_energy(
    w: Float[Tensor, "neurons ..."],
    *,
    power: float | str | Callable[[Tensor], Tensor] = 2,
    distance: str = "euclidean",
    half_space: bool = False,
    weights: Float[Tensor, " neurons"] | None = None,
    min_distance: float | None = None,
    reduction: str = "mean",
) -> Float[Tensor, ""]:
    r"""Return the energy of the directions of the rows of `w`, over ordered pairs (thesis, 5.1 and 5.5).

        E_s = Σ_{i≠j} f_s(dist(ŵ_i, ŵ_j)),   f_s(z) = z^−s (s > 0), log(1/z) (s = 0)

    Near-duplicate rows are computed from differences in float64: in float32 the relative error is below 1e-3 down to
    chords of 1e-6, and their gradient pushes them apart. Pairs closer than 4.2e-8 (in float32 more for powers
    above 3.6) count as that far apart and have no gradient. Memory does not grow with the number of pairs, except under
    `torch.compile`, `torch.func` and in second derivatives.

    Args:
        w: (N, d) or (N, …). Rows are neurons and are flattened; only their directions matter.
        power: s ≥ 0, a kernel of `hypersphere.kernel`, or a callable of the distance.
        distance: "euclidean" (the chord) or "angular" (the arc).
        half_space: add −ŵᵢ for every ŵᵢ, so that collinear neurons repel each other too (2N vectors).
        weights: (N,) positive βᵢ, for the energy of βᵢ·ŵᵢ (Euclidean distance only).
        min_distance: below this distance f continues as its tangent line, which bounds the gradient; None for no bound.
        reduction: "mean" over the ordered pairs, /(N(N−1)) or /(2N(2N−1)) in half space, or "sum".

    Returns:
        A scalar of the dtype of `w`.

    Example:
        >>> hyperspherical_energy(torch.tensor([[1.0, 0.0], [-3.0, 0.0]]), power=1)
        tensor(0.5000)

    Reference:
        Liu et al., Learning towards Minimum Hyperspherical Energy, NeurIPS 2018.
    """
    potential = PairPotential(kernel_of(power, min_distance), distance, half_space)
    _check_rows(w, half_space)
    require(reduction in ("mean", "sum"), "reduction", "'mean' or 'sum'", reduction)
    if weights is not None:
        require(distance == "euclidean", "distance", "'euclidean' when weights are given", distance)
        require(weights.shape == (len(w),), "weights", f"a vector of {len(w)} numbers", tuple(weights.shape))
        check_weights("weights", weights)
    weights = None if weights is None else _numerics.widen(weights)
    # Widening to float32 or more: differences of close 16-bit directions would be rounding errors.
    energy = pair_energy(PairSum(_numerics.widen_parameter(w.flatten(1)), potential, weights=weights, mean=True))
    # The energy is not finite if an entry is not. Only then are all rows read, to name the first one.
    if _numerics.values_readable(energy) and not math.isfinite(energy.item()):
        _numerics.require_finite_rows("w", w)
        if weights is not None:
            values = f"{float(weights.min()):.3g} to {float(weights.max()):.3g}"
            raise ValueError(f"weights must be numbers for which the energy is finite in {weights.dtype}, not {values}")
    count = 2 * len(w) if half_space else len(w)
    return _numerics.narrow(energy * (count * (count - 1)) if reduction == "sum" else energy, w.dtype)


def random_batch_energy(
    w: Float[Tensor, "neurons ..."],
    size: int,
    *,
    power: float | str | Callable[[Tensor], Tensor] = 2,
    distance: str = "euclidean",
    half_space: bool = False,
    generator: torch.Generator | None = None,
) -> Float[Tensor, ""]:
    r"""Estimate the mean energy of all rows from `size` rows drawn without replacement (thesis, section 5.3.6).

    Its expectation is exactly `hyperspherical_energy(w)`, also in half space: the pairs (ŵ, −ŵ), which are a larger
    share of a small batch, are counted as often as among all rows.

    Args:
        w: (N, d) or (N, …). Rows are neurons.
        size: the number of rows to draw, from 2 to N.
        power: s ≥ 0, a kernel or a callable, as in `hyperspherical_energy`.
        distance: "euclidean" or "angular".
        half_space: add −ŵᵢ for every ŵᵢ.
        generator: the generator of the draw; the global one if None.

    Example:
        >>> random_batch_energy(torch.eye(9), 3)
        tensor(0.5000)
    """
    potential = PairPotential(kernel_of(power), distance, half_space)
    _check_rows(w, half_space)
    require(is_integer(size, 2, len(w)), "size", f"an integer from 2 to {len(w)}, the number of rows", size)
    # Drawn on the CPU, so that a seed gives the same rows on every device.
    index = torch.randperm(len(w), generator=generator)[:size].to(w.device)
    batch = w.index_select(0, index)
    _numerics.require_finite_rows("w", batch)
    rows = _numerics.widen_parameter(batch.flatten(1))
    # `sampled_from` corrects the share of the pairs (ŵ, −ŵ) in half space.
    return _numerics.narrow(pair_energy(PairSum(rows, potential, mean=True, sampled_from=len(w))), w.dtype)


def data_dependent_energy(
    w: Float[Tensor, "classes dim"],
    labels: Int[Tensor, "..."],
    *,
    power: float | str | Callable[[Tensor], Tensor] = 2,
    distance: str = "euclidean",
    min_distance: float | None = None,
    counted: Bool[Tensor, "..."] | None = None,
    ignore_index: int = -100,
) -> Float[Tensor, ""]:
    r"""Return the energy of the class vectors of a batch against all other class vectors (thesis, section 5.3.6).

        1/(B(N−1))·Σ_{i≤B} Σ_{j≠y_i} f_s(dist(ŵ_{y_i}, ŵ_j))

    For labels drawn uniformly, its expectation is the mean energy of all N vectors. Classes are processed in blocks, so
    a million of them need no memory beyond one gradient of `w`.

    Args:
        w: (N, d) class vectors, N ≥ 2. Only their directions matter.
        labels: integers in [0, N), of any shape. An empty batch has energy 0.
        power: s ≥ 0, a kernel of `hypersphere.kernel`, or a callable of the distance.
        distance: "euclidean" (the chord) or "angular" (the arc).
        min_distance: below this distance the energy continues linearly, which bounds the gradient; None for no bound.
        counted: booleans of the shape of `labels`, True for the labels that count; None if all do.
        ignore_index: labels of this value do not count, as in `torch.nn.functional.cross_entropy`.

    Returns:
        A scalar of the dtype of `w`. It is 0 if no label counts.

    Example:
        >>> data_dependent_energy(torch.eye(3), torch.tensor([0, 0, 2]), power=2)
        tensor(0.5000)

    Reference:
        Liu et al., Learning towards Minimum Hyperspherical Energy, NeurIPS 2018.
    """
    potential = PairPotential(kernel_of(power, min_distance), distance)
    _check_classes(w, labels, counted)
    labels = labels.flatten().long()
    counted = None if counted is None else counted.flatten()
    # An ignored label need not be the index of a row, so replace it by 0 and do not count it. If values can be read and
    # no label is ignored, skip this.
    ignored = labels == ignore_index
    if not _numerics.values_readable(labels) or bool(ignored.any()):
        counted = ~ignored if counted is None else counted & ~ignored
        labels = labels.masked_fill(ignored, 0)
    if labels.numel() and _numerics.values_readable(w, labels):
        low, high = (int(v) for v in torch.aminmax(labels))
        require(low >= 0 and high < len(w), "labels", f"integers in [0, {len(w)})", f"{low} to {high}")
    total = pair_energy(PairSum(_numerics.widen_parameter(w), potential, labels=labels, counted=counted))
    if _numerics.values_readable(total) and not math.isfinite(total.detach().item()):
        _numerics.require_finite_rows("w", w)
    # At least 1, so that a batch without counted labels gives 0/1 instead of 0/0.
    number = max(len(labels), 1) if counted is None else counted.sum().clamp_min(1)
    return _numerics.narrow(total / (number * (len(w) - 1)), w.dtype)


@torch.no_grad()
def layer_energies(body: nn.Module, head: Tensor) -> dict[str, float]:
    """Return the mean energy (s = 2) of each layer: hidden ones in half space, the class vectors in full space.

    Layers with more than 2,048 neurons are sampled at evenly spaced rows; layers with one neuron are skipped.

    >>> energies = layer_energies(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), torch.eye(3))
    >>> list(energies), energies["head"]
    (['0', 'head'], 0.5)
    """
    energies = {}
    for layer in layers_of(body, output_layer=None):
        if layer.role == "hidden" and layer.shape[1] > 1:
            values = [hyperspherical_energy(_sample(rows), half_space=True) for rows in layer.row_sets()]
            energies[layer.name] = float(torch.stack(values).mean())
    return {**energies, "head": float(hyperspherical_energy(_sample(head)))}


def mean_energy(energies: Mapping[str, float]) -> float:
    """Return the mean over the hidden layers, or the energy of the head if there are none.

    >>> mean_energy({"a": 1.0, "b": 2.0, "head": 9.0})
    1.5
    """
    hidden = [value for name, value in energies.items() if name != "head"]
    return sum(hidden) / len(hidden) if hidden else energies["head"]


def _sample(rows: Tensor) -> Tensor:
    """Return at most `MAX_NEURONS` rows, evenly spaced."""
    return rows if len(rows) <= MAX_NEURONS else rows[_numerics.evenly_spaced(len(rows), MAX_NEURONS).to(rows.device)]


def _check_classes(w: Tensor, labels: Tensor, counted: Tensor | None) -> None:
    """Check types and shapes."""
    accepted = "a floating-point matrix (N, d) with N >= 2"
    for name, tensor in (("w", w), ("labels", labels)):
        require(isinstance(tensor, Tensor), name, "a tensor", type(tensor).__name__)
    require(w.ndim == 2 and len(w) >= 2 and w.is_floating_point(), "w", accepted, f"{w.dtype} {tuple(w.shape)}")
    integers = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    require(integers, "labels", "a tensor of integers", f"{labels.dtype} {tuple(labels.shape)}")
    if counted is not None:
        fits = counted.shape == labels.shape and counted.dtype == torch.bool
        accepted = f"booleans of shape {tuple(labels.shape)}"
        require(fits, "counted", accepted, f"{counted.dtype} {tuple(counted.shape)}")


def _check_rows(w: Tensor, half_space: bool) -> None:
    """Check that `w` holds enough rows for a pair."""
    require(isinstance(w, Tensor), "w", "a floating-point matrix (N, d)", type(w).__name__)
    require(isinstance(half_space, bool), "half_space", "a bool", half_space)
    require(w.ndim >= 2 and w.is_floating_point(), "w", "a floating-point matrix (N, d)", f"{w.dtype} {tuple(w.shape)}")
    accepted = "a matrix with at least two rows (one in half space)"
    require(len(w) >= (1 if half_space else 2), "w", accepted, tuple(w.shape))


def check_weights(argument: str, weights: Tensor) -> None:
    """Raise a `ValueError` unless all factors β are positive and finite."""
    if _numerics.values_readable(weights):
        is_bad = ~((weights > 0) & weights.isfinite())
        require(not bool(is_bad.any()), argument, "positive and finite", weights[is_bad][:1].tolist())


# Random directions: moments of the kernels in closed form or by quadrature -------------------------------------------


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
