"""Random draws that are the same on every rank and after a restart, and made by Python in compiled programs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from hypersphere._validation import is_integer, require

__all__ = ["require_seed", "seeded", "uncompiled"]

_WORD = 2**64
P = ParamSpec("P")
T = TypeVar("T")


def seeded(seed: int, draw: int) -> torch.Generator:
    """Return a generator that depends on a seed and the number of a draw alone, not on the global seed.

    Both are mixed by the rounds of splitmix64, so that no small seed gives the stream that it gives a user by itself.

    >>> torch.equal(torch.rand(3, generator=seeded(0, 7)), torch.rand(3, generator=seeded(0, 7)))
    True
    """
    state = 0
    for word in (seed, draw):
        state = _mixed((state ^ word) + 0x9E3779B97F4A7C15)
    return torch.Generator().manual_seed(state >> 1)


def _mixed(z: int) -> int:
    z %= _WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % _WORD
    return z ^ (z >> 31)


def require_seed(seed: object) -> None:
    """Refuse what is not an integer of 64 bits.

    >>> require_seed(1.5)
    Traceback (most recent call last):
    ValueError: seed must be an integer of 64 bits, not 1.5
    """
    whole = is_integer(seed, -(2**63), 2**63 - 1)
    require(whole, "seed", "an integer of 64 bits", seed)


def uncompiled(method: Callable[P, T]) -> Callable[P, T]:
    """Leave a method to Python in a compiled caller; unlike torch's own decorator, import no compiler before that."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(method)(*args, **kwargs)
        return method(*args, **kwargs)

    return call
