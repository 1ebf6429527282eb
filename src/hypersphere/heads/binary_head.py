r"""SphereFace2: each class answers yes or no by itself."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hypersphere import _numerics
from hypersphere._validation import is_number, require
from hypersphere.functions.angular import PowerCosine
from hypersphere.functions.margin import Margin, TwoSided
from hypersphere.heads.angular_head import AngularHead
from hypersphere.heads.annealing import Ramp
from hypersphere.heads.terms import SOFTPLUS_SUM, Terms

__all__ = ["BinaryHead", "sphereface2"]


class BinaryHead(AngularHead):
    r"""C binary classifiers with one bias, instead of one softmax (Wen et al., SphereFace2, ICLR 2022, 5–7).

        λ/s·log(1 + exp(−f_y)) + (1−λ)/s·Σ_{j≠y} log(1 + exp(f_j)),   f_j = s·g(θ_j) + b

    Args:
        in_features: d, the length of a feature.
        num_classes: C ≥ 2.
        radius: s > 0.
        balance: λ in (0, 1), the weight of the target's own question.
        angular: g.
        margin: ψ; TwoSided lowers the target and raises the others.
        gradient: "detached", as the source does, or "true".
        ramp: a schedule of the strength of the margin.
        ignore_index: a label whose rows do not count.
        reduction: "mean", "sum" or "none".

    The authors' code also multiplies the loss by 50, so learning rates do not carry over.

    Example:
        >>> head = BinaryHead(8, 3)
        >>> head(torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])).shape
        torch.Size([])
    """

    reduction_over_classes = SOFTPLUS_SUM

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        radius: float = 40.0,
        balance: float = 0.7,
        angular: str | Callable[[Tensor], Tensor] = PowerCosine(3.0),  # noqa: B008
        margin: str | Margin | None = TwoSided(0.4),  # noqa: B008
        gradient: str = "detached",
        ramp: Ramp | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        require(is_number(balance, 0, 1) and 0 < balance < 1, "balance", "a number in (0, 1)", balance)
        require(is_number(radius, 0) and radius > 0, "radius", "a positive number", radius)
        self.balance = balance  # the first bias depends on it
        super().__init__(
            in_features,
            num_classes,
            radius=radius,
            angular=angular,
            margin=margin,
            bias=True,
            gradient=gradient,
            ramp=ramp,
            ignore_index=ignore_index,
            reduction=reduction,
        )

    def extra_repr(self) -> str:
        """Show the sizes and every setting that is not the default."""
        return f"{super().extra_repr()}, balance={self.balance}"

    def reset_parameters(self) -> None:
        """Draw class vectors uniformly, and the bias for which features at right angles to all cost least."""
        super().reset_parameters()
        assert self.bias is not None
        if _numerics.values_readable(self.bias):
            nn.init.constant_(self.bias, self._least_bias())

    @torch.no_grad()
    def _least_bias(self) -> float:
        """b with λ·σ(−a_y − b) = (1−λ)(C−1)·σ(a_j + b), a the scores at a right angle without bias; in closed form."""
        right = torch.zeros(1, dtype=torch.float64)
        radius = float(self.radius)
        own = radius * float(self._psi(right, right + radius) if self.margin is not None else self.angular(right))
        others = radius * float(self._others_response(right, 1.0))
        odds = self.balance / ((1 - self.balance) * (self.num_classes - 1))
        root = math.sqrt((1 - odds) ** 2 + 4 * odds * math.exp(own - others))
        if odds > 1:  # the same number, without the cancellation
            return math.log((root + odds - 1) / 2) - own
        return math.log(2 * odds) - others - math.log(1 - odds + root)

    def _bias_size(self) -> int:
        return 1

    def _losses(self, terms: Terms, score: Tensor, labels: Tensor) -> Tensor:
        """Both questions of each row, weighted."""
        own = torch.logaddexp(-score, torch.zeros_like(score))
        return (self.balance * own + (1 - self.balance) * terms.others) / float(self.radius)


def sphereface2(
    in_features: int,
    num_classes: int,
    s: float = 40.0,
    m: float = 0.4,
    t: float = 3.0,
    *,
    balance: float = 0.7,
    margin: str | Margin | None = None,
    gradient: str = "detached",
    ramp: Ramp | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> BinaryHead:
    """SphereFace2: C binary questions with a two-sided margin and an analytic first bias (Wen et al., ICLR 2022)."""
    return BinaryHead(
        in_features,
        num_classes,
        radius=s,
        balance=balance,
        angular=PowerCosine(t),
        margin=TwoSided(m) if margin is None else margin,
        gradient=gradient,
        ramp=ramp,
        ignore_index=ignore_index,
        reduction=reduction,
    )
