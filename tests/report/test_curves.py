"""Curves: the drawn lines match the data."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

from hypersphere.report import Curves, Series
from hypersphere.report.curves import MOST_CURVES, curves_html
from hypersphere.report.series import MOST_POINTS, thinned

from .document import HOSTILE, Checker


def drawn(curves: Curves) -> tuple[Checker, dict, str]:
    html = curves_html(curves)
    data = html.rsplit('<script type="application/json">', 1)[1].split("</script>")[0]
    return Checker(html), json.loads(data), html


def lines(html: str, kind: str = "line") -> list[str]:
    return re.findall(rf"<path class='{kind}[^']*' d='([^']*)'", html)


def vertices(line: str) -> np.ndarray:
    return np.array([[float(number) for number in pair.split()] for pair in re.split("[ML]", line) if pair])


def test_curves_draw_all_points_of_each_series() -> None:
    document, data, html = drawn(Curves("t", [Series("a", [1, 2, 4.0]), Series("b", torch.tensor([3.0, 2, 1]))]))
    assert [len(vertices(line)) for line in lines(html)] == [3, 3]
    np.testing.assert_allclose(vertices(lines(html)[0])[:, 0], [0, 500, 1000])
    assert data["heads"] == ["epoch 1", "epoch 2", "epoch 3"]
    assert [series["text"] for series in data["series"]] == [["1", "2", "4"], ["3", "2", "1"]]
    heights = vertices(lines(html)[0])[:, 1]
    assert (heights[0] - heights[1]) * 2 == pytest.approx(heights[1] - heights[2], abs=0.2)
    assert document.count("button") == 2


def test_curves_draw_mean_and_band_over_seeds() -> None:
    values = np.random.default_rng(0).normal(5, 1, (7, 12))
    series = Series("a", values)
    np.testing.assert_allclose(series.mean, values.mean(axis=0))
    np.testing.assert_allclose(series.deviation, values.std(axis=0, ddof=1))
    _, data, html = drawn(Curves("t", [series], format=".2f"))
    assert data["series"][0]["text"][3] == f"{values[:, 3].mean():.2f} ± {values[:, 3].std(ddof=1):.2f}"
    (band,) = lines(html, "band")
    assert len(vertices(band.rstrip("Z"))) == 24
    assert "over 7 seeds" in html


def test_curves_ignore_a_diverged_seed() -> None:
    series = Series("a", [[1.0, None], [3.0, 5.0]])
    assert series.mean.tolist() == [2, 5]
    assert np.isnan(series.deviation).tolist() == [False, True]
    assert series.gaps == 1


def test_curves_break_at_gaps_and_report_them() -> None:
    _, data, html = drawn(Curves("t", [Series("a", [1, 2, np.nan, 4, np.inf, 6, 7])]))
    (line,) = lines(html)
    assert line.count("M") == 2
    assert "2 values not finite, omitted" in html
    assert len(data["series"][0]["at"]) == 5
    (spots,) = lines(html, "spots")  # the isolated fourth value is a dot
    assert spots.count("M") == 5


def test_curves_without_finite_values_are_an_empty_chart() -> None:
    for values in ([np.nan, np.inf], []):
        document, data, html = drawn(Curves("t", [Series("a", values)], log_y=True, log_x=True))
        assert lines(html) == []
        assert data["x"] == []
        assert "no value is finite" in html
        assert document.count("svg") == 1


def test_curves_on_a_log_axis_omit_values_at_or_below_zero() -> None:
    curves = Curves("t", [Series("a", [0.0, 0.1, 1, 10], x=[0, 1, 10, 100])], log_x=True, log_y=True)
    _, data, html = drawn(curves)
    assert "1 point at 0 or below omitted" in html
    np.testing.assert_allclose(data["x"], [0, 500, 1000])
    below = Curves("t", [Series("a", [[1.0, 2.0], [9.0, 2.2]])], log_y=True)  # the band reaches below 0
    assert "nan" not in curves_html(below)


def test_thinned_keeps_extremes_ends_and_gaps() -> None:
    random = np.random.default_rng(0)
    values = random.normal(size=100_000)
    values[[777, 4321, 99_000]] = [50, -50, np.nan]
    kept = thinned(np.linspace(0, 1, len(values)), values)
    assert len(kept) <= MOST_POINTS
    assert {0, 777, 4321, 99_000, len(values) - 1} <= set(kept.tolist())
    parts = np.array_split(np.arange(len(values)), 50)
    for part in parts:  # the outline is preserved everywhere
        inside = kept[(kept >= part[0]) & (kept <= part[-1])]
        assert np.nanmax(values[inside]) >= np.nanquantile(values[part], 0.99)


def test_curves_of_long_series_are_small() -> None:
    wave = np.sin(np.linspace(0, 60, 200_000))
    _, data, html = drawn(Curves("t", [Series("a", wave), Series("b", -wave)], x_name="step"))
    assert all(len(series["at"]) <= MOST_POINTS for series in data["series"])
    assert len(html) < 80_000
    assert "of 200,000 points per curve, extremes included" in html
    many = curves_html(Curves("t", [Series(str(i), wave[::20]) for i in range(MOST_CURVES)]))
    assert len(many) < 900_000


def test_curves_on_a_log_axis_are_thinned_in_log_space() -> None:
    rates = np.arange(1, 100_001) / 100_000
    _, data, _ = drawn(Curves("t", [Series("a", rates**0.2, x=rates)], log_x=True))
    assert np.diff(data["x"][:100]).max() < 70  # the first decades keep their points
    assert np.diff(data["x"][100:]).max() < 10


def test_curves_alt_text_names_ends_and_best() -> None:
    curves = Curves("t", [Series("a", [0.5, 0.9, 0.8])], y_name="accuracy", format=".0%", higher_is_better=True)
    svg = next(attributes for tag, attributes in drawn(curves)[0].elements if tag == "svg")
    assert svg["role"] == "img"
    assert svg["aria-label"] == "1 curve of accuracy over epoch from 1 to 3. a: 50% to 80%, best 90% at epoch 2."
    assert "accuracy ↑" in curves_html(curves)


def test_curves_list_numbers_in_a_table() -> None:
    few = drawn(Curves("t", [Series("a", [1, 2]), Series("b", [3], x=[2])]))[0]
    assert few.count("tr") == 3
    many = drawn(Curves("t", [Series("a", range(5000)), Series("b", range(5000))]))[0]
    assert many.count("tr") == 3
    assert "4,999" not in many.texts["td"]


def test_curves_escape_names() -> None:
    curves = Curves(HOSTILE, [Series(HOSTILE, [1, 2]), Series("b", [2, 1])], HOSTILE, HOSTILE, caption=HOSTILE)
    document, data, _ = drawn(curves)
    assert document.count("script") == 1
    assert data["series"][0]["name"] == HOSTILE


def test_curves_options_have_an_effect() -> None:
    plain = {"series": [Series("a", [1, 2, 30.0]), Series("b", [3, 2, 1])]}
    options = [
        {},
        {"x_name": "step"},
        {"y_name": "loss"},
        {"format": ".2f"},
        {"log_x": True},
        {"log_y": True},
        {"higher_is_better": True},
        {"ordered": True},
        {"caption": "c"},
        {"series": [Series("a", [1, 2, 30.0], dashed=True), Series("b", [3, 2, 1])]},
        {"series": [Series("a", [1, 2, 30.0], spread=[1, 1, 1]), Series("b", [3, 2, 1])]},
    ]
    pages = [curves_html(Curves("t", **(plain | option))) for option in options]
    assert len(set(pages)) == len(options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Series("a", [[[1]]]), r"values of 'a' must be 1-dimensional or 2-dimensional, not \(1, 1, 1\)"),
        (lambda: Series("a", ["x"]), "values of 'a' must be real numbers"),
        (lambda: Series("a", [[1, 2], [3]]), "values of 'a' must be a tensor or an array of numbers, not a list"),
        (lambda: Series("a", [{}, None]), "values of 'a' must be real numbers, not 'list'"),
        (lambda: Series("a", [1, 2], x=[1]), "x of 'a' must be one position for each of the 2 values, not 1"),
        (lambda: Series("a", [1, 2], x=[2, 1]), r"x of 'a' must be finite and ascending, not \[1.0\]"),
        (lambda: Series("a", [1, 2], x=[1, np.nan]), r"x of 'a' must be finite and ascending, not \[nan\]"),
        (lambda: Series("a", [[1, 2], [1, 2]], spread=[1, 1]), r"spread of 'a' must be given for values \(T,\)"),
        (lambda: Series("a", [1, 2], spread=[1, -1]), "spread of 'a' must be numbers >= 0, not -1.0"),
        (lambda: Curves("t", []), "series must be 1 to 40 Series, not 0"),
        (lambda: Curves("t", [[1, 2]]), r"series\[0\] must be a Series, not 'list'"),
        (lambda: Curves("t", [Series("a", [1])], format="x!"), "format of column 'value' must be a format"),
    ],
)
def test_curves_reject_invalid_input_in_one_line(make, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
