"""A self-contained HTML page made of sections, for a file or for a notebook."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

from hypersphere._files import MARK, replacing
from hypersphere._validation import require, require_package
from hypersphere.report._notebook import Displayable
from hypersphere.report._vega import THEME, chart_spec
from hypersphere.report._words import joined_facts
from hypersphere.report.images import Images, images_html
from hypersphere.report.spheres import Spheres, spheres_html
from hypersphere.report.tables import Column, Table, table_html, unbroken

__all__ = ["Chart", "Page", "Section", "SideBySide", "Stack", "Tabs", "Text", "join_pages", "page_html", "write_page"]


@dataclass(frozen=True)
class Text(Displayable):
    """Paragraphs, separated by blank lines in `body`; HTML in them is escaped."""

    title: str
    body: str


@dataclass(frozen=True, eq=False)
class Chart(Displayable):
    """An Altair chart, usually from `hypersphere.report.charts`, with its legend, notes and numbers around it.

    Args:
        title: heading.
        chart: the chart; its `description` is the alternative text.
        caption: text below the chart.
        numbers: table below the chart; by default the one that the chart carries.
    """

    title: str
    chart: Any
    caption: str = ""
    numbers: Table | None = None


@dataclass(frozen=True)
class Tabs(Displayable):
    """Sections of which one is visible at a time; all are visible in print and without JavaScript.

    The titles of the sections are the names of the tabs. Arrow keys, Home and End switch tabs.
    """

    title: str
    sections: Sequence[Section]

    def __post_init__(self) -> None:
        require(len(self.sections) > 0, "sections", "at least one section", 0)
        for index, section in enumerate(self.sections):
            title = getattr(section, "title", type(section).__name__)
            require(bool(title.strip()), f"title of sections[{index}]", "a non-empty name for its tab", title)


@dataclass(frozen=True)
class SideBySide(Displayable):
    """Sections side by side if there is room, stacked otherwise."""

    title: str
    sections: Sequence[Section]
    caption: str = ""


@dataclass(frozen=True)
class Stack(Displayable):
    """Stacked sections, each with its heading, for example the content of one tab."""

    title: str
    sections: Sequence[Section]
    caption: str = ""


Section: TypeAlias = "Text | Table | Chart | Spheres | Images | Tabs | SideBySide | Stack"
LEAVES = (Text, Table, Chart, Spheres, Images)
GROUPS = (Tabs, SideBySide, Stack)


@dataclass(frozen=True)
class Page(Displayable):
    """A title, a lead sentence, sections, and facts for the footer (date, device, command…)."""

    title: str
    lead: str
    sections: Sequence[Section]
    meta: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self.sections, "sections")


def join_pages(pages: Sequence[Page]) -> Page:
    """Return one page with a section per page; up to three are named in the title."""
    if len(pages) == 1:
        return pages[0]
    sections = [Stack(page.title, [Text("", page.lead), *page.sections]) for page in pages]
    titles = [page.title for page in pages]
    title = f"{', '.join(titles[:-1])} and {titles[-1]}" if len(titles) <= 3 else f"{len(titles)} studies"
    return Page(title, f"{len(pages)} studies.", sections, joined_facts(page.meta for page in pages))


def write_page(path: str | os.PathLike[str], page: Page) -> Path:
    """Write the page atomically and return its path; a failure leaves an existing file unchanged."""
    target, html = Path(path), page_html(page)
    with replacing(target) as draft:
        draft.write_text(html, encoding="utf-8", errors="replace")  # an unpaired surrogate becomes "?"
    return target


# The browser blocks all network requests, and Vega interprets its expressions instead of compiling them.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

LOGO = (
    "<svg viewBox='0 0 24 24' width='22' height='22' fill='none' stroke='currentColor' stroke-width='1.6' "
    "aria-hidden='true'><circle cx='12' cy='12' r='10'/><ellipse cx='12' cy='12' rx='10' ry='4'/>"
    "<ellipse cx='12' cy='12' rx='4' ry='10'/></svg>"
)

ASSETS = {  # what a page with this kind of section needs
    Chart: ("chart.css", "chart.js"),
    Images: ("chart.css",),
    Spheres: ("trackball.js", "sphere.js", "spheres.js"),
    Tabs: ("groups.css", "tabs.js"),
    Stack: ("groups.css",),
    SideBySide: ("groups.css",),
}


def page_html(page: Page) -> str:
    """Return the complete document; it makes no network requests."""
    numbered = list(enumerate(page.sections, start=1))
    sections = "".join(_section_html(number, section) for number, section in numbered)
    kinds = _kinds(page.sections)
    assets = dict.fromkeys(name for kind in kinds for name in ASSETS.get(kind, ()))
    styles = "".join(_asset(name) for name in ("page.css", *assets) if name.endswith(".css"))
    scripts = "\n".join(_asset(name) for name in assets if name.endswith(".js"))
    vega = f"<script>{_vega()}</script>\n" if Chart in kinds else ""
    facts = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(str(v))}</dd></div>" for k, v in page.meta.items())
    header = f"<h1>{unbroken(page.title)}</h1><p class='lead'>{escape(page.lead)}</p>" if page.title else ""
    return (
        "<!DOCTYPE html>\n"
        "<html lang='en' data-theme='light'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        "<meta name='color-scheme' content='light dark'>"
        f"<meta name='generator' content='{MARK}'>"
        f"<link rel='icon' href='data:,'><title>{escape(page.title)}</title>\n"
        f"<style>\n{styles}</style>\n<script>\n{_asset('theme.js')}</script></head>\n"
        f"<body{'' if page.title else ' class=bare'}><header><div class='brand'>{LOGO}<span>hypersphere</span></div>"
        "<button type='button' id='theme' aria-label='Dark theme' aria-pressed='false'></button>"
        f"{header}{_contents_html(numbered)}</header>\n"
        f"<main>{sections}</main>\n"
        f"<footer>{f'<dl>{facts}</dl>' if facts else ''}</footer>\n"
        f"{vega}{f'<script type=module>{chr(10)}{scripts}</script>' if scripts else ''}</body></html>\n"
    )


def json_script(data: object) -> str:
    r"""Return data as a script element that no string in it can close: every < is written \u003c.

    >>> json_script(["</script>"])
    '<script type="application/json">["\\u003c/script>"]</script>'
    """
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("<", r"\u003c")
    return f'<script type="application/json">{text}</script>'


@cache
def _asset(name: str) -> str:
    return (resources.files("hypersphere.report") / "assets" / name).read_text(encoding="utf-8")


@cache
def _vega() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script that needs no network."""
    converter = require_package("vl_convert", "vl-convert-python", "report")
    return converter.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", r"<\/script")


def _kinds(sections: Sequence[Any]) -> set[type]:
    inner = [_kinds(section.sections) for section in sections if isinstance(section, GROUPS)]
    return {type(section) for section in sections}.union(*inner)


def _check(sections: Sequence[Any], where: str) -> None:
    accepted = f"one of {', '.join(kind.__name__ for kind in (*LEAVES, *GROUPS))}"
    for index, section in enumerate(sections):
        require(isinstance(section, (*LEAVES, *GROUPS)), f"{where}[{index}]", accepted, type(section).__name__)
        if isinstance(section, GROUPS):
            _check(section.sections, f"{where}[{index}].sections")


def _section_html(number: int, section: Section) -> str:
    heading = f"<h2>{escape(section.title)}</h2>" if section.title else ""
    return f"<section id='section-{number}'>{heading}{_body_html(section, 3)}</section>\n"


def _body_html(section: Any, level: int) -> str:
    """Return a section without its heading; headings inside it have this level."""
    if isinstance(section, GROUPS):
        return _group_html(section, min(level, 6))
    if isinstance(section, Table):
        return table_html(section)
    if isinstance(section, Chart):
        return _chart_html(section)
    if isinstance(section, Spheres):
        drawing, data = spheres_html(section)
        return f"<div class='spheres'>{drawing}{json_script(data)}</div>"
    if isinstance(section, Images):
        return images_html(section)
    paragraphs = (" ".join(block.split()) for block in section.body.split("\n\n"))
    return "".join(f"<p>{escape(paragraph)}</p>" for paragraph in paragraphs if paragraph)


def _group_html(group: Any, level: int) -> str:
    """Return the inner sections with their headings; assets/tabs.js turns the panels of `Tabs` into tabs."""
    part = {Tabs: "panel", SideBySide: "cell", Stack: "block"}[type(group)]
    parts = "".join(
        f"<div class='{part}'>{f'<h{level}>{escape(inner.title)}</h{level}>' if inner.title else ''}"
        f"{_body_html(inner, level + 1)}</div>"
        for inner in group.sections
    )
    if isinstance(group, Tabs):
        return (
            f"<div class='tabs' data-name='{escape(group.title)}'>{parts}</div>" if len(group.sections) > 1 else parts
        )
    caption = f"<p class='caption'>{escape(group.caption)}</p>" if group.caption else ""
    return f"<div class='{'side-by-side' if isinstance(group, SideBySide) else 'stack'}'>{parts}</div>{caption}"


def _chart_html(section: Chart) -> str:
    """Return the chart with its legend above it, and notes, caption and numbers below it."""
    spec = chart_spec(section.chart)
    about = {**spec.pop("usermeta", {})}
    legend, numbers, notes = (about.pop(key, None) for key in ("legend", "numbers", "notes"))
    about.pop("embedOptions", None)
    words, keys = spec.pop("description", None) or section.title, ""
    if legend and len(legend) > 1:
        _remove_legends(spec)
        spec["params"] = [*spec.get("params", ()), {"name": "hidden", "value": []}]
        spec["transform"] = [*spec.get("transform", ()), {"filter": "indexof(hidden, datum.series) < 0"}]
        keys = "".join(map(_key_html, legend))
        keys = f"<ul class='toggles' aria-label='Press a name to show or hide it'>{keys}</ul>"
    colors = {entry["name"]: entry["color"] for entry in legend or ()}
    config = spec.pop("config", {})
    spec["config"] = {
        **config,
        **{key: {**config.get(key, {}), **of} if isinstance(of, dict) else of for key, of in THEME.items()},
    }
    table = section.numbers
    if table is None and numbers:
        rows = [[tuple(cell) if isinstance(cell, list) else cell for cell in row] for row in numbers["rows"]]
        table = Table("", [Column(*column) for column in numbers["columns"]], rows)
    below = f"<p class='caption'>{escape(section.caption)}</p>" if section.caption else ""
    below += f"<p class='note'>{escape(' '.join(notes))}</p>" if notes else ""
    below += f"<details><summary>Numbers</summary>{table_html(table)}</details>" if table and table.rows else ""
    square = f" style='--ratio:{about['square']:.3f}'" if "square" in about else ""
    return (
        f"<div class='chart{' map' if square else ''}'>{keys}<div class='plot'{square}>"
        f"<div class='view' role='img' aria-label='{escape(words)}'></div></div>"
        "<noscript><p class='note'>The chart is drawn by JavaScript, which is switched off.</p></noscript>"
        f"{below}{json_script({'spec': spec, 'about': {**about, 'colors': colors}})}</div>"
    )


def _key_html(entry: Mapping[str, str]) -> str:
    detail = f"<span class='detail'>{escape(entry['detail'])}</span>" if entry["detail"] else ""
    return (
        f"<li><button type='button' class='hue' style='--class:{entry['color']}' aria-pressed='true' "
        f"data-name='{escape(entry['name'])}'><span class='swatch {entry['kind']}'></span>"
        f"{escape(entry['name'])}{detail}</button></li>"
    )


def _remove_legends(spec: Any) -> None:
    """Remove the legends of colours for names, because the page has a legend of buttons."""
    for value in spec.values() if isinstance(spec, dict) else spec if isinstance(spec, list) else ():
        _remove_legends(value)
    color = spec.get("color") if isinstance(spec, dict) else None
    if isinstance(color, dict) and color.get("field") == "series":
        color["legend"] = None


def _contents_html(numbered: Sequence[tuple[int, Section]]) -> str:
    titled = [(number, section) for number, section in numbered if section.title]
    links = [f"<li><a href='#section-{number}'>{escape(section.title)}</a></li>" for number, section in titled]
    long = len(links) > 3 or any(isinstance(section, Stack) for _, section in numbered)
    return f"<nav aria-label='Contents'><ul>{''.join(links)}</ul></nav>" if long and len(links) > 1 else ""
