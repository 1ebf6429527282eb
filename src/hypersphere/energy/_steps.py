"""Which step a call of a regulariser belongs to, as a table.

Random draws, schedules and learned buffers are functions of the step, which is numbered from 0. By default calls are
steps, as those of a batch norm update its statistics, and a training loop needs no other line. With
`auto_advance=False` the loop counts steps itself, by `advance`. One row matches a call and says what it does:

    training  gradients  place      auto_advance  started   call    step     buffers  stores   counts
    --------  ---------  ---------  ------------  -------   ------  -------  -------  -------  ---------
    no        any        any        any           any       peek    current  now      nothing  no
    yes       no         any        any           any       peek    current  now      nothing  no
    yes       yes        recompute  any           any       repeat  current  before   nothing  no
    yes       yes        forward    no            yes       repeat  current  before   nothing  no
    yes       yes        forward    no            no        new     next     now      updates  advance()
    yes       yes        forward    yes           any       new     next     now      updates  at once

The conditions:

* training, gradients: `module.training` and `torch.is_grad_enabled()`. Otherwise the call only asks for the value.
* place: "recompute" during a backward pass, where activation checkpointing runs a forward pass again, and inside a
  transform of `torch.func`, which must not change state. Everything else is "forward".
* auto_advance: the option of the regulariser. With `auto_advance=False` only `advance` counts steps.
* started: with `auto_advance=False`, whether an earlier call has started the step that the next `advance` ends.

The results:

* step: with `auto_advance`, the buffer `steps` counts the steps that have started: "next" is `steps` and "current" is
  `steps` − 1, or 0 before the first step. Without, it counts the steps that have ended: both are `steps`. A peek uses
  the newest step, at or before the current one, that the option `every` does not skip.
* buffers: what the call starts from. "now" is their current value, "before" their value before the current step has
  changed them, so that a repeated call returns the same value again.
* stores: "updates" if the new values of learned buffers are stored.
* counts: when `steps` grows by 1.

The reentrant form of activation checkpointing runs the first forward pass without gradients, so its steps are not
counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from hypersphere import _numerics
from hypersphere._validation import is_integer, is_number, require

__all__ = ["Step", "StepCounter", "Warmup", "run_uncompiled"]

P = ParamSpec("P")
T = TypeVar("T")


def run_uncompiled(method: Callable[P, T]) -> Callable[P, T]:
    """Run a method in Python inside a compiled caller. Unlike `torch.compiler.disable`, do not import the compiler."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            # Resolved here and not by a decorator: using `disable` at import time would import the compiler.
            return torch.compiler.disable(method)(*args, **kwargs)
        return method(*args, **kwargs)

    return call


class Step(NamedTuple):
    """The step that a call of a regulariser belongs to.

    Attributes:
        kind: "new" if the call starts the step and stores its updates, "repeat" if it computes the step again with the
            same result, "peek" if it only asks for the value. Neither of the last two stores anything.
        number: the number of the step, from 0. Schedules and random draws are functions of it.
        buffers: the buffers of the regulariser by name, from which the call starts.
    """

    kind: Literal["new", "repeat", "peek"] = "new"
    number: int = 0
    buffers: Mapping[str, Tensor] = MappingProxyType({})


class StepCounter:
    """Assign each call of a regulariser to a step, by the table of this module.

    What must survive saving and loading is in buffers of the regulariser: `steps`, if it has a counter, and learned
    tensors such as a basis. The counter itself remembers the current step only.

    Args:
        auto_advance: False if steps are counted by calling `advance`.
    """

    def __init__(self, auto_advance: bool = True) -> None:
        self.auto_advance = auto_advance
        self._started = False  # the column of the table: always False with `auto_advance`
        self._replaced: dict[str, Tensor] = {}  # the buffers that the current step has changed, as they were before

    @run_uncompiled
    def begin(self, module: nn.Module, every: int = 1) -> Step:
        """Return the step that this call of `module` belongs to."""
        steps = int(module.get_buffer("steps")) if hasattr(module, "steps") else 0
        current = max(steps - 1, 0) if self.auto_advance else steps
        now = dict(module.named_buffers(recurse=False))
        before = now | self._replaced
        # The rows of the table, in its order.
        if not module.training or not torch.is_grad_enabled():
            # A skipped step is 0, which is not the value that a peek asks for.
            return Step("peek", current - current % every, now)
        if _in_recomputation():
            return Step("repeat", current, before)
        if self._started:
            return Step("repeat", current, before)
        return Step("new", steps, now)

    @run_uncompiled
    def finish(self, module: nn.Module, step: Step, updates: Mapping[str, Tensor]) -> None:
        """Store and count what the last two columns of the table say.

        Call this last: a call that raised an error has changed nothing and can be repeated.
        """
        if step.kind != "new":
            return
        self._replaced = {name: step.buffers[name] for name in updates}
        for name, value in updates.items():
            # A new tensor takes the place of the buffer, so the old one in `_replaced` stays as it was.
            setattr(module, name, value.detach())
        if self.auto_advance:
            _count(module)
        else:
            self._started = True

    def advance(self, module: nn.Module) -> None:
        """Count one step; the next call starts another one. Only without `auto_advance`."""
        if self.auto_advance:
            raise ValueError("advance() needs auto_advance=False")
        self.forget_step()
        _count(module)

    def forget_step(self) -> None:
        """Let the next call start a step from the current buffers, because the step has ended or they were loaded."""
        self._started, self._replaced = False, {}


def _in_recomputation() -> bool:
    """Return True in the places that the table calls "recompute"."""
    # `begin` is not compiled, so only transforms of torch.func can make values unreadable here.
    return _numerics.in_backward() or not _numerics.values_readable()


def _count(module: nn.Module) -> None:
    if hasattr(module, "steps"):
        module.get_buffer("steps").add_(1)


@dataclass(frozen=True)
class Warmup:
    """A schedule that rises linearly from `start` to 1 over the first `steps` steps, then stays at 1.

    >>> schedule = Warmup(steps=4)
    >>> [schedule(step) for step in (0, 2, 4, 9)]
    [0.0, 0.5, 1.0, 1.0]
    """

    steps: int
    start: float = 0.0

    def __post_init__(self) -> None:
        """Check the number of steps and the start."""
        require(is_integer(self.steps, 1), "steps", "an integer >= 1", self.steps)
        require(is_number(self.start, 0), "start", "a finite number >= 0", self.start)

    def __call__(self, step: int) -> float:
        """Return the factor at a step, counted from 0."""
        progress = min(step / self.steps, 1.0)
        return (1 - progress) * self.start + progress
