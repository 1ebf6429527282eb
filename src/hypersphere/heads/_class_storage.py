"""Where the class vectors of a head are.

A head asks its storage for everything that involves classes which another process may hold. `LocalClasses` is the
storage of a head that holds all of its classes; `ShardedClasses` has the same methods for a head whose classes are
distributed over processes.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from hypersphere.heads.fused_loss import ClassInputs, ClassTerms, ScoreRule, class_terms

__all__ = ["ClassStorage", "LocalClasses", "LocalRows", "RowAccess", "rows_of_classes"]


class ClassStorage(Protocol):
    """Access to classes that may be in other processes."""

    def terms(self, inputs: ClassInputs, rule: ScoreRule) -> ClassTerms:
        """Return the terms of all classes; `inputs` has the class vectors of this process."""

    def target_vectors(self, weight: Tensor, labels: Tensor, centers: int) -> Tensor:
        """Return the class vectors (B, K, d) of labels; `weight` has the class vectors of this process."""

    def normal_noise(self, like: Tensor) -> Tensor:
        """Return standard normal numbers, the same in all processes."""

    def rows_after_change(self, num_classes: int) -> RowAccess:
        """Return access to rows for a change that leaves `num_classes` classes."""


class RowAccess(Protocol):
    """Access to tensors with one row, or K rows, per class while classes are added or removed."""

    @property
    def storage(self) -> ClassStorage:
        """The storage after the change."""

    def take(self, values: Tensor, source: Tensor, per_class: int) -> Tensor:
        """Return the new rows of this process: those of the old classes `source`, and zeros where it is −1.

        Args:
            values: the old rows of this process, `per_class` for each class.
            source: (new classes,) the old class of each new class of all processes, or −1.
            per_class: the number of rows of a class.
        """

    def fetch(self, values: Tensor, rows: Tensor) -> Tensor:
        """Return a copy of single rows, given by their position among the rows of all processes."""

    def store_(self, values: Tensor, rows: Tensor, new: Tensor) -> None:
        """Overwrite single rows, given by their position among the rows of all processes."""

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over the rows of all processes."""

    def draw(self, *shape: int) -> Tensor:
        """Return standard normal numbers, the same in all processes."""

    def new_classes(self, source: Tensor) -> slice:
        """Return the range of new classes that this process holds after the change."""


class LocalClasses:
    """All class vectors are in this process."""

    def terms(self, inputs: ClassInputs, rule: ScoreRule) -> ClassTerms:
        """Return the terms of all classes."""
        return class_terms(inputs, rule)

    def target_vectors(self, weight: Tensor, labels: Tensor, centers: int) -> Tensor:
        """Return the class vectors (B, K, d) of labels."""
        return weight.unflatten(0, (len(weight) // centers, centers))[labels]

    def normal_noise(self, like: Tensor) -> Tensor:
        """Return standard normal numbers from the global generator."""
        return torch.randn_like(like)

    def rows_after_change(self, num_classes: int) -> LocalRows:
        """Return access to rows, which is the same for any number of classes."""
        return LocalRows(self)


class LocalRows:
    """`RowAccess` of a process that holds all classes."""

    def __init__(self, storage: LocalClasses) -> None:
        self.storage = storage

    def take(self, values: Tensor, source: Tensor, per_class: int) -> Tensor:
        """Return new rows: those of the old classes `source`, and zeros where it is −1."""
        rows = values[rows_of_classes(source.to(values.device).clamp_min(0), per_class)]
        rows[rows_of_classes(source.to(values.device), per_class) < 0] = 0
        return rows

    def fetch(self, values: Tensor, rows: Tensor) -> Tensor:
        """Return a copy of single rows."""
        return values[rows.to(values.device)]

    def store_(self, values: Tensor, rows: Tensor, new: Tensor) -> None:
        """Overwrite single rows."""
        values[rows.to(values.device)] = new.to(values.dtype)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over all rows."""
        return values.mean(0)

    def draw(self, *shape: int) -> Tensor:
        """Return standard normal numbers from the global generator."""
        return torch.randn(*shape)

    def new_classes(self, source: Tensor) -> slice:
        """Return the range of all new classes."""
        return slice(0, len(source))


def rows_of_classes(classes: Tensor, per_class: int) -> Tensor:
    """Return the positions of the rows of classes; negative for the class −1.

    >>> rows_of_classes(torch.tensor([2, -1]), 3).tolist()
    [6, 7, 8, -3, -2, -1]
    """
    offsets = torch.arange(per_class, device=classes.device)
    return (per_class * classes.unsqueeze(1) + offsets).flatten()
