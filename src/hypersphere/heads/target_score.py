r"""The target score f_y = h·ψ(θ) with an explicit derivative, and the gradient of the original SphereFace code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hypersphere.functions._autograd import differentiable_gradients, only_reverse_mode
from hypersphere.functions.margin import Margin
from hypersphere.heads.fused_loss import straight_through

__all__ = ["TargetScore", "normalized_gradient_term"]


@dataclass(frozen=True, eq=False)
class TargetScore:
    r"""The score f = h·ψ(c) of the target class, c the cosine of the target angle, for one call of a head.

    Where h is zero there is no angle, and a score of products has the gradient of a linear layer, as if ψ(c) were c.

    Args:
        margin: ψ, one of the library's margins or any callable of the cosine.
        angular: g.
        strength: the strength of the margin in this call.
        interpolates: whether a margin that takes no strength is interpolated: g + strength·(ψ − g).
        of_products: whether the score is computed from products h·c instead of cosines c.
        detached: whether the response passes its gradient on as the bare cosine would.
        explicit: whether ψ′ is known in closed form, so that automatic differentiation is not needed.
    """

    margin: Any
    angular: Callable[[Tensor], Tensor]
    strength: float | Tensor = 1.0
    interpolates: bool = False
    of_products: bool = True
    detached: bool = False
    explicit: bool = False

    def __call__(self, target: Tensor, magnitude: Tensor | float) -> Tensor:
        """Return h·ψ(c).

        Args:
            target: (B,) products h·c, or cosines c.
            magnitude: (B,) h, or one number for all samples.
        """
        if self.explicit and only_reverse_mode(target):
            return _ExplicitScore.apply(self, target, magnitude)
        return self.plain(target, magnitude)

    def plain(self, target: Tensor, magnitude: Tensor | float) -> Tensor:
        """Return the same by automatic differentiation."""
        c = _cosines(target, magnitude) if self.of_products else target
        psi = self.psi(c)
        score = magnitude * (straight_through(c, psi) if self.detached else psi)
        if self.of_products and isinstance(magnitude, Tensor):
            return torch.where(magnitude == 0, target, score)
        return score

    def psi(self, c: Tensor) -> Tensor:
        """Return ψ(c)."""
        if isinstance(self.margin, Margin):
            return self.margin(c, self.angular, self.strength)
        psi = self.margin(c)
        if not self.interpolates:
            return psi
        g = self.angular(c)
        return g + self.strength * (psi - g)

    def value_and_slope(self, c: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return ψ(c) and ψ′(c) for an explicit score; None instead of a slope of 1, which saves a multiplication."""
        if self.detached:
            return self.psi(c), None
        psi, slope = self.margin.value_and_slope(c, self.strength)
        if isinstance(slope, Tensor):
            return psi, slope
        return psi, None if slope == 1 else torch.full_like(psi, slope)


class _ExplicitScore(torch.autograd.Function):
    r"""f = h·ψ(z/h) with ∂f/∂z = ψ′ and ∂f/∂h = ψ − ψ′c: half as many operations as automatic differentiation."""

    @staticmethod
    def forward(ctx: Any, score: TargetScore, product: Tensor, magnitude: Tensor | float) -> Tensor:
        ctx.score = score
        ctx.number = None if isinstance(magnitude, Tensor) else magnitude
        c = _cosines(product, magnitude)
        psi, slope = score.value_and_slope(c)
        if not isinstance(magnitude, Tensor):
            ctx.save_for_backward(product, None, slope, None)
            return psi * magnitude
        if slope is not None:
            slope = slope.masked_fill(magnitude == 0, 1.0)  # the gradient of a linear layer
        magnitude_slope = psi - c if slope is None else torch.addcmul(psi, slope, c, value=-1)
        ctx.save_for_backward(product, magnitude, slope, magnitude_slope)
        return psi * magnitude

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        product, magnitude, slope, magnitude_slope = ctx.saved_tensors
        _, *needs = ctx.needs_input_grad
        if torch.is_grad_enabled():  # create_graph=True: the gradients must themselves be differentiable

            def plain(product: Tensor, magnitude: Tensor | None) -> Tensor:
                return ctx.score.plain(product, ctx.number if magnitude is None else magnitude)

            return None, *differentiable_gradients(plain, (product, magnitude), needs, grad)
        return None, grad if slope is None else grad * slope, grad * magnitude_slope if needs[1] else None


def _cosines(product: Tensor, magnitude: Tensor | float) -> Tensor:
    """Return c = z/h, and 0 where h is zero."""
    return product / (_nonzero(magnitude) if isinstance(magnitude, Tensor) else magnitude)


def _nonzero(norms: Tensor) -> Tensor:
    """Return the norms with ∞ in place of 0, so that what is divided by a zero norm becomes 0."""
    return norms.masked_fill(norms == 0, torch.inf)


# The normalized gradient ---------------------------------------------------------------------------------------------


def normalized_gradient_term(score: TargetScore, target: Tensor, x: Tensor, x_norm: Tensor, w_hat: Tensor) -> Tensor:
    r"""Return zeros whose gradient turns the plain gradient of the target score into that of the original SphereFace.

    The plain gradient is ∂f_y/∂x = ŵ. The original code has

        ∂f_y/∂x = (ψ′·ŵ + (ψ − ψ′c)·x̂)/√(ψ′² + ((ψ − ψ′c)/‖x‖)²),

    whose length is bounded for any margin, while ∂f_y/∂w is the one without margin.

    Args:
        score: the target score, of products with unit class vectors.
        target: (B,) products ‖x‖·c.
        x: (B, d) features.
        x_norm: (B,) feature norms.
        w_hat: (B, d) directions of the target class vectors, detached.
    """
    x_norm = x_norm.detach()
    c = _cosines(target.detach(), x_norm)
    value, slope = score.psi(c).detach(), _derivative(score.psi, c)
    with torch.no_grad():
        inverse_norm = 1 / _nonzero(x_norm)
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
