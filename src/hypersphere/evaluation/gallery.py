"""Who is searched for, and where: one known sample of each class, and all others."""

from __future__ import annotations

import torch
from torch import Tensor

from hypersphere.evaluation.arrays import Array, as_labels

__all__ = ["first_of_each"]


def first_of_each(labels: Array) -> Tensor:
    """Return (N,) booleans, true at the first sample of each class: a gallery, the rest being probes.

    Args:
        labels: (N,) integers.

    Example:
        >>> first_of_each([7, 5, 7, 5, 5])
        tensor([ True,  True, False, False, False])
    """
    device = labels.device if isinstance(labels, Tensor) else torch.device("cpu")
    _, classes = as_labels("labels", labels, None, device).unique(return_inverse=True)
    order = classes.argsort(stable=True)
    ordered = classes[order]
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return torch.zeros_like(first).scatter_(0, order, first)
