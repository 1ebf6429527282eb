"""`hypersphere attack`: measure the accuracy of a run on attacked test images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hypersphere._files import replacing
from hypersphere._validation import require, require_package
from hypersphere.cli import options
from hypersphere.cli.output import check_target, mark_png, print_line, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from hypersphere import report
    from hypersphere.cli.opening import LoadedRun
    from hypersphere.robustness import RobustAccuracy, Strength

__all__ = ["attack"]

BATCH = 250  # images
EPSILONS = "2/255,4/255,8/255"


def attack(
    folder: options.RunFolder,
    name: Annotated[str, typer.Option("--attack", help="Attack: fgsm, bim or deepfool.")] = "fgsm",
    epsilon: Annotated[
        str | None, typer.Option(help=f"Strengths of fgsm and bim, separated by commas; default: {EPSILONS}.")
    ] = None,
    norm: Annotated[str | None, typer.Option(help="Norm that deepfool minimises: l2 or linf; default: l2.")] = None,
    source: Annotated[Path | None, typer.Option(help="Craft the attacks on this run and transfer them to RUN.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Attack only this number of test images.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot to this .png file.")] = None,
    json: options.JsonFile = None,
    step: options.Step = None,
    device: options.Device = None,
    threads: options.Threads = None,
    data_root: options.DataRoot = None,
    trust_code: options.TrustCode = False,
) -> None:
    """Measure the accuracy of a run under white-box or transferred attacks."""
    from hypersphere import report, robustness
    from hypersphere.cli.opening import open_run

    require(name in robustness.ATTACKS, "--attack", f"one of {', '.join(robustness.ATTACKS)}", name)
    unused, value = ("--epsilon", epsilon) if name == "deepfool" else ("--norm", norm)
    require(value is None, unused, f"omitted with --attack {name}", value)
    epsilons, norm = options.parse_numbers("--epsilon", epsilon or EPSILONS, float), norm or "l2"
    if source is not None:
        options.check_run(source, "--source")
    check_target("--plot", plot, [".png"])
    check_target("--json", json, [".json"])
    if plot is not None:
        require_package("vl_convert", "vl-convert-python", "report")
    opened = open_run(folder, data_root, step=step, device=device, trust_code=trust_code)
    other = opened if source is None else open_run(source, data_root, device=device, trust_code=trust_code)
    for loaded in (opened, other):
        loaded.require_images("an attack")
        if loaded.experiment.data.open_set:
            raise ValueError(f"an attack needs a run that is tested on its training classes, not {loaded.run.folder}")
    require(opened.shape == other.shape, "--source", f"a run on inputs of shape {opened.shape}", other.shape)
    classes = opened.experiment.data.classes
    has_same_classes = classes == other.experiment.data.classes
    require(has_same_classes, "--source", f"a run on the same {len(classes)} classes", str(source))
    origin = "crafted on the run itself" if source is None else f"transferred from {source}"
    images, crafted_on = _images(opened, limit), None if source is None else other.classify
    attack_type: Any = robustness.ATTACKS[name]
    if name == "deepfool":
        strength = robustness.fooling_strength(opened.classify, images, attack_type(norm=norm), source=crafted_on)
        draw = partial(report.strength_chart, {str(folder): strength}, norm)
        numbers = _numbers(strength)
        table = _strength_table(numbers, norm)
    else:
        accuracy = robustness.accuracy_under(
            opened.classify, images, attack_type(), epsilons=epsilons, source=crafted_on
        )
        draw = partial(report.accuracy_chart, {str(folder): accuracy})
        numbers = asdict(accuracy)
        table = _accuracy_table(accuracy)
    if json is not None:
        description = {"run": str(folder), "step": opened.step, "attack": name, "source": source and str(source)}
        write_json(json, {**description, **numbers})
    if plot is not None:
        with replacing(plot) as draft:
            draw().save(str(draft), format="png", scale_factor=2)
            mark_png(draft)
    report.print_table(replace(table, caption=f"{numbers['images']} test images; attacks {origin}."))
    if plot is not None:
        print_line(f"\nPlot: {plot}")


def _images(opened: LoadedRun, limit: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of test images in [0, 1] and their labels."""
    import torch

    from hypersphere.data.images import as_floats

    source, device = opened.held_out, opened.experiment.device
    for rows in torch.arange(len(source))[:limit].split(BATCH):
        images = torch.stack([source[index] for index in rows.tolist()]).to(device)
        yield as_floats(images), source.labels[rows].to(device)


def _accuracy_table(accuracy: RobustAccuracy) -> report.Table:
    from hypersphere.report import Column, Table

    columns = [Column("attack"), Column("epsilon x 255", format=".4g"), Column("accuracy", format=".2%")]
    rows: list[list[Any]] = [["none", 0.0, accuracy.clean]]
    for epsilon, value in zip(accuracy.epsilons, accuracy.accuracies, strict=True):
        rows.append([accuracy.attack, 255 * epsilon, value])
    return Table("Accuracy under attack", columns, rows)


def _numbers(strength: Strength) -> dict[str, Any]:
    """Return the numbers of the table and of the JSON file."""
    return {
        "images": len(strength.fooled),
        "clean": 1 - float(strength.wrong.double().mean()),
        "fooled": float(strength.fooled.double().mean()),
        "median_l2": strength.median("l2"),
        "median_linf": strength.median("linf"),
    }


def _strength_table(numbers: Mapping[str, Any], norm: str) -> report.Table:
    from hypersphere.report import Column, Table

    lines = {
        "clean": ("accuracy without attack", ".2%"),
        "fooled": ("misclassified after the attack", ".2%"),
        "median_l2": ("median strength, l2", ".4g"),
        "median_linf": ("median strength, linf", ".4g"),
    }
    rows = [[label, Column("", format=form).show(numbers[key])] for key, (label, form) in lines.items()]
    return Table("Strength needed to fool the run", [Column(f"DeepFool ({norm})"), Column("value")], rows)
