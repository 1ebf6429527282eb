r"""What a head depends on apart from the batch: the step of its schedules, and running statistics."""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hypersphere import _numerics, sphere
from hypersphere._validation import require
from hypersphere.functions._recomputation import PassHistory

__all__ = [
    "HeadState",
    "StateHistory",
    "StepSource",
    "call_fingerprint",
    "update_hardness",
    "update_norm_statistics",
    "update_scale",
]


class HeadState(NamedTuple):
    """The buffers of a head in one call. A head has only those that it uses; the others are None.

    Statistics include the batch of the call in training mode.
    """

    steps: Tensor | None = None  # the number of steps before this one
    norm_mean: Tensor | None = None  # running mean of the feature norm (AdaFace)
    norm_std: Tensor | None = None  # running standard deviation of the feature norm (AdaFace)
    t: Tensor | None = None  # running mean of the target cosine (CurricularFace)
    scale: Tensor | None = None  # the radius s (AdaCos)

    @property
    def norm_statistics(self) -> tuple[Tensor, Tensor] | None:
        """The running mean and standard deviation of the feature norm."""
        return None if self.norm_mean is None or self.norm_std is None else (self.norm_mean, self.norm_std)

    @property
    def is_empty(self) -> bool:
        """True if the head has neither a schedule nor statistics."""
        return all(value is None for value in self)


# Running statistics --------------------------------------------------------------------------------------------------


def update_norm_statistics(
    mean: Tensor, std: Tensor, norms: Tensor, sample_weights: Tensor, count: Tensor, momentum: float
) -> tuple[Tensor, Tensor]:
    """Return running statistics, updated with the mean and standard deviation of the norms of samples that count.

    Fewer than two samples or norms that are not finite leave the statistics unchanged. No shape depends on the number
    of counted samples, so this can be compiled.

    Args:
        mean: the running mean.
        std: the running standard deviation.
        norms: (B,) feature norms.
        sample_weights: (B,) 1 for samples that count, else 0.
        count: the number of samples that count, at least 1.
        momentum: the weight of this batch.
    """
    batch_mean = torch.dot(norms, sample_weights) / count
    deviations = (norms - batch_mean) * sample_weights
    # A sample standard deviation needs two samples; for fewer it is 0/0, which is NaN. It is not finite if the mean is
    # not, so one comparison finds both.
    batch_std = (torch.dot(deviations, deviations) / (count - 1)).sqrt()
    is_usable = batch_std < torch.inf
    new_mean, new_std = (old.lerp(new.to(old.dtype), momentum) for old, new in ((mean, batch_mean), (std, batch_std)))
    return torch.where(is_usable, new_mean, mean), torch.where(is_usable, new_std, std)


def update_hardness(t: Tensor, cosines: Tensor, counted: Tensor, momentum: float) -> Tensor:
    """Return momentum·t + (1 − momentum)·mean of the counted target cosines; t if there are none."""
    count = counted.sum()
    mean = cosines.masked_fill(~counted, 0).sum() / count.clamp_min(1)
    is_usable = (count > 0) & mean.isfinite()
    return torch.where(is_usable, t.lerp(mean.to(t.dtype), 1 - momentum), t)


def update_scale(scale: Tensor, others: Tensor, cosines: Tensor, counted: Tensor) -> Tensor:
    r"""Return AdaCos' scale log(mean_b Σ_{j≠y} e^{s·cos θ_j}) / cos(min(π/4, median θ_y)) for the next scores.

    Args:
        scale: s before the batch.
        others: (B,) log Σ_{j≠y} exp(s·cos θ_j).
        cosines: (B,) cos θ_y.
        counted: (B,) the samples that count. If there are none, or the result is not positive, s is unchanged.
    """
    if not len(cosines):
        return scale
    count = counted.sum()
    log_mean = torch.logsumexp(others.masked_fill(~counted, -math.inf), 0) - count.to(others.dtype).log()
    angles = sphere.angle(cosines).masked_fill(~counted, math.nan)
    new = (log_mean / torch.nanquantile(angles, 0.5).clamp_max(math.pi / 4).cos()).to(scale.dtype)
    return torch.where((count > 0) & (new > 0) & (new < math.inf), new, scale)


# Steps of schedules ---------------------------------------------------------------------------------------------------


class StepSource:
    """What advances the schedules of a head: its training calls, or the steps of the optimisers that it follows."""

    def __init__(self) -> None:
        # The optimiser of each handle that was not removed, by the number of the handle.
        self._followed: dict[int, weakref.ref[Any]] = {}

    @property
    def counts_calls(self) -> bool:
        """True if the head follows no optimiser, so that its training calls are counted."""
        return not self._followed

    def follow(self, optimizer: Any, advance: Callable[[], None]) -> RemovableHandle:
        """Call `advance` once after each step of `optimizer`, until the handle that is returned is removed."""
        # The members of `hypersphere.optim.Optimizers` step together, so one of them is enough.
        members = getattr(optimizer, "optimizers", [optimizer])
        can_follow = bool(members) and hasattr(members[-1], "register_step_post_hook")
        require(can_follow, "optimizer", "an optimiser of torch or `Optimizers`", type(optimizer).__name__)
        handle = _OptimizerHandle(self, members[-1])

        def after_step(*_: Any) -> None:
            # A cell of a notebook may be run twice. Of several handles of one optimiser, the first one counts.
            followed = self._followed[handle.id]
            if handle.id == next(number for number, one in self._followed.items() if one == followed):
                advance()

        handle.hook = members[-1].register_step_post_hook(after_step)
        return handle

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which counts calls: the hooks of optimisers advance the original head only."""
        return {"_followed": {}}


class _OptimizerHandle(RemovableHandle):
    """The handle of a followed optimiser. Removing it also makes the head count its training calls again."""

    hook: RemovableHandle

    def __init__(self, source: StepSource, optimizer: Any) -> None:
        super().__init__(OrderedDict())
        self.source = source
        source._followed[self.id] = weakref.ref(optimizer)

    def remove(self) -> None:
        self.hook.remove()
        self.source._followed.pop(self.id, None)


# Activation checkpointing --------------------------------------------------------------------------------------------


class StateHistory:
    """The states that recent calls of a head used. Activation checkpointing repeats calls, which use them again."""

    def __init__(self) -> None:
        self._passes = PassHistory("the step and the statistics of the last pass")

    def state_for(self, x: Tensor, y: Tensor, current: HeadState) -> HeadState:
        """Return the state that a repeated call used the first time, and the current state for other calls."""
        if not _numerics.in_backward() or current.is_empty:
            return current
        return HeadState(*self._passes.recall(call_fingerprint(x, y), self._passes.newest or current))

    def record(self, x: Tensor, y: Tensor, state: HeadState) -> None:
        """Remember the state that a call used."""
        if not state.is_empty and _numerics.values_readable(x, y):
            self._passes.record(call_fingerprint(x, y), state)

    def clear(self) -> None:
        """Forget all calls."""
        self._passes.clear()


def call_fingerprint(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return one number per sample, and the labels, which identify a call: mixup uses two labels per feature."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.detach().sum(1, dtype=wide), y
