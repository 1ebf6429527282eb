"""Options and help of the commands that work on a finished run or on files.

Commands import torch when they run, so that `--help` answers quickly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hypersphere.cli.options import (
    BOOTSTRAP,
    FARS,
    RANKS,
    DataRoot,
    Device,
    JsonFile,
    RunFolder,
    Step,
    Threads,
    listed,
)

__all__ = ["attack", "cite", "embed", "evaluate", "export", "fold", "inspect", "report"]


def evaluate(
    source: Annotated[Path, typer.Argument(help="Folder of a run, or embeddings as .npy or .safetensors.")],
    second: Annotated[
        Path | None, typer.Argument(help="Labels of the embeddings, or the second embeddings of the pairs, as .npy.")
    ] = None,
    pairs: Annotated[
        str | None,
        typer.Option(help=r"File of pairs (`name name 0|1 \[fold]`), or the number of pairs of each kind to draw."),
    ] = None,
    same: Annotated[Path | None, typer.Option(help="With two files of embeddings: which pairs match, as .npy.")] = None,
    folds: Annotated[
        int | None, typer.Option(min=2, help="Number of folds of the pairs; default: those of the file, or 10.")
    ] = None,
    ranks: Annotated[str, typer.Option(help="Ranks of identification, separated by commas.")] = listed(RANKS),
    far: Annotated[str, typer.Option(help="False accept rates, separated by commas.")] = listed(FARS),
    bootstrap: Annotated[
        int | None,
        typer.Option(
            min=0, help=f"Bootstrap draws for 95 % intervals, 0 for none; default: {BOOTSTRAP} for up to 20,000 pairs."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed for the drawn pairs and the bootstrap.")] = 0,
    mirror: Annotated[
        bool, typer.Option("--mirror", help="Also use the features of the mirrored images (runs only).")
    ] = False,
    step: Step = None,
    json: JsonFile = None,
    device: Device = None,
    threads: Threads = None,
    data_root: DataRoot = None,
) -> None:
    """Evaluate a run or embeddings: classification, verification, identification, Fisher score, hardness."""
    from hypersphere.cli.evaluate import Protocol, numbers
    from hypersphere.cli.evaluate import evaluate as run

    _use_threads(threads)
    chosen = int(pairs) if pairs and pairs.isdigit() else Path(pairs) if pairs else None
    protocol = Protocol(chosen, folds, numbers("--ranks", ranks, int), numbers("--far", far, float), bootstrap, seed)
    run(
        source,
        second,
        protocol,
        same=same,
        mirror=mirror,
        step=step,
        json_file=json,
        device=device,
        data_root=data_root,
    )


def embed(
    folder: RunFolder,
    images: Annotated[
        Path | None,
        typer.Argument(help="Folder of images, or of one folder per class; default: the test data of the run."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write, .npy or .safetensors; default: RUN/embeddings.safetensors.")
    ] = None,
    mirror: Annotated[bool, typer.Option("--mirror", help="Append the features of the mirrored image.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 500,
    step: Step = None,
    device: Device = None,
    threads: Threads = None,
    data_root: DataRoot = None,
) -> None:
    """Compute the embeddings of images and write them to a file, with names and labels in a JSON file next to it."""
    from hypersphere.cli.embed import embed as run

    _use_threads(threads)
    run(folder, images, out=out, mirror=mirror, batch=batch, step=step, device=device, data_root=data_root)


def inspect(
    source: Annotated[
        Path, typer.Argument(help="Folder of a run, .safetensors file or folder of them, or file of torch.save.")
    ],
    html: Annotated[Path | None, typer.Option(help="Write a report with histograms to this .html file.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write all numbers to this .json file.")] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Number of closest and most opposite pairs to list per layer.")] = 5,
    most: Annotated[int, typer.Option(min=2, help="Sample this number of neurons from larger layers.")] = 2048,
    seed: Annotated[int, typer.Option(min=0, help="Seed for sampling.")] = 0,
    device: Annotated[
        str | None, typer.Option(help="Device for a run, for example cpu or cuda:0; default: an accelerator, if any.")
    ] = None,
    threads: Threads = None,
    data_root: DataRoot = None,
) -> None:
    """Show how redundant the neurons of each layer are compared with random ones."""
    from hypersphere.cli.inspect import inspect as run

    _use_threads(threads)
    run(source, pairs=pairs, most=most, seed=seed, html=html, json_file=json, device=device, data_root=data_root)


def fold(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run with rotated or converted layers.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write the folded run to; default: RUN/folded.")] = None,
    step: Step = None,
    data_root: DataRoot = None,
) -> None:
    """Fold rotations and operators into plain layers with the same outputs, and write the weights to one file."""
    from hypersphere.cli.fold import fold as run

    run(folder, out, step=step, data_root=data_root)


def export(
    folder: RunFolder,
    to: Annotated[str, typer.Option(help="Format: onnx, or torch for a torch.export program.")] = "onnx",
    out: Annotated[
        Path | None, typer.Option(help="File to write, .onnx or .pt2; default: RUN/model.onnx or RUN/model.pt2.")
    ] = None,
    step: Step = None,
    data_root: DataRoot = None,
) -> None:
    """Export the network and head to ONNX or torch.export, and check that the outputs are the same."""
    from hypersphere.cli.export import export as run

    run(folder, to, out, step=step, data_root=data_root)


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
) -> None:
    """Measure the accuracy of a run under white-box or transferred attacks."""
    from hypersphere.cli.attack import attack as run
    from hypersphere.cli.evaluate import numbers

    _use_threads(threads)
    run(
        folder,
        name,
        epsilons=numbers("--epsilon", epsilon, float),
        norm=norm,
        source=source,
        limit=limit,
        plot=plot,
        json_file=json,
        step=step,
        device=device,
        data_root=data_root,
    )


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
) -> None:
    """Write an HTML report of one or several runs: curves, features on the sphere, angles, layers.

    For a folder of records, table.md and figure.svg are also written. Nothing is trained.
    """
    from hypersphere.cli.report import report as run

    _use_threads(threads)
    run(folders, out, landscape=landscape, device=device, data_root=data_root)


def cite(
    folder: Annotated[Path | None, typer.Argument(metavar="RUN", help="Folder of the run.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Print all works that the library implements.")] = False,
) -> None:
    """Print the BibTeX entries of the works that a run used."""
    from hypersphere.cli.cite import cite as run

    run(folder, everything=everything)


def _use_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
