"""MkDocs hook: show the tables and figures of `results/`, outside of the docs folder, as pages of the site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

RESULTS = Path(__file__).parent.parent / "results"
SHOWN = ("table.md", "figure.svg")


def on_files(files: Any, config: Any) -> Any:
    """Add the table and the figure of each recipe with records as `results/NAME/…`."""
    for path in sorted(RESULTS.glob("*/*")):
        if path.name in SHOWN:
            source = f"results/{path.parent.name}/{path.name}"
            files.append(File.generated(config, source, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links of the page of evidence lead to these pages. In the repository they lead to the files."""
    if page.file.src_uri.startswith("results/"):
        page.meta.setdefault("search", {"exclude": True})
    return (
        markdown.replace("](../results/", "](results/")
        if page.file.src_uri == "evidence.md"
        else markdown
    )
