"""Options that several commands share. Nothing here imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["BOOTSTRAP", "FARS", "RANKS", "DataRoot", "Device", "JsonFile", "RunFolder", "Step", "Threads", "listed"]

RANKS = (1, 5, 10)
FARS = (0.1, 0.01, 0.001)
BOOTSTRAP = 1000  # bootstrap draws, unless there are very many pairs


def _folder(path: Path | None) -> Path | None:
    if path is not None and not path.expanduser().is_dir():
        raise ValueError(f"--data-root must be an existing folder, not {str(path)!r}")
    return path


RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")]
DataRoot = Annotated[
    Path | None, typer.Option(callback=_folder, help="Folder of the data sets; default: the variable HYPERSPHERE_DATA.")
]
Device = Annotated[str | None, typer.Option(help="Device, for example cpu or cuda:0; default: an accelerator, if any.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Number of threads that PyTorch uses.")]
Step = Annotated[int | None, typer.Option(min=0, help="Use the checkpoint of this step; default: the last one.")]
JsonFile = Annotated[Path | None, typer.Option(help="Write the numbers to this .json file.")]


def listed(numbers: tuple[float, ...]) -> str:
    """Return numbers in the form of an option value.

    >>> listed(FARS)
    '0.1,0.01,0.001'
    """
    return ",".join(f"{number:g}" for number in numbers)
