"""Nested states as safetensors plus JSON, with large tensors divided by rows among processes.

A state is a tree of dictionaries, lists, numbers, text and tensors, such as the result of `state_dict`. `flatten` turns
it into a *skeleton*, a JSON value that keeps every type, and a flat dictionary of tensors, which safetensors stores.
Reading needs no pickle, so a file can only contain data.

A tensor whose rows are divided among processes appears in the tree as a `RowShard`. Each process writes its rows into
its own file. Because the header of the file records which rows they are, any number of processes can read the tensor
again, and each reads only the rows that it needs.
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

__all__ = ["RowShard", "Rows", "TensorFiles", "flatten", "unflatten", "write_tensors"]

ACCEPTED = "tensors, numbers, text, None, or lists, tuples and dictionaries of them"
_TAG = "$"  # marks a JSON object that stands for something that JSON does not have
_PLAIN = (type(None), bool, str)
_MAPPINGS: dict[str, Callable[..., Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}


@dataclass(frozen=True)
class Rows:
    """The rows `start` to `stop` of a tensor that has `total` rows."""

    start: int
    stop: int
    total: int


@dataclass(frozen=True)
class RowShard:
    """A tensor of which this process holds some rows."""

    tensor: Tensor
    rows: Rows


def flatten(value: Any, name: str) -> tuple[Any, dict[str, Tensor | RowShard]]:
    """Return the skeleton of a state and its tensors by path; raise a `ValueError` for an object of another type.

    Parameters become tensors, other mappings become dictionaries, and NumPy scalars become Python numbers, all without
    loss.

    Args:
        value: any state.
        name: its name in error messages.

    Example:
        >>> skeleton, tensors = flatten({"step": 3, "mean": torch.zeros(2)}, "state")
        >>> skeleton, list(tensors)
        ({'step': 3, 'mean': {'$': 'tensor', 'key': 'mean'}}, ['mean'])
        >>> flatten({"rates": [0.1, max]}, "state")
        Traceback (most recent call last):
        ValueError: state['rates'][1] must be tensors, numbers, ..., not builtin_function_or_method
    """
    tensors: dict[str, Tensor | RowShard] = {}
    return _flatten(value, name, (), tensors), tensors


def _flatten(value: Any, name: str, path: tuple[str, ...], tensors: dict[str, Tensor | RowShard]) -> Any:
    if isinstance(value, (Tensor, RowShard)):
        return _flatten_tensor(value, name, ".".join(path), tensors)
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if kind is list:
        return [_flatten(item, f"{name}[{at}]", (*path, str(at)), tensors) for at, item in enumerate(value)]
    if kind is bytes:
        return {_TAG: "bytes", "base64": base64.b64encode(value).decode("ascii")}
    if kind is torch.Size or kind is tuple:
        items = [_flatten(item, f"{name}[{at}]", (*path, str(at)), tensors) for at, item in enumerate(value)]
        return {_TAG: "Size" if kind is torch.Size else "tuple", "items": items}
    if kind in (torch.dtype, torch.device):
        return {_TAG: kind.__name__, "name": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        keys = [_flatten(key, f"a key of {name}", (), {}) for key in value]
        items = [_flatten(item, f"{name}[{key!r}]", (*path, str(key)), tensors) for key, item in value.items()]
        kind_name = kind.__name__ if kind in _MAPPINGS.values() else "dict"
        if kind_name == "dict" and all(type(key) is str and key != _TAG for key in keys):
            return dict(zip(keys, items, strict=True))
        return {_TAG: kind_name, "items": [list(pair) for pair in zip(keys, items, strict=True)]}
    raise ValueError(f"{name} must be {ACCEPTED}, not {kind.__name__}")


def _flatten_tensor(value: Tensor | RowShard, name: str, key: str, tensors: dict[str, Tensor | RowShard]) -> Any:
    tensor = (value.tensor if isinstance(value, RowShard) else value).detach()
    if type(tensor) is not Tensor or tensor.is_meta:
        raise ValueError(f"{name} must be a plain tensor with data, not {type(tensor).__name__} on {tensor.device}")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(f"{name} must be a dense tensor, not {tensor.layout} of {tensor.dtype}")
    mark: dict[str, Any] = {_TAG: "tensor", "key": key}
    if tensor.is_complex():
        mark["complex"] = True
        tensor = torch.view_as_real(tensor.resolve_conj())
    # safetensors stores contiguous tensors, so the dimensions are sorted by decreasing stride and sorted back later.
    order = sorted(range(tensor.ndim), key=lambda dim: tensor.stride()[dim], reverse=True)
    if not isinstance(value, RowShard) and order != list(range(tensor.ndim)):
        mark["order"] = order
        tensor = tensor.permute(order)
    while key in tensors:  # the keys 1 and "1" of a dictionary have the same path
        key += "'"
    mark["key"] = key
    tensors[key] = RowShard(tensor, value.rows) if isinstance(value, RowShard) else tensor
    return mark


def unflatten(skeleton: Any, read: Callable[[str], Tensor]) -> Any:
    """Return the state with this skeleton; `read` returns the tensor of a path.

    Raises:
        ValueError: if the skeleton is not one.
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
    if kind in ("tuple", "Size"):
        items = tuple(unflatten(item, read) for item in skeleton["items"])
        return torch.Size(items) if kind == "Size" else items
    if kind == "dtype" and isinstance(getattr(torch, skeleton["name"], None), torch.dtype):
        return getattr(torch, skeleton["name"])
    if kind == "device":
        return torch.device(skeleton["name"])
    if kind in _MAPPINGS:
        pairs = [(unflatten(key, read), unflatten(item, read)) for key, item in skeleton["items"]]
        return _MAPPINGS[kind](dict(pairs))
    raise ValueError(f"a state has no part of the kind {kind!r}")


def write_tensors(path: Path, tensors: Mapping[str, Tensor | RowShard]) -> None:
    """Write tensors and shards to a safetensors file; its header records the rows of each shard."""
    content: dict[str, Tensor] = {}
    rows = {}
    written: set[int] = set()
    for name, value in tensors.items():
        tensor = value.tensor if isinstance(value, RowShard) else value
        tensor = tensor.detach().cpu().contiguous()
        memory = tensor.untyped_storage()
        # Tied tensors are stored under each of their names, and views without the rest of their storage.
        shares = memory.data_ptr() in written or memory.nbytes() != tensor.nbytes
        content[name] = tensor.clone() if shares else tensor
        written.add(content[name].untyped_storage().data_ptr())
        if isinstance(value, RowShard):
            rows[name] = [value.rows.start, value.rows.total]
    save_file(content, path, {"format": "pt", "rows": json.dumps(rows)})


class TensorFiles:
    """The tensors in one or more safetensors files, of which some may be divided by rows over the files.

    Nothing is read before `read`. Files that were written by other programs, without a record of rows, are accepted.

    Raises:
        ValueError: if a name occurs twice, or the rows of a tensor are not complete.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._pieces: dict[str, list[tuple[Rows | None, Path]]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            with safe_open(path, framework="pt") as file:
                shards = json.loads((file.metadata() or {}).get("rows", "{}"))
                for name in file.keys():  # noqa: SIM118 (not a dictionary)
                    shape = tuple(file.get_slice(name).get_shape())
                    rows = None
                    if name in shards:
                        start, total = map(int, shards[name])
                        rows = Rows(start, start + shape[0], total)
                        shape = (total, *shape[1:])
                    self._pieces.setdefault(name, []).append((rows, path))
                    self._shapes[name] = shape
        for name, pieces in self._pieces.items():
            pieces.sort(key=lambda piece: piece[0].start if piece[0] else 0)
            ends = [piece[0] for piece in pieces if piece[0]]
            complete = (
                len(pieces) == 1
                if not ends
                else (
                    len(ends) == len(pieces)
                    and [rows.start for rows in ends] == [0, *(rows.stop for rows in ends[:-1])]
                    and ends[-1].stop == ends[-1].total
                )
            )
            if not complete:
                raise ValueError(f"the rows of {name} are not complete")

    def __contains__(self, name: str) -> bool:
        return name in self._pieces

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._pieces)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the full shape of a tensor."""
        return self._shapes[name]

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        """Read a tensor, or some of its rows; only the files that hold them are opened."""
        if name not in self._pieces:
            raise ValueError(f"there is no tensor {name}")
        parts = []
        for piece, path in self._pieces[name]:
            with safe_open(path, framework="pt") as file:
                if rows is None:
                    parts.append(file.get_tensor(name))
                    continue
                first, last = (0, rows.total) if piece is None else (piece.start, piece.stop)
                start, stop = max(rows.start, first), min(rows.stop, last)
                if start < stop:
                    parts.append(file.get_slice(name)[start - first : stop - first])
        if not parts:  # a process may hold no rows
            return self.read(name, Rows(0, 1, 1))[:0]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
