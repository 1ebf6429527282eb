"""`hypersphere report`: one HTML file from runs, from the records of recipes, or from both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.status import Status

from hypersphere import report as pages
from hypersphere.cli.run_page import run_page
from hypersphere.cli.run_study import study
from hypersphere.cli.summary import current_records, record_page
from hypersphere.cli.target import check_target
from hypersphere.functions.menu import require
from hypersphere.recipes import RECIPES, read_records
from hypersphere.training.run import CONFIG, Run

__all__ = ["report"]


def report(
    folders: Sequence[Path],
    out: Path | None = None,
    *,
    landscape: bool = False,
    data_root: Path | None = None,
) -> Path:
    """Write the page and return its path.

    Args:
        folders: runs of `train`, or folders of records of `reproduce`.
        out: the file; `report.html` in the folder if that is one, in the working directory if there are several.
        landscape: whether to measure loss and error around the trained weights of every run.
        data_root: where data sets lie.
    """
    require(bool(folders), "folders", "at least one run or folder of records", list(folders))
    target = out or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    check_target("--out", target, [".html"])
    runs = [Run.open(folder) for folder in folders if (folder / CONFIG).exists()]
    recorded = [folder for folder in folders if not (folder / CONFIG).exists()]
    found = [_records_page(folder) for folder in recorded]
    console = Console(stderr=True)
    studies = []
    for run in runs:
        with Status(f"measuring {run.folder}", console=console):
            studies.append(study(run, data_root, landscape=landscape))
    if studies:
        found.insert(0, run_page(studies))
    page = found[0] if len(found) == 1 else _joined(found)
    path = pages.write_page(target, title=page.title, lead=page.lead, sections=page.sections, meta=page.meta)
    print(f"Report: {path}", flush=True)
    return path


def _records_page(folder: Path) -> pages.Page:
    """The page of a folder that `reproduce` made."""
    where = folder.resolve()
    records = read_records(where.parent, where.name)
    accepted = f"a run of `hypersphere train` (with a {CONFIG}) or a folder of records of `hypersphere reproduce`"
    require(bool(records), "folders", accepted, str(folder))
    name = records[0].recipe
    require(name in RECIPES, f"recipe of {folder}", f"one of {', '.join(RECIPES)}", name)
    recipe = RECIPES[name]
    rows = {row.name for row in recipe.rows}
    known = current_records(recipe, records) or [record for record in records if record.row in rows]
    require(bool(known), f"rows of {folder}", f"rows of {name}: {', '.join(rows)}", sorted({r.row for r in records}))
    return record_page(recipe, known, where.parent)


def _joined(found: Sequence[pages.Page]) -> pages.Page:
    """Several pages as one, each a section of its own."""
    sections = [pages.Stack(page.title, [pages.Text("", page.lead), *page.sections]) for page in found]
    return replace(found[0], title="Report", lead=f"{len(found)} studies.", sections=sections)
