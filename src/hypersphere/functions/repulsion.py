r"""Repulsion between the rows of a set: Σ f(dist(ŵᵢ, ŵⱼ)) with its gradient, in memory that does not grow with pairs.

Everything comes from the cosines, block by block: a block gives its share of the sum and, while it is in cache, its
share of the gradient, so that backward has no second pass and no matrix of pairs is kept. The same sums written plainly
serve wherever a fused function cannot go: `torch.compile`, `torch.func` and second derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere.functions.potential import PairPotential

__all__ = ["PAIRS_IN_CACHE", "blocks", "mutual_repulsion", "quick_polar", "tangent_"]

_PAIRS_AT_ONCE = 2**22
PAIRS_IN_CACHE = 2**20
_WORTH_MIRRORING = 192


def mutual_repulsion(w: Tensor, potential: PairPotential, weights: Tensor | None = None) -> Tensor:
    r"""Σ_{i≠j} φ(cos(wᵢ, wⱼ)) over ordered pairs of rows, for one set (N, d) or a stack of sets (…, N, d).

    Args:
        w: rows in float32 or wider; a zero row has cosine 0 with every other and no gradient.
        potential: φ.
        weights: (…, N) factors β of the unit rows, or None.

    Returns:
        One number a set.

    Example:
        >>> mutual_repulsion(torch.eye(3), PairPotential())
        tensor(3.)
    """
    with _numerics.autocast_disabled(w):
        if not _numerics.values_readable(w) or (weights is not None and weights.requires_grad):
            return _plain_mutual(w, potential, weights)
        if torch.is_grad_enabled() and w.requires_grad:
            return _Mutual.apply(w, potential, weights)
        return _mutual(w, potential, weights, with_gradient=False)[0]


def _plain_mutual(w: Tensor, potential: PairPotential, weights: Tensor | None) -> Tensor:
    unit = sphere.polar(w)[1]
    c = unit @ unit.mT
    itself = torch.eye(w.shape[-2], dtype=torch.bool, device=w.device)
    rows, columns = (None, None) if weights is None else (weights.unsqueeze(-1), weights.unsqueeze(-2))
    return potential(c, rows, columns).masked_fill(itself, 0.0).sum((-2, -1))


def _mutual(
    w: Tensor, potential: PairPotential, weights: Tensor | None, *, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The sums and their gradients: sets in chunks, and a set of too many pairs in blocks."""
    if _is_small(w):
        total, left, right, last = _mutual_at_once(w, potential, weights, with_gradient=with_gradient)
        return total, None if left is None else _scaled_(left @ right, last)
    n, d = w.shape[-2:]
    if w.ndim == 2:
        return _mutual_in_blocks(w, potential, weights, with_gradient=with_gradient)
    sets, factors = w.reshape(-1, n, d), None if weights is None else weights.expand(w.shape[:-1]).reshape(-1, n)
    totals, gradients = sets.new_empty(len(sets)), torch.empty_like(sets) if with_gradient else None
    chunk = _PAIRS_AT_ONCE // (n * n)
    for part in blocks(len(sets), chunk) if chunk > 1 else range(len(sets)):
        of_part = None if factors is None else factors[part]
        total, gradient = _mutual(sets[part], potential, of_part, with_gradient=with_gradient)
        totals[part] = total
        if gradients is not None and gradient is not None:
            gradients[part] = gradient
    return totals.reshape(w.shape[:-2]), None if gradients is None else gradients.reshape(w.shape)


def _is_small(w: Tensor) -> bool:
    return math.prod(w.shape[:-1]) * w.shape[-2] <= _PAIRS_AT_ONCE


def _mutual_at_once(
    w: Tensor, potential: PairPotential, weights: Tensor | None, *, with_gradient: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """The sums, and two factors whose product is the gradient: all that is not a product has the size of the pairs.

    Where rows are zero, tiny or huge, a last factor 1/‖w‖ waits, since with it the others could overflow.
    """
    c = _gram(w)
    length = c.diagonal(dim1=-2, dim2=-1).sqrt()
    if w.numel() and _numerics.squares_are_safe(length):
        inverse, right, last = 1 / length, w, None
        c.mul_(inverse.unsqueeze(-1)).mul_(inverse.unsqueeze(-2))
    else:
        careful, right = sphere.polar(w)
        c = _gram(right)
        inverse, last = None, _inverse(careful)
    b, d = (None, None) if weights is None else (weights[..., :, None], weights[..., None, :])
    value, slope = potential.with_slope(c, b, d) if with_gradient else (potential(c, b, d), None)
    value.diagonal(dim1=-2, dim2=-1).zero_()
    if slope is not None:
        diagonal = slope.diagonal(dim1=-2, dim2=-1)
        diagonal.zero_()
        diagonal.copy_(-(slope * c).sum(-1))  # projects to the tangent
        slope.mul_(2)
        if inverse is not None:
            slope.mul_(inverse.unsqueeze(-1)).mul_(inverse.unsqueeze(-2))
    return value.sum((-2, -1)), slope, right, last


def _scaled_(gradient: Tensor, last: Tensor | None) -> Tensor:
    """A gradient times 1/‖w‖ in place; what the type cannot hold saturates."""
    largest = torch.finfo(gradient.dtype).max
    return gradient if last is None else gradient.mul_(last).clamp_(-largest, largest)


def quick_polar(w: Tensor) -> tuple[Tensor, Tensor]:
    """`sphere.polar` without gradient, in two passes where no row is zero, tiny or huge."""
    length = torch.linalg.vector_norm(w, dim=-1, keepdim=True)
    return (length, w / length) if w.numel() and _numerics.squares_are_safe(length) else sphere.polar(w)


def _gram(w: Tensor) -> Tensor:
    """All products of rows; of large sets a quarter is mirrored instead."""
    n, half = w.shape[-2], w.shape[-2] // 2
    if n < _WORTH_MIRRORING:
        return w @ w.mT
    c = w.new_empty(*w.shape[:-1], n)
    c[..., :half, :] = w[..., :half, :] @ w.mT
    c[..., half:, half:] = w[..., half:, :] @ w[..., half:, :].mT
    c[..., half:, :half] = c[..., :half, half:].mT
    return c


def _mutual_in_blocks(
    w: Tensor, potential: PairPotential, weights: Tensor | None, *, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The same for one set from the blocks on and above the diagonal; those above count twice."""
    length, unit = quick_polar(w)
    n, size = len(w), math.isqrt(PAIRS_IN_CACHE)
    gradient = torch.zeros_like(unit) if with_gradient else None
    radial = torch.zeros_like(length)
    total = unit.new_zeros(())
    for i in blocks(n, size):
        for j in blocks(n, size, start=i.start):
            rows, columns, above = unit[i], unit[j], i != j
            c = rows @ columns.mT
            b, d = (None, None) if weights is None else (weights[i, None], weights[None, j])
            value, slope = potential.with_slope(c, b, d) if gradient is not None else (potential(c, b, d), None)
            if not above:
                value.fill_diagonal_(0.0)
            total += value.sum() * (2 if above else 1)
            if gradient is None or slope is None:
                continue
            if not above:
                slope.fill_diagonal_(0.0)
            pull = c.mul_(slope)
            gradient[i].addmm_(slope, columns)
            radial[i] += pull.sum(1, keepdim=True)
            if above:
                gradient[j].addmm_(slope.mT, rows)
                radial[j] += pull.sum(0).unsqueeze(1)
    return total, None if gradient is None else tangent_(gradient, radial, unit, length).mul_(2)


def blocks(n: int, size: int, start: int = 0) -> Iterator[slice]:
    """Slices of `size` that cover start to n."""
    return (slice(k, min(k + size, n)) for k in range(start, n, size))


def tangent_(gradient: Tensor, radial: Tensor, unit: Tensor, length: Tensor) -> Tensor:
    """Turn a gradient with respect to ŵ, whose product with ŵ is `radial`, into that with respect to w, in place."""
    return _scaled_(gradient.addcmul_(radial, unit, value=-1), _inverse(length))


def _inverse(length: Tensor) -> Tensor:
    """1/‖w‖, and 0 for a zero row, which so has no gradient."""
    return torch.where(length > 0, 1 / length, 0.0)


class _Mutual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, potential: PairPotential, weights: Tensor | None) -> Tensor:
        ctx.potential, ctx.small = potential, _is_small(w)
        if ctx.small:  # the last product waits for backward, where it takes the outer factor along
            total, *kept = _mutual_at_once(w, potential, weights, with_gradient=True)
        else:
            total, *kept = _mutual(w, potential, weights, with_gradient=True)
        ctx.save_for_backward(w, weights, *kept)
        return total

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:
        w, weights, *kept = ctx.saved_tensors
        outer = outer[..., None, None]
        with _numerics.autocast_disabled(w):
            if torch.is_grad_enabled():  # someone will differentiate once more
                total = _plain_mutual(w, ctx.potential, weights)
                return outer * torch.autograd.grad(total.sum(), w, create_graph=True)[0], None, None
            if ctx.small:
                return _scaled_((outer * kept[0]) @ kept[1], kept[2]), None, None
            return outer * kept[0], None, None
