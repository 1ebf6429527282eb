"""The page of a recipe, built from plain records."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from hypersphere.report import Column, RecipeResults, page_html, recipe_page, summary_table, write_recipe_page
from hypersphere.report._vega import chart_spec
from hypersphere.report.recipes import MOST_ROWS, group_rows

from .document import Checker

COLUMNS = {"error": Column("test error %", False, ".1f")}


def record(row: str, seed: int, *, error: float | None = None, diverged: bool = False, **changes: object) -> dict:
    """Return one record; changes replace its fields."""
    value = 20.0 - 2 * seed if error is None else error
    curves = {"loss": [2.0, 1.0], "error": [90.0, 50.0 + seed, value], "energy": [0.6, 0.55, 0.5]}
    metrics = {"error": None if diverged else value, "diverged": float(diverged)}
    about = {"versions": {"torch": "2.9"}, "machine": "here", "threads": 1, "commit": "abc", "seconds": 1.0}
    settings = {"epochs": 2, "operator": {"name": "sphere", "angular": {"name": "sigmoid", "k": 0.5}}, "shift": row}
    return {"row": row, "seed": seed, "metrics": metrics, "curves": curves, "settings": settings, **about, **changes}


def results(rows: tuple[str, ...] = ("a", "b"), **changes: object) -> RecipeResults:
    records = [record(row, seed) for row in rows for seed in (0, 1)]
    return replace(RecipeResults("A toy", "About it.", COLUMNS, rows, records), **changes)


def tensors(saved: dict) -> dict:
    grid = torch.linspace(1, 3, 9).view(3, 3) + (saved["row"] == "b")
    return {"k": torch.rand(20), "landscape_loss": grid, "coordinates": torch.linspace(-1, 1, 3)}


def test_recipe_page_shows_curves_learned_parameters_and_landscapes() -> None:
    html = page_html(recipe_page(results(tensors=tensors)))
    document = Checker(html)
    assert document.texts["h2"] == ["Results", "By epoch", "Learned k", "Around the trained weights", "Settings"]
    assert document.texts["h3"][:3] == ["test error %", "training loss", "hidden energy"]
    assert "A line at 0.5: start." in html
    scales = [part.split('"domain":[')[1].split("]")[0] for part in html.split('"field":"value"')[1:]]
    assert len(scales) == 2
    assert scales[0] == scales[1] == "1.0,4.0"  # both landscapes share one colour scale


def test_recipe_page_shows_two_dimensional_features_with_norms() -> None:
    saved = {"features": torch.randn(30, 2), "labels": torch.arange(30) % 3, "class_vectors": torch.randn(3, 2)}
    html = page_html(recipe_page(results(tensors=lambda _: saved)))
    assert "Features on the unit circle" in html
    assert "Features with norms" in html
    assert html.count("Scatter plot of 30 features") == 2


def test_write_recipe_page_writes_page_table_and_figure(tmp_path: Path) -> None:
    page = write_recipe_page(results(figures=("error", "energy")), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figure.svg", "report.html", "table.md"]
    assert page == tmp_path / "report.html"
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "| a | 19.0 ± 1.4 |\n| b | 19.0 ± 1.4 |" in table
    assert "![A toy: test error %, hidden energy over epoch](figure.svg)" in table
    root = ElementTree.parse(tmp_path / "figure.svg").getroot()
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"test error %", "hidden energy", "a", "b", "0", "1", "2", "epoch"} <= set(words)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    write_recipe_page(results(figures=("error", "energy")), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first
    write_recipe_page(results(), tmp_path / "plain")
    assert not (tmp_path / "plain" / "figure.svg").exists()


def test_recipe_page_groups_curves_of_long_tables(tmp_path: Path) -> None:
    names = tuple(f"{letter}, {kind}" for kind in ("cold", "hot") for letter in "abcdefg")
    html = write_recipe_page(results(names, figures=("error",)), tmp_path).read_text(encoding="utf-8")
    assert Checker(html).texts["h4"][:2] == ["cold", "hot"]
    svg = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert "test error %, cold" in svg
    assert "Means over 2 seeds." in svg


@pytest.mark.parametrize("count", [1, 12, 13, 40])
def test_group_rows_fits_any_number_of_rows(count: int) -> None:
    names = [f"method {number}, {'cold' if number % 2 else 'hot'}" for number in range(count)]
    groups = group_rows(names)
    assert sorted(name for group in groups.values() for name in group) == sorted(names)
    for group in groups.values():
        assert len(group) <= MOST_ROWS
        assert len(set(group.values())) == len(group)


def test_summary_table_shows_seeds_source_and_divergence() -> None:
    records = [record("a", 0), record("a", 1), record("b", 0), record("a", 2, diverged=True)]
    table = summary_table(results(records=records, printed={"a": {"error": 25.0}}))
    assert [column.name for column in table.columns] == ["method", "seeds", "test error %", "test error %, source"]
    assert [row[:2] for row in table.rows] == [["a", 3], ["b", 1]]
    assert [row[3] for row in table.rows] == [25.0, None]
    assert table.caption == "Mean ± s.d. over the seeds of each row. Diverged: a (1 of 3)."


def test_summary_table_marks_nothing_within_the_noise() -> None:
    near = [record("a", seed, error=20 + seed) for seed in range(3)] + [
        record("b", s, error=20.1 + s) for s in range(3)
    ]
    assert "class='best'" not in page_html(recipe_page(results(records=near)))
    far = near + [record("c", seed, error=50 + seed) for seed in range(3)]
    html = page_html(recipe_page(results(("a", "b", "c"), records=far)))
    assert html.count("(among the best)") == 2
    single = [record("a", 0), record("b", 0, error=90.0)]
    html = page_html(recipe_page(results(records=single)))
    assert "no best value is marked" in html
    assert "class='best'" not in html


def test_curves_are_placed_at_their_epochs() -> None:
    every = {"epochs": 4}
    records = [
        record("a", 0, settings=every, curves={"loss": [2.0, 1.0], "error": [90.0, 40.0, 20.0]}),
        record("a", 1, settings=every, diverged=True, curves={"loss": [3.0], "error": [80.0, 60.0]}),
    ]
    (tabs,) = recipe_page(results(("a",), records=records)).sections[1:-1]
    error, loss = (chart_spec(chart.chart)["data"]["values"] for chart in tabs.sections)  # type: ignore[union-attr]
    assert [(row["x"], row["y"]) for row in error] == [(0, 85.0), (2, 50.0), (4, 20.0)]
    assert [row["x"] for row in loss] == [2, 4]


def test_curves_with_an_axis_of_their_own_are_placed_on_it(tmp_path: Path) -> None:
    records = [record("a", 0, curves={"loss": [2.0], "cmc": [10.0, 20.0, 40.0]}), record("b", 0, curves={"cmc": [5.0]})]
    shown = results(records=records, axes={"cmc": ("rank", 1, 5)}, figures=("cmc",))
    curves, by_epoch = recipe_page(shown).sections[1:3]
    assert (curves.title, by_epoch.title) == ("Curves", "By epoch")
    spec = chart_spec(curves.sections[0].chart)  # type: ignore[union-attr]
    assert [(row["series"], row["x"], row["y"]) for row in spec["data"]["values"]] == [
        ("a", 1, 10.0),
        ("a", 3, 20.0),
        ("a", 5, 40.0),
        ("b", 1, 5.0),
    ]
    assert spec["layer"][-1]["encoding"]["x"]["title"] == "rank"
    write_recipe_page(shown, tmp_path)
    assert "cmc over rank](figure.svg)" in (tmp_path / "table.md").read_text(encoding="utf-8")


def test_recipe_page_reads_configs_scales_and_missing_fields() -> None:
    """Records of other versions have `config` instead of `settings`, a scale, or no curves."""
    records = [{"row": "a", "seed": 0, "metrics": {"error": math.nan}, "config": {"epochs": 3}, "scale": "cpu"}]
    page = recipe_page(results(("a",), records=records))
    assert page.meta["scale"] == "cpu"
    assert [row[:2] for row in page.sections[-1].rows] == [["epochs", "3"]]  # type: ignore[union-attr]
    assert "–" in page_html(page)


def test_recipe_page_names_all_machines_versions_and_overrides() -> None:
    records = [
        record("a", seed, versions={"torch": version}, machine=f"machine {seed % 2}", overrides={"epochs": 1})
        for seed, version in enumerate(("2.9", "2.10", "2.9"))
    ]
    page = recipe_page(results(("a",), records=records))
    assert (page.meta["torch"], page.meta["machine"]) == ("2.9, 2.10", "machine 0, machine 1")
    assert (page.meta["threads"], page.meta["commit"], page.meta["epochs"]) == ("1", "abc", "1")
    assert page.sections[-1].caption == "Changed from the recipe: epochs."  # type: ignore[union-attr]


STORED = sorted({path.parents[1] for path in (Path(__file__).parents[2] / "results").glob("*/*/seed-0.json")})


@pytest.mark.parametrize("folder", STORED, ids=lambda folder: folder.name)
def test_stored_records_have_pages(folder: Path) -> None:
    """The records of this repository can be read and drawn."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*/seed-*.json"))]
    rows = tuple(dict.fromkeys(saved["row"] for saved in records))
    shown = RecipeResults("t", "l", COLUMNS, rows, records)
    assert len(summary_table(shown).rows) == len(rows)
    titles = [section.title for section in recipe_page(shown).sections]
    assert titles[0] == "Results"
    assert ("By epoch" in titles) == any(saved["curves"] for saved in records)
