r"""From an inner product to a response: h·g(c) with c = ⟨ŵ, x⟩/‖x‖, in place and with little kept for backward.

Eager mode works in place on the product and keeps a private copy of the cosines alone, so that an activation may work
in place in turn (for a g other than cosine it keeps the cotangents of the angles, which half precision holds to 0.05 %
from a right angle to the poles). They are kept in 16 bits unless the numbers have 64, because they only tell backward
how much of a gradient runs along the patch. A layer's gradient is so rounded by some parts in 10⁵ of its size; that of
one filter that lies within a tenth of a radian of its patch, where the rest of the gradient cancels, by up to 1 %, and
those of a learned k or radius by up to 0.5 %. While compiling, exporting or under `torch.func` the same is written in
plain operations, for the compiler to fuse.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hypersphere import sphere
from hypersphere.functions.angular import Angular, Cosine, Linear, Sigmoid
from hypersphere.layers.product import by_hand, cache_chunks, require_first_order

__all__ = ["respond"]


def respond(
    product: Tensor, reciprocal: Tensor, magnitude: Tensor | None, angular: Callable[[Tensor], Tensor]
) -> Tensor:
    r"""Return h·g(c), c = product/‖x‖, in the type and shape of `product`, which may be overwritten.

    Args:
        product: ⟨ŵ, x⟩ (N, filters, …).
        reciprocal: 1/‖x‖ (N, groups, 1, …), 0 for a zero patch.
        magnitude: h, broadcasting with (N, groups, filters of a group, …); None for 1.
        angular: g, a function of the cosine.
    """
    one_channel = magnitude is None or magnitude.shape == reciprocal.shape
    if isinstance(angular, Angular) and one_channel and by_hand(product, reciprocal):
        k = angular.k if isinstance(angular, Sigmoid) and isinstance(angular.k, Tensor) else None
        return _Response.apply(product, reciprocal, magnitude, k, angular)
    groups = reciprocal.shape[1]
    value = angular(sphere.widen(product).unflatten(1, (groups, -1)) * reciprocal)
    if magnitude is not None:
        value = value * magnitude  # in this order the memory format is the product's
    return sphere.narrow(value, product.dtype).flatten(1, 2)


class _Response(torch.autograd.Function):
    """h·g(c) on the product's own memory; backward from cosines, 1/‖x‖ and h."""

    @staticmethod
    def forward(
        ctx: Any, product: Tensor, reciprocal: Tensor, magnitude: Tensor | None, k: Tensor | None, angular: Angular
    ) -> Tensor:
        groups = reciprocal.shape[1]
        dtype = product.dtype
        value = sphere.widen(product.detach()).unflatten(1, (groups, -1))
        plain = isinstance(angular, Cosine)
        keep = any(ctx.needs_input_grad[1:4]) or (not plain and ctx.needs_input_grad[0])
        narrow = torch.float64 if value.dtype == torch.float64 else torch.float16
        kept = torch.empty_like(value, dtype=narrow) if keep else None
        for part in cache_chunks(value):
            c = value[part].mul_(reciprocal[part])
            if kept is not None:
                kept[part].copy_(c if plain else sphere.cotangent(c))
            if not plain:
                _apply_(angular, c)
            if magnitude is not None:
                c.mul_(magnitude[part])
        ctx.save_for_backward(reciprocal, magnitude, k, kept)
        ctx.angular, ctx.dtype = angular, dtype
        if dtype == value.dtype:
            ctx.mark_dirty(product)
            return product
        return sphere.narrow(value, dtype).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        require_first_order()
        reciprocal, magnitude, k, kept = ctx.saved_tensors
        angular = ctx.angular
        plain = isinstance(angular, Cosine)
        incoming = sphere.widen(gradient).unflatten(1, (reciprocal.shape[1], -1))
        factor = reciprocal if magnitude is None else reciprocal * magnitude
        if kept is None:
            return (incoming * factor).flatten(1, 2).to(ctx.dtype), None, None, None, None
        outgoing = torch.empty_like(incoming)
        along = torch.empty_like(reciprocal)  # Σ over filters of ∂c·c
        k_slope = None if k is None or not ctx.needs_input_grad[3] else torch.zeros_like(k)
        responses = None if plain or magnitude is None else torch.empty_like(reciprocal)  # Σ over filters of G·g
        for part in cache_chunks(incoming):
            g, out = incoming[part], outgoing[part]
            code = kept[part].to(g.dtype)
            if plain:
                torch.sum(torch.mul(g, code, out=out), 2, keepdim=True, out=along[part])
                torch.mul(g, factor[part], out=out)
                continue
            c, theta_slope = sphere.from_cotangent(code)
            weighted = g if magnitude is None else g * magnitude[part]
            slope, value = _slope(angular, c, theta_slope, weighted, k, k_slope)
            if responses is not None:
                torch.sum(value().mul_(g), 2, keepdim=True, out=responses[part])
            torch.sum(torch.mul(slope, c, out=out), 2, keepdim=True, out=along[part])
            torch.mul(slope, reciprocal[part], out=out)
        to_magnitude = responses
        if plain and magnitude is not None:
            to_magnitude, along = along, along * magnitude
        to_reciprocal = (along / reciprocal).masked_fill(reciprocal == 0, 0.0)
        return outgoing.flatten(1, 2).to(ctx.dtype), to_reciprocal, to_magnitude, k_slope, None


def _apply_(angular: Angular, c: Tensor) -> Tensor:
    """Write g(c) over c."""
    if isinstance(angular, Linear):
        return sphere.angle_(c).mul_(-2 / math.pi).add_(1)
    if isinstance(angular, Sigmoid) and not isinstance(angular.k, Tensor):
        top = math.tanh(math.pi / (4 * angular.k))
        return _logistic_(c, angular.k).mul_(2 / top).sub_(1 / top)
    return c.copy_(angular.at(sphere.angle_(c)) if isinstance(angular, Sigmoid) else angular(c))


def _logistic_(c: Tensor, k: float) -> Tensor:
    """Write 1/(1+exp(−(π/2−θ)/k)) over c: tanh of half the exponent is twice this less one, and takes much longer."""
    return sphere.angle_(c).mul_(-1 / k).add_(math.pi / (2 * k)).sigmoid_()


def _slope(
    angular: Angular, c: Tensor, theta_slope: Tensor, gradient: Tensor, k: Tensor | None, k_slope: Tensor | None
) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return gradient·g′(c) of one chunk and a way to get g(c), and add the share of a learned k to `k_slope`.

    What has an angle's slope takes it from the cotangent, which is precise at the poles, where the cosine is not.
    """
    if isinstance(angular, Linear):
        return theta_slope.mul_(gradient).mul_(angular.angle_slope()), lambda: _apply_(angular, c.clone())
    if k_slope is None:
        value = _apply_(angular, c.clone())
        if isinstance(angular, Sigmoid):
            return theta_slope.mul_(angular.angle_slope(value)).mul_(gradient), lambda: value
        return angular.slope(c, value).mul_(gradient), lambda: value
    assert k is not None
    theta, steepness = sphere.angle_(c.clone()).requires_grad_(), k.detach().requires_grad_()
    with torch.enable_grad():
        graph = Sigmoid(steepness).at(theta)
        slope, of_k = torch.autograd.grad(graph, [theta, steepness], gradient)
    k_slope += of_k
    return theta_slope.mul_(slope), graph.detach
