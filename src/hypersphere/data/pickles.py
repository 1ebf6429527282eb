"""Read the pickled arrays of the citation graphs without running anything that the pickle names.

A pickle is a program: it names functions and has them called. Here every admitted name stands for an inert class below
that only keeps what it is given; NumPy and SciPy are never called by the pickle, and any other name is refused. Each
stand-in defines `__setstate__`, so a pickle cannot plant attributes on the class itself either.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from hypersphere.data.errors import DamagedData, ForbiddenGlobal

LARGEST_MATRIX = 2**28


def is_shape(value: object) -> TypeGuard[tuple[int, ...]]:
    """Whether the value is a tuple of whole numbers."""
    return isinstance(value, tuple) and all(type(side) is int and side >= 0 for side in value)


def check_size(rows: int, columns: int) -> None:
    """Raise DamagedData when the dense matrix would be too large."""
    if max(rows, 1) * max(columns, 1) > LARGEST_MATRIX:
        raise DamagedData(f"a matrix must have at most {LARGEST_MATRIX} numbers, not {rows}x{columns}")


class Marker:
    """Stands for a type that is only mentioned (numpy.ndarray, list)."""

    def __setstate__(self, state: object) -> None:
        raise DamagedData("a mentioned type has no state")


class NumberType:
    """Stands for numpy.dtype: integers, floats and booleans only."""

    def __init__(self, code: object = None, *flags: object) -> None:
        text = code.decode("ascii", errors="replace") if isinstance(code, bytes) else code
        if not isinstance(text, str) or not re.fullmatch(r"[iu][1248]|f[248]|b1", text):
            raise DamagedData(f"arrays must hold numbers, not dtype {code!r}")
        self.dtype = np.dtype(text)

    def __setstate__(self, state: object) -> None:
        order = state[1] if isinstance(state, tuple) and len(state) > 1 else None
        if order not in ("<", ">", "|", "="):
            raise DamagedData(f"the byte order must be one of < > | =, not {order!r}")
        self.dtype = self.dtype.newbyteorder(order)


class Array:
    """Stands for numpy's _reconstruct; its state is (version, shape, dtype, column order, bytes)."""

    values: NDArray[Any] | None = None

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise DamagedData("an array must have five parts")
        _, shape, kind, by_columns, content = state
        raw = content.encode("latin1") if isinstance(content, str) else content
        if not is_shape(shape):
            raise DamagedData(f"an array's shape must be whole numbers, not {shape!r}")
        if not isinstance(kind, NumberType) or not isinstance(raw, bytes):
            raise DamagedData(
                f"an array must have a dtype and bytes, not {type(kind).__name__} and {type(raw).__name__}"
            )
        if len(raw) != math.prod(shape) * kind.dtype.itemsize:
            raise DamagedData(f"an array of shape {shape} and {kind.dtype} must fit its bytes, not {len(raw)}")
        flat = np.frombuffer(raw, dtype=kind.dtype)
        self.values = flat.reshape(shape, order="F" if by_columns else "C").astype(kind.dtype.newbyteorder("="))


class SparseRows:
    """Stands for scipy's csr_matrix; its state is a dict with data, indices, indptr and shape."""

    parts: dict[str, object] | None = None

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, dict):
            raise DamagedData(f"a sparse matrix must have a dict of parts, not {type(state).__name__}")
        self.parts = state

    def dense(self) -> NDArray[np.float32]:
        """The matrix as float32, every part checked."""
        parts = self.parts or {}
        data, indices, starts = (_values(parts.get(name)) for name in ("data", "indices", "indptr"))
        shape = parts.get("_shape", parts.get("shape"))
        if not is_shape(shape) or len(shape) != 2:
            raise DamagedData(f"a sparse matrix must have rows and columns, not shape {shape!r}")
        rows, columns = shape
        check_size(rows, columns)
        whole = starts.dtype.kind in "iu" and indices.dtype.kind in "iu"
        if not whole or data.ndim != 1 or data.shape != indices.shape or starts.shape != (rows + 1,):
            raise DamagedData("the parts of a sparse matrix must be rows of equally many numbers and whole places")
        if starts[0] != 0 or starts[-1] != len(data) or (starts[1:] < starts[:-1]).any():
            raise DamagedData("the row starts of a sparse matrix must fit its data")
        if len(indices) and not 0 <= indices.min() <= indices.max() < columns:
            raise DamagedData("the columns of a sparse matrix must fit its data")
        matrix = np.zeros((rows, columns), dtype=np.float32)
        np.add.at(matrix, (np.repeat(np.arange(rows), (starts[1:] - starts[:-1]).astype(np.int64)), indices), data)
        return matrix


class Links(dict[Any, Any]):
    """Stands for collections.defaultdict: a plain dict."""

    def __init__(self, *factory: object) -> None:
        super().__init__()

    def __setstate__(self, state: object) -> None:
        raise DamagedData("a dict of links has no state")


ADMITTED: dict[tuple[str, str], type] = {
    ("__builtin__", "list"): Marker,
    ("builtins", "list"): Marker,
    ("collections", "defaultdict"): Links,
    ("numpy", "dtype"): NumberType,
    ("numpy", "ndarray"): Marker,
    ("numpy.core.multiarray", "_reconstruct"): Array,
    ("numpy._core.multiarray", "_reconstruct"): Array,
    ("scipy.sparse.csr", "csr_matrix"): SparseRows,
    ("scipy.sparse._csr", "csr_matrix"): SparseRows,
}


class DataUnpickler(pickle.Unpickler):
    """An unpickler that knows the admitted names and no other."""

    def find_class(self, module: str, name: str) -> type:
        """The stand-in of an admitted name."""
        if (module, name) not in ADMITTED:
            raise ForbiddenGlobal(f"the pickle asks for {module}.{name}, which no data file needs; it was not run")
        return ADMITTED[module, name]


def dense_array(value: object) -> NDArray[Any]:
    """The NumPy array of a loaded array or sparse matrix."""
    return value.dense() if isinstance(value, SparseRows) else _values(value)


def _values(value: object) -> NDArray[Any]:
    if isinstance(value, Array) and value.values is not None:
        return value.values
    raise DamagedData(f"a part must be an array, not {type(value).__name__}")


def load_pickle(content: bytes, path: Path) -> object:
    """What the pickle holds, made of plain Python values and the stand-ins above."""
    try:
        return DataUnpickler(io.BytesIO(content), encoding="latin1").load()
    except DamagedData as error:
        raise type(error)(f"{path}: {error}") from error
    except Exception as error:  # a broken pickle can fail in any way
        raise DamagedData(f"{path} is not a readable pickle: {type(error).__name__}: {error}") from error
