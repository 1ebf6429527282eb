"""The steps of regularisers: which step a call belongs to, schedules, and random draws by step.

Random draws, schedules and learned buffers are functions of the step, which is numbered from 0.

* A call outside training or without gradients (*peek*) returns the value of the last step that `every` does not skip,
  and stores nothing.
* A call that activation checkpointing or `torch.func` repeats (*repeat*), or a second call before `advance()`, computes
  the current step again from the buffers saved before it.
* Every other call starts a *new* step and stores its updates. The buffer `steps` then grows at once, or at `advance()`
  if `auto_advance=False`.

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

__all__ = ["Step", "StepCounter", "Warmup", "check_seed", "run_uncompiled", "seeded_generator"]

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
    """Assign each call of a regulariser to a step, by the rules of this module.

    What must survive saving and loading is in buffers of the regulariser: `steps`, if it has a counter, and learned
    tensors such as a basis. The counter itself remembers the current step only.

    Args:
        auto_advance: False if steps are counted by calling `advance`.
    """

    def __init__(self, auto_advance: bool = True) -> None:
        self.auto_advance = auto_advance
        self._started = False  # True between the first call of a step and `advance`; always False with `auto_advance`
        self._replaced: dict[str, Tensor] = {}  # the buffers that the current step has changed, as they were before

    @run_uncompiled
    def begin(self, module: nn.Module, every: int = 1) -> Step:
        """Return the step that this call of `module` belongs to."""
        steps = int(module.get_buffer("steps")) if hasattr(module, "steps") else 0
        # With `auto_advance`, the buffer counts the steps that have started, otherwise the steps that have ended.
        current = max(steps - 1, 0) if self.auto_advance else steps
        now = dict(module.named_buffers(recurse=False))
        before = now | self._replaced
        if not module.training or not torch.is_grad_enabled():
            # A skipped step is 0, which is not the value that a peek asks for.
            return Step("peek", current - current % every, now)
        # `begin` is not compiled, so only transforms of torch.func can make values unreadable here.
        if self._started or _numerics.in_backward() or not _numerics.values_readable():
            return Step("repeat", current, before)
        return Step("new", steps, now)

    @run_uncompiled
    def finish(self, module: nn.Module, step: Step, updates: Mapping[str, Tensor]) -> None:
        """Store the updates of a new step and count it.

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


# Random draws that are the same on every rank and after resuming -----------------------------------------------------


def check_seed(seed: object) -> None:
    """Raise a `ValueError` unless the seed is an integer of 64 bits."""
    require(is_integer(seed, -(2**63), 2**63 - 1), "seed", "an integer of 64 bits", seed)


def seeded_generator(seed: int, draw: int) -> torch.Generator:
    """Return the generator of the draw with a given number. New code that draws by seed and number should use it.

    The draws are the same on every rank and after resuming. Seed and number are mixed by the rounds of splitmix64, so
    neighbouring numbers have independent streams, and small seeds do not give the stream of `torch.manual_seed`.

    >>> torch.equal(torch.rand(3, generator=seeded_generator(0, 7)), torch.rand(3, generator=seeded_generator(0, 7)))
    True
    """
    # Mixing after each word makes (1, 0) and (0, 1) differ. The shift keeps the result within signed 64-bit integers.
    state = 0
    for word in (seed, draw):
        state = _splitmix64((state ^ word) + 0x9E3779B97F4A7C15)
    return torch.Generator().manual_seed(state >> 1)


def _splitmix64(z: int) -> int:
    """Return one output of the splitmix64 generator (Steele et al., 2014)."""
    z %= 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)
