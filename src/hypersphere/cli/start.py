"""Weights that `train --from` begins with: those of a run, or of a file of safetensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from hypersphere._validation import require
from hypersphere.training import DamagedCheckpoint
from hypersphere.training.run import CONFIG, Run

__all__ = ["read_start"]


def read_start(source: Path, on_damage: Callable[[str], None]) -> dict[str, Any]:
    """Return the tensors by name: of the last good checkpoint of a run, or of a file.

    Raises:
        ValueError: there is neither.
        DamagedCheckpoint: what is there cannot be read.
    """
    if source.is_dir():
        require((source / CONFIG).is_file(), "--from", "the folder of a run or a .safetensors file", str(source))
        checkpoint = Run.open(source).checkpoints(on_damage=on_damage).latest()
        if checkpoint is None:
            raise ValueError(f"--from {source} has no checkpoint yet")
        return checkpoint.weights()["objective"]
    known = source.suffix == ".safetensors" and source.is_file()
    require(known, "--from", "the folder of a run or a .safetensors file that is there", str(source))
    try:
        return load_file(source)
    except SafetensorError as error:
        raise DamagedCheckpoint(f"--from {source} is no file of safetensors: {error}") from None
