"""Sections made of sections: behind tabs, side by side, or one under the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from hypersphere._validation import require

Render = Callable[[Any, int], str]  # a section and the level of headings inside it -> HTML


@dataclass(frozen=True)
class Tabs:
    """Sections of which one is seen at a time; all of them in print, and where there is no JavaScript.

    The tabs are named by the sections' titles. Arrow keys, Home and End go from tab to tab.
    """

    title: str
    sections: Sequence[Any]

    def __post_init__(self) -> None:
        require(len(self.sections) > 0, "sections", "at least one section", 0)
        for index, section in enumerate(self.sections):
            title = getattr(section, "title", None)
            known = title if isinstance(title, str) else type(section).__name__
            good = isinstance(title, str) and title.strip() != ""
            require(good, f"title of sections[{index}]", "a tab's name", known)


@dataclass(frozen=True)
class Beside:
    """Sections side by side where there is room, one under the other where there is not."""

    title: str
    sections: Sequence[Any]
    caption: str = ""


@dataclass(frozen=True)
class Stack:
    """Sections one under the other, each under its heading: what a tab holds that holds several."""

    title: str
    sections: Sequence[Any]
    caption: str = ""


def tabs_html(section: Tabs, render: Render, level: int) -> str:
    """Return all panels under their headings; assets/tabs.js makes tabs of them, unless there is but one."""
    panels = "".join(
        f"<div class='panel'><h{level}>{escape(inner.title)}</h{level}>{render(inner, level + 1)}</div>"
        for inner in section.sections
    )
    if len(section.sections) == 1:
        return panels
    return f"<div class='tabs' data-name='{escape(section.title)}'>{panels}</div>"


def beside_html(section: Beside, render: Render, level: int) -> str:
    """Return one cell a section."""
    cells = "".join(
        f"<div class='cell'>{f'<h{level}>{escape(inner.title)}</h{level}>' if inner.title else ''}"
        f"{render(inner, level + 1)}</div>"
        for inner in section.sections
    )
    caption = f"<p class='caption'>{escape(section.caption)}</p>" if section.caption else ""
    return f"<div class='beside'>{cells}</div>{caption}"


def stack_html(section: Stack, render: Render, level: int) -> str:
    """Return one block a section."""
    blocks = "".join(
        f"<div class='block'>{f'<h{level}>{escape(inner.title)}</h{level}>' if inner.title else ''}"
        f"{render(inner, level + 1)}</div>"
        for inner in section.sections
    )
    caption = f"<p class='caption'>{escape(section.caption)}</p>" if section.caption else ""
    return f"<div class='stack'>{blocks}</div>{caption}"
