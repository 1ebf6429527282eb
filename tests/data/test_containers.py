import dataclasses
import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from hypersphere.data import Graph, LabelledImages, PointClouds


def images(count: int = 6, names: tuple[str, ...] = ()) -> LabelledImages:
    pixels = torch.arange(count, dtype=torch.uint8).reshape(-1, 1, 1, 1).expand(count, 1, 2, 3) * 51
    return LabelledImages(pixels.contiguous(), torch.arange(count) % 3, ("a", "b", "c"), names)


def test_labelled_images_items_are_float_images_in_the_unit_interval_and_ints():
    image, label = images()[5]
    assert image.dtype == torch.float32
    assert image.shape == (1, 2, 3)
    assert image.max() == 1.0
    assert label == 2
    assert isinstance(label, int)


def test_labelled_images_work_with_a_data_loader():
    batch, labels = next(iter(DataLoader(images(), batch_size=4)))
    assert batch.shape == (4, 1, 2, 3)
    assert labels.tolist() == [0, 1, 2, 0]
    assert len(images()) == 6


def test_labelled_images_tensors_returns_all_items():
    batch, labels = images().tensors()
    assert torch.equal(batch[4], images()[4][0])
    assert torch.equal(labels, images().labels)


@pytest.mark.parametrize(
    "indices",
    [[1, 4], torch.tensor([1, 4]), [False, True, False, False, True, False], torch.tensor([1, 4]).int()]
    + [torch.tensor([1, 4]).to(kind) for kind in (torch.uint8, torch.uint16, torch.uint32, torch.uint64)],
)
def test_subset_accepts_positions_and_masks(indices):
    part = images(names=tuple("uvwxyz")).subset(indices)
    assert part.labels.tolist() == [1, 1]
    assert part.names == ("v", "y")
    assert part.classes == ("a", "b", "c")


def test_subset_may_be_empty():
    assert len(images().subset([])) == 0
    assert len(images().subset(torch.zeros(6, dtype=torch.bool))) == 0


@pytest.mark.parametrize("indices", [[6], [-1], [0.5], [[0]], [True]])
def test_subset_rejects_invalid_indices(indices):
    with pytest.raises((ValueError, IndexError), match="indices"):
        images().subset(indices)


def test_of_classes_relabels_in_the_given_order():
    part = images(names=tuple("uvwxyz")).of_classes(["c", "a"])
    assert part.labels.tolist() == [1, 0, 1, 0]
    assert part.names == ("u", "w", "x", "z")
    assert part.classes == ("c", "a")
    with pytest.raises(ValueError, match="'d'"):
        images().of_classes(["d"])
    with pytest.raises(ValueError, match="classes must be different names, not 'a' twice"):
        images().of_classes(["a", "b", "a"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": torch.zeros(6, 1, 2, 3)}, "images must be uint8"),
        ({"images": torch.zeros(6, 2, 3, dtype=torch.uint8)}, "images must be uint8"),
        ({"labels": torch.zeros(5, dtype=torch.int64)}, "labels must be int64"),
        ({"labels": torch.zeros(6)}, "labels must be int64"),
        ({"labels": torch.full((6,), 3)}, "labels must be positions in `classes`, 0..2"),
        ({"labels": torch.full((6,), -1)}, "labels must be positions in `classes`, 0..2"),
        ({"names": ("one",)}, "names must be"),
    ],
)
def test_labelled_images_reject_invalid_fields(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(images(), **change)


def test_labelled_images_are_frozen_and_can_be_pickled():
    with pytest.raises(dataclasses.FrozenInstanceError):
        images().classes = ()
    copy = pickle.loads(pickle.dumps(images()))
    assert torch.equal(copy.images, images().images)
    assert repr(copy) == "LabelledImages(6 images 1x2x3, 3 classes)"


def test_point_clouds_items_and_subsets():
    clouds = PointClouds(torch.rand(4, 5, 3), torch.tensor([0, 1, 0, 1]), ("a", "b"))
    cloud, label = clouds[1]
    assert cloud.shape == (5, 3)
    assert label == 1
    assert torch.equal(clouds.subset([2, 3]).points, clouds.points[2:])
    with pytest.raises(ValueError, match="points must be float32"):
        PointClouds(torch.rand(4, 5, 2), torch.zeros(4, dtype=torch.int64), ("a",))


def graph(**change) -> Graph:
    mask = torch.eye(3, dtype=torch.bool)
    fields = {
        "features": torch.rand(3, 4),
        "labels": torch.tensor([0, 1, 0]),
        "edge_index": torch.tensor([[0, 1], [1, 0]]),
        "train": mask[0],
        "val": mask[1],
        "test": mask[2],
        "classes": ("a", "b"),
    }
    return Graph(**(fields | change))


def test_graph_has_a_length_and_a_repr():
    assert repr(graph()) == "Graph(3 nodes, 2 edges, 4 features, 2 classes)"
    assert len(graph()) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": torch.rand(3)}, "features must be"),
        ({"edge_index": torch.tensor([[0], [3]])}, r"edge_index must be nodes in 0\.\.2, not \(0, 3\)"),
        ({"edge_index": torch.tensor([0, 1])}, "edge_index must be int64"),
        ({"val": torch.zeros(2, dtype=torch.bool)}, "val must be bool"),
        ({"test": torch.tensor([True, False, False])}, "train, val and test must be disjoint, not .1 shared nodes"),
    ],
)
def test_graph_rejects_invalid_fields(change, message):
    with pytest.raises(ValueError, match=message):
        graph(**change)
