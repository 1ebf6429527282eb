"""A section of plain words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Text:
    """Paragraphs, parted by blank lines in `body`; nothing in them is read as HTML."""

    title: str
    body: str


def text_html(section: Text) -> str:
    """Return the paragraphs.

    >>> text_html(Text("Notes", "One <b>.\\n\\nTwo."))
    '<p>One &lt;b&gt;.</p><p>Two.</p>'
    """
    paragraphs = (" ".join(block.split()) for block in section.body.split("\n\n"))
    return "".join(f"<p>{escape(paragraph)}</p>" for paragraph in paragraphs if paragraph)


def unbroken(words: str) -> str:
    """Return the words for HTML, those that end in a hyphen and a number, as rank-1 and CNN-6, each on one line.

    >>> unbroken("CNN-6 & more")
    "<span class='whole'>CNN-6</span> &amp; more"
    """
    return re.sub(r"\w+-\d\S*", lambda found: f"<span class='whole'>{found[0]}</span>", escape(words))
