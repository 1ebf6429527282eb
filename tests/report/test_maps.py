"""Heat maps, landscapes and filters: pixels, as decoded by Pillow, and contour lines."""

from __future__ import annotations

import base64
import io
import json
import re

import numpy as np
import pytest
import torch

from hypersphere.report import Filters, HeatMap, Landscape
from hypersphere.report.contour import contour
from hypersphere.report.field import MOST_SIDE, shrunk
from hypersphere.report.filters import MOST_FILTERS, filters_html
from hypersphere.report.heatmap import heatmap_html
from hypersphere.report.landscape import landscape_html
from hypersphere.report.palette import ordered_colors, scale_colors
from hypersphere.report.png import png_uri

from .document import HOSTILE, Checker

Image = pytest.importorskip("PIL.Image", reason="pillow (extra 'eval') is not installed")


def pixels(html: str, place: int = 0, mode: str = "RGBA") -> np.ndarray:
    data = re.findall(r"data:image/png;base64,([^']+)'", html)[place]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert(mode))


def data_of(html: str) -> dict:
    return json.loads(html.rsplit('<script type="application/json">', 1)[1].split("</script>")[0])


def oklab(colors: np.ndarray) -> np.ndarray:
    """Convert sRGB bytes to OKLab (Ottosson 2020)."""
    s = colors / 255
    linear = np.where(s <= 0.04045, s / 12.92, ((s + 0.055) / 1.055) ** 2.4)
    cones = linear @ np.array(
        [
            [0.4122214708, 0.2119034982, 0.0883024619],
            [0.5363325363, 0.6806995451, 0.2817188376],
            [0.0514459929, 0.1073969566, 0.6299787005],
        ]
    )
    return np.cbrt(cones) @ np.array(
        [
            [0.2104542553, 1.9779984951, 0.0259040371],
            [0.7936177850, -2.4285922050, 0.7827717662],
            [-0.0040720468, 0.4505937099, -0.8086757660],
        ]
    )


def test_png_uri_is_decoded_by_pillow() -> None:
    random = np.random.default_rng(0)
    grey, color = random.integers(0, 256, (5, 7), dtype=np.uint8), random.integers(0, 256, (4, 3, 3), dtype=np.uint8)
    np.testing.assert_array_equal(pixels(png_uri(grey) + "'", mode="L"), grey)
    np.testing.assert_array_equal(pixels(png_uri(color) + "'", mode="RGB"), color)


def test_scale_colors_are_even_and_increasingly_light() -> None:
    steps = np.linalg.norm(np.diff(oklab(scale_colors(33).astype(float)), axis=0), axis=1)
    assert steps.max() / steps.min() < 1.35
    assert (np.diff(oklab(scale_colors(256).astype(float))[:, 0]) > -2e-3).all()
    order = oklab(np.array([list(bytes.fromhex(color[1:])) for color in ordered_colors(12)], dtype=float))
    assert (np.diff(order[:, 0]) > 0).all()
    assert 0.4 < order[0, 0] < order[-1, 0] < 0.8


def test_heatmap_has_one_pixel_per_cell_and_transparent_gaps() -> None:
    html = heatmap_html(HeatMap("t", [[0.0, 1.0, None], [2.0, np.inf, 4.0]]))
    picture = pixels(html, 1)  # after the colour bar
    assert picture.shape == (2, 3, 4)
    assert picture[..., 3].tolist() == [[255, 255, 0], [255, 0, 255]]
    np.testing.assert_array_equal(picture[0, 0, :3], scale_colors(2)[0])
    np.testing.assert_array_equal(picture[1, 2, :3], scale_colors(2)[1])
    np.testing.assert_array_equal(picture[1, 0, :3], scale_colors(255)[127])
    assert "2 cells without a finite value, left blank." in html
    assert data_of(html)["text"] == ["0", "1", "–", "2", "–", "4"]


def test_heatmap_empty_diagonal_is_not_reported() -> None:
    values = np.arange(9.0).reshape(3, 3)
    np.fill_diagonal(values, np.nan)
    assert "left blank" not in heatmap_html(HeatMap("t", values))
    values[0, 1] = np.nan
    assert "4 cells without a finite value, left blank." in heatmap_html(HeatMap("t", values))


def test_heatmap_shortens_names_by_their_shared_part() -> None:
    names = [f"Alphabet_of_the_Magi/character{number:02}" for number in (1, 2)]
    html = heatmap_html(HeatMap("t", np.eye(2), names))
    assert ">character01<" in html
    assert "Alphabet_of…" not in html
    assert data_of(html)["rows"] == names


def test_heatmap_limits_end_the_colour_scale() -> None:
    html = heatmap_html(HeatMap("t", torch.tensor([[0.0, 50.0], [100.0, 180.0]]), limits=(50, 100)))
    picture = pixels(html, 1)[..., :3]
    np.testing.assert_array_equal(picture[0, 0], picture[0, 1])
    np.testing.assert_array_equal(picture[1, 0], picture[1, 1])
    assert "2 cells beyond the ends of the colour bar." in html


def test_heatmap_of_a_large_matrix_shows_block_means() -> None:
    values = np.random.default_rng(0).normal(size=(450, 610))
    values[7, 9] = np.nan
    small, (rows, columns) = shrunk(values)
    assert max(small.shape) <= MOST_SIDE
    for row, column in ((0, 0), (2, 2), (small.shape[0] - 1, small.shape[1] - 1)):
        block = values[rows * row : rows * (row + 1), columns * column : columns * (column + 1)]
        inner = [np.nanmean(part) for part in block.T]  # rows first, then columns
        assert small[row, column] == pytest.approx(np.mean(inner))
    html = heatmap_html(HeatMap("t", values))
    assert "mean of up to 3 × 4" in html
    assert len(html) < 600_000
    data = data_of(html)
    assert (len(data["rows"]), len(data["columns"])) == small.shape
    assert data["rows"][0] == "0 – 2"


def test_heatmap_names_and_alt_text() -> None:
    names = ["cat", "dog"]
    html = heatmap_html(HeatMap("t", [[0, 81.24], [81.24, 0]], names, value_name="angle", format=".1f"))
    document = Checker(html)
    alt = next(attributes["alt"] for tag, attributes in document.elements if tag == "img" and attributes["alt"])
    assert alt == "Heat map of angle, 2 rows by 2 columns: lowest 0.0 at cat, cat; highest 81.2 at cat, dog; mean 40.6."
    assert data_of(html)["columns"] == names
    assert document.count("tr") == 3
    assert document.texts["span"].count("81.2") == 2
    hostile = HeatMap(HOSTILE, [[1, 2]], [HOSTILE], [HOSTILE, "b"], HOSTILE, HOSTILE, HOSTILE, caption=HOSTILE)
    assert Checker(heatmap_html(hostile)).count("script") == 1


def test_contour_of_a_cone_is_a_circle() -> None:
    line = np.linspace(-1, 1, 41)
    pieces = contour(line[:, None] ** 2 + line**2, 0.25)
    radius = np.linalg.norm(pieces / 20 - 1, axis=2)
    np.testing.assert_allclose(radius, 0.5, atol=2e-3)
    length = np.linalg.norm(np.diff(pieces / 20, axis=1), axis=2).sum()
    assert length == pytest.approx(np.pi, rel=5e-3)


def test_contour_length_agrees_with_matplotlib() -> None:
    contourpy = pytest.importorskip("contourpy", reason="contourpy (extra 'report') is not installed")
    random = np.random.default_rng(0)
    values = random.normal(size=(30, 20))  # saddles everywhere
    values[3, 4] = np.nan
    masked = np.ma.masked_invalid(values)
    for level in (-0.5, 0.0, 0.7):
        theirs = contourpy.contour_generator(z=masked, name="serial", corner_mask=False).lines(level)
        wanted = sum(np.linalg.norm(np.diff(line, axis=0), axis=1).sum() for line in theirs)
        ours = np.linalg.norm(np.diff(contour(values, level), axis=1), axis=2).sum()
        assert ours == pytest.approx(wanted, rel=1e-9)


def test_landscape_is_upright_with_contours_at_the_ticks() -> None:
    line = np.linspace(-1, 1, 21)
    values = 1 + (line[:, None] - 0.5) ** 2 + (line + 0.3) ** 2
    html = landscape_html(Landscape("t", values, marks={"trained": (-0.3, 0.5), "afar": (9, 9)}))
    picture = pixels(html, 1)[..., :3].astype(int).sum(axis=2)
    row, column = divmod(int(picture.argmin()), 21)
    assert (row, column) == (5, 7)  # y = 0.5 is near the top
    assert html.count("class='contour") >= 3
    assert html.count("class='point") == 1
    assert "from 1 at (−0.3, 0.5)" in html
    data = data_of(html)
    assert data["rows"][5] == "second direction 0.5"
    assert data["text"][5 * 21 + 7] == "1"


def test_landscape_log_scale_omits_non_positive_values() -> None:
    values = np.geomspace(1e-4, 1e4, 25).reshape(5, 5)
    values[0, 0] = 0
    html = landscape_html(Landscape("t", values, log=True))
    assert "1 cell without a positive finite value, left blank." in html
    assert pixels(html, 1)[4, 0, 3] == 0
    middle = 1 + np.round(
        254 * np.log10(1 / values[0, 1]) / np.log10(1e4 / values[0, 1])
    )  # colour index of the value 1
    np.testing.assert_array_equal(pixels(html, 1)[2, 2, :3], scale_colors(255)[int(middle) - 1])


def test_filters_are_grey_at_zero_and_ordered() -> None:
    images = np.zeros((3, 1, 2, 2))
    images[0, 0, 0, 0], images[1, 0, 0, 0] = 4, -1
    html = filters_html(Filters("t", images))
    assert pixels(html, 0, "L").tolist() == [[255, 128], [128, 128]]
    assert pixels(html, 1, "L").tolist() == [[0, 128], [128, 128]]
    shared = filters_html(Filters("t", torch.from_numpy(images), shared=True))
    assert pixels(shared, 1, "L")[0, 0] == 96
    colored = filters_html(Filters("t", np.stack([images[:, 0]] * 3, axis=1)))
    assert pixels(colored, 0, "RGB").shape == (2, 2, 3)


def test_filters_show_the_first_of_many() -> None:
    images = np.ones((MOST_FILTERS + 5, 3, 3))
    images[0, 0, 0] = np.nan
    html = filters_html(Filters(HOSTILE, images, names=[HOSTILE] * len(images), caption=HOSTILE))
    document = Checker(html)
    assert document.count("img") == MOST_FILTERS
    assert document.count("script") == 0
    assert "The first 256 of 261." in html
    assert "1 weight not finite, drawn as 0." in html
    alt = next(attributes["aria-label"] for _, attributes in document.elements if attributes.get("role") == "img")
    assert "256 filters of 3 × 3 pixels in grey" in (alt or "")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HeatMap("t", [1, 2]), r"values must be 2-dimensional, not \(2,\)"),
        (
            lambda: HeatMap("t", np.zeros((0, 3))),
            r"values must be a matrix with at least one row and one column, not \(0, 3\)",
        ),
        (lambda: HeatMap("t", [[1, 2]], rows=["a", "b"]), "rows must be empty, or 1 names, not 2"),
        (lambda: HeatMap("t", [[1, 2]], columns=["a"]), "columns must be empty, or 2 names, not 1"),
        (
            lambda: HeatMap("t", [[1, 2]], limits=(2, 1)),
            r"limits must be two finite numbers, low and high, not \(2, 1\)",
        ),
        (lambda: HeatMap("t", [[1, 2]], limits=(1,)), "limits must be two finite numbers"),
        (lambda: HeatMap("t", [["a", "b"]]), "values must be real numbers"),
        (
            lambda: Landscape("t", [[1, 2]]),
            r"values must be a matrix with at least two rows and two columns, not \(1, 2\)",
        ),
        (lambda: Landscape("t", np.eye(2), x=(1, 1)), "x must be two finite numbers, low and high"),
        (lambda: Landscape("t", np.eye(2), marks={"m": (0, np.nan)}), r"marks\['m'\] must be a point \(x, y\)"),
        (lambda: Filters("t", np.zeros((2, 2, 5, 5))), r"images must be an array of shape .*, not \(2, 2, 5, 5\)"),
        (
            lambda: Filters("t", np.zeros((2, 65, 5))),
            r"images must be images with 1 to 64 pixels per side, not \(65, 5\)",
        ),
        (
            lambda: Filters("t", np.zeros((2, 5, 5)), names=["a"]),
            "names must be empty, or one name for each of the 2 images, not 1",
        ),
    ],
)
def test_maps_reject_invalid_input_in_one_line(make, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
