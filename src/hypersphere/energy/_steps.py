"""The steps of a regulariser: random draws, schedules and learned buffers are functions of the step of a call.

Steps are numbered from 0. Three rules, in this order, say which step a call belongs to:

1. **peek.** A call in eval mode or without gradients only asks for the value. It computes the last step from the
   current buffers and stores nothing.
2. **repeat.** A call that computes the last step again must return the same value. It starts from the buffers that the
   step started from and stores nothing. Such a call is

   * made during a backward pass: this is how activation checkpointing recomputes a forward pass;
   * made inside a `torch.func` transform, which must not change state;
   * made after the first call of a step and before `advance`, with `auto_advance=False`.

3. **new.** Every other call starts the next step. It stores its updates of the buffers.

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
        kind: "new" if the call starts the step, "repeat" if it computes the step again, "peek" if it only asks for the
            value. Both "new" and "repeat" update learned buffers; "peek" uses them as they are.
        number: the number of the step, from 0. Schedules and random draws are functions of it.
        buffers: the buffers of the regulariser by name, from which the call starts.
    """

    kind: Literal["new", "repeat", "peek"] = "new"
    number: int = 0
    buffers: Mapping[str, Tensor] = MappingProxyType({})


class StepCounter:
    """Assign each call of a regulariser to a step, by the rules of this module.

    The state is in buffers of the regulariser, which are saved and moved with it: the number of counted steps in
    `steps` (if it has a counter), and learned tensors such as a basis. With `auto_advance`, a step is counted when it
    starts, so the last step has the number steps − 1, or 0 before the first one. Otherwise `advance` counts a step when
    it ends, so the last step has the number `steps`.

    Args:
        auto_advance: False if steps are counted by calling `advance`.
    """

    def __init__(self, auto_advance: bool = True) -> None:
        self.auto_advance = auto_advance
        self._is_started = False  # with `auto_advance=False`: whether a call has started the step that `advance` ends
        self._replaced: dict[str, Tensor] = {}  # the buffers that the last step has replaced, as they were before

    @run_uncompiled
    def begin(self, module: nn.Module) -> Step:
        """Return the step that this call of `module` belongs to."""
        steps = int(module.get_buffer("steps")) if hasattr(module, "steps") else 0
        last = max(steps - 1, 0) if self.auto_advance else steps
        buffers = dict(module.named_buffers(recurse=False))
        if not (module.training and torch.is_grad_enabled()):
            return Step("peek", last, buffers)
        # This function is not compiled, so values cannot be read only inside a transform of torch.func.
        is_recomputed = _numerics.in_backward() or not _numerics.values_readable()
        if is_recomputed or self._is_started:
            return Step("repeat", last, buffers | self._replaced)
        return Step("new", steps, buffers)

    @run_uncompiled
    def finish(self, module: nn.Module, step: Step, updates: Mapping[str, Tensor]) -> None:
        """Store new values of buffers if the call has started the step, and count it with `auto_advance`.

        Call this last: a call that raised an error has changed nothing and can be repeated.
        """
        if step.kind != "new":
            return
        self._replaced = {name: step.buffers[name] for name in updates}
        for name, value in updates.items():
            setattr(module, name, value.detach())
        if self.auto_advance:
            _count(module)
        else:
            self._is_started = True

    def advance(self, module: nn.Module) -> None:
        """Count one step; the next call starts another one. Only without `auto_advance`."""
        if self.auto_advance:
            raise ValueError("advance() needs auto_advance=False")
        self.forget_step()
        _count(module)

    def forget_step(self) -> None:
        """Let the next call start a step from the current buffers, because the step has ended or they were loaded."""
        self._is_started, self._replaced = False, {}


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
