"""Replaces the data of all recipes by noise of the same shape, so that no file is needed."""

import pytest
import torch

from hypersphere import data
from hypersphere.training import job
from hypersphere.training.task import Task

SHAPES = {
    "mnist": (1, 28, 28),
    "cifar100_fifth": (3, 32, 32),
    "cifar10": (3, 32, 32),
    "omniglot": (1, 28, 28),
    "modelnet10": (40, 3),
}
CLASSES = tuple("abcd")


def small_task(spec, root=None):
    """Return labelled noise in the shape of a data set."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(40) % len(CLASSES)
    if spec["name"] in ("cora", "citeseer", "pubmed"):
        features = torch.rand(40, 30, generator=generator)
        ring = torch.arange(40)
        edges = torch.stack([torch.cat([ring, ring.roll(1)]), torch.cat([ring.roll(1), ring])])
        train, val, test = (torch.arange(40) // 10 == part for part in (0, 1, 2))
        graph = data.Graph(features, labels, edges, train, val, test, CLASSES)
        return Task(ring[train], labels[train], ring[test], labels[test], CLASSES, graph)
    shape = (40, *SHAPES[spec["name"]])
    if "pool" in spec:
        shape = (*shape[:2], shape[2] // spec["pool"], shape[3] // spec["pool"])
    if spec["name"] == "modelnet10":
        inputs = torch.randn(shape, generator=generator)
    else:
        inputs = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return Task(inputs, labels, inputs, labels, CLASSES)


def small_omniglot(split, root, size):
    labels = torch.arange(20).repeat_interleave(20)
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (400, 1, size, size), generator=generator, dtype=torch.uint8)
    return data.LabelledImages(images, labels, tuple(map(str, range(20))))


@pytest.fixture(autouse=True)
def no_files(monkeypatch):
    monkeypatch.setattr(job, "load_task", small_task)
    monkeypatch.setattr(data, "omniglot", small_omniglot)
