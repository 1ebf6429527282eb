"""Embed assets of this package and JSON data in the HTML file."""

from __future__ import annotations

import json
from importlib import resources


def asset(name: str) -> str:
    """Return the text of a file in `assets/`."""
    return (resources.files("hypersphere.report") / "assets" / name).read_text(encoding="utf-8")


def json_script(data: object) -> str:
    r"""Return data as a script element that no string in it can close: every < is written \u003c.

    >>> json_script(["</script>"])
    '<script type="application/json">["\\u003c/script>"]</script>'
    """
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("<", r"\u003c")
    return f'<script type="application/json">{text}</script>'
