"""`hypersphere report`: write one HTML file from runs, from the records of recipes, or from both."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hypersphere._validation import require
from hypersphere.cli import options
from hypersphere.cli.output import check_target, print_line

__all__ = ["report"]


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Folders of runs of `train`, or of records of `reproduce`.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="HTML file to write; default: report.html in RUN, or in the current folder for several runs."
        ),
    ] = None,
    landscape: Annotated[
        bool, typer.Option("--landscape", help="Also compute the loss and error around the trained weights.")
    ] = False,
    step: options.Step = None,
    device: options.Device = None,
    threads: options.Threads = None,
    data_root: options.DataRoot = None,
    trust_code: options.TrustCode = False,
) -> None:
    """Write an HTML report of one or several runs: curves, features on the sphere, angles, layers.

    For a folder of records, table.md and figure.svg are also written. Nothing is trained.
    """
    from rich.console import Console
    from rich.status import Status

    from hypersphere import report as pages
    from hypersphere.cli.opening import open_run
    from hypersphere.cli.recipe_results import stored_results

    runs = [folder for folder in folders if options.is_run(folder)]
    require(step is None or bool(runs), "--step", "omitted without the folder of a run", step)
    recipes = [stored_results(folder) for folder in folders if folder not in runs]
    target = out or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    check_target("--out", target, [".html"])
    if out is None and len(recipes) == len(folders) == 1:
        for name in ("table.md", "figure.svg"):
            # Neither has the mark, but both contain the title of the recipe.
            check_target("--out", folders[0] / name, [".md", ".svg"], mark=recipes[0].title)
        pages.write_recipe_page(recipes[0], folders[0])
    else:
        recipe_pages = [pages.recipe_page(recipe) for recipe in recipes]
        console, results = Console(stderr=True), []
        for folder in runs:
            with Status(f"evaluating {folder}", console=console):
                opened = open_run(folder, data_root, step=step, device=device, trust_code=trust_code)
                # The page names the step only if it is not the last one.
                shown_step = None if opened.step == opened.run.checkpoints().steps()[-1] else opened.step
                results.append(pages.run_result(opened.run, opened.experiment, landscape=landscape, step=shown_step))
        run_pages = [pages.run_page(results)] if results else []
        pages.write_page(target, pages.join_pages([*run_pages, *recipe_pages]))
    print_line(f"Report: {target}")
