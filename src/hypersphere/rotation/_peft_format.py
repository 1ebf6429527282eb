r"""Adapters of PEFT: OFT and BOFT, read and written without importing PEFT.

PEFT computes y = base(x·X), this library y = (x·R)·Vᵀ with R = (I+S)(I−S)⁻¹. So X = R, with

    OFT, exact            X = (I−Q)(I+Q)⁻¹                  S = −Q      Q = U − Uᵀ, U from its upper triangle by rows
    OFT, Cayley–Neumann   X = I + 2Q + 2Q² + 2Q³ + Q⁴      S ≈ Q       the series of (I+Q)(I−Q)⁻¹, cut off
    BOFT                  X = (I−A)(I+A)⁻¹ per factor      S = −A      A = (P−Pᵀ)/2, and outputs scaled by s

The order of blocks and butterfly factors is the same. Formulas and file names are the same as in PEFT 0.18 to 0.21.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hypersphere import _numerics
from hypersphere._validation import is_integer, is_number, require, warn_user
from hypersphere.functions import _factorizations as factorizations
from hypersphere.functions.orthogonal import Cayley, Free, Neumann
from hypersphere.rotation._adapter_files import (
    PEFT_CONFIG,
    TENSORS,
    Adapter,
    LayerAdapter,
    read_json,
    read_tensors,
    tensor_bytes,
    write_files,
)

__all__ = ["read_peft_adapter", "write_peft_adapter"]

_PREFIX = "base_model.model."
# A Cayley–Neumann series counts as exact if no entry of X changes by more than this.
_NEGLIGIBLE_REMAINDER = 1e-6


# Reading -------------------------------------------------------------------------------------------------------------


def read_peft_adapter(folder: Path) -> Adapter:
    """Read an OFT or BOFT adapter that PEFT wrote.

    Raises:
        ValueError: a file is missing or damaged, or it is an adapter of another kind.
    """
    config = _Config(folder / PEFT_CONFIG)
    kind = config.content.get("peft_type")
    require(kind in ("OFT", "BOFT"), str(config.path), "the config of an OFT or BOFT adapter", kind)
    if not (folder / TENSORS).exists():
        raise ValueError(f"{folder} must contain {TENSORS}; other formats, such as pickled .bin files, are not read")
    tensors = read_tensors(folder / TENSORS)
    suffixes = (".oft_R.weight",) if kind == "OFT" else (".boft_R", ".boft_s")
    rotations: dict[str, dict[str, Tensor]] = {}
    weights: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        require(key.startswith(_PREFIX), str(folder / TENSORS), f"a file of tensors {_PREFIX}…", key)
        name = key.removeprefix(_PREFIX)
        suffix = next((suffix for suffix in suffixes if name.endswith(suffix)), None)
        if suffix is not None:
            rotations.setdefault(name.removesuffix(suffix), {})[suffix] = tensor
        elif re.search(r"\b(oft|boft)_", name):
            raise ValueError(
                f"{folder / TENSORS} must be an adapter of PEFT 0.18 or later for layers, not for {name!r}"
            )
        else:  # a bias, or a weight of `modules_to_save`
            weights[name.replace(".base_layer.", ".")] = tensor
    require(bool(rotations), str(folder / TENSORS), "a file with rotations", sorted(weights))
    read = _read_oft if kind == "OFT" else _read_boft
    return Adapter(read(config, rotations), weights, linear_only=kind == "OFT")


class _Config:
    """A config file of PEFT. Missing settings have PEFT's defaults."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = read_json(path)

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean setting."""
        value = self.content.get(name, default)
        require(isinstance(value, bool), f"{name} of {self.path}", "a bool", value)
        return bool(value)

    def number(self, name: str, default: float, accepts: Callable[[Any], bool]) -> float:
        """Return a number, or raise a `ValueError` if it is not accepted."""
        value = self.content.get(name, default)
        require(accepts(value), f"{name} of {self.path}", "in its range", value)
        return float(value)


def _read_oft(config: _Config, rotations: Mapping[str, Mapping[str, Tensor]]) -> dict[str, LayerAdapter]:
    shared = config.flag("block_share", False)
    is_series = config.flag("use_cayley_neumann", True)
    terms = int(config.number("num_cayley_neumann_terms", 5, lambda value: is_integer(value, 1)))
    eps = config.number("eps", 6e-5, lambda value: is_number(value, 0))
    dropout = config.number("module_dropout", 0.0, lambda value: is_number(value, 0) and value < 1)
    if is_series and "peft_version" not in config.content:
        warn_user(f"{config.path}: PEFT 0.18 changed its Cayley–Neumann series, and this adapter seems to be older")
    layers: dict[str, LayerAdapter] = {}
    series: dict[str, Tensor] = {}
    largest_remainder = 0.0
    for name, tensors in rotations.items():
        entries = _numerics.to_float64(tensors[".oft_R.weight"])
        require(entries.ndim == 2, f"{name}.oft_R", "a tensor (blocks, entries)", tuple(entries.shape))
        # COFT limits the norm of each of r blocks to eps/√r.
        bound = eps / math.sqrt(len(entries)) if config.flag("coft", False) else None
        q = _upper_to_skew(entries)
        if bound is not None:
            q = q * (bound / torch.linalg.matrix_norm(q, keepdim=True)).clamp(max=1)
        s = q if is_series else -q
        method = Cayley(bound)
        free = factorizations.pack_generator(s)
        layers[name] = LayerAdapter(method, q.shape[-1], free, shared=shared, dropout=dropout, shape=None)
        if is_series:
            series[name] = _cayley_neumann(q, terms)
            remainder = series[name] - Cayley()(free)
            largest_remainder = max(largest_remainder, float(remainder.abs().max()) if remainder.numel() else 0.0)
    if largest_remainder <= _NEGLIGIBLE_REMAINDER:
        return layers
    warn_user(
        f"the Cayley–Neumann series of this PEFT adapter is {largest_remainder:.0e} away from a rotation; it is loaded "
        "with the method 'free' to give the same outputs, which further training does not keep orthogonal"
    )
    return {name: replace(layer, method=Free(), free=series[name]) for name, layer in layers.items()}


def _read_boft(config: _Config, rotations: Mapping[str, Mapping[str, Tensor]]) -> dict[str, LayerAdapter]:
    dropout = config.number("boft_dropout", 0.0, lambda value: is_number(value, 0) and value < 1)
    layers = {}
    for name, tensors in rotations.items():
        require(".boft_R" in tensors, f"{name}.boft_R", "in the file", None)
        p = _numerics.to_float64(tensors[".boft_R"])
        is_square = p.ndim == 4 and p.shape[-1] == p.shape[-2]
        require(is_square, f"{name}.boft_R", "a tensor (factors, blocks, b, b)", tuple(p.shape))
        scale = tensors.get(".boft_s")
        layers[name] = LayerAdapter(
            method=Cayley(),
            block_size=p.shape[-1],
            free=factorizations.pack_generator((p.mT - p) / 2),
            factors=p.shape[0],
            dropout=dropout,
            row_scale=None if scale is None or bool((scale == 1).all()) else scale.flatten(),
        )
    return layers


def _upper_to_skew(entries: Float[Tensor, "blocks m"]) -> Float[Tensor, "blocks b b"]:
    """Return U − Uᵀ for the entries of a strict upper triangle, row by row."""
    b = factorizations.skew_size(entries.shape[-1])
    require(b * (b - 1) // 2 == entries.shape[-1], "oft_R", "the triangles of square blocks", tuple(entries.shape))
    upper = entries.new_zeros(len(entries), b, b)
    rows, columns = torch.triu_indices(b, b, 1)
    upper[:, rows, columns] = entries
    return upper - upper.mT


def _cayley_neumann(q: Float[Tensor, "blocks b b"], terms: int) -> Float[Tensor, "blocks b b"]:
    """Return PEFT's series with this number of terms: I, I+2Q, and from then on I+2Q+2Q²+…, with the last term once."""
    x = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device).expand_as(q)
    if terms == 1:
        return x.clone()
    x = x + 2 * q
    if terms == 2:
        return x
    power = q @ q
    x = x + 2 * power
    for _ in range(3, terms - 1):
        power = power @ q
        x = x + 2 * power
    return x + power @ q


# Writing -------------------------------------------------------------------------------------------------------------


def write_peft_adapter(folder: Path, adapter: Adapter, base_name: str | None) -> None:
    """Write an adapter that PEFT opens: OFT in its exact form, or BOFT if there are several factors.

    Args:
        folder: where to write.
        adapter: rotations of linear layers.
        base_name: where the base model comes from, for PEFT's config.

    Raises:
        ValueError: PEFT has no such rotation: it uses one dropout, one number of factors and either one block size or
            one number of blocks for all layers.
    """
    layers = adapter.layers
    factors = _common("factors", {layer.factors for layer in layers.values()})
    dropout = _common("dropout", {layer.dropout for layer in layers.values()})
    shared = _common("shared", {layer.shared for layer in layers.values()})
    sizes = {layer.block_size for layer in layers.values()}
    counts = {_length(layer) // layer.block_size for layer in layers.values()}
    # PEFT sets one of the two to 0.
    block_size, block_count = (sizes.pop(), 0) if len(sizes) == 1 else (0, _common("blocks", counts))
    # A list of names would also select layers whose names only end in this way.
    target = "|".join(re.escape(name) for name in layers)
    config: dict[str, Any] = {"base_model_name_or_path": base_name, "inference_mode": True, "target_modules": target}
    config |= {"peft_version": "0.21.0", "bias": "none"}
    tensors = {}
    if factors == 1:
        config |= {"peft_type": "OFT", "r": block_count, "oft_block_size": block_size, "block_share": shared}
        config |= {"module_dropout": dropout, "use_cayley_neumann": False, **_constraint(layers)}
        for name, layer in layers.items():
            s = _generators(name, layer).flatten(0, 1)
            rows, columns = torch.triu_indices(s.shape[-1], s.shape[-1], 1)
            tensors[f"{_PREFIX}{name}.oft_R.weight"] = -s[:, rows, columns].float()
    else:
        config |= {"peft_type": "BOFT", "boft_block_size": block_size, "boft_block_num": block_count}
        config |= {"boft_n_butterfly_factor": factors, "boft_dropout": dropout}
        for name, layer in layers.items():
            blocks = _length(layer) // layer.block_size
            s = _generators(name, layer).expand(-1, blocks, -1, -1)  # BOFT shares no blocks
            tensors[f"{_PREFIX}{name}.boft_R"] = -s.float()
            assert layer.shape is not None
            tensors[f"{_PREFIX}{name}.boft_s"] = torch.ones(layer.shape[0], 1)
    write_files(folder, tensor_bytes(tensors), PEFT_CONFIG, config)


def _common(setting: str, values: set[Any]) -> Any:
    """Return the only value of a setting."""
    require(len(values) == 1, setting, "the same for all layers in the format of PEFT", sorted(values))
    return values.pop()


def _length(layer: LayerAdapter) -> int:
    """Return the number of entries of a neuron."""
    assert layer.shape is not None
    return math.prod(layer.shape[1:])


def _constraint(layers: Mapping[str, LayerAdapter]) -> dict[str, Any]:
    """Return the settings of COFT if one `eps` describes the bounds of all layers. They only matter for training."""
    limits = set()
    for layer in layers.values():
        blocks = 1 if layer.shared else _length(layer) // layer.block_size
        bound = layer.method.bound if isinstance(layer.method, Cayley) else None
        limits.add(None if bound is None else bound * math.sqrt(blocks))
    limit = limits.pop() if len(limits) == 1 else None
    return {"coft": False} if limit is None else {"coft": True, "eps": limit}


def _generators(name: str, layer: LayerAdapter) -> Float[Tensor, "factors blocks b b"]:
    """Return the S of all blocks in float64; a shared matrix is one block."""
    free = _numerics.to_float64(layer.free)
    try:
        is_cayley = isinstance(layer.method, (Cayley, Neumann))
        s = layer.method.generator(free) if is_cayley else factorizations.cayley_generator(layer.method.matrix(free))  # type: ignore[attr-defined]
    except ValueError as error:
        raise ValueError(f"layer {name!r} cannot be written in the format of PEFT: {error}") from None
    return s.reshape(layer.factors, -1, layer.block_size, layer.block_size)
