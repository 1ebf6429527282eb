r"""Repulsion between rows: sums of f(dist(ŵᵢ, ŵⱼ)) with their gradients, in memory that does not grow with pairs.

Everything comes from the cosines, block by block: a block gives its share of the sum and, while it is in cache, its
share of the gradient, so that backward has no second pass and no matrix of pairs is kept. The same sums written plainly
serve wherever a fused function cannot go: `torch.compile`, `torch.func` and second derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hypersphere import sphere
from hypersphere.functions.kernel import kernel_of
from hypersphere.functions.menu import require
from hypersphere.functions.potential import PairPotential

__all__ = ["PairPotential", "cross_repulsion", "data_dependent_energy", "mutual_repulsion"]

_PAIRS_AT_ONCE = 2**22
_PAIRS_IN_CACHE = 2**20
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
    with sphere.full_precision(w):
        if not sphere.inspectable(w) or (weights is not None and weights.requires_grad):
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
    for part in _blocks(len(sets), chunk) if chunk > 1 else range(len(sets)):
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
    if w.numel() and sphere.squares_are_safe(length):
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


def _polar(w: Tensor) -> tuple[Tensor, Tensor]:
    """`sphere.polar` without gradient, in two passes where no row is zero, tiny or huge."""
    length = torch.linalg.vector_norm(w, dim=-1, keepdim=True)
    return (length, w / length) if w.numel() and sphere.squares_are_safe(length) else sphere.polar(w)


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
    length, unit = _polar(w)
    n, size = len(w), math.isqrt(_PAIRS_IN_CACHE)
    gradient = torch.zeros_like(unit) if with_gradient else None
    radial = torch.zeros_like(length)
    total = unit.new_zeros(())
    for i in _blocks(n, size):
        for j in _blocks(n, size, start=i.start):
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
    return total, None if gradient is None else _tangent_(gradient, radial, unit, length).mul_(2)


def _blocks(n: int, size: int, start: int = 0) -> Iterator[slice]:
    return (slice(k, min(k + size, n)) for k in range(start, n, size))


def _tangent_(gradient: Tensor, radial: Tensor, unit: Tensor, length: Tensor) -> Tensor:
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
        with sphere.full_precision(w):
            if torch.is_grad_enabled():  # someone will differentiate once more
                total = _plain_mutual(w, ctx.potential, weights)
                return outer * torch.autograd.grad(total.sum(), w, create_graph=True)[0], None, None
            if ctx.small:
                return _scaled_((outer * kept[0]) @ kept[1], kept[2]), None, None
            return outer * kept[0], None, None


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
    with sphere.full_precision(w):
        if not sphere.inspectable(*given):
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
    row_length, row = _polar(w[own] if rows is None else rows)
    to_rows, row_radial = torch.zeros_like(row), torch.zeros_like(row_length)
    gradient = torch.empty_like(w) if with_gradient else None
    total = row.new_zeros(())
    for j in _blocks(len(w), max(256, _PAIRS_IN_CACHE // max(len(own), 1))):
        length, unit = _polar(w[j])
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
        _tangent_(gradient[j], pull.sum(0).unsqueeze(1), unit, length)
    if gradient is None:
        return total, None, None
    _tangent_(to_rows, row_radial, row, row_length)
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
            with sphere.full_precision(w):
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
    total = cross_repulsion(None, sphere.widen(w), labels.long(), potential, counted)
    if sphere.inspectable(total) and not math.isfinite(total.detach().item()):
        sphere.require_finite_rows("w", w)
    number = max(len(labels), 1) if counted is None else counted.sum().clamp_min(1)
    return sphere.narrow(total / (number * (len(w) - 1)), w.dtype)


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
    if len(labels) and sphere.inspectable(w, labels):
        low, high = (int(v) for v in torch.aminmax(labels))
        require(low >= 0 and high < len(w), "labels", f"integers in [0, {len(w)})", f"{low} to {high}")
