"""`hypersphere report` for runs: values and texts of the page."""

import re
import shutil
import statistics

from report.document import Checker

from hypersphere.training import Run

from .pages import cells, logged
from .trained import SMALL


def test_report_of_one_run_has_all_tabs(runs, page):
    assert page == runs / "sigmoid" / "report.html"
    html = page.read_text(encoding="utf-8")
    document = Checker(html)
    tabs = ["Training", "Features", "Verification", "Class vectors", "Layers", "Landscape"]
    assert [words for words in document.texts["h3"] if words != "sigmoid"] == tabs  # the title of the sphere
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
        "Neurons per layer",
        "Energies, angles and norms",
        "Test error",
    ):
        assert words in [*document.texts["h4"], *document.texts["h5"]], words
    assert re.search("5-d, projected to three directions with [0-9]+% of the squared norm; angles are in 5-d", html)
    assert not re.search(r"""(src|href)=["']?https?:""", html)
    assert cells(html)[0][:2] == ["sigmoid", f"{logged(runs, 'sigmoid'):.2f}"]


def test_report_groups_runs_that_differ_in_their_seed(runs, comparison):
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


def test_report_shows_settings_in_a_table(runs, page):
    html = page.read_text(encoding="utf-8")
    (title,) = Checker(html).texts["h1"]
    assert "(" not in title
    settings = dict(cells(html, 3))
    assert settings["epochs"] == str(Run.open(runs / "sigmoid").config.epochs)
    assert settings["seed"] == "0"


def test_report_of_runs_without_logged_metrics(plain, rotated, succeeds, tmp_path):
    folders = [shutil.copytree(run.folder, tmp_path / name) for name, run in (("one", plain), ("two", rotated))]
    for folder in folders:
        (folder / "metrics.jsonl").unlink()
    out = succeeds("report", *folders, "--out", tmp_path / "both.html")
    assert out.endswith(f"Report: {tmp_path / 'both.html'}\n")
    html = (tmp_path / "both.html").read_text(encoding="utf-8")
    assert "Training loss" not in html
    assert "Angles between class vectors" in html


def test_report_shows_the_checkpoint_of_a_step(tmp_path, succeeds, fails):
    folder = tmp_path / "run"
    out = succeeds("train", "--out", folder, *SMALL, "--save-every=0", "--keep=9", "--validation.best=accuracy")
    words = f"{folder} --step best"
    assert out.endswith(f"Next: hypersphere evaluate {words}, or hypersphere report {words}\n")
    succeeds("report", folder, "--step", "5")
    html = (folder / "report.html").read_text(encoding="utf-8")
    assert "Checkpoint of step 5, test data." in html
    first = next(line for line in Run.open(folder).metrics() if line["kind"] == "epoch")
    assert first["step"] == 5
    assert cells(html)[0][1:3] == [f"{100 * first['accuracy']:.2f}", f"{first['loss']:.3f}"]
    succeeds("report", folder)
    assert "Last checkpoint, test data." in (folder / "report.html").read_text(encoding="utf-8")
    assert "step must be one of" in fails(2, "report", folder, "--step", "77")


def test_report_rejects_invalid_input_in_one_line(fails, runs, tmp_path):
    assert "a folder of records" in fails(2, "report", tmp_path)
    assert "--step must be omitted without the folder of a run" in fails(2, "report", tmp_path, "--step", "best")
    assert "--out must be a file with suffix .html" in fails(2, "report", runs / "sigmoid", "--out", "x.pdf")
    (tmp_path / "config.json").write_text("{")
    assert "damaged" in fails(3, "report", tmp_path)
