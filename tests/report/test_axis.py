"""Axes: round ticks, all values inside, correct labels without overlaps."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hypersphere.report.axis import Axis, fit_axis, write_tick
from hypersphere.report.frame import HEIGHT, LETTER, LINE, NARROW, apart, fitting

SUFFIX = {"k": 1e3, "M": 1e6, "G": 1e9, "": 1.0}
UPRIGHT = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


def read(label: str) -> float:
    """Return the number that a label shows."""
    share = 0.01 if label.endswith("%") else 1.0
    label = label.rstrip("%").replace("−", "-")
    power = re.fullmatch(r"(?:(-?[\d.]+)×)?10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)", label)
    if power:
        return share * float(power[1] or 1) * 10.0 ** int(power[2].translate(UPRIGHT))
    number, suffix = re.fullmatch(r"(-?[\d.e+-]+)([kMG]?)", label).groups()
    return share * float(number) * SUFFIX[suffix]


ends = st.tuples(
    st.floats(-1e12, 1e12, allow_subnormal=False), st.floats(1e-9, 1e12, allow_subnormal=False), st.booleans()
)


@settings(max_examples=150, deadline=None)
@given(ends, st.booleans(), st.integers(3, 9))
def test_fit_axis_linear_ticks_are_even_round_and_inside(
    ends: tuple[float, float, bool], rounded: bool, most: int
) -> None:
    low, span, percent = ends
    assume(span > abs(low) / 1e6)  # otherwise float64 rounds the steps themselves
    axis = fit_axis(np.array([low, low + span]), percent=percent, most=most, rounded=rounded)
    assert axis.low < axis.high
    slack = (axis.high - axis.low) / 1e4
    assert axis.low <= low + slack
    assert axis.high >= low + span - slack
    assert 1 <= len(axis.ticks) <= most + 2
    steps = np.diff(axis.ticks)
    if len(steps):
        np.testing.assert_allclose(steps, steps[0], rtol=1e-3)
        assert f"{steps[0]:.3e}"[0] in "125" or f"{steps[0]:.3e}".startswith("9.99")
        for tick, label in zip(axis.ticks, axis.labels, strict=True):
            assert axis.low - slack <= tick <= axis.high + slack
            assert read(label) == pytest.approx(tick, abs=steps[0] / 100)
        assert len(set(axis.labels)) == len(axis.labels)


@settings(max_examples=100, deadline=None)
@given(st.floats(-30, 30), st.floats(0.01, 40), st.booleans())
def test_fit_axis_log_ticks_are_inside(start: float, decades: float, rounded: bool) -> None:
    axis = fit_axis(np.array([10**start, 10 ** (start + decades)]), log=True, rounded=rounded)
    assert len(axis.ticks) <= 12
    for tick, label in zip(axis.ticks, axis.labels, strict=True):
        assert -1e-3 <= axis.place(tick) <= 1 + 1e-3
        assert read(label) == pytest.approx(tick, rel=0.02)
    assert axis.place(10**start) >= -1e-6
    assert axis.place(10 ** (start + decades)) <= 1 + 1e-6


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [([3.0, 3.0], 2.5, 3.5), ([0.0], -1.0, 1.0), ([], 0.0, 1.0), ([0.1, 2.3], 0.0, 2.5), ([0.9, 0.98], 0.9, 0.98)],
)
def test_fit_axis_rounds_the_ends(values: list[float], low: float, high: float) -> None:
    axis = fit_axis(np.array(values), rounded=True)
    assert axis.low <= low + 0.3
    assert axis.high >= high - 0.3
    assert all(math.isfinite(end) for end in (axis.low, axis.high))
    if values[:1] == [0.1]:
        assert (axis.low, axis.high) == (0, 2.5)


def test_fit_axis_uses_integer_ticks_for_epochs() -> None:
    assert fit_axis(np.array([1.0, 3.0]), whole=True).labels == ("1", "2", "3")
    assert fit_axis(np.array([1.0]), whole=True).labels == ("0", "1", "2")


def test_fit_axis_ignores_invalid_values() -> None:
    assert fit_axis(np.array([1.0, np.nan, 4.0])).high == 4
    axis = fit_axis(np.array([-1.0, 0.0, 0.01, 10.0]), log=True)
    assert (axis.low, axis.high) == (0.01, 10)


@pytest.mark.parametrize(
    ("value", "step", "label"),
    [
        (0.3, 0.1, "0.3"),
        (-0.3, 0.1, "−0.3"),
        (20, 20, "20"),
        (1.5e6, 5e5, "1.5M"),
        (1200, 200, "1200"),
        (2e13, 1e13, "2×10¹³"),
    ],
)
def test_write_tick_formats_labels(value: float, step: float, label: str) -> None:
    assert write_tick(value, step) == label


@given(st.lists(st.floats(0, HEIGHT), max_size=HEIGHT // LINE))
def test_apart_labels_never_overlap(heights: list[float]) -> None:
    moved = apart(sorted(heights))
    assert len(moved) == len(heights)
    assert all(low + LINE <= high + 1e-6 for low, high in itertools.pairwise(moved))
    assert all(LINE / 2 - 1e-6 <= height <= HEIGHT - LINE / 2 + 1e-6 for height in moved)


def test_apart_returns_nothing_if_labels_do_not_fit() -> None:
    assert apart([1.0] * (HEIGHT // LINE + 1)) == []


@given(st.floats(1, 1e6), st.floats(1, 1e6), st.booleans())
def test_fitting_labels_do_not_overlap_on_a_phone(low: float, span: float, log: bool) -> None:
    axis = fit_axis(np.array([low, low + span]), log=log, most=9)
    spans = [
        (axis.place(tick) * NARROW - len(label) * LETTER / 2, axis.place(tick) * NARROW + len(label) * LETTER / 2)
        for tick, label, kept in zip(axis.ticks, axis.labels, fitting(axis), strict=True)
        if kept
    ]
    assert all(left[1] < right[0] for left, right in itertools.pairwise(spans))


def test_axis_place_maps_the_ends_to_zero_and_one() -> None:
    np.testing.assert_allclose(Axis(1, 3).place(np.array([1.0, 2.0, 3.0])), [0, 0.5, 1])
    np.testing.assert_allclose(Axis(0.01, 1, log=True).place(np.array([0.01, 0.1, 1.0])), [0, 0.5, 1])


def test_write_decades_is_uniform() -> None:
    assert fit_axis(np.array([1e-5, 1.0]), log=True, most=9).labels == ("10⁻⁵", "10⁻⁴", "10⁻³", "10⁻²", "10⁻¹", "10⁰")
    assert fit_axis(np.array([1e-3, 1.0]), log=True, most=9).labels == ("0.001", "0.01", "0.1", "1")
