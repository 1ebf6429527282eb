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
    operator = {"name": "sphere", "angular": {"name": "sigmoid", "k": 0.5}}
    config = {"epochs": 2, "validation": {"every": 1}, "operator": operator, "shift": row}
    return {"row": row, "seed": seed, "metrics": metrics, "curves": curves, "config": config, **about, **changes}


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


def curve_charts(*records: dict) -> dict[str, dict[str, list]]:
    """Return the places of the curves of a row by the title of the tabs and of the curve."""
    tabs = recipe_page(results(("a",), records=records)).sections[1]
    specs = {chart.title: chart_spec(chart.chart) for chart in tabs.sections}  # type: ignore[union-attr]
    assert all(f"By {spec['layer'][-1]['encoding']['x']['title']}" == tabs.title for spec in specs.values())
    return {tabs.title: {title: [row["x"] for row in spec["data"]["values"]] for title, spec in specs.items()}}


def test_curves_are_placed_at_the_epochs_of_validation() -> None:
    """The last epoch is always validated, and diverged seeds have shorter curves."""
    config = {"epochs": 16, "steps": None, "validation": {"every": 5, "every_unit": "epochs"}}
    curves = {"loss": [4.0, 3.0, 2.0, 1.0], "error": [90.0, 40.0, 30.0, 25.0, 20.0]}
    shorter = {"loss": [3.0], "error": [80.0, 60.0]}
    full, diverged = (
        record("a", 0, config=config, curves=curves),
        record("a", 1, config=config, curves=shorter, diverged=True),
    )
    places = {"By epoch": {"test error %": [0, 5, 10, 15, 16], "training loss": [5, 10, 15, 16]}}
    assert curve_charts(full) == curve_charts(full, diverged) == places
    assert curve_charts(diverged) == {"By epoch": {"test error %": [0, 5], "training loss": [5]}}
    tabs = recipe_page(results(("a",), records=[full, diverged])).sections[1]
    values = chart_spec(tabs.sections[0].chart)["data"]["values"]  # type: ignore[union-attr]
    assert [row["y"] for row in values] == [85.0, 50.0, 30.0, 25.0, 20.0]


def test_curves_of_trainings_by_steps_are_placed_at_steps() -> None:
    """Validation within epochs has no loss; only the end of training has one."""
    config = {"epochs": None, "steps": 5000, "validation": {"every": 2000, "every_unit": "steps"}}
    by_steps = record("a", 0, config=config, curves={"loss": [1.0], "error": [90.0, 40.0, 30.0, 25.0]})
    places = {"test error %": [0, 2000, 4000, 5000], "training loss": [5000]}
    assert curve_charts(by_steps) == {"By step": places}


@pytest.mark.parametrize(("ends", "unit"), [({"steps": 900}, "epochs"), ({"epochs": 2}, "steps")])
def test_curves_are_placed_by_validation_if_the_end_has_another_unit(ends: dict, unit: str) -> None:
    config = {"epochs": None, "steps": None, **ends, "validation": {"every": 400, "every_unit": unit}}
    one = record("a", 0, config=config, curves={"loss": [1.0], "error": [90.0, 40.0, 30.0]})
    assert curve_charts(one) == {"By validation": {"test error %": [0, 1, 2], "training loss": [2]}}
    other = {**config, "epochs": 8, "validation": {"every": 4}}
    assert list(curve_charts(one, record("a", 1, config=other))) == ["By validation"]


def test_curves_without_validation_are_placed_at_epochs() -> None:
    """They are made by functions of a recipe, or by version 0.1."""
    assert curve_charts(record("a", 0, config=None, curves={"loss": [3.0, 2.0]})) == {
        "By epoch": {"training loss": [1, 2]}
    }


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
    """Records may have a scale, or no curves."""
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


RESULTS = Path(__file__).parents[2] / "results"
STORED = sorted({path.parents[1] for path in RESULTS.glob("*/*/seed-*.json")})


@pytest.mark.slow
@pytest.mark.parametrize("folder", STORED, ids=lambda folder: folder.name)
def test_stored_records_have_pages(folder: Path) -> None:
    """The records of this repository can be read and drawn."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*/seed-*.json"))]
    rows = tuple(dict.fromkeys(saved["row"] for saved in records))
    shown = RecipeResults("t", "l", COLUMNS, rows, records)
    assert len(summary_table(shown).rows) == len(rows)
    titles = [section.title for section in recipe_page(shown).sections]
    assert titles[0] == "Results"
    assert any(title.startswith("By ") for title in titles) == any(saved["curves"] for saved in records)


def test_stored_curves_of_lfw_are_placed_at_their_epochs() -> None:
    """There are 16 epochs, with a validation before training, after every fifth epoch and after the last one."""
    saved = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("lfw/m=4/seed-*.json")]
    if not saved:
        pytest.skip("the records are not part of this copy")
    over_training = ("loss", "verification.accuracy")
    records = [record | {"curves": {key: record["curves"][key] for key in over_training}} for record in saved]
    tabs = recipe_page(results(("m=4",), records=records)).sections[1]
    loss, accuracy = (chart_spec(chart.chart)["data"]["values"] for chart in tabs.sections)  # type: ignore[union-attr]
    assert [row["x"] for row in loss] == [5, 10, 15, 16]
    assert [row["x"] for row in accuracy] == [0, 5, 10, 15, 16]
