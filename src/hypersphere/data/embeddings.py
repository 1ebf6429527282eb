"""Files of embeddings: a matrix as .npy or .safetensors, and a .json file with names, labels and classes next to it."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from hypersphere._files import MARK, replacing
from hypersphere._validation import is_integer, require
from hypersphere.data._files import DamagedData, MissingData

__all__ = ["SUFFIXES", "Embeddings", "described_file", "read_array", "read_embeddings", "write_embeddings"]

SUFFIXES = (".npy", ".safetensors")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Features (N, d) and, if available, labels (N,), the names of the N inputs and the names of the classes."""

    features: Tensor
    labels: Tensor | None = None
    names: tuple[str, ...] | None = None
    classes: tuple[str, ...] | None = None


def write_embeddings(path: Path, embeddings: Embeddings) -> Path:
    """Write the matrix and a .json file next to it; return the path of the .json file."""
    description = path.with_suffix(".json")
    labels = None if embeddings.labels is None else embeddings.labels.tolist()
    content = {
        "note": MARK,
        "file": path.name,
        "names": embeddings.names,
        "labels": labels,
        "classes": embeddings.classes,
    }
    features = embeddings.features.detach().cpu().contiguous()
    with replacing(path) as draft, replacing(description) as draft_description:
        with draft.open("wb") as file:
            if path.suffix == ".npy":
                np.save(file, features.numpy(), allow_pickle=False)
            else:
                tensors = {"features": features}
                if embeddings.labels is not None:
                    tensors["labels"] = embeddings.labels.detach().cpu().contiguous()
                file.write(save(tensors))
        draft_description.write_text(json.dumps(content) + "\n", encoding="utf-8")
    return description


def described_file(description: Path) -> str | None:
    """Return the name of the embeddings that a .json file of `write_embeddings` describes.

    Returns:
        None if the file does not say it: it is another file, or one of version 0.1.
    """
    try:
        content = json.loads(description.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    name = content.get("file") if isinstance(content, Mapping) and "names" in content else None
    return name if isinstance(name, str) else None


def read_embeddings(path: Path) -> Embeddings:
    """Read embeddings: files of `write_embeddings`, any .npy matrix, or .safetensors with a tensor "features".

    Raises:
        MissingData: if the file does not exist.
        DamagedData: if its content is not valid, or does not match that of the .json file.
    """
    require(path.suffix in SUFFIXES, "embeddings", f"a file with suffix {' or '.join(SUFFIXES)}", str(path))
    if path.suffix == ".npy":
        return _with_description(path, Embeddings(torch.from_numpy(read_array(path))))
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
        contents = {name: f"{tensor.dtype} {tuple(tensor.shape)}" for name, tensor in sorted(tensors.items())}
        raise DamagedData(f"{path} must hold floating-point features (N, d) and optional labels (N,), not {contents}")
    return _with_description(path, Embeddings(features, labels))


def read_array(path: Path, *, texts: bool = False) -> np.ndarray:
    """Read a .npy file of real numbers, or also of texts; pickled objects are rejected without unpickling them."""
    if not path.is_file():
        raise MissingData(f"{path} not found")
    try:
        array = np.load(path, allow_pickle=False)
    except MemoryError:
        raise DamagedData(f"{path} is not a readable .npy file: the size in its header exceeds the memory") from None
    except (ValueError, EOFError, SyntaxError, zipfile.BadZipFile) as error:
        reason = "it holds pickled objects, which are not loaded" if "pickle" in str(error) else str(error)
        raise DamagedData(f"{path} is not a readable .npy file: {' '.join(reason.split())}") from None
    kinds, accepted = ("biufU", "real numbers or texts") if texts else ("biuf", "real numbers")
    if not isinstance(array, np.ndarray) or array.dtype.kind not in kinds or not array.ndim:
        raise DamagedData(f"{path} must hold an array of {accepted}, not {getattr(array, 'dtype', type(array))}")
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:  # long double, which torch does not have
        return array.astype(np.float64)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _with_description(path: Path, matrix: Embeddings) -> Embeddings:
    """Return the embeddings with the names, labels and classes of the .json file next to them, if there is one."""
    description = path.with_suffix(".json")
    if not description.is_file():
        return matrix
    try:
        content = json.loads(description.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DamagedData(f"{description} is not readable JSON: {error}") from None
    if not isinstance(content, Mapping) or not {"names", "labels", "classes"} <= set(content):
        return matrix  # an unrelated file with this name
    names, labels, classes = (_list_or_none(description, content, key) for key in ("names", "labels", "classes"))
    for key, values in (("names", names), ("labels", labels)):
        if values is not None and len(values) != len(matrix.features):
            raise DamagedData(
                f"{description} must have {len(matrix.features)} {key}, as many as {path.name}, not {len(values)}"
            )
    label_tensor = matrix.labels
    if label_tensor is None and labels is not None:
        label_tensor = torch.tensor(labels, dtype=torch.int64)
    texts = [None if values is None else tuple(map(str, values)) for values in (names, classes)]
    return Embeddings(matrix.features, label_tensor, *texts)


def _list_or_none(path: Path, content: Mapping[str, Any], key: str) -> list[Any] | None:
    """Return the list under a key of the .json file, or None; labels must be integers."""
    values = content[key]
    is_list = values is None or isinstance(values, list)
    if not is_list or (key == "labels" and not all(is_integer(label, -(2**63), 2**63 - 1) for label in values or ())):
        raise DamagedData(
            f"{path}: {key} must be a list{' of integers' * (key == 'labels')} or null, not {values!r:.80}"
        )
    return values
