"""Learning-rate schedules as functions of the completed fraction of training."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hypersphere._validation import require

__all__ = ["SCHEDULES", "Constant", "Cosine", "OneCycle", "Schedule", "Scheduler", "Steps"]


@dataclass(frozen=True)
class Schedule:
    """Map the completed fraction of training to a factor of the learning rate, with linear warm-up over `warmup`."""

    warmup: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.warmup < 1, "warmup", "a fraction of training in [0, 1)", self.warmup)

    def after(self, part: float) -> float:
        """Return the factor at a fraction of the time after the warm-up."""
        return 1.0

    def __call__(self, part: float) -> float:
        """Return the factor at a fraction of training."""
        if part < self.warmup:
            return part / self.warmup
        return self.after((part - self.warmup) / (1 - self.warmup))


class Constant(Schedule):
    """Constant learning rate.

    >>> Constant()(0.7)
    1.0
    """


@dataclass(frozen=True)
class Cosine(Schedule):
    """Cosine decay from 1 to `end`.

    >>> Cosine()(0.0), round(Cosine()(0.5), 3), Cosine()(1.0)
    (1.0, 0.5, 0.0)
    """

    end: float = 0.0

    def after(self, part: float) -> float:
        """Return the cosine between 1 and `end`."""
        return self.end + (1 - self.end) * 0.5 * (1 + math.cos(math.pi * part))


@dataclass(frozen=True)
class OneCycle(Cosine):
    """Linear warm-up over the fraction `warmup` of training, then cosine decay to `end`.

    >>> OneCycle()(0.0), OneCycle()(0.25), OneCycle()(1.0)
    (0.0, 1.0, 0.0)
    """

    warmup: float = 0.25


@dataclass(frozen=True)
class Steps(Schedule):
    """Multiply by `factor` at each of the fractions `at` of training, as in the sources.

    >>> [Steps(at=(0.5, 0.75))(part) for part in (0.4, 0.5, 0.9)]
    [1.0, 0.1, 0.010000000000000002]
    """

    at: Sequence[float] = (0.5, 0.75)
    factor: float = 0.1

    def __call__(self, part: float) -> float:
        """Return the factor at a fraction of training."""
        return super().__call__(part) * self.factor ** bisect_right(sorted(self.at), part)


SCHEDULES = {"constant": Constant, "cosine": Cosine, "one_cycle": OneCycle, "steps": Steps}


class Scheduler:
    """Set the learning rates of optimisers from a schedule; the step count is its only state."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], schedule: Schedule, total: int) -> None:
        require(total >= 1, "total", "a number >= 1", total)
        self.schedule, self.total, self.done = schedule, total, 0
        self.rates = [(optimizer, [group["lr"] for group in optimizer.param_groups]) for optimizer in optimizers]
        self._set()

    def step(self) -> None:
        """Count a step."""
        self.done += 1
        self._set()

    def _set(self) -> None:
        # evaluated in the middle of the next step, where no schedule is 0
        factor = self.schedule(min((self.done + 0.5) / self.total, 1.0))
        for optimizer, rates in self.rates:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps so far."""
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the number of steps and the learning rates."""
        self.done = int(state["done"])
        self._set()
