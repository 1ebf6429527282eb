r"""What a loss needs of the B×C scores, as a few numbers a sample, computed block by block of classes.

A margin touches the target's score alone. So a loss needs, of all other classes, only one sum a sample (and a second
one for label smoothing), and of the target its cosine. Those B numbers come out of one pass over cache-sized blocks of
class vectors: row norms, products and exponentials of a block while it is warm, and in backward the gradient of its
class vectors, projected to the tangent of the sphere, likewise. Class vectors are never normalised as a tensor;
products are divided by the row norms. Products are kept for backward while they are small, and computed again when
they are not, so memory beyond the weight and its gradient need not grow with the number of classes.

The same numbers written plainly (`plain_terms`) serve wherever the fused pass cannot go: `torch.compile`, `torch.func`,
second derivatives, and class vectors whose squares leave the range of floating point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere.heads.gradients import straight_through

__all__ = ["LOG_SUM_EXP", "SOFTPLUS_SUM", "Reduction", "Terms", "Wanted", "class_terms", "plain_terms"]

_WEIGHTS_AT_ONCE = 2**20  # numbers of a block of class vectors: 4 MB, which stays in cache
_PRODUCTS_AT_ONCE = 2**22
_PRODUCTS_KEPT = 2**26


class Terms(NamedTuple):
    """B numbers each: the sum over the other classes, their weighted total, the target's product and ‖w_y‖."""

    others: Tensor
    total: Tensor | None
    target: Tensor
    target_norm: Tensor | None


@dataclass(frozen=True)
class Reduction:
    """How the scores of the other classes become one number: over a block, over blocks, and the derivative of it."""

    within: Callable[[Tensor], Tensor]
    across: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]


LOG_SUM_EXP = Reduction(
    within=lambda scores: torch.logsumexp(scores, 1),
    across=lambda parts: torch.logsumexp(parts, 1),
    slope=lambda scores, others: torch.sub(scores, others.unsqueeze(1)).exp_(),
)
SOFTPLUS_SUM = Reduction(
    within=lambda scores: F.softplus(scores, threshold=50).sum(1),
    across=lambda parts: parts.sum(1),
    slope=lambda scores, others: torch.sigmoid(scores),
)


@dataclass(frozen=True)
class Wanted:
    """What is asked for.

    Args:
        unit_rows: whether class vectors count as unit vectors.
        response: the other classes' function of the cosine; None for the cosine itself, where scores are products.
        slope: its derivative, a function of the cosine and the response; None to have it differentiated.
        detached: whether the response passes its gradient on as the bare cosine would.
        reduction: how other classes are summed up.
        total_weights: (C,) factors of the total of the other scores, or None if no total is needed.
    """

    unit_rows: bool
    response: Callable[[Tensor], Tensor] | None = None
    slope: Callable[[Tensor, Tensor], Tensor] | None = None
    detached: bool = False
    reduction: Reduction = LOG_SUM_EXP
    total_weights: Tensor | None = None


def class_terms(
    x: Tensor,
    w: Tensor,
    y: Tensor,
    rho: Tensor | None,
    bias: Tensor | None,
    wanted: Wanted,
    *,
    fused: bool = True,
) -> Terms:
    """Return the terms for features `x` (B, d) and class vectors `w` (C, d), fused where that can be.

    Args:
        x: without a response, features of the length that scores should have; with one, unit features.
        w: class vectors, of the type of `x`.
        y: labels in [0, C), int64; −1 for a sample whose target is not among these classes.
        rho: (B,) factors of the responses; None without a response.
        bias: (C,) or (1,), added to the other classes' scores; the target's is left to the caller.
        wanted: what is asked for.
        fused: False if the response has parameters of its own, which need automatic differentiation.
    """
    fused = fused and (wanted.response is None or wanted.unit_rows)
    with _numerics.autocast_disabled(x):
        if fused and len(x) and _numerics.values_readable(x, w, y):
            try:
                return Terms(*_Fused.apply(x, w, rho, bias, y, wanted))
            except _OutOfRange:
                pass
        return plain_terms(x, w, y, rho, bias, wanted)


def plain_terms(x: Tensor, w: Tensor, y: Tensor, rho: Tensor | None, bias: Tensor | None, wanted: Wanted) -> Terms:
    """Return the terms through a B×C matrix and automatic differentiation."""
    w_norm, w_hat = sphere.polar(w)
    as_unit = wanted.unit_rows or wanted.response is not None
    z = x @ (w_hat if as_unit else w).mT
    scores = _scores(z, rho, bias, wanted)
    if wanted.response is not None and not wanted.unit_rows:
        scores = _scores(z, rho, None, wanted) * w_norm.mT + (0 if bias is None else bias)
    column, absent = y.clamp_min(0).unsqueeze(1), (y < 0).unsqueeze(1)
    is_target = torch.zeros_like(scores, dtype=torch.bool).scatter(1, column, ~absent)
    others = wanted.reduction.within(scores.masked_fill(is_target, float("-inf")))
    total = None
    if wanted.total_weights is not None:
        total = (scores * wanted.total_weights).masked_fill(is_target, 0).sum(1)
    target = z.gather(1, column).masked_fill(absent, 0).squeeze(1)
    target_norm = None if wanted.unit_rows else w_norm[column.squeeze(1)].masked_fill(absent, 0).squeeze(1)
    return Terms(others, total, target, target_norm)


def _scores(z: Tensor, rho: Tensor | None, bias: Tensor | None, wanted: Wanted) -> Tensor:
    """Scores of a block of products; the products themselves where nothing is to be done."""
    if wanted.response is not None and rho is not None:
        response = wanted.response(z)
        z = rho.unsqueeze(1) * (straight_through(z, response) if wanted.detached else response)
    return z if bias is None else z + bias


class _OutOfRange(Exception):
    """A class vector is zero, or its squares overflow or vanish: the fused pass would lose its direction."""


class _Block(NamedTuple):
    """A run of classes, the samples whose target is among them, and where."""

    classes: slice
    rows: Tensor
    columns: Tensor

    def of(self, values: Tensor) -> Tensor:
        """The part of one number a class (or of one for all) that belongs to this block."""
        return values if len(values) == 1 else values[self.classes]


def _blocks(y: Tensor, num_classes: int, dim: int) -> Iterator[_Block]:
    size = max(1, min(_WEIGHTS_AT_ONCE // dim, _PRODUCTS_AT_ONCE // len(y)))
    labels, order = y.sort()
    starts = list(range(0, num_classes, size)) if num_classes > 2 * size else [0]
    bounds = torch.searchsorted(labels, torch.tensor([*starts, num_classes], device=y.device)).tolist()
    for start, stop, first, last in zip(starts, [*starts[1:], num_classes], bounds[:-1], bounds[1:], strict=True):
        yield _Block(slice(start, stop), order[first:last], labels[first:last] - start)


class _Fused(torch.autograd.Function):
    """The terms and their gradients, block by block."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, rho: Tensor | None, bias: Tensor | None, y: Tensor, wanted: Wanted
    ) -> Any:
        keep = any(ctx.needs_input_grad[:4]) and len(x) * len(w) <= _PRODUCTS_KEPT
        target = x.new_zeros(len(x))
        total = None if wanted.total_weights is None else x.new_zeros(len(x))
        norms = w.new_empty(len(w)) if wanted.unit_rows else None
        blocks = list(_blocks(y, len(w), w.shape[1]))
        kept, parts = [], []
        for block in blocks:
            if norms is not None:
                torch.linalg.vector_norm(w[block.classes], dim=1, out=norms[block.classes])
            z = _products(x, w, norms, block)
            at = (block.rows, block.columns)
            target[block.rows] = z[at]
            scores = _scores(z, rho, None if bias is None else block.of(bias), wanted)
            if total is not None and wanted.total_weights is not None:
                weights = block.of(wanted.total_weights)
                total += scores @ weights
                total[block.rows] -= scores[at] * weights[block.columns]
            scores[at] = float("-inf")
            parts.append(wanted.reduction.within(scores))
            if keep:
                if scores is z:
                    z[at] = target[block.rows]
                kept.append(z)
        if norms is not None and not _numerics.squares_are_safe(norms):
            raise _OutOfRange
        others = parts[0] if len(parts) == 1 else wanted.reduction.across(torch.stack(parts, 1))
        target_norm = None
        if not wanted.unit_rows:
            target_norm = sphere.row_polar(w[y.clamp_min(0)])[0].squeeze(1).masked_fill(y < 0, 0)
        ctx.save_for_backward(x, w, rho, bias, y, norms, others, target_norm, wanted.total_weights)
        ctx.wanted, ctx.blocks, ctx.kept = wanted, blocks, kept
        return others, total, target, target_norm

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        with _numerics.autocast_disabled(grads[0] if grads[0] is not None else ctx.saved_tensors[0]):
            if torch.is_grad_enabled():
                return (*_differentiable_backward(ctx, grads), None, None)
            return (*_backward(ctx, grads), None, None)


def _products(x: Tensor, w: Tensor, norms: Tensor | None, block: _Block) -> Tensor:
    """Products of all features with a block of class vectors, unit ones if norms are given."""
    z = x @ w[block.classes].mT
    return z if norms is None else z.div_(norms[block.classes])


def _differentiable_backward(ctx: Any, grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """The same gradients as a graph of their own, for second derivatives."""
    x, w, rho, bias, y = ctx.saved_tensors[:5]
    terms = plain_terms(x, w, y, rho, bias, ctx.wanted)
    given = [(term, grad) for term, grad in zip(terms, grads, strict=True) if term is not None and grad is not None]
    needed = [need and t is not None for t, need in zip((x, w, rho, bias), ctx.needs_input_grad, strict=False)]
    inputs = [t for t, need in zip((x, w, rho, bias), needed, strict=True) if need]
    outputs, outer = [term for term, _ in given], [grad for _, grad in given]
    found = iter(torch.autograd.grad(outputs, inputs, outer, create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in needed]


def _backward(ctx: Any, grads: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    x, w, rho, bias, y, norms, others, target_norm, total_weights = ctx.saved_tensors
    wanted, (d_others, d_total, d_target, d_norm) = ctx.wanted, grads
    need_x, need_w, need_rho, need_bias = ctx.needs_input_grad[:4]
    dx = torch.zeros_like(x) if need_x else None
    dw = torch.empty_like(w) if need_w else None
    d_rho = torch.zeros_like(rho) if need_rho else None
    d_bias = torch.zeros_like(bias) if need_bias else None
    kept = ctx.kept[::-1]
    ctx.kept = []  # handed over block by block; a second backward computes them again
    for block in ctx.blocks:
        z = kept.pop() if kept else _products(x, w, norms, block)
        at = (block.rows, block.columns)
        scores: Tensor = z
        response: Any = None
        leaf: Any = None
        if wanted.response is not None:
            by_graph = wanted.slope is None and not wanted.detached
            with torch.set_grad_enabled(by_graph):
                leaf = z.detach().requires_grad_() if by_graph else None
                response = wanted.response(z if leaf is None else leaf)
            scores = rho.unsqueeze(1) * response.detach()
        if bias is not None:
            scores = scores + block.of(bias)
        slope = wanted.reduction.slope(scores, others).mul_(d_others.unsqueeze(1))
        if d_total is not None and total_weights is not None:
            slope.addcmul_(d_total.unsqueeze(1), block.of(total_weights))
        slope[at] = 0
        if d_bias is not None:
            share = slope.sum(0)
            d_bias[block.classes if len(d_bias) > 1 else ...] += share if len(d_bias) > 1 else share.sum()
        if d_rho is not None:
            d_rho += torch.linalg.vecdot(slope, response.detach(), dim=1)
        d_z = slope if response is None else slope.mul_(rho.unsqueeze(1))
        if leaf is not None:
            (d_z,) = torch.autograd.grad(response, leaf, d_z)
        elif wanted.slope is not None and not wanted.detached:
            d_z.mul_(wanted.slope(z, response))
        d_z[at] = d_target[block.rows]
        rows = w[block.classes]
        if norms is not None:
            inverse = norms[block.classes].reciprocal()
            if dw is not None:
                along = (d_z * z).sum(0).mul_(inverse).mul_(inverse).neg_()
                torch.mul(rows, along.unsqueeze(1), out=dw[block.classes])
            d_z.mul_(inverse)
            if dw is not None:
                dw[block.classes].addmm_(d_z.mT, x)
        elif dw is not None:
            torch.mm(d_z.mT, x, out=dw[block.classes])
        if dx is not None:
            dx.addmm_(d_z, rows)
    if dw is not None and target_norm is not None:
        own = y.clamp_min(0)
        inverse = torch.where(target_norm > 0, target_norm, torch.inf).reciprocal()
        dw.index_add_(0, own, w[own] * inverse.unsqueeze(1) * d_norm.unsqueeze(1))
    return dx, dw, d_rho, d_bias
