"""A self-contained HTML page made of sections, for a file or for a notebook."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from hypersphere._files import MARK, replacing
from hypersphere._validation import require, require_package
from hypersphere.report._html import Displayable, asset, element, escape, fill_template, json_script, prose, unbroken
from hypersphere.report._text import join_words, joined_facts
from hypersphere.report._vega import THEME, chart_spec
from hypersphere.report.images import Images, images_html
from hypersphere.report.spheres import Spheres, spheres_data, spheres_html
from hypersphere.report.tables import Column, Table, table_html

__all__ = ["Chart", "Page", "Section", "SideBySide", "Stack", "Tabs", "Text", "join_pages", "page_html", "write_page"]


@dataclass(frozen=True, repr=False)
class Text(Displayable):
    """Paragraphs, separated by blank lines in `body`. HTML is escaped, and text between backticks is shown as code."""

    title: str
    body: str


@dataclass(frozen=True, eq=False, repr=False)
class Chart(Displayable):
    """An Altair chart, usually from `hypersphere.report.charts`, with its legend, notes and numbers around it.

    Args:
        title: heading.
        chart: the chart; its `description` is the alternative text.
        caption: text below the chart.
    """

    title: str
    chart: Any
    caption: str = ""


@dataclass(frozen=True, repr=False)
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


@dataclass(frozen=True, repr=False)
class SideBySide(Displayable):
    """Sections side by side if there is room, stacked otherwise."""

    title: str
    sections: Sequence[Section]
    caption: str = ""


@dataclass(frozen=True, repr=False)
class Stack(Displayable):
    """Stacked sections, each with its heading, for example the content of one tab."""

    title: str
    sections: Sequence[Section]
    caption: str = ""


Section: TypeAlias = "Text | Table | Chart | Spheres | Images | Tabs | SideBySide | Stack"
# CSS classes of a group and of each of its sections.
GROUPS = {Tabs: ("tabs", "panel"), SideBySide: ("side-by-side", "cell"), Stack: ("stack", "block")}

ASSETS = {  # files that a page with this kind of section includes
    Text: (),
    Table: (),
    Chart: ("chart.css", "chart.js"),
    Spheres: ("trackball.js", "sphere.js", "spheres.js"),
    Images: ("chart.css",),
    Tabs: ("groups.css", "tabs.js"),
    SideBySide: ("groups.css",),
    Stack: ("groups.css",),
}


@dataclass(frozen=True, repr=False)
class Page(Displayable):
    """A title, a lead sentence, sections, and facts for the footer (date, device, command…)."""

    title: str
    lead: str
    sections: Sequence[Section]
    meta: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _kinds(self.sections, "sections")


def _kinds(sections: Sequence[Any], where: str) -> dict[type, None]:
    """Return the types of all sections, including nested ones, in order of appearance; reject unknown types."""
    kinds: dict[type, None] = {}
    for index, section in enumerate(sections):
        kind = type(section)
        names = ", ".join(known.__name__ for known in ASSETS)
        require(kind in ASSETS, f"{where}[{index}]", f"one of {names}", kind.__name__)
        kinds[kind] = None
        if kind in GROUPS:
            kinds |= _kinds(section.sections, f"{where}[{index}].sections")
    return kinds


def join_pages(pages: Sequence[Page]) -> Page:
    """Return one page with one section per given page. The title names them if there are at most three."""
    if len(pages) == 1:
        return pages[0]
    sections = [Stack(page.title, [Text("", page.lead), *page.sections]) for page in pages]
    title = join_words([page.title for page in pages]) if len(pages) <= 3 else f"{len(pages)} studies"
    return Page(title, f"{len(pages)} studies.", sections, joined_facts(page.meta for page in pages))


def write_page(path: str | os.PathLike[str], page: Page) -> Path:
    """Write the page atomically and return its path; a failure leaves an existing file unchanged."""
    target, html = Path(path), page_html(page)
    with replacing(target) as draft:
        draft.write_text(html, encoding="utf-8")
    return target


def page_html(page: Page) -> str:
    """Return the complete document; it makes no network requests."""
    kinds = _kinds(page.sections, "sections")
    assets = dict.fromkeys(name for kind in kinds for name in ASSETS[kind])
    scripts = "\n".join(asset(name) for name in assets if name.endswith(".js"))
    sections, links = "", []
    for number, section in enumerate(page.sections, start=1):
        heading = f"<h2>{escape(section.title)}</h2>" if section.title else ""
        sections += f"<section id='section-{number}'>{heading}{_body_html(section, 3)}</section>\n"
        if section.title:
            links.append(f"<li><a href='#section-{number}'>{escape(section.title)}</a></li>")
    has_contents = len(links) > 3 or (len(links) > 1 and any(isinstance(section, Stack) for section in page.sections))
    contents = f"<nav aria-label='Contents'><ul>{''.join(links)}</ul></nav>" if has_contents else ""
    facts = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in page.meta.items())
    header = f"<h1>{unbroken(page.title)}</h1><p class='lead'>{prose(page.lead)}</p>" if page.title else ""
    vega = f"<script>{_vega()}</script>\n" if Chart in kinds else ""
    return fill_template(
        "page.html",
        mark=MARK,
        title=escape(page.title),
        styles="".join(asset(name) for name in ("page.css", *assets) if name.endswith(".css")),
        theme=asset("theme.js"),
        kind="" if page.title else " class=bare",
        header=header + contents,
        sections=sections,
        footer=f"<dl>{facts}</dl>" if facts else "",
        scripts=f"{vega}<script type=module>\n{scripts}</script>" if scripts else "",
    )


@cache
def _vega() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script that needs no network."""
    converter = require_package("vl_convert", "vl-convert-python", "report")
    return converter.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", r"<\/script")


def _body_html(section: Any, level: int) -> str:
    """Return the HTML of a section without its heading; headings inside it have this level."""
    if type(section) in GROUPS:
        return _group_html(section, min(level, 6))
    if isinstance(section, Table):
        return table_html(section)
    if isinstance(section, Chart):
        return _chart_html(section)
    if isinstance(section, Spheres):
        return f"<div class='spheres'>{spheres_html(section)}{json_script(spheres_data(section))}</div>"
    if isinstance(section, Images):
        return images_html(section)
    paragraphs = (" ".join(block.split()) for block in section.body.split("\n\n"))
    return "".join(f"<p>{prose(paragraph)}</p>" for paragraph in paragraphs if paragraph)


def _group_html(group: Any, level: int) -> str:
    """Return the inner sections with their headings; assets/tabs.js turns the panels of `Tabs` into tabs."""
    kind, part = GROUPS[type(group)]
    parts = "".join(
        f"<div class='{part}'>{f'<h{level}>{escape(inner.title)}</h{level}>' if inner.title else ''}"
        f"{_body_html(inner, level + 1)}</div>"
        for inner in group.sections
    )
    if isinstance(group, Tabs) and len(group.sections) == 1:
        return parts
    caption = element("p", "caption", getattr(group, "caption", ""))
    return f"<div class='{kind}' data-name='{escape(group.title)}'>{parts}</div>{caption}"


def _chart_html(section: Chart) -> str:
    """Return the chart with its legend above it, and notes, caption and numbers below it."""
    spec = chart_spec(section.chart)
    about, config = {**spec.pop("usermeta", {})}, spec.pop("config", {})
    numbers, notes, details = (about.pop(key, {}) for key in ("numbers", "notes", "details"))
    colors = about.setdefault("colors", {})
    description, legend = spec.pop("description", None) or section.title, ""
    spec["config"] = {**config}
    for key, style in THEME.items():
        spec["config"][key] = {**config.get(key, {}), **style} if isinstance(style, dict) else style
    if len(colors) > 1:
        spec["config"]["legend"] = {"disable": True}  # buttons replace the legend of Vega
        spec["params"] = [*spec.get("params", ()), {"name": "hidden", "value": []}]
        spec["transform"] = [*spec.get("transform", ()), {"filter": "indexof(hidden, datum.series) < 0"}]
        buttons = "".join(_legend_button(name, color, details.get(name, "")) for name, color in colors.items())
        legend = f"<ul class='toggles' aria-label='Press a name to show or hide it'>{buttons}</ul>"
    below = element("p", "caption", section.caption) + element("p", "note", " ".join(notes))
    if len(numbers) > 1:
        table = Table("", list(map(Column, numbers[0])), numbers[1:])
        below += f"<details><summary>Numbers</summary>{table_html(table)}</details>"
    kind = "chart map" if "square" in about else "chart"
    return (
        f"<div class='{kind}'>{legend}<div class='plot'>"
        f"<div class='view' role='img' aria-label='{escape(description)}'></div></div>"
        "<noscript><p class='note'>The chart is drawn by JavaScript, which is switched off.</p></noscript>"
        f"{below}{json_script({'spec': spec, 'about': about})}</div>"
    )


def _legend_button(name: str, color: str, detail: str) -> str:
    return (
        f"<li><button type='button' class='hue' style='--class:{color}' aria-pressed='true' data-name='{escape(name)}'>"
        f"<span class='swatch'></span>{escape(name)}{element('span', 'detail', detail)}</button></li>"
    )
