"""`hypersphere reproduce`: run a recipe under a progress bar, print its table, write its report."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hypersphere.cli.options import DataRoot, Device, Threads
from hypersphere.cli.output import print_line, warn
from hypersphere.cli.settings import assignment

if TYPE_CHECKING:
    from rich.console import Console

    from hypersphere.recipes import Recipe, Row

__all__ = ["reproduce"]


def reproduce(
    name: Annotated[
        str, typer.Argument(help="A recipe, see `hypersphere list recipes`, or a table that it covers, such as T6.1.")
    ] = "digits",
    scale: Annotated[str, typer.Option(help="Size of the experiment: paper, cpu or smoke.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder to write records and report to.")] = Path("runs"),
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds; default: that of the recipe.")] = None,
    rows: Annotated[list[str] | None, typer.Option("--row", help="Run only this row; can be repeated.")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting in all rows: KEY=VALUE, for example epochs=5.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the settings of the rows and run nothing.")] = False,
    device: Device = None,
    threads: Threads = None,
    data_root: DataRoot = None,
) -> None:
    """Reproduce a table or figure of the sources, row by row; rows that already have a record are not run again."""
    from rich.console import Console

    from hypersphere import recipes, report

    recipe = recipes.find_recipe(name)
    chosen = tuple(range(seeds)) if seeds else recipe.seeds
    overrides = dict(map(assignment, assignments or []))
    if dry_run:
        print(json.dumps(_plan(recipe, scale, rows or [row.name for row in recipe.rows], chosen, overrides), indent=1))
        return

    from hypersphere.cli.processes import process_group
    from hypersphere.cli.recipe_results import results_of, write_report
    from hypersphere.cli.signals import interrupts

    console = Console()
    with interrupts() as signals, process_group(device) as where, _Bar(console, recipe, chosen, rows or None) as bar:
        signals.deferred = recipe.compute is None  # training stops after a step; other computations stop at once
        records = recipes.execute(
            recipe,
            out,
            scale=scale,
            rows=rows or None,
            seeds=chosen,
            overrides=overrides,
            device=where,
            data_root=data_root,
            on_progress=bar,
            stop=lambda: signals.came,
            say=warn,
        )
        if signals.came:
            raise KeyboardInterrupt
    if int(os.environ.get("RANK", 0)) == 0:
        page = write_report(recipe, records, out)  # before printing, so that a closed pipe cannot prevent it
        report.print_table(report.summary_table(results_of(recipe, records, out)), console)
        print_line(f"\nReport: {page}")


def _plan(
    recipe: Recipe, scale: str, rows: Sequence[str], seeds: Sequence[int], overrides: dict[str, Any]
) -> dict[str, Any]:
    """Return what would be run, as plain data."""
    settings = {row: recipe.settings(row, scale, overrides, seeds[0]) for row in rows}
    cost = {"core_hours_of_all_rows": recipe.cost.get(scale)}
    return {"recipe": recipe.name, "scale": scale, "seeds": list(seeds), **cost, "rows": settings}


class _Bar:
    """A live progress bar on a terminal; elsewhere one plain line per finished row."""

    def __init__(self, console: Console, recipe: Recipe, seeds: Sequence[int], rows: list[str] | None) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self.live = console.is_terminal
        self.total = len(seeds) * (len(set(rows)) if rows else len(recipe.rows))
        self.done = 0
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )

    def __enter__(self) -> _Bar:
        if self.live:
            self.progress.start()
            self.task = self.progress.add_task("", total=self.total)
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.progress.stop()

    def __call__(self, row: Row, seed: int, part: float) -> None:
        if self.live:
            self.progress.update(self.task, description=f"{row.name}, seed {seed}", completed=self.done + part)
        if part >= 1:
            self.done += 1
            if not self.live:
                print(f"[{self.done}/{self.total}] {row.name}, seed {seed}", file=sys.stderr, flush=True)
