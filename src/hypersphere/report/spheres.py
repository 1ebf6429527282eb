"""Features on interactive unit spheres, one picture per method (drawn by assets/sphere.js)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hypersphere._numerics import require_finite_rows
from hypersphere._validation import require
from hypersphere.report.arrays import Array, as_array
from hypersphere.report.embed import json_script
from hypersphere.report.names import short_names
from hypersphere.report.palette import class_colors
from hypersphere.sphere import polar

MOST_POINTS = 5000  # points per picture; larger sets are sampled at random, and the page says so
MOST_CLASSES = 256  # classes in one legend
DECIMALS = 4
BADGE = 12  # longest label at the end of a spike, in letters


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
        points = _rows("points", self.points)
        labels = _integers("labels", self.labels)
        require(len(labels) == len(points), "labels", f"one value for each of the {len(points)} points", len(labels))
        count = len(self.classes) or None
        if self.vectors is not None:
            vectors = _rows("vectors", self.vectors)
            columns = points.shape[1]
            require(
                vectors.shape[1] == columns,
                "vectors",
                f"a matrix with {columns} columns, like points",
                vectors.shape[1],
            )
            require(count in (None, len(vectors)), "classes", f"one name for each of the {len(vectors)} vectors", count)
            count = len(vectors)
        limit = "integers >= 0" if count is None else f"integers from 0 to {count - 1}"
        wrong = labels[(labels < 0) | (labels >= (np.inf if count is None else count))]
        require(not len(wrong), "labels", limit, wrong[:1].tolist())
        if self.angles is not None:
            angles = as_array("angles", self.angles)
            require(
                angles.shape == labels.shape, "angles", f"one value for each of the {len(points)} points", angles.shape
            )
            outside = angles[~((angles >= 0) & (angles <= 180))]
            require(not len(outside), "angles", "degrees in [0, 180]", outside[:1].tolist())

    @property
    def class_numbers(self) -> NDArray:
        """The sorted indices of the classes that have a name, a vector or a label."""
        count = max(len(self.classes), 0 if self.vectors is None else len(self.vectors))
        return np.union1d(np.arange(count), _integers("labels", self.labels))


@dataclass(frozen=True, eq=False)
class Spheres:
    """Pictures side by side with one legend; turning one turns all unless they are unlinked."""

    title: str
    spheres: Sequence[Sphere]
    caption: str = ""

    def __post_init__(self) -> None:
        names = {tuple(sphere.classes) for sphere in self.spheres if sphere.classes}
        require(len(names) <= 1, "classes", "the same in all spheres, because they share a legend", sorted(names))
        for index, sphere in enumerate(self.spheres):
            count, top = len(next(iter(names), ())), int(sphere.class_numbers.max(initial=-1))
            require(not names or top < count, f"labels of spheres[{index}]", f"from 0 to {count - 1}, the names", top)
        count = len(self.class_numbers)
        require(count <= MOST_CLASSES, "spheres", f"pictures of at most {MOST_CLASSES} classes in total", count)

    @property
    def class_numbers(self) -> NDArray:
        """The sorted indices of the classes of all pictures, as in the legend."""
        return np.unique(np.concatenate([np.arange(0), *(sphere.class_numbers for sphere in self.spheres)]))

    @property
    def classes(self) -> tuple[str, ...]:
        """The names in the legend: the given ones, or the indices of the classes."""
        for sphere in self.spheres:
            if sphere.classes:
                return tuple(sphere.classes)
        return tuple(map(str, self.class_numbers))


def spheres_html(section: Spheres) -> str:
    """Return canvases, legend, controls and coordinates as HTML."""
    colors = class_colors(len(section.classes))
    drawings = [_drawing(sphere, section.class_numbers) for sphere in section.spheres]
    figures = "".join(_figure_html(sphere, drawing) for sphere, drawing in zip(section.spheres, drawings, strict=True))
    legend = "".join(
        f"<li><button type='button' data-class='{index}' aria-pressed='false'>"
        f"<span class='swatch' style='--class:{color}'></span>{escape(name)}</button></li>"
        for index, (name, color) in enumerate(zip(section.classes, colors, strict=True))
    )
    caption = f"<p class='caption'>{escape(section.caption)}</p>" if section.caption else ""
    short = short_names(section.classes, BADGE)
    data = json_script({"classes": section.classes, "short": short, "colors": colors, "spheres": drawings})
    return (
        "<div class='spheres'>"
        f"<div class='bar'><ul class='legend' aria-label='Classes: press one to highlight it'>{legend}</ul>"
        f"{CONTROLS}</div><div class='grid'>{figures}</div>{HINT}{caption}{data}</div>"
    )


CONTROLS = (
    "<div class='controls'>"
    "<label><input type='checkbox' name='link' checked>Turn together</label>"
    "<label><input type='checkbox' name='vectors' checked>Class vectors</label>"
    "<label><input type='checkbox' name='slow'>Slow turn</label>"
    "<button type='button' name='reset'>Reset view</button>"
    "</div>"
)

HINT = (
    "<p class='note screen keys'>Drag to turn, or focus a sphere and use the arrow keys; "
    "<kbd>+</kbd> <kbd>−</kbd> zoom, <kbd>0</kbd> resets. Point at a class to highlight it, press it to keep it.</p>"
    "<p class='note screen touch'>Drag to turn. Press a class to highlight it.</p>"
    "<noscript><p class='note'>The spheres are drawn by JavaScript, which is switched off.</p></noscript>"
)


def _figure_html(sphere: Sphere, drawing: dict[str, object]) -> str:
    drawn, given = len(drawing["labels"]), len(sphere.points)  # type: ignore[arg-type]
    count = f"{drawn:,} features" if drawn == given else f"{drawn:,} of {given:,} features"
    shape = "circle" if drawing["dimension"] == 2 else "sphere"
    label = f"{sphere.title}: {count} of {len(sphere.class_numbers)} classes on the unit {shape}. Arrow keys turn it."
    caption = f"<p>{escape(sphere.caption)}</p>" if sphere.caption else ""
    return (
        f"<figure><figcaption><h3>{escape(sphere.title)}</h3><span class='count'>{count}</span></figcaption>"
        f"<div class='stage'><canvas tabindex='0' role='application' aria-roledescription='turnable {shape}' "
        f"aria-label='{escape(label)}'></canvas><div class='tip' hidden></div></div>{caption}</figure>"
    )


def _drawing(sphere: Sphere, class_numbers: NDArray) -> dict[str, object]:
    points, has_direction = _directions("points", sphere.points)
    chosen = np.flatnonzero(has_direction)
    if len(chosen) > MOST_POINTS:
        chosen = np.sort(np.random.default_rng(0).choice(chosen, MOST_POINTS, replace=False))
    labels = np.searchsorted(class_numbers, _integers("labels", sphere.labels)[chosen])
    vectors: list[object] = []
    if sphere.vectors is not None:
        rows, present = _directions("vectors", sphere.vectors)
        vectors = [row if there else None for row, there in zip(_rounded(rows), present, strict=True)]
    drawing: dict[str, object] = {
        "dimension": points.shape[1],
        "points": [number for row in _rounded(points[chosen]) for number in row],
        "labels": labels.tolist(),  # indices in the legend
        "vectors": vectors,
    }
    if sphere.angles is not None:
        drawing["angles"] = np.round(as_array("angles", sphere.angles)[chosen].astype(np.float64), 1).tolist()
    return drawing


def _rounded(rows: NDArray) -> list[list[float]]:
    return (np.round(rows, DECIMALS) + 0.0).tolist()  # + 0.0 turns -0.0 into 0.0


def _directions(name: str, values: Array) -> tuple[NDArray, NDArray]:
    """Return unit rows, and which of them are not zero."""
    norms, rows = polar(_rows(name, values))
    return rows.numpy(), (norms > 0).squeeze(1).numpy()


def _rows(name: str, values: Array) -> Tensor:
    rows = as_array(name, values)
    require(rows.ndim == 2 and rows.shape[1] in (2, 3), name, "an array of shape (N, 2) or (N, 3)", rows.shape)
    require(rows.dtype.kind in "fiu", name, "real numbers", rows.dtype)
    wide = torch.from_numpy(rows.astype(np.float64))
    require_finite_rows(name, wide)
    return wide


def _integers(name: str, values: Array) -> NDArray:
    labels = as_array(name, values)
    require(labels.ndim == 1, name, "an array of shape (N,)", labels.shape)
    require(labels.dtype.kind in "iu" or not len(labels), name, "integers", labels.dtype)
    return labels.astype(np.int64)
