"""Contour lines of a grid by marching squares."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# The corners of a square are the bits 1, 2, 4, 8, clockwise from the upper left. For each set of corners above the
# level: the edges (0 top, 1 right, 2 bottom, 3 left) that a line connects.
LINES = {
    1: ((3, 0),),
    2: ((0, 1),),
    3: ((3, 1),),
    4: ((1, 2),),
    5: ((3, 2), (0, 1)),
    6: ((0, 2),),
    7: ((3, 2),),
    8: ((2, 3),),
    9: ((2, 0),),
    10: ((0, 3), (1, 2)),
    11: ((2, 1),),
    12: ((1, 3),),
    13: ((1, 0),),
    14: ((0, 3),),
}
SADDLES = {5: 10, 10: 5}  # if the middle is below the level, the lines separate the two high corners


def contour(values: NDArray, level: float) -> NDArray:
    """Return (K, 2, 2) line segments from (row, column) to (row, column); squares with a NaN have none.

    >>> contour(np.array([[0.0, 0.0], [1.0, 1.0]]), 0.25)
    array([[[0.25, 1.  ],
            [0.25, 0.  ]]])
    """
    corners = np.stack([values[:-1, :-1], values[:-1, 1:], values[1:, 1:], values[1:, :-1]])
    case = ((corners > level) * np.array([1, 2, 4, 8])[:, None, None]).sum(axis=0)
    case[~np.isfinite(corners).all(axis=0)] = 0
    low_middle = corners.mean(axis=0) <= level
    pieces = []
    for number, lines in LINES.items():
        rows, columns = np.nonzero(case == number)
        if not len(rows):
            continue
        square = corners[:, rows, columns]
        parted = low_middle[rows, columns]
        other = LINES[SADDLES[number]] if number in SADDLES else lines
        for (first, second), (third, fourth) in zip(lines, other, strict=True):
            start = np.where(parted, _crossing(square, third, level), _crossing(square, first, level))
            stop = np.where(parted, _crossing(square, fourth, level), _crossing(square, second, level))
            pieces.append(np.stack([start.T, stop.T], axis=1) + np.stack([rows, columns], axis=1)[:, None])
    return np.concatenate(pieces) if pieces else np.zeros((0, 2, 2))


def _crossing(square: NDArray, edge: int, level: float) -> NDArray:
    """Return where the level crosses an edge, as (row, column) within the square; arbitrary if it does not."""
    first, second = square[edge], square[(edge + 1) % 4]
    apart = second - first
    share = np.divide(level - first, apart, out=np.full_like(first, 0.5), where=apart != 0).clip(0, 1)
    zero, one = np.zeros_like(share), np.ones_like(share)
    return np.stack([(zero, share), (share, one), (one, 1 - share), (1 - share, zero)][edge])
