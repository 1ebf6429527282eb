"""Features on the unit sphere, one picture a method, to be turned with the mouse (assets/sphere.js draws them)."""

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

MOST_POINTS = 5000  # a picture; more are thinned at random, and the page says so
MOST_CLASSES = 256  # in one legend
DECIMALS = 4
BADGE = 12  # letters at the end of a spike


@dataclass(frozen=True, eq=False)
class Sphere:
    """One picture: features and class vectors by their direction, on the sphere (N, 3) or the circle (N, 2).

    Vectors of any length are accepted and normalised; rows of zeros have no direction and are left out. Where points
    are projections of features of more dimensions, `angles` (N,) are those between these and their class vectors, in
    degrees, which the picture would give wrongly.
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
        require(len(labels) == len(points), "labels", f"one for each of the {len(points)} points", len(labels))
        known = len(self.classes) or None
        if self.vectors is not None:
            vectors = _rows("vectors", self.vectors)
            columns = points.shape[1]
            require(vectors.shape[1] == columns, "vectors", f"{columns} columns wide, as points", vectors.shape[1])
            require(known in (None, len(vectors)), "classes", f"one name for each of the {len(vectors)} vectors", known)
            known = len(vectors)
        limit = "0 or more" if known is None else f"from 0 to {known - 1}"
        wrong = labels[(labels < 0) | (labels >= (np.inf if known is None else known))]
        require(not len(wrong), "labels", limit, wrong[:1].tolist())
        if self.angles is not None:
            angles = as_array("angles", self.angles)
            require(angles.shape == labels.shape, "angles", f"one for each of the {len(points)} points", angles.shape)
            outside = angles[~((angles >= 0) & (angles <= 180))]
            require(not len(outside), "angles", "degrees in [0, 180]", outside[:1].tolist())

    @property
    def class_numbers(self) -> NDArray:
        """The classes that are named, have a vector or occur as a label, in order."""
        known = max(len(self.classes), 0 if self.vectors is None else len(self.vectors))
        return np.union1d(np.arange(known), _integers("labels", self.labels))


@dataclass(frozen=True, eq=False)
class Spheres:
    """Pictures side by side, with one legend; turning one turns all until the reader unlinks them."""

    title: str
    spheres: Sequence[Sphere]
    caption: str = ""

    def __post_init__(self) -> None:
        names = {tuple(sphere.classes) for sphere in self.spheres if sphere.classes}
        require(len(names) <= 1, "classes", "the same in all spheres, for the shared legend", sorted(names))
        for index, sphere in enumerate(self.spheres):
            known, top = len(next(iter(names), ())), int(sphere.class_numbers.max(initial=-1))
            require(not names or top < known, f"labels of spheres[{index}]", f"from 0 to {known - 1}, the names", top)
        count = len(self.class_numbers)
        require(count <= MOST_CLASSES, "spheres", f"pictures of at most {MOST_CLASSES} classes together", count)

    @property
    def class_numbers(self) -> NDArray:
        """The classes of all pictures, in order: those of the legend."""
        return np.unique(np.concatenate([np.arange(0), *(sphere.class_numbers for sphere in self.spheres)]))

    @property
    def classes(self) -> tuple[str, ...]:
        """The names in the legend: those given, else the numbers of the classes."""
        for sphere in self.spheres:
            if sphere.classes:
                return tuple(sphere.classes)
        return tuple(map(str, self.class_numbers))


def spheres_html(section: Spheres) -> str:
    """Return the canvases, the legend, the controls and the coordinates they need."""
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
    points, kept = _directions("points", sphere.points)
    chosen = np.flatnonzero(kept)
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
        "labels": labels.tolist(),  # places in the legend
        "vectors": vectors,
    }
    if sphere.angles is not None:
        drawing["angles"] = np.round(as_array("angles", sphere.angles)[chosen].astype(np.float64), 1).tolist()
    return drawing


def _rounded(rows: NDArray) -> list[list[float]]:
    return (np.round(rows, DECIMALS) + 0.0).tolist()  # + 0.0 makes -0.0 a shorter 0.0


def _directions(name: str, values: Array) -> tuple[NDArray, NDArray]:
    """Return unit rows, and which of them have a direction."""
    norms, rows = polar(_rows(name, values))
    return rows.numpy(), (norms > 0).squeeze(1).numpy()


def _rows(name: str, values: Array) -> Tensor:
    rows = as_array(name, values)
    require(rows.ndim == 2 and rows.shape[1] in (2, 3), name, "of shape (N, 2) or (N, 3)", rows.shape)
    require(rows.dtype.kind in "fiu", name, "real numbers", rows.dtype)
    wide = torch.from_numpy(rows.astype(np.float64))
    require_finite_rows(name, wide)
    return wide


def _integers(name: str, values: Array) -> NDArray:
    labels = as_array(name, values)
    require(labels.ndim == 1, name, "of shape (N,)", labels.shape)
    require(labels.dtype.kind in "iu" or not len(labels), name, "integers", labels.dtype)
    return labels.astype(np.int64)
