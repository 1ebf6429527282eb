"""`hypersphere attack`: measure the accuracy of a run on attacked test images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hypersphere._files import replacing
from hypersphere._validation import require, require_package
from hypersphere.cli.options import DataRoot, Device, JsonFile, RunFolder, Step, Threads, TrustCode, parse_numbers
from hypersphere.cli.output import check_target, mark_png, print_line, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from hypersphere import report
    from hypersphere.cli.opening import Opened
    from hypersphere.robustness import RobustAccuracy, Strength

__all__ = ["attack"]

BATCH = 250


def attack(
    folder: RunFolder,
    name: Annotated[str, typer.Option("--attack", help="Attack: fgsm, bim or deepfool.")] = "fgsm",
    epsilon: Annotated[str, typer.Option(help="Strengths of fgsm and bim, separated by commas.")] = "2/255,4/255,8/255",
    norm: Annotated[str, typer.Option(help="Norm that deepfool minimises: l2 or linf.")] = "l2",
    source: Annotated[Path | None, typer.Option(help="Craft the attacks on this run and transfer them.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Attack only this number of test images.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot to this .png file.")] = None,
    json: JsonFile = None,
    step: Step = None,
    device: Device = None,
    threads: Threads = None,
    data_root: DataRoot = None,
    trust_code: TrustCode = False,
) -> None:
    """Measure the accuracy of a run under white-box or transferred attacks."""
    from hypersphere import report, robustness
    from hypersphere.cli.opening import open_run

    epsilons = parse_numbers("--epsilon", epsilon, float)
    require(name in robustness.ATTACKS, "--attack", f"one of {', '.join(robustness.ATTACKS)}", name)
    check_target("--plot", plot, [".png"])
    check_target("--json", json, [".json"])
    if plot is not None:
        require_package("vl_convert", "vl-convert-python", "report")
    opened = open_run(folder, data_root, step=step, device=device, trust_code=trust_code)
    other = None if source is None else open_run(source, data_root, device=device, trust_code=trust_code)
    for one in (opened, other):
        if one is not None:
            one.require_images("an attack")
            require(not one.experiment.data.open_set, "an attack", "on a run that tests its training classes", "others")
    if other is not None:
        require(opened.shape == other.shape, "--source", f"a run on inputs {opened.shape}", other.shape)
        ours, theirs = opened.experiment.data.classes, other.experiment.data.classes
        require(ours == theirs, "--source", f"a run on the same {len(ours)} classes", str(source))
    model = robustness.Classifier(_network(opened), opened.experiment.head)
    victim = None if other is None else robustness.Classifier(_network(other), other.experiment.head)
    chosen: Any = robustness.ATTACKS[name]
    if name == "deepfool":
        strength = robustness.fooling_strength(model, _images(opened, limit), chosen(norm=norm), source=victim)
        table, numbers = _strength_table(strength, norm, source), _plain_strength(strength)
        draw = partial(robustness.plot_strength, {str(folder): strength}, norm)
    else:
        result = robustness.accuracy_under(model, _images(opened, limit), chosen(), epsilons=epsilons, source=victim)
        table, numbers = _accuracy_table(result, source), asdict(result)
        draw = partial(robustness.plot_accuracy, {str(folder): result})
    if json is not None:
        about = {"run": str(folder), "step": opened.step, "attack": name, "source": source and str(source)}
        write_json(json, {**about, **numbers})
    if plot is not None:
        with replacing(plot) as draft:
            draw().save(str(draft), format="png", scale_factor=2)
            mark_png(draft)
    report.print_table(table)
    if plot is not None:
        print_line(f"\nPlot: {plot}")


def _network(opened: Opened) -> Any:
    """Return the map from inputs to features as one module, in the precision of the run."""
    from torch import nn

    class RunNetwork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.objective = opened.experiment.objective

        def forward(self, inputs: Tensor) -> Tensor:
            return self.objective.features(inputs)

    return RunNetwork()


def _images(opened: Opened, limit: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of test images in [0, 1] and their labels."""
    import torch

    source, device = opened.held_out, opened.experiment.device
    for rows in torch.arange(len(source))[:limit].split(BATCH):
        images = torch.stack([source[index] for index in rows.tolist()]).to(device)
        yield images.float() / 255 if images.dtype == torch.uint8 else images, source.labels[rows].to(device)


def _accuracy_table(result: RobustAccuracy, source: Path | None) -> report.Table:
    from hypersphere.report import Column, Table

    columns = [Column("attack"), Column("epsilon x 255", format=".4g"), Column("accuracy", format=".2%")]
    strengths = zip(result.epsilons, result.accuracies, strict=True)
    rows: list[list[Any]] = [["none", 0.0, result.clean]]
    rows += [[result.attack, 255 * epsilon, accuracy] for epsilon, accuracy in strengths]
    return Table("Accuracy under attack", columns, rows, _caption(result.images, source))


def _strength_table(result: Strength, norm: str, source: Path | None) -> report.Table:
    from hypersphere.report import Column, Table

    share, number, numbers = Column("", format=".2%"), Column("", format=".4g"), _plain_strength(result)
    rows = [
        ["accuracy without attack", share.show(numbers["clean"])],
        ["misclassified after the attack", share.show(numbers["fooled"])],
        ["median strength, l2", number.show(numbers["median_l2"])],
        ["median strength, linf", number.show(numbers["median_linf"])],
    ]
    columns = [Column(f"DeepFool ({norm})"), Column("value")]
    return Table("Strength needed to fool the run", columns, rows, _caption(len(result.fooled), source))


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
