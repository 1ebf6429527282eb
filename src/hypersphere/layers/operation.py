"""The operator by hand as an operator of torch, with a backward of its own; a compiler leaves it as it is."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from hypersphere.functions.angular import ANGULARS, Angular, Cosine, Sigmoid
from hypersphere.layers import blockwise
from hypersphere.layers.by_hand import require_first_order
from hypersphere.layers.response import Response, response_of
from hypersphere.layers.walk import Walk

__all__ = ["operate"]


def operate(
    x: Tensor,
    weight: Tensor,
    walk: Walk,
    scale: Tensor,
    reciprocal: Tensor,
    magnitude: Tensor | None,
    slope: Tensor | None,
    angular: Angular,
) -> Tensor:
    r"""Return h·g(c) (N, filters, …), c = ⟨ŵ, x⟩/‖x‖.

    Args:
        x: the input (N, channels, …).
        weight: directions ŵ of the filters.
        walk: how they go over `x`.
        scale: what `x` was multiplied by before it was squared (N, 1, …).
        reciprocal: 1/‖x‖ (N, groups, 1, …) without a graph, 0 for a zero patch.
        magnitude: h in the same shape, with a graph of its radius alone; None for 1.
        slope: dh/d‖x‖ in the same shape, if there is an h and `x` wants a gradient.
        angular: g, one of the library's.
    """
    k = angular.k if isinstance(angular, Sigmoid) and isinstance(angular.k, Tensor) else None
    learns = [t is not None and t.requires_grad for t in (x, magnitude, weight, k)]
    keep = torch.is_grad_enabled() and any(learns[:2] if isinstance(angular, Cosine) else learns)
    name = next(name for name, kind in ANGULARS.items() if type(angular) is kind)
    numbers = [] if k is not None else [float(getattr(angular, f.name)) for f in fields(angular)]  # type: ignore[arg-type]
    return _forward(x, weight, magnitude, k, scale, reciprocal, slope, walk.numbers(), name, numbers, keep)[0]


@torch.library.custom_op("hypersphere::decoupled", mutates_args=())
def _forward(
    x: Tensor,
    weight: Tensor,
    magnitude: Tensor | None,
    k: Tensor | None,
    scale: Tensor,
    reciprocal: Tensor,
    slope: Tensor | None,
    walk: list[int],
    angular: str,
    numbers: list[float],
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Return f and what is kept for backward; scale and slope are for backward alone."""
    response = _response(angular, numbers, k)
    y, kept = blockwise.forward(x, weight, magnitude, reciprocal, Walk.of_numbers(walk), response, keep)
    return y, x.new_empty(0) if kept is None else kept


@_forward.register_fake
def _(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, reciprocal, _, walk, _, _, keep = rest
    y = Walk.of_numbers(walk).product(x, weight)
    return y, torch.empty_like(y, dtype=blockwise.kept_type(reciprocal.dtype)) if keep else x.new_empty(0)


@torch.library.custom_op("hypersphere::decoupled_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    kept: Tensor,
    x: Tensor,
    weight: Tensor,
    magnitude: Tensor | None,
    k: Tensor | None,
    scale: Tensor,
    reciprocal: Tensor,
    slope: Tensor | None,
    walk: list[int],
    angular: str,
    numbers: list[float],
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight, magnitude and k that are wanted, and something empty for the others."""
    response = _response(angular, numbers, k, learn=wanted[3])
    found = blockwise.backward(
        gradient,
        kept if kept.numel() else None,
        x,
        weight,
        magnitude,
        scale,
        reciprocal,
        slope,
        Walk.of_numbers(walk),
        response,
        (wanted[0], wanted[1]),
    )
    to_k = response.to_k() if wanted[3] else None
    to_x, to_weight, to_magnitude, to_k = (
        _laid_out(to, like) if want and to is not None and like is not None else x.new_empty(0)
        for to, like, want in zip((*found, to_k), (x, weight, magnitude, k), wanted, strict=True)
    )
    return to_x, to_weight, to_magnitude, to_k


@_backward.register_fake
def _(gradient: Tensor, kept: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weight, magnitude, k, *_, wanted = rest
    to_x, to_weight, to_magnitude, to_k = (
        torch.empty_like(like) if want else x.new_empty(0)
        for like, want in zip((x, weight, magnitude, k), wanted, strict=True)
    )
    return to_x, to_weight, to_magnitude, to_k


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], *inputs[:7])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.settings = inputs[7:10]


def _differentiate(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if not torch.compiler.is_compiling():
        require_first_order()
    if gradient is None:
        return (None,) * 11
    wanted = list(ctx.needs_input_grad[:4])
    found = _backward(gradient, *ctx.saved_tensors, *ctx.settings, wanted)
    return *(to if want else None for to, want in zip(found, wanted, strict=True)), *[None] * 7


_forward.register_autograd(_differentiate, setup_context=_save)


def _response(angular: str, numbers: list[float], k: Tensor | None, learn: bool = False) -> Response:
    return response_of(ANGULARS[angular](*numbers) if k is None else Sigmoid(k), learn)


def _laid_out(found: Tensor, like: Tensor) -> Tensor:
    """Return `found` in the type and memory format of `like`, as the compiler was told."""
    if found.dtype == like.dtype and found.stride() == like.stride():
        return found
    return torch.empty_like(like).copy_(found)
