r"""The target score f_y = h·ψ(θ): margin, choice of the gradient, annealing.

The second step of a head's loss is `score_of_product` if scores are products z = h·cos θ, else `score_of_cosine`.
`scaled_psi` computes h·ψ(z/h) with a closed-form derivative. `NormalizedGradient` has the gradient of the original
SphereFace code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hypersphere import _numerics
from hypersphere.functions._autograd import differentiable_gradients
from hypersphere.functions.margin import Margin
from hypersphere.heads._responses import Responses
from hypersphere.heads.fused_loss import safe_divisor, straight_through

__all__ = ["NormalizedGradient", "TargetMargin", "scaled_psi", "score_of_cosine", "score_of_product"]

Psi = Callable[[Tensor], Tensor]
PsiAndDerivative = Callable[[Tensor], tuple[Tensor, Tensor | float]]


class TargetMargin(NamedTuple):
    """The margin on the target scores of a batch.

    Attributes:
        psi: ψ for this batch.
        strength: the strength of the margin, a number or (B,).
        annealing_weight: λ, the weight of the score without margin; None for 0.
    """

    psi: Margin
    strength: float | Tensor = 1.0
    annealing_weight: Tensor | None = None

    def response(self, responses: Responses) -> Psi:
        """Return ψ as a function of the cosine, with the chosen gradient."""
        return lambda c: responses.with_gradient_mode(c, self.psi(c, responses.angular, self.strength))

    def annealed(self, score: Tensor, unmargined: Tensor) -> Tensor:
        """Return the mean of the scores with and without margin, of weights 1 and λ."""
        weight = self.annealing_weight
        return score if weight is None else (weight * unmargined + score) / (1 + weight)


def score_of_product(
    product: Tensor,
    magnitude: Tensor | float,
    responses: Responses,
    margin: TargetMargin,
    normalized: NormalizedGradient | None,
) -> Tensor:
    r"""Return the target scores h·ψ(θ), (B,), of a head whose scores without margin are products h·cos θ.

    Args:
        product: (B,) h·cos θ of each sample with its target class.
        magnitude: h, (B,) or one number.
        responses: g, which is the cosine, and the choice of the gradient.
        margin: the margin.
        normalized: the gradient of the original SphereFace code, if it is the one chosen.
    """
    psi = margin.response(responses)
    score = scaled_psi(product, magnitude, psi, _closed_form(responses, margin))
    if normalized is not None:
        score = straight_through(product, score)
        # The correction changes only gradients, and an exported program has none.
        if torch.is_grad_enabled() and not torch.compiler.is_exporting():
            score = score + normalized.correction(product, psi)
    return margin.annealed(score, product)


def score_of_cosine(
    cosine: Tensor, magnitude: Tensor | float, responses: Responses, margin: TargetMargin | None
) -> Tensor:
    r"""Return the target scores h·ψ(θ), (B,), or h·g(θ) without a margin.

    Args:
        cosine: (B,) cos θ of each sample with its target class.
        magnitude: h, (B,) or one number.
        responses: g and the choice of the gradient.
        margin: the margin; None for g.
    """
    unmargined = magnitude * responses.with_gradient_mode(cosine, responses.angular(cosine))
    if margin is None:
        return unmargined
    return margin.annealed(magnitude * margin.response(responses)(cosine), unmargined)


def _closed_form(responses: Responses, margin: TargetMargin) -> PsiAndDerivative | None:
    """Return ψ and ψ′ as functions of the cosine, or None if ψ′ is not known in closed form."""
    if not responses.has_closed_form:
        return None
    psi: Any = margin.psi
    if responses.gradient == "detached":
        return lambda c: (psi(c, responses.angular, margin.strength), 1.0)
    return lambda c: psi.value_and_slope(c, margin.strength)


# The function h·ψ(z/h) -----------------------------------------------------------------------------------------------


def scaled_psi(
    product: Tensor, magnitude: Tensor | float, psi: Psi, psi_and_derivative: PsiAndDerivative | None = None
) -> Tensor:
    r"""Return the target score h·ψ(c) with c = z/h, given the products z = h·c.

    Where h = 0 the angle is undefined. The gradient there is that of h·c.

    Args:
        product: (B,) z.
        magnitude: (B,) h, or one number for all samples.
        psi: ψ, a function of the cosine.
        psi_and_derivative: ψ and ψ′ as functions of the cosine; None to differentiate ψ automatically.
    """
    if psi_and_derivative is not None and _numerics.custom_backward_allowed(product):
        return _ScaledPsi.apply(product, magnitude, psi, psi_and_derivative)
    return reference_scaled_psi(product, magnitude, psi)


def reference_scaled_psi(product: Tensor, magnitude: Tensor | float, psi: Psi) -> Tensor:
    """Return h·ψ(c) in ordinary, differentiable operations."""
    score = magnitude * psi(_cosines(product, magnitude))
    return torch.where(magnitude == 0, product, score) if isinstance(magnitude, Tensor) else score


class _ScaledPsi(torch.autograd.Function):
    r"""f = h·ψ(z/h) with ∂f/∂z = ψ′ and ∂f/∂h = ψ − ψ′c: half as many operations as automatic differentiation."""

    @staticmethod
    def forward(
        ctx: Any, product: Tensor, magnitude: Tensor | float, psi: Psi, psi_and_derivative: PsiAndDerivative
    ) -> Tensor:
        ctx.psi = psi
        ctx.number = None if isinstance(magnitude, Tensor) else magnitude
        is_zero, divisor = None, magnitude
        if isinstance(magnitude, Tensor):
            is_zero = magnitude == 0
            divisor = magnitude.masked_fill(is_zero, torch.inf)  # c = 0 where h = 0
        c = product / divisor
        value, factor = psi_and_derivative(c)
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
                return reference_scaled_psi(product, ctx.number if magnitude is None else magnitude, ctx.psi)

            return *differentiable_gradients(reference, (product, magnitude), needs, grad), None, None
        grad_product = grad if derivative is None else grad * derivative
        return grad_product, grad * magnitude_derivative if needs[1] else None, None, None


def _cosines(product: Tensor, magnitude: Tensor | float) -> Tensor:
    """Return c = z/h, and 0 where h is zero."""
    return product / (safe_divisor(magnitude) if isinstance(magnitude, Tensor) else magnitude)


# The normalized gradient ---------------------------------------------------------------------------------------------


class NormalizedGradient(NamedTuple):
    r"""The gradient of the original SphereFace code, for scores ‖x‖·ψ(θ).

    Without margin ∂f_y/∂x = ŵ. The original code has

        ∂f_y/∂x = (ψ′·ŵ + (ψ − ψ′c)·x̂)/√(ψ′² + ((ψ − ψ′c)/‖x‖)²),

    whose length is bounded for any margin, while ∂f_y/∂w is the one without margin.

    Attributes:
        x: (B, d) features.
        x_norm: (B,) feature norms.
        w_hat: (B, d) directions of the target class vectors, detached.
    """

    x: Tensor
    x_norm: Tensor
    w_hat: Tensor

    def correction(self, product: Tensor, psi: Psi) -> Tensor:
        """Return zeros (B,) whose gradient turns the gradient without margin into this one.

        Args:
            product: (B,) products ‖x‖·c of features with unit class vectors.
            psi: ψ, a function of the cosine.
        """
        x, x_norm, w_hat = self.x, self.x_norm.detach(), self.w_hat
        c = _cosines(product.detach(), x_norm)
        value, derivative = psi(c).detach(), _derivative(psi, c)
        with torch.no_grad():
            inverse_norm = 1 / safe_divisor(x_norm)
            along_x = value - derivative * c
            length = torch.hypot(derivative, along_x * inverse_norm)
            x_hat = x.detach() * inverse_norm.unsqueeze(1)
            direction = derivative.unsqueeze(1) * w_hat + along_x.unsqueeze(1) * x_hat
            # A zero length means ψ = ψ′ = 0, where the direction is zero too.
            target_gradient = direction / length.masked_fill(length == 0, 1).unsqueeze(1)
            difference = (target_gradient - w_hat).masked_fill((x_norm == 0).unsqueeze(1), 0)
        return ((x - x.detach()) * difference).sum(1)


def _derivative(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Return the derivative of an elementwise function, detached."""
    if torch.compiler.is_compiling() or _numerics.in_functorch():
        return torch.func.grad(lambda t: function(t).sum())(at).detach()
    # torch.func does not support saved-tensor hooks, which checkpointing and `save_on_cpu` install.
    with torch.enable_grad():
        leaf = at.detach().requires_grad_()
        return torch.autograd.grad(function(leaf).sum(), leaf)[0]
