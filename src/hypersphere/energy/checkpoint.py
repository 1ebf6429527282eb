"""The weights of a model, a state dict or a file, one tensor at a time, without the model's code."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere._validation import require
from hypersphere.energy.neurons import find_neurons

__all__ = ["UnreadableWeights", "weights_of"]

_COLORS = re.compile("\x1b\\[[0-9;]*m")
_DEEPEST = 32
_TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")


class UnreadableWeights(ValueError):
    """A file that is no file of weights, or a broken one."""


def weights_of(source: nn.Module | Mapping[str, Any] | str | Path) -> Iterator[tuple[str, Tensor | str]]:
    """Yield names and tensors whose first dimension counts neurons, or why one is left out.

    A module's layers are understood (groups, transposed convolutions). Of a state dict or a file, tensors of two
    dimensions or more are taken: rows are neurons, except of names that end in "kernel" (Flax, Keras), whose last
    dimension counts them. The state of an optimiser is left out. Files are safetensors (also a folder of them), or
    those of `torch.save`, which are opened without unrestricted pickles.
    """
    if isinstance(source, nn.Module):
        yield from _of_module(source)
        return
    for name, tensor in _tensors(source):
        if isinstance(tensor, str):
            yield name, tensor
        elif tensor.ndim >= 2 and tensor.is_floating_point():
            of_last = name.split(":")[0].replace("/", ".").split(".")[-1] == "kernel"
            fault = _fault(tensor)
            if fault is None and tensor.dtype.itemsize == 1:  # eight bits, with which torch does not compute
                tensor = tensor.float()
            yield name, fault or (tensor.movedim(-1, 0) if of_last else tensor)


def _of_module(module: nn.Module) -> Iterator[tuple[str, Tensor | str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is left out is told below
        found = find_neurons(module, output=None)
    for layer in found.layers:
        rows = layer.rows().detach()
        for at, of_set in enumerate(rows):
            name = (layer.name or "weight") + (f"[{at}]" if len(rows) > 1 else "")
            yield name, _fault(of_set) or of_set
    for name in found.skipped:
        yield name or "weight", "one neuron to a set"


def _fault(tensor: Tensor) -> str | None:
    if tensor.is_meta:
        return "on the meta device, without numbers"
    if tensor.layout != torch.strided:
        return "sparse"
    return f"of the packed type {tensor.dtype}" if "float4" in str(tensor.dtype) else None


def _tensors(source: Mapping[str, Any] | str | Path) -> Iterator[tuple[str, Tensor | str]]:
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
            yield from _of_safetensors(file)
        else:
            known = f"a .safetensors file or one of {', '.join(_TORCH_FILES)}"
            require(file.suffix in _TORCH_FILES, "model", known, str(file))
            with _told(file):
                loaded = _loaded(file)
            require(isinstance(loaded, Mapping), "model", "a file that holds a dictionary of tensors", str(file))
            yield from _nested(loaded, "")


def _of_safetensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    with _told(file):
        opened = safe_open(file, framework="pt")
    with opened as tensors:
        for name in tensors.keys():  # noqa: SIM118
            with _told(file):
                tensor = tensors.get_tensor(name)
            yield name, tensor


def _loaded(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # files of old cannot be mapped
        return torch.load(file, map_location="cpu", weights_only=True)


@contextlib.contextmanager
def _told(file: Path) -> Iterator[None]:
    """Turn whatever a broken or foreign file fails with into one line with its name."""
    try:
        yield
    except Exception as error:
        reason = _COLORS.sub("", str(error)).strip().partition("\n")[0].rstrip(": ") or type(error).__name__
        words = f"{file} cannot be opened as a file of weights, without running code: {reason}"
        raise UnreadableWeights(words) from None


def _nested(mapping: Mapping[Any, Any], prefix: str, above: tuple[int, ...] = ()) -> Iterator[tuple[str, Tensor | str]]:
    """Walk through dictionaries of dictionaries; NumPy arrays are welcome."""
    if id(mapping) in above or len(above) > _DEEPEST:
        itself = id(mapping) in above
        yield prefix[:40], "a dictionary that holds itself" if itself else f"within more than {_DEEPEST} dictionaries"
        return
    if prefix and (_is_optimiser(mapping) or prefix.split(".")[-2].lower().startswith("optim")):
        yield prefix[:-1], "the state of an optimiser"
        return
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        if isinstance(value, Tensor):
            yield name, value.detach()
        elif isinstance(value, Mapping):
            yield from _nested(value, f"{name}.", (*above, id(mapping)))
        elif hasattr(value, "__array__"):
            try:
                yield name, torch.as_tensor(value.__array__())
            except TypeError:
                yield name, f"an array of {value.__array__().dtype}"


def _is_optimiser(mapping: Mapping[Any, Any]) -> bool:
    return "state" in mapping and "param_groups" in mapping
