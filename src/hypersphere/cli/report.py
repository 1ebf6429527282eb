"""`hypersphere report`: write one HTML file from runs, from the records of recipes, or from both."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.status import Status

from hypersphere import report as pages
from hypersphere._validation import require
from hypersphere.cli.opening import device_of
from hypersphere.cli.run_page import run_page
from hypersphere.cli.run_study import study
from hypersphere.cli.summary import current_records, record_page, write_page_of
from hypersphere.cli.target import check_target
from hypersphere.cli.words import joined_facts
from hypersphere.recipes import RECIPES, Recipe, Record, read_records
from hypersphere.training.job_run import CONFIG, Run

__all__ = ["report"]

MOST_NAMED = 3  # number of studies that are named in the title


def report(
    folders: Sequence[Path],
    out: Path | None = None,
    *,
    landscape: bool = False,
    device: str | None = None,
    data_root: Path | None = None,
) -> Path:
    """Write the page and return its path; for one folder of records, also write table.md and figure.svg.

    Args:
        folders: runs of `train`, or folders of records of `reproduce`.
        out: HTML file to write, without table.md and figure.svg; by default `report.html` in the folder, or in the
            working directory if there are several folders.
        landscape: compute the loss and error around the trained weights of each run.
        device: device for the computations.
        data_root: folder of the data sets.
    """
    require(bool(folders), "folders", "at least one run or folder of records", list(folders))
    target = out or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    check_target("--out", target, [".html"])
    runs = [Run.open(folder) for folder in folders if (folder / CONFIG).exists()]
    recorded = [_usable_records(folder) for folder in folders if not (folder / CONFIG).exists()]
    if out is None and len(recorded) == len(folders) == 1:
        write_page_of(*recorded[0])
    else:
        page = _joined([*_run_pages(runs, landscape, device, data_root), *(_page_of(*one) for one in recorded)])
        pages.write_page(target, title=page.title, lead=page.lead, sections=page.sections, meta=page.meta)
    print(f"Report: {target}", flush=True)
    return target


def _run_pages(
    runs: Sequence[Run], landscape: bool, device: str | None, data_root: Path | None
) -> Iterator[pages.Page]:
    """Yield one page for all runs, if there are any."""
    if runs:
        where, console, studies = device_of(device), Console(stderr=True), []
        for run in runs:
            with Status(f"evaluating {run.folder}", console=console):
                studies.append(study(run, data_root, landscape=landscape, device=where))
        yield run_page(studies)


def _usable_records(folder: Path) -> tuple[Recipe, list[Record], Path]:
    """Return the recipe and the records of a folder: those that match the current settings of the recipe, if any.

    A message names the records that are left out, or says that no record matches the current settings.
    """
    where = folder.resolve()
    records = read_records(where.parent, where.name)
    accepted = f"a run of `hypersphere train` (with a {CONFIG}) or a folder of records of `hypersphere reproduce`"
    require(bool(records), "folders", accepted, str(folder))
    name = records[0].recipe
    require(name in RECIPES, f"recipe of {folder}", f"one of {', '.join(RECIPES)}", name)
    recipe = RECIPES[name]
    rows = {row.name for row in recipe.rows}
    current = current_records(recipe, records)
    usable = current or [record for record in records if record.row in rows]
    require(bool(usable), f"rows of {folder}", f"rows of {name}: {', '.join(rows)}", sorted({r.row for r in records}))
    if not current:
        _say(f"{folder} was made with settings that differ from the current ones of {name}")
    elif others := sorted({record.row for record in records if record not in current}):
        _say(f"{folder}: ignoring records whose settings differ from the current ones of {name}: {', '.join(others)}")
    return recipe, usable, where


def _say(message: str) -> None:
    print(f"hypersphere: {message}", file=sys.stderr)


def _page_of(recipe: Recipe, records: Sequence[Record], folder: Path) -> pages.Page:
    return record_page(recipe, records, folder.parent)


def _joined(joined: Sequence[pages.Page]) -> pages.Page:
    """Join several pages into one, with one section per page."""
    if len(joined) == 1:
        return joined[0]
    sections = [pages.Stack(page.title, [pages.Text("", page.lead), *page.sections]) for page in joined]
    titles = [page.title for page in joined]
    title = f"{', '.join(titles[:-1])} and {titles[-1]}" if len(titles) <= MOST_NAMED else f"{len(titles)} studies"
    lead = f"{len(joined)} studies."
    return pages.Page(title, lead, sections, joined_facts(page.meta for page in joined))
