"""Charts: what is drawn, described, listed and rejected."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hypersphere.report import Images, Series, figure_svg
from hypersphere.report._vega import chart_spec
from hypersphere.report.charts import (
    LEVELS,
    MOST_POINTS,
    MOST_SIDE,
    PIXELS,
    bars,
    bin_edges,
    heat_map,
    histogram,
    landscape,
    lines,
    scatter,
)
from hypersphere.report.images import images_html, png_uri
from hypersphere.report.palette import SCALE, ordered_colors


def rows_of(chart) -> list[dict]:
    """Return the rows that the first layer of a chart draws."""
    return chart_spec(chart)["data"]["values"]


def about(chart) -> dict:
    return chart_spec(chart)["usermeta"]


def encodings(chart, channel: str) -> list[dict]:
    return [layer["encoding"][channel] for layer in chart_spec(chart)["layer"] if channel in layer["encoding"]]


def test_lines_draw_all_points_of_each_series() -> None:
    drawn = rows_of(lines([Series("a", [1.0, 3.0, 2.0]), Series("b", [4.0, 5.0], x=[2, 7])]))
    assert [(row["series"], row["x"], row["y"]) for row in drawn] == [
        ("a", 1, 1),
        ("a", 2, 3),
        ("a", 3, 2),
        ("b", 2, 4),
        ("b", 7, 5),
    ]


def test_lines_draw_mean_and_band_over_seeds() -> None:
    chart = lines([Series("a", [[1.0, 2.0], [3.0, 2.0]])], limits=(0, 3))
    first, second = rows_of(chart)
    assert (first["y"], first["low"], first["high"]) == pytest.approx(
        (2.0, 2 - math.sqrt(2), 3.0), rel=1e-4
    )  # ends at the limit
    assert (second["low"], second["high"]) == (2.0, 2.0)
    assert first["text"] == "2 ± 1.414"
    assert about(chart)["notes"] == ["Bands: mean ± one standard deviation over 2 seeds."]
    many = lines([Series(str(number), [[1.0], [2.0]]) for number in range(7)])
    assert about(many)["notes"] == ["Means over 2 seeds."]
    assert not any("low" in row for row in rows_of(many))


def test_lines_of_one_seed_have_no_band_on_a_log_axis() -> None:
    chart = lines([Series("a", [[1.0, 2.0]]), Series("b", [[1.0, 2.0], [3.0, math.nan]])], log_y=True)
    assert [("low" in row, "high" in row) for row in rows_of(chart)] == [(False, False)] * 2 + [
        (True, True),
        (False,) * 2,
    ]


def test_lines_ignore_a_diverged_seed() -> None:
    chart = lines([Series("a", [[1.0, 2.0], [3.0, math.nan]])])
    assert [row["y"] for row in rows_of(chart)] == [2.0, 2.0]
    assert "1 value not finite, omitted." in about(chart)["notes"]


def test_lines_break_at_gaps_and_report_them() -> None:
    chart = lines([Series("a", [1.0, None, math.inf, 1e300, 2.0])])
    assert [row["y"] for row in rows_of(chart)] == [1.0, None, None, None, 2.0]
    assert about(chart)["notes"] == ["3 values not finite, omitted."]


def test_lines_without_finite_values_are_an_empty_chart() -> None:
    chart = lines([Series("a", [math.nan, None])])
    assert chart.description.startswith("1 curve of values over epoch: no value is finite.")
    assert about(chart)["details"] == {"a": "no values"}


def test_lines_on_a_log_axis_omit_values_at_or_below_zero() -> None:
    chart = lines([Series("a", [0.0, -1.0, 10.0, 100.0], x=[0.0, 1.0, 2.0, 3.0])], log_y=True, log_x=True)
    assert [(row["x"], row["y"]) for row in rows_of(chart)] == [(1, None), (2, 10), (3, 100)]
    assert "2 points at 0 or below omitted from the log axis." in about(chart)["notes"]
    assert {channel["scale"]["type"] for name in "xy" for channel in encodings(chart, name) if "scale" in channel} == {
        "log"
    }


@pytest.mark.slow
@given(st.integers(0, 2**32 - 1), st.integers(MOST_POINTS + 1, 3 * MOST_POINTS), st.floats(0, 1))
@settings(max_examples=25, deadline=None)
def test_lines_of_long_series_keep_ends_and_extremes(seed: int, count: int, gaps: float) -> None:
    random = np.random.default_rng(seed)
    values = np.where(random.random(count) < gaps, np.nan, random.normal(size=count)).tolist()
    drawn = [row["y"] for row in rows_of(lines([Series("a", values)]))]
    assert len(drawn) <= MOST_POINTS
    finite = [value for value in values if math.isfinite(value)]
    shown = [value for value in drawn if value is not None]
    assert (len(shown) == 0) == (len(finite) == 0)
    if finite:
        assert min(shown) == pytest.approx(min(finite), rel=1e-4)
        assert max(shown) == pytest.approx(max(finite), rel=1e-4)
    assert (None in drawn) == any(map(math.isnan, values))


def test_lines_of_long_series_are_small() -> None:
    chart = lines([Series(str(number), np.random.default_rng(0).normal(size=20_000)) for number in range(5)])
    assert len(json.dumps(chart_spec(chart))) < 250_000
    assert any("points per curve, extremes included" in note for note in about(chart)["notes"])
    assert 40 <= len(about(chart)["numbers"]) <= 50  # evenly spaced values


def test_lines_alt_text_names_ranges_and_last_values() -> None:
    chart = lines([Series("a", [3.0, 1.0, 2.0])], y_name="loss", format=".1f", higher_is_better=False)
    assert chart.description == "1 curve of loss over epoch from 1 to 3. a: 2.0."
    assert chart_spec(chart)["title"] == "loss ↓"
    many = lines([Series(str(number), [1.0]) for number in range(10)])
    assert many.description.endswith("And 2 more.")


def test_lines_list_numbers_in_a_table() -> None:
    numbers = about(lines([Series("a", [[1.0, 2.0], [3.0, 2.0]]), Series("b", [5.0], x=[2])]))["numbers"]
    assert numbers == [["epoch", "a", "b"], ["1", "2 ± 1.414", "–"], ["2", "2 ± 0", "5"]]


def test_lines_options_have_an_effect() -> None:
    series = [Series("a", [0.1, 0.2], dashed=True), Series("b", [0.3, 0.4])]
    percent = lines(series, format=".1%", ordered=True)
    assert [row["dashed"] for row in rows_of(percent)] == [True, True, False, False]
    assert about(percent)["details"] == {"a": "20.0%", "b": "40.0%"}
    assert list(about(percent)["colors"].values()) == list(ordered_colors(2))
    assert encodings(percent, "y")[0]["axis"]["format"] == "~%"
    whole = [channel["axis"]["values"] for channel in encodings(percent, "x")]
    assert whole[0] == [1, 2]  # epochs have integer ticks
    decades = encodings(lines([Series("a", [1.0, 2.0], x=[1e-3, 1.0])], log_x=True), "x")[0]["axis"]["values"]
    assert decades == pytest.approx([1e-3, 1e-2, 1e-1, 1.0])


def test_histogram_counts_agree_with_numpy() -> None:
    random = np.random.default_rng(0)
    samples = {"a": random.normal(size=500), "b": random.normal(3, 0.5, 100)}
    chart = histogram(samples)
    edges = bin_edges(*samples.values())
    for name, values in samples.items():
        shares = [row["y"] for row in rows_of(chart) if row["series"] == name][:-1]
        assert shares == pytest.approx(np.histogram(values, edges)[0] / len(values), abs=1e-4)
    moments = {row[0]: row[1:4] for row in about(chart)["numbers"][1:]}
    assert moments["b"] == ["100", f"{samples['b'].mean():.3g}", f"{samples['b'].std():.3g}"]


@pytest.mark.parametrize("scale", [1e-7, 1.0, 1e5])
def test_bin_edges_are_even_and_complete(scale: float) -> None:
    values = np.random.default_rng(0).normal(size=1000) * scale
    edges = bin_edges(values)
    assert edges[0] <= values.min()
    assert edges[-1] >= values.max()
    steps = np.diff(edges)
    assert np.allclose(steps, steps[0])
    assert 8 <= len(steps) <= 100


def test_bin_edges_of_equal_or_no_values() -> None:
    assert bin_edges(np.zeros(0))[[0, -1]].tolist() == [0, 1]
    assert bin_edges(np.full(9, 2.0)).tolist() == pytest.approx([1.9, 2.1])
    assert bin_edges(np.zeros(3)).tolist() == [-0.5, 0.5]


def test_histogram_accepts_counts_in_given_bins() -> None:
    chart = histogram({"a": [1, 0, 3]}, edges=[0, 10, 20, 30], counts=True, format=".1f")
    assert [row["y"] for row in rows_of(chart)] == [0.25, 0.0, 0.75, 0.0]
    assert [row.get("at") for row in rows_of(chart)] == [5.0, 15.0, 25.0, None]
    assert about(chart)["numbers"][1][:3] == ["a", "4", "20.0"]


def test_histogram_reports_omitted_values_and_draws_marks() -> None:
    chart = histogram({"a": [1.0, math.nan, 9.0]}, edges=[0, 2], marks={"start": 1.5}, x_name="k")
    assert about(chart)["notes"] == ["1 value not finite, omitted.", "1 value outside the bins, not drawn."]
    assert "A line at 1.5: start." in chart.description
    assert "start 1.5" in json.dumps(chart_spec(chart))


def test_bars_have_lengths_whiskers_and_numbers() -> None:
    chart = bars(["x", "y"], [Series("a", [[1.0, 2.0], [3.0, 2.0]]), Series("b", [1.0, math.nan])], start=1.0)
    first = rows_of(chart)[0]
    assert (first["start"], first["y"], first["low"], first["high"]) == pytest.approx((1, 2, 0.58579, 3.4142), rel=1e-4)
    assert len(rows_of(chart)) == 3  # the missing value has no bar
    assert about(chart)["numbers"][2] == ["y", "2 ± 0", "–"]
    assert chart.description == "Bars of values for x, y."
    domain = encodings(chart, "x")[0]["scale"]["domain"]
    assert domain[0] <= 0.586
    assert domain[1] > 3.42  # room for the number behind the bar


def test_heat_map_draws_cells_and_leaves_gaps_blank() -> None:
    values = np.array([[1.0, math.nan], [3.0, 4.0]])
    chart = heat_map(values, ["a", "b"], ["c", "d"], value_name="angle", limits=(0, 10))
    drawn = {(row["row"], row["column"]): row["y"] for row in rows_of(chart)}
    assert drawn == {("a", "c"): 1.0, ("b", "c"): 3.0, ("b", "d"): 4.0}
    assert about(chart)["notes"] == ["1 cell without a finite value, left blank."]
    scale = encodings(chart, "color")[0]["scale"]
    assert scale["domain"] == [0, 10]
    assert scale["range"] == list(SCALE)
    assert chart.description == "Heat map of angle, 2 × 2. Lowest: 1 (a, c). Highest: 4 (b, d)."
    blank = np.ones((3, 3))
    np.fill_diagonal(blank, math.nan)
    assert about(heat_map(blank))["notes"] == []


def test_heat_map_of_a_large_matrix_shows_evenly_spaced_cells() -> None:
    chart = heat_map(np.arange(400.0)[:, None] * np.ones(3))
    values = [row["y"] for row in rows_of(chart) if row["column"] == "0"]
    assert len(values) == MOST_SIDE
    assert (values[0], values[-1]) == (0.0, 399.0)
    assert about(chart)["notes"] == [f"{MOST_SIDE} of 400 rows and 3 of 3 columns, evenly spaced."]


def test_heat_map_keeps_rows_of_equal_names_apart() -> None:
    drawn = rows_of(heat_map(np.eye(2), ["same", "same"], ["a", "b"]))
    assert len({(row["row"], row["column"]) for row in drawn}) == 4
    assert {row["row"].strip() for row in drawn} == {"same"}


def surface(chart) -> np.ndarray:
    """Return the pixels (H, W, 4) of a landscape."""
    image = pytest.importorskip("PIL.Image")
    url = chart_spec(chart)["layer"][0]["mark"]["url"]
    return np.asarray(image.open(io.BytesIO(base64.b64decode(url.split(",")[1]))))


def test_landscape_is_upright_with_contours() -> None:
    values = np.array([[0.0, 0.0, 0.0], [5.0, 5.0, 5.0], [10.0, 10.0, 10.0]])
    chart = landscape(values, x=(-2, 2), marks={"trained": (0.5, -0.5)})
    spec, pixels = chart_spec(chart), surface(chart)
    assert spec["data"]["values"][0] == {"x": -2, "y": -1, "value": 0}
    assert pixels[-1, 0, :3].tolist() == [31, 26, 56]  # the first row is at the bottom
    assert pixels[0, 0, :3].tolist() == [222, 250, 230]
    # Along a column the scale increases smoothly, except at the contour lines.
    steps = np.abs(np.diff(pixels[:, 100, :3].astype(int), axis=0)).sum(1) > 30
    assert len(np.flatnonzero(np.diff(np.flatnonzero(steps)) > 5)) + 1 == LEVELS - 1
    assert spec["layer"][2]["data"]["values"][0]["label"] == "trained"


@pytest.mark.slow
def test_landscape_contour_of_a_cone_is_a_circle() -> None:
    grid = np.hypot(*np.meshgrid(np.linspace(-1, 1, 101), np.linspace(-1, 1, 101)))
    plain = surface(landscape(np.zeros((2, 2)), limits=(0.0, LEVELS)))
    assert len(np.unique(plain.reshape(-1, 4), axis=0)) == 1  # no level is crossed
    pixels = surface(landscape(grid, limits=(0.5 - 1e6, 0.5 + 1e6)))  # too wide a range for colours, but not for lines
    assert len(np.unique(pixels.reshape(-1, 4), axis=0)) == 1
    two = surface(landscape(np.where(grid < 0.5, 0.0, 1.0), limits=(0.0, 1.0)))
    rows, columns = np.nonzero((two[..., 0] != two[0, 0, 0]) & (two[..., 0] != two[PIXELS // 2, PIXELS // 2, 0]))
    radius = np.hypot(rows / (PIXELS - 1) * 2 - 1, columns / (PIXELS - 1) * 2 - 1)
    assert np.allclose(radius, 0.5, atol=0.03)


def test_landscape_leaves_gaps_transparent() -> None:
    values = np.ones((5, 5))
    values[2, 2] = math.nan
    opacity = surface(landscape(values))[..., 3]
    assert opacity[PIXELS // 2, PIXELS // 2] == 0
    assert opacity[0, 0] == 255


def test_landscape_log_scale_omits_non_positive_values() -> None:
    values = np.array([[1.0, 10.0, 100.0], [0.0, 10.0, 1000.0]])
    chart = landscape(values, log=True, limits=(1.0, 1000.0))
    assert about(chart)["notes"] == ["1 point without a positive finite value, left blank."]
    assert (
        encodings(chart, "color")[0]["scale"] | {"type": "log", "domain": [1.0, 1000.0]}
        == encodings(chart, "color")[0]["scale"]
    )


def test_scatter_shows_raw_features_with_their_norms() -> None:
    points = torch.tensor([[3.0, 4.0], [0.0, 2.0], [-6.0, 8.0]])
    chart = scatter(points, [0, 1, 1], vectors=torch.eye(2), classes=["a", "b"])
    spec = chart_spec(chart)
    features = spec["data"]["values"]
    assert [(row["x"], row["y"]) for row in features] == [(3, 4), (0, 2), (-6, 8)]  # not normalised
    assert "Norms from 2 to 10, median 5." in chart.description
    assert about(chart)["numbers"][1:] == [["a", "1", "5", "5", "5"], ["b", "2", "6", "2", "10"]]
    x, y = (encodings(chart, channel)[0]["scale"]["domain"] for channel in "xy")
    assert x == y  # angles are not distorted
    many = scatter(np.random.default_rng(0).normal(size=(5000, 2)), np.zeros(5000, dtype=int))
    assert "1,500 of 5,000 are drawn." in about(many)["notes"][0]


def test_figure_svg_is_a_described_image_with_a_legend() -> None:
    chart = lines([Series("a & <b>", [[1.0, 2.0], [2.0, 3.0]]), Series("c", [2.0, 1.0])], y_name="loss")
    svg = figure_svg("A title", [[("Loss", chart), ("Again", chart)]])
    root = ElementTree.fromstring(svg)
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Loss", "Again", "a & <b>", "c", "epoch"} <= set(words)
    assert any("over 2 seeds" in (word or "") for word in words)
    assert root.get("role") == "img"
    assert (root.get("aria-label") or "").startswith("A title Loss: 2 curves of loss")
    assert not re.search(r"(href|src)=[\"']http", svg)
    hostile = figure_svg("run\x1b[2J", [[("a\u202e", lines([Series("b\x07", [1.0]), Series("c", [2.0])]))]])
    assert not set(hostile) & set("\x1b\x07\u202e")
    assert "b\\x07" in [text.text for text in ElementTree.fromstring(hostile).iter("{http://www.w3.org/2000/svg}text")]
    with pytest.raises(ValueError, match="rows must be at least one row of at least one chart"):
        figure_svg("", [[]])


def test_images_are_grey_at_zero_and_ordered() -> None:
    weights = np.array([[[0.0, 1.0], [-1.0, 0.5]], [[0.0, 0.1], [-0.1, 0.0]]])
    pixels = Images("a", weights).pixels
    assert pixels[0].tolist() == [[128, 255], [0, 191]]
    assert pixels[1].tolist() == [[128, 255], [0, 128]]  # each on its own scale
    html = images_html(Images("<b>", np.ones((300, 1, 3, 3))))
    assert "The first 256 of 300." in html
    assert "<b>" not in html


def test_png_uri_is_decoded_by_pillow() -> None:
    image = pytest.importorskip("PIL.Image")
    for shape in ((5, 7), (5, 7, 3), (5, 7, 4)):
        pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        data = base64.b64decode(png_uri(pixels).split(",")[1])
        assert np.array_equal(np.asarray(image.open(io.BytesIO(data))), pixels)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lines([]), "series must be at least one Series, not 0"),
        (lambda: lines([Series("a", [1.0])], limits=(1, 0)), r"limits must be two numbers, low and high, not \(1, 0\)"),
        (lambda: lines([Series("a", [1.0])], format=".2q"), "format of column 'value' must be a format specification"),
        (lambda: Series("a", [1.0, 2.0], x=[1]), "x of 'a' must be one position for each of the 2 values, not 1"),
        (lambda: Series("a", [1.0, 2.0], x=[2, 1]), r"x of 'a' must be finite and ascending, not \[1.0\]"),
        (lambda: Series("a", ["x"]), "values of 'a' must be real numbers"),
        (lambda: histogram({}), "samples must be at least one distribution, not 0"),
        (lambda: histogram({"a": [1.0]}, counts=True), "edges must be given with counts, not None"),
        (lambda: histogram({"a": [1.0]}, edges=[1, 0]), "edges must be at least two ascending numbers"),
        (
            lambda: histogram({"a": [1]}, edges=[0, 1, 2], counts=True),
            r"samples\['a'\] must be one count >= 0 for each",
        ),
        (lambda: bars([], []), "labels must be at least one name"),
        (lambda: bars(["a"], [Series("b", [1.0, 2.0])]), "values of 'b' must be one value for each of the 1 labels"),
        (lambda: heat_map([1.0]), r"values must be 2-dimensional, not \(1,\)"),
        (lambda: heat_map(np.ones((2, 2)), ["a"]), "rows must be empty or 2 names, not 1"),
        (lambda: landscape(np.ones((1, 2))), "values must be a matrix with at least two rows and two columns"),
        (lambda: landscape(np.ones((2, 2)), x=(1, 0)), "x must be two finite numbers, low and high"),
        (lambda: scatter(np.ones((2, 3)), [0, 1]), r"points must be an array of shape \(N, 2\), not \(2, 3\)"),
        (lambda: scatter(np.ones((2, 2)), [0]), "labels must be one value for each of the 2 points, not 1"),
        (lambda: Images("a", np.ones((2, 2, 3, 3))), "images must be an array"),
    ],
)
def test_charts_reject_invalid_input_in_one_line(make, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
