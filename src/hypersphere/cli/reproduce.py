"""`hypersphere reproduce`: run a recipe under a progress bar, print its table, write its report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hypersphere import report
from hypersphere.cli.config import json_or_text
from hypersphere.cli.report import results_of, write_report
from hypersphere.recipes import RECIPES, Recipe, Row, execute
from hypersphere.training.parts import nearest

__all__ = ["reproduce"]


def reproduce(
    name: str,
    out: Path,
    *,
    seeds: int | None,
    rows: list[str] | None,
    assignments: Sequence[str],
    threads: int | None,
    data_root: Path | None,
) -> None:
    """Run the recipe, print its table, write its report and print the name of the report."""
    if name not in RECIPES:
        message = f"name must be one of {', '.join(RECIPES)}, not {name!r}{nearest(name, RECIPES)}"
        raise ValueError(message.removesuffix("."))
    recipe = RECIPES[name]
    if threads:
        torch.set_num_threads(threads)
    chosen = tuple(range(seeds)) if seeds else recipe.seeds
    overrides = dict(_assignment(text) for text in assignments)
    console = Console()
    with _Bar(console, recipe, chosen, rows) as bar:
        records = execute(
            recipe, out, seeds=chosen, rows=rows, overrides=overrides, data_root=data_root, on_progress=bar
        )
    page = write_report(recipe, records, out)  # before printing, so that a closed pipe cannot prevent it
    report.print_table(report.summary_table(results_of(recipe, records, out)), console)
    console.print(f"\nReport: {page}", highlight=False, markup=False, soft_wrap=True)


def _assignment(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set must be KEY=VALUE, not {text!r}")
    return key, json_or_text(value)


class _Bar:
    """A live progress bar on a terminal; elsewhere one plain line per finished row."""

    def __init__(self, console: Console, recipe: Recipe, seeds: Sequence[int], rows: list[str] | None) -> None:
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
