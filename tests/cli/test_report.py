"""`hypersphere report`, and the pages of `hypersphere reproduce`: what is told, and how it is in a browser."""

import re
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from report.browser import MISSING, Browser, find_chromium
from report.document import Checker

from hypersphere.cli import record_figures, summary
from hypersphere.cli import report as module
from hypersphere.cli.row_groups import MOST_ROWS, group_rows
from hypersphere.cli.run_groups import Group, folder_name
from hypersphere.cli.run_page import _energy, run_page
from hypersphere.cli.run_study import study
from hypersphere.cli.train import train
from hypersphere.recipes import RECIPES, Metric, Outcome, Recipe, Record, Row, execute, read_records
from hypersphere.report import HeatMap, page_html
from hypersphere.training.run import Run

SMALL = {"epochs": 4, "batch_size": 50}
WORDS = ("--data.limit=300", "--model.widths=[4,4]", "--optimizer.lr=0.02")
SIGMOID = ("--operator=sphere", "--operator.angular=sigmoid", "--operator.learn_k=filter", "--model.feature_dim=5")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs that differ in their seed, and one of another operator and more dimensions."""
    root = tmp_path_factory.mktemp("runs")
    for name, seed, words in (("softmax-0", 0, ()), ("softmax-1", 1, ()), ("sigmoid", 0, SIGMOID)):
        options = {"operator": "sphere"} if words else {}
        own = [word for word in words if not word.startswith("--operator=")]
        assert train(root / name, options={**SMALL, "seed": seed, **options}, words=[*WORDS, *own], log_every=2) == 0
    return root


@pytest.fixture(scope="module")
def page(runs):
    return module.report([runs / "sigmoid"], landscape=True)


@pytest.fixture(scope="module")
def comparison(runs, tmp_path_factory):
    folders = [runs / name for name in ("softmax-0", "softmax-1", "sigmoid")]
    return module.report(folders, tmp_path_factory.mktemp("pages") / "all.html")


def logged(runs, name):
    """The test accuracy that training itself wrote last, in per cent."""
    return 100 * [line for line in Run.open(runs / name).metrics() if line["kind"] == "epoch"][-1]["test_accuracy"]


def cells(html, section=1):
    """The table of a section as rows of words."""
    body = re.search(rf"<section id='section-{section}'>.*?</section>", html, re.S)[0]
    rows = re.findall("<tr>(.*?)</tr>", body, re.S)[1:]
    words = [re.findall("<t[hd][^>]*>(.*?)</t[hd]>", row, re.S) for row in rows]
    return [[re.sub("<span class='unseen'>.*?</span>|<.*?>", "", cell) for cell in row] for row in words]


def test_one_run_has_all_its_tabs(runs, page):
    assert page == runs / "sigmoid" / "report.html"
    html = page.read_text(encoding="utf-8")
    document = Checker(html)
    tabs = ["Training", "Features", "Verification", "Class vectors", "Layers", "Landscape"]
    assert [words for words in document.texts["h3"] if words != "sigmoid"] == tabs  # that is the sphere's
    for words in (
        "Training loss",
        "Hidden layers",
        "ROC",
        "CMC",
        "Angles of pairs of test features",
        "Angles between class vectors",
        "Mean angle of test features to class vectors",
        "Learned k",
        "Filters of the first layer",
        "Neurons of every layer",
        "Test error",
    ):
        assert words in [*document.texts["h4"], *document.texts["h5"]], words
    assert re.search("5-d, seen along the three directions that hold [0-9]+% of them", html)
    assert not re.search(r"""(src|href)=["']?https?:""", html)
    assert cells(html)[0][:2] == ["sigmoid", f"{logged(runs, 'sigmoid'):.2f}"]


def test_runs_that_differ_in_seed_share_a_line(runs, comparison):
    html = comparison.read_text(encoding="utf-8")
    values = [logged(runs, "softmax-0"), logged(runs, "softmax-1")]
    first, second = cells(html)
    assert first[:3] == ["softmax", "2", f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"]
    assert second[:3] == ["sigmoid", "1", f"{logged(runs, 'sigmoid'):.2f}"]
    differ = cells(html, 2)
    assert [row[0] for row in differ] == ["softmax", "sigmoid"]
    assert differ[1][1:] == ["toy_cnn (widths [4, 4], feature_dim 5)", "sphere (angular sigmoid, learn_k filter)"]
    assert html.count("<canvas") == 2
    assert ">Landscape<" not in html
    assert "mean ± one standard deviation over 2 seeds" in html


def test_what_is_measured_is_what_the_data_say(runs):
    of = study(Run.open(runs / "softmax-0"))
    x = torch.nn.functional.normalize(of.features.double(), dim=1).numpy()
    same, other = [], []
    for i in range(len(x)):
        for j in range(i):
            (same if of.labels[i] == of.labels[j] else other).append(float(x[i] @ x[j]))
    threshold = torch.tensor(of.verified.threshold).deg2rad().cos().item()
    refused = sum(score < threshold for score in same) / len(same)
    accepted = sum(score >= threshold for score in other) / len(other)
    assert abs(refused - accepted) < 0.01
    assert 100 * (refused + accepted) / 2 == pytest.approx(of.numbers["eer"], abs=0.5)


def test_many_classes_few_examples_and_many_layers(runs):
    of = study(Run.open(runs / "sigmoid"))
    names = tuple(f"class {number}" for number in range(450))
    draw = torch.Generator().manual_seed(0)
    task = replace(of.task, classes=names)
    vectors = torch.randn(450, 5, generator=draw)
    many = replace(of, task=task, class_vectors=vectors, labels=torch.randint(450, (500,), generator=draw))
    html = page_html(run_page([many]))
    assert "10 of 450 classes" in html
    assert "The first 400 of 450 classes." in html
    alone = replace(many, features=of.features[:450], labels=torch.arange(450))
    assert ">ROC<" not in page_html(run_page([alone]))  # no two of one class
    deep = SimpleNamespace(energies=([1, 2], {f"layer {number}": [0.5, 0.4] for number in range(30)}))
    (map_of_layers,) = _energy(Group("deep", [deep]), alone=True)
    assert isinstance(map_of_layers, HeatMap)
    assert map_of_layers.numbers.shape == (30, 2)


def test_a_run_without_numbers_of_training_is_told_of(plain, rotated, succeeds, tmp_path):
    out = succeeds("report", plain.folder, rotated.folder, "--out", tmp_path / "both.html")
    assert out.endswith(f"Report: {tmp_path / 'both.html'}\n")
    html = (tmp_path / "both.html").read_text(encoding="utf-8")
    assert "Training loss" not in html
    assert "Angles between class vectors" in html


def test_misuse_is_one_line(fails, runs, tmp_path):
    assert "a folder of records" in fails(2, "report", tmp_path)
    assert "--out must be a file that ends in .html" in fails(2, "report", runs / "sigmoid", "--out", "x.pdf")
    (tmp_path / "config.json").write_text("{")
    assert "damaged" in fails(3, "report", tmp_path)


@pytest.mark.parametrize(
    ("names", "together"),
    [
        (["arcface"], "arcface"),
        (["softmax-seed0", "softmax-seed1"], "softmax"),
        (["cnn9_0", "cnn9_1", "cnn9_10"], "cnn9"),
        (["one", "two"], ""),
    ],
)
def test_folders_of_one_kind_are_called_by_what_they_share(names, together):
    assert folder_name(names) == together


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_every_recipe_has_groups_that_a_chart_can_hold(recipe):
    names = [row.name for row in recipe.rows]
    groups = group_rows(names)
    assert sorted(name for group in groups.values() for name in group) == sorted(names)
    for group in groups.values():
        assert len(group) <= MOST_ROWS
        assert len(set(group.values())) == len(group)


def toy(rows=("a", "b"), **options):
    def run(settings, trial):
        error = [90.0, 50.0 + trial.seed, 20.0 - 2 * trial.seed]
        grid = torch.linspace(1, 3, 9).view(3, 3) + settings["shift"]
        tensors = {"k": torch.rand(20), "landscape_loss": grid, "coordinates": torch.linspace(-1, 1, 3)}
        curves = {"loss": [2.0, 1.0], "error": error, "energy": [0.6, 0.55, 0.5]}
        return Outcome({"error": error[-1]}, curves, tensors)

    metrics = (Metric("error", "test error %", ".1f", False),)
    made = tuple(Row(name, {"shift": float(place)}) for place, name in enumerate(rows))
    return Recipe("toy", "A toy", "nowhere", {"shift": 0.0, "epochs": 2}, made, (0, 1), metrics, run, **options)


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


def made(row, seed, *, diverged=False, **curves):
    metrics = {"error": None if diverged else 10.0 + seed, "diverged": float(diverged)}
    return Record("toy", row, seed, {"shift": 0.0, "epochs": 4}, metrics, 1.0, curves=curves)


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


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if find_chromium() is None:
        pytest.skip(MISSING)
    with Browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


def opened(browser, path):
    browser.visit(Path(path))
    return browser


def picture(browser):
    browser.settle()
    return browser.run("return document.querySelector('canvas').toDataURL()")


def shown(browser):
    return browser.run(
        "return [...document.querySelectorAll('main .tabs > .panel:not([hidden]) > h3')].map((h) => h.textContent)"
    )


def test_in_a_browser_tabs_switch_and_the_sphere_turns(browser, page):
    opened(browser, page)
    assert browser.console() == []
    assert shown(browser) == ["Training"]
    browser.click("[role=tab]:nth-child(2)")
    assert shown(browser) == ["Features"]
    browser.run("document.querySelector('canvas').scrollIntoView({block: 'center', behavior: 'instant'})")
    before = picture(browser)
    browser.drag("canvas", 60, 25)
    assert picture(browser) != before
    browser.run("document.querySelector('[role=tab][aria-selected=true]').focus()")
    for name in ("Verification", "Class vectors", "Layers", "Landscape"):
        browser.press("\ue014")  # the right arrow
        assert shown(browser) == [name]
        browser.settle()
    assert browser.console() == []
    assert browser.run("return performance.getEntriesByType('resource').length") == 0


@pytest.mark.parametrize("width", [375, 1280])
def test_in_a_browser_nothing_is_wider_than_the_window(browser, page, comparison, width):
    for path in (page, comparison):
        opened(browser, path)
        browser.resize(width, 800, mobile=width < 500)
        for tab in range(browser.run("return document.querySelectorAll('[role=tab]').length")):
            browser.run("document.querySelectorAll('[role=tab]')[arguments[0]].click()", tab)
            browser.settle()
            assert browser.run("return document.documentElement.scrollWidth") == width


def test_every_picture_has_words(page, comparison):
    for path in (page, comparison):
        for tag, attributes in Checker(path.read_text(encoding="utf-8")).elements:
            if attributes.get("role") == "img" or tag == "canvas":
                assert attributes.get("aria-label"), attributes
            if tag == "img":
                assert "alt" in attributes
