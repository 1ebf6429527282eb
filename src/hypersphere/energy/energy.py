r"""Hyperspherical energy: how unevenly a set of directions covers the sphere.

E_s(w_1, …, w_N) = Σ_{i≠j} f_s(dist(ŵ_i, ŵ_j)),   f_s(z) = z^−s (s > 0), log(1/z) (s = 0)   (thesis, 5.1)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hypersphere import _numerics
from hypersphere._layer_selection import layers_of
from hypersphere._validation import is_integer, require
from hypersphere.energy._sampling import MAX_NEURONS, evenly_spaced
from hypersphere.functions._pairwise import PairSum, pair_energy
from hypersphere.functions.kernel import PairPotential, kernel_of

__all__ = [
    "check_weights",
    "data_dependent_energy",
    "hyperspherical_energy",
    "layer_energies",
    "mean_energy",
    "random_batch_energy",
]


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
    # Ignored labels may be no index of a row, so they become 0 and do not count. If values can be read, this is skipped
    # where there is none.
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
    for layer in layers_of(body, output=None):
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
    return rows if len(rows) <= MAX_NEURONS else rows[evenly_spaced(len(rows)).to(rows.device)]


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
