"""Nested states as safetensors plus JSON, with large tensors divided by rows among processes.

A state is a tree of dictionaries, lists, numbers, text and tensors, such as the result of `state_dict`. `flatten` turns
it into a *skeleton*, a JSON value that keeps every type, and a flat dictionary of tensors, which safetensors stores.
Reading needs no pickle, so a file can only contain data.

If the rows of a tensor are divided among processes, each process writes its rows into a separate file. Because the
header of the file records which rows they are, any number of processes can read the tensor again, and each reads only
the rows that it needs.
"""

from __future__ import annotations

import base64
import json
import numbers
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

__all__ = ["Rows", "StoredTensor", "TensorFiles", "flatten", "unflatten", "write_tensors"]

ACCEPTED = "tensors, numbers, text, None, or lists, tuples and dictionaries of them"
_TAG = "$"  # key of a JSON object that represents a type that JSON lacks; its value is the name of the type
_PLAIN = (type(None), bool, str)
_SEQUENCES: dict[str, Callable[..., Any]] = {"tuple": tuple, "Size": torch.Size}
_MAPPINGS: dict[str, Callable[..., Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}


@dataclass(frozen=True)
class Rows:
    """The rows `start` to `stop` of a tensor that has `total` rows."""

    start: int
    stop: int
    total: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that this process stores: a complete one, or `rows` of one that is divided among processes."""

    tensor: Tensor
    rows: Rows | None = None


def flatten(
    value: Any,
    name: str,
    local_part: Callable[[str, Tensor], StoredTensor] = lambda path, tensor: StoredTensor(tensor),
    *,
    keep_strides: bool = True,
) -> tuple[Any, dict[str, StoredTensor]]:
    """Return the skeleton of a state and its tensors by path; raise a `ValueError` for an object of another type.

    Parameters become tensors, other mappings become dictionaries, and float64 and integers of NumPy become Python
    numbers, all without loss.

    Args:
        value: any state.
        name: its name in error messages.
        local_part: maps a tensor and its path to the part that this process stores.
        keep_strides: also restore the strides of tensors, by storing some of them with permuted dimensions.

    Example:
        >>> skeleton, tensors = flatten({"step": 3, "mean": torch.zeros(2)}, "state")
        >>> skeleton, list(tensors)
        ({'step': 3, 'mean': {'$': 'tensor', 'key': 'mean'}}, ['mean'])
        >>> flatten({"rates": [0.1, max]}, "state")
        Traceback (most recent call last):
        ValueError: state['rates'][1] must be tensors, numbers, ..., not builtin_function_or_method
    """
    tensors: dict[str, StoredTensor] = {}

    def flatten_value(value: Any, name: str, path: tuple[str, ...]) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, float):
            return float(value)
        if isinstance(value, numbers.Integral):
            return int(value)
        if isinstance(value, Tensor):
            return flatten_tensor(value, name, path)
        if kind in (list, *_SEQUENCES.values()):
            items = [flatten_value(item, f"{name}[{at}]", (*path, str(at))) for at, item in enumerate(value)]
            return items if kind is list else {_TAG: kind.__name__, "items": items}
        if kind is bytes:
            return {_TAG: "bytes", "base64": base64.b64encode(value).decode("ascii")}
        if kind in (torch.dtype, torch.device):
            return {_TAG: kind.__name__, "name": str(value).removeprefix("torch.")}
        if isinstance(value, Mapping):
            keys = [flatten_value(key, f"a key of {name}", ()) for key in value]
            items = [flatten_value(item, f"{name}[{key!r}]", (*path, str(key))) for key, item in value.items()]
            kind_name = kind.__name__ if kind in _MAPPINGS.values() else "dict"
            if kind_name == "dict" and all(type(key) is str and key != _TAG for key in keys):
                return dict(zip(keys, items, strict=True))
            return {_TAG: kind_name, "items": [list(pair) for pair in zip(keys, items, strict=True)]}
        raise ValueError(f"{name} must be {ACCEPTED}, not {kind.__name__}")

    def flatten_tensor(value: Tensor, name: str, path: tuple[str, ...]) -> Any:
        key = ".".join(path)
        stored = local_part(key, value.detach())
        tensor = stored.tensor
        if type(tensor) is not Tensor or tensor.is_meta:
            raise ValueError(f"{name} must be a plain tensor with data, not {type(tensor).__name__} on {tensor.device}")
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise ValueError(f"{name} must be a dense tensor, not {tensor.layout} of {tensor.dtype}")
        while key in tensors:  # the keys 1 and "1" of a dictionary have the same path
            key += "'"
        reference: dict[str, Any] = {_TAG: "tensor", "key": key}
        if tensor.is_complex():
            reference["complex"] = True
            tensor = torch.view_as_real(tensor.resolve_conj())
        # safetensors stores contiguous tensors, so dimensions are sorted by decreasing stride, and sorted back later.
        order = sorted(range(tensor.ndim), key=lambda dim: tensor.stride()[dim], reverse=True)
        if keep_strides and stored.rows is None and order != list(range(tensor.ndim)):
            reference["order"] = order
            tensor = tensor.permute(order)
        tensors[key] = StoredTensor(tensor, stored.rows)
        return reference

    return flatten_value(value, name, ()), tensors


def unflatten(skeleton: Any, read: Callable[[str], Tensor]) -> Any:
    """Return the state with this skeleton; `read` returns the tensor of a path.

    Raises:
        ValueError: the skeleton is invalid.
    """
    if isinstance(skeleton, list):
        return [unflatten(item, read) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    kind = skeleton.get(_TAG)
    if kind is None:
        return {key: unflatten(item, read) for key, item in skeleton.items()}
    if kind == "tensor":
        tensor = read(skeleton["key"])
        order = skeleton.get("order")
        if order is not None:
            tensor = tensor.permute([order.index(dim) for dim in range(len(order))])
        return torch.view_as_complex(tensor) if skeleton.get("complex") else tensor
    if kind == "bytes":
        return base64.b64decode(skeleton["base64"], validate=True)
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](unflatten(item, read) for item in skeleton["items"])
    if kind == "dtype" and isinstance(getattr(torch, skeleton["name"], None), torch.dtype):
        return getattr(torch, skeleton["name"])
    if kind == "device":
        return torch.device(skeleton["name"])
    if kind in _MAPPINGS:
        pairs = [(unflatten(key, read), unflatten(item, read)) for key, item in skeleton["items"]]
        return _MAPPINGS[kind](dict(pairs))
    raise ValueError(f"skeleton must contain only known types, not {kind!r}")


def write_tensors(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write tensors to a safetensors file, whose header records which rows of divided tensors it holds."""
    content: dict[str, Tensor] = {}
    written: set[int] = set()
    for name, stored in tensors.items():
        tensor = stored.tensor.detach().cpu().contiguous()
        memory = tensor.untyped_storage()
        # safetensors rejects tensors that share memory. Tied tensors are stored once per name, and views are copied
        # without the rest of their storage.
        needs_copy = memory.data_ptr() in written or memory.nbytes() != tensor.nbytes
        content[name] = tensor.clone() if needs_copy else tensor
        written.add(content[name].untyped_storage().data_ptr())
    rows = {name: [stored.rows.start, stored.rows.total] for name, stored in tensors.items() if stored.rows is not None}
    save_file(content, path, {"format": "pt", "rows": json.dumps(rows)})


class TensorFiles:
    """The tensors in one or more safetensors files, of which some may be divided by rows over the files.

    Nothing is read before `read`. Files that were written by other programs, without a record of rows, are accepted.

    Raises:
        ValueError: if a name occurs twice, or the rows of a tensor are not complete.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._pieces: dict[str, list[tuple[int, int, Path]]] = {}  # (first row, end, file) of each piece
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            with safe_open(path, framework="pt") as file:
                shards = json.loads((file.metadata() or {}).get("rows", "{}"))
                for name in file.keys():  # noqa: SIM118 (not a dictionary)
                    shape = tuple(file.get_slice(name).get_shape())
                    count = shape[0] if shape else 1
                    start, total = map(int, shards.get(name, (0, count)))
                    self._pieces.setdefault(name, []).append((start, start + count, path))
                    self._shapes[name] = (total, *shape[1:]) if shape else ()
        for name, pieces in self._pieces.items():
            pieces.sort()
            starts, ends = [start for start, _, _ in pieces], [end for _, end, _ in pieces]
            total = self._shapes[name][0] if self._shapes[name] else 1
            if [*starts, total] != [0, *ends]:
                raise ValueError(f"the rows of {name} are not complete")

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the full shape of a tensor."""
        if name not in self._shapes:
            raise ValueError(f"there is no tensor {name}")
        return self._shapes[name]

    def blank(self, name: str) -> Tensor:
        """Return a tensor of the same shape without data."""
        return torch.empty(self.shape(name), device="meta")

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        """Read a tensor, or some of its rows; only the files that hold them are opened."""
        self.shape(name)  # raises an error for an unknown name
        parts = []
        for start, end, path in self._pieces[name]:
            first, last = (start, end) if rows is None else (max(start, rows.start), min(end, rows.stop))
            if rows is None or first < last:
                with safe_open(path, framework="pt") as file:
                    is_complete = (first, last) == (start, end)
                    rows_of_file = slice(first - start, last - start)
                    parts.append(file.get_tensor(name) if is_complete else file.get_slice(name)[rows_of_file])
        if not parts:  # a process may hold no rows; the first piece has the dtype
            with safe_open(self._pieces[name][0][2], framework="pt") as file:
                return file.get_slice(name)[:0]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
