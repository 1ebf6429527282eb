r"""Annealing: from the plain softmax, which is easy to train, to the full margin."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hypersphere.functions.menu import require

__all__ = ["Annealing"]


@dataclass(frozen=True)
class Annealing:
    r"""The share λ of the plain target score after t steps: λ(t) = max(λ_end, λ_start·(1+γt)^−p)   (thesis, A.7).

    The target's score is (λ·plain + margin)/(1+λ). The defaults are SphereFace's; the original L-Softmax used
    ``Annealing(start=1000, gamma=2.5e-5, power=35, end=0)``.

    >>> Annealing()(torch.tensor([0, 100, 100_000]))
    tensor([1000.0000,   76.9231,    5.0000])
    """

    start: float = 1000
    gamma: float = 0.12
    power: float = 1
    end: float = 5

    def __post_init__(self) -> None:
        """Refuse a schedule that rises or is negative."""
        require(0 <= self.end <= self.start < math.inf, "end", f"a number in [0, start={self.start}]", self.end)
        require(0 <= self.gamma < math.inf, "gamma", "a number >= 0", self.gamma)
        require(0 <= self.power < math.inf, "power", "a number >= 0", self.power)

    def __call__(self, steps: Tensor) -> Tensor:
        """Return λ after that many training steps, in float32 (float64 for float64 steps)."""
        t = steps if steps.is_floating_point() else steps.to(torch.float32)
        return (self.start * (1 + self.gamma * t) ** -self.power).clamp_min(self.end)
