"""A section of plain text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Text:
    """Paragraphs, separated by blank lines in `body`; HTML in them is escaped."""

    title: str
    body: str


def text_html(section: Text) -> str:
    """Return the paragraphs as HTML.

    >>> text_html(Text("Notes", "One <b>.\\n\\nTwo."))
    '<p>One &lt;b&gt;.</p><p>Two.</p>'
    """
    paragraphs = (" ".join(block.split()) for block in section.body.split("\n\n"))
    return "".join(f"<p>{escape(paragraph)}</p>" for paragraph in paragraphs if paragraph)


def unbroken(words: str) -> str:
    """Escape text for HTML and prevent line breaks within words such as rank-1 and CNN-6.

    >>> unbroken("CNN-6 & more")
    "<span class='whole'>CNN-6</span> &amp; more"
    """
    return re.sub(r"\w+-\d\S*", lambda match: f"<span class='whole'>{match[0]}</span>", escape(words))
