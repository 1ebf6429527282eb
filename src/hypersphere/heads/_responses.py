r"""The functions of the cosine that scores are computed from: g, the margin ψ, and how gradients pass through them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hypersphere._validation import require
from hypersphere.functions.angular import ANGULARS, Angular, Cosine
from hypersphere.functions.margin import (
    COSINE,
    MARGINS,
    AffineAngleMargin,
    Margin,
    NormAdaptive,
    NormLinear,
    RandomAngle,
)
from hypersphere.heads._state import HeadState
from hypersphere.heads.fused_loss import straight_through

__all__ = ["CallableMargin", "Responses", "single_number_fields"]


@dataclass(frozen=True)
class Responses:
    r"""The responses of a head to the cosines of all classes.

    The target's response is ψ, or g without a margin. That of the other classes is g, unless the margin or an option
    for other classes (`Negatives`) changes it.

    Attributes:
        angular: g, a function of the cosine.
        margin: ψ, a `Margin` or any function of the target's cosine; None for g.
        gradient: "true", "detached" or "normalized", as in `AngularHead`.
        changes_negatives: whether options for other classes change some of their responses.
    """

    angular: Callable[[Tensor], Tensor]
    margin: Margin | Callable[[Tensor], Tensor] | None
    gradient: str
    changes_negatives: bool

    @property
    def margin_changes_others(self) -> bool:
        """Whether the margin changes the response of classes that are not the target."""
        return isinstance(self.margin, Margin) and self.margin.changes_other_classes

    @property
    def are_products(self) -> bool:
        """Whether the scores of all other classes are inner products, so that no cosine has to be computed."""
        return type(self.angular) is Cosine and not self.margin_changes_others and not self.changes_negatives

    def with_gradient_mode(self, c: Tensor, response: Tensor) -> Tensor:
        """Return the response; with gradient="detached" it has the gradient of the cosine `c`."""
        return straight_through(c, response) if self.gradient == "detached" else response

    # The other classes -----------------------------------------------------------------------------------------------

    def others(self, c: Tensor, strength: float | Tensor) -> Tensor:
        """Return the response of classes that are not the target: g, unless the margin changes it."""
        if isinstance(self.margin, Margin) and self.margin.changes_other_classes:
            return self.margin.others(c, self.angular, strength)
        return self.angular(c)

    def others_derivative(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Return the derivative of `others` as a function of cosine and response; None if there is no closed form."""
        # A subclass that overrides `__call__` alone inherits a slope that does not match; `has_slope` is False then.
        if self.margin_changes_others or not isinstance(self.angular, Angular) or not self.angular.has_slope:
            return None
        return self.angular.slope

    def needs_autograd(self) -> bool:
        """Return True if the response of the other classes must be differentiated automatically."""
        # A user's function, also one of a subclass, may have parameters that are not among its fields.
        is_custom_margin = self.margin_changes_others and type(self.margin) not in MARGINS.values()
        if type(self.angular) not in ANGULARS.values() or is_custom_margin:
            return True
        # Margins of the menu hold no tensors, and a learned number of a margin that changes only the target has no part
        # in the response of the other classes.
        return any(t.requires_grad for t in tensor_fields(self.angular).values())

    # The target ------------------------------------------------------------------------------------------------------

    def margin_of_batch(self, x_norm: Tensor | None, state: HeadState, noise: Tensor | None = None) -> Margin:
        """Return ψ for one batch: some margins depend on feature norms or on noise, and a callable is wrapped.

        Args:
            x_norm: (B,) feature norms; None if the margin does not depend on them.
            state: the running statistics of feature norms.
            noise: (B,) standard normal numbers for a random margin; None for its mean.
        """
        margin = self.margin
        if isinstance(margin, NormAdaptive):
            assert x_norm is not None
            assert state.norm_mean is not None
            assert state.norm_std is not None
            # The norm decides how large the margin is, but no gradient flows through this choice.
            mean, std = state.norm_mean.to(x_norm.dtype), state.norm_std.to(x_norm.dtype)
            margin = margin.for_quality(margin.quality(x_norm.detach(), mean, std))
        elif isinstance(margin, NormLinear):
            assert x_norm is not None
            margin = margin.for_norms(x_norm)
        elif isinstance(margin, RandomAngle) and noise is not None:
            margin = margin.for_noise(noise)
        assert margin is not None
        return margin if isinstance(margin, Margin) else CallableMargin(margin)

    @property
    def has_closed_form(self) -> bool:
        """Whether the derivative of the target score is known: that of ψ, or 1 if it is detached."""
        if not self.are_products or tensor_fields(self.margin):
            return False
        if self.gradient == "true":
            # The closed form has no gradient through a margin that depends on the feature norm.
            is_affine = isinstance(self.margin, AffineAngleMargin) and self.margin.has_slope
            return is_affine and not isinstance(self.margin, NormLinear)
        return self.gradient == "detached" and isinstance(self.margin, Margin)


def single_number_fields(owner: str, entry: object) -> dict[str, Tensor]:
    """Return the fields of a g or ψ that hold tensors. In a head each must hold one number."""
    fields = tensor_fields(entry)
    for name, value in fields.items():
        require(value.numel() == 1, f"{name} of {owner}", "one number in a head", tuple(value.shape))
    return fields


def tensor_fields(entry: object) -> dict[str, Tensor]:
    """Return the fields of a g or ψ that hold tensors. A user's function has none."""
    is_entry = isinstance(entry, (Angular, Margin))
    return {name: value for name, value in vars(entry).items() if isinstance(value, Tensor)} if is_entry else {}


@dataclass(frozen=True)
class CallableMargin(Margin):
    """A user's function of the cosine as a margin. Strengths other than 1 interpolate: g + strength·(ψ − g)."""

    function: Callable[[Tensor], Tensor]

    def __call__(
        self, c: Tensor, angular: Callable[[Tensor], Tensor] = COSINE, strength: float | Tensor = 1.0
    ) -> Tensor:
        psi = self.function(c)
        if not isinstance(strength, Tensor) and strength == 1:
            return psi
        g = angular(c)
        return g + strength * (psi - g)
