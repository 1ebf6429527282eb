"""How arrays come in: NumPy arrays, tensors or lists become checked tensors, without a copy where none is needed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hypersphere import _numerics
from hypersphere._validation import require

__all__ = ["Array", "as_features", "as_flags", "as_labels", "as_scores", "as_tensor", "blocks"]

Array: TypeAlias = Tensor | np.ndarray | Sequence[Any]
ROWS = 65_536


def as_tensor(name: str, value: Array) -> Tensor:
    """The same numbers as a detached tensor; memory is shared with a NumPy array, a memory-mapped one too."""
    if isinstance(value, Tensor):
        return value.detach()
    try:
        array = np.asarray(value)
        with warnings.catch_warnings():  # nothing here writes to its input, so a read-only array may be shared
            warnings.filterwarnings("ignore", message=".*not writable.*", category=UserWarning)
            return torch.from_numpy(array if min(array.strides, default=0) >= 0 else array.copy())
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be a tensor or an array of numbers, not {type(value).__name__}") from error


def as_features(name: str, value: Array, *, like: Tensor | None = None) -> Tensor:
    """A finite, non-empty (N, d) tensor of any floating type; `like` fixes d.

    >>> as_features("features", [[3, 4]])
    tensor([[3., 4.]])
    """
    x = as_tensor(name, value)
    fits = x.ndim == 2 and x.numel() > 0 and not x.is_complex()
    require(fits, name, "a non-empty matrix (N, d) of real numbers", f"{x.dtype} {tuple(x.shape)}")
    if like is not None:
        require(x.shape[1] == like.shape[1], name, f"a matrix with {like.shape[1]} columns", tuple(x.shape))
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    _require_finite(name, x)
    return x


def as_scores(name: str, value: Array) -> Tensor:
    """A finite, non-empty float64 vector."""
    x = as_tensor(name, value)
    fits = x.ndim == 1 and x.numel() > 0 and not x.is_complex()
    require(fits, name, "a non-empty vector of real numbers", f"{x.dtype} {tuple(x.shape)}")
    x = x.double()
    _require_finite(name, x[:, None])
    return x


def as_labels(name: str, value: Array, count: int | None, device: torch.device) -> Tensor:
    """An int64 vector, of `count` entries where that is known.

    >>> as_labels("labels", ["ann", "bob"], 2, torch.device("cpu"))
    Traceback (most recent call last):
    ValueError: labels must be integers, not 'ann': number all names by np.unique(names, return_inverse=True)[1]
    """
    names = value.flat[:1] if isinstance(value, np.ndarray) else value[:1] if isinstance(value, (list, tuple)) else ()
    if len(names) and isinstance(names[0], (str, bytes)):
        advice = "number all names by np.unique(names, return_inverse=True)[1]"
        raise ValueError(f"{name} must be integers, not {str(names[0])!r}: {advice}")
    x = as_tensor(name, value)
    whole = not x.is_floating_point() and not x.is_complex()
    wanted = "a non-empty vector of integers" if count is None else f"a vector of {count} integers"
    fits = x.ndim == 1 and len(x) > 0 and (count is None or len(x) == count)
    require(whole and fits, name, wanted, f"{x.dtype} {tuple(x.shape)}")
    return x.to(device=device, dtype=torch.int64)


def as_flags(name: str, value: Array, count: int, device: torch.device) -> Tensor:
    """A bool vector of `count` entries, from booleans or from zeros and ones, with at least one of either."""
    x = as_tensor(name, value)
    require(x.shape == (count,), name, f"a vector of {count} flags", tuple(x.shape))
    flags = x != 0
    if x.dtype != torch.bool:
        odd = ~((x == 0) | (x == 1))
        require(not bool(odd.any()), name, "booleans, or zeros and ones", x[odd][:1].tolist())
    require(bool(flags.any()), name, "flags with at least one positive (same) pair", f"{count} times False")
    require(not bool(flags.all()), name, "flags with at least one negative (different) pair", f"{count} times True")
    return flags.to(device)


def blocks(x: Tensor, rows: int = ROWS) -> Iterator[tuple[int, Tensor]]:
    """The rows of `x` in blocks, each with the number of its first row."""
    for start in range(0, len(x), rows):
        yield start, x[start : start + rows]


def _require_finite(name: str, x: Tensor) -> None:
    if not _numerics.values_readable(x):
        return
    for start, block in blocks(x):
        if not bool(torch.isfinite(block.sum(dtype=_numerics.widen(block[:0]).dtype))):
            bad = (~torch.isfinite(block)).any(1).nonzero().flatten().tolist()
            if bad:  # finite but huge numbers may overflow in the sum
                raise ValueError(f"{name} must be finite, but row {start + bad[0]} is not")
