import pytest

from hypersphere import data
from hypersphere.data.outlines import GRAPHS, IMAGES, POINTS


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
