"""Sections that contain sections: tabs, side by side, or stacked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from hypersphere._validation import require

Render = Callable[[Any, int], str]  # a section and the level of headings inside it -> HTML


@dataclass(frozen=True)
class Tabs:
    """Sections of which one is visible at a time; all are visible in print and without JavaScript.

    The titles of the sections are the names of the tabs. Arrow keys, Home and End switch tabs.
    """

    title: str
    sections: Sequence[Any]

    def __post_init__(self) -> None:
        require(len(self.sections) > 0, "sections", "at least one section", 0)
        for index, section in enumerate(self.sections):
            title = getattr(section, "title", None)
            value = title if isinstance(title, str) else type(section).__name__
            is_name = isinstance(title, str) and title.strip() != ""
            require(is_name, f"title of sections[{index}]", "a non-empty name for its tab", value)


@dataclass(frozen=True)
class SideBySide:
    """Sections side by side if there is room, stacked otherwise."""

    title: str
    sections: Sequence[Any]
    caption: str = ""


@dataclass(frozen=True)
class Stack:
    """Stacked sections, each with its heading, for example the content of one tab."""

    title: str
    sections: Sequence[Any]
    caption: str = ""


def tabs_html(section: Tabs, render: Render, level: int) -> str:
    """Return all panels with their headings; assets/tabs.js turns them into tabs if there are several."""
    panels = "".join(
        f"<div class='panel'><h{level}>{escape(inner.title)}</h{level}>{render(inner, level + 1)}</div>"
        for inner in section.sections
    )
    if len(section.sections) == 1:
        return panels
    return f"<div class='tabs' data-name='{escape(section.title)}'>{panels}</div>"


def side_by_side_html(section: SideBySide, render: Render, level: int) -> str:
    """Return one cell per section."""
    cells = "".join(
        f"<div class='cell'>{f'<h{level}>{escape(inner.title)}</h{level}>' if inner.title else ''}"
        f"{render(inner, level + 1)}</div>"
        for inner in section.sections
    )
    caption = f"<p class='caption'>{escape(section.caption)}</p>" if section.caption else ""
    return f"<div class='side-by-side'>{cells}</div>{caption}"


def stack_html(section: Stack, render: Render, level: int) -> str:
    """Return one block per section."""
    blocks = "".join(
        f"<div class='block'>{f'<h{level}>{escape(inner.title)}</h{level}>' if inner.title else ''}"
        f"{render(inner, level + 1)}</div>"
        for inner in section.sections
    )
    caption = f"<p class='caption'>{escape(section.caption)}</p>" if section.caption else ""
    return f"<div class='stack'>{blocks}</div>{caption}"
