"""Repulsion between some rows and all of a set, taken in blocks: a batch's classes against a million others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere._validation import require
from hypersphere.functions.kernel import kernel_of
from hypersphere.functions.potential import PairPotential
from hypersphere.functions.repulsion import PAIRS_IN_CACHE, blocks, quick_polar, tangent_

__all__ = ["cross_repulsion", "data_dependent_energy"]


def cross_repulsion(
    rows: Tensor | None, w: Tensor, own: Tensor, potential: PairPotential, counted: Tensor | None = None
) -> Tensor:
    r"""Σ_i Σ_j φ(cos(rᵢ, wⱼ)) without the pairs in which wⱼ is rᵢ itself; w is taken in blocks.

    Args:
        rows: (B, d), in float32 or wider; None for the rows `own` of `w`, without a second gradient of its size.
        w: (N, d), of the same type.
        own: (B,) which wⱼ each row is; −1 for none.
        potential: φ.
        counted: (B,) booleans, which rows take part; None for all.

    Example:
        >>> cross_repulsion(torch.eye(3)[:1], torch.eye(3), torch.tensor([0]), PairPotential())
        tensor(1.)
    """
    given = [t for t in (rows, w, own, counted) if t is not None]
    with _numerics.autocast_disabled(w):
        if not _numerics.values_readable(*given):
            return _plain_cross(rows, w, own, potential, counted)
        if torch.is_grad_enabled() and any(t.requires_grad for t in given):
            return _Cross.apply(rows, w, own, potential, counted)
        return _cross(rows, w, own, potential, counted, with_gradient=False)[0]


def _plain_cross(
    rows: Tensor | None, w: Tensor, own: Tensor, potential: PairPotential, counted: Tensor | None
) -> Tensor:
    unit = sphere.polar(w)[1]
    c = (unit[own] if rows is None else sphere.polar(rows)[1]) @ unit.mT
    return potential(c).masked_fill(_left_out(own, counted, slice(0, len(w))), 0.0).sum()


def _left_out(own: Tensor, counted: Tensor | None, block: slice) -> Tensor:
    """The pairs that do not count: a row with itself, and all of a row that does not count."""
    itself = own[:, None] == torch.arange(block.start, block.stop, device=own.device)
    return itself if counted is None else itself | ~counted[:, None]


def _cross(
    rows: Tensor | None,
    w: Tensor,
    own: Tensor,
    potential: PairPotential,
    counted: Tensor | None,
    *,
    with_gradient: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The sum and its gradients with respect to rows and w, the latter with both if the rows are its own."""
    row_length, row = quick_polar(w[own] if rows is None else rows)
    to_rows, row_radial = torch.zeros_like(row), torch.zeros_like(row_length)
    gradient = torch.empty_like(w) if with_gradient else None
    total = row.new_zeros(())
    for j in blocks(len(w), max(256, PAIRS_IN_CACHE // max(len(own), 1))):
        length, unit = quick_polar(w[j])
        c, left_out = row @ unit.mT, _left_out(own, counted, j)
        if gradient is None:
            total += potential(c).masked_fill_(left_out, 0.0).sum()
            continue
        value, slope = potential.with_slope(c)
        slope.masked_fill_(left_out, 0.0)
        total += value.masked_fill_(left_out, 0.0).sum()
        to_rows += slope @ unit
        pull = slope * c
        row_radial += pull.sum(1, keepdim=True)
        torch.mm(slope.mT, row, out=gradient[j])
        tangent_(gradient[j], pull.sum(0).unsqueeze(1), unit, length)
    if gradient is None:
        return total, None, None
    tangent_(to_rows, row_radial, row, row_length)
    return (total, None, gradient.index_add_(0, own, to_rows)) if rows is None else (total, to_rows, gradient)


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor | None, w: Tensor, own: Tensor, potential: PairPotential, counted: Tensor | None
    ) -> Tensor:
        total, *gradients = _cross(rows, w, own, potential, counted, with_gradient=True)
        ctx.save_for_backward(rows, w, own, counted, *gradients)
        ctx.potential = potential
        return total

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        rows, w, own, counted, *gradients = ctx.saved_tensors
        needed = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():  # someone will differentiate once more
            with _numerics.autocast_disabled(w):
                total = _plain_cross(rows, w, own, ctx.potential, counted)
                variables = [t for t, need in zip((rows, w), needed, strict=True) if need]
                found = iter(torch.autograd.grad(total, variables, create_graph=True))
            gradients = [next(found) if need else None for need in needed]
        return *(outer * g if need else None for g, need in zip(gradients, needed, strict=True)), None, None, None


def data_dependent_energy(
    w: Tensor,
    labels: Tensor,
    *,
    power: float | str | Callable[[Tensor], Tensor] = 2,
    distance: str = "euclidean",
    counted: Tensor | None = None,
) -> Tensor:
    r"""Energy of the class vectors that a batch asks for, against all others (thesis, section 5.3.6).

        1/(B(N−1))·Σ_{i≤B} Σ_{j≠y_i} f_s(dist(ŵ_{y_i}, ŵ_j))

    For labels drawn uniformly its mean is the mean energy of all N vectors. Classes are taken in blocks, so a million
    of them need no memory beyond one gradient of `w`.

    Args:
        w: (N, d) class vectors, N ≥ 2; only their directions matter.
        labels: (B,) integers in [0, N); an empty batch has energy 0.
        power: s ≥ 0, a kernel of `hypersphere.functions.kernel`, or a callable of the distance.
        distance: "euclidean" (the chord) or "angular" (the arc).
        counted: (B,) booleans, the labels that B counts; None for all. Without any the energy is 0.

    Returns:
        A scalar of the type of `w`.

    Example:
        >>> data_dependent_energy(torch.eye(3), torch.tensor([0, 0, 2]), power=2)
        tensor(0.5000)

    Reference:
        Liu et al., Learning towards Minimum Hyperspherical Energy, NeurIPS 2018.
    """
    potential = PairPotential(kernel_of(power), distance)
    _check_classes(w, labels, counted)
    total = cross_repulsion(None, _numerics.widen(w), labels.long(), potential, counted)
    if _numerics.values_readable(total) and not math.isfinite(total.detach().item()):
        _numerics.require_finite_rows("w", w)
    number = max(len(labels), 1) if counted is None else counted.sum().clamp_min(1)
    return _numerics.narrow(total / (number * (len(w) - 1)), w.dtype)


def _check_classes(w: Tensor, labels: Tensor, counted: Tensor | None) -> None:
    accepted = "a floating-point matrix (N, d) with N >= 2"
    for name, tensor in (("w", w), ("labels", labels)):
        require(isinstance(tensor, Tensor), name, "a tensor", type(tensor).__name__)
    require(w.ndim == 2 and len(w) >= 2 and w.is_floating_point(), "w", accepted, f"{w.dtype} {tuple(w.shape)}")
    integers = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    require(labels.ndim == 1 and integers, "labels", "a vector of integers", f"{labels.dtype} {tuple(labels.shape)}")
    if counted is not None:
        fits = counted.shape == labels.shape and counted.dtype == torch.bool
        require(fits, "counted", f"{len(labels)} booleans", f"{counted.dtype} {tuple(counted.shape)}")
    if len(labels) and _numerics.values_readable(w, labels):
        low, high = (int(v) for v in torch.aminmax(labels))
        require(low >= 0 and high < len(w), "labels", f"integers in [0, {len(w)})", f"{low} to {high}")
