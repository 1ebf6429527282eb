"""Pages of recipes, written by `hypersphere reproduce` and by `hypersphere report`."""

import re
from dataclasses import replace
from xml.etree import ElementTree

from report.document import Checker

from hypersphere.cli.recipe_results import recipe_results, write_report
from hypersphere.recipes import RECIPES, Claim, execute, read_records

from .pages import cells, toy


def test_report_of_one_row_keeps_the_other_rows(tmp_path):
    recipe = toy(figures=("error", "energy"))
    execute(recipe, tmp_path)
    (one,) = execute(recipe, tmp_path, rows=["b"], seeds=[0])
    html = write_report(recipe, [one], tmp_path).read_text(encoding="utf-8")
    assert [row[0] for row in cells(html)] == ["a", "b"]
    assert cells(html)[0][1] == "19.0 ± 1.4"
    table = (tmp_path / "toy" / "table.md").read_text(encoding="utf-8")
    assert "| a | 19.0 ± 1.4 |\n| b | 19.0 ± 1.4 |" in table
    assert "![A toy: test error %, hidden energy over epoch](figure.svg)" in table
    root = ElementTree.parse(tmp_path / "toy" / "figure.svg").getroot()
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"test error %", "hidden energy", "a", "b", "0", "1", "2", "epoch"} <= set(words)


def test_report_compares_rows_with_the_baseline_and_decides_claims(tmp_path):
    claims = (Claim("b is better", "b", "a"), Claim("c is better", "c", "a"))
    recipe = replace(toy(("a", "b", "c")), baseline="a", claims=claims)
    errors = {"a": [20.0, 18.0], "b": [17.0, 15.0], "c": [0.0, 30.0]}
    records = [replace(one, metrics={"error": errors[one.row][one.seed]}) for one in execute(recipe, tmp_path)]
    (differences, decided) = recipe_results(recipe, records, tmp_path).comparisons
    assert differences.shown()[0] == ["b", "a", "-3.0 (-3.0 to -3.0)"]
    assert [row[3:] for row in decided.shown()] == [["2", "yes"], ["2", "not resolved"]]
    write_report(recipe, records, tmp_path)
    table = (tmp_path / "toy" / "table.md").read_text(encoding="utf-8")
    assert "## Differences to the baseline\n\n| method | compared with |" in table
    assert "## Claims\n" in table
    write_report(replace(recipe, covers=("T2.2",)), records, tmp_path)
    assert "## Claims of the source\n" in (tmp_path / "toy" / "table.md").read_text(encoding="utf-8")


def test_report_ignores_records_with_other_settings(tmp_path):
    recipe = toy(("a", "b", "c"))
    execute(recipe, tmp_path)
    changed = replace(recipe, rows=(recipe.rows[0], replace(recipe.rows[1], patch={"measure": {"shift": 9.0}})))
    records = read_records(tmp_path, "toy")
    assert {record.row for record in records if record.is_current(changed)} == {"a"}
    html = write_report(changed, records[:1], tmp_path).read_text(encoding="utf-8")
    assert [row[0] for row in cells(html)] == ["a"]
    assert not (tmp_path / "toy" / "figure.svg").exists()  # the recipe has no figures


def fresh(tmp_path, monkeypatch, **options):
    """Run a toy recipe and replace it by one that fails if a row is run again."""
    recipe = toy(figures=("error", "energy"), **options)
    execute(recipe, tmp_path)

    def refuse(seed, **options):
        raise AssertionError("a row was run again")

    monkeypatch.setitem(RECIPES, "toy", replace(recipe, compute=refuse))
    return recipe


def test_report_of_records_writes_all_files_and_runs_nothing(tmp_path, monkeypatch, succeeds):
    recipe = fresh(tmp_path, monkeypatch)
    page = write_report(recipe, read_records(tmp_path, "toy"), tmp_path)
    written = {path.name: path.read_bytes() for path in page.parent.iterdir() if path.is_file()}
    assert set(written) == {"report.html", "table.md", "figure.svg"}
    for path in page.parent.iterdir():
        if path.is_file():
            path.unlink()
    assert succeeds("report", page.parent) == f"Report: {page}\n"
    assert {path.name: path.read_bytes() for path in page.parent.iterdir() if path.is_file()} == written


def test_report_of_records_replaces_no_files_of_others(tmp_path, monkeypatch, succeeds, fails):
    fresh(tmp_path, monkeypatch)
    succeeds("report", tmp_path / "toy")
    succeeds("report", tmp_path / "toy")  # its own files are replaced
    for name in ("table.md", "figure.svg"):
        path = tmp_path / "toy" / name
        own = path.read_bytes()
        path.write_text("mine")
        assert f"{path} exists and was not written by this command" in fails(2, "report", tmp_path / "toy")
        assert path.read_text() == "mine"
        path.write_bytes(own)


def test_report_with_out_writes_only_that_file(tmp_path, monkeypatch, succeeds):
    fresh(tmp_path, monkeypatch)
    before = sorted(tmp_path.rglob("*"))
    succeeds("report", tmp_path / "toy", "--out", tmp_path / "page.html")
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "page.html"])


def test_report_names_ignored_records(tmp_path, monkeypatch, command):
    recipe = fresh(tmp_path, monkeypatch)
    other = replace(recipe.rows[1], patch={"measure": {"shift": 9.0}})
    monkeypatch.setitem(RECIPES, "toy", replace(recipe, rows=(recipe.rows[0], other)))
    code, _, errors = command("report", tmp_path / "toy")
    assert code == 0
    assert errors.endswith("toy: ignoring records whose settings differ from the current ones of toy: b\n")
    monkeypatch.setitem(RECIPES, "toy", replace(recipe, base={"measure": {"shift": 0.0, "epochs": 3}}))
    code, _, errors = command("report", tmp_path / "toy")
    assert errors.endswith("toy was made with settings that differ from the current ones of toy\n")
    assert [row[0] for row in cells((tmp_path / "toy" / "report.html").read_text(encoding="utf-8"))] == ["a", "b"]


def facts(html):
    """Return the facts in the footer of a page."""
    return dict(re.findall("<div><dt>(.*?)</dt><dd>(.*?)</dd></div>", html))


def test_joined_page_keeps_the_facts_of_all_pages(runs, tmp_path, monkeypatch, succeeds):
    fresh(tmp_path, monkeypatch)
    for path in tmp_path.rglob("seed-*.json"):
        path.write_text(re.sub('"torch": ".*?"', '"torch": "1.2.3"', path.read_text()))
    succeeds("report", tmp_path / "toy", runs / "softmax-0", "--out", tmp_path / "both.html")
    found = facts((tmp_path / "both.html").read_text(encoding="utf-8"))
    assert re.fullmatch(r"2\..*, 1\.2\.3", found["torch"])
    assert found["runs"] == "softmax-0"
    assert "total seconds" in found


def test_report_combines_records_and_a_run(runs, tmp_path, monkeypatch, succeeds):
    recipe = toy()
    monkeypatch.setitem(RECIPES, "toy", recipe)
    execute(recipe, tmp_path)
    monkeypatch.chdir(tmp_path)
    succeeds("report", "toy")
    assert cells((tmp_path / "toy" / "report.html").read_text(encoding="utf-8"))[0][0] == "a"
    succeeds("report", "toy", runs / "softmax-0")
    document = Checker((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert document.texts["h2"] == ["softmax on digits", "A toy"]
