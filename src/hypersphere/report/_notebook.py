"""Display sections and pages in notebooks."""

from __future__ import annotations

from html import escape


class Displayable:
    """A section or page that a notebook displays in a frame, whose styles cannot reach the notebook."""

    def _repr_html_(self) -> str:
        from hypersphere.report.page import Page, page_html

        page = self if isinstance(self, Page) else Page("", "", [self])  # type: ignore[list-item]
        fit = "this.style.height=(this.contentDocument.documentElement.scrollHeight+24)+'px'"
        style = "width:100%;height:480px;border:0"
        return f'<iframe style="{style}" onload="{fit}" srcdoc="{escape(page_html(page))}"></iframe>'
