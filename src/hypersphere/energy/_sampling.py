"""Which neurons of a large layer are used for statistics of pairs, whose cost grows with the square of their number."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["MAX_NEURONS", "evenly_spaced"]

MAX_NEURONS = 2048


def evenly_spaced(count: int, max_neurons: int = MAX_NEURONS) -> Tensor:
    """Return the indices of at most `max_neurons` evenly spaced rows among `count`.

    The rows are the same in every call, so that the statistics of a layer can be compared between steps.

    >>> evenly_spaced(7, 3).tolist()
    [0, 3, 6]
    """
    # In float64: the last index would be rounded up beyond the last row in float32 if there are more than 2²⁴ rows.
    return torch.linspace(0, count - 1, min(count, max_neurons), dtype=torch.float64).long()
