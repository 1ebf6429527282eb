"""Curves as one self-contained SVG file, for places that do not show HTML such as a README or a slide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

import numpy as np

from hypersphere._validation import require
from hypersphere.report.axis import Axis
from hypersphere.report.curves import MOST_BANDED, Curves, Line, about_bands, axes_and_lines, shapes
from hypersphere.report.frame import shortened
from hypersphere.report.palette import class_colors

WIDTH = 960
HEIGHT = 240  # height of a plot
HEAD, FOOT, SIDE, GAP = 38, 46, 56, 22  # pixels above, below and left of a plot, and between elements
LETTER, LINE = 7.3, 22  # approximate size in pixels of a letter and of a line of the legend
LONGEST = 60  # longest name in the legend, in letters
STYLE = (
    "text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;fill:#59616e}"
    ".name{font-weight:600;font-size:14px;fill:#16191f}.key{fill:#16191f}"
    ".line,.spots{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}.spots{stroke-width:5.5}"
    ".rule{stroke:#e1e5ea}.band{fill-opacity:.14}.dashed{stroke-dasharray:6 5;stroke-linecap:butt}"
)


@dataclass(frozen=True)
class Place:
    """Left edge, upper edge and width of a plot."""

    left: float
    top: float
    width: float


def figure_svg(title: str, rows: Sequence[Sequence[Curves]]) -> str:
    """Return an SVG image with a white background: rows of charts, each row with a shared legend.

    Within a row, a name has the same colour in all charts.

    Args:
        title: title and alternative text.
        rows: rows of charts.

    Example:
        >>> from hypersphere.report import Series
        >>> figure_svg("A loss", [[Curves("Loss", [Series("softmax", [2.3, 0.8])])]])[:38]
        '<svg xmlns="http://www.w3.org/2000/svg'
    """
    require(len(rows) > 0 and all(map(len, rows)), "rows", "at least one row of at least one Curves", list(rows))
    drawn, top, descriptions = [], 4.0, [title]
    for row in rows:
        names = list(dict.fromkeys(series.name for section in row for series in section.series))
        colors = dict(zip(names, class_colors(len(names)), strict=True))
        width = (WIDTH - len(row) * SIDE - (len(row) - 1) * GAP - GAP) / len(row)
        for at, section in enumerate(row):
            place = Place(SIDE + at * (width + SIDE + GAP), top + HEAD, width)
            drawn.append(_plot(section, place, colors))
            descriptions.append(f"{section.title}: {section.y_name or 'values'} over {section.x_name}.")
        top += HEAD + HEIGHT + FOOT
        keys, height = _legend(colors, top) if len(names) > 1 else ("", 0.0)
        drawn.append(keys)
        top += height
        if bands := next(filter(None, map(about_bands, row)), ""):
            drawn.append(f'<text x="{SIDE}" y="{top + 16:.1f}">{escape(bands)}</text>')
            top += LINE
        top += GAP / 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:.0f}" width="{WIDTH}" height="{top:.0f}" '
        f'role="img" aria-labelledby="title about"><title id="title">{escape(title)}</title>'
        f'<desc id="about">{escape(" ".join(descriptions[1:]))}</desc><style>{STYLE}</style>'
        f'<rect width="{WIDTH}" height="{top:.0f}" rx="8" fill="#ffffff"/>{"".join(drawn)}</svg>\n'
    )


def _plot(section: Curves, place: Place, colors: dict[str, str]) -> str:
    x, y, lines = axes_and_lines(section)
    size = (place.width, float(HEIGHT))
    banded = len(lines) <= MOST_BANDED
    marks = "".join(_marks(replace(line, color=colors[line.name]), x, y, banded, size) for line in lines)
    name = section.title or section.named_values
    return (
        f'<g transform="translate({place.left:.1f} {place.top:.1f})">'
        f'<text class="name" x="{16 - SIDE}" y="-16">{escape(name)}</text>{_axes(x, y, size)}{marks}'
        f'<text x="{place.width:.1f}" y="{HEIGHT + 38}" text-anchor="end">{escape(section.x_name)}</text></g>'
    )


def _axes(x: Axis, y: Axis, size: tuple[float, float]) -> str:
    width, height = size
    parts = [
        f'<path d="M0 {at:.1f}H{width:.1f}" class="rule"/>'
        f'<text x="-9" y="{at + 4.5:.1f}" text-anchor="end">{escape(label)}</text>'
        for tick, label in zip(y.ticks, y.labels, strict=True)
        for at in [height * (1 - y.place(tick))]
    ]
    parts += [
        f'<text x="{width * x.place(tick):.1f}" y="{height + 20:.1f}" text-anchor="middle">{escape(label)}</text>'
        for tick, label in zip(x.ticks, x.labels, strict=True)
    ]
    return "".join(parts)


def _marks(line: Line, x: Axis, y: Axis, banded: bool, size: tuple[float, float]) -> str:
    if not np.isfinite(line.y).any():
        return ""
    drawn = shapes(line, x, y, banded=banded, size=size)
    kind = "line dashed" if line.dashed else "line"
    return (
        (f'<path class="band" d="{drawn.band}" fill="{line.color}"/>' if drawn.band else "")
        + (f'<path class="{kind}" d="{drawn.line}" stroke="{line.color}"/>' if drawn.line else "")
        + (f'<path class="spots" d="{drawn.spots}" stroke="{line.color}"/>' if drawn.spots else "")
    )


def _legend(colors: dict[str, str], top: float) -> tuple[str, float]:
    """Return the legend, in as many lines as needed, and its height."""
    parts, left, line = [], float(SIDE), 0
    for name, color in colors.items():
        label = shortened(name, LONGEST)
        width = 28 + LETTER * len(label) + GAP
        if left > SIDE and left + width > WIDTH:
            left, line = float(SIDE), line + 1
        at = top + (line + 0.5) * LINE
        parts.append(
            f'<path class="line" d="M{left:.1f} {at:.1f}h20" stroke="{color}" stroke-width="3"/>'
            f'<text class="key" x="{left + 28:.1f}" y="{at + 4.5:.1f}">{escape(label)}</text>'
        )
        left += width
    return "".join(parts), (line + 1) * LINE
