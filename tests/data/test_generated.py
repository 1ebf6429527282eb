import pytest
import torch

from hypersphere import data
from hypersphere.data import DATA
from hypersphere.data.generated import GRAPHS, IMAGES, POINTS


def generated(**options):
    return DATA["generated"](None, **options)


def test_generated_images_have_the_shape_and_balanced_classes():
    split = generated(size=6, channels=3, classes=5, per_class=8)
    assert split.train[0].shape == (3, 6, 6)
    assert split.train[0].dtype == torch.uint8
    assert torch.bincount(split.train.labels).tolist() == [6] * 5
    assert torch.bincount(split.validation.labels).tolist() == [2] * 5
    assert not split.open_set


def test_generated_classes_are_separated_by_their_nearest_mean():
    split = generated()
    train = torch.stack([split.train[index] for index in range(len(split.train))]).float().flatten(1)
    means = torch.stack([train[split.train.labels == label].mean(0) for label in range(4)])
    test = torch.stack([split.validation[index] for index in range(len(split.validation))]).float().flatten(1)
    assert torch.equal(torch.cdist(test, means).argmin(1), split.validation.labels)


def test_generated_open_set_has_different_classes_for_validation():
    split = generated(classes=8, open_set=True)
    assert split.open_set
    assert not set(split.train.classes) & set(split.validation.classes)
    assert len(split.validation.classes) == 2


def test_generated_points_are_clouds_and_graphs_join_equal_classes():
    assert generated(kind="points", size=10).train[0].shape == (10, 3)
    graph = generated(kind="graph", size=7).graph
    assert graph.features.shape == (64, 7)
    first, second = graph.edge_index
    assert torch.equal(graph.labels[first], graph.labels[second])
    assert not bool((graph.train & graph.test).any())


def test_generated_data_depend_only_on_the_seed():
    assert generated(seed=1).fingerprint() == generated(seed=1).fingerprint()
    assert not torch.equal(generated(seed=1).train[0], generated(seed=2).train[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "sound"}, "data.kind must be one of images, points, graph, not 'sound'"),
        ({"classes": 1}, "data.classes must be an integer >= 2, not 1"),
        ({"per_class": 3}, "data.per_class must be an integer >= 4, not 3"),
        ({"kind": "graph", "open_set": True}, "data.open_set must be false for a graph, not True"),
    ],
)
def test_generated_rejects_invalid_options(options, message):
    with pytest.raises(ValueError, match=message):
        generated(**options)


@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [
        ("mnist", {}, (1, 28, 28)),
        ("cifar10", {"pool": 2}, (3, 16, 16)),
        ("lfw", {"size": [56, 48]}, (1, 56, 48)),
        ("imagenet", {"size": 256, "margin": 32}, (3, 256, 256)),
        ("image_folder", {"size": 64, "grey": True}, (1, 64, 64)),
        ("modelnet40", {"points": 512}, (512, 3)),
    ],
)
def test_outline_has_the_shape_of_the_data(name, options, shape):
    assert tuple(data.published_outline(name, options).train[0].shape) == shape


def test_outline_agrees_with_the_data_that_come_with_the_library():
    split, outline = data.DATA["digits"](None), data.published_outline("digits", {})
    assert outline.train[0].shape == split.train[0].shape
    assert len(outline.classes) == len(split.classes)


def test_outline_of_a_graph_has_its_features_and_classes():
    outline = data.published_outline("cora", {})
    assert outline.graph.features.shape[1] == 1433
    assert len(outline.classes) == 7


def test_outline_of_other_data_is_not_known():
    assert data.published_outline("my_module:data", {}) is None


def test_outlines_are_entries_of_the_data_menu():
    assert {*IMAGES, *POINTS, *GRAPHS} <= set(data.DATA)
