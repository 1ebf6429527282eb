"""A self-contained HTML page made of sections.

To add a kind of section, write a frozen dataclass with a `title` and a function that converts it to HTML, and list both
with their assets in SECTIONS; a section that contains other sections is listed in GROUPS.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

from hypersphere._files import replacing
from hypersphere._validation import require
from hypersphere.report.bars import Bars, bars_html
from hypersphere.report.curves import Curves, curves_html
from hypersphere.report.embed import asset
from hypersphere.report.filters import Filters, filters_html
from hypersphere.report.groups import Render, SideBySide, Stack, Tabs, side_by_side_html, stack_html, tabs_html
from hypersphere.report.heatmap import HeatMap, heatmap_html
from hypersphere.report.histogram import Histogram, histogram_html
from hypersphere.report.landscape import Landscape, landscape_html
from hypersphere.report.spheres import Spheres, spheres_html
from hypersphere.report.table import Table, table_html
from hypersphere.report.text import Text, text_html, unbroken

Section: TypeAlias = (
    "Text | Table | Spheres | Curves | Histogram | HeatMap | Landscape | Filters | Bars | Tabs | SideBySide | Stack"
)

CHART = ("chart.css", "chart.js")

SECTIONS: dict[type, tuple[Callable[[Any], str], tuple[str, ...]]] = {
    Text: (text_html, ()),
    Table: (table_html, ()),
    Spheres: (spheres_html, ("trackball.js", "sphere.js", "spheres.js")),
    Curves: (curves_html, CHART),
    Histogram: (histogram_html, CHART),
    HeatMap: (heatmap_html, CHART),
    Landscape: (landscape_html, CHART),
    Filters: (filters_html, CHART),
    Bars: (bars_html, CHART),
}

GROUPS: dict[type, tuple[Callable[[Any, Render, int], str], tuple[str, ...]]] = {
    Tabs: (tabs_html, ("groups.css", "tabs.js")),
    Stack: (stack_html, ("groups.css",)),
    SideBySide: (side_by_side_html, ("groups.css",)),
}

# This policy lets the browser block all network requests.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

LOGO = (
    "<svg viewBox='0 0 24 24' width='22' height='22' fill='none' stroke='currentColor' stroke-width='1.6' "
    "aria-hidden='true'><circle cx='12' cy='12' r='10'/><ellipse cx='12' cy='12' rx='10' ry='4'/>"
    "<ellipse cx='12' cy='12' rx='4' ry='10'/></svg>"
)


@dataclass(frozen=True)
class Page:
    """A title, a lead sentence, sections, and facts for the footer (date, device, command…)."""

    title: str
    lead: str
    sections: Sequence[Section]
    meta: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self.sections, "sections")


def page_html(page: Page) -> str:
    """Return the complete document; it makes no network requests."""
    numbered = list(enumerate(page.sections, start=1))
    sections = "".join(_section_html(number, section) for number, section in numbered)
    needed = dict.fromkeys(name for section in page.sections for name in _assets(section))
    styles = "".join(asset(name) for name in ("page.css", *(name for name in needed if name.endswith(".css"))))
    scripts = "\n".join(asset(name) for name in needed if name.endswith(".js"))
    facts = "".join(
        f"<div><dt>{escape(key)}</dt><dd>{escape(str(value))}</dd></div>" for key, value in page.meta.items()
    )
    return (
        "<!DOCTYPE html>\n"
        "<html lang='en' data-theme='light'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        "<meta name='color-scheme' content='light dark'>"
        f"<link rel='icon' href='data:,'><title>{escape(page.title)}</title>\n"
        f"<style>\n{styles}</style>\n<script>\n{asset('theme.js')}</script></head>\n"
        f"<body><header><div class='brand'>{LOGO}<span>hypersphere</span></div>"
        "<button type='button' id='theme' aria-label='Dark theme' aria-pressed='false'></button>"
        f"<h1>{unbroken(page.title)}</h1><p class='lead'>{escape(page.lead)}</p>{_contents_html(numbered)}</header>\n"
        f"<main>{sections}</main>\n"
        f"<footer>{f'<dl>{facts}</dl>' if facts else ''}</footer>\n"
        f"{f'<script type=module>{chr(10)}{scripts}</script>' if scripts else ''}</body></html>\n"
    )


def write_page(
    path: str | os.PathLike[str],
    *,
    title: str,
    lead: str,
    sections: Sequence[Section],
    meta: Mapping[str, str] | None = None,
) -> Path:
    """Write the page atomically and return its path; a failure leaves an existing file unchanged."""
    target = Path(path)
    html = page_html(Page(title, lead, sections, meta or {}))
    with replacing(target) as draft:
        draft.write_text(html, encoding="utf-8", errors="replace")  # an unpaired surrogate becomes "?"
    return target


def _section_html(number: int, section: Section) -> str:
    heading = f"<h2>{escape(section.title)}</h2>" if section.title else ""
    return f"<section id='section-{number}'>{heading}{_body_html(section, 3)}</section>\n"


def _body_html(section: Section, level: int) -> str:
    """Return a section without its heading; headings inside it have this level."""
    if type(section) in GROUPS:
        return GROUPS[type(section)][0](section, _body_html, min(level, 6))
    return SECTIONS[type(section)][0](section)


def _assets(section: Section) -> list[str]:
    if not isinstance(section, (Tabs, SideBySide, Stack)):
        return list(SECTIONS[type(section)][1])
    inner = [name for part in section.sections for name in _assets(part)]
    return [*inner, *GROUPS[type(section)][1]]


def _check(sections: Sequence[Any], where: str) -> None:
    for index, section in enumerate(sections):
        accepted = f"one of {', '.join(kind.__name__ for kind in (*SECTIONS, *GROUPS))}"
        is_known = type(section) in SECTIONS or type(section) in GROUPS
        require(is_known, f"{where}[{index}]", accepted, type(section).__name__)
        if type(section) in GROUPS:
            _check(section.sections, f"{where}[{index}].sections")


def _contents_html(numbered: Sequence[tuple[int, Section]]) -> str:
    links = [
        f"<li><a href='#section-{number}'>{escape(section.title)}</a></li>"
        for number, section in numbered
        if section.title
    ]
    long = len(links) > 3 or any(isinstance(section, Stack) for _, section in numbered)
    return f"<nav aria-label='Contents'><ul>{''.join(links)}</ul></nav>" if long and len(links) > 1 else ""
