r"""SphereFace2: one binary classifier per class instead of one softmax over all classes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypersphere import _numerics
from hypersphere._validation import is_number, require
from hypersphere.functions.angular import PowerCosine
from hypersphere.functions.margin import Margin, TwoSided
from hypersphere.heads.fused_loss import SOFTPLUS_SUM, ClassTerms
from hypersphere.heads.head import AngularHead
from hypersphere.heads.schedules import Ramp

__all__ = ["BinaryHead"]


class BinaryHead(AngularHead):
    r"""C binary classifiers with one shared bias (Wen et al., SphereFace2, ICLR 2022, equations 5–7).

        loss = λ/s·log(1 + exp(−f_y)) + (1−λ)/s·Σ_{j≠y} log(1 + exp(f_j)),   f_j = s·g(θ_j) + b

    The authors' code also multiplies the loss by 50, so its learning rates do not carry over.

    Args:
        in_features: d, the length of a feature.
        num_classes: C ≥ 2.
        radius: s > 0.
        balance: λ in (0, 1), the weight of the target's classifier.
        margin: ψ; `TwoSided` lowers the target's response and raises the others'.
        gradient: "detached", as in the authors' code, or "true".
        angular, ramp, ignore_index, reduction: as in `AngularHead`.

    Example:
        >>> head = BinaryHead(8, 3)
        >>> head(torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])).shape
        torch.Size([])
    """

    class_reduction = SOFTPLUS_SUM
    shares_bias = True

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
        self.balance = balance  # set before the parent's constructor, which initialises the bias
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
        """Show the sizes and all settings that differ from the defaults."""
        return f"{super().extra_repr()}, balance={self.balance}"

    def reset_parameters(self) -> None:
        """Draw class vectors uniformly, and set the bias to the minimiser of the loss at right angles."""
        super().reset_parameters()
        assert self.bias is not None
        if _numerics.values_readable(self.bias):
            nn.init.constant_(self.bias, self._initial_bias())

    @torch.no_grad()
    def _initial_bias(self) -> float:
        r"""Return the b that minimises the loss of a feature that is perpendicular to all class vectors.

        With a_y and a_j the scores at a right angle without bias, the derivative of the loss is zero if
        λ·σ(−a_y − b) = (1−λ)(C−1)·σ(a_j + b), a quadratic equation in e^b.
        """
        assert self.bias is not None
        # On the device of the bias, where a learned k and the statistics of norms are. The class vectors may be on the
        # CPU while a `ShardedHead` initialises them.
        right_angle = _numerics.to_float64(torch.zeros(1, device=self.bias.device))
        radius = float(self.radius)
        functions = self.score_functions
        target = radius * float(functions.angular(right_angle))
        if functions.margin is not None:
            statistics = self._current_state().norm_statistics
            margin = functions.margin.for_batch(right_angle + radius, statistics, None)
            target = radius * float(margin(right_angle, functions.angular, 1.0))
        others = radius * float(functions.others(right_angle, 1.0))
        odds = self.balance / ((1 - self.balance) * (self.num_classes - 1))
        # With u = e^b this is e^(a_y)·u² + (1 − odds)·u − odds·e^(−a_j) = 0, whose discriminant is
        # (1 − odds)² + 4·odds·e^(a_y−a_j). Both terms are divided by the larger one, e^(2·scale): at a large radius the
        # exponential leaves the range of numbers.
        half = (target - others) / 2
        gap = math.log(abs(1 - odds)) if odds != 1 else -math.inf
        scale = max(gap, half)
        signed = math.copysign(math.exp(gap - scale), 1 - odds)
        root = math.hypot(signed, 2 * math.sqrt(odds) * math.exp(half - scale))
        if odds > 1:  # the other form of the root would cancel here
            return scale + math.log((root - signed) / 2) - target
        return math.log(2 * odds) - others - scale - math.log(signed + root)

    def sample_losses(self, terms: ClassTerms, score: Tensor, labels: Tensor) -> Tensor:
        """Return the weighted sum of all binary losses of each sample."""
        target = F.softplus(-score, threshold=50)
        return (self.balance * target + (1 - self.balance) * terms.others) / float(self.radius)
