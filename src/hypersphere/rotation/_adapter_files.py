r"""The files of a rotation adapter: free parameters as safetensors, and a JSON card that says what they mean.

    adapter_model.safetensors    NAME.free: the free parameters of a layer; NAME.base: a sample of its frozen weight
    adapter.json                 methods, layouts and shapes of all layers, and the hash of the other file

Nothing is unpickled, so a file can only contain data. The hash connects the two files: if a process was killed between
writing one and the other, reading fails instead of mixing two adapters.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from jaxtyping import Float
from torch import Tensor

from hypersphere import _numerics
from hypersphere._files import MARK, replacing, strict_json
from hypersphere._validation import is_integer, is_number, require
from hypersphere.functions._rowmap import RowMap
from hypersphere.rotation.layout import BlockLayout
from hypersphere.rotation.parametrization import Side
from hypersphere.rotation.rotate import METHODS, Quantization

__all__ = [
    "CARD",
    "PEFT_CONFIG",
    "TENSORS",
    "Adapter",
    "LayerAdapter",
    "base_sample",
    "read_adapter",
    "read_json",
    "read_tensors",
    "same_base",
    "tensor_bytes",
    "write_adapter",
    "write_files",
]

CARD, PEFT_CONFIG, TENSORS = "adapter.json", "adapter_config.json", "adapter_model.safetensors"
_FORMAT = "hypersphere rotation adapter"
_VERSION = 1
_SAMPLE_SIZE = 64


@dataclass(frozen=True)
class LayerAdapter:
    """The rotation of one layer.

    Attributes:
        method: the map from free parameters to R.
        block_size: b, the size of the blocks of R.
        free: the free parameters.
        shared: one matrix for all blocks.
        factors: the number of butterfly factors.
        side: what the forward pass of a linear layer rotates.
        dropout: the probability with which a block is replaced by the identity in training.
        shape: the shape of the weight, or None if the file does not say it.
        base: a sample of the frozen weight, or None if the file has none.
        row_scale: the factors of the outputs (BOFT's scale), or None.
        quantize: "int8" if the frozen weight was stored as integers in training. It is quantised again when the adapter
            is loaded, and `base` is a sample of the quantised weight.
    """

    method: RowMap
    block_size: int
    free: Tensor
    shared: bool = False
    factors: int = 1
    side: Side = "auto"
    dropout: float = 0.0
    shape: tuple[int, ...] | None = None
    base: Tensor | None = None
    row_scale: Tensor | None = None
    quantize: Quantization | None = None

    def layout(self, length: int) -> BlockLayout:
        """Return the layout for neurons of this length, or raise a `ValueError`."""
        accepted = f"a divisor of {length}, the length of a neuron"
        fits = is_integer(self.block_size, 1) and length % self.block_size == 0
        require(fits, "block_size", accepted, self.block_size)
        return BlockLayout(length, length // self.block_size, self.shared, self.factors)


@dataclass(frozen=True)
class Adapter:
    """The rotations of several layers.

    Attributes:
        layers: the rotations by the name of their layer.
        weights: complete tensors by name that replace tensors of the model: biases and modules that were also trained.
        linear_only: the rotations mean something else for convolutions (OFT of PEFT).
    """

    layers: Mapping[str, LayerAdapter]
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    linear_only: bool = False


def base_sample(weight: Float[Tensor, "..."]) -> Float[Tensor, " samples"]:
    """Return up to 64 entries of a weight at fixed positions, spread over all of it."""
    flat = weight.detach().flatten()
    count = min(_SAMPLE_SIZE, flat.numel())
    positions = [i * (flat.numel() - 1) // max(count - 1, 1) for i in range(count)]
    return flat[torch.tensor(positions, dtype=torch.long, device=flat.device)].cpu()


def same_base(stored: Float[Tensor, " samples"], weight: Float[Tensor, "..."]) -> bool:
    """Return True if a weight has the stored sample, up to the rounding of the narrower dtype if the dtypes differ."""
    sample = base_sample(weight)
    if stored.dtype == sample.dtype:
        return stored.equal(sample)
    tolerance = max(_numerics.machine_epsilon(stored.dtype), _numerics.machine_epsilon(sample.dtype))
    difference = (_numerics.to_float64(stored) - _numerics.to_float64(sample)).abs()
    return bool((difference <= tolerance * _numerics.to_float64(stored).abs().amax()).all())


# Writing -------------------------------------------------------------------------------------------------------------


def write_adapter(folder: Path, adapter: Adapter) -> None:
    """Write an adapter in the format of this library."""
    tensors: dict[str, Tensor] = {}
    groups: dict[str, dict[str, Any]] = {}  # settings and the shapes of the layers that have them
    for name, layer in adapter.layers.items():
        tensors[f"{name}.free"] = layer.free
        if layer.base is not None:
            tensors[f"{name}.base"] = layer.base
        settings = {
            "method": _method_name(layer.method),
            "options": dataclasses.asdict(layer.method),  # type: ignore[call-overload]
            "block_size": layer.block_size,
            "shared": layer.shared,
            "factors": layer.factors,
            "dropout": layer.dropout,
            "side": layer.side,
            "quantize": layer.quantize,
        }
        group = groups.setdefault(strict_json(settings), {**settings, "layers": {}})
        group["layers"][name] = layer.shape
    content = tensor_bytes(tensors)
    card = {
        "format": _FORMAT,
        "format_version": _VERSION,
        "library": "hypersphere " + importlib.import_module("hypersphere").__version__,
        "comment": MARK,
        "sha256": hashlib.sha256(content).hexdigest(),
        "rotations": list(groups.values()),
    }
    write_files(folder, content, CARD, card)


def _method_name(method: RowMap) -> str:
    name = next((name for name, entry in METHODS.items() if type(method) is entry), None)
    require(
        name is not None, "method", "an entry of hypersphere.orthogonal or hypersphere.transform to save it", method
    )
    assert name is not None
    return name


def tensor_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the content of a safetensors file."""
    content = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return safetensors.torch.save(content, {"format": "pt", "comment": MARK})


def write_files(folder: Path, tensors: bytes, card_name: str, card: Mapping[str, Any]) -> None:
    """Write the two files of an adapter. Files of other programs, or of the other format, are not replaced."""
    require(folder.is_dir() or not folder.exists(), "folder", "a new or an existing folder", str(folder))
    other_card = CARD if card_name == PEFT_CONFIG else PEFT_CONFIG
    is_ours = _is_written_by_us(folder / TENSORS)
    for name in (TENSORS, card_name, other_card):
        blocks = (folder / name).exists() and (name == other_card or not is_ours)
        require(not blocks, "folder", f"empty or an earlier adapter of the same format, without another {name}", folder)
    # Both files are complete on the disk before the first one is replaced.
    with replacing(folder / card_name) as card_draft, replacing(folder / TENSORS) as tensors_draft:
        tensors_draft.write_bytes(tensors)
        card_draft.write_text(strict_json(card, indent=2) + "\n", encoding="utf-8")


def _is_written_by_us(path: Path) -> bool:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("comment") == MARK
    except (OSError, safetensors.SafetensorError):
        return False


# Reading -------------------------------------------------------------------------------------------------------------


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter in the format of this library.

    Raises:
        ValueError: a file is missing or damaged; the message names it.
    """
    path = folder / CARD
    card = read_json(path)
    require(card.get("format") == _FORMAT, str(path), f"the card of a {_FORMAT}", card.get("format"))
    require(card.get("format_version") == _VERSION, str(path), f"of version {_VERSION}", card.get("format_version"))
    tensors = read_tensors(folder / TENSORS, sha256=card.get("sha256"))
    layers: dict[str, LayerAdapter] = {}
    try:
        for group in card["rotations"]:
            method, dropout = METHODS[group["method"]](**group["options"]), group["dropout"]
            require(is_number(dropout, 0) and dropout < 1, "dropout", "a number in [0, 1)", dropout)
            require(group["side"] in ("auto", "weight", "input"), "side", "'auto', 'weight' or 'input'", group["side"])
            quantize = group.get("quantize")  # missing in files of the first development versions
            require(quantize in (None, "int8"), "quantize", "None or 'int8'", quantize)
            for name, shape in group["layers"].items():
                layers[name] = LayerAdapter(
                    method=method,
                    block_size=group["block_size"],
                    free=tensors[f"{name}.free"],
                    shared=bool(group["shared"]),
                    factors=group["factors"],
                    side=group["side"],
                    dropout=dropout,
                    shape=tuple(shape),
                    base=tensors.get(f"{name}.base"),
                    quantize=quantize,
                )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    return Adapter(layers)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or raise a `ValueError` that names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    require(isinstance(content, dict), str(path), "a JSON object", type(content).__name__)
    return dict(content)


def read_tensors(path: Path, *, sha256: str | None = None) -> dict[str, Tensor]:
    """Read a safetensors file, or raise a `ValueError` that names it."""
    try:
        content = path.read_bytes()
        if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
            raise ValueError("it is not the file that the card describes")
        tensors = safetensors.torch.load(content)
        for name, tensor in tensors.items():
            if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name} has values that are not finite numbers")
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return tensors
