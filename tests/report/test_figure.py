"""SVG figures, stacked sections, and limits of axes."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from hypersphere.report import Curves, Landscape, Page, Series, Stack, Tabs, Text, figure_svg, page_html
from hypersphere.report.curves import MOST_BANDED, curves_html
from hypersphere.report.figure import HEIGHT, WIDTH
from hypersphere.report.landscape import landscape_html

from .document import HOSTILE, Checker

SVG = "{http://www.w3.org/2000/svg}"


def drawn(svg: str, kind: str) -> list[str]:
    return [p.get("d") or "" for p in ElementTree.fromstring(svg).iter(f"{SVG}path") if kind in (p.get("class") or "")]


def points(path: str) -> np.ndarray:
    return np.array([[float(number) for number in pair.split()] for pair in re.split("[ML]", path) if pair])


def test_figure_svg_curve_goes_through_its_values() -> None:
    svg = figure_svg("t", [[Curves("Loss", [Series("a", [4.0, 0.0, 3.0], x=[0, 5, 10])])]])
    (line,) = drawn(svg, "line")
    x, y = points(line).T
    assert (x - x[0]) / (x[-1] - x[0]) == pytest.approx([0, 0.5, 1], abs=1e-3)
    assert HEIGHT - y == pytest.approx(HEIGHT * np.array([1, 0, 0.75]), abs=0.06)  # the axis ends at 0 and 4


def test_figure_svg_escapes_text_and_stays_inside() -> None:
    names = ["softmax", "a name that is much longer than the others are", HOSTILE]
    series = [Series(name, np.random.default_rng(0).random((3, 6))) for name in names]
    svg = figure_svg(HOSTILE, [[Curves("Loss", series), Curves("Error", series[:2], x_name="step")]] * 2)
    root = ElementTree.fromstring(svg)
    words = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert words.count("softmax") == 2  # one legend per row
    assert {"Loss", "Error", "epoch", "step", "Bands: mean ± one standard deviation over 3 seeds."} <= set(words)
    assert root.find(f"{SVG}title").text == HOSTILE  # type: ignore[union-attr]
    height = float(root.get("height") or 0)
    assert root.get("viewBox") == f"0 0 {WIDTH} {height:.0f}"
    for group in root.iter(f"{SVG}g"):
        left, top = (float(part) for part in re.findall(r"[\d.]+", group.get("transform") or ""))
        for path in group.iter(f"{SVG}path"):
            if path.get("class") == "line":
                x, y = points(path.get("d") or "").T
                assert 0 <= left + x.min() <= left + x.max() <= WIDTH
                assert 0 <= top + y.min() <= top + y.max() <= height
    for text in root.findall(f"{SVG}text"):  # texts of the legends
        assert float(text.get("x") or 0) + 7 * len((text.text or "")[:60]) <= WIDTH
        assert float(text.get("y") or 0) < height


def test_figure_svg_uses_one_colour_per_name_in_a_row() -> None:
    one, other = Series("one", [1.0, 2.0]), Series("other", [2.0, 3.0])
    root = ElementTree.fromstring(figure_svg("t", [[Curves("a", [one, other]), Curves("b", [other])]]))
    lines = [[p.get("stroke") for p in g.iter(f"{SVG}path") if p.get("class") == "line"] for g in root.iter(f"{SVG}g")]
    assert lines[0][1] == lines[1][0] != lines[0][0]
    with pytest.raises(ValueError, match="rows must be at least one row"):
        figure_svg("t", [])


def test_bands_are_drawn_only_for_few_curves() -> None:
    series = [Series(str(n), [[0.2, 0.4], [0.3, 0.6]]) for n in range(MOST_BANDED + 1)]
    few, many = Curves("t", series[:-1]), Curves("t", series)
    assert (curves_html(few).count("class='band'"), curves_html(many).count("class='band'")) == (MOST_BANDED, 0)
    assert (len(drawn(figure_svg("t", [[few]]), "band")), len(drawn(figure_svg("t", [[many]]), "band"))) == (6, 0)
    assert "Means over 2 seeds." in curves_html(many)
    assert "0.25 ± 0.07071" in curves_html(many)  # still in the table of numbers


def test_curves_limits_end_the_axis() -> None:
    series = [Series("a", [[0.9, 1.0], [1.0, 0.8]])]
    assert ">105%<" in curves_html(Curves("t", series, format=".0%"))
    html = curves_html(Curves("t", series, format=".0%", limits=(0.0, 1.0)))
    assert ">100%<" in html
    assert ">105%<" not in html
    band = re.search("class='band' d='(.*?)Z'", html)
    assert band is not None
    assert points(band[1])[:, 1].min() >= 0
    with pytest.raises(ValueError, match="limits must be two finite numbers, low and high"):
        Curves("t", series, limits=(1.0, 0.0))


def test_landscape_limits_set_the_colour_scale() -> None:
    low, high = np.zeros((3, 3)), np.full((3, 3), 4.0)
    bars = [
        re.findall(r"scale-bar.*?</div></div>", landscape_html(Landscape("t", v, limits=(0, 5)))) for v in (low, high)
    ]
    assert bars[0] == bars[1]
    with pytest.raises(ValueError, match="limits must be two finite numbers"):
        Landscape("t", low, limits=(1, 1))


def test_stack_has_a_heading_for_every_section() -> None:
    stack = Stack("Both", [Text("One", "a"), Text("", "b"), Stack("Inner", [Text("Two", "c")])], caption="Under.")
    document = Checker(page_html(Page("t", "", [Tabs("Tabs", [stack])])))
    assert document.texts["h3"] == ["Both"]
    assert document.texts["h4"] == ["One", "Inner"]
    assert document.texts["h5"] == ["Two"]
    assert "Under." in document.texts["p"]


def test_column_shows_no_sign_before_a_deviation() -> None:
    html = page_html(Page("CNN-6 wins", "", [Text("t", "")]))
    assert "<h1><span class='whole'>CNN-6</span> wins</h1>" in html
    series = Series("a", [[0.1, 0.2], [0.2, 0.4]])
    assert "+0.15 ± 0.07" in curves_html(Curves("t", [series], format="+.2f"))
