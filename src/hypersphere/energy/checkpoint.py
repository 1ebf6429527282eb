"""The weights of a model, a state dict or a file, one tensor at a time, without the model's code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere.energy.neurons import find_neurons
from hypersphere.functions.menu import require

__all__ = ["weights_of"]

_TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")


def weights_of(source: nn.Module | Mapping[str, Any] | str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors whose first dimension counts neurons.

    A module's layers are understood (groups, transposed convolutions). Of a state dict or a file, tensors of two
    dimensions or more are taken: rows are neurons, except of names that end in "kernel" (Flax, Keras), whose last
    dimension counts them. Files are safetensors (also a folder of them), or those of `torch.save`, which are opened
    without unrestricted pickles.
    """
    if isinstance(source, nn.Module):
        for layer in find_neurons(source, output=None).layers:
            rows = layer.rows().detach()
            for at, of_set in enumerate(rows):
                yield (layer.name or "weight") + (f"[{at}]" if len(rows) > 1 else ""), of_set
        return
    for name, tensor in _tensors(source):
        if tensor.ndim >= 2 and tensor.is_floating_point():
            of_last = name.split(":")[0].replace("/", ".").split(".")[-1] == "kernel"
            yield name, tensor.movedim(-1, 0) if of_last else tensor


def _tensors(source: Mapping[str, Any] | str | Path) -> Iterator[tuple[str, Tensor]]:
    if isinstance(source, Mapping):
        yield from _nested(source, "")
        return
    accepted = "a module, a state dict, or a path of a file"
    require(isinstance(source, (str, Path)), "model", accepted, type(source).__name__)
    path = Path(source)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    require(bool(files) and all(file.is_file() for file in files), "model", f"{accepted} that exists", str(path))
    for file in files:
        if file.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    yield name, opened.get_tensor(name)
        else:
            known = f"a .safetensors file or one of {', '.join(_TORCH_FILES)}"
            require(file.suffix in _TORCH_FILES, "model", known, str(file))
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            require(isinstance(loaded, Mapping), "model", "a file that holds a dictionary of tensors", str(file))
            yield from _nested(loaded, "")


def _nested(mapping: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Walk through dictionaries of dictionaries; NumPy arrays are welcome."""
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        if isinstance(value, Tensor):
            yield name, value.detach()
        elif isinstance(value, Mapping):
            yield from _nested(value, f"{name}.")
        elif hasattr(value, "__array__"):
            array = torch.as_tensor(value.__array__())
            yield name, array
