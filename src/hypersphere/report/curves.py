"""Curves: losses, accuracies and energies over time, ROC and CMC."""

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
MOST_DRAWN = 8000  # points of all curves together
MOST_DOTTED = 16  # curves of so few points show each as a dot
MOST_CELLS = 240  # in the table under the chart; larger ones are told by their ends and extremes
MOST_BANDED = 6  # curves whose bands can be told apart
MOST_TOLD = 8  # curves in the words for those who cannot see them


@dataclass(frozen=True, eq=False)
class Curves:
    """Curves over one axis; bands are one standard deviation over seeds, drawn where curves are few.

    Args:
        title: the heading.
        series: what is drawn, in the order of the legend.
        x_name, y_name: of the axes.
        format: of the values, as that of a `Column`; with `".1%"` the axis is in per cent too.
        log_x, log_y: logarithmic axes; what is not above 0 has no place there and is left out.
        limits: what no value can go beyond, as 0 and 1 for a rate: bands end there, and the axis does not go further.
        higher_is_better: which value is called the best; neither if None.
        ordered: colours that run from one end to the other, for series in an order, as the layers of a network.
        caption: a sentence under the chart.

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
        _ = self.column  # refuses a bad format

    @property
    def column(self) -> Column:
        """How values are written."""
        return Column(self.y_name or "value", self.higher_is_better, self.format)

    @property
    def named_values(self) -> str:
        """The name of the values, with an arrow to the better end."""
        return self.y_name + ("" if self.higher_is_better is None else f" {ARROWS[self.higher_is_better]}")


@dataclass(frozen=True, eq=False)
class Line:
    """A series as it is drawn: NaN where the axes have no place for it."""

    name: str
    color: str
    dashed: bool
    x: NDArray
    y: NDArray
    spread: NDArray

    @property
    def there(self) -> NDArray:
        """The indices of what is drawn."""
        return np.flatnonzero(np.isfinite(self.y))

    def cell(self, index: int) -> Cell:
        """The value, with its spread if it has one."""
        value, spread = float(self.y[index]), float(self.spread[index])
        return value if np.isnan(spread) else (value, spread)


@dataclass(frozen=True, eq=False)
class Shapes:
    """One line as outlines of SVG, each empty where there is none: its band, itself, its dots."""

    band: str
    line: str
    spots: str


def axes_and_lines(section: Curves) -> tuple[Axis, Axis, list[Line]]:
    """Return the axes of x and of values, which hold all lines, and the lines."""
    colors = (ordered_colors if section.ordered else class_colors)(len(section.series))
    whole = [_line(section, series, color) for series, color in zip(section.series, colors, strict=True)]
    percent = section.format.endswith("%")
    places = np.concatenate([line.x for line in whole])
    x = fit_axis(places, log=section.log_x, most=9, whole=bool((places == np.round(places)).all()))
    y = fit_axis(
        np.concatenate([_reach(line, section) for line in whole]).clip(*(section.limits or (None, None))),
        log=section.log_y,
        percent=percent,
        rounded=True,
    )
    return x, y, whole


def curves_html(section: Curves) -> str:
    """Return the chart."""
    x, y, whole = axes_and_lines(section)
    most = min(MOST_POINTS, MOST_DRAWN // len(whole))
    lines = [_thin(line, x, most) for line in whole]
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
        plot_html(marks, _alt(section, whole), x, y, names=(section.x_name, section.named_values), ends=ends),
        legend=[Entry(line.name, line.color, swatch="line dashed" if line.dashed else "line") for line in whole],
        notes=_notes(section, whole, lines),
        caption=section.caption,
        numbers=_numbers(section, whole),
        data=_data(section, lines, x, y),
    )


def _line(section: Curves, series: Series, color: str) -> Line:
    x, y = series.places, series.mean
    if section.log_x:
        kept = x > 0
        x, y, spread = x[kept], y[kept], series.deviation[kept]
    else:
        spread = series.deviation
    if section.log_y:
        y = np.where(y > 0, y, np.nan)
    return Line(series.name, color, series.dashed, x, y, spread)


def _thin(line: Line, x: Axis, most: int) -> Line:
    kept = thinned(x.place(line.x).clip(0, 1), line.y, most)
    return Line(line.name, line.color, line.dashed, line.x[kept], line.y[kept], line.spread[kept])


def _reach(line: Line, section: Curves) -> NDArray:
    """All that the axis of values has to hold; a band may run out at the bottom of a log axis."""
    spread = np.nan_to_num(line.spread) if len(section.series) <= MOST_BANDED else 0.0
    return np.concatenate([line.y + spread, line.y if section.log_y else line.y - spread])


def shapes(line: Line, x: Axis, y: Axis, *, banded: bool, size: tuple[float, float] = (WIDTH, HEIGHT)) -> Shapes:
    """Return what is drawn of a line in a picture of this width and height, with its band or without."""
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
    """What curves and bands are, where there are several seeds."""
    seeds = sorted({len(series.rows) for series in section.series if len(series.rows) > 1})
    if not seeds:
        return ""
    over = f"over {'–'.join(map(str, seeds))} seeds."
    return f"Bands: mean ± one standard deviation {over}" if len(section.series) <= MOST_BANDED else f"Means {over}"


def _notes(section: Curves, whole: Sequence[Line], drawn: Sequence[Line]) -> list[str]:
    notes = []
    if seeds := about_bands(section):
        notes.append(seeds)
    gaps = sum(series.gaps for series in section.series)
    if gaps:
        notes.append(f"{counted(gaps, 'value')} not finite left out.")
    lost = sum(len(s.mean) for s in section.series) - sum(len(line.there) for line in whole)
    lost -= sum(int((~np.isfinite(series.mean)).sum()) for series in section.series)
    if lost:
        notes.append(f"{counted(lost, 'point')} at 0 or below left out: they are not on a log axis.")
    if any(len(a.x) != len(b.x) for a, b in zip(whole, drawn, strict=True)):
        longest = max(len(line.x) for line in whole)
        notes.append(
            f"Drawn with at most {max(len(line.x) for line in drawn)} of {longest:,} points a curve, all extremes kept."
        )
    return notes


def _alt(section: Curves, lines: Sequence[Line]) -> str:
    """What is seen, in words: the range of x, and of each curve its ends and extremes."""
    places = np.concatenate([line.x[line.there] for line in lines])
    if not len(places):
        return f"{section.title}: an empty chart, no value is finite."
    told = [
        f"{line.name}: {section.column.show(float(line.y[line.there[0]]))} to "
        f"{section.column.show(float(line.y[line.there[-1]]))}, {_extremes(section, line)}."
        for line in lines[:MOST_TOLD]
        if len(line.there)
    ]
    more = f" And {len(lines) - MOST_TOLD} more." if len(lines) > MOST_TOLD else ""
    what = f"{counted(len(lines), 'curve')} of {section.y_name or 'values'}"
    return f"{what} over {section.x_name} from {places.min():.4g} to {places.max():.4g}. {' '.join(told)}{more}"


def _extremes(section: Curves, line: Line) -> str:
    least, greatest = (line.there[find(line.y[line.there])] for find in (np.argmin, np.argmax))
    show = section.column.show
    if section.higher_is_better is None:
        return f"lowest {show(float(line.y[least]))}, highest {show(float(line.y[greatest]))}"
    best = greatest if section.higher_is_better else least
    return f"best {show(float(line.y[best]))} at {section.x_name} {line.x[best]:.4g}"


def _numbers(section: Curves, lines: Sequence[Line]) -> Table:
    """All values where they are few, else the ends and the extremes of each curve."""
    few = max(len(line.x) for line in lines) <= MOST_CELLS
    places = np.unique(np.concatenate([line.x for line in lines])) if few else np.zeros(0)
    if few and len(places) * len(lines) <= MOST_CELLS and all((np.diff(line.x) > 0).all() for line in lines):
        at = [dict(zip(line.x.tolist(), map(line.cell, range(len(line.x))), strict=True)) for line in lines]
        rows = [[f"{place:.6g}", *(known.get(place) for known in at)] for place in places.tolist()]
        columns = [Column(line.name, None, section.format) for line in lines]
        return Table("", [Column(section.x_name), *columns], rows)
    best = section.higher_is_better
    columns = [Column(name, best, section.format) for name in ("last", "lowest", "highest")]
    columns = [Column("curve"), Column("points"), Column("first", None, section.format), *columns]
    rows = []
    for line in lines:
        there = line.there
        known = line.y[there]
        values = (
            [line.cell(there[0]), line.cell(there[-1]), float(known.min()), float(known.max())]
            if len(there)
            else [None] * 4
        )
        rows.append([line.name, len(there), *values])
    return Table("", columns, rows)


def _data(section: Curves, lines: Sequence[Line], x: Axis, y: Axis) -> dict[str, object]:
    """What the read-out needs: places in the picture's coordinates, and words."""
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
