"""Features on the unit sphere, one picture a method, to be turned with the mouse (assets/sphere.js draws them)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hypersphere.report.embed import json_script
from hypersphere.report.palette import class_colors

Array: TypeAlias = "Tensor | NDArray | Sequence"

MOST_POINTS = 5000  # a picture; more are thinned at random, and the page says so
DECIMALS = 4


@dataclass(frozen=True, eq=False)
class Sphere:
    """One picture: features and class vectors by their direction, on the sphere (N, 3) or the circle (N, 2).

    Vectors of any length are accepted and normalised; rows of zeros have no direction and are left out.
    """

    title: str
    points: Array
    labels: Array
    vectors: Array | None = None
    classes: Sequence[str] = ()
    caption: str = ""

    def __post_init__(self) -> None:
        points = _rows("points", self.points)
        labels = _integers("labels", self.labels)
        if len(labels) != len(points):
            raise ValueError(f"labels: got {len(labels)} for {len(points)} points; accepted is one a point")
        known = len(self.classes) or None
        if self.vectors is not None:
            vectors = _rows("vectors", self.vectors)
            if vectors.shape[1] != points.shape[1]:
                raise ValueError(
                    f"vectors: got {vectors.shape[1]} columns; accepted is {points.shape[1]}, as in points"
                )
            if known not in (None, len(vectors)):
                raise ValueError(f"classes: got {known} names for {len(vectors)} vectors; accepted is one a vector")
            known = len(vectors)
        if len(labels) and (labels.min() < 0 or (known is not None and labels.max() >= known)):
            limit = "0 or more" if known is None else f"0 to {known - 1}"
            raise ValueError(f"labels: got values from {labels.min()} to {labels.max()}; accepted is {limit}")

    @property
    def class_count(self) -> int:
        """How many classes are named, have a vector or occur as a label."""
        vectors = 0 if self.vectors is None else len(self.vectors)
        return max(len(self.classes), vectors, int(_integers("labels", self.labels).max(initial=-1)) + 1)


@dataclass(frozen=True, eq=False)
class Spheres:
    """Pictures side by side, with one legend; turning one turns all until the reader unlinks them."""

    title: str
    spheres: Sequence[Sphere]
    caption: str = ""

    def __post_init__(self) -> None:
        names = {tuple(sphere.classes) for sphere in self.spheres if sphere.classes}
        if len(names) > 1:
            raise ValueError(
                f"spheres: got {len(names)} different tuples of classes; accepted is one, for the shared legend"
            )
        for sphere in self.spheres:
            if names and sphere.class_count > len(next(iter(names))):
                raise ValueError(
                    f"spheres: {sphere.title!r} has {sphere.class_count} classes; accepted is at most the "
                    f"{len(next(iter(names)))} that are named"
                )

    @property
    def classes(self) -> tuple[str, ...]:
        """The names in the legend: those given, else the numbers of the classes."""
        for sphere in self.spheres:
            if sphere.classes:
                return tuple(sphere.classes)
        return tuple(str(index) for index in range(max((sphere.class_count for sphere in self.spheres), default=0)))


def spheres_html(section: Spheres) -> str:
    """Return the canvases, the legend, the controls and the coordinates they need."""
    colors = class_colors(len(section.classes))
    drawings = [_drawing(sphere) for sphere in section.spheres]
    figures = "".join(_figure_html(sphere, drawing) for sphere, drawing in zip(section.spheres, drawings, strict=True))
    legend = "".join(
        f"<li><button type='button' data-class='{index}' aria-pressed='false'>"
        f"<span class='swatch' style='--class:{color}'></span>{escape(name)}</button></li>"
        for index, (name, color) in enumerate(zip(section.classes, colors, strict=True))
    )
    caption = f"<p class='caption'>{escape(section.caption)}</p>" if section.caption else ""
    data = json_script({"classes": section.classes, "colors": colors, "spheres": drawings})
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
    "<p class='note screen'>Drag to turn, or focus a sphere and use the arrow keys; <kbd>+</kbd> <kbd>−</kbd> zoom, "
    "<kbd>0</kbd> resets. Point at a class to highlight it, press it to keep it.</p>"
    "<noscript><p class='note'>The spheres are drawn by JavaScript, which is switched off.</p></noscript>"
)


def _figure_html(sphere: Sphere, drawing: dict[str, object]) -> str:
    drawn, given = len(drawing["labels"]), len(sphere.points)  # type: ignore[arg-type]
    count = f"{drawn:,} features" if drawn == given else f"{drawn:,} of {given:,} features"
    shape = "circle" if drawing["dimension"] == 2 else "sphere"
    label = f"{sphere.title}: {count} of {sphere.class_count} classes on the unit {shape}. Arrow keys turn it."
    caption = f"<p>{escape(sphere.caption)}</p>" if sphere.caption else ""
    return (
        f"<figure><figcaption><h3>{escape(sphere.title)}</h3><span class='count'>{count}</span></figcaption>"
        f"<div class='stage'><canvas tabindex='0' role='application' aria-roledescription='turnable {shape}' "
        f"aria-label='{escape(label)}'></canvas><div class='tip' hidden></div></div>{caption}</figure>"
    )


def _drawing(sphere: Sphere) -> dict[str, object]:
    points, kept = _directions(_rows("points", sphere.points))
    points, labels = points[kept], _integers("labels", sphere.labels)[kept]
    if len(points) > MOST_POINTS:
        chosen = np.sort(np.random.default_rng(0).choice(len(points), MOST_POINTS, replace=False))
        points, labels = points[chosen], labels[chosen]
    vectors: list[object] = []
    if sphere.vectors is not None:
        rows, present = _directions(_rows("vectors", sphere.vectors))
        vectors = [row if there else None for row, there in zip(_rounded(rows), present, strict=True)]
    return {
        "dimension": points.shape[1],
        "points": [number for row in _rounded(points) for number in row],
        "labels": labels.tolist(),
        "vectors": vectors,
    }


def _rounded(rows: NDArray) -> list[list[float]]:
    return (np.round(rows, DECIMALS) + 0.0).tolist()  # + 0.0 makes -0.0 a shorter 0.0


def _directions(rows: NDArray) -> tuple[NDArray, NDArray]:
    """Return unit rows and which of them have a direction; dividing by the largest entry first cannot overflow."""
    largest = np.abs(rows).max(axis=1, keepdims=True, initial=0.0)
    kept = largest[:, 0] > 0
    scaled = rows / np.where(largest > 0, largest, 1.0)
    norms = np.linalg.norm(scaled, axis=1, keepdims=True)
    return scaled / np.where(norms > 0, norms, 1.0), kept


def _array(name: str, values: Array) -> NDArray:
    try:
        if isinstance(values, Tensor):
            values = values.detach().cpu()
            return (values.double() if values.is_floating_point() else values).numpy()
        return np.asarray(values)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: got {type(values).__name__}; accepted is a tensor or an array of numbers") from None


def _rows(name: str, values: Array) -> NDArray:
    rows = _array(name, values)
    if rows.ndim != 2 or rows.shape[1] not in (2, 3):
        raise ValueError(f"{name}: got shape {tuple(rows.shape)}; accepted is (N, 2) or (N, 3)")
    if rows.dtype.kind not in "fiu":
        raise ValueError(f"{name}: got type {rows.dtype}; accepted are real numbers")
    rows = rows.astype(np.float64)
    wrong = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if len(wrong):
        raise ValueError(
            f"{name}: got {len(wrong)} rows with NaN or infinity, first row {wrong[0]}; accepted is finite"
        )
    return rows


def _integers(name: str, values: Array) -> NDArray:
    labels = _array(name, values)
    if labels.ndim != 1:
        raise ValueError(f"{name}: got shape {tuple(labels.shape)}; accepted is (N,)")
    if labels.dtype.kind not in "iu" and len(labels):
        raise ValueError(f"{name}: got type {labels.dtype}; accepted are integers")
    return labels.astype(np.int64)
