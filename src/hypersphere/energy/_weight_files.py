"""Read the weights of a model, a state dict or a file, one tensor at a time and without the code of the model."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere._layer_selection import layers_of
from hypersphere._validation import require

__all__ = ["UnreadableWeights", "read_neurons"]

_TERMINAL_COLORS = re.compile("\x1b\\[[0-9;]*m")
_MAX_DEPTH = 32
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
# Weights whose last dimension counts neurons: weights of Flax and Keras ("kernel"), and of the `Conv1D` of GPT-2.
_NEURONS_LAST = re.compile(r"(^|\.)(kernel|(c_attn|c_fc|c_proj|q_attn)\.weight)$")
# Names of dictionaries with the state of an optimiser: "optimizer_state_dict", "optimiser", "optim", but not "optimus".
_OPTIMIZER = re.compile(r"(?i:optimi[sz]er)|(?i:optim)(?![a-z])")


class UnreadableWeights(ValueError):
    """A file that holds no weights, or a damaged one."""


def read_neurons(source: nn.Module | Mapping[str, Any] | str | Path) -> Iterator[tuple[str, Tensor | str]]:
    """Yield names and tensors whose first dimension counts neurons, or names and the reason why one is skipped.

    The layers of a module are found by `layers_of`. From a state dict or a file, all tensors with two or more
    dimensions are read. Rows are neurons, except for names that end in "kernel" (Flax, Keras) and the `Conv1D` layers
    of GPT-2, whose last dimension counts neurons. The state of an optimiser is skipped. Files are safetensors, a folder
    of them, or files of `torch.save`, which are opened without unrestricted pickles.
    """
    if isinstance(source, nn.Module):
        yield from _read_module(source)
        return
    for name, tensor in _read_tensors(source):
        if isinstance(tensor, str):
            yield name, tensor
        elif tensor.ndim >= 2 and tensor.is_floating_point():
            defect = _defect(tensor)
            if defect is None and tensor.dtype.itemsize == 1:  # torch cannot compute with 8-bit floats
                tensor = tensor.float()
            neurons_last = _NEURONS_LAST.search(name.split(":")[0].replace("/", "."))
            yield name, defect or (tensor.movedim(-1, 0) if neurons_last else tensor)


def _read_module(module: nn.Module) -> Iterator[tuple[str, Tensor | str]]:
    selection = layers_of(module, output_layer=None).without(
        lambda layer: "one neuron per set" if layer.shape[1] < 2 else None
    )
    for layer in selection:
        sets = layer.row_sets().detach()
        for index, rows in enumerate(sets):
            name = layer.name + (f"[{index}]" if len(sets) > 1 else "")
            yield name, _defect(rows) or rows
    for skip in selection.skipped:
        yield skip.name, skip.reason


def _defect(tensor: Tensor) -> str | None:
    """Return why a tensor cannot be inspected, or None."""
    if tensor.is_meta:
        return "on the meta device, without values"
    if tensor.layout != torch.strided:
        return "sparse"
    return f"of the packed dtype {tensor.dtype}" if "float4" in str(tensor.dtype) else None


def _read_tensors(source: Mapping[str, Any] | str | Path) -> Iterator[tuple[str, Tensor | str]]:
    if isinstance(source, Mapping):
        yield from _read_mapping(source, "")
        return
    accepted = "a module, a state dict, or the path of a file"
    require(isinstance(source, (str, Path)), "model", accepted, type(source).__name__)
    path = Path(source)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    require(bool(files) and all(file.is_file() for file in files), "model", f"{accepted} that exists", str(path))
    for file in files:
        if file.suffix == ".safetensors":
            yield from _read_safetensors(file)
        else:
            suffixes = f"a .safetensors file or one of {', '.join(_TORCH_SUFFIXES)}"
            require(file.suffix in _TORCH_SUFFIXES, "model", suffixes, str(file))
            with _named_errors(file):
                content = _load_torch_file(file)
            require(isinstance(content, Mapping), "model", "a file that holds a dictionary of tensors", str(file))
            yield from _read_mapping(content, "")


def _read_safetensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    with _named_errors(file):
        opened = safe_open(file, framework="pt")
    with opened as tensors:
        for name in tensors.keys():  # noqa: SIM118
            with _named_errors(file):
                tensor = tensors.get_tensor(name)
            yield name, tensor


def _load_torch_file(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # files in the format before torch 1.6 cannot be memory-mapped
        return torch.load(file, map_location="cpu", weights_only=True)


@contextlib.contextmanager
def _named_errors(file: Path) -> Iterator[None]:
    """Turn any failure to read a damaged or foreign file into a one-line error with its name."""
    try:
        yield
    except Exception as error:
        # torch explains at length, in colours, how to allow pickles. The first line says what is wrong.
        text = _TERMINAL_COLORS.sub("", str(error)).strip().partition("\n")[0].rstrip(": ")
        reason = text or type(error).__name__
        message = f"{file} cannot be opened as a file of weights, without running code: {reason}"
        raise UnreadableWeights(message) from None


def _read_mapping(
    mapping: Mapping[Any, Any], prefix: str, parents: tuple[int, ...] = ()
) -> Iterator[tuple[str, Tensor | str]]:
    """Yield the tensors and NumPy arrays of nested dictionaries."""
    if id(mapping) in parents:
        yield prefix[:40], "a dictionary that contains itself"
        return
    if len(parents) > _MAX_DEPTH:
        yield prefix[:40], f"nested in more than {_MAX_DEPTH} dictionaries"
        return
    # Moments of an optimiser have the shapes of weights and would be taken for neurons.
    is_optimizer = "state" in mapping and "param_groups" in mapping
    if prefix and (is_optimizer or _OPTIMIZER.match(prefix.split(".")[-2])):
        yield prefix[:-1], "the state of an optimiser"
        return
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        if isinstance(value, Tensor):
            yield name, value.detach()
        elif isinstance(value, Mapping):
            yield from _read_mapping(value, f"{name}.", (*parents, id(mapping)))
        elif hasattr(value, "__array__"):
            try:
                yield name, torch.as_tensor(value.__array__())
            except TypeError:
                yield name, f"an array of {value.__array__().dtype}"
