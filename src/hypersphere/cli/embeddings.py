"""Files of embeddings: a matrix as .npy or .safetensors, and beside it a .json with names, labels and classes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from hypersphere._files import replacing
from hypersphere._validation import require
from hypersphere.data import DamagedData, MissingData

__all__ = ["SUFFIXES", "Embeddings", "read_array", "read_embeddings", "write_embeddings"]

SUFFIXES = (".npy", ".safetensors")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Features (N, d), and where they are known labels (N,), the names of the N inputs and of the classes."""

    features: Tensor
    labels: Tensor | None = None
    names: tuple[str, ...] | None = None
    classes: tuple[str, ...] | None = None


def write_embeddings(path: Path, embeddings: Embeddings) -> Path:
    """Write the matrix and, under the same name, the .json; return the path of that."""
    beside = path.with_suffix(".json")
    labels = None if embeddings.labels is None else embeddings.labels.tolist()
    words = {"names": embeddings.names, "labels": labels, "classes": embeddings.classes}
    features = embeddings.features.detach().cpu().contiguous()
    with replacing(path) as draft, replacing(beside) as draft_beside:
        with draft.open("wb") as file:
            if path.suffix == ".npy":
                np.save(file, features.numpy(), allow_pickle=False)
            else:
                tensors = {"features": features}
                if embeddings.labels is not None:
                    tensors["labels"] = embeddings.labels.detach().cpu().contiguous()
                file.write(save(tensors))
        draft_beside.write_text(json.dumps(words) + "\n", encoding="utf-8")
    return beside


def read_embeddings(path: Path) -> Embeddings:
    """Read what `write_embeddings` wrote; any .npy matrix, or .safetensors with "features", will do.

    Raises:
        MissingData: there is no such file.
        DamagedData: it does not hold what it should, or the .json beside it is of something else.
    """
    require(path.suffix in SUFFIXES, "embeddings", f"a file that ends in {' or '.join(SUFFIXES)}", str(path))
    if path.suffix == ".npy":
        return _with_words(path, Embeddings(torch.from_numpy(read_array(path))))
    if not path.is_file():
        raise MissingData(f"{path} not found")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise DamagedData(f"{path} is not a readable safetensors file: {error}") from None
    require("features" in tensors, str(path), 'a file with a tensor "features"', sorted(tensors))
    features, labels = tensors["features"], tensors.get("labels")
    fits = features.ndim == 2 and features.dtype in FLOATS
    if not fits or (labels is not None and labels.shape != features.shape[:1]):
        found = {name: f"{tensor.dtype} {tuple(tensor.shape)}" for name, tensor in sorted(tensors.items())}
        raise DamagedData(f"{path} must hold features (N, d) of floating point, and labels (N,) if any, not {found}")
    return _with_words(path, Embeddings(features, labels))


def read_array(path: Path) -> np.ndarray:
    """Read a .npy of numbers; one that holds pickled objects is refused unopened."""
    if not path.is_file():
        raise MissingData(f"{path} not found")
    try:
        array = np.load(path, allow_pickle=False)
    except MemoryError:
        raise DamagedData(f"{path} is not a readable .npy file: it claims to be larger than memory") from None
    except (ValueError, EOFError, SyntaxError) as error:
        reason = "it holds pickled objects, which are not opened" if "pickle" in str(error) else str(error)
        raise DamagedData(f"{path} is not a readable .npy file: {' '.join(reason.split())}") from None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf" or not array.ndim:
        raise DamagedData(f"{path} must hold one array of real numbers, not {getattr(array, 'dtype', type(array))}")
    if array.dtype.itemsize > 8:
        return array.astype(np.float64)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _with_words(path: Path, bare: Embeddings) -> Embeddings:
    beside = path.with_suffix(".json")
    if not beside.is_file():
        return bare
    try:
        words = json.loads(beside.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DamagedData(f"{beside} is not readable JSON: {error}") from None
    if not isinstance(words, Mapping) or not {"names", "labels", "classes"} <= set(words):
        return bare  # another file that happens to have this name
    names, labels, classes = (_listed(beside, words, key) for key in ("names", "labels", "classes"))
    for key, found in (("names", names), ("labels", labels)):
        if found is not None and len(found) != len(bare.features):
            raise DamagedData(
                f"{beside} must have {len(bare.features)} {key}, as many as {path.name}, not {len(found)}"
            )
    known = bare.labels
    if known is None and labels is not None:
        known = torch.tensor(labels, dtype=torch.int64)
    words_of = [None if found is None else tuple(map(str, found)) for found in (names, classes)]
    return Embeddings(bare.features, known, *words_of)


def _listed(path: Path, words: Mapping[str, Any], key: str) -> list[Any] | None:
    found = words[key]
    listed = found is None or isinstance(found, list)
    if not listed or (key == "labels" and not all(type(label) is int for label in found or ())):
        raise DamagedData(f"{path}: {key} must be a list or null")
    return found
