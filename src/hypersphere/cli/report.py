"""`hypersphere report`: write one HTML file from runs, from the records of recipes, or from both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hypersphere._validation import require
from hypersphere.cli.options import DataRoot, Device, Threads, TrustCode
from hypersphere.cli.output import check_target, print_line

if TYPE_CHECKING:
    from hypersphere.report import RecipeResults

__all__ = ["report"]


def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs of `train`, or of records of `reproduce`.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="HTML file to write; default: report.html in the folder, or in the current one for several folders."
        ),
    ] = None,
    landscape: Annotated[
        bool, typer.Option("--landscape", help="Also compute the loss and error around the trained weights.")
    ] = False,
    device: Device = None,
    threads: Threads = None,
    data_root: DataRoot = None,
    trust_code: TrustCode = False,
) -> None:
    """Write an HTML report of one or several runs: curves, features on the sphere, angles, layers.

    For a folder of records, table.md and figure.svg are also written. Nothing is trained.
    """
    from rich.console import Console
    from rich.status import Status

    from hypersphere import report as pages
    from hypersphere.cli.run_result import run_result
    from hypersphere.training.run import CONFIG

    require(bool(folders), "folders", "at least one run or folder of records", list(folders))
    target = out or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    check_target("--out", target, [".html"])
    runs = [folder for folder in folders if (folder / CONFIG).exists()]
    recorded = [_recipe_results(folder) for folder in folders if folder not in runs]
    if out is None and len(recorded) == len(folders) == 1:
        pages.write_recipe_page(recorded[0], folders[0])
    else:
        made = [pages.recipe_page(results) for results in recorded]
        console, results = Console(stderr=True), []
        for folder in runs:
            with Status(f"evaluating {folder}", console=console):
                results.append(run_result(folder, data_root, landscape=landscape, device=device, trust_code=trust_code))
        pages.write_page(target, pages.join_pages([*([pages.run_page(results)] if results else []), *made]))
    print_line(f"Report: {target}")


def _recipe_results(folder: Path) -> RecipeResults:
    from hypersphere.cli.recipe_results import usable_results  # imports all recipes

    return usable_results(folder)
