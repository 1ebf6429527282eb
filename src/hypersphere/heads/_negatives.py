r"""Objectives that treat some of the other classes, j ≠ y, in a special way.

Three ideas share one form: the response g(θ_j) of another class j is replaced, or the class is left out of the loss.

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

from hypersphere.functions.margin import shifted_response

__all__ = ["Negatives"]


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
