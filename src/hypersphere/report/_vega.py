"""Vega-Lite charts from layers, with the numbers and notes that a page shows around them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from hypersphere._validation import require, require_package
from hypersphere.report.tables import Table

MOST_DESCRIBED = 8  # rows of the summary in the alternative text
QUIET = {"labelColor": "#59616e", "titleColor": "#59616e", "titleFontWeight": "normal", "labelFontSize": 12}
AXIS = {"domain": False, "ticks": False, "gridColor": "#e1e5ea", "labelPadding": 8, "labelOverlap": "greedy"}
THEME: dict[str, Any] = {  # colours of text and rules are replaced by those of the page (chart.css)
    "font": 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif',
    "background": None,
    "view": {"stroke": "transparent"},
    "axis": {**QUIET, **AXIS, "titleFontSize": 12.5, "titlePadding": 10},
    "axisX": {"titleAnchor": "end"},
    "legend": {**QUIET, "titleFontSize": 12.5, "symbolOpacity": 1},
    "title": {"color": "#59616e", "fontSize": 12.5, "fontWeight": "normal", "anchor": "start", "frame": "bounds"}
    | {"offset": 12, "subtitleColor": "#59616e", "subtitleFontSize": 12.5},
}


def quantity(name: str, **options: Any) -> dict[str, Any]:
    """Return the encoding of a field of numbers; without a title unless one is given."""
    return {"field": name, "type": "quantitative", "title": None, **options}


def category(name: str, **options: Any) -> dict[str, Any]:
    """Return the encoding of a field of names, in the order of the rows."""
    return {"field": name, "type": "nominal", "title": None, "sort": None, **options}


def named_colors(names: Sequence[str], colors: Sequence[str]) -> dict[str, Any]:
    """Return the encoding of the colours of named series; several names have a legend."""
    legend = {} if len(names) > 1 else {"legend": None}
    return category("series", scale={"domain": list(names), "range": list(colors)}, **legend)


def layer(
    mark: str, encoding: Mapping[str, Any], rows: Sequence[Mapping[str, Any]] | None = None, **options: Any
) -> dict[str, Any]:
    """Return one layer of marks with these options; it has the data of the chart unless `rows` are given."""
    made = {"mark": {"type": mark, **options}, "encoding": dict(encoding)}
    return made if rows is None else {"data": _data(rows), **made}


def make_chart(
    rows: Sequence[Mapping[str, Any]],
    layers: Sequence[Mapping[str, Any]],
    *,
    about: str,
    summary: Table,
    numbers: Table | None = None,
    title: str = "",
    legend: Sequence[tuple[str, str, str, str]] = (),
    notes: Sequence[str] = (),
    height: float = 320,
    **readout: Any,
) -> Any:
    """Return an Altair chart of layers that share the rows.

    The alternative text is the `description` of the chart; what a page shows around it is its `usermeta`.

    Args:
        rows: the data.
        layers: see `layer`.
        about: sentence that begins the alternative text; the rows of the summary follow.
        summary: table with one row per series.
        numbers: table below the chart, by default the summary.
        title: name of the values, above the chart.
        legend: name, colour, detail and kind of swatch ("line", "box"…) of each series.
        notes: sentences below the chart.
        height: height in pixels.
        readout: how chart.js reads values and fits the chart to its column.
    """
    alt = require_package("altair", "altair", "report")
    columns, first = summary.columns, summary.rows[:MOST_DESCRIBED]
    parts = [
        ", ".join(f"{column.name} {column.show(cell)}" for column, cell in zip(columns[1:], row[1:], strict=True))
        for row in first
    ]
    described = [f"{row[0]}: {part}." for row, part in zip(first, parts, strict=True)]
    more = [f"And {len(summary.rows) - MOST_DESCRIBED} more."] * (len(summary.rows) > MOST_DESCRIBED)
    table = summary if numbers is None else numbers
    around = {
        "legend": [dict(zip(("name", "color", "detail", "kind"), entry, strict=True)) for entry in legend],
        "notes": [note for note in notes if note],
        "numbers": {
            "columns": [[column.name, column.higher_is_better, column.format] for column in table.columns],
            "rows": [[_plain(cell) for cell in row] for row in table.rows],
        },
        **readout,
    }
    size = {"width": 560, "height": height, "title": title}
    text = " ".join([about, *described, *more])
    spec = {"data": _data(rows), "layer": list(layers), "description": text, "usermeta": around, **size}
    return alt.LayerChart.from_dict(spec, validate=False)


def chart_spec(chart: Any) -> dict[str, Any]:
    """Return the Vega-Lite specification of a chart, with its data as lists of rows."""
    alt = require_package("altair", "altair", "report")
    with alt.data_transformers.enable(consolidate_datasets=False):
        spec = chart.to_dict(validate=False)
    for part in (spec, *spec.get("layer", ())):
        data = part.get("data")
        if isinstance(data, dict) and isinstance(data.get("values"), str):
            part["data"] = {"values": json.loads(data["values"])}
    return {key: value for key, value in spec.items() if key not in ("$schema", "datasets")} | (
        {"datasets": spec["datasets"]} if spec.get("datasets") else {}
    )


def figure_svg(title: str, rows: Sequence[Sequence[tuple[str, Any]]]) -> str:
    """Return rows of titled charts as one SVG image with a white background, for a README or a slide.

    The charts of a row show the same names, so they share a legend below them.

    Example:
        >>> from hypersphere.report import Series, charts
        >>> figure_svg("A loss", [[("Loss", charts.lines([Series("softmax", [2.3, 0.8])]))]])[:4]
        '<svg'
    """
    require(len(rows) > 0 and all(map(len, rows)), "rows", "at least one row of at least one chart", list(rows))
    converter = require_package("vl_convert", "vl-convert-python", "report")
    stacked, described, symbols = [], [title], {"symbolType": "stroke", "symbolStrokeWidth": 3}
    for row in rows:
        panels = []
        for name, chart in row:
            spec = chart_spec(chart)
            around, width = spec.pop("usermeta"), 860 // len(row) - 70
            described.append(f"{name}: {spec.pop('description')}")
            heading = {"text": name, "fontSize": 14, "fontWeight": 600, "color": "#16191f"}
            size = {"width": width, "height": 240}
            if "square" in around:
                size, symbols = {"width": min(width, 420), "height": min(width, 420) * around["square"]}, {}
            panels.append(spec | size | {"title": heading | {"subtitle": around["notes"][:1]}})
            panels[-1].pop("config", None)
        stacked.append({"hconcat": panels, "spacing": 34, "resolve": {"scale": {"color": "shared"}}})
    legend = {**THEME["legend"], "orient": "bottom", "columns": 6, **symbols}
    config = {**THEME, "background": "#ffffff", "padding": 14, "legend": legend}
    svg = converter.vegalite_to_svg(
        {"vconcat": stacked, "resolve": {"scale": {"color": "independent"}}, "config": config}
    )
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(" ".join(described))}" ', 1)


def counted(count: int, what: str) -> str:
    """Return a number and its noun.

    >>> counted(1, "value"), counted(2000, "value")
    ('1 value', '2,000 values')
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def round_step(width: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is not below a width.

    >>> round_step(0.03), round_step(7.0)
    (0.05, 10.0)
    """
    power = 10.0 ** math.floor(math.log10(width))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if round(factor * power / width, 6) >= 1)


def decades(low: float, high: float) -> list[float]:
    """Return the powers of ten between two positive numbers."""
    first, last = math.ceil(round(math.log10(low), 6)), math.floor(round(math.log10(high), 6))
    return [10.0**ten for ten in range(first, last + 1)]


def _data(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return rows as one JSON text, because Altair copies lists value by value."""
    rounded = [{k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()} for row in rows]
    return {"values": json.dumps(rounded), "format": {"type": "json"}}


def _plain(cell: Any) -> Any:
    if isinstance(cell, tuple):
        return [_plain(part) for part in cell]
    if cell is None or isinstance(cell, str):
        return cell
    return float(cell) if math.isfinite(cell) else None
