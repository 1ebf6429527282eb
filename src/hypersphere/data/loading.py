"""Batches of a source, in memory or decoded by worker processes. Iteration can resume exactly within an epoch."""

from __future__ import annotations

import copy
import multiprocessing
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hypersphere._validation import is_integer, require, require_package
from hypersphere.data._files import DamagedData
from hypersphere.data.images import BrokenSample, as_floats
from hypersphere.data.samplers import Sampler, Sequential, Shuffled
from hypersphere.data.sources import Source, TensorSource, first_sample

IGNORED_LABEL = -100  # the default `ignore_index` of torch losses


class Loader:
    """Iterate over a source in batches (inputs, labels). One iteration is one epoch.

    uint8 images stay uint8. A last batch of one sample is merged with the previous batch, because BatchNorm needs at
    least two rows. With several processes, each gets every `world`-th row of a batch; see `rows_of_rank`.

    With `broken="skip"`, a sample that cannot be decoded is replaced by another input of its batch, with the label
    −100, which losses ignore. The sizes of batches and the positions of all other samples do not change.

    Tensors are indexed directly. Other sources are decoded through `torchdata.stateful_dataloader`. The state is the
    number of batches that were yielded and the random state in which their order was drawn. Unlike the state of
    a `StatefulDataLoader`, it can be loaded with another number of workers or processes.

    Args:
        source: the samples.
        batch_size: samples per batch, summed over processes.
        sampler: draws the order of each epoch.
        workers: processes that decode samples; 0 decodes in this process.
        broken: "error" raises a `BrokenSample`; "skip" continues.
        rank, world: index of this process, and number of processes.
        pin: copy decoded batches to pinned memory, for faster transfers to a GPU.

    Attributes:
        skipped: for each sample that could not be decoded, its name and the reason.

    Example:
        >>> from hypersphere.data import SAMPLERS
        >>> source = TensorSource(torch.zeros(7, 2), torch.arange(7), list("abcdefg"))
        >>> loader = Loader(source, batch_size=3, sampler=SAMPLERS["shuffled"](source.labels, 0))
        >>> [len(labels) for inputs, labels in loader]
        [3, 4]
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        sampler: Sampler,
        workers: int = 0,
        broken: str = "error",
        rank: int = 0,
        world: int = 1,
        pin: bool = False,
    ) -> None:
        require(len(source) > 0, "source", "a source with at least one sample", len(source))
        labels = sampler.labels
        require(len(labels) == len(source), "sampler", f"a sampler of {len(source)} labels", f"one of {len(labels)}")
        require(is_integer(batch_size, 1), "batch_size", "an integer >= 1", batch_size)
        require(is_integer(workers, 0), "workers", "an integer >= 0", workers)
        require(broken in ("error", "skip"), "broken", "'error' or 'skip'", broken)
        require(is_integer(rank, 0, world - 1), "rank", f"an integer in [0, {world})", rank)
        self.source, self.sampler, self.batch_size = source, sampler, batch_size
        self.broken, self.rank, self.world = broken, rank, world
        self.skipped: dict[str, str] = {}
        self._sizes = batch_sizes(len(sampler), batch_size)
        # During an epoch: the generator state before its order was drawn, and the number of batches already yielded.
        self._start: Tensor | None = None
        self._done = 0
        self._resumes = False
        self._workers, self._pin = workers, pin
        self._decoder: Any = None  # created by the first iteration, because it starts processes

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        return len(self._sizes)

    @property
    def generator(self) -> torch.Generator:
        """The generator of the sampler, whose state is part of `state_dict`."""
        return self.sampler.generator

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._resumes and self._start is not None:
            # The generator has already advanced past the order of this epoch, so a second generator draws it again.
            generator = torch.Generator(self.generator.device)
            generator.set_state(self._start)
        else:
            generator, self._start, self._done = self.generator, self.generator.get_state(), 0
        self._resumes = False
        start, done = self._start, self._done
        order = self.sampler.order(generator, self.batch_size)
        batches = order.split(self._sizes)[done:]
        parts = [rows_of_rank(batch, self.rank, self.world) for batch in batches]
        for part, (inputs, failures) in zip(parts, self._read([rows for rows, _ in parts]), strict=True):
            done += 1
            self._start, self._done = start, done  # if several iterators are active, the last one to yield counts
            rows, is_ignored = part
            labels = torch.full_like(rows, IGNORED_LABEL) if is_ignored else self.source.labels[rows]
            yield self._handle_failures(inputs, labels, failures)
        self._start, self._done = None, 0

    @property
    def batch_sizes(self) -> list[int]:
        """Samples of each batch of an epoch, over all processes."""
        return list(self._sizes)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the current epoch and the random state; every batch that was yielded counts as done.

        Example:
            >>> from hypersphere.data import SAMPLERS
            >>> source = TensorSource(torch.zeros(6, 2), torch.arange(6), list("abcdef"))
            >>> loader = Loader(source, batch_size=2, sampler=SAMPLERS["shuffled"](source.labels, 0))
            >>> for inputs, labels in loader:
            ...     break
            >>> resumed = Loader(source, batch_size=2, sampler=SAMPLERS["shuffled"](source.labels, 1))
            >>> resumed.load_state_dict(loader.state_dict())
            >>> len(list(resumed)), len(list(resumed))
            (2, 3)
        """
        now = self.generator.get_state()
        return {
            "samples": len(self.sampler),
            "batch_size": self.batch_size,
            "done": self._done,
            "order": now if self._start is None else self._start,
            "generator": now,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration yield the remaining batches of the saved epoch, or a new epoch if none was running.

        The next iteration is empty if the state was saved after the last batch but before the end of the iteration.
        """
        _require_state(state)
        saved = {key: state[key] for key in ("samples", "batch_size")}
        expected = {"samples": len(self.sampler), "batch_size": self.batch_size}
        require(saved == expected, "state", f"a state of the same data, with {expected}", saved)
        self.generator.set_state(state["generator"])
        self._done, self._resumes = state["done"], state["done"] > 0
        self._start = state["order"] if self._resumes else None

    def _read(self, parts: list[Tensor]) -> Iterator[tuple[Tensor | None, dict[int, Exception]]]:
        """Iterate over the inputs of each batch, None if none is readable, and the errors by row."""
        if isinstance(self.source, TensorSource):
            inputs = self.source.inputs
            return ((inputs[rows], {}) for rows in parts)
        if self._decoder is None:
            self._decoder = _decoder(self.source, self._workers, self._pin)
        self._decoder.batch_sampler.batches = parts
        return iter(self._decoder)

    def _handle_failures(
        self, inputs: Tensor | None, labels: Tensor, failures: Mapping[int, Exception]
    ) -> tuple[Tensor, Tensor]:
        """Raise the first error of a batch, or record its broken samples and set their labels to be ignored."""
        for row, error in failures.items():
            if self.broken == "error" or not isinstance(error, BrokenSample):
                # Raise a copy, because the traceback of an error refers to this frame, and the frame to the error. Such
                # a cycle would keep the workers alive until garbage collection, which then takes ten seconds.
                raise copy.copy(error) from None
            self.skipped[error.name] = error.reason
            labels[row] = IGNORED_LABEL
        if inputs is None:
            raise DamagedData(
                f"a batch must contain a readable sample, but all of its {len(labels)} samples are broken"
            )
        return inputs, labels


class Batches(Loader):
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
        accepted = generator is None or isinstance(generator, torch.Generator)
        require(accepted, "generator", "a torch.Generator or None", generator)
        positions = torch.arange(len(inputs))
        sampler = Sequential(positions) if generator is None else Shuffled(positions)
        sampler.generator = generator or sampler.generator
        source = TensorSource(inputs, positions, ())
        source.labels = labels  # not necessarily integers
        super().__init__(source, batch_size=batch_size, sampler=sampler)
        self.inputs, self.labels, self._shuffled = inputs, labels, generator is not None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, labels in super().__iter__():
            yield as_floats(inputs), labels

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the current epoch; the random states are None if the order is kept."""
        state = super().state_dict()
        return state if self._shuffled else state | {"order": None, "generator": None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration yield the remaining batches of the saved epoch, or a new epoch if none was running."""
        _require_state(state)
        saved, expected = {"shuffled": state["order"] is not None}, {"shuffled": self._shuffled}
        require(saved == expected, "state", f"a state of batches with {expected}", saved)
        unused = self.generator.get_state()  # any valid state, if the order is not shuffled
        super().load_state_dict(state if self._shuffled else {**state, "order": unused, "generator": unused})


def _require_state(state: Mapping[str, Any]) -> None:
    keys = ("samples", "batch_size", "done", "order", "generator")
    complete = isinstance(state, Mapping) and all(key in state for key in keys)
    require(complete, "state", f"the result of `state_dict`, with {', '.join(keys)}", state)


def batch_sizes(count: int, size: int) -> list[int]:
    """Return the sizes of the batches of one epoch; a last batch of one sample is merged with the previous one.

    >>> batch_sizes(8, 3), batch_sizes(7, 3)
    ([3, 3, 2], [3, 4])
    """
    full, rest = divmod(count, size)
    if full and rest == 1:
        return [size] * (full - 1) + [size + 1]
    return [size] * full + [rest] * bool(rest)


def rows_of_rank(batch: Tensor, rank: int, world: int) -> tuple[Tensor, bool]:
    """Return the rows of a batch for one process, and True if their labels must be ignored.

    Process r of R gets every R-th row. Each gets at least two rows, because BatchNorm needs two. A batch that is too
    small is divided among the first processes; the others get two rows that are ignored.

    >>> rows_of_rank(torch.arange(5), 1, 2), rows_of_rank(torch.arange(3), 1, 2)
    ((tensor([1, 3]), False), (tensor([0, 1]), True))
    """
    if world == 1:
        return batch, False
    parts = max(min(world, len(batch) // 2), 1)
    return (batch[rank::parts], False) if rank < parts else (batch[:2], True)


class _PresetBatches:
    """A batch sampler whose batches are set before each epoch."""

    def __init__(self) -> None:
        self.batches: list[Tensor] = []

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return (rows.tolist() for rows in self.batches)


class _CatchErrors:
    """A map-style data set that returns the error of a broken sample instead of raising it.

    An error raised in a worker process would arrive with another type and with a traceback in its message.
    """

    def __init__(self, source: Source) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Tensor | Exception:
        try:
            return self.source[index]
        except (ValueError, OSError) as error:
            return error


def _collate(samples: list[Tensor | Exception]) -> tuple[Tensor | None, dict[int, Exception]]:
    """Return the stacked inputs, with a readable one in place of each broken one, and the errors by row."""
    failures = {row: sample for row, sample in enumerate(samples) if isinstance(sample, Exception)}
    readable = [sample for sample in samples if isinstance(sample, Tensor)]
    if not readable:
        return None, failures
    return torch.stack([readable[0] if isinstance(sample, Exception) else sample for sample in samples]), failures


def _end_with_parent(_: int) -> None:
    """Let this worker process end when the process that started it ends.

    torch's watchdog asks for the parent after the worker has started. If the parent was killed before, the worker would
    take the process that adopted it for its parent, and wait for ever.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _decoder(source: Source, workers: int, pin: bool) -> Any:
    """Return a data loader that decodes the batches of `_PresetBatches`."""
    torchdata = require_package("torchdata.stateful_dataloader", "torchdata", "train")
    # Workers compare the size of each image with that of the first one, so decode it before they start.
    first_sample(source)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*set_vital", category=UserWarning)  # torchdata 0.11 with torch 2.13
        return torchdata.StatefulDataLoader(
            _CatchErrors(source),
            batch_sampler=_PresetBatches(),
            collate_fn=_collate,
            worker_init_fn=_end_with_parent,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=pin,
            # Otherwise each iterator would draw a seed from the global generator and change later random numbers.
            generator=torch.Generator(),
            snapshot_every_n_steps=0,  # the Loader knows the position itself
        )
