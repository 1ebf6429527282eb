"""Build Altair charts from layers, with the text that a page shows around them, and render figures as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypersphere._validation import require, require_package
from hypersphere.report._html import escape
from hypersphere.report._text import printable_data
from hypersphere.report.tables import Table

MOST_DESCRIBED = 8  # names in the alternative text
SOFT = "#59616e"  # chart.css replaces this colour of text and rules by that of the page
QUIET = {"labelColor": SOFT, "titleColor": SOFT, "titleFontWeight": "normal", "labelFontSize": 12}
AXIS = {"domain": False, "ticks": False, "gridColor": "#e1e5ea", "labelPadding": 8, "labelOverlap": "greedy"}
THEME: dict[str, Any] = {
    "font": 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif',
    "background": None,
    "view": {"stroke": "transparent"},
    "axis": {**QUIET, **AXIS, "titleFontSize": 12.5, "titlePadding": 10},
    "axisX": {"titleAnchor": "end"},
    "legend": {**QUIET, "titleFontSize": 12.5, "symbolOpacity": 1},
    "title": {"color": SOFT, "fontSize": 12.5, "fontWeight": "normal", "anchor": "start", "frame": "bounds"}
    | {"offset": 12, "subtitleColor": SOFT, "subtitleFontSize": 12.5},
}


def altair() -> Any:
    """Return the module `altair`, which is needed only for charts."""
    return require_package("altair", "altair", "report")


def inline(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows as the data of a chart, with numbers rounded to 5 digits to keep the page small."""
    rounded = [{k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()} for row in rows]
    return altair().InlineData(values=rounded)


def series_color(colors: Mapping[str, str]) -> Any:
    """Return the colour encoding of the field "series", with a legend if there are several names."""
    scale = {"domain": list(colors), "range": list(colors.values())}
    legend = {} if len(colors) > 1 else {"legend": None}
    return altair().Color("series:N", title=None, sort=None, scale=scale, **legend)


def make_chart(
    rows: Sequence[Mapping[str, Any]],
    layers: Sequence[Any],
    *,
    about: str,
    numbers: Table | None = None,
    title: str = "",
    colors: Mapping[str, str] | None = None,
    details: Sequence[str] = (),
    notes: Sequence[str] = (),
    height: float = 320,
    **readout: Any,
) -> Any:
    """Return an Altair chart of layers that share the rows.

    The `description` of the chart is its alternative text. Its `usermeta` holds what a page shows around it.

    Args:
        rows: the data.
        layers: Altair charts without data, or with additional data.
        about: first sentences of the alternative text; names with details follow.
        numbers: table below the chart.
        title: name of the values, above the chart.
        colors: colours of the names in the legend.
        details: for each name, a value next to it in the legend.
        notes: sentences below the chart; empty ones are omitted.
        height: height in pixels.
        readout: options of chart.js, which shows values under the pointer and fits the chart to its column.
    """
    details_by_name = dict(zip(colors or {}, details, strict=False))
    described = [f"{name}: {detail}." for name, detail in details_by_name.items() if detail]
    omitted = [f"And {len(described) - MOST_DESCRIBED} more."] * (len(described) > MOST_DESCRIBED)
    usermeta = {
        "colors": dict(colors or {}),
        "details": details_by_name,
        "notes": [note for note in notes if note],
        "numbers": [[column.name for column in numbers.columns], *numbers.shown()] if numbers else [],
        **readout,
    }
    return altair().LayerChart(
        data=inline(rows),
        layer=list(layers),
        title=title,
        width=560,
        height=height,
        description=" ".join([about, *described[:MOST_DESCRIBED], *omitted]),
        usermeta=usermeta,
    )


def chart_spec(chart: Any) -> dict[str, Any]:
    """Return the Vega-Lite specification of a chart, in which data are lists of rows."""
    with altair().data_transformers.enable(consolidate_datasets=False):
        spec = chart.to_dict(validate=False)
    del spec["$schema"]
    return spec


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
            usermeta, width = spec.pop("usermeta"), 860 // len(row) - 70
            described.append(f"{name}: {spec.pop('description')}")
            heading = {"text": name, "fontSize": 14, "fontWeight": 600, "color": "#16191f"}
            size = {"width": width, "height": 240}
            if "square" in usermeta:
                size, symbols = {"width": min(width, 420), "height": min(width, 420) * usermeta["square"]}, {}
            panels.append(spec | size | {"title": heading | {"subtitle": usermeta["notes"][:1]}})
            panels[-1].pop("config", None)
        stacked.append({"hconcat": panels, "spacing": 34, "resolve": {"scale": {"color": "shared"}}})
    legend = {**THEME["legend"], "orient": "bottom", "columns": 6, **symbols}
    config = {**THEME, "background": "#ffffff", "padding": 14, "legend": legend}
    figure = {"vconcat": stacked, "resolve": {"scale": {"color": "independent"}}, "config": config}
    svg = converter.vegalite_to_svg(printable_data(figure))
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(" ".join(described))}" ', 1)
