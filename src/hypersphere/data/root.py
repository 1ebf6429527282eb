"""Where data lies: one folder that holds one folder a dataset."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hypersphere.data.errors import MissingData

VARIABLE = "HYPERSPHERE_DATA"


def data_root(root: str | Path | None = None) -> Path:
    """The folder of all datasets: the argument or, without one, the environment variable HYPERSPHERE_DATA."""
    given = root if root is not None else os.environ.get(VARIABLE) or None
    if given is None:
        raise MissingData(f"no data folder: pass root= or set the environment variable {VARIABLE}")
    folder = Path(given).expanduser()
    if not folder.is_dir():
        source = "root" if root is not None else VARIABLE
        raise MissingData(f"{source} must be an existing folder, not {str(folder)!r}")
    return folder


def find(folders: Sequence[Path], names: Sequence[str], advice: str) -> Path:
    """The first of the names that exists, folder by folder; the advice says how to get it."""
    for folder in folders:
        for name in names:
            if (folder / name).exists():
                return folder / name
    looked = ", ".join(str(folder) for folder in folders)
    raise MissingData(f"{' or '.join(names)} not found; looked in {looked}. {advice}")
