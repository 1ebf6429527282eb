"""MkDocs hook: list the pages of decisions last in search results. Most readers search for what to do, not for why."""

from __future__ import annotations

from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lower the rank of a decision in the search index."""
    if page.file.src_uri.startswith("adr/"):
        page.meta.setdefault("search", {"boost": 0.2})
    return markdown
