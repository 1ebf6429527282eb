"""Convert NumPy arrays, tensors and lists to validated tensors, without copies where possible."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from hypersphere import _numerics
from hypersphere._validation import require

__all__ = [
    "Array",
    "as_features",
    "as_flags",
    "as_labels",
    "as_numbers",
    "as_rows",
    "as_scores",
    "as_tensor",
    "blocks",
    "require_finite",
]

Array: TypeAlias = Tensor | np.ndarray | Sequence[Any]
BLOCK_ROWS = 65_536  # rows that are read at a time from a matrix that may be larger than the memory


def as_tensor(name: str, value: Array) -> Tensor:
    """Return a detached tensor. It shares memory with a tensor or a NumPy array, including a memory-mapped one."""
    if isinstance(value, Tensor):
        return value.detach()
    try:
        array = np.asarray(value)
        # torch warns about read-only arrays. No function of this package writes to its input, so sharing them is safe.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*", category=UserWarning)
            # torch has no negative strides, so a reversed view must be copied.
            return torch.from_numpy(array if min(array.strides, default=0) >= 0 else array.copy())
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be a tensor or an array of numbers, not {type(value).__name__}") from error


def as_features(name: str, value: Array, *, like: Tensor | None = None) -> Float[Tensor, "rows dim"]:
    """Return a finite, non-empty (N, d) tensor of any floating dtype.

    Args:
        name: the name of the caller's argument, for error messages.
        value: the features. Integers are converted to the default dtype.
        like: a matrix; `value` must have the same number of columns.

    Example:
        >>> as_features("features", [[3, 4]])
        tensor([[3., 4.]])
    """
    x = as_tensor(name, value)
    is_matrix = x.ndim == 2 and x.numel() > 0 and not x.is_complex()
    require(is_matrix, name, "a non-empty matrix (N, d) of real numbers", f"{x.dtype} {tuple(x.shape)}")
    if like is not None:
        require(x.shape[1] == like.shape[1], name, f"a matrix with {like.shape[1]} columns", tuple(x.shape))
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    require_finite(name, x)
    return x


def as_scores(name: str, value: Array) -> Float[Tensor, " rows"]:
    """Return a finite, non-empty float64 vector."""
    x = as_tensor(name, value)
    is_vector = x.ndim == 1 and x.numel() > 0 and not x.is_complex()
    require(is_vector, name, "a non-empty vector of real numbers", f"{x.dtype} {tuple(x.shape)}")
    x = x.double()
    require_finite(name, x[:, None])
    return x


def as_labels(name: str, value: Array, count: int | None, device: torch.device) -> Int64[Tensor, " rows"]:
    """Return an int64 vector with `count` entries, or with any positive number of entries if `count` is None.

    >>> as_labels("labels", ["ann", "bob"], 2, torch.device("cpu"))
    Traceback (most recent call last):
    ValueError: labels must be integers, not 'ann': number the names with np.unique(names, return_inverse=True)[1]
    """
    # Names are a common mistake, and the error of `as_tensor` would not say what to do.
    first = value.flat[:1] if isinstance(value, np.ndarray) else value[:1] if isinstance(value, (list, tuple)) else ()
    if len(first) and isinstance(first[0], (str, bytes)):
        advice = "number the names with np.unique(names, return_inverse=True)[1]"
        raise ValueError(f"{name} must be integers, not {str(first[0])!r}: {advice}")
    x = as_tensor(name, value)
    is_integer = not x.is_floating_point() and not x.is_complex()
    is_vector = x.ndim == 1 and len(x) > 0 and (count is None or len(x) == count)
    accepted = "a non-empty vector of integers" if count is None else f"a vector of {count} integers"
    require(is_integer and is_vector, name, accepted, f"{x.dtype} {tuple(x.shape)}")
    return x.to(device=device, dtype=torch.int64).contiguous()  # `searchsorted` warns about strides


def as_rows(name: str, value: Array, count: int | None, rows: int, device: torch.device) -> Int64[Tensor, " positions"]:
    """Return `count` row numbers of a matrix with `rows` rows; None accepts any number of them.

    >>> as_rows("first", [0, 7], None, 5, torch.device("cpu"))
    Traceback (most recent call last):
    ValueError: first must be row numbers in 0..4, not 7
    """
    x = as_labels(name, value, count, device)
    invalid = x[(x < 0) | (x >= rows)]
    require(len(invalid) == 0, name, f"row numbers in 0..{rows - 1}", int(invalid[0]) if len(invalid) else None)
    return x


def as_flags(name: str, value: Array, count: int | None, device: torch.device | None) -> Bool[Tensor, " rows"]:
    """Return a bool vector with `count` entries (None: any number), at least one of them True and one False.

    Accepts booleans, or numbers that are all zero or one.
    """
    x = as_tensor(name, value)
    fits = x.ndim == 1 and count in (None, len(x))
    require(fits, name, f"a vector of {'flags' if count is None else f'{count} flags'}", tuple(x.shape))
    flags = x != 0
    if x.dtype != torch.bool:
        invalid = ~((x == 0) | (x == 1))
        require(not bool(invalid.any()), name, "booleans, or zeros and ones", x[invalid][:1].tolist())
    if not bool(flags.any()):
        raise ValueError(f"{name} must mark at least one positive (same) pair, but all {len(x)} flags are False")
    if bool(flags.all()):
        raise ValueError(f"{name} must mark at least one negative (different) pair, but all {len(x)} flags are True")
    return flags.to(device)


def as_numbers(name: str, value: Array) -> list[Any]:
    """Return the entries of a sequence, an array or a tensor, without checking them.

    >>> as_numbers("ranks", 5)
    Traceback (most recent call last):
    ValueError: ranks must be a sequence of numbers, not 5
    """
    entries = value.tolist() if isinstance(value, (Tensor, np.ndarray)) else value
    require(isinstance(entries, (list, tuple, range)), name, "a sequence of numbers", value)
    return list(entries)


def blocks(x: Shaped[Tensor, "rows ..."], size: int = BLOCK_ROWS) -> Iterator[tuple[int, Tensor]]:
    """Yield blocks of at most `size` rows, each with the index of its first row."""
    for start in range(0, len(x), size):
        yield start, x[start : start + size]


def require_finite(name: str, x: Tensor) -> None:
    """Raise a `ValueError` that names the first row with a NaN or an infinity.

    This is `_numerics.require_finite_rows` block by block: a memory-mapped matrix may be larger than the memory, and
    half precision is summed in float32, which needs a converted copy.
    """
    if not _numerics.values_readable(x):
        return
    for start, rows in blocks(x):
        # The sum is one cheap reduction. It is not finite if any entry is not.
        if not bool(torch.isfinite(rows.sum(dtype=_numerics.compute_dtype(rows.dtype)))):
            invalid = (~torch.isfinite(rows)).any(1).nonzero().flatten().tolist()
            if invalid:  # otherwise the sum of finite entries has overflowed
                raise ValueError(f"{name} must be finite, but row {start + invalid[0]} is not")
