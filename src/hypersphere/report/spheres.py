"""Features on rotatable unit spheres, one picture per method, drawn by assets/sphere.js."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hypersphere._numerics import require_finite_rows
from hypersphere._validation import require
from hypersphere.evaluation import fit_pca
from hypersphere.report._arrays import Array, as_array
from hypersphere.report._html import Displayable, element, escape, fill_template
from hypersphere.report._text import short_names
from hypersphere.report.palette import class_colors
from hypersphere.sphere import polar

__all__ = ["Projection", "Sphere", "Spheres", "project"]

MOST_POINTS = 5000  # points per picture; larger sets are sampled at random, and the page says so
MOST_CLASSES = 256  # classes in one legend
LONGEST_LABEL = 12  # characters of a label at the tip of a class vector


@dataclass(frozen=True, eq=False)
class Sphere:
    """One picture: directions of features and class vectors on the sphere (N, 3) or the circle (N, 2).

    Vectors are normalised; zero rows have no direction and are omitted. If the points are projections of features of
    more dimensions, pass their true angles to the class vectors in degrees as `angles` (N,).
    """

    title: str
    points: Array
    labels: Array
    vectors: Array | None = None
    classes: Sequence[str] = ()
    caption: str = ""
    angles: Array | None = None

    def __post_init__(self) -> None:
        points, labels, count = _directions("points", self.points)[0], self.label_numbers, len(self.classes) or None
        require(points.shape[1] in (2, 3), "points", "an array of shape (N, 2) or (N, 3)", points.shape)
        require(len(labels) == len(points), "labels", f"one value for each of the {len(points)} points", len(labels))
        if self.vectors is not None:
            vectors = _directions("vectors", self.vectors)[0]
            accepted = f"a matrix with {points.shape[1]} columns, like points"
            require(vectors.shape[1] == points.shape[1], "vectors", accepted, vectors.shape[1])
            require(count in (None, len(vectors)), "classes", f"one name for each of the {len(vectors)} vectors", count)
            count = len(vectors)
        limit = "integers >= 0" if count is None else f"integers from 0 to {count - 1}"
        wrong = labels[(labels < 0) | (labels >= (np.inf if count is None else count))]
        require(not len(wrong), "labels", limit, wrong[:1].tolist())
        if self.angles is not None:
            angles = as_array("angles", self.angles)
            accepted = f"one value for each of the {len(points)} points"
            require(angles.shape == labels.shape, "angles", accepted, angles.shape)

    def _repr_html_(self) -> str:
        return Spheres(self.title, [self])._repr_html_()

    def __repr__(self) -> str:
        return f"Sphere({self.title!r}, {len(self.points)} points of {len(self.class_numbers)} classes)"

    @property
    def label_numbers(self) -> NDArray:
        """The labels as an array of integers (N,)."""
        labels = as_array("labels", self.labels)
        require(labels.ndim == 1, "labels", "an array of shape (N,)", labels.shape)
        require(labels.dtype.kind in "iu" or not len(labels), "labels", "integers", labels.dtype)
        return labels.astype(np.int64)

    @property
    def drawn(self) -> NDArray:
        """Indices of the points that are drawn: those with a direction, or a random sample of them."""
        indices = np.flatnonzero(_directions("points", self.points)[1])
        return np.sort(np.random.default_rng(0).permutation(indices)[:MOST_POINTS])

    @property
    def class_numbers(self) -> NDArray:
        """The sorted indices of the classes that have a name, a vector or a label."""
        count = max(len(self.classes), 0 if self.vectors is None else len(self.vectors))
        return np.union1d(np.arange(count), self.label_numbers)


@dataclass(frozen=True, eq=False, repr=False)
class Spheres(Displayable):
    """Pictures side by side with one legend; rotating one rotates all unless they are unlinked."""

    title: str
    spheres: Sequence[Sphere]
    caption: str = ""

    def __post_init__(self) -> None:
        names = {tuple(sphere.classes) for sphere in self.spheres if sphere.classes}
        require(len(names) <= 1, "classes", "the same in all spheres, because they share a legend", sorted(names))
        for index, sphere in enumerate(self.spheres):
            count, top = len(next(iter(names), ())), int(sphere.class_numbers.max(initial=-1))
            require(
                not names or top < count,
                f"labels of spheres[{index}]",
                f"from 0 to {count - 1}, as there are {count} classes",
                top,
            )
        count = len(self.class_numbers)
        require(count <= MOST_CLASSES, "spheres", f"pictures of at most {MOST_CLASSES} classes in total", count)

    @property
    def class_numbers(self) -> NDArray:
        """The sorted indices of the classes of all pictures, as in the legend."""
        return np.unique(np.concatenate([np.arange(0), *(sphere.class_numbers for sphere in self.spheres)]))

    @property
    def classes(self) -> tuple[str, ...]:
        """The names in the legend: the given ones, or the indices of the classes."""
        given = (tuple(sphere.classes) for sphere in self.spheres if sphere.classes)
        return next(given, tuple(map(str, self.class_numbers)))


class Projection(NamedTuple):
    """Points and class vectors in three dimensions, and the fraction of the squared norm that is preserved."""

    points: NDArray
    vectors: NDArray | None
    kept: float


def project(features: Array, vectors: Array | None = None) -> Projection:
    """Project unit features and class vectors to the three principal directions of the features, for a `Sphere`.

    The principal directions are computed about the origin rather than about the mean, because angles are measured from
    the origin. Zero rows have no direction and remain zero.

    Example:
        >>> projection = project(np.eye(4)[[0, 0, 1, 2]])
        >>> projection.points.shape, round(projection.kept, 2)
        ((4, 3), 1.0)
    """
    x = _directions("features", features)[0]
    require(x.shape[1] >= 3, "features", "an array of shape (N, d) with d >= 3", x.shape)
    # PCA needs at least three rows. Zero rows do not change moments about the origin.
    pca = fit_pca(np.concatenate([x, np.zeros((3, x.shape[1]))]), 3, center=False)
    basis = pca.directions.numpy().T
    w = None if vectors is None else _directions("vectors", vectors)[0]
    if w is not None:
        require(w.shape[1] == x.shape[1], "vectors", f"a matrix with {x.shape[1]} columns, like features", w.shape[1])
    return Projection(x @ basis, None if w is None else w @ basis, pca.explained_variance_ratio)


def spheres_html(section: Spheres) -> str:
    """Return canvases, legend and controls as HTML."""
    names = zip(section.classes, class_colors(len(section.classes)), strict=True)
    legend = "".join(
        f"<li><button type='button' data-class='{index}' aria-pressed='false'>"
        f"<span class='swatch' style='--class:{color}'></span>{escape(name)}</button></li>"
        for index, (name, color) in enumerate(names)
    )
    figures = "".join(map(_figure_html, section.spheres))
    return fill_template("spheres.html", legend=legend, figures=figures) + element("p", "caption", section.caption)


def spheres_data(section: Spheres) -> dict[str, Any]:
    """Return the coordinates, names and colours for the script that draws the spheres."""
    return {
        "classes": section.classes,
        "short": short_names(section.classes, LONGEST_LABEL),
        "colors": class_colors(len(section.classes)),
        "spheres": [_drawing(sphere, section.class_numbers) for sphere in section.spheres],
    }


def _figure_html(sphere: Sphere) -> str:
    drawn, (given, dimension) = len(sphere.drawn), as_array("points", sphere.points).shape
    count = f"{drawn:,} features" if drawn == given else f"{drawn:,} of {given:,} features"
    shape = "circle" if dimension == 2 else "sphere"
    label = f"{sphere.title}: {count} of {len(sphere.class_numbers)} classes on the unit {shape}. Arrow keys turn it."
    return (
        f"<figure><figcaption><h3>{escape(sphere.title)}</h3><span class='count'>{count}</span></figcaption>"
        f"<div class='stage'><canvas tabindex='0' role='application' aria-roledescription='turnable {shape}' "
        f"aria-label='{escape(label)}'></canvas><div class='tip' hidden></div></div>"
        f"{element('p', 'about', sphere.caption)}</figure>"
    )


def _drawing(sphere: Sphere, class_numbers: NDArray) -> dict[str, Any]:
    """Return the data of one sphere for the script."""
    points, chosen = _directions("points", sphere.points)[0], sphere.drawn
    drawing: dict[str, Any] = {
        "dimension": points.shape[1],
        "points": _rounded(points[chosen].ravel()),
        "labels": np.searchsorted(class_numbers, sphere.label_numbers[chosen]).tolist(),  # indices in the legend
        "vectors": [],
    }
    if sphere.vectors is not None:
        rows, is_nonzero = _directions("vectors", sphere.vectors)
        drawing["vectors"] = [_rounded(row) if valid else None for row, valid in zip(rows, is_nonzero, strict=True)]
    if sphere.angles is not None:
        drawing["angles"] = np.round(as_array("angles", sphere.angles)[chosen].astype(np.float64), 1).tolist()
    return drawing


def _rounded(numbers: NDArray) -> list[float]:
    return (np.round(numbers, 4) + 0.0).tolist()  # + 0.0 turns -0.0 into 0.0


def _directions(name: str, values: Array) -> tuple[NDArray, NDArray]:
    """Return the normalised rows, and True for each row that is not zero."""
    rows = as_array(name, values)
    require(rows.ndim == 2, name, "an array of shape (N, d)", rows.shape)
    require(rows.dtype.kind in "fiu", name, "real numbers", rows.dtype)
    wide = torch.from_numpy(rows.astype(np.float64))
    require_finite_rows(name, wide)
    norms, directions = polar(wide)
    return directions.numpy(), (norms > 0).squeeze(1).numpy()
