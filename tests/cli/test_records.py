"""Pages of recipes: what is told of records, by `hypersphere reproduce` and by `hypersphere report`."""

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from report.document import Checker

from hypersphere.cli import record_figures, summary
from hypersphere.cli.row_groups import MOST_ROWS, group_rows
from hypersphere.recipes import RECIPES, execute, read_records

from .pages import cells, made, toy


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_every_recipe_has_groups_that_a_chart_can_hold(recipe):
    names = [row.name for row in recipe.rows]
    groups = group_rows(names)
    assert sorted(name for group in groups.values() for name in group) == sorted(names)
    for group in groups.values():
        assert len(group) <= MOST_ROWS
        assert len(set(group.values())) == len(group)


def test_one_row_does_not_take_the_others_off_the_page(tmp_path):
    recipe = toy(figures=("error", "energy"))
    execute(recipe, tmp_path)
    (one,) = execute(recipe, tmp_path, rows=["b"], seeds=[0])
    html = summary.write_report(recipe, [one], tmp_path).read_text(encoding="utf-8")
    assert [row[0] for row in cells(html)] == ["a", "b"]
    assert cells(html)[0][1] == "19.0 ± 1.4"
    table = (tmp_path / "toy" / "table.md").read_text(encoding="utf-8")
    assert "| a | 19.0 ± 1.4 |\n| b | 19.0 ± 1.4 |" in table
    assert "![A toy: test error %, hidden energy by epoch](figure.svg)" in table
    root = ElementTree.parse(tmp_path / "toy" / "figure.svg").getroot()
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"test error %", "hidden energy", "a", "b", "0", "1", "2", "epoch"} <= set(words)


def test_records_of_other_settings_are_left_out(tmp_path):
    recipe = toy(("a", "b", "c"))
    execute(recipe, tmp_path)
    changed = replace(recipe, rows=(recipe.rows[0], replace(recipe.rows[1], settings={"shift": 9.0})))
    records = read_records(tmp_path, "toy")
    assert {record.row for record in summary.current_records(changed, records)} == {"a"}
    html = summary.write_report(changed, records[:1], tmp_path).read_text(encoding="utf-8")
    assert [row[0] for row in cells(html)] == ["a"]
    assert not (tmp_path / "toy" / "figure.svg").exists()  # the recipe names no figures


def test_the_page_of_a_recipe_shows_curves_learned_numbers_and_landscapes(tmp_path):
    recipe = toy()
    html = summary.write_report(recipe, execute(recipe, tmp_path), tmp_path).read_text(encoding="utf-8")
    document = Checker(html)
    assert document.texts["h2"] == ["Results", "By epoch", "Learned k", "Loss around the trained weights", "Settings"]
    assert document.texts["h3"][:3] == ["test error %", "training loss", "hidden energy"]
    assert "epoch 0" in html
    bars = re.findall(r"scale-bar.*?</div></div>", html)
    assert len(bars) == 2
    assert bars[0] == bars[1]  # both landscapes in the same colours


def test_long_tables_have_tabs_of_curves(tmp_path):
    names = [f"{letter}, {kind}" for kind in ("cold", "hot") for letter in "abcdefg"]
    recipe = toy(names, figures=("error",))
    html = summary.write_report(recipe, execute(recipe, tmp_path), tmp_path).read_text(encoding="utf-8")
    assert Checker(html).texts["h4"][:2] == ["cold", "hot"]
    svg = (tmp_path / "toy" / "figure.svg").read_text(encoding="utf-8")
    assert ">test error %, cold<" in svg
    assert "Means over 2 seeds." in svg


def test_rows_say_how_many_seeds_they_have_and_which_diverged():
    recipe = toy()
    records = [made("a", 0), made("a", 1), made("b", 0), made("a", 2, diverged=True)]
    table = summary.summary_table(recipe, records)
    assert [column.name for column in table.columns] == ["method", "seeds", "test error %"]
    assert [row[:2] for row in table.rows] == [["a", 3], ["b", 1]]
    assert table.caption == "Mean ± s.d. over the seeds of each row. Diverged: a (1 of 3)."


def test_curves_lie_at_their_epochs():
    recipe = replace(toy(("a",)), settings={"shift": 0.0, "epochs": 4})
    records = [
        made("a", 0, loss=[2.0, 1.0], error=[90.0, 40.0, 20.0], energy=[0.5, 0.4, 0.3]),  # measured every second epoch
        made("a", 1, loss=[3.0], error=[80.0, 60.0], energy=[0.5, 0.4], diverged=True),
    ]
    (tabs,) = record_figures._curves(recipe, records)
    error, loss, energy = tabs.sections
    assert error.series[0].places.tolist() == energy.series[0].places.tolist() == [0, 2, 4]
    assert loss.series[0].places.tolist() == [2, 4]
    assert error.series[0].mean.tolist() == [85.0, 50.0, 20.0]
    assert error.series[0].gaps == 1


def fresh(tmp_path, monkeypatch, **options):
    """A finished toy whose rows refuse to be run again."""
    recipe = toy(figures=("error", "energy"), **options)
    execute(recipe, tmp_path)

    def refuse(settings, trial):
        raise AssertionError("a row was run again")

    monkeypatch.setitem(RECIPES, "toy", replace(recipe, run=refuse))
    return recipe


def test_a_report_of_records_writes_table_and_figure_and_runs_nothing(tmp_path, monkeypatch, succeeds):
    recipe = fresh(tmp_path, monkeypatch)
    page = summary.write_report(recipe, read_records(tmp_path, "toy"), tmp_path)
    written = {path.name: path.read_bytes() for path in page.parent.iterdir() if path.is_file()}
    assert set(written) == {"report.html", "table.md", "figure.svg"}
    for path in page.parent.iterdir():
        if path.is_file():
            path.unlink()
    assert succeeds("report", page.parent) == f"Report: {page}\n"
    assert {path.name: path.read_bytes() for path in page.parent.iterdir() if path.is_file()} == written


def test_a_page_elsewhere_leaves_the_records_alone(tmp_path, monkeypatch, succeeds):
    fresh(tmp_path, monkeypatch)
    before = sorted(tmp_path.rglob("*"))
    succeeds("report", tmp_path / "toy", "--out", tmp_path / "page.html")
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "page.html"])


def test_records_that_are_left_out_are_told_of(tmp_path, monkeypatch, command):
    recipe = fresh(tmp_path, monkeypatch)
    other = replace(recipe.rows[1], settings={"shift": 9.0})
    monkeypatch.setitem(RECIPES, "toy", replace(recipe, rows=(recipe.rows[0], other)))
    code, _, errors = command("report", tmp_path / "toy")
    assert code == 0
    assert errors.endswith("toy has records of other settings than those of toy now, left out: b\n")
    monkeypatch.setitem(RECIPES, "toy", replace(recipe, settings={"shift": 0.0, "epochs": 3}))
    code, _, errors = command("report", tmp_path / "toy")
    assert errors.endswith("toy was made with other settings than those of toy now\n")
    assert [row[0] for row in cells((tmp_path / "toy" / "report.html").read_text(encoding="utf-8"))] == ["a", "b"]


def facts(html):
    """The small facts at the foot of a page."""
    return dict(re.findall("<div><dt>(.*?)</dt><dd>(.*?)</dd></div>", html))


def test_a_page_names_every_machine_and_version_of_its_records():
    versions = [{"torch": "2.9"}, {"torch": "2.10"}, {"torch": "2.9"}]
    records = [
        replace(made("a", seed), versions=of, machine=f"machine {seed % 2}", threads=1, commit="abc")
        for seed, of in enumerate(versions)
    ]
    meta = summary.record_page(toy(), records, Path("nowhere")).meta
    assert meta["torch"] == "2.9, 2.10"
    assert meta["machine"] == "machine 0, machine 1"
    assert (meta["threads"], meta["commit"]) == ("1", "abc")


def test_a_joined_page_keeps_the_facts_of_all(runs, tmp_path, monkeypatch, succeeds):
    fresh(tmp_path, monkeypatch)
    for path in tmp_path.rglob("seed-*.json"):
        path.write_text(re.sub('"torch": ".*?"', '"torch": "1.2.3"', path.read_text()))
    succeeds("report", tmp_path / "toy", runs / "softmax-0", "--out", tmp_path / "both.html")
    found = facts((tmp_path / "both.html").read_text(encoding="utf-8"))
    assert re.fullmatch(r"2\..*, 1\.2\.3", found["torch"])
    assert found["runs"] == "softmax-0"
    assert "seconds in all" in found


def test_a_report_of_records_beside_a_run(runs, tmp_path, monkeypatch, succeeds):
    recipe = toy()
    monkeypatch.setitem(RECIPES, "toy", recipe)
    execute(recipe, tmp_path)
    monkeypatch.chdir(tmp_path)
    succeeds("report", "toy")
    assert cells((tmp_path / "toy" / "report.html").read_text(encoding="utf-8"))[0][0] == "a"
    succeeds("report", "toy", runs / "softmax-0")
    document = Checker((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert document.texts["h2"] == ["softmax on digits", "A toy"]
