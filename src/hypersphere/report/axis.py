"""Axes: positions of values, round numbers for ticks, and their labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", float, NDArray)

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
PLAIN_DECADES = range(-4, 4)  # 0.0001 to 1000; other decades are written as powers of ten
SUFFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high`, linear or logarithmic, with ticks."""

    low: float
    high: float
    log: bool = False
    ticks: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()

    def place(self, values: Number) -> Number:
        """Return the positions of values, 0 at the low end and 1 at the high end; on a log axis they must be positive.

        >>> Axis(1, 100, log=True).place(10.0)
        0.5
        """
        if self.log:
            low, high = math.log10(self.low), math.log10(self.high)
            values = np.log10(values) if isinstance(values, np.ndarray) else math.log10(values)
        else:
            low, high = self.low, self.high
        return (values - low) / (high - low)


def fit_axis(
    values: NDArray,
    *,
    log: bool = False,
    percent: bool = False,
    most: int = 6,
    rounded: bool = False,
    whole: bool = False,
) -> Axis:
    """Return an axis that includes all finite values.

    Args:
        values: values to include; non-finite ones, and on a log axis those <= 0, are ignored.
        log: make the axis logarithmic.
        percent: write labels as percentages.
        most: approximate number of ticks.
        rounded: extend the ends to round numbers, or to 0 if it is close; otherwise they are the extremes.
        whole: use integer ticks, for example for epochs.

    Example:
        >>> fit_axis(np.array([0.1, 2.3]), rounded=True).labels
        ('0.0', '0.5', '1.0', '1.5', '2.0', '2.5')
    """
    valid = values[np.isfinite(values) & ((values > 0) | (not log))]
    low, high = (float(valid.min()), float(valid.max())) if len(valid) else (1.0, 10.0) if log else (0.0, 1.0)
    if high - low <= 100 * math.ulp(max(abs(low), abs(high))):  # all values are equal
        margin = 1.0 if whole else abs(low) / 10 or 1.0
        low, high = (low / 2, high * 2) if log else (low - margin, high + margin)
    elif rounded and not log and 0 <= low < high / 4:
        low = 0.0
    if log:
        if rounded and high / low > 5:
            low, high = _round_below(low), round_step(high, 1)
        return _log_axis(low, high, percent, most)
    step = max(round_step(high - low, most), 1.0 if whole else 0.0)
    if rounded:
        low, high = math.floor(round(low / step, 6)) * step, math.ceil(round(high / step, 6)) * step
    first, last = math.ceil(round(low / step, 6)), math.floor(round(high / step, 6))
    ticks = tuple(number * step for number in range(first, last + 1))
    return Axis(low, high, False, ticks, tuple(write_tick(tick, step, percent) for tick in ticks))


def round_step(span: float, most: int) -> float:
    """Return the smallest of … 0.1, 0.2, 0.5, 1, 2, 5 … that fits at most `most` times into the span.

    >>> round_step(2.3, 6), round_step(180, 9)
    (0.5, 20.0)
    """
    rough = span / most
    power = 10.0 ** math.floor(math.log10(rough))
    return next(digit for digit in (1, 2, 5, 10) if digit >= round(rough / power, 6)) * power


def write_tick(value: float, step: float, percent: bool = False) -> str:
    """Return the label of a tick with the number of decimals that the step needs.

    >>> write_tick(0.25, 0.05), write_tick(0.25, 0.05, percent=True), write_tick(-30000, 10000), write_tick(4e-5, 1e-5)
    ('0.25', '25%', '−30k', '4×10⁻⁵')
    """
    if percent:
        return write_tick(100 * value, 100 * step) + "%"
    value, step = abs(value), math.copysign(step, value)
    sign, step = ("−" if step < 0 and value >= abs(step) / 2 else ""), abs(step)
    if value < step / 2:
        return "0" if step >= 1 or step < 1e-4 else f"{0:.{_decimals(step)}f}"
    if value >= 1e12 or step < 1e-4:
        return sign + _scientific(value, step)
    for size, suffix in SUFFIXES:
        if value >= size and step >= 1000 and value >= 10_000:
            return f"{sign}{value / size:.{_decimals(step / size)}f}{suffix}"
    return f"{sign}{value:.{_decimals(step)}f}"


def write_decades(exponents: Sequence[int], percent: bool = False) -> tuple[str, ...]:
    """Return labels for powers of ten in a uniform style.

    >>> write_decades([-2, -1, 0]), write_decades([-5, -1]), write_decades([-3, -2], percent=True)
    (('0.01', '0.1', '1'), ('10⁻⁵', '10⁻¹'), ('0.1%', '1%'))
    """
    if percent:
        return tuple(f"{label}%" for label in write_decades([exponent + 2 for exponent in exponents]))
    if all(exponent in PLAIN_DECADES for exponent in exponents):
        return tuple(f"{10.0**exponent:g}" for exponent in exponents)
    return tuple(f"10{str(exponent).translate(SUPERSCRIPTS)}" for exponent in exponents)


def _log_axis(low: float, high: float, percent: bool, most: int) -> Axis:
    first, last = math.ceil(round(math.log10(low), 6)), math.floor(round(math.log10(high), 6))
    every = max(1, math.ceil((last - first + 1) / most))
    decades = range(first, last + 1, every)
    if len(decades) >= 4:
        return Axis(low, high, True, tuple(10.0**n for n in decades), write_decades(decades, percent))
    close = [digit * 10.0**n for n in range(first - 1, last + 1) for digit in (1, 2, 5)]
    ticks = [tick for tick in close if round(tick / low, 9) >= 1 >= round(tick / high, 9)]
    if len(ticks) < 3:
        step = round_step(high - low, most)
        ticks = [number * step for number in range(math.ceil(round(low / step, 6)), math.floor(high / step) + 1)]
        return Axis(low, high, True, tuple(ticks), tuple(write_tick(tick, step, percent) for tick in ticks))
    return Axis(low, high, True, tuple(ticks), tuple(f"{100 * t:g}%" if percent else f"{t:g}" for t in ticks))


def _round_below(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return next(digit for digit in (5, 2, 1) if digit <= round(value / power, 6)) * power


def _decimals(step: float) -> int:
    return max(0, -math.floor(round(math.log10(step), 6)))


def _scientific(value: float, step: float) -> str:
    exponent = math.floor(math.log10(value))
    digits = max(0, exponent - math.floor(round(math.log10(step), 6)))
    return f"{value / 10.0**exponent:.{digits}f}×10{str(exponent).translate(SUPERSCRIPTS)}"
