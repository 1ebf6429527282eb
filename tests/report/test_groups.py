"""Bars, tabs, sections side by side, and the projection to three dimensions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hypersphere.report import (
    Bars,
    Column,
    Curves,
    Page,
    Series,
    SideBySide,
    Sphere,
    Spheres,
    Stack,
    Table,
    Tabs,
    Text,
    page_html,
    project,
    write_page,
)
from hypersphere.report.bars import bars_html

from .charts import every_section
from .document import HOSTILE, Checker


def classes(document: Checker, name: str) -> int:
    return sum(name in (attributes.get("class") or "").split() for _, attributes in document.elements)


def widths(html: str) -> list[float]:
    styles = [
        attributes["style"] or "" for _, attributes in Checker(html).elements if attributes.get("class") == "fill"
    ]
    return [float(style.split("width:")[1].rstrip("%")) for style in styles]


def test_bars_lengths_are_proportional_to_values() -> None:
    html = bars_html(Bars("t", ["a", "b"], [Series("x", [1.0, 2.0]), Series("y", [4.0, None])]))
    assert widths(html) == pytest.approx([25, 100, 50])
    assert "1 value not finite, omitted." in html
    assert Checker(html).texts["span"].count("–") == 1
    both = widths(bars_html(Bars("t", ["a", "b"], [Series("x", [-1.0, 3.0])])))
    assert both == pytest.approx([25, 75])


def test_bars_have_whiskers_for_seeds() -> None:
    section = Bars(
        "t", ["a", "b"], [Series("x", [[1.0, 2.0], [2.0, 4.0]]), Series("y", [1, 2], spread=[0, 0.5])], "u", ".2f"
    )
    document = Checker(bars_html(section))
    assert classes(document, "whisker") == 3
    assert "1.50 ± 0.71" in document.texts["span"]
    alt = next(attributes["aria-label"] for _, attributes in document.elements if attributes.get("role") == "img")
    assert alt == "Bars of u. a: x 1.50 ± 0.71, y 1.00 ± 0.00. b: x 3.00 ± 1.41, y 2.00 ± 0.50."


def test_page_accepts_every_section(tmp_path: Path) -> None:
    target = write_page(tmp_path / "page.html", title="t", lead="l", sections=every_section())
    text = target.read_text(encoding="utf-8")
    document = Checker(text)
    assert classes(document, "panel") == 6
    assert classes(document, "cell") == 2
    assert text.count("class Chart {") == text.count("function makeTabs") == text.count("class SphereView") == 1
    ids = [attributes["id"] for _, attributes in document.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert target.stat().st_size < 400_000
    for tag, attributes in document.elements:
        if attributes.get("role") == "img" and tag != "span":
            assert len(attributes["aria-label"] or "") > 30
        if tag == "img":
            assert "alt" in attributes
            assert (attributes["src"] or "").startswith("data:image/png")


def test_page_heading_levels_are_consecutive() -> None:
    words = Text("words", "w")
    page = page_html(Page("t", "l", [Tabs("outer", [SideBySide("inner", [words, Tabs("deep", [words])]), words])]))
    headings = [tag for tag, _ in Checker(page).elements if tag in ("h1", "h2", "h3", "h4", "h5", "h6")]
    assert headings == ["h1", "h2", "h3", "h4", "h4", "h5", "h3"]


def test_groups_escape_titles() -> None:
    table = Table(HOSTILE, [Column(HOSTILE)], [(HOSTILE,)])
    bars = Bars(HOSTILE, [HOSTILE], [Series(HOSTILE, [1]), Series(HOSTILE, [2])], HOSTILE, caption=HOSTILE)
    document = Checker(page_html(Page("t", "l", [Tabs(HOSTILE, [SideBySide(HOSTILE, [table, bars], HOSTILE)])])))
    assert document.count("script") == 2  # theme, scripts
    assert HOSTILE in document.texts["h3"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tabs("t", []), "sections must be at least one section, not 0"),
        (lambda: Tabs("t", [Text(" ", "w")]), r"title of sections\[0\] must be a non-empty name for its tab, not ' '"),
        (lambda: Tabs("t", ["words"]), r"title of sections\[0\] must be a non-empty name for its tab, not 'str'"),
        (
            lambda: Page("t", "l", [Text("a", "b"), Tabs("t", [SideBySide("b", ["words"])])]),
            r"sections\[1\].sections\[0\].sections\[0\] must be one of Text, .*SideBySide, not 'str'",
        ),
        (lambda: Bars("t", [], [Series("a", [])]), r"labels must be at least one name, not \[\]"),
        (lambda: Bars("t", ["a"], []), "series must be at least one Series, not 0"),
        (lambda: Bars("t", ["a"], [3]), r"series\[0\] must be a Series, not 'int'"),
        (
            lambda: Bars("t", ["a"], [Series("x", [1, 2])]),
            "values of 'x' must be one value for each of the 1 labels, not 2",
        ),
        (
            lambda: Bars("t", ["a"] * 201, [Series("x", [1] * 201)]),
            "labels must be labels for at most 200 bars in total, not 201",
        ),
        (lambda: project(np.zeros((3, 2))), r"features must be an array of shape \(N, d\) with d >= 3, not \(3, 2\)"),
        (lambda: project(np.eye(4), np.eye(3)), "vectors must be a matrix with 4 columns, like features, not 3"),
        (lambda: project(np.full((2, 4), np.nan)), "features must be finite"),
    ],
)
def test_groups_reject_invalid_input_in_one_line(make, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_project_agrees_with_singular_vectors() -> None:
    random = np.random.default_rng(0)
    features, vectors = random.normal(size=(200, 12)) * np.linspace(3, 0.2, 12), random.normal(size=(5, 12))
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    basis = np.linalg.svd(unit)[2][:3]
    seen = project(torch.from_numpy(features), vectors)
    np.testing.assert_allclose(np.abs(seen.points), np.abs(unit @ basis.T), atol=1e-9)
    wanted = np.abs(vectors / np.linalg.norm(vectors, axis=1, keepdims=True) @ basis.T)
    np.testing.assert_allclose(np.abs(seen.vectors), wanted, atol=1e-9)
    assert seen.kept == pytest.approx(((unit @ basis.T) ** 2).sum() / 200)
    inner = project(
        np.c_[random.normal(size=(50, 3)), np.zeros((50, 2))]
    )  # three-dimensional features are only rotated
    assert inner.kept == pytest.approx(1)
    Spheres("t", [Sphere("a", seen.points, np.zeros(200, dtype=int))])


def test_curves_are_visible_without_scripts() -> None:
    html = page_html(Page("t", "l", [Tabs("x", [Curves("c", [Series("a", [1, 2])])])]))
    assert "hidden" not in html.split("<main>")[1].split("</main>")[0].replace("aria-hidden", "")


def test_bars_start_at_the_given_value() -> None:
    html = bars_html(Bars("", ["a", "b"], [Series("x", [1.5, 0.5])], start=1.0))
    assert "left:50.00%;width:50.00%" in html
    assert "left:0.00%;width:50.00%" in html


def test_tabs_with_one_section_have_no_tab() -> None:
    html = page_html(Page("t", "", [Tabs("By epoch", [Text("loss", "words")])]))
    assert "class='tabs'" not in html
    assert ">loss</h3><p>words</p>" in html


def test_page_links_stacked_sections() -> None:
    html = page_html(Page("t", "", [Stack("one", [Text("", "a")]), Stack("two", [Text("", "b")])]))
    assert "<a href='#section-2'>two</a>" in html
