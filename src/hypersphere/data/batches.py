"""Batches of a data set that fits in memory, without worker processes or collation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hypersphere._validation import is_integer, require

__all__ = ["Batches"]


class Batches:
    """Iterate over two tensors in batches, shuffled in every epoch if a generator is given.

    Training also accepts a data loader or any other iterable of (inputs, labels). If it has the methods `state_dict`
    and `load_state_dict`, training can resume in the middle of an epoch, as with this class.

    Args:
        inputs: inputs (N, …); uint8 images are scaled to [0, 1] batch by batch.
        labels: labels (N,).
        batch_size: rows per batch. The last batch may be smaller. A last batch of one row is merged with the previous
            batch, because BatchNorm needs at least two rows.
        generator: generator for shuffling; None keeps the order.

    Example:
        >>> [len(y) for x, y in Batches(torch.zeros(8, 2), torch.arange(8), 3)]
        [3, 3, 2]
        >>> [len(y) for x, y in Batches(torch.zeros(7, 2), torch.arange(7), 3)]
        [3, 4]
    """

    def __init__(
        self, inputs: Tensor, labels: Tensor, batch_size: int, generator: torch.Generator | None = None
    ) -> None:
        require(len(inputs) > 0, "inputs", "at least one input", 0)
        require(len(inputs) == len(labels), "labels", f"one label for each of the {len(inputs)} inputs", len(labels))
        require(is_integer(batch_size, 1), "batch_size", "an integer >= 1", batch_size)
        self.inputs, self.labels, self.batch_size, self.generator = inputs, labels, batch_size, generator
        self._sizes = _sizes(len(inputs), batch_size)
        self._place: tuple[Tensor | None, int] | None = (
            None  # generator state that drew the order, number of batches already yielded
        )
        self._resumes = False

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        resumed = self._place if self._resumes else None
        self._resumes = False
        start, done = resumed or (self._random_state(), 0)
        chunks = self._order(start, again=resumed is not None).split(self._sizes)
        for at in range(done, len(chunks)):
            self._place = start, at + 1
            x = self.inputs[chunks[at]]
            yield (x.float() / 255 if x.dtype == torch.uint8 else x), self.labels[chunks[at]]
        self._place = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the current iteration; every batch that was yielded counts as done.

        Example:
            >>> data = Batches(torch.zeros(6), torch.arange(6), 2, torch.Generator().manual_seed(0))
            >>> for x, y in data:
            ...     break
            >>> again = Batches(torch.zeros(6), torch.arange(6), 2, torch.Generator())
            >>> again.load_state_dict(data.state_dict())
            >>> len(list(again)), len(list(again))
            (2, 3)
        """
        now = self._random_state()
        start, done = self._place or (now, 0)
        return {
            "samples": len(self.inputs),
            "batch_size": self.batch_size,
            "done": done,
            "order": start,
            "generator": now,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration yield the remaining batches of the saved iteration, or all if none was running.

        The next iteration is empty if the state was saved after the last batch but before the end of the iteration.
        """
        theirs = {key: state[key] for key in ("samples", "batch_size")}
        ours = {"samples": len(self.inputs), "batch_size": self.batch_size}
        require(theirs == ours, "state", f"a state of the same data, with {ours}", theirs)
        theirs, ours = {"shuffled": state["order"] is not None}, {"shuffled": self.generator is not None}
        require(theirs == ours, "state", f"a state of batches with {ours}", theirs)
        if self.generator is not None:
            self.generator.set_state(state["generator"])
        self._resumes = state["done"] > 0
        self._place = (state["order"], state["done"]) if self._resumes else None

    def _random_state(self) -> Tensor | None:
        return None if self.generator is None else self.generator.get_state()

    def _order(self, start: Tensor | None, again: bool) -> Tensor:
        """Return a new order, or with `again` the order drawn in the state `start` without advancing the generator."""
        generator = self.generator
        if generator is None or start is None:
            return torch.arange(len(self.inputs))
        if again:
            generator = torch.Generator(generator.device)
            generator.set_state(start)
        return torch.randperm(len(self.inputs), generator=generator)


def _sizes(count: int, size: int) -> list[int]:
    full, rest = divmod(count, size)
    if full and rest == 1:
        return [size] * (full - 1) + [size + 1]
    return [size] * full + [rest] * bool(rest)
