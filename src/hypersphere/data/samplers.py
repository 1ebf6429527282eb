"""Samplers: the order in which the samples of a source are visited in each epoch.

A sampler draws one order per epoch from its generator. Its random state is therefore that of the generator, and the
order of the current epoch can be drawn again from the state that the generator had at the start of the epoch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from jaxtyping import Int64
from torch import Tensor

from hypersphere._validation import is_integer, require


class Sampler(ABC):
    """Draws the order of an epoch.

    Args:
        labels: int64 (N,), labels of the samples.
        seed: seed of the generator.
    """

    def __init__(self, labels: Int64[Tensor, " items"], seed: int = 0) -> None:
        require(is_integer(seed, -(2**63), 2**64 - 1), "seed", "an integer of 64 bits", seed)
        self.labels = labels
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        """Return the number of samples per epoch."""
        return len(self.labels)

    @abstractmethod
    def order(self, generator: torch.Generator, batch_size: int) -> Int64[Tensor, " samples"]:
        """Return the positions of the samples of one epoch; each `batch_size` consecutive ones form a batch."""


class Sequential(Sampler):
    """All samples, in the order of the source."""

    def order(self, generator: torch.Generator, batch_size: int) -> Int64[Tensor, " samples"]:
        """Return 0, 1, ..., N−1."""
        return torch.arange(len(self.labels))


class Shuffled(Sampler):
    """All samples, in a random order.

    >>> Shuffled(torch.zeros(4, dtype=torch.int64)).order(torch.Generator().manual_seed(0), 2)
    tensor([0, 1, 3, 2])
    """

    def order(self, generator: torch.Generator, batch_size: int) -> Int64[Tensor, " samples"]:
        """Return a random permutation."""
        return torch.randperm(len(self.labels), generator=generator)


class ClassBalanced(Sampler):
    """Samples every class equally often, in random order. Samples of small classes are repeated.

    Args:
        labels: int64 (N,).
        seed: seed of the generator.
        samples: samples per epoch, by default N.
    """

    def __init__(self, labels: Int64[Tensor, " items"], seed: int = 0, *, samples: int | None = None) -> None:
        super().__init__(labels, seed)
        require(samples is None or is_integer(samples, 1), "sampler.samples", "None or an integer >= 1", samples)
        self.samples = len(labels) if samples is None else samples

    def __len__(self) -> int:
        return self.samples

    def order(self, generator: torch.Generator, batch_size: int) -> Int64[Tensor, " samples"]:
        """Return positions such that the numbers of samples of two classes differ by at most one."""
        items, starts, counts = _items_by_class(self.labels, generator)
        number_of_classes = len(counts)
        # Each epoch draws which classes get one sample more than the others.
        quotas = torch.full((number_of_classes,), self.samples // number_of_classes)
        extra = torch.randperm(number_of_classes, generator=generator)[: self.samples % number_of_classes]
        quotas[extra] += 1
        classes = torch.arange(number_of_classes).repeat_interleave(quotas)
        within = _occurrences(classes)  # 0 for the first sample of a class, 1 for the second, ...
        drawn = items[starts[classes] + within % counts[classes]]
        return drawn[torch.randperm(len(drawn), generator=generator)]


class MPerClass(Sampler):
    """Batches of different classes with `m` samples per class.

    Classes are visited in random order and equally often. A class with fewer than `m` samples repeats them.

    Args:
        labels: int64 (N,).
        seed: seed of the generator.
        m: samples per class and batch; the batch size must be a multiple of it.
        samples: samples per epoch, by default N, rounded down to a multiple of `m`.
    """

    def __init__(
        self, labels: Int64[Tensor, " items"], seed: int = 0, *, m: int = 4, samples: int | None = None
    ) -> None:
        super().__init__(labels, seed)
        require(is_integer(m, 1), "sampler.m", "an integer >= 1", m)
        require(samples is None or is_integer(samples, m), "sampler.samples", f"None or an integer >= {m}", samples)
        self.m, self.groups = m, max((len(labels) if samples is None else samples) // m, 1)

    def __len__(self) -> int:
        return self.groups * self.m

    def order(self, generator: torch.Generator, batch_size: int) -> Int64[Tensor, " samples"]:
        """Return positions in groups of `m` samples of one class."""
        items, starts, counts = _items_by_class(self.labels, generator)
        require(batch_size % self.m == 0, "batch_size", f"a multiple of sampler.m ({self.m})", batch_size)
        per_batch = batch_size // self.m
        accepted = f"at most {self.m} times the number of classes ({len(counts)})"
        require(per_batch <= len(counts), "batch_size", accepted, batch_size)
        classes = self._class_order(len(counts), per_batch, generator)
        # The j-th group of a class takes its samples j·m, ..., j·m + m − 1, cyclically.
        within = _occurrences(classes).unsqueeze(1) * self.m + torch.arange(self.m)
        return items[starts[classes].unsqueeze(1) + within % counts[classes].unsqueeze(1)].flatten()

    def _class_order(self, number_of_classes: int, per_batch: int, generator: torch.Generator) -> Tensor:
        """Return the classes of all groups: permutations of the classes, without repetition within a batch."""
        permutations: list[Tensor] = []
        drawn = 0
        started = torch.empty(0, dtype=torch.int64)  # classes of the batch that the next permutation completes
        while drawn < self.groups:
            permutation = torch.randperm(number_of_classes, generator=generator)
            repeated = torch.isin(permutation, started)
            permutation = torch.cat([permutation[~repeated], permutation[repeated]])
            permutations.append(permutation)
            drawn += number_of_classes
            started = permutation[number_of_classes - drawn % per_batch :]
        return torch.cat(permutations)[: self.groups]


def _items_by_class(labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return the positions of all samples, grouped by class and shuffled in it, and start and size of each group."""
    order = torch.randperm(len(labels), generator=generator)
    present, labels = torch.unique(labels, return_inverse=True)  # classes without samples are not drawn
    items = order[torch.argsort(labels[order], stable=True)]
    counts = torch.bincount(labels, minlength=len(present))
    return items, counts.cumsum(0) - counts, counts


def _occurrences(values: Tensor) -> Tensor:
    """Return, for each entry, how often its value occurs before it.

    >>> _occurrences(torch.tensor([5, 3, 5, 5]))
    tensor([0, 0, 1, 2])
    """
    by_value = torch.argsort(values, stable=True)
    counts = torch.unique(values, return_counts=True)[1]
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    result = torch.empty_like(by_value)
    result[by_value] = torch.arange(len(values)) - first
    return result


SAMPLERS: dict[str, Callable[..., Sampler]] = {
    "shuffled": Shuffled,
    "sequential": Sequential,
    "class_balanced": ClassBalanced,
    "m_per_class": MPerClass,
}
