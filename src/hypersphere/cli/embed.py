"""`hypersphere embed`: compute the embeddings of images with the network of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hypersphere.cli import options
from hypersphere.cli.output import check_target, print_line

__all__ = ["embed"]


def embed(
    folder: options.RunFolder,
    images: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Images, a folder of images, or a folder with one folder per class; default: the test data of the run."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write, .npy or .safetensors; default: embeddings.safetensors, in RUN for its test data, "
            "otherwise in the current folder."
        ),
    ] = None,
    mirror: Annotated[bool, typer.Option("--mirror", help="Append the features of the mirrored image.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 500,
    step: options.Step = None,
    device: options.Device = None,
    threads: options.Threads = None,
    data_root: options.DataRoot = None,
    trust_code: options.TrustCode = False,
) -> None:
    """Compute the embeddings of images and write them to a file, with names and labels in a JSON file next to it."""
    from hypersphere.cli.opening import open_run
    from hypersphere.data import Source
    from hypersphere.data.embeddings import SUFFIXES, Embeddings, described_file, write_embeddings

    target = out or (Path() if images else folder) / "embeddings.safetensors"
    description = target.with_suffix(".json")
    check_target("--out", target, SUFFIXES, companion=description)
    other = described_file(description)
    if other is not None and other != target.name and target.with_name(other).exists():  # X.npy next to X.safetensors
        raise ValueError(f"--out: {description} has the labels of {other}; choose another name")
    opened = open_run(folder, data_root, step=step, device=device, with_data=not images, trust_code=trust_code)
    source: Source
    if images:
        source, has_labels = opened.images(images, "embed with images")
    else:
        source, has_labels = opened.held_out, True
    features, labels = opened.embed(source, mirror=mirror, batch=batch)
    names = tuple(source.name(index) for index in range(len(source)))
    embeddings = (
        Embeddings(features, labels, names, source.classes) if has_labels else Embeddings(features, None, names)
    )
    write_embeddings(target, embeddings)
    count, dim = features.shape
    print_line(f"{count} embeddings with {dim} dimensions: {target}; names and labels: {description.name}")
