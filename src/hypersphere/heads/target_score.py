r"""The target score f_y = h·ψ(θ): the function h·ψ(z/h) of the product z = h·cos θ, and the choice of its gradient.

`TargetMargin` is ψ for the targets of one batch. `scaled_psi` computes h·ψ(z/h) with a closed-form derivative.
`with_normalized_gradient` gives it the gradient of the original SphereFace code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hypersphere import _numerics
from hypersphere.functions._autograd import differentiable_gradients
from hypersphere.functions.margin import COSINE, AffineAngleMargin, Margin
from hypersphere.heads._score_functions import straight_through, tensor_fields
from hypersphere.heads.fused_loss import safe_divisor

__all__ = ["TargetMargin", "reference_scaled_psi", "scaled_psi", "with_normalized_gradient"]


class TargetMargin(NamedTuple):
    """ψ for the targets of one batch, a function of the cosine.

    Attributes:
        margin: ψ for this batch.
        angular: g.
        strength: the strength of the margin, a number or (B,).
        gradient: "true", "detached" or "normalized", as in `AngularHead`.
    """

    margin: Margin
    angular: Callable[[Tensor], Tensor] = COSINE
    strength: float | Tensor = 1.0
    gradient: str = "true"

    def __call__(self, c: Tensor) -> Tensor:
        """Return ψ, with the gradient of the cosine if it is detached."""
        psi = self.margin(c, self.angular, self.strength)
        return straight_through(c, psi) if self.gradient == "detached" else psi

    @property
    def has_closed_form(self) -> bool:
        """Whether the derivative is known for g = cos: that of ψ, or 1 if it is detached."""
        if self.gradient != "true":
            return self.gradient == "detached"
        # The closed form has no gradient with respect to the numbers of ψ: learned ones, or functions of ‖x‖.
        is_learned = any(value.requires_grad for value in tensor_fields(self.margin).values())
        return isinstance(self.margin, AffineAngleMargin) and self.margin.has_slope and not is_learned

    def value_and_slope(self, c: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return ψ and its derivative, if `has_closed_form`."""
        if self.gradient == "detached":
            return self.margin(c, self.angular, self.strength), 1.0
        assert isinstance(self.margin, AffineAngleMargin)
        return self.margin.value_and_slope(c, self.strength)


# The function h·ψ(z/h) -----------------------------------------------------------------------------------------------


def scaled_psi(product: Tensor, magnitude: Tensor | float, psi: TargetMargin) -> Tensor:
    r"""Return the target score h·ψ(c) with c = z/h, given the products z = h·c.

    Where h = 0 the angle is undefined. The gradient there is that of h·c.

    Args:
        product: (B,) z.
        magnitude: (B,) h, or one number for all samples.
        psi: ψ, a function of the cosine.
    """
    if psi.has_closed_form and _numerics.custom_backward_allowed(product):
        return _ScaledPsi.apply(product, magnitude, psi)
    return reference_scaled_psi(product, magnitude, psi)


def reference_scaled_psi(product: Tensor, magnitude: Tensor | float, psi: TargetMargin) -> Tensor:
    """Return h·ψ(c) in ordinary, differentiable operations."""
    score = magnitude * psi(_cosines(product, magnitude))
    return torch.where(magnitude == 0, product, score) if isinstance(magnitude, Tensor) else score


class _ScaledPsi(torch.autograd.Function):
    r"""f = h·ψ(z/h) with ∂f/∂z = ψ′ and ∂f/∂h = ψ − ψ′c: half as many operations as automatic differentiation."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, magnitude: Tensor | float, psi: TargetMargin) -> Tensor:
        ctx.psi = psi
        ctx.radius = None if isinstance(magnitude, Tensor) else magnitude
        is_zero, divisor = None, magnitude
        if isinstance(magnitude, Tensor):
            is_zero = magnitude == 0
            divisor = magnitude.masked_fill(is_zero, torch.inf)  # c = 0 where h = 0
        c = product / divisor
        value, factor = psi.value_and_slope(c)
        if isinstance(factor, Tensor):
            derivative: Tensor | None = factor
        else:  # None stands for 1, which saves a multiplication
            derivative = None if factor == 1 else torch.full_like(value, factor)
        if is_zero is None:
            ctx.save_for_backward(product, None, derivative, None)
            return value * magnitude
        if derivative is not None:
            derivative = derivative.masked_fill(is_zero, 1.0)  # the gradient of h·c
        magnitude_derivative = value - c if derivative is None else torch.addcmul(value, derivative, c, value=-1)
        ctx.save_for_backward(product, magnitude, derivative, magnitude_derivative)
        return value * magnitude

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        product, magnitude, derivative, magnitude_derivative = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():  # create_graph=True: the gradients must themselves be differentiable

            def reference(product: Tensor, magnitude: Tensor | None) -> Tensor:
                return reference_scaled_psi(product, ctx.radius if magnitude is None else magnitude, ctx.psi)

            return *differentiable_gradients(reference, (product, magnitude), needs, grad), None
        grad_product = grad if derivative is None else grad * derivative
        return grad_product, grad * magnitude_derivative if needs[1] else None, None


def _cosines(product: Tensor, magnitude: Tensor | float) -> Tensor:
    """Return c = z/h, and 0 where h is zero."""
    return product / (safe_divisor(magnitude) if isinstance(magnitude, Tensor) else magnitude)


# The normalized gradient ---------------------------------------------------------------------------------------------


def with_normalized_gradient(
    score: Tensor, product: Tensor, psi: TargetMargin, x: Tensor, x_norm: Tensor, w_hat: Tensor
) -> Tensor:
    r"""Return target scores ‖x‖·ψ(θ) with the gradient of the original SphereFace code.

    Without margin ∂f_y/∂x = ŵ. The original code has

        ∂f_y/∂x = (ψ′·ŵ + (ψ − ψ′c)·x̂)/√(ψ′² + ((ψ − ψ′c)/‖x‖)²),

    whose length is bounded for any margin, while ∂f_y/∂w is the one without margin.

    Args:
        score: (B,) target scores.
        product: (B,) products ‖x‖·c of features with unit class vectors.
        psi: ψ, a function of the cosine.
        x: (B, d) features.
        x_norm: (B,) feature norms.
        w_hat: (B, d) directions of the target class vectors, detached.
    """
    score = straight_through(product, score)
    # What follows changes only gradients, and an exported program has none.
    if not torch.is_grad_enabled() or torch.compiler.is_exporting():
        return score
    x_norm = x_norm.detach()
    c = _cosines(product.detach(), x_norm)
    value, derivative = psi(c).detach(), _derivative(psi, c)
    with torch.no_grad():
        inverse_norm = 1 / safe_divisor(x_norm)
        radial = value - derivative * c  # ψ − ψ′c, the component along x̂
        length = torch.hypot(derivative, radial * inverse_norm)
        x_hat = x.detach() * inverse_norm.unsqueeze(1)
        direction = derivative.unsqueeze(1) * w_hat + radial.unsqueeze(1) * x_hat
        # A zero length means ψ = ψ′ = 0, where the direction is zero too.
        target_gradient = direction / length.masked_fill(length == 0, 1).unsqueeze(1)
        difference = (target_gradient - w_hat).masked_fill((x_norm == 0).unsqueeze(1), 0)
    # The score has the gradient ŵ of the product. This term is zero and has the gradient `difference` with respect to
    # x, so that their sum is the target gradient.
    return score + ((x - x.detach()) * difference).sum(1)


def _derivative(function: TargetMargin, at: Tensor) -> Tensor:
    """Return the derivative of an elementwise function, detached."""
    if torch.compiler.is_compiling() or _numerics.in_functorch():
        return torch.func.grad(lambda t: function(t).sum())(at).detach()
    # torch.func does not support saved-tensor hooks, which checkpointing and `save_on_cpu` install.
    with torch.enable_grad():
        leaf = at.detach().requires_grad_()
        return torch.autograd.grad(function(leaf).sum(), leaf)[0]
