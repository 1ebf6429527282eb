"""`hypersphere reproduce`: run a recipe under a progress bar, print its table, write its report."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hypersphere import report
from hypersphere.recipes import RECIPES, Recipe, Record, Row, execute, read_tensors

__all__ = ["reproduce", "summary_table"]


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
    """Run the recipe, print one table and write one HTML file; name the file at the end."""
    if name not in RECIPES:
        raise ValueError(f"name must be one of {', '.join(RECIPES)}, not {name!r}")
    recipe = RECIPES[name]
    if threads:
        torch.set_num_threads(threads)
    if data_root:
        os.environ["HYPERSPHERE_DATA"] = str(data_root)
    folder = out / recipe.name
    _require_writable(folder)
    chosen = tuple(range(seeds)) if seeds else recipe.seeds
    overrides = dict(_assignment(text) for text in assignments)
    console = Console()
    with _Bar(console, recipe, chosen, rows) as bar:
        records = execute(recipe, out, seeds=chosen, rows=rows, overrides=overrides, on_progress=bar)
    table = summary_table(recipe, records)
    report.print_table(table, console)
    page = report.write_page(
        folder / "report.html",
        title=recipe.title,
        lead=f"{recipe.note} ({recipe.reference[:1].upper()}{recipe.reference[1:]}.)",
        sections=[table, *_spheres(recipe, records, out)],
        meta=_meta(records),
    )
    console.print(f"\nReport: {page}", highlight=False, soft_wrap=True)


def summary_table(recipe: Recipe, records: Sequence[Record]) -> report.Table:
    """The recipe's table: mean ± s.d. over seeds, the source's own numbers in a column beside ours where it has any."""
    columns = [report.Column("method")]
    for metric in recipe.metrics:
        columns.append(report.Column(metric.heading, metric.higher_is_better, metric.format))
        if any(metric.key in row.paper for row in recipe.rows):
            columns.append(report.Column(f"{metric.heading}, source", None, metric.format))
    body: list[list[Any]] = []
    for row in recipe.rows:
        of_row = [record for record in records if record.row == row.name]
        if not of_row:
            continue
        cells: list[Any] = [row.name]
        for metric in recipe.metrics:
            values = [record.metrics[metric.key] for record in of_row if metric.key in record.metrics]
            spread = statistics.stdev(values) if len(values) > 1 else None
            mean = statistics.fmean(values) if values else None
            cells.append(mean if spread is None else (mean, spread))
            if any(metric.key in other.paper for other in recipe.rows):
                cells.append(row.paper.get(metric.key))
        body.append(cells)
    counts = sorted({sum(record.row == row.name for record in records) for row in recipe.rows} - {0})
    seeds = "one seed" if counts == [1] else f"{'–'.join(map(str, counts))} seeds, mean ± s.d."
    return report.Table("Results", columns, body, caption=f"{seeds}.")


def _spheres(recipe: Recipe, records: Sequence[Record], out: Path) -> list[report.Section]:
    """One sphere a row, of its first seed, where the run kept features of two or three dimensions."""
    pictures, drawn = [], set()
    for record in records:
        tensors = read_tensors(out, record)
        if record.row in drawn or "features" not in tensors or tensors["features"].shape[1] > 3:
            continue
        drawn.add(record.row)
        numbers = ", ".join(
            f"{m.heading} {record.metrics[m.key]:{m.format}}" for m in recipe.metrics[:2] if m.key in record.metrics
        )
        pictures.append(
            report.Sphere(
                record.row, tensors["features"], tensors["labels"], tensors.get("class_vectors"), caption=numbers
            )
        )
    if not pictures:
        return []
    caption = "Test features by direction, one colour a class; the spikes are the class vectors."
    return [report.Spheres("Features on the unit sphere", pictures, caption=caption)]


def _meta(records: Sequence[Record]) -> dict[str, str]:
    last = records[-1]
    return {
        **last.versions,
        "commit": last.commit or "none",
        "machine": f"{last.machine}, {last.threads} threads",
        "seconds in all": f"{sum(record.seconds for record in records):.0f}",
    }


def _assignment(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set must be KEY=VALUE, not {text!r}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _require_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"out must be a folder that can be written to, not {folder}: {error.strerror}") from None


class _Bar:
    """A live progress bar on a terminal; one plain line a finished row elsewhere."""

    def __init__(self, console: Console, recipe: Recipe, seeds: Sequence[int], rows: list[str] | None) -> None:
        self.live = console.is_terminal
        self.total = len(seeds) * (len(rows) if rows else len(recipe.rows))
        self.done = 0
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(), console=console
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
