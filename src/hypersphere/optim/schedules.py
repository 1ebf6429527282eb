"""Learning-rate schedules: the factor of the learning rate as a function of the completed fraction of training."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hypersphere._validation import is_integer, is_number, require

__all__ = ["SCHEDULES", "Constant", "Cosine", "OneCycle", "Plateau", "Schedule", "Scheduler", "Steps", "is_better"]

UNITS = ("fraction", "steps", "epochs")


@dataclass(frozen=True)
class Schedule:
    """Map the completed fraction of training to a factor of the learning rate, with linear warm-up over `warmup`.

    Attributes:
        warmup: duration of the warm-up.
        unit: unit of durations: "fraction" of training, "steps" or "epochs".
    """

    warmup: float = 0.0
    unit: str = "fraction"

    def __post_init__(self) -> None:
        require(self.unit in UNITS, "schedule.unit", f"one of {', '.join(UNITS)}", self.unit)
        fits = is_number(self.warmup, 0) and (self.unit != "fraction" or self.warmup < 1)
        accepted = "a fraction of training in [0, 1)" if self.unit == "fraction" else "a number >= 0"
        require(fits, "warmup", accepted, self.warmup)

    def after(self, part: float) -> float:
        """Return the factor after the warm-up, at the fraction `part` of the remaining training."""
        return 1.0

    def in_fractions(self, total: int, steps_per_epoch: int) -> Schedule:
        """Return the same schedule with all durations as fractions of `total` steps."""
        unit_length = {"fraction": 1.0, "steps": 1 / total, "epochs": steps_per_epoch / total}[self.unit]
        return replace(self, **self._rescaled(unit_length), unit="fraction") if self.unit != "fraction" else self

    def _rescaled(self, unit_length: float) -> dict[str, Any]:
        return {"warmup": min(self.warmup * unit_length, 0.999)}

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
    """Linear warm-up over `warmup`, then cosine decay to `end`.

    >>> OneCycle()(0.0), OneCycle()(0.25), OneCycle()(1.0)
    (0.0, 1.0, 0.0)
    """

    warmup: float = 0.25


@dataclass(frozen=True)
class Steps(Schedule):
    """Multiply by `factor` at each of the times `at`, given as fractions of training, steps or epochs (see `unit`).

    With several factors, one per time, the rate can also rise, for example when fine-tuning begins.

    >>> [Steps(at=(0.5, 0.75))(part) for part in (0.4, 0.5, 0.9)]
    [1.0, 0.1, 0.010000000000000002]
    >>> Steps(at=(16, 32), unit="epochs").in_fractions(total=512, steps_per_epoch=8).at
    (0.25, 0.5)
    >>> Steps(at=(0.5, 0.75), factor=(0.5, 4.0))(0.8)
    2.0
    """

    at: Sequence[float] = (0.5, 0.75)
    factor: float | Sequence[float] = 0.1

    def __post_init__(self) -> None:
        """Check the times."""
        super().__post_init__()
        require(all(is_number(time, 0) for time in self.at), "at", "numbers >= 0", self.at)
        is_sequence = isinstance(self.factor, (list, tuple))
        accepted = "a number, or one per time, and times in ascending order"
        fits = not is_sequence or (len(self.factor) == len(self.at) and list(self.at) == sorted(self.at))  # type: ignore[arg-type]
        require(fits, "factor", accepted, self.factor)

    def _rescaled(self, unit_length: float) -> dict[str, Any]:
        return {**super()._rescaled(unit_length), "at": tuple(time * unit_length for time in self.at)}

    def __call__(self, part: float) -> float:
        """Return the factor at a fraction of training."""
        passed = bisect_right(sorted(self.at), part)
        factors = [self.factor] * passed if isinstance(self.factor, (int, float)) else self.factor[:passed]
        return super().__call__(part) * math.prod(factors)


@dataclass(frozen=True)
class Plateau(Schedule):
    """Multiply by `factor` when `metric` has not improved for more than `patience` validations.

    Attributes:
        metric: name of a metric of validation, or "loss" for the training loss of an epoch.
        factor: in (0, 1).
        patience: number of validations without improvement that are tolerated.
        threshold: relative change that counts as an improvement.
        least: smallest factor of the learning rate.
    """

    metric: str = "loss"
    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    least: float = 0.0

    def __post_init__(self) -> None:
        """Check the factor and the patience."""
        super().__post_init__()
        require(is_number(self.factor, 0, 1) and 0 < self.factor < 1, "factor", "a number in (0, 1)", self.factor)
        require(is_integer(self.patience, 0), "patience", "an integer >= 0", self.patience)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": Constant,
    "cosine": Cosine,
    "one_cycle": OneCycle,
    "steps": Steps,
    "plateau": Plateau,
}


def is_better(metric: str, value: float, best: float | None, threshold: float = 0.0) -> bool:
    """Return True if a metric has improved. Lower is better for losses and error rates, higher for all other metrics.

    >>> is_better("loss", 0.9, 1.0), is_better("verification.accuracy", 0.9, 1.0), is_better("accuracy", 0.5, None)
    (True, False, True)
    """
    if best is None or math.isnan(best):
        return not math.isnan(value)
    if metric.rpartition(".")[2] in ("loss", "eer", "error", "fnir"):
        return value < best - threshold * abs(best)
    return value > best + threshold * abs(best)


class Scheduler:
    """Set the learning rates of optimisers from a schedule; counts and the best metric are its only state.

    Args:
        optimizers: the optimisers; their current learning rates correspond to a factor of 1.
        schedule: the schedule.
        total: number of steps in training.
        steps_per_epoch: number of steps in an epoch.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], schedule: Schedule, total: int, steps_per_epoch: int = 1
    ) -> None:
        require(total >= 1, "total", "a number >= 1", total)
        self.schedule, self.total, self.done = schedule.in_fractions(total, steps_per_epoch), total, 0
        self.best: float | None = None
        self.bad, self.reduction = 0, 1.0
        self.rates = [(optimizer, [group["lr"] for group in optimizer.param_groups]) for optimizer in optimizers]
        self._set_rates()

    def step(self) -> None:
        """Advance by one step and set the learning rates."""
        self.done += 1
        self._set_rates()

    def observe(self, metrics: Any) -> None:
        """Lower the learning rates if the metric of a `Plateau` no longer improves. Other schedules ignore metrics."""
        schedule = self.schedule
        if not isinstance(schedule, Plateau):
            return
        names = ", ".join(name for name, value in metrics.items() if isinstance(value, float))
        require(schedule.metric in metrics, "schedule.metric", f"one of {names}", schedule.metric)
        value = metrics[schedule.metric]
        if is_better(schedule.metric, value, self.best, schedule.threshold):
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        if self.bad > schedule.patience:
            self.reduction, self.bad = max(self.reduction * schedule.factor, schedule.least), 0
            self._set_rates()

    def _set_rates(self) -> None:
        # Evaluate the schedule in the middle of the next step, where no schedule is 0.
        factor = self.schedule(min((self.done + 0.5) / self.total, 1.0)) * self.reduction
        for optimizer, rates in self.rates:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the state of a plateau."""
        return {"done": self.done, "best": self.best, "bad": self.bad, "reduction": self.reduction}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state and the learning rates."""
        self.done, self.best = int(state["done"]), state["best"]
        self.bad, self.reduction = state["bad"], state["reduction"]
        self._set_rates()
