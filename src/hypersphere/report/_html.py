"""Parts of HTML documents: assets, escaped text, data, and frames in notebooks."""

from __future__ import annotations

import html
import json
import re
from functools import cache
from importlib import resources
from string import Template

from hypersphere._validation import printable
from hypersphere.report._text import printable_data

COUNTED = ("columns", "rows", "images", "spheres", "sections")  # attributes whose lengths a repr shows


@cache
def asset(name: str) -> str:
    """Return the text of a style sheet, a script or a template."""
    return (resources.files("hypersphere.report") / "assets" / name).read_text(encoding="utf-8")


def fill_template(name: str, **parts: str) -> str:
    """Return an HTML template in which each $name is replaced by the part with this name."""
    return Template(asset(name)).substitute(parts)


def escape(words: object) -> str:
    """Escape text for HTML, with control characters written as escape sequences."""
    return html.escape(printable(str(words)))


def prose(words: str) -> str:
    """Escape a paragraph for HTML and show text between backticks as code.

    >>> prose("call `head(x, y)` & wait")
    'call <code>head(x, y)</code> &amp; wait'
    """
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(words))


def element(tag: str, kind: str, words: str) -> str:
    """Return an HTML element of the CSS class `kind` with escaped text, or "" if there is no text.

    >>> element("p", "note", "a < b"), element("p", "note", "")
    ("<p class='note'>a &lt; b</p>", '')
    """
    return f"<{tag} class='{kind}'>{escape(words)}</{tag}>" if words else ""


def unbroken(words: str) -> str:
    """Escape text for HTML and prevent line breaks within words such as rank-1 and CNN-6.

    >>> unbroken("CNN-6 & more")
    "<span class='whole'>CNN-6</span> &amp; more"
    """
    return re.sub(r"\w+-\d\S*", lambda match: f"<span class='whole'>{match[0]}</span>", escape(words))


def json_script(data: object) -> str:
    r"""Return data as a script element that no string in it can close: every < is written \u003c.

    >>> json_script(["</script>"])
    '<script type="application/json">["\\u003c/script>"]</script>'
    """
    text = json.dumps(printable_data(data), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    text = text.replace("<", r"\u003c")
    return f'<script type="application/json">{text}</script>'


class Displayable:
    """A section or page that a notebook displays in a frame, so that styles do not affect the notebook.

    Its repr is short: the title and the number of parts, not the data.
    """

    title: str

    def __repr__(self) -> str:
        counts = {name: len(getattr(self, name)) for name in COUNTED if hasattr(self, name)}
        sizes = [f"{count} {name[: len(name) - (count == 1)]}" for name, count in counts.items()]
        return f"{type(self).__name__}({', '.join([repr(self.title), *sizes])})"

    def _repr_html_(self) -> str:
        from hypersphere.report.page import Page, page_html

        page = self if isinstance(self, Page) else Page("", "", [self])  # type: ignore[list-item]
        fit_height = "this.style.height=(this.contentDocument.documentElement.scrollHeight+24)+'px'"
        style = "width:100%;height:480px;border:0"
        return f'<iframe style="{style}" onload="{fit_height}" srcdoc="{html.escape(page_html(page))}"></iframe>'
