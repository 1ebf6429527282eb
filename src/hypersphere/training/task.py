"""Tasks: labelled inputs for training and testing, loaded from a data set by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hypersphere import data
from hypersphere._validation import is_integer, require
from hypersphere.training.parts import Spec, make, truth

__all__ = ["TASKS", "Task", "load_task"]

_BLANK = 32


@dataclass(frozen=True, eq=False)
class Task:
    """Inputs (N, …) and labels (N,) for training and testing, and the names of the classes.

    Inputs are uint8 images, point clouds, or indices of the nodes of a `graph`. Test inputs may have names.
    """

    inputs: Tensor
    labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor
    classes: tuple[str, ...]
    graph: data.Graph | None = None
    test_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        require(len(self.inputs) > 0, "data", "at least one training example", "none")
        require(len(self.test_inputs) > 0, "data", "at least one test example", "none")

    def outline(self) -> dict[str, Any] | None:
        """Return what is needed to build a network, as plain data; None for a graph, which is part of the network."""
        if self.graph is not None:
            return None
        kind = str(self.inputs.dtype).removeprefix("torch.")
        return {"shape": list(self.inputs.shape[1:]), "type": kind, "classes": list(self.classes)}

    @classmethod
    def blank(cls, outline: Mapping[str, Any]) -> Task:
        """Return a task with this outline and random data, sufficient to build and try a network.

        >>> Task.blank({"shape": [1, 8, 8], "type": "uint8", "classes": ["a", "b"]}).inputs.shape
        torch.Size([32, 1, 8, 8])
        """
        generator = torch.Generator().manual_seed(0)
        noise = torch.rand(_BLANK, *outline["shape"], generator=generator)
        inputs = (255 * noise).round().to(torch.uint8) if outline["type"] == "uint8" else 2 * noise - 1
        labels = torch.arange(_BLANK) % len(outline["classes"])
        return cls(inputs, labels, inputs, labels, tuple(outline["classes"]))


def load_task(spec: Spec | str, root: Path | None = None) -> Task:
    """Return the task for `spec`, a name of TASKS with options.

    >>> task = load_task({"name": "digits", "limit": 200})
    >>> task.inputs.shape, len(task.test_inputs), len(task.classes)
    (torch.Size([200, 1, 8, 8]), 500, 10)
    """
    return make("data", TASKS, spec, None, root)


def _classification(name: str) -> Callable[..., Task]:
    loader = data.DATASETS[name]

    def load(
        root: Path | None,
        *,
        limit: int | None = None,
        pool: int = 1,
        keep: Mapping[str, float] | None = None,
        rising: bool = False,
        held_out: int = 0,
        seed: int = 0,
    ) -> Task:
        """Read both splits of a data set.

        `limit` is the number of training examples; `pool` averages images over blocks of this size; `keep` maps
        classes, by name or index, to the fraction that remains; `rising` keeps the fraction (i+1)/n of class i of n;
        `held_out` is the number of training examples that replace the test data, for choices that must not see the
        test data; `seed` selects the examples.
        """
        task = _of_splits(*(loader(split, root) for split in ("train", "test")))
        task = replace(task, inputs=_pooled(task.inputs, pool), test_inputs=_pooled(task.test_inputs, pool))
        shares = _shares(task, keep or {}, truth("data.rising", rising))
        return _fewer(_holding_out(task, held_out, seed), shares, limit, seed)

    about = (inspect.getdoc(loader) or name).partition("\n")[0]
    load.__doc__ = f"{about}\n\n{inspect.getdoc(load)}"
    return load


def _of_splits(train: Any, test: Any) -> Task:
    field = "points" if isinstance(train, data.PointClouds) else "images"
    return Task(getattr(train, field), train.labels, getattr(test, field), test.labels, train.classes)


def _pooled(images: Tensor, pool: int) -> Tensor:
    is_valid = is_integer(pool, 1) and (pool == 1 or images.ndim == 4)
    require(is_valid, "data.pool", "an integer >= 1, or 1 if the data are not images", pool)
    if pool == 1:
        return images
    return F.avg_pool2d(images.float(), pool).round().to(torch.uint8)


def _holding_out(task: Task, count: int, seed: int) -> Task:
    require(0 <= count < len(task.inputs), "data.held_out", f"an integer in [0, {len(task.inputs)})", count)
    if not count:
        return task
    order = torch.randperm(len(task.inputs), generator=torch.Generator().manual_seed(seed))
    test, train = order[:count].sort().values, order[count:].sort().values
    return replace(
        task,
        inputs=task.inputs[train],
        labels=task.labels[train],
        test_inputs=task.inputs[test],
        test_labels=task.labels[test],
    )


def _shares(task: Task, keep: Mapping[str, float], rising: bool) -> Tensor:
    count = len(task.classes)
    shares = (torch.arange(count) + 1) / count if rising else torch.ones(count)
    for name, share in keep.items():
        is_class = name in task.classes or (name.isdigit() and int(name) < count)
        require(is_class, "data.keep", f"classes among {', '.join(task.classes)}, or indices below {count}", name)
        require(0 <= share <= 1, "data.keep", "fractions in [0, 1]", share)
        shares[task.classes.index(name) if name in task.classes else int(name)] = share
    return shares


def _fewer(task: Task, shares: Tensor, limit: int | None, seed: int) -> Task:
    """Keep a random fraction of each class, and at most `limit` examples in total."""
    require(limit is None or limit >= 1, "data.limit", "None or a number >= 1", limit)
    generator = torch.Generator().manual_seed(seed)
    if limit is None and bool((shares == 1).all()):
        return task
    order = torch.randperm(len(task.labels), generator=generator)
    labels = task.labels[order]
    selected = torch.zeros(len(labels), dtype=torch.bool)
    for label, share in enumerate(shares.tolist()):
        places = (labels == label).nonzero().flatten()
        selected[places[: round(share * len(places))]] = True
    chosen = order[selected][:limit].sort().values
    return replace(task, inputs=task.inputs[chosen], labels=task.labels[chosen])


def _omniglot(root: Path | None, *, size: int = 28, held_out: int = 4) -> Task:
    """Drawings of 964 characters; the last `held_out` drawings of each are used for testing."""
    return _last_of_each(data.omniglot("background", root, size=size), held_out)


def _lfw(root: Path | None, *, at_least: int = 10, held_out: int = 2) -> Task:
    """Faces of the people with at least `at_least` photographs; `held_out` photographs of each are used for testing."""
    faces = data.lfw(root)
    counts = torch.bincount(faces.labels, minlength=len(faces.classes))
    many = [name for name, count in zip(faces.classes, counts.tolist(), strict=True) if count >= at_least]
    return _last_of_each(faces.of_classes(many), held_out)


def _image_folder(
    root: Path | None, *, path: str, size: int | None = None, grey: bool | None = None, held_out: int = 1
) -> Task:
    """Images in `path`, one folder per class; the last `held_out` images of each class are used for testing.

    A relative `path` is resolved against `root`, if given.
    """
    place = Path(path).expanduser()
    place = place if root is None else Path(root).expanduser() / place
    return _last_of_each(data.image_folder(place, size=size, grey=grey), held_out)


def _last_of_each(images: data.LabelledImages, held_out: int) -> Task:
    require(held_out >= 1, "data.held_out", "a number >= 1", held_out)
    require(bool(images.classes), "data", "at least one class with enough images", "none")
    order = torch.argsort(images.labels, stable=True)
    counts = torch.bincount(images.labels, minlength=len(images.classes))
    smallest = f"{int(counts.min())} of {images.classes[int(counts.argmin())]}"
    require(int(counts.min()) >= 2, "data", "at least two images per class, for training and testing", smallest)
    accepted = f"less than {int(counts.min())}, the size of the smallest class"
    require(held_out < int(counts.min()), "data.held_out", accepted, held_out)
    rank = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    testing = rank >= (counts - held_out).repeat_interleave(counts)
    train, test = order[~testing].sort().values, order[testing].sort().values
    names = tuple(images.names[place] for place in test.tolist()) if images.names else None
    tensors = images.images[train], images.labels[train], images.images[test], images.labels[test]
    return Task(*tensors, images.classes, test_names=names)


def _graph(name: str) -> Callable[..., Task]:
    def load(root: Path | None) -> Task:
        graph: data.Graph = data.DATASETS[name](root)
        train, test = (mask.nonzero().flatten() for mask in (graph.train, graph.test))
        return Task(train, graph.labels[train], test, graph.labels[test], graph.classes, graph)

    load.__doc__ = data.DATASETS[name].__doc__
    return load


TASKS: dict[str, Callable[..., Task]] = {
    **{
        name: _classification(name)
        for name in ("digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "cifar100_fifth", "modelnet10")
    },
    "omniglot": _omniglot,
    "lfw": _lfw,
    "image_folder": _image_folder,
    **{name: _graph(name) for name in ("cora", "citeseer", "pubmed")},
}
