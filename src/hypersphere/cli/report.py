"""`hypersphere report`: write one HTML file from runs, from the records of recipes, or from both."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.status import Status
from torch import Tensor, nn

from hypersphere import energy, evaluation, training
from hypersphere import report as pages
from hypersphere._validation import require
from hypersphere.cli.opening import Opened, device_of, open_run
from hypersphere.cli.target import check_target
from hypersphere.layers import DecoupledLayer
from hypersphere.recipes import RECIPES, Recipe, Record, read_records, read_tensors, run_name
from hypersphere.recipes.sphere_networks import learned_parameters
from hypersphere.training.job_run import CONFIG, Run

__all__ = ["current_records", "report", "result_of", "results_of", "write_report"]

LANDSCAPE_EXAMPLES, LANDSCAPE_POINTS = 500, 11


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
        pages.write_recipe_page(recorded[0], folders[0])
    else:
        made = [pages.recipe_page(results) for results in recorded]
        if runs:
            where, console, results = device_of(device), Console(stderr=True), []
            for run in runs:
                with Status(f"evaluating {run.folder}", console=console):
                    results.append(result_of(run, data_root, landscape=landscape, device=where))
            made.insert(0, pages.run_page(results))
        pages.write_page(target, pages.join_pages(made))
    print(f"Report: {target}", flush=True)
    return target


def write_report(recipe: Recipe, records: Sequence[Record], out: Path) -> Path:
    """Write the page of a recipe next to its records in `out`, with table.md and figure.svg; return its path.

    The page covers all records in the folder, including rows and seeds that are not among the given ones.
    """
    require(bool(records), "records", "at least one record", list(records))
    folder = out / run_name(recipe.name, records[0].overrides, records[0].scale)
    stored = current_records(recipe, read_records(out, folder.name))
    by_row_and_seed = {(record.row, record.seed): record for record in [*stored, *records]}
    shown = [by_row_and_seed[key] for key in sorted(by_row_and_seed)]
    return pages.write_recipe_page(results_of(recipe, shown, out), folder)


def results_of(recipe: Recipe, records: Sequence[Record], out: Path) -> pages.RecipeResults:
    """Return a recipe and its records in the form that report pages take."""
    return pages.RecipeResults(
        recipe.title,
        f"{recipe.note} ({recipe.reference[:1].upper()}{recipe.reference[1:]}.)",
        {metric.key: pages.Column(metric.heading, metric.higher_is_better, metric.format) for metric in recipe.metrics},
        [row.name for row in recipe.rows],
        [asdict(record) for record in records],
        recipe.printed,
        recipe.figures,
        lambda record: read_tensors(out, Record(**record)),
    )


def current_records(recipe: Recipe, records: Sequence[Record]) -> list[Record]:
    """Return the records that still match the recipe: it has their row, with the same settings."""
    return [record for record in records if record.is_current(recipe)]


def _usable_records(folder: Path) -> pages.RecipeResults:
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
    return results_of(recipe, usable, where.parent)


def _say(message: str) -> None:
    print(f"hypersphere: {pages.printable(message)}", file=sys.stderr)


@torch.no_grad()
def result_of(
    run: Run, data_root: Path | None = None, *, landscape: bool = False, device: torch.device | None = None
) -> pages.RunResult:
    """Evaluate a run; raise a `ValueError` if its features or class vectors are not finite."""
    opened = open_run(run.folder, data_root, device=device)
    assembly, task = opened.assembly, opened.assembly.task
    features, vectors = opened.features(task.test_inputs), opened.class_vectors
    if not (bool(features.isfinite().all()) and bool(vectors.isfinite().all())):
        raise ValueError(f"{run.folder} has diverged: its features or class vectors are not finite")
    hits = opened.predict(features) == task.test_labels
    around = _landscape(opened) if landscape else None
    assembly.objective.cpu()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about layers with one neuron, which have no pairs
        layers = energy.inspect(nn.ModuleDict({"network": assembly.network.body, "head": assembly.head}), probes=256)
    learned = dict(zip(("k", "radius_factor"), learned_parameters(assembly.network), strict=True))
    return pages.RunResult(
        run.folder.resolve().name,
        run.job.settings(),
        run.metrics(),
        task.classes,
        features,
        task.test_labels,
        len(task.inputs),
        accuracy=float(hits.double().mean()),
        class_vectors=vectors,
        layers=layers,
        facts=run.made_with,
        filters=_filters(assembly.network.body),
        learned={key: values for key, values in learned.items() if len(values)},
        starts=_starts(assembly.network.body),
        landscape=around,
    )


def _filters(body: nn.Module) -> Tensor | None:
    """Return the weights of the first layer if they can be shown as grey or colour images, else None."""
    for module in body.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim >= 2:
            is_image = weight.ndim == 4 and weight.shape[1] in (1, 3) and min(weight.shape[2:]) > 1
            return weight.detach() if is_image else None
    return None


def _starts(body: nn.Module) -> dict[str, float]:
    """Return the initial values of learned parameters, for those where all layers share one."""
    layers = [module for module in body.modules() if isinstance(module, DecoupledLayer)]
    k = {float(getattr(layer.angular, "k", 0.0)) for layer in layers if layer.log_k is not None}
    radius = {float(getattr(layer.magnitude, "radius", 1.0)) for layer in layers if layer.log_radius is not None}
    return {key: of.pop() for key, of in (("k", k), ("radius_factor", radius)) if len(of) == 1}


def _landscape(opened: Opened) -> evaluation.Landscape:
    """Return the loss and error of the first test examples on a small grid around the weights of the network."""
    assembly = opened.assembly
    inputs, labels = (part.to(opened.device) for part in next(assembly.test_batches(LANDSCAPE_EXAMPLES)))

    def measure() -> dict[str, Tensor]:
        features = assembly.objective.features(inputs)
        missed = training.predict(assembly.head, features) != labels
        return {"loss": assembly.head(features, labels), "error": 100 * missed.double().mean()}

    generator = torch.Generator().manual_seed(opened.run.job.seed)
    return evaluation.landscape(assembly.network.body, measure, points=LANDSCAPE_POINTS, generator=generator)
