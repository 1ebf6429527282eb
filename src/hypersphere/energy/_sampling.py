"""Draws that are the same on every rank and after resuming: random ones by a seed and a number, and spaced rows."""

from __future__ import annotations

import torch
from torch import Tensor

from hypersphere._validation import is_integer, require

__all__ = ["MAX_NEURONS", "check_seed", "evenly_spaced", "seeded_generator"]

# Statistics of pairs use at most this many neurons of a layer, because their cost grows with the square.
MAX_NEURONS = 2048


def evenly_spaced(count: int, max_neurons: int = MAX_NEURONS) -> Tensor:
    """Return the indices of at most `max_neurons` evenly spaced rows among `count`.

    The rows are the same in every call, so that the statistics of a layer can be compared between steps.

    >>> evenly_spaced(7, 3).tolist()
    [0, 3, 6]
    """
    # In float64: the last index would be rounded up beyond the last row in float32 if there are more than 2²⁴ rows.
    return torch.linspace(0, count - 1, min(count, max_neurons), dtype=torch.float64).long()


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
