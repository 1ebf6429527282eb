"""`hypersphere report`: one HTML file from runs, from the records of recipes, or from both."""

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
from hypersphere.training.run import CONFIG, Run

__all__ = ["report"]

MOST_NAMED = 3  # studies in the title


def report(
    folders: Sequence[Path],
    out: Path | None = None,
    *,
    landscape: bool = False,
    device: str | None = None,
    data_root: Path | None = None,
) -> Path:
    """Write the page and return its path; of one folder of records, the table as Markdown and the figure beside it.

    Args:
        folders: runs of `train`, or folders of records of `reproduce`.
        out: the file, and nothing else; if None, `report.html` in the folder if that is one, in the working directory
            if there are several.
        landscape: whether to measure loss and error around the trained weights of every run.
        device: where to measure runs.
        data_root: where data sets lie.
    """
    require(bool(folders), "folders", "at least one run or folder of records", list(folders))
    target = out or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    check_target("--out", target, [".html"])
    runs = [Run.open(folder) for folder in folders if (folder / CONFIG).exists()]
    recorded = [_known_records(folder) for folder in folders if not (folder / CONFIG).exists()]
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
    """One page of all runs, if there are any."""
    if runs:
        where, console, studies = device_of(device), Console(stderr=True), []
        for run in runs:
            with Status(f"measuring {run.folder}", console=console):
                studies.append(study(run, data_root, landscape=landscape, device=where))
        yield run_page(studies)


def _known_records(folder: Path) -> tuple[Recipe, list[Record], Path]:
    """The recipe and the records of a folder that `reproduce` made: those that it would make today, if there are any.

    What is left out, or is all of other settings than the recipe's, is told.
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
    known = current or [record for record in records if record.row in rows]
    require(bool(known), f"rows of {folder}", f"rows of {name}: {', '.join(rows)}", sorted({r.row for r in records}))
    if not current:
        _say(f"{folder} was made with other settings than those of {name} now")
    elif others := sorted({record.row for record in records if record not in current}):
        _say(f"{folder} has records of other settings than those of {name} now, left out: {', '.join(others)}")
    return recipe, known, where


def _say(words: str) -> None:
    print(f"hypersphere: {words}", file=sys.stderr)


def _page_of(recipe: Recipe, records: Sequence[Record], folder: Path) -> pages.Page:
    return record_page(recipe, records, folder.parent)


def _joined(found: Sequence[pages.Page]) -> pages.Page:
    """Several pages as one, each a section of its own, with all their facts."""
    if len(found) == 1:
        return found[0]
    sections = [pages.Stack(page.title, [pages.Text("", page.lead), *page.sections]) for page in found]
    titles = [page.title for page in found]
    title = f"{', '.join(titles[:-1])} and {titles[-1]}" if len(titles) <= MOST_NAMED else f"{len(titles)} studies"
    lead = f"{len(found)} studies, one under the other."
    return pages.Page(title, lead, sections, joined_facts(page.meta for page in found))
