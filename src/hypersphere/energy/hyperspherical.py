r"""The hyperspherical energy of one set of vectors: how unevenly they cover the sphere."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hypersphere import _numerics
from hypersphere._validation import require
from hypersphere.functions.kernel import kernel_of
from hypersphere.functions.potential import PairPotential
from hypersphere.functions.repulsion import mutual_repulsion

__all__ = ["hyperspherical_energy", "random_batch_energy", "stacked_energy"]


def hyperspherical_energy(
    w: Tensor,
    *,
    power: float | str | Callable[[Tensor], Tensor] = 2,
    distance: str = "euclidean",
    half_space: bool = False,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""Energy of the directions of the rows of `w`, over ordered pairs (thesis, 5.1 and 5.5).

        E_s = Σ_{i≠j} f_s(dist(ŵ_i, ŵ_j)),   f_s(z) = z^−s (s > 0), log(1/z) (s = 0)

    Memory does not grow with the number of pairs, except under `torch.compile`, `torch.func` and in second derivatives.

    Args:
        w: (N, d) or (N, …), rows are neurons and are flattened; only their directions matter.
        power: s ≥ 0, or a kernel of `hypersphere.functions.kernel`, or a callable of the distance.
        distance: "euclidean" (the chord) or "angular" (the arc).
        half_space: count −ŵᵢ beside every ŵᵢ, so that collinear neurons repel each other too (2N vectors).
        weights: (N,) positive βᵢ, for the energy of βᵢ·ŵᵢ (Euclidean distance only).
        reduction: "mean" over the ordered pairs, /(N(N−1)) or /(2N(2N−1)) in half space, or "sum".

    Returns:
        A scalar. Pairs closer than `_numerics.distance_floor` count as that far apart.

    Example:
        >>> hyperspherical_energy(torch.tensor([[1.0, 0.0], [-3.0, 0.0]]), power=1)
        tensor(0.5000)

    Reference:
        Liu et al., Learning towards Minimum Hyperspherical Energy, NeurIPS 2018.
    """
    potential = PairPotential(kernel_of(power), distance, half_space)
    _check_rows(w, half_space)
    require(reduction in ("mean", "sum"), "reduction", "'mean' or 'sum'", reduction)
    if weights is not None:
        require(distance == "euclidean", "distance", "'euclidean' when weights are given", distance)
        require(weights.shape == (len(w),), "weights", f"a vector of {len(w)} numbers", tuple(weights.shape))
        if _numerics.values_readable(weights):
            positive = bool(((weights > 0) & weights.isfinite()).all())
            require(positive, "weights", "positive and finite", weights.tolist())
    energy = stacked_energy(_numerics.widen_parameter(w.flatten(1)), potential, weights)
    if _numerics.values_readable(energy) and not math.isfinite(energy.item()):
        _numerics.require_finite_rows("w", w)
    count = _pairs(len(w), half_space) if reduction == "sum" else 1
    return _numerics.narrow(energy * count, w.dtype)


def random_batch_energy(
    w: Tensor,
    size: int,
    *,
    power: float | str | Callable[[Tensor], Tensor] = 2,
    distance: str = "euclidean",
    half_space: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Estimate the mean energy of all rows from `size` rows drawn without replacement (thesis, section 5.3.6).

    Its expectation is `hyperspherical_energy(w)` exactly, in half space too: there the pairs (ŵ, −ŵ), which are a
    larger share of a small batch, are counted as they are in the whole.

    Args:
        w: (N, d) or (N, …), rows are neurons.
        size: how many rows to draw, from 2 to N.
        power: s ≥ 0, a kernel or a callable, as in `hyperspherical_energy`.
        distance: "euclidean" or "angular".
        half_space: count −ŵᵢ beside every ŵᵢ.
        generator: where the draw comes from; the global seed if None.

    Example:
        >>> random_batch_energy(torch.eye(9), 3)
        tensor(0.5000)
    """
    potential = PairPotential(kernel_of(power), distance, half_space)
    _check_rows(w, half_space)
    require(2 <= size <= len(w), "size", f"a number from 2 to {len(w)}, the number of rows", size)
    drawn = torch.randperm(len(w), generator=generator)[:size].to(w.device)
    batch = w.index_select(0, drawn)
    _numerics.require_finite_rows("w", batch)
    return _numerics.narrow(stacked_energy(_numerics.widen_parameter(batch.flatten(1)), potential, of=len(w)), w.dtype)


def stacked_energy(
    w: Tensor, potential: PairPotential, weights: Tensor | None = None, *, of: int | None = None
) -> Tensor:
    """Return the mean energy of each set of a stack (…, N, d) in float32 or wider.

    Each set may be a sample of `of` rows, whose mean energy is then estimated without bias.

    >>> stacked_energy(torch.eye(3).expand(2, 3, 3), PairPotential())
    tensor([0.5000, 0.5000])
    """
    n = w.shape[-2]
    whole = n if of is None else of
    weights = None if weights is None else _numerics.widen(weights)
    total = mutual_repulsion(w, potential, weights) if n > 1 else w.sum((-2, -1)) * 0
    if n > 1:
        total = total * (whole * (whole - 1) / (n * (n - 1)))
    if potential.half_space:
        opposite = w.new_full((), -1.0)
        rows = None if weights is None else weights.unsqueeze(-1)
        antipodal = PairPotential(potential.kernel, potential.distance)(opposite, rows, rows)
        total = 2 * (total + (whole * antipodal if rows is None else antipodal.sum((-2, -1))))
    return total / _pairs(whole, potential.half_space)


def _pairs(n: int, half_space: bool) -> int:
    n = 2 * n if half_space else n
    return n * (n - 1)


def _check_rows(w: Tensor, half_space: bool) -> None:
    require(isinstance(w, Tensor), "w", "a floating-point matrix (N, d)", type(w).__name__)
    require(isinstance(half_space, bool), "half_space", "a bool", half_space)
    require(w.ndim >= 2 and w.is_floating_point(), "w", "a floating-point matrix (N, d)", f"{w.dtype} {tuple(w.shape)}")
    accepted = "a matrix with at least two rows (one in half space)"
    require(len(w) >= (1 if half_space else 2), "w", accepted, tuple(w.shape))
