r"""The functions of the cosine that give the scores: g, the margin ψ, and changes of the responses of other classes.

`ScoreFunctions` has g and ψ of a head. `Negatives` changes some of the other classes, j ≠ y, for three objectives of
one form: the response g(θ_j) of another class is replaced, or the class is left out of the loss.

- Interclass filter (insightface): classes with cos θ_j > t probably show the same identity under another label. They
  are left out.
- Inter-top-k penalty (Zhao et al. 2022): the k nearest other classes get g(θ_j − m′), which widens the gap to them.
- Curriculum (Huang et al., CurricularFace, 2020): classes with g(θ_j) > ψ(θ_y) are hard and get g·(t + g). The number t
  is a running mean of the target cosines: hard classes count less than others at first and more later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hypersphere._validation import require
from hypersphere.functions.angular import ANGULARS, Angular, Cosine
from hypersphere.functions.margin import COSINE, MARGINS, Margin, shifted_response

__all__ = ["CallableMargin", "Negatives", "ScoreFunctions", "single_number_fields", "straight_through", "tensor_fields"]


def straight_through(source: Tensor, value: Tensor) -> Tensor:
    """Return `value` with the gradient of `source`."""
    return source + (value - source).detach()


@dataclass(frozen=True)
class ScoreFunctions:
    r"""g and ψ of a head, with the current values of their learned numbers.

    The response of the target is ψ, or g without a margin. The response of the other classes is g, unless the margin or
    an option for other classes (`Negatives`) changes it.

    Attributes:
        angular: g, a function of the cosine.
        margin: ψ; None for g.
        changes_negatives: whether options for other classes change some of their responses.
    """

    angular: Callable[[Tensor], Tensor]
    margin: Margin | None
    changes_negatives: bool

    @property
    def margin_changes_others(self) -> bool:
        """Whether the margin changes the response of classes that are not the target."""
        return self.margin is not None and self.margin.changes_other_classes

    @property
    def are_products(self) -> bool:
        """Whether the scores of all other classes are inner products, so that no cosine has to be computed."""
        return type(self.angular) is Cosine and not self.margin_changes_others and not self.changes_negatives

    def others(self, c: Tensor, strength: float | Tensor) -> Tensor:
        """Return the response of classes that are not the target: g, unless the margin changes it."""
        if self.margin is not None and self.margin.changes_other_classes:
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


# Changes of other classes --------------------------------------------------------------------------------------------


Nearest = Callable[[Tensor, int], tuple[Tensor, Tensor | None]]


def nearest_of_all(cosines: Tensor, count: int) -> tuple[Tensor, None]:
    """Return the columns of the largest cosines of each row, (B, count), at most one fewer than there are columns.

    Returns:
        The columns, and which of them are among the nearest: None for all. If classes are distributed over processes,
        another function takes the place of this one (`ShardedClasses`).
    """
    return cosines.topk(min(count, cosines.shape[1] - 1), dim=1).indices, None


@dataclass(frozen=True)
class Negatives:
    r"""How the responses of other classes change in one call of a head.

    Attributes:
        angular: g.
        filter_cosine: other classes with a larger cosine are left out; None for no filter.
        hard_count: k, the number of nearest other classes with the response g(θ − m′).
        hard_margin: m′ in radians. Below θ = m′ the response is continued by 2 − g(m′ − θ), so that it keeps rising.
        threshold: (B,) responses ψ(θ_y); other classes with a larger response are hard. None without a curriculum.
        hardness: t, a scalar; None without a curriculum.
        nearest: the function that finds the k nearest other classes; see `nearest_of_all`.
    """

    angular: Callable[[Tensor], Tensor]
    filter_cosine: float | None = None
    hard_count: int = 0
    hard_margin: float = 0.0
    threshold: Tensor | None = None
    hardness: Tensor | None = None
    nearest: Nearest = nearest_of_all

    def __call__(self, c: Tensor, response: Tensor, is_target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the responses of all classes, and the classes that are left out, or None.

        Args:
            c: (B, C) cosines.
            response: (B, C) g of the cosines.
            is_target: (B, C) booleans. Responses of targets are not used.
        """
        is_left_out = None if self.filter_cosine is None else (c > self.filter_cosine) & ~is_target
        if self.threshold is not None and self.hardness is not None:
            is_hard = response > self.threshold.detach().unsqueeze(1)
            response = response.where(~is_hard, response * (self.hardness + response))
        if self.hard_count:
            is_candidate = ~is_target if is_left_out is None else ~(is_target | is_left_out)
            columns, is_near = self.nearest(c.detach().where(is_candidate, -torch.inf), self.hard_count)
            hard = shifted_response(self.angular, c.gather(1, columns), -self.hard_margin)
            if is_near is not None:
                hard = torch.where(is_near, hard, response.gather(1, columns))
            response = response.scatter(1, columns, hard)
        return response, is_left_out
