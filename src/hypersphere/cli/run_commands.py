"""The commands that take a finished run, or files, and their options. Nothing here imports torch too early."""

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
    source: Annotated[Path, typer.Argument(help="A run, or embeddings as .npy or .safetensors.")],
    second: Annotated[
        Path | None, typer.Argument(help="Labels of the embeddings, or the other side of pairs, as .npy.")
    ] = None,
    pairs: Annotated[
        str | None,
        typer.Option(help=r"A file of pairs (`name name 0|1 \[fold]`), or how many of either kind to draw."),
    ] = None,
    same: Annotated[Path | None, typer.Option(help="With two sides of pairs: which are the same, as .npy.")] = None,
    folds: Annotated[
        int | None, typer.Option(min=2, help="Folds of the pairs; those of the file, or 10, if left out.")
    ] = None,
    ranks: Annotated[str, typer.Option(help="Ranks of identification, with commas.")] = listed(RANKS),
    far: Annotated[str, typer.Option(help="False accept rates, with commas.")] = listed(FARS),
    bootstrap: Annotated[
        int | None,
        typer.Option(min=0, help=f"Draws for 95 % intervals, 0 for none; {BOOTSTRAP} of up to 20,000 pairs."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the drawn pairs, and of the draws for intervals.")] = 0,
    mirror: Annotated[bool, typer.Option("--mirror", help="Of a run: features of mirror images too.")] = False,
    step: Step = None,
    json: JsonFile = None,
    device: Device = None,
    threads: Threads = None,
    data_root: DataRoot = None,
) -> None:
    """Measure a run or embeddings: classification, verification, identification, Fisher score, hardness."""
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
        Path | None, typer.Argument(help="Folder of images, or of one folder a class; the run's test data if left out.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A .npy or .safetensors file; RUN/embeddings.safetensors if left out.")
    ] = None,
    mirror: Annotated[bool, typer.Option("--mirror", help="Put the features of the mirror image beside.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="Images at once.")] = 500,
    step: Step = None,
    device: Device = None,
    threads: Threads = None,
    data_root: DataRoot = None,
) -> None:
    """Write the embeddings of images, with names and labels as JSON beside them."""
    from hypersphere.cli.embed import embed as run

    _use_threads(threads)
    run(folder, images, out=out, mirror=mirror, batch=batch, step=step, device=device, data_root=data_root)


def inspect(
    source: Annotated[
        Path, typer.Argument(help="A run, a .safetensors file (or a folder of them), or a file of torch.save.")
    ],
    html: Annotated[Path | None, typer.Option(help="Write a page with histograms to this .html file.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write all numbers to this .json file.")] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Nearest and most opposite pairs to list a layer.")] = 5,
    most: Annotated[int, typer.Option(min=2, help="Neurons of larger layers are sampled.")] = 2048,
    seed: Annotated[int, typer.Option(min=0, help="Of samples and probes.")] = 0,
    device: Annotated[
        str | None, typer.Option(help="Where to compute, of a run; an accelerator if there is one.")
    ] = None,
    threads: Threads = None,
    data_root: DataRoot = None,
) -> None:
    """Show how redundant the neurons of every layer are, beside random ones."""
    from hypersphere.cli.inspect import inspect as run

    _use_threads(threads)
    run(source, pairs=pairs, most=most, seed=seed, html=html, json_file=json, device=device, data_root=data_root)


def fold(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a rotated or converted run.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the plain run; RUN/folded if left out.")] = None,
    step: Step = None,
    data_root: DataRoot = None,
) -> None:
    """Make a run of plain layers with the same outputs, and write its weights as one file."""
    from hypersphere.cli.fold import fold as run

    run(folder, out, step=step, data_root=data_root)


def export(
    folder: RunFolder,
    to: Annotated[str, typer.Option(help="onnx, or torch for a torch.export program.")] = "onnx",
    out: Annotated[
        Path | None, typer.Option(help="A .onnx or .pt2 file; RUN/model.onnx or RUN/model.pt2 if left out.")
    ] = None,
    step: Step = None,
    data_root: DataRoot = None,
) -> None:
    """Write the network and head as ONNX or torch.export, once they are found to compute the same."""
    from hypersphere.cli.export import export as run

    run(folder, to, out, step=step, data_root=data_root)


def attack(
    folder: RunFolder,
    name: Annotated[str, typer.Option("--attack", help="fgsm, bim or deepfool.")] = "fgsm",
    epsilon: Annotated[str, typer.Option(help="Strengths of fgsm and bim, with commas.")] = "2/255,4/255,8/255",
    norm: Annotated[str, typer.Option(help="What deepfool keeps small: l2 or linf.")] = "l2",
    source: Annotated[
        Path | None, typer.Option(help="Another run, that attacks are made on and transferred from.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many test images.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture to this .png file.")] = None,
    json: JsonFile = None,
    step: Step = None,
    device: Device = None,
    threads: Threads = None,
    data_root: DataRoot = None,
) -> None:
    """Measure the accuracy of a run under attack, white-box or transferred."""
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
    folders: Annotated[list[Path], typer.Argument(help="Runs of `train`, or folders of records of `reproduce`.")],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file; report.html in the folder, or here if there are several.")
    ] = None,
    landscape: Annotated[
        bool, typer.Option("--landscape", help="Measure loss and error around the trained weights too.")
    ] = False,
    device: Device = None,
    threads: Threads = None,
    data_root: DataRoot = None,
) -> None:
    """Write one HTML file of one or several runs: curves, features on the sphere, angles, layers.

    Of one folder of records, its table.md and figure.svg too; nothing is run for that.
    """
    from hypersphere.cli.report import report as run

    _use_threads(threads)
    run(folders, out, landscape=landscape, device=device, data_root=data_root)


def cite(
    folder: Annotated[Path | None, typer.Argument(metavar="RUN", help="Folder of the run.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All works that the library rests on.")] = False,
) -> None:
    """Print the BibTeX of what a run used."""
    from hypersphere.cli.cite import cite as run

    run(folder, everything=everything)


def _use_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
