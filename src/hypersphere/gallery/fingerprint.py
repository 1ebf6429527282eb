"""Fingerprints of models, which distinguish embeddings of different models."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere._state_files import flatten
from hypersphere._validation import require

__all__ = ["fingerprint_of"]


def fingerprint_of(model: nn.Module | Mapping[str, Any]) -> str:
    """Return a string that identifies the weights of a model: the first 32 hexadecimal digits of a SHA-256.

    It depends on the names, dtypes, shapes and values of the state dict. The order of the names, the device, and the
    wrappers of `torch.compile` and `DistributedDataParallel` do not matter. Preprocessing and the architecture beyond
    the weights are not included.

    Args:
        model: a module or its state dict. For a run, pass `run.experiment(step="best", with_data=False).network`.

    Example:
        >>> model = nn.Linear(2, 3)
        >>> first = fingerprint_of(model)
        >>> first == fingerprint_of(model.state_dict()), len(first)
        (True, 32)
        >>> _ = nn.init.zeros_(model.bias)
        >>> first == fingerprint_of(model)
        False
    """
    state = model.state_dict() if isinstance(model, nn.Module) else model
    require(isinstance(state, Mapping), "model", "a module or a state dict", type(model).__name__)
    _, tensors = flatten(dict(state), "model", keep_strides=False)
    require(len(tensors) > 0, "model", "a module or a state dict with tensors", type(model).__name__)
    checksum = hashlib.sha256()
    named = [(_plain_name(name), stored.tensor) for name, stored in tensors.items()]
    for name, tensor in sorted(named, key=lambda pair: pair[0]):
        checksum.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        checksum.update(_raw_bytes(tensor))
    return checksum.hexdigest()[:32]


def _plain_name(name: str) -> str:
    """Return the name of a parameter without the prefixes of wrappers."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _raw_bytes(tensor: Tensor) -> Any:
    # NumPy has no bfloat16, so view the memory as bytes. A scalar must be flattened before it can be viewed.
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
