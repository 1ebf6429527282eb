r"""What a head depends on apart from the batch: the step of its schedules, and running statistics."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hypersphere import _numerics, sphere
from hypersphere.functions._recomputation import PassHistory

__all__ = ["HeadState", "StatefulHead", "update_hardness", "update_norm_statistics", "update_scale"]


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
    def is_empty(self) -> bool:
        """True if the head has neither a schedule nor statistics."""
        return all(value is None for value in self)


def update_norm_statistics(
    mean: Tensor, std: Tensor, norms: Tensor, counted: Tensor, momentum: float
) -> tuple[Tensor, Tensor]:
    """Return running statistics, updated with the mean and standard deviation of the counted norms.

    Fewer than two samples or norms that are not finite leave the statistics unchanged. No shape depends on the number
    of counted samples, so this can be compiled.
    """
    weights = counted.to(norms.dtype)  # 1 for samples that count, else 0
    count = weights.sum()
    batch_mean = torch.dot(norms, weights) / count.clamp_min(1)
    deviations = (norms - batch_mean) * weights
    batch_std = (torch.dot(deviations, deviations) / (count - 1).clamp_min(1)).sqrt()
    # A sample standard deviation needs two samples. It is not finite if the mean is not.
    is_usable = (count >= 2) & (batch_std < torch.inf)
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


class _OptimizerHandle(RemovableHandle):
    """The handle of `StatefulHead.advance_with`, which also lets the head count its training calls again."""

    def __init__(self, hook: RemovableHandle, head: StatefulHead) -> None:
        super().__init__(OrderedDict())
        self.hook, self.head = hook, head
        head._optimizer_hooks |= {self.id}

    def remove(self) -> None:
        self.hook.remove()
        self.head._optimizer_hooks -= {self.id}


class StatefulHead(nn.Module):
    """The part of a head that counts steps, and uses the same state again if activation checkpointing repeats a call.

    The buffers are the fields of `HeadState`; a head registers those that it uses.
    """

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._optimizer_hooks: frozenset[int] = frozenset()  # of `advance_with`
        # The state that recent passes used, for activation checkpointing.
        fallback = "the step and the statistics of the last pass"
        self._loss_passes, self._logit_passes = PassHistory(fallback), PassHistory(fallback)

    def advance(self) -> None:
        """Advance the schedules by one step. `forward` does this in training mode unless `advance_with` was called."""
        if hasattr(self, "steps"):
            self.steps = self.steps + 1  # a new tensor, because a compiled backward pass may still read the old one

    def advance_with(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Let the schedules count the steps of `optimizer` instead of training calls of the head.

        Use this with gradient accumulation, or if the head is called several times per step. A copy of the head does
        not follow the optimizer: it counts its training calls again.

        Returns:
            A handle; its `remove()` lets the schedules count training calls again.

        Example:
            >>> from hypersphere.heads import AngularHead, Ramp
            >>> head = AngularHead(8, 3, margin="multiplicative", ramp=Ramp(steps=100))
            >>> optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
            >>> handle = head.advance_with(optimizer)
            >>> for _ in range(4):  # accumulate gradients of four batches
            ...     head(torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])).backward()
            >>> optimizer.step()
            >>> head.steps
            tensor(1)
        """
        return _OptimizerHandle(optimizer.register_step_post_hook(lambda *_: self.advance()), self)

    def _current_state(self) -> HeadState:
        return HeadState(*(self._buffers.get(name) for name in HeadState._fields))

    def _state_of_pass(self, x: Tensor, y: Tensor, passes: PassHistory) -> HeadState:
        """Return the current state, or the one that this pass used before if activation checkpointing repeats it."""
        state = self._current_state()
        if not self.training or not _numerics.in_backward() or state.is_empty:
            return state
        return HeadState(*passes.recall(self._fingerprint(x, y), passes.newest or state))

    def _record_pass(self, x: Tensor, y: Tensor, state: HeadState, passes: PassHistory) -> None:
        """Remember the state that this call used, in case activation checkpointing repeats it."""
        if not state.is_empty and _numerics.values_readable(x, y):
            passes.record(self._fingerprint(x, y), state)

    def _fingerprint(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return one number per sample, and the labels, which identify a call: mixup uses two labels per feature."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.detach().sum(1, dtype=wide), y

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which counts its calls: the hooks of `advance_with` advance this head only."""
        return {**self.__dict__, "_optimizer_hooks": frozenset()}
