"""Read the initial weights of `train --from`: those of a run, or of a safetensors file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from hypersphere._validation import require
from hypersphere.training import DamagedCheckpoint, Run
from hypersphere.training.run import CONFIG

__all__ = ["read_weights"]


def read_weights(source: Path, on_damage: Callable[[str], None]) -> dict[str, Any]:
    """Return tensors by name, from the last intact checkpoint of a run or from a file.

    Raises:
        ValueError: if `source` is neither.
        DamagedCheckpoint: if it cannot be read.
    """
    if source.is_dir():
        require((source / CONFIG).is_file(), "--from", "the folder of a run or a .safetensors file", str(source))
        checkpoint = Run.open(source).checkpoints(on_damage=on_damage).latest()
        if checkpoint is None:
            raise ValueError(f"--from {source} has no checkpoint yet")
        return checkpoint.weights()["objective"]
    is_file = source.suffix == ".safetensors" and source.is_file()
    require(is_file, "--from", "the folder of a run or an existing .safetensors file", str(source))
    try:
        return load_file(source)
    except SafetensorError as error:
        raise DamagedCheckpoint(f"--from {source} is not a valid safetensors file: {error}") from None
