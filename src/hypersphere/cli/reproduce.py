"""`hypersphere reproduce`: run a recipe, print its table and write its report."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from hypersphere.cli import options
from hypersphere.cli.output import print_line, warn
from hypersphere.cli.settings import assignment, fill_lines, json_block, settings_json

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
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the settings that the rows share and those that differ; run nothing."),
    ] = False,
    device: options.Device = None,
    threads: options.Threads = None,
    data_root: options.DataRoot = None,
) -> None:
    """Reproduce a table or figure of the sources, row by row; rows that already have a record are not run again."""
    from rich.console import Console

    from hypersphere import recipes, report

    recipe = recipes.find_recipe(name)
    chosen_rows, chosen_seeds = recipe.selected(scale, rows or None, range(seeds) if seeds else None)
    names = [row.name for row in chosen_rows]
    overrides = dict(map(assignment, assignments or []))
    if dry_run:
        plan = recipes.plan(recipe, scale=scale, rows=names, seeds=chosen_seeds, overrides=overrides)
        print_line(_plan_json(plan))
        return

    from hypersphere.cli.progress import recipe_progress
    from hypersphere.cli.recipe_results import recipe_results, write_report
    from hypersphere.training import interrupts, process_group

    console, is_first = Console(), int(os.environ.get("RANK", 0)) == 0
    bar: AbstractContextManager[Callable[..., None]] = nullcontext(lambda row, seed, fraction: None)
    if is_first:  # only the first process prints
        bar = recipe_progress(console, len(names) * len(chosen_seeds))
    with interrupts() as signals, process_group(device) as torch_device, bar as on_progress:
        signals.deferred = recipe.compute is None  # training stops after a step; other computations stop at once
        records = recipes.execute(
            recipe,
            out,
            scale=scale,
            rows=names,
            seeds=chosen_seeds,
            overrides=overrides,
            device=torch_device,
            data_root=data_root,
            on_progress=on_progress,
            stop=lambda: signals.received,
            on_message=warn if is_first else lambda message: None,
        )
        if signals.received:
            raise KeyboardInterrupt
    if is_first:
        page = write_report(recipe, records, out)  # before printing, so that a closed pipe cannot prevent it
        report.print_table(report.summary_table(recipe_results(recipe, records, out)), console)
        print_line(f"\nReport: {page}")


def _plan_json(plan: Mapping[str, Any]) -> str:
    """Return a plan as JSON with few lines, see `settings_json`."""
    rows = [f"{json.dumps(name)}: {settings_json(settings, 3)}" for name, settings in plan["rows"].items()]
    blocks = {
        "shared": settings_json(plan["shared"], 2),
        "rows": json_block(rows, 2),
        "parameters": json_block(fill_lines(plan["parameters"]), 2),
    }
    return json_block([f"{json.dumps(key)}: {blocks.get(key) or json.dumps(value)}" for key, value in plan.items()], 1)
