"""`hypersphere pack`: write a folder of images as tar shards, for training on many images or over a network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hypersphere.cli.output import print_line

__all__ = ["pack"]


def pack(
    folder: Annotated[Path, typer.Argument(help="Folder with one folder of images per class.")],
    out: Annotated[Path, typer.Option(help="New folder to write the shards to.")],
    shard_megabytes: Annotated[int, typer.Option(min=1, help="Size after which a new shard begins, in MiB.")] = 256,
    seed: Annotated[int | None, typer.Option(min=0, help="Shuffle the images with this seed.")] = None,
) -> None:
    """Write images as tar shards in the WebDataset layout, for `train --data shards --data.path=OUT`."""
    from hypersphere import data

    shards = data.pack(folder, out, shard_bytes=shard_megabytes * 2**20, seed=seed)
    size = sum(path.stat().st_size for path in shards) / 2**20
    print_line(f"{len(shards)} shard{'s' * (len(shards) != 1)} with {size:,.1f} MiB: {out}")
    print_line(f"Next: hypersphere train --data shards --data.path={out}")
