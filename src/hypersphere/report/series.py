"""A named series of numbers with its spread over seeds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hypersphere._validation import require
from hypersphere.report.arrays import Array, as_numbers, mean_and_spread

MOST_POINTS = 500  # points drawn per series


@dataclass(frozen=True, eq=False)
class Series:
    """A series of values (T,), or (seeds, T) of which mean and standard deviation are drawn.

    Args:
        name: name in the legend.
        values: numbers; None and non-finite values are gaps.
        x: ascending positions (T,); 1, 2, … T by default.
        spread: standard deviations (T,), if `values` has no seeds.
        dashed: draw a dashed line, for references such as theory or chance level.

    Example:
        >>> Series("loss", [[3.0, 1.0], [1.0, 1.0]]).mean
        array([2., 1.])
    """

    name: str
    values: Array
    x: Array | None = None
    spread: Array | None = None
    dashed: bool = False

    def __post_init__(self) -> None:
        values = self.rows
        if self.x is not None:
            x = as_numbers(f"x of {self.name!r}", self.x, 1)
            accepted = f"one position for each of the {values.shape[1]} values"
            require(len(x) == values.shape[1], f"x of {self.name!r}", accepted, len(x))
            wrong = x[~np.isfinite(x) | (np.diff(x, prepend=-np.inf) < 0)]
            require(not len(wrong), f"x of {self.name!r}", "finite and ascending", wrong[:1].tolist())
        if self.spread is not None:
            accepted = f"given for values (T,), T = {values.shape[1]}"
            spread = as_numbers(f"spread of {self.name!r}", self.spread, 1)
            fits = len(values) == 1 and len(spread) == values.shape[1]
            require(fits, f"spread of {self.name!r}", accepted, (len(values), len(spread)))
            require(
                not (spread < 0).any(), f"spread of {self.name!r}", "numbers >= 0", float(spread[spread < 0][:1].sum())
            )

    @property
    def rows(self) -> NDArray:
        """The values as (seeds, T), NaN for gaps."""
        return np.atleast_2d(as_numbers(f"values of {self.name!r}", self.values, 1, 2))

    @property
    def places(self) -> NDArray:
        """The positions of the values, (T,)."""
        return np.arange(1.0, self.rows.shape[1] + 1) if self.x is None else as_numbers("x", self.x, 1)

    @property
    def mean(self) -> NDArray:
        """The mean over seeds, (T,); NaN if no seed has a finite value."""
        return mean_and_spread(self.rows)[0]

    @property
    def deviation(self) -> NDArray:
        """The standard deviation over seeds, or the given one, (T,); NaN if there is none."""
        if self.spread is not None:
            return as_numbers("spread", self.spread, 1)
        return mean_and_spread(self.rows)[1]

    @property
    def gaps(self) -> int:
        """The number of values that are not finite."""
        return int((~np.isfinite(self.rows)).sum())


def thinned(at: NDArray, values: NDArray, most: int = MOST_POINTS) -> NDArray:
    """Return the indices of at most `most` values with which the curve looks the same.

    The axis is divided into equal parts; each part keeps its smallest and its largest value, and one gap if it has any.
    The first and the last value are indices.

    Args:
        at: ascending positions on the axis in [0, 1].
        values: values, NaN for gaps.
        most: largest number of indices.

    Example:
        >>> thinned(np.linspace(0, 1, 9), np.array([0, 1, 9, 1, 0, 1, -9, 1, 0]), most=6)
        array([0, 2, 5, 6, 8])
    """
    if len(values) <= most:
        return np.arange(len(values))
    there = np.isfinite(values)
    parts = (most - 2) // (2 if there.all() else 3)
    part = np.minimum((at * parts).astype(int), parts - 1)
    indices = [0, len(values) - 1]
    starts = np.flatnonzero(np.diff(part, prepend=-1))
    for start, stop in zip(starts, [*starts[1:], len(values)], strict=True):
        inside = np.arange(start, stop)
        finite, gaps = inside[there[start:stop]], inside[~there[start:stop]]
        if len(finite):
            indices += [finite[values[finite].argmin()], finite[values[finite].argmax()]]
        indices += gaps[:1].tolist()
    return np.unique(indices)
