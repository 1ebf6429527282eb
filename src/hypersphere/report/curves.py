"""Line charts: losses, accuracies and energies over time, ROC and CMC curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hypersphere._validation import require
from hypersphere.report.arrays import as_numbers
from hypersphere.report.axis import Axis, fit_axis
from hypersphere.report.frame import HEIGHT, WIDTH, End, Entry, chart_html, counted, dots, path, plot_html, ribbon
from hypersphere.report.palette import class_colors, ordered_colors
from hypersphere.report.series import MOST_POINTS, Series, thinned
from hypersphere.report.table import ARROWS, Cell, Column, Table

MOST_CURVES = 40
MOST_DRAWN = 8000  # points, summed over curves
MOST_DOTTED = 16  # curves with at most this number of points show each point as a dot
MOST_CELLS = 240  # cells of the table below the chart; larger tables show only ends and extremes
MOST_BANDED = 6  # curves whose bands can be distinguished
MOST_DESCRIBED = 8  # curves that the alternative text describes


@dataclass(frozen=True, eq=False)
class Curves:
    """Curves over one axis; bands show one standard deviation over seeds if there are few curves.

    Args:
        title: heading.
        series: the curves, in the order of the legend.
        x_name, y_name: names of the axes.
        format: format of the values, as in a `Column`; with `".1%"` the axis is in per cent too.
        log_x, log_y: make the axis logarithmic; values <= 0 are omitted.
        limits: the range of possible values, for example (0, 1) for a rate; bands and axis end there.
        higher_is_better: whether the best value is the highest or the lowest; None marks no best value.
        ordered: use a sequential colour scale, for series with an order such as the layers of a network.
        caption: text below the chart.

    Example:
        >>> Curves("Loss", [Series("softmax", [2.3, 0.8, 0.4]), Series("A-Softmax", [4.1, 1.9, 1.2])]).x_name
        'epoch'
    """

    title: str
    series: Sequence[Series]
    x_name: str = "epoch"
    y_name: str = ""
    format: str = ".4g"
    log_x: bool = False
    log_y: bool = False
    limits: tuple[float, float] | None = None
    higher_is_better: bool | None = None
    ordered: bool = False
    caption: str = ""

    def __post_init__(self) -> None:
        for index, series in enumerate(self.series):
            require(isinstance(series, Series), f"series[{index}]", "a Series", type(series).__name__)
        count = len(self.series)
        require(1 <= count <= MOST_CURVES, "series", f"1 to {MOST_CURVES} Series", count)
        if self.limits is not None:
            low, high = as_numbers("limits", self.limits, 1).tolist() if len(self.limits) == 2 else (1.0, 0.0)
            require(low < high, "limits", "two finite numbers, low and high", self.limits)
        _ = self.column  # raises for an invalid format

    @property
    def column(self) -> Column:
        """The format of the values."""
        return Column(self.y_name or "value", self.higher_is_better, self.format)

    @property
    def named_values(self) -> str:
        """The name of the values, with an arrow that shows which direction is better."""
        return self.y_name + ("" if self.higher_is_better is None else f" {ARROWS[self.higher_is_better]}")


@dataclass(frozen=True, eq=False)
class Line:
    """A series as it is drawn; NaN where a value cannot be shown on the axes."""

    name: str
    color: str
    dashed: bool
    x: NDArray
    y: NDArray
    spread: NDArray

    @property
    def there(self) -> NDArray:
        """The indices of the points that are drawn."""
        return np.flatnonzero(np.isfinite(self.y))

    def cell(self, index: int) -> Cell:
        """Return a value, with its spread if there is one."""
        value, spread = float(self.y[index]), float(self.spread[index])
        return value if np.isnan(spread) else (value, spread)


@dataclass(frozen=True, eq=False)
class Shapes:
    """SVG paths of one curve, each possibly empty: band, line, and dots."""

    band: str
    line: str
    spots: str


def axes_and_lines(section: Curves) -> tuple[Axis, Axis, list[Line]]:
    """Return the two axes, which include all lines, and the lines."""
    colors = (ordered_colors if section.ordered else class_colors)(len(section.series))
    full = [_line(section, series, color) for series, color in zip(section.series, colors, strict=True)]
    percent = section.format.endswith("%")
    places = np.concatenate([line.x for line in full])
    x = fit_axis(places, log=section.log_x, most=9, whole=bool((places == np.round(places)).all()))
    y = fit_axis(
        np.concatenate([_reach(line, section) for line in full]).clip(*(section.limits or (None, None))),
        log=section.log_y,
        percent=percent,
        rounded=True,
    )
    return x, y, full


def curves_html(section: Curves) -> str:
    """Return the chart as HTML."""
    x, y, full = axes_and_lines(section)
    most = min(MOST_POINTS, MOST_DRAWN // len(full))
    lines = [_thin(line, x, most) for line in full]
    ends = [
        End(
            line.name,
            section.column.show(float(line.y[line.there[-1]])),
            line.color,
            y.place(float(line.y[line.there[-1]])),
            index,
        )
        for index, line in enumerate(lines)
        if len(line.there)
    ]
    banded = len(lines) <= MOST_BANDED
    marks = "".join(_marks(index, line, x, y, banded) for index, line in enumerate(lines))
    return chart_html(
        plot_html(marks, _alt(section, full), x, y, names=(section.x_name, section.named_values), ends=ends),
        legend=[Entry(line.name, line.color, swatch="line dashed" if line.dashed else "line") for line in full],
        notes=_notes(section, full, lines),
        caption=section.caption,
        numbers=_numbers(section, full),
        data=_data(section, lines, x, y),
    )


def _line(section: Curves, series: Series, color: str) -> Line:
    x, y = series.places, series.mean
    if section.log_x:
        positive = x > 0
        x, y, spread = x[positive], y[positive], series.deviation[positive]
    else:
        spread = series.deviation
    if section.log_y:
        y = np.where(y > 0, y, np.nan)
    return Line(series.name, color, series.dashed, x, y, spread)


def _thin(line: Line, x: Axis, most: int) -> Line:
    indices = thinned(x.place(line.x).clip(0, 1), line.y, most)
    return Line(line.name, line.color, line.dashed, line.x[indices], line.y[indices], line.spread[indices])


def _reach(line: Line, section: Curves) -> NDArray:
    """Return the values that the axis must include; a band may be cut at the bottom of a log axis."""
    spread = np.nan_to_num(line.spread) if len(section.series) <= MOST_BANDED else 0.0
    return np.concatenate([line.y + spread, line.y if section.log_y else line.y - spread])


def shapes(line: Line, x: Axis, y: Axis, *, banded: bool, size: tuple[float, float] = (WIDTH, HEIGHT)) -> Shapes:
    """Return the SVG paths of a line in a picture of this width and height, with or without its band."""
    across, up = x.place(line.x), y.place(line.y)
    low, high = line.y - line.spread, np.minimum(line.y + line.spread, y.high)
    floor = np.full_like(low, y.low)
    band = ribbon(across, y.place(np.where(low > y.low, low, floor + 0 * low)), y.place(high), size)
    lonely = np.flatnonzero(
        np.isfinite(up) & ~np.isfinite(np.r_[np.nan, up[:-1]]) & ~np.isfinite(np.r_[up[1:], np.nan])
    )
    dotted = slice(None) if len(line.there) <= MOST_DOTTED and not line.dashed else lonely
    return Shapes(band if banded else "", path(across, up, size), dots(across[dotted], up[dotted], size))


def _marks(index: int, line: Line, x: Axis, y: Axis, banded: bool) -> str:
    drawn = shapes(line, x, y, banded=banded)
    return (
        f"<g class='hue' data-series='{index}' style='--class:{line.color}'>"
        + (f"<path class='band' d='{drawn.band}'/>" if drawn.band else "")
        + (f"<path class='line{' dashed' if line.dashed else ''}' d='{drawn.line}'/>" if drawn.line else "")
        + (f"<path class='spots' d='{drawn.spots}'/>" if drawn.spots else "")
        + "</g>"
    )


def about_bands(section: Curves) -> str:
    """Return a sentence that explains curves and bands if there are several seeds."""
    seeds = sorted({len(series.rows) for series in section.series if len(series.rows) > 1})
    if not seeds:
        return ""
    over = f"over {'–'.join(map(str, seeds))} seeds."
    return f"Bands: mean ± one standard deviation {over}" if len(section.series) <= MOST_BANDED else f"Means {over}"


def _notes(section: Curves, full: Sequence[Line], drawn: Sequence[Line]) -> list[str]:
    notes = []
    if seeds := about_bands(section):
        notes.append(seeds)
    gaps = sum(series.gaps for series in section.series)
    if gaps:
        notes.append(f"{counted(gaps, 'value')} not finite, omitted.")
    lost = sum(len(s.mean) for s in section.series) - sum(len(line.there) for line in full)
    lost -= sum(int((~np.isfinite(series.mean)).sum()) for series in section.series)
    if lost:
        notes.append(f"{counted(lost, 'point')} at 0 or below omitted from the log axis.")
    if any(len(a.x) != len(b.x) for a, b in zip(full, drawn, strict=True)):
        most, longest = (max(len(line.x) for line in lines) for lines in (drawn, full))
        notes.append(f"Drawn with at most {most} of {longest:,} points per curve, extremes included.")
    return notes


def _alt(section: Curves, lines: Sequence[Line]) -> str:
    """Return the alternative text: the range of x, and the ends and extremes of each curve."""
    places = np.concatenate([line.x[line.there] for line in lines])
    if not len(places):
        return f"{section.title}: an empty chart, no value is finite."
    descriptions = [
        f"{line.name}: {section.column.show(float(line.y[line.there[0]]))} to "
        f"{section.column.show(float(line.y[line.there[-1]]))}, {_extremes(section, line)}."
        for line in lines[:MOST_DESCRIBED]
        if len(line.there)
    ]
    more = f" And {len(lines) - MOST_DESCRIBED} more." if len(lines) > MOST_DESCRIBED else ""
    what = f"{counted(len(lines), 'curve')} of {section.y_name or 'values'}"
    return f"{what} over {section.x_name} from {places.min():.4g} to {places.max():.4g}. {' '.join(descriptions)}{more}"


def _extremes(section: Curves, line: Line) -> str:
    least, greatest = (line.there[find(line.y[line.there])] for find in (np.argmin, np.argmax))
    show = section.column.show
    if section.higher_is_better is None:
        return f"lowest {show(float(line.y[least]))}, highest {show(float(line.y[greatest]))}"
    best = greatest if section.higher_is_better else least
    return f"best {show(float(line.y[best]))} at {section.x_name} {line.x[best]:.4g}"


def _numbers(section: Curves, lines: Sequence[Line]) -> Table:
    """Return a table of all values if there are few, else of the ends and extremes of each curve."""
    few = max(len(line.x) for line in lines) <= MOST_CELLS
    places = np.unique(np.concatenate([line.x for line in lines])) if few else np.zeros(0)
    if few and len(places) * len(lines) <= MOST_CELLS and all((np.diff(line.x) > 0).all() for line in lines):
        at = [dict(zip(line.x.tolist(), map(line.cell, range(len(line.x))), strict=True)) for line in lines]
        rows = [[f"{place:.6g}", *(values.get(place) for values in at)] for place in places.tolist()]
        columns = [Column(line.name, None, section.format) for line in lines]
        return Table("", [Column(section.x_name), *columns], rows)
    best = section.higher_is_better
    columns = [Column(name, best, section.format) for name in ("last", "lowest", "highest")]
    columns = [Column("curve"), Column("points"), Column("first", None, section.format), *columns]
    rows = []
    for line in lines:
        there = line.there
        finite = line.y[there]
        values = (
            [line.cell(there[0]), line.cell(there[-1]), float(finite.min()), float(finite.max())]
            if len(there)
            else [None] * 4
        )
        rows.append([line.name, len(there), *values])
    return Table("", columns, rows)


def _data(section: Curves, lines: Sequence[Line], x: Axis, y: Axis) -> dict[str, object]:
    """Return the data of the read-out: positions in picture coordinates, and texts."""
    places = np.unique(np.concatenate([line.x[line.there] for line in lines]))
    return {
        "kind": "points",
        "x": np.round(WIDTH * x.place(places), 1).tolist() if len(places) else [],
        "heads": [f"{section.x_name} {place:.5g}".strip() for place in places.tolist()],
        "series": [
            {
                "name": line.name,
                "color": line.color,
                "at": np.searchsorted(places, line.x[line.there]).tolist(),
                "y": np.round(HEIGHT * (1 - y.place(line.y[line.there])), 1).tolist() if len(line.there) else [],
                "text": [section.column.show(line.cell(index)) for index in line.there],
            }
            for line in lines
        ],
    }
