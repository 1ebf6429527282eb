"""Divide a source into training and validation data: by sample, by class (open set), or by folders."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hypersphere._validation import is_integer, is_number, require
from hypersphere.data.containers import Graph
from hypersphere.data.pairs import Pairs, read_pairs
from hypersphere.data.sources import Source, TensorSource, first_sample, of_classes, subset, with_labels

RANDOM_SAMPLES = 32
MOST_DIMENSIONS = 16  # of a sample
MOST_NUMBERS = 2**28  # in a sample, and approximately in all random ones


@dataclass(frozen=True, eq=False)
class DataSplit:
    """Training and validation data.

    Attributes:
        train: the training samples.
        validation: samples that are not used for training, or None.
        open_set: True if the classes of `validation` are not those of `train`, as in face verification.
        graph: the graph, if samples are indices of its nodes.
        pairs: verification pairs, as positions in `validation`, if the data set defines them.
        true_labels: (N,) labels of `train` before some were replaced by wrong ones, or None if none were.
    """

    train: Source
    validation: Source | None = None
    open_set: bool = False
    graph: Graph | None = None
    pairs: Pairs | None = None
    true_labels: Tensor | None = None

    def __post_init__(self) -> None:
        require(len(self.train) > 0, "data", "at least one training example", "none")
        require(self.validation is None or len(self.validation) > 0, "data", "at least one validation example", "none")

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the training classes."""
        return self.train.classes

    def outline(self) -> dict[str, Any] | None:
        """Return the shape and dtype of a sample and the classes, to build a network; None for a graph.

        A graph is part of its network, so random data cannot replace it.
        """
        if self.graph is not None:
            return None
        sample = first_sample(self.train)
        dtype = str(sample.dtype).removeprefix("torch.")
        return {"shape": list(sample.shape), "dtype": dtype, "classes": list(self.classes)}

    @classmethod
    def random_like(cls, outline: Mapping[str, Any]) -> DataSplit:
        """Return random data with this outline, to build and test a network.

        >>> DataSplit.random_like({"shape": [1, 8, 8], "dtype": "uint8", "classes": ["a", "b"]}).train[0].shape
        torch.Size([1, 8, 8])
        """
        numbers = math.prod(outline["shape"])
        require(numbers <= MOST_NUMBERS, "shape", f"at most {MOST_NUMBERS} numbers", outline["shape"])
        count = min(RANDOM_SAMPLES, max(2, MOST_NUMBERS // max(numbers, 1)))
        generator = torch.Generator().manual_seed(0)
        noise = torch.rand(count, *outline["shape"], generator=generator)
        inputs = (255 * noise).round().to(torch.uint8) if outline["dtype"] == "uint8" else 2 * noise - 1
        source = TensorSource(inputs, torch.arange(count) % len(outline["classes"]), outline["classes"])
        return cls(source, source)

    def fingerprint(self) -> dict[str, Any]:
        """Return plain data that change if samples are added, removed or moved, for `fingerprint_difference`."""
        validation = None if self.validation is None else self.validation.fingerprint()
        return {"train": self.train.fingerprint(), "validation": validation}


def is_outline(value: Any) -> bool:
    """Return True for the outline of data whose samples are small enough to allocate, or for None.

    >>> is_outline({"shape": [1, 8, 8], "dtype": "uint8", "classes": ["a"]}), is_outline({"shape": [10**9] * 9})
    (True, False)
    """
    if value is None:
        return True
    if not isinstance(value, dict) or set(value) != {"shape", "dtype", "classes"}:
        return False
    shape, classes = value["shape"], value["classes"]
    is_shape = isinstance(shape, list) and len(shape) <= MOST_DIMENSIONS and all(is_integer(n, 1) for n in shape)
    is_names = isinstance(classes, list) and bool(classes) and all(isinstance(name, str) for name in classes)
    return is_shape and is_names and math.prod(shape) <= MOST_NUMBERS


def fingerprint_difference(stored: Mapping[str, Any], current: Mapping[str, Any]) -> str | None:
    """Return a sentence that says what changed between two fingerprints of a DataSplit, or None if nothing did.

    >>> old = {"train": {"count": 3, "classes": "a"}, "validation": None}
    >>> fingerprint_difference(old, {"train": {"count": 4, "classes": "a"}, "validation": None})
    'the number of training samples changed from 3 to 4'
    """
    for part, title in (("train", "training"), ("validation", "validation")):
        before, now = stored.get(part), current.get(part)
        if before == now:
            continue
        if before is None or now is None:
            return f"the {title} data were {'added' if before is None else 'removed'}"
        if before.get("count") != now.get("count"):
            return f"the number of {title} samples changed from {before.get('count')} to {now.get('count')}"
        if before.get("classes") != now.get("classes"):
            return f"the names or the order of the {title} classes changed"
        if _names_digest(before) != _names_digest(now):
            return f"the names of the {title} files changed"
        if before.get("labels") != now.get("labels"):
            return f"the labels of the {title} samples changed"
        return f"the contents of the {title} data changed"
    return None


def _names_digest(fingerprint: Mapping[str, Any]) -> Any:
    """Return the checksum of the names. A subset has it in the fingerprint of its source."""
    inner = fingerprint.get("source")
    return fingerprint.get("names") if inner is None else _names_digest(inner)


def split_by_sample(source: Source, held_out: int | float = 1) -> DataSplit:
    """Hold out the last samples of each class for validation.

    Args:
        source: all samples.
        held_out: number of samples per class, or fraction of them. A class keeps at least one sample for training.
    """
    is_valid = is_integer(held_out, 1) or (is_number(held_out, 0, 1) and 0 < held_out < 1)
    require(is_valid, "data.held_out", "an integer >= 1 or a fraction between 0 and 1", held_out)
    require(bool(source.classes), "data", "at least one class with enough samples", "none")
    order = torch.argsort(source.labels, stable=True)
    counts = torch.bincount(source.labels, minlength=len(source.classes))
    requested = (counts * held_out).round().long().clamp(min=1) if held_out < 1 else torch.full_like(counts, held_out)
    held_per_class = torch.minimum(requested, (counts - 1).clamp(min=0))
    if not bool(held_per_class.any()):
        raise ValueError("data must have a class with two samples, one for training and one for testing")
    # The rank of each sample within its class, in the order of the source.
    rank = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    is_held = rank >= (counts - held_per_class).repeat_interleave(counts)
    train, validation = order[~is_held].sort().values, order[is_held].sort().values
    return DataSplit(subset(source, train), subset(source, validation))


def split_by_class(source: Source, held_out: int | float = 0.2, seed: int = 0) -> DataSplit:
    """Hold out random classes for validation (open set).

    Args:
        source: all samples.
        held_out: number of classes, or fraction of them.
        seed: seed that selects the classes.
    """
    num_classes = len(source.classes)
    is_valid = is_integer(held_out, 1, num_classes - 1) or (is_number(held_out, 0, 1) and 0 < held_out < 1)
    accepted = f"a number of classes in 1..{num_classes - 1} or a fraction between 0 and 1"
    require(is_valid and num_classes > 1, "data.held_out", accepted, held_out)
    count = min(max(round(held_out * num_classes), 1), num_classes - 1) if held_out < 1 else int(held_out)
    order = torch.randperm(num_classes, generator=torch.Generator().manual_seed(seed))
    validation, train = order[:count].sort().values.tolist(), order[count:].sort().values.tolist()
    parts = [of_classes(source, [source.classes[label] for label in labels]) for labels in (train, validation)]
    return DataSplit(parts[0], parts[1], open_set=True)


def selection_split(split: DataSplit, fraction: float, seed: int = 0) -> DataSplit:
    """Split the training data again, so that settings can be chosen without the test data.

    Open-set data are divided by class, other data by sample within each class. A graph has validation nodes for this
    purpose. If some training labels are wrong, the data are divided with their true labels, and the same fraction of
    the new training part gets wrong labels again, so that settings are chosen on true labels.

    Args:
        split: the data; its test data are not used.
        fraction: fraction of the training samples or classes in the part that settings are chosen on.
        seed: seed that selects them.
    """
    require(is_number(fraction, 0, 1) and 0 < fraction < 1, "selection", "a fraction between 0 and 1", fraction)
    if split.graph is not None:
        labels, nodes = split.graph.labels, split.graph.val.nonzero().squeeze(1)
        return replace(split, validation=TensorSource(nodes, labels[nodes], split.classes))
    if split.true_labels is not None:
        is_wrong = split.train.labels != split.true_labels
        clean = replace(split, train=with_labels(split.train, split.true_labels, split.classes), true_labels=None)
        return with_label_noise(selection_split(clean, fraction, seed), float(is_wrong.double().mean()), seed)
    if split.open_set:
        return split_by_class(split.train, fraction, seed)
    # Shuffle with a fixed seed, because samples of a class may be sorted, for example by date or by quality.
    order = torch.randperm(len(split.train), generator=torch.Generator().manual_seed(seed))
    return split_by_sample(subset(split.train, order), fraction)


def join_sources(train: Source, validation: Source) -> DataSplit:
    """Return two sources as a split. If they share their classes, validation labels follow the order of training.

    Raises:
        ValueError: if some, but not all, of the validation classes are training classes.
    """
    classes = set(train.classes)
    other = [name for name in validation.classes if name not in classes]
    if len(other) == len(validation.classes):
        return DataSplit(train, validation, open_set=True)
    accepted = f"all among the {len(classes)} training classes, or all different from them"
    require(not other, "validation classes", accepted, other[:1])
    if validation.classes == train.classes:
        return DataSplit(train, validation)
    position = {name: label for label, name in enumerate(train.classes)}
    labels = torch.tensor([position[name] for name in validation.classes])[validation.labels]
    return DataSplit(train, with_labels(validation, labels, train.classes))


def split_source(source: Source, split: str, held_out: int | float | None, seed: int) -> DataSplit:
    """Divide a source by "sample" (by default one per class) or by "class" (by default a fifth of the classes)."""
    require(split in ("sample", "class"), "data.split", "'sample' or 'class'", split)
    if split == "sample":
        return split_by_sample(source, 1 if held_out is None else held_out)
    return split_by_class(source, 0.2 if held_out is None else held_out, seed)


def with_pairs(data: DataSplit, file: str | Path | None) -> DataSplit:
    """Return the split with verification pairs from a file, if one is given."""
    if file is None:
        return data
    require(data.validation is not None, "data.pairs", "unset without validation data", str(file))
    assert data.validation is not None
    names = [data.validation.name(index) for index in range(len(data.validation))]
    return replace(data, pairs=read_pairs(file, names))


def frequent_classes(source: Source, at_least: int) -> Source:
    """Return the samples of the classes that have at least this number of samples."""
    require(is_integer(at_least, 1), "data.at_least", "an integer >= 1", at_least)
    counts = torch.bincount(source.labels, minlength=len(source.classes))
    if int(counts.min()) >= at_least:
        return source
    names: Sequence[str] = [
        name for name, count in zip(source.classes, counts.tolist(), strict=True) if count >= at_least
    ]
    require(bool(names), "data.at_least", f"at most {int(counts.max())}, the size of the largest class", at_least)
    return of_classes(source, names)


def keep_share(labels: Tensor, shares: Tensor, limit: int | None, seed: int) -> Tensor:
    """Return the positions of a random fraction of each class, at most `limit` in total."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    shuffled = labels[order]
    selected = torch.zeros(len(labels), dtype=torch.bool)
    for label, share in enumerate(shares.tolist()):
        positions = (shuffled == label).nonzero().flatten()
        selected[positions[: round(share * len(positions))]] = True
    return order[selected][:limit].sort().values


def with_label_noise(split: DataSplit, fraction: float, seed: int) -> DataSplit:
    """Return the split with wrong labels for a fraction of the training samples, and its true labels.

    Each of these samples gets one of the other classes, drawn uniformly. Validation labels do not change. With the same
    seed, the samples that are wrong at a small fraction are also wrong at a larger one.

    Args:
        split: the data.
        fraction: fraction of the training samples, rounded to a number of samples; 0 returns the split unchanged.
        seed: seed that selects the samples and their labels.

    Example:
        >>> source = TensorSource(torch.zeros(10, 2), torch.arange(10) % 5, list("abcde"))
        >>> noisy = with_label_noise(DataSplit(source), 0.3, seed=0)
        >>> int((noisy.train.labels != noisy.true_labels).sum())
        3
    """
    require(is_number(fraction, 0, 1), "data.label_noise", "a fraction in [0, 1]", fraction)
    if fraction == 0:
        return split
    true_labels, classes = split.train.labels, len(split.classes)
    require(split.graph is None, "data.label_noise", "0 for a graph", fraction)
    require(classes > 1, "data.label_noise", "0 for a single class", fraction)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(true_labels), generator=generator)[: round(fraction * len(true_labels))]
    # A uniform offset in 1 … C − 1, added modulo C, gives a uniform choice among the other classes.
    offsets = torch.randint(1, classes, (len(chosen),), generator=generator)
    labels = true_labels.clone()
    labels[chosen] = (labels[chosen] + offsets) % classes
    return replace(split, train=with_labels(split.train, labels, split.train.classes), true_labels=true_labels)
