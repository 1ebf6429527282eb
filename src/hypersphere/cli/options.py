"""Options that several commands share. Nothing here imports torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from hypersphere._validation import require
from hypersphere.training.config import CONFIG

__all__ = [
    "CONFIG",
    "DataRoot",
    "Device",
    "GalleryFolder",
    "JsonFile",
    "OfRun",
    "RunFolder",
    "Step",
    "Threads",
    "TrustCode",
    "check_run",
    "is_run",
    "parse_numbers",
]

A_RUN = f"the folder of a run of `hypersphere train` (with a {CONFIG})"
Number = TypeVar("Number", int, float)


def is_run(path: Path) -> bool:
    """Return True for the folder of a run, even a damaged one. The `config.json` of other libraries has no `format`."""
    if not (path / CONFIG).is_file():
        return False
    try:
        content = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return True
    return not isinstance(content, dict) or "format" in content


def check_run(path: Path, name: str = "RUN", *, also: str = "") -> Path:
    """Return the path; raise a `ValueError` that names the argument unless it is the folder of a run.

    Args:
        path: the path.
        name: name of the argument.
        also: what else the argument accepts, for the message.
    """
    if not is_run(path):
        missing = "" if path.exists() else ", which does not exist"
        raise ValueError(f"{name} must be {A_RUN}{also}, not {str(path)!r}{missing}")
    return path


def _check_data_root(path: Path | None) -> Path | None:
    exists = path is None or path.expanduser().is_dir()
    require(exists, "--data-root", "an existing folder", str(path))
    return path


def _parse_step(text: str | None) -> int | str | None:
    require(text in (None, "best") or str(text).isdecimal(), "--step", "a number, or best", text)
    return int(text) if text and text != "best" else text


def _set_threads(count: int | None) -> int | None:
    if count is not None:
        import torch

        torch.set_num_threads(count)
    return count


RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of the run.", callback=lambda path: check_run(path))
]
DataRoot = Annotated[
    Path | None,
    typer.Option(
        callback=_check_data_root, help="Folder of the data sets; default: the environment variable HYPERSPHERE_DATA."
    ),
]
Device = Annotated[str | None, typer.Option(help="Device, for example cpu or cuda:0; default: an accelerator, if any.")]
Threads = Annotated[int | None, typer.Option(min=1, callback=_set_threads, help="Number of threads that PyTorch uses.")]
Step = Annotated[
    str | None, typer.Option(callback=_parse_step, help="Use the checkpoint of this step, or best; default: the last.")
]
GalleryFolder = Annotated[Path, typer.Argument(metavar="GALLERY", help="Folder of the gallery.")]
OfRun = Annotated[
    Path,
    typer.Option(
        "--run", help="Folder of the run that the gallery was enrolled with.", callback=lambda p: check_run(p, "--run")
    ),
]
JsonFile = Annotated[Path | None, typer.Option(help="Write the numbers to this .json file.")]
TrustCode = Annotated[
    bool, typer.Option("--trust-code", help="Import the code that the run names, such as my_module:Net.")
]


def parse_numbers(option: str, text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """Parse numbers separated by commas. Fractions such as 8/255 are allowed unless `kind` is `int`.

    >>> parse_numbers("--far", "0.1,1/100", float)
    (0.1, 0.01)
    """
    try:
        return tuple(_number(part, kind) for part in text.split(","))
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{option} must be numbers separated by commas, not {text!r}") from None


def _number(text: str, kind: Callable[[str], Number]) -> Number:
    numerator, slash, denominator = text.partition("/")
    if slash and kind is not int:
        return kind(numerator) / kind(denominator)  # type: ignore[return-value]
    return kind(text)
