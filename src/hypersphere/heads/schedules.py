r"""Schedules from the softmax without margin, which is easy to train, to the full margin. A head counts the steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from hypersphere._validation import is_number, require

__all__ = ["Annealing", "Ramp"]


def _as_float(steps: Tensor) -> Tensor:
    return steps if steps.is_floating_point() else steps.to(torch.get_default_dtype())


@dataclass(frozen=True)
class Annealing:
    r"""The weight λ of the score without margin after t steps: λ(t) = max(λ_end, λ_start·(1+γt)^−p).

    The score with the margin has weight 1, so the target score is (λ·unmargined + margined)/(1+λ). The form
    and the defaults are those of the public SphereFace code (thesis, section A.7). The original L-Softmax used
    ``Annealing(start=1000, gamma=2.5e-5, power=35, end=0)``.

    Args:
        start: λ_start >= 0.
        gamma: γ >= 0.
        power: p >= 0.
        end: λ_end in [0, start].

    Example:
        >>> Annealing()(torch.tensor([0, 100, 100_000]))
        tensor([1000.0000,   76.9231,    5.0000])
    """

    start: float = 1000
    gamma: float = 0.12
    power: float = 1
    end: float = 5

    def __post_init__(self) -> None:
        """Check that λ never rises or becomes negative."""
        require(is_number(self.start, 0), "start", "a number >= 0", self.start)
        require(is_number(self.end, 0, self.start), "end", f"a number in [0, start={self.start}]", self.end)
        require(is_number(self.gamma, 0), "gamma", "a number >= 0", self.gamma)
        require(is_number(self.power, 0), "power", "a number >= 0", self.power)

    def __call__(self, steps: Shaped[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return λ after the given numbers of steps."""
        return (self.start * (1 + self.gamma * _as_float(steps)) ** -self.power).clamp_min(self.end)


@dataclass(frozen=True)
class Ramp:
    r"""The strength a of the margin, which rises linearly from `start` to 1 over a number of steps.

    At strength a the margin is Multiplicative(1 + a(m−1)), AdditiveAngle(a·m), AdditiveCosine(a·m), and so on.

    Args:
        steps: the number of steps until the full margin, >= 1.
        start: the strength at the first step, in [0, 1].

    Example:
        >>> Ramp(steps=100)(torch.tensor([0, 50, 1000])).tolist()
        [0.0, 0.5, 1.0]
    """

    steps: int = 1000
    start: float = 0.0

    def __post_init__(self) -> None:
        """Check that the strength rises within [0, 1]."""
        require(is_number(self.steps, 1), "steps", "a number >= 1", self.steps)
        require(is_number(self.start, 0, 1), "start", "a number in [0, 1]", self.start)

    def __call__(self, steps: Shaped[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the strength after the given numbers of steps."""
        return (self.start + (1 - self.start) * _as_float(steps) / self.steps).clamp_max(1.0)
