"""The learning rate as a function of the part of training that is done."""

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
    """Maps the part done, in [0, 1], to a factor of the learning rate; it rises linearly over the first `warmup`."""

    warmup: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.warmup < 1, "warmup", "a share of training in [0, 1)", self.warmup)

    def after(self, part: float) -> float:
        """The factor at a part of what comes after the rise."""
        return 1.0

    def __call__(self, part: float) -> float:
        """Return the factor."""
        if part < self.warmup:
            return part / self.warmup
        return self.after((part - self.warmup) / (1 - self.warmup))


class Constant(Schedule):
    """One rate throughout.

    >>> Constant()(0.7)
    1.0
    """


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a wave of the cosine, from 1 to `end`.

    >>> Cosine()(0.0), round(Cosine()(0.5), 3), Cosine()(1.0)
    (1.0, 0.5, 0.0)
    """

    end: float = 0.0

    def after(self, part: float) -> float:
        """The wave."""
        return self.end + (1 - self.end) * 0.5 * (1 + math.cos(math.pi * part))


@dataclass(frozen=True)
class OneCycle(Cosine):
    """Up linearly for `warmup`, then down half a wave of the cosine, to `end`.

    >>> OneCycle()(0.0), OneCycle()(0.25), OneCycle()(1.0)
    (0.0, 1.0, 0.0)
    """

    warmup: float = 0.25


@dataclass(frozen=True)
class Steps(Schedule):
    """Multiply by `factor` at each of the parts `at`, as the sources do.

    >>> [Steps(at=(0.5, 0.75))(part) for part in (0.4, 0.5, 0.9)]
    [1.0, 0.1, 0.010000000000000002]
    """

    at: Sequence[float] = (0.5, 0.75)
    factor: float = 0.1

    def __call__(self, part: float) -> float:
        """Return the factor."""
        return super().__call__(part) * self.factor ** bisect_right(sorted(self.at), part)


SCHEDULES = {"constant": Constant, "cosine": Cosine, "one_cycle": OneCycle, "steps": Steps}


class Scheduler:
    """Sets the learning rates of optimisers from a schedule, by step; it needs to know the step and nothing else."""

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
        # at the middle of the coming step, where no schedule is 0
        factor = self.schedule(min((self.done + 0.5) / self.total, 1.0))
        for optimizer, rates in self.rates:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor

    def state_dict(self) -> dict[str, Any]:
        """Return the steps done."""
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.done = int(state["done"])
        self._set()
