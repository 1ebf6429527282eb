"""Read pickled arrays, such as those of the citation graphs, without running anything that the pickle names.

A pickle is a program: it names functions and has them called. Here every allowed name is mapped to one of the inert
stand-in classes below, which only store their arguments; the pickle never calls NumPy or SciPy, and any other name is
rejected. Each stand-in defines `__setstate__`, so a pickle cannot set attributes of a class either.
"""

from __future__ import annotations

import codecs
import io
import math
import pickle
import re
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from hypersphere.data._files import DamagedData, ForbiddenGlobal

MAX_MATRIX_ENTRIES = 2**28  # 1 GiB in float32, twenty times the features of Citeseer


def require_matrix_size(rows: int, columns: int) -> None:
    """Raise DamagedData if a dense matrix of this size would be too large."""
    # A matrix without rows is rejected too if it is too wide, because it sets the width of the assembled features.
    if max(rows, 1) * max(columns, 1) > MAX_MATRIX_ENTRIES:
        raise DamagedData(f"a matrix must have at most {MAX_MATRIX_ENTRIES} entries, not {rows}x{columns}")


class TypeStandIn:
    """Replaces a type that is only mentioned (numpy.ndarray, list)."""

    def __setstate__(self, state: object) -> None:
        raise DamagedData("a pickled type must not have a state")


class DtypeStandIn:
    """Replaces numpy.dtype. Only integers, floats and booleans are allowed."""

    def __init__(self, code: object = None, *flags: object) -> None:
        text = code.decode("ascii", errors="replace") if isinstance(code, bytes) else code
        if not isinstance(text, str) or not re.fullmatch(r"[iu][1248]|f[248]|b1", text):
            raise DamagedData(f"arrays must have a numeric dtype, not {code!r}")
        self.dtype = np.dtype(text)

    def __setstate__(self, state: object) -> None:
        byte_order = state[1] if isinstance(state, tuple) and len(state) > 1 else None
        if byte_order not in ("<", ">", "|", "="):
            raise DamagedData(f"the byte order must be one of < > | =, not {byte_order!r}")
        self.dtype = self.dtype.newbyteorder(byte_order)


class ArrayStandIn:
    """Replaces numpy's _reconstruct. The state is (version, shape, dtype, is Fortran order, bytes)."""

    values: NDArray[Any] | None = None

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise DamagedData("the state of an array must have five parts")
        _, shape, dtype, is_fortran, content = state
        # Python 2 pickles have a string here, which `load_pickle` decodes as latin1.
        raw = content.encode("latin1") if isinstance(content, str) else content
        if not _is_shape(shape):
            raise DamagedData(f"the shape of an array must be integers >= 0, not {shape!r}")
        if not isinstance(dtype, DtypeStandIn) or not isinstance(raw, bytes):
            raise DamagedData(
                f"an array must have a dtype and bytes, not {type(dtype).__name__} and {type(raw).__name__}"
            )
        if len(raw) != math.prod(shape) * dtype.dtype.itemsize:
            raise DamagedData(f"an array of shape {shape} and {dtype.dtype} cannot have {len(raw)} bytes")
        flat = np.frombuffer(raw, dtype=dtype.dtype)
        self.values = flat.reshape(shape, order="F" if is_fortran else "C").astype(dtype.dtype.newbyteorder("="))


class CsrStandIn:
    """Replaces scipy's csr_matrix. The state is a dict with data, indices, indptr and shape."""

    parts: dict[str, object] | None = None

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, dict):
            raise DamagedData(f"the state of a sparse matrix must be a dict, not {type(state).__name__}")
        self.parts = state

    def to_dense(self) -> NDArray[np.float32]:
        """Return the matrix as float32, after checking every part."""
        parts = self.parts or {}
        data, indices, starts = (_array_values(parts.get(name)) for name in ("data", "indices", "indptr"))
        # The name of the attribute depends on the version of SciPy.
        shape = parts.get("_shape", parts.get("shape"))
        if not _is_shape(shape) or len(shape) != 2:
            raise DamagedData(f"a sparse matrix must have rows and columns, not shape {shape!r}")
        rows, columns = shape
        require_matrix_size(rows, columns)
        are_integers = starts.dtype.kind in "iu" and indices.dtype.kind in "iu"
        if not are_integers or data.ndim != 1 or data.shape != indices.shape or starts.shape != (rows + 1,):
            raise DamagedData("data, indices and indptr of a sparse matrix must be 1-d arrays of matching lengths")
        # Unsigned differences would wrap around, so consecutive row starts are compared instead.
        if starts[0] != 0 or starts[-1] != len(data) or (starts[1:] < starts[:-1]).any():
            raise DamagedData("the row starts of a sparse matrix must increase from 0 to the number of entries")
        if len(indices) and not 0 <= indices.min() <= indices.max() < columns:
            raise DamagedData(f"the column indices of a sparse matrix must be in 0..{columns - 1}")
        matrix = np.zeros((rows, columns), dtype=np.float32)
        entries_per_row = (starts[1:] - starts[:-1]).astype(np.int64)
        # Unlike assignment, `add.at` sums repeated entries, as SciPy does.
        np.add.at(matrix, (np.repeat(np.arange(rows), entries_per_row), indices), data)
        return matrix


class DictStandIn(dict[Any, Any]):
    """Replaces collections.defaultdict by a plain dict without a factory."""

    def __init__(self, *factory: object) -> None:
        super().__init__()

    def __setstate__(self, state: object) -> None:
        raise DamagedData("a dict has no state")


class BytesStandIn:
    """Replaces _codecs.encode, with which Python 3 writes bytes in old protocols."""

    def __new__(cls, text: object = "", encoding: object = "latin1") -> bytes:  # type: ignore[misc]
        """Return the text encoded as latin1."""
        if not isinstance(text, str) or encoding != "latin1":
            raise DamagedData(f"bytes must be stored as latin1 text, not {type(text).__name__} in {encoding!r}")
        return text.encode("latin1")

    def __setstate__(self, state: object) -> None:
        raise DamagedData("bytes have no state")


# Module names differ between Python 2 and 3 and between versions of NumPy and SciPy.
ALLOWED: dict[tuple[str, str], type] = {
    ("__builtin__", "list"): TypeStandIn,
    ("builtins", "list"): TypeStandIn,
    ("_codecs", "encode"): BytesStandIn,
    ("collections", "defaultdict"): DictStandIn,
    ("numpy", "dtype"): DtypeStandIn,
    ("numpy", "ndarray"): TypeStandIn,
    ("numpy.core.multiarray", "_reconstruct"): ArrayStandIn,
    ("numpy._core.multiarray", "_reconstruct"): ArrayStandIn,
    ("scipy.sparse.csr", "csr_matrix"): CsrStandIn,
    ("scipy.sparse._csr", "csr_matrix"): CsrStandIn,
}


codecs.lookup("raw-unicode-escape")  # the unpickler needs this codec; with it loaded, reading a pickle imports nothing


class StandInUnpickler(pickle._Unpickler):
    """An unpickler that resolves the allowed names to stand-ins and rejects all others.

    It extends the Python implementation, because the C implementation allocates gigabytes for a large memo index.
    """

    def find_class(self, module: str, name: str) -> type:
        """Return the stand-in of an allowed name."""
        if (module, name) not in ALLOWED:
            raise ForbiddenGlobal(f"the pickle names {module}.{name}, which no data file needs; it was not run")
        return ALLOWED[module, name]


def load_pickle(content: bytes, path: Path) -> object:
    """Return the content of a pickle as plain Python values and stand-ins."""
    try:
        # latin1 maps the bytes of Python 2 strings to the characters 0..255, so nothing is lost.
        return StandInUnpickler(io.BytesIO(content), encoding="latin1").load()
    except DamagedData as error:
        raise type(error)(f"{path}: {error}") from error
    except Exception as error:  # a damaged pickle can raise almost any exception
        raise DamagedData(f"{path} is not a readable pickle: {type(error).__name__}: {error}") from error


def dense_array(value: object) -> NDArray[Any]:
    """Return the NumPy array of a loaded array or sparse matrix."""
    return value.to_dense() if isinstance(value, CsrStandIn) else _array_values(value)


def _array_values(value: object) -> NDArray[Any]:
    if isinstance(value, ArrayStandIn) and value.values is not None:
        return value.values
    raise DamagedData(f"a pickled value must be an array, not {type(value).__name__}")


def _is_shape(value: object) -> TypeGuard[tuple[int, ...]]:
    return isinstance(value, tuple) and all(type(size) is int and size >= 0 for size in value)
