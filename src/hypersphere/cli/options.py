"""Options that several commands share. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

__all__ = [
    "DataRoot",
    "Device",
    "JsonFile",
    "RunFolder",
    "Step",
    "Threads",
    "TrustCode",
    "parse_numbers",
]

Number = TypeVar("Number", int, float)


def _folder(path: Path | None) -> Path | None:
    if path is not None and not path.expanduser().is_dir():
        raise ValueError(f"--data-root must be an existing folder, not {str(path)!r}")
    return path


def _checkpoint(text: str | None) -> int | str | None:
    if text is None or text == "best":
        return text
    if not text.isdecimal():
        raise ValueError(f"--step must be a number, or best, not {text!r}")
    return int(text)


def _threads(count: int | None) -> int | None:
    if count is not None:
        import torch

        torch.set_num_threads(count)
    return count


RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")]
DataRoot = Annotated[
    Path | None, typer.Option(callback=_folder, help="Folder of the data sets; default: the variable HYPERSPHERE_DATA.")
]
Device = Annotated[str | None, typer.Option(help="Device, for example cpu or cuda:0; default: an accelerator, if any.")]
Threads = Annotated[int | None, typer.Option(min=1, callback=_threads, help="Number of threads that PyTorch uses.")]
Step = Annotated[
    str | None, typer.Option(callback=_checkpoint, help="Use the checkpoint of this step, or best; default: the last.")
]
JsonFile = Annotated[Path | None, typer.Option(help="Write the numbers to this .json file.")]
TrustCode = Annotated[
    bool, typer.Option("--trust-code", help="Import the code that the run names, such as my_module:Net.")
]


def parse_numbers(option: str, text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """Parse numbers that are separated by commas; fractions such as 8/255 are allowed.

    >>> parse_numbers("--far", "0.1,1/100", float)
    (0.1, 0.01)
    """
    try:
        return tuple(_number(part, kind) for part in text.split(","))
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{option} must be numbers separated by commas, not {text!r}") from None


def _number(text: str, kind: Callable[[str], Number]) -> Number:
    above, line, below = text.partition("/")
    return kind(above) if not line or kind is int else kind(above) / kind(below)  # type: ignore[return-value]
