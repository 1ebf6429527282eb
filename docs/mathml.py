"""MkDocs hook: replace TeX formulas with MathML while the site is built.

Browsers draw MathML without a script, so the pages need no network and no JavaScript for their formulas.
`pymdownx.arithmatex` (with `generic: true`) finds the formulas; this hook converts them. `\\tag{2.20}` becomes a number
at the right margin.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.S)
DISPLAY = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.S)
TAG = re.compile(r"\\tag\{([^}]*)\}")

# Corrections of spacing. MathML takes an operator for infix unless it opens its row, spaces a slash like a plus sign,
# and puts nothing between a function's name and its argument. Bars stretch to the height of the row by default.
_OPENING = "(?:&#x00028;|&#x0005B;|&#x0003D;|&#x0002C;|&#x0007B;)"
_BARS = r"<(mo|mi)>(&#x02225;|&#x02016;|&#x0007C;|\|)</\1>"
_FUNCTIONS = r"(?<!<msup>)(?<!<msub>)(<mi>(?:arccos|cos|sin|tanh|log|exp)</mi>)"
CORRECTIONS = [
    (
        re.compile(rf"(<mo[^>]*>{_OPENING}</mo>)<mo>(&#x02212;|&#x000B1;)</mo>"),
        r'\1<mo form="prefix">\2</mo>',
    ),
    (re.compile(r"<mo>&#x0002F;</mo>"), '<mo lspace="0" rspace="0">&#x0002F;</mo>'),
    (re.compile(r"<mo>(min|max)</mo>"), r"<mi>\1</mi>"),
    (re.compile(_BARS), r'<mo stretchy="false" lspace="0" rspace="0">\2</mo>'),
    (
        re.compile(_FUNCTIONS + r'(?!<mo stretchy="false">&#x00028;|</m)'),
        r'\1<mspace width="0.17em" />',
    ),
]


def _mathml(tex: str, display: str) -> str:
    markup = convert(html.unescape(tex).strip(), display=display)
    for pattern, replacement in CORRECTIONS:
        markup = pattern.sub(replacement, markup)
    # The search index keeps the text of a page. The letters of a long formula would only clutter it, but a sentence
    # without its inline formulas cannot be read.
    if display == "block":
        markup = markup.replace("<math ", "<math data-search-exclude ", 1)
    return markup


def _display(match: re.Match[str]) -> str:
    tag = TAG.search(match[1])
    number = f'<span class="number">({html.escape(tag[1])})</span>' if tag else ""
    return (
        f'<div class="formula">{_mathml(TAG.sub("", match[1]), "block")}{number}</div>'
    )


def on_page_content(content: str, **_: Any) -> str:
    """Convert every formula of a page."""
    return INLINE.sub(
        lambda match: _mathml(match[1], "inline"), DISPLAY.sub(_display, content)
    )
