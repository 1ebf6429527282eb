"""Convert tensors, arrays and lists to NumPy arrays, and compute statistics of rows with gaps."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hypersphere._validation import require

Array: TypeAlias = "Tensor | NDArray | Sequence"

LARGEST = 1e100  # squares of larger numbers overflow float64, so charts treat them as infinite


def as_array(name: str, values: Array) -> NDArray:
    """Return an array with the type of the values; floating-point tensors become float64."""
    try:
        if isinstance(values, Tensor):
            values = values.detach().cpu()
            return (values.double() if values.is_floating_point() else values).numpy()
        return np.asarray(values)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a tensor or an array of numbers, not a {type(values).__name__}") from None


def as_numbers(name: str, values: Array, *dimensions: int) -> NDArray:
    """Return a float64 array in which None, infinities and magnitudes above 1e100 are NaN.

    The number of dimensions must be one of `dimensions`.

    >>> as_numbers("values", [1, None, 1e300], 1)
    array([ 1., nan, nan])
    """
    array = as_array(name, values)
    if array.dtype.kind == "O" and all(value is None or isinstance(value, Real) for value in array.flat):
        array = array.astype(np.float64)  # None becomes NaN
    require(array.dtype.kind in "fiu", name, "real numbers", array.dtype)
    shapes = " or ".join(f"{count}-dimensional" for count in dimensions)
    require(array.ndim in dimensions, name, shapes, array.shape)
    array = array.astype(np.float64)
    return np.where(np.abs(array) <= LARGEST, array, np.nan)


def mean_and_spread(rows: NDArray) -> tuple[NDArray, NDArray]:
    """Return mean and sample standard deviation of each column over its finite values; NaN if there are too few.

    >>> mean_and_spread(np.array([[1.0, 2.0], [3.0, np.nan]]))
    (array([2., 2.]), array([1.41421356,        nan]))
    """
    count = np.isfinite(rows).sum(axis=0)
    missing = np.full(rows.shape[1:], np.nan)
    mean = np.divide(np.nansum(rows, axis=0), count, out=missing.copy(), where=count > 0)
    squares = np.nansum((rows - mean) ** 2, axis=0)
    return mean, np.sqrt(np.divide(squares, count - 1, out=missing, where=count > 1))
