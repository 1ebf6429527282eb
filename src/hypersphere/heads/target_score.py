r"""The target score f_y = h·ψ(θ) with an explicit derivative, and the gradient of the original SphereFace code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hypersphere.heads.fused_loss import graph_gradients

__all__ = ["explicit_score", "normalized_gradient_term"]


def explicit_score(
    product: Tensor,
    magnitude: Tensor | float,
    value_and_slope: Callable[[Tensor], tuple[Tensor, Tensor | float]],
    score: Callable[[Tensor, Tensor | float], Tensor],
) -> Tensor:
    r"""Return f = h·ψ(z/h) with the derivatives ∂f/∂z = ψ′ and ∂f/∂h = ψ − ψ′c, where c = z/h is the target cosine.

    This takes half as many small operations as automatic differentiation. Where h is zero there is no angle, and the
    score has the gradient of a linear layer, ψ′ = 1.

    Args:
        product: (B,) z, inner products with the target class vectors.
        magnitude: (B,) h, or one number for all samples.
        value_and_slope: ψ and ψ′ as functions of c.
        score: the same f as a function of z and h by automatic differentiation, for second derivatives.
    """
    return _ExplicitScore.apply(product, magnitude, value_and_slope, score)


class _ExplicitScore(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, product: Tensor, magnitude: Tensor | float, value_and_slope: Callable[..., Any], score: Any
    ) -> Tensor:
        ctx.score = score
        if not isinstance(magnitude, Tensor):
            ctx.score = lambda product, _: score(product, magnitude)
            psi, slope = value_and_slope(product / magnitude)
            ctx.save_for_backward(product, None, slope if isinstance(slope, Tensor) else None, None)
            return psi * magnitude
        is_zero = magnitude == 0
        c = product / magnitude.masked_fill(is_zero, 1.0)
        psi, slope = value_and_slope(c)
        if isinstance(slope, Tensor):
            slope = slope.masked_fill(is_zero, 1.0)
            ctx.save_for_backward(product, magnitude, slope, torch.addcmul(psi, slope, c, value=-1))
        else:
            ctx.save_for_backward(product, magnitude, None, psi - slope * c)
        return psi * magnitude

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        product, magnitude, slope, magnitude_slope = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():  # create_graph=True
            score = ctx.score(product, magnitude)
            return (*graph_gradients([score], [grad], [product, magnitude], needs_grad), None, None)
        grad_product = grad if slope is None else grad * slope  # only a slope of 1 is not a tensor
        return grad_product, grad * magnitude_slope if needs_grad[1] else None, None, None


def normalized_gradient_term(
    psi: Callable[[Tensor], Tensor], c: Tensor, x: Tensor, x_norm: Tensor, w_hat: Tensor
) -> Tensor:
    r"""Return zeros whose gradient turns the plain gradient of the target score into that of the original SphereFace.

    The plain gradient is ∂f_y/∂x = ŵ. The original code has

        ∂f_y/∂x = (ψ′·ŵ + (ψ − ψ′c)·x̂)/√(ψ′² + ((ψ − ψ′c)/‖x‖)²),

    whose length is bounded for any margin, while ∂f_y/∂w is the one without margin.

    Args:
        psi: the margin as a function of the target cosines.
        c: (B,) target cosines, detached.
        x: (B, d) features.
        x_norm: (B,) feature norms, detached.
        w_hat: (B, d) directions of the target class vectors, detached.
    """
    value, slope = psi(c).detach(), _derivative(psi, c)
    with torch.no_grad():
        inverse_norm = 1 / x_norm.masked_fill(x_norm == 0, torch.inf)
        along_x = value - slope * c
        length = torch.hypot(slope, along_x * inverse_norm)
        x_hat = x.detach() * inverse_norm.unsqueeze(1)
        direction = slope.unsqueeze(1) * w_hat + along_x.unsqueeze(1) * x_hat
        # A zero length means ψ = ψ′ = 0, where the direction is zero too.
        target = direction / length.masked_fill(length == 0, 1).unsqueeze(1)
        difference = (target - w_hat).masked_fill((x_norm == 0).unsqueeze(1), 0)
    return ((x - x.detach()) * difference).sum(1)


def _derivative(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Return the derivative of an elementwise function, detached."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return torch.func.grad(lambda t: function(t).sum())(at).detach()
    # torch.func does not support saved-tensor hooks, which checkpointing and `save_on_cpu` install.
    with torch.enable_grad():
        leaf = at.detach().requires_grad_()
        return torch.autograd.grad(function(leaf).sum(), leaf)[0]
