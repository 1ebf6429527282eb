"""The page is well formed, self-contained, safe, and written atomically."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hypersphere import _files
from hypersphere.report import (
    Chart,
    Column,
    Images,
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
    write_page,
)
from hypersphere.report.charts import heat_map, histogram, lines

from .charts import every_section
from .document import HOSTILE, Checker


def test_page_is_well_formed(page: Path) -> None:
    document = Checker(page.read_text(encoding="utf-8"))
    assert document.count("html") == document.count("title") == document.count("h1") == 1
    assert document.count("section") == 4
    assert document.count("canvas") == 3
    ids = [attributes["id"] for _, attributes in document.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_page_is_self_contained(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for _, attributes in Checker(text).elements:
        for name in ("src", "href", "action", "srcset", "data"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))
    assert not re.search(r"https?://|@import|url\(|\bimport\b\s*[({'\"]|fetch\(", text)


def test_page_canvases_are_focusable_and_named(page: Path) -> None:
    for tag, attributes in Checker(page.read_text(encoding="utf-8")).elements:
        if tag == "canvas":
            assert attributes["tabindex"] == "0"
            assert "Arrow keys" in (attributes["aria-label"] or "")


def test_page_escapes_all_text(tmp_path: Path) -> None:
    sphere = Sphere(HOSTILE, [[1.0, 0, 0], [0, 1.0, 0]], [0, 1], classes=(HOSTILE, "b"), caption=HOSTILE)
    sections = [
        Text(HOSTILE, HOSTILE),
        Table(HOSTILE, [Column(HOSTILE, True, unit=HOSTILE), Column(HOSTILE, True)], [(HOSTILE, 1), (HOSTILE, 2)]),
        Spheres(HOSTILE, [sphere], caption=HOSTILE),
    ]
    target = write_page(tmp_path / "page.html", Page(HOSTILE, HOSTILE, sections, {HOSTILE: HOSTILE}))
    document = Checker(target.read_text(encoding="utf-8"))
    assert document.count("script") == 3  # theme, data, spheres
    assert document.texts["title"] == [HOSTILE]
    assert document.texts["h1"] == [HOSTILE]
    data = json.loads(next(text for text in document.texts["script"] if text.startswith("{")))
    assert data["classes"] == [HOSTILE, "b"]


def test_page_includes_scripts_only_if_needed() -> None:
    text = page_html(Page("", "", [Text("", "words")]))
    assert not re.search(r"SphereView|class Chart|vegaEmbed|makeTabs|\.toggles|\.tablist", text)


def test_page_rejects_unknown_sections() -> None:
    with pytest.raises(ValueError, match=r"sections\[0\] must be one of Text, Table, Chart, .*, not 'str'"):
        Page("", "", ["words"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"sections\[0\]\.sections\[0\] must be one of .*, not 'int'"):
        Page("", "", [Stack("", [1])])  # type: ignore[list-item]


def test_write_page_failure_keeps_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write_page(tmp_path / "new" / "page.html", Page("old", "", []))
    old = target.read_text(encoding="utf-8")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(_files.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_page(target, Page("new", "", []))
    assert target.read_text(encoding="utf-8") == old
    assert [path.name for path in target.parent.iterdir()] == ["page.html"]


def test_write_page_writes_out_control_characters_and_unpaired_surrogates(tmp_path: Path) -> None:
    lone = "a\ud800b\x1b[31m"
    sphere = Sphere(lone, [[1.0, 0, 0]], [0], classes=(lone,))
    chart = lines([Series(lone, [1.0, 2.0]), Series("b", [2.0])], y_name=lone)
    sections = [Text(lone, lone), Table(lone, [Column(lone)], [(lone,)]), Spheres(lone, [sphere]), Chart(lone, chart)]
    target = write_page(tmp_path / "page.html", Page(lone, lone, sections, {lone: lone}))
    text = target.read_text(encoding="utf-8")
    assert Checker(text).texts["h1"] == ["a\\ud800b\\x1b[31m"]
    assert not set(text) & {"\x1b", "\x07"}


def test_write_page_is_safe_for_concurrent_writers(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: write_page(tmp_path / "page.html", Page("", "", [])), range(100)))
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_write_page_samples_many_points(tmp_path: Path) -> None:
    points = np.random.default_rng(0).normal(size=(20_000, 3))
    sphere = Sphere("many", points, np.zeros(20_000, dtype=int))
    target = write_page(tmp_path / "page.html", Page("", "", [Spheres("", [sphere])]))
    assert target.stat().st_size < 250_000
    assert "5,000 of 20,000 features" in target.read_text(encoding="utf-8")


def test_page_with_charts_is_safe_and_self_contained(tmp_path: Path) -> None:
    curves = [Series(HOSTILE, [1.0, 2.0]), Series("b", [2.0, 1.0])]
    sections = [
        Chart(HOSTILE, lines(curves, x_name=HOSTILE, y_name=HOSTILE), caption=HOSTILE),
        Chart("", histogram({HOSTILE: [1.0, 2.0]}, x_name=HOSTILE, marks={HOSTILE: 1.5})),
        Chart("", heat_map(np.eye(2), [HOSTILE, "b"], value_name=HOSTILE)),
    ]
    text = write_page(tmp_path / "page.html", Page("", "", sections)).read_text(encoding="utf-8")
    assert "<script>alert" not in text
    document = Checker(text)
    assert document.count("script") == 3 + 3  # theme, Vega, charts, and the data of each chart
    data = [json.loads(words) for words in document.texts["script"] if words.startswith('{"spec"')]
    assert data[0]["spec"]["data"]["values"][0]["series"] == HOSTILE
    # Names are data or labels, never part of an expression of Vega.
    assert "alert" not in json.dumps(data[2]["spec"]["layer"][0]["encoding"]["y"]["axis"])
    assert "Content-Security-Policy" in text
    assert "unsafe-eval" not in text
    assert len(text) < 1_200_000


def test_every_chart_has_alternative_text_and_numbers(tmp_path: Path) -> None:
    document = Checker(page_html(Page("", "", every_section())))
    views = [attributes for _, attributes in document.elements if attributes.get("class") == "view"]
    assert len(views) == 8
    assert all(view["role"] == "img" and len(view["aria-label"] or "") > 20 for view in views)
    assert document.count("details") == 8


def test_page_heading_levels_are_consecutive() -> None:
    inner = Stack("two", [Tabs("three", [Text("four", ""), Text("five", "")])])
    document = Checker(page_html(Page("t", "", [SideBySide("one", [inner])])))
    levels = [int(tag[1]) for tag, _ in document.elements if tag in ("h1", "h2", "h3", "h4", "h5", "h6")]
    assert levels == [1, 2, 3, 4, 5, 5]


def test_tabs_with_one_section_have_no_tab() -> None:
    assert "class='tabs'" not in page_html(Page("", "", [Tabs("a", [Text("b", "c")])]))
    with pytest.raises(ValueError, match="sections must be at least one section, not 0"):
        Tabs("a", [])
    with pytest.raises(ValueError, match=r"title of sections\[0\] must be a non-empty name for its tab, not ' '"):
        Tabs("a", [Text(" ", "b")])


def test_page_links_stacked_sections() -> None:
    page = Page("t", "", [Stack("one", [Text("", "a")]), Stack("two", [Text("", "b")])])
    assert page_html(page).count("<li><a href='#section-") == 2


@pytest.mark.parametrize(
    "make", [lambda: Page("a", "b", []), lambda: Table("", [Column("x")], [("y",)]), lambda: Text("a", HOSTILE)]
)
def test_notebook_shows_sections_in_a_frame(make) -> None:
    html = make()._repr_html_()
    document = Checker(html)
    ((tag, attributes),) = document.elements  # the styles of the page are inside the frame
    assert tag == "iframe"
    assert (attributes["srcdoc"] or "").startswith("<!DOCTYPE html>")
    assert "scrollHeight" in (attributes["onload"] or "")


def test_sections_and_results_have_short_reprs() -> None:
    points = np.eye(3).repeat(50, axis=0)
    sphere = Sphere("arcface", points, np.arange(150) % 3)
    table = Table("Results", [Column("method"), Column("error")], [["a", 1.0]])
    curves = Series("loss", np.ones((3, 1000)))
    expected = {
        sphere: "Sphere('arcface', 150 points of 3 classes)",
        Spheres("Features", [sphere]): "Spheres('Features', 1 sphere)",
        curves: "Series('loss', 1,000 values of 3 seeds)",
        Chart("Loss", lines([curves])): "Chart('Loss')",
        Images("Filters", np.ones((8, 3, 3))): "Images('Filters', 8 images)",
    }
    assert {repr(made): made for made in expected} == {words: made for made, words in expected.items()}
    assert repr(table) == "Table('Results', 2 columns, 1 row)"
    assert repr(Page("Digits", "", [Tabs("More", [table]), table])) == "Page('Digits', 2 sections)"
    assert repr(Text("About", "Long. " * 100)) == "Text('About')"
