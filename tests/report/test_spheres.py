"""Spheres: coordinates, legends and rejected input."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from hypersphere.report import Sphere, Spheres, class_colors, project
from hypersphere.report.spheres import MOST_CLASSES, MOST_POINTS, spheres_data


def drawings(*spheres: Sphere) -> dict:
    return json.loads(json.dumps(spheres_data(Spheres("title", spheres))))


def test_spheres_normalise_and_round_points_and_vectors() -> None:
    points = torch.tensor([[3.0, 0, 4], [0, 0, 0], [0, -2, 0]], requires_grad=True)
    drawn = drawings(Sphere("a", points, torch.tensor([1, 0, 1]), torch.tensor([[0.0, 0, 0], [1, 1, 1]])))["spheres"][0]
    assert drawn["points"] == [0.6, 0, 0.8, 0, -1, 0]
    assert drawn["labels"] == [1, 1]
    assert drawn["vectors"] == [None, [0.5774, 0.5774, 0.5774]]


def test_spheres_keep_the_direction_of_extreme_norms() -> None:
    drawn = drawings(Sphere("a", np.array([[1e300, 1e300], [1e-290, 0]]), [0, 0]))["spheres"][0]
    assert drawn["points"] == [0.7071, 0.7071, 1, 0]
    assert drawn["dimension"] == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_spheres_accept_all_floating_dtypes(dtype: torch.dtype) -> None:
    assert drawings(Sphere("a", torch.eye(3, dtype=dtype), torch.arange(3)))["spheres"][0]["labels"] == [0, 1, 2]


def test_spheres_keep_angles_of_projected_features() -> None:
    points = np.array([[1.0, 0, 0], [0, 0, 0], [0, 1, 0]])
    drawn = drawings(Sphere("a", points, [0, 1, 1], np.eye(3)[:2], angles=[12.34, 50.0, 90.06]))["spheres"][0]
    assert drawn["angles"] == [12.3, 90.1]  # the second is a zero vector
    assert "angles" not in drawings(Sphere("a", points, [0, 1, 1]))["spheres"][0]
    many = np.arange(2 * MOST_POINTS)
    thinned = drawings(Sphere("a", np.ones((len(many), 3)), many % 10, angles=many % 10 * 1.0))["spheres"][0]
    assert thinned["angles"] == thinned["labels"]


def test_spheres_accept_an_empty_picture() -> None:
    assert drawings(Sphere("a", np.zeros((0, 3)), []))["spheres"][0]["points"] == []
    assert drawings()["spheres"] == []


def test_spheres_sample_many_points_evenly_over_classes() -> None:
    labels = np.arange(4 * MOST_POINTS) % 4
    drawn = drawings(Sphere("a", np.ones((len(labels), 3)), labels))["spheres"][0]
    assert len(drawn["labels"]) == MOST_POINTS
    assert min(np.bincount(drawn["labels"])) > MOST_POINTS / 5


def test_spheres_name_or_number_classes() -> None:
    one, two = Sphere("a", np.eye(3), [0, 1, 2]), Sphere("b", np.eye(3), [0, 1, 1])
    assert drawings(two, one)["classes"] == ["0", "1", "2"]
    named = Sphere("c", np.eye(3), [0, 1, 2], classes=("x", "y", "z"))
    assert drawings(one, named)["classes"] == ["x", "y", "z"]


def test_spheres_legend_lists_the_labels_that_occur() -> None:
    drawn = drawings(Sphere("a", np.eye(3), [7, 10**6, 7]), Sphere("b", np.eye(3), [8, 8, 10**12]))
    assert drawn["classes"] == ["7", "8", "1000000", "1000000000000"]
    assert len(drawn["colors"]) == 4
    assert [sphere["labels"] for sphere in drawn["spheres"]] == [[0, 2, 0], [1, 1, 3]]
    vectors = drawings(Sphere("a", np.eye(3)[:1], [2], np.eye(3)), Sphere("b", np.eye(3)[:1], [9]))
    assert vectors["classes"] == ["0", "1", "2", "9"]  # the index of a vector is its class


def test_spheres_reject_too_many_classes() -> None:
    many = np.arange(MOST_CLASSES + 1)
    with pytest.raises(ValueError, match=r"spheres must be pictures of at most 256 classes in total, not 257"):
        Spheres("title", [Sphere("a", np.ones((len(many), 3)), many)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"points": np.full((2, 3), np.nan)}, r"points must be finite, but row 0 is not \(2 such rows of 2\)"),
        ({"points": np.full((2, 3), np.inf)}, "points must be finite"),
        ({"points": np.ones((2, 4))}, r"points must be an array of shape \(N, 2\) or \(N, 3\), not \(2, 4\)"),
        ({"points": np.ones(3)}, r"points must be an array of shape \(N, d\), not \(3,\)"),
        ({"points": [[1, 2], [3]]}, "points must be a tensor or an array of numbers, not a list"),
        ({"points": [["a", "b"], ["c", "d"]]}, "points must be .*not"),
        ({"labels": [0]}, "labels must be one value for each of the 2 points, not 1"),
        ({"labels": [0.0, 1.0]}, r"labels must be integers, not dtype\('float64'\)"),
        ({"labels": [[0], [1]]}, r"labels must be an array of shape \(N,\), not \(2, 1\)"),
        ({"labels": [0, -1]}, r"labels must be integers from 0 to 1, not \[-1\]"),
        ({"labels": [0, -1], "vectors": None, "classes": ()}, r"labels must be integers >= 0, not \[-1\]"),
        ({"labels": [0, 2]}, r"labels must be integers from 0 to 1, not \[2\]"),
        ({"angles": [1.0]}, r"angles must be one value for each of the 2 points, not \(1,\)"),
        ({"vectors": np.ones((2, 2))}, "vectors must be a matrix with 3 columns, like points, not 2"),
        ({"vectors": np.full((2, 3), np.nan)}, "vectors must be finite"),
        ({"vectors": np.ones((3, 3))}, "classes must be one name for each of the 3 vectors, not 2"),
    ],
)
def test_sphere_rejects_invalid_input_in_one_line(arguments: dict, message: str) -> None:
    good = {"points": np.ones((2, 3)), "labels": [0, 1], "vectors": np.eye(3)[:2], "classes": ("a", "b")}
    with pytest.raises(ValueError, match=message) as caught:
        Sphere("title", **(good | arguments))
    assert "\n" not in str(caught.value)


def test_spheres_must_share_their_classes() -> None:
    one = Sphere("a", np.eye(3)[:2], [0, 1], classes=("x", "y"))
    with pytest.raises(ValueError, match="classes must be the same in all spheres"):
        Spheres("title", [one, Sphere("b", np.eye(3)[:2], [0, 1], classes=("x", "z"))])
    with pytest.raises(ValueError, match=r"labels of spheres\[1\] must be from 0 to 1, as there are 2 classes, not 2"):
        Spheres("title", [one, Sphere("b", np.eye(3), [0, 1, 2])])


def test_class_colors_are_distinct_and_stable() -> None:
    assert class_colors(10) == class_colors(50)[:10]
    assert len(set(class_colors(50))) == 50
    assert all(len(color) == 7 and int(color[1:], 16) >= 0 for color in class_colors(50))


def test_short_names_keep_classes_distinct() -> None:
    names = [f"{alphabet}/character{number:02}" for alphabet in ("Alphabet_of_the_Magi", "Greek") for number in (1, 2)]
    data = drawings(Sphere("a", np.eye(3), [0, 1, 2], classes=names))
    assert data["classes"] == names
    assert len(set(data["short"])) == len(names)
    assert max(map(len, data["short"])) <= 12


def test_project_agrees_with_singular_vectors() -> None:
    random = np.random.default_rng(0)
    features, vectors = random.normal(size=(200, 6)) * [5, 3, 2, 1, 0.5, 0.1], random.normal(size=(4, 6))
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    _, strengths, directions = np.linalg.svd(unit, full_matrices=False)
    seen = project(features, vectors)
    expected = np.abs(unit @ directions[:3].T)
    assert np.allclose(np.abs(seen.points), expected)
    assert seen.kept == pytest.approx((strengths[:3] ** 2).sum() / (strengths**2).sum())
    scaled = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    assert np.allclose(np.abs(seen.vectors), np.abs(scaled @ directions[:3].T))
    assert project(np.eye(3)[:1]).points.shape == (1, 3)
    with pytest.raises(ValueError, match=r"features must be an array of shape \(N, d\) with d >= 3, not \(3, 2\)"):
        project(np.ones((3, 2)))
    with pytest.raises(ValueError, match="vectors must be a matrix with 6 columns, like features, not 3"):
        project(features, np.eye(3))
