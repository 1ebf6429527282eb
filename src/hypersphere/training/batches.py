"""Batches of a data set that fits in memory, without the cost of a worker process or of collating."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hypersphere.functions.menu import require

__all__ = ["Batches"]


class Batches:
    """Iterate over two tensors in batches, in a new order every time if a generator is given.

    A data loader does as well wherever batches are asked for: anything that yields (inputs, labels).

    Args:
        inputs: (N, …), uint8 images are scaled to [0, 1] batch by batch.
        labels: (N,).
        batch_size: how many at once; the last batch may be smaller.
        generator: shuffles with it; None keeps the order.

    Example:
        >>> [len(y) for x, y in Batches(torch.zeros(5, 2), torch.arange(5), 2)]
        [2, 2, 1]
    """

    def __init__(
        self, inputs: Tensor, labels: Tensor, batch_size: int, generator: torch.Generator | None = None
    ) -> None:
        require(len(inputs) == len(labels) > 0, "labels", f"one for each of the {len(inputs)} inputs", len(labels))
        require(batch_size >= 1, "batch_size", "a number >= 1", batch_size)
        self.inputs, self.labels, self.batch_size, self.generator = inputs, labels, batch_size, generator

    def __len__(self) -> int:
        return -(-len(self.inputs) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        n = len(self.inputs)
        order = torch.arange(n) if self.generator is None else torch.randperm(n, generator=self.generator)
        for chosen in order.split(self.batch_size):
            x = self.inputs[chosen]
            yield (x.float() / 255 if x.dtype == torch.uint8 else x), self.labels[chosen]
