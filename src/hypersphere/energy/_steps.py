"""The steps of a regulariser: which call starts one, which call repeats it, and which call only peeks at the value."""

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
        buffers: the buffers of the regulariser by name, as they were when the step started.
    """

    kind: Literal["new", "repeat", "peek"] = "new"
    number: int = 0
    buffers: Mapping[str, Tensor] = MappingProxyType({})


class StepCounter:
    """Assign each call of a regulariser to a step.

    The state is in buffers of the regulariser, which are saved and moved with it: the number of counted steps in
    `steps` (if it has a counter), and learned tensors such as a basis. A call has one of three kinds:

        training  gradients  in a backward pass    step     |  kind    number  starts from  stores
        mode      enabled    or torch.func         started  |                  buffers      updates
        --------  ---------  --------------------  -------  |  ------  ------  -----------  -------
        no        any        any                   any      |  peek    last    current      no
        yes       no         any                   any      |  peek    last    current      no
        yes       yes        yes                   any      |  repeat  last    replaced     no
        yes       yes        no                    yes      |  repeat  last    replaced     no
        yes       yes        no                    no       |  new     steps   current      yes

    `last` is the number of the most recent step: steps − 1 with `auto_advance` (steps are counted when they start; 0
    before the first one), steps otherwise. Without `auto_advance` a step is `started` from its first call until
    `advance` counts it; with it, never. The `replaced` buffers are those that the first call of the step replaced. If
    the regulariser was created, advanced or loaded since then, they are the current ones.

    A forward pass during a backward pass is the recomputation of activation checkpointing. Its reentrant form runs the
    first pass without gradients, so its steps are not counted.

    Args:
        auto_advance: False if steps are counted by calling `advance`.
    """

    def __init__(self, auto_advance: bool = True) -> None:
        self.auto_advance = auto_advance
        # Buffers before the update of the last step; None if no step has started since `advance` or `reset_step`.
        self._replaced: dict[str, Tensor] | None = None

    @run_uncompiled
    def begin(self, module: nn.Module) -> Step:
        """Return the step that this call of `module` belongs to."""
        steps = int(module.get_buffer("steps")) if hasattr(module, "steps") else 0
        last = max(steps - 1, 0) if self.auto_advance else steps
        buffers = dict(module.named_buffers(recurse=False))
        if not module.training or not torch.is_grad_enabled():
            return Step("peek", last, buffers)
        # Outside of compiled code, values cannot be read only if a transform of torch.func is active.
        is_recomputed = _numerics.in_backward() or not _numerics.values_readable()
        is_started = not self.auto_advance and self._replaced is not None
        if is_recomputed or is_started:
            return Step("repeat", last, buffers | (self._replaced or {}))
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
            self._count(module)

    def advance(self, module: nn.Module) -> None:
        """Count one step; the next call starts another one. Only without `auto_advance`."""
        if self.auto_advance:
            raise ValueError("advance() needs auto_advance=False")
        self._replaced = None
        self._count(module)

    def reset_step(self) -> None:
        """Let the next call start a step, because the buffers were loaded."""
        self._replaced = None

    @staticmethod
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
