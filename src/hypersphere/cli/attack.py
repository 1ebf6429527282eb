"""`hypersphere attack`: measure the accuracy of a run on attacked test images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from hypersphere import report
from hypersphere._files import replacing
from hypersphere._validation import require, require_package
from hypersphere.cli.opening import Opened, RunNetwork, device_of, open_run
from hypersphere.cli.target import check_target, write_json
from hypersphere.robustness import (
    ATTACKS,
    Classifier,
    RobustAccuracy,
    Strength,
    accuracy_under,
    fooling_strength,
    plot_accuracy,
    plot_strength,
)
from hypersphere.training import Batches

__all__ = ["attack"]

BATCH = 250


def attack(
    folder: Path,
    name: str,
    *,
    epsilons: tuple[float, ...],
    norm: str,
    source: Path | None,
    limit: int | None,
    plot: Path | None,
    json_file: Path | None,
    step: int | None,
    device: str | None,
    data_root: Path | None,
) -> None:
    """Attack the first test images of a run, through the run itself or through the run `source`, and print a table."""
    require(name in ATTACKS, "--attack", f"one of {', '.join(ATTACKS)}", name)
    check_target("--plot", plot, [".png"])
    check_target("--json", json_file, [".json"])
    if plot is not None:
        require_package("altair", "altair", "report")
    where = device_of(device)
    opened = open_run(folder, data_root, step=step, device=where)
    other = None if source is None else open_run(source, data_root, device=where)
    for one in (opened, other):
        if one is not None:
            one.require_images("an attack")
    if other is not None:
        ours, theirs = (one.assembly.task for one in (opened, other))
        shape, another = (tuple(task.inputs.shape[1:]) for task in (ours, theirs))
        require(shape == another, "--source", f"a run on inputs {shape}", another)
        same = ours.classes == theirs.classes
        require(same, "--source", f"a run on the same {len(ours.classes)} classes", str(source))
    model = _classifier(opened)
    victim = None if other is None else _classifier(other)
    data = _images(opened, limit)
    if name == "deepfool":
        strength = fooling_strength(model, data, ATTACKS[name](norm=norm), source=victim)  # type: ignore[call-arg]
        table, numbers = _strength_table(strength, norm, source), _plain_strength(strength)
        draw = partial(plot_strength, {str(folder): strength}, norm)
    else:
        result = accuracy_under(model, data, ATTACKS[name](), epsilons=epsilons, source=victim)
        table, numbers = _accuracy_table(result, source), asdict(result)
        draw = partial(plot_accuracy, {str(folder): result})
    if json_file is not None:
        write_json(
            json_file,
            {"run": str(folder), "step": opened.step, "attack": name, "source": source and str(source), **numbers},
        )
    if plot is not None:
        with replacing(plot) as draft:
            draw().save(str(draft), format="png", scale_factor=2)
    report.print_table(table)
    if plot is not None:
        print(f"\nPlot: {plot}")


def _classifier(opened: Opened) -> Classifier:
    return Classifier(RunNetwork(opened.assembly.objective), opened.assembly.head)


def _images(opened: Opened, limit: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    task = opened.assembly.task
    for x, y in Batches(task.test_inputs[:limit], task.test_labels[:limit], BATCH):
        yield x.to(opened.device), y.to(opened.device)


def _accuracy_table(result: RobustAccuracy, source: Path | None) -> report.Table:
    columns = [report.Column("attack"), report.Column("epsilon x 255", format=".4g")]
    columns.append(report.Column("accuracy", format=".2%"))
    strengths = zip(result.epsilons, result.accuracies, strict=True)
    rows: list[list[Any]] = [["none", 0.0, result.clean]]
    rows += [[result.attack, 255 * epsilon, accuracy] for epsilon, accuracy in strengths]
    return report.Table("Accuracy under attack", columns, rows, _caption(result.images, source))


def _strength_table(result: Strength, norm: str, source: Path | None) -> report.Table:
    share, number = report.Column("", format=".2%"), report.Column("", format=".4g")
    numbers = _plain_strength(result)
    rows = [
        ["accuracy without attack", share.show(numbers["clean"])],
        ["misclassified after the attack", share.show(numbers["fooled"])],
        ["median strength, l2", number.show(numbers["median_l2"])],
        ["median strength, linf", number.show(numbers["median_linf"])],
    ]
    columns = [report.Column(f"DeepFool ({norm})"), report.Column("value")]
    return report.Table("Strength needed to fool the run", columns, rows, _caption(len(result.fooled), source))


def _plain_strength(result: Strength) -> dict[str, Any]:
    return {
        "images": len(result.fooled),
        "clean": 1 - float(result.wrong.double().mean()),
        "fooled": float(result.fooled.double().mean()),
        "median_l2": result.median("l2"),
        "median_linf": result.median("linf"),
    }


def _caption(images: int, source: Path | None) -> str:
    by = "crafted on the run itself" if source is None else f"transferred from {source}"
    return f"{images} test images; attacks {by}."
