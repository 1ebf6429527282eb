"""`hypersphere report` for runs: values and texts of the page."""

import json
import re
import statistics
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from report.document import Checker

from hypersphere.cli.report import _joined
from hypersphere.cli.run_features import _shown_classes
from hypersphere.cli.run_groups import Group, folder_name, grouped, run_table
from hypersphere.cli.run_layers import _excess
from hypersphere.cli.run_page import _energy, run_page
from hypersphere.cli.run_study import study
from hypersphere.report import HeatMap, Page, Text, page_html, project
from hypersphere.training.job_run import Run

from .pages import cells, logged


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
        "Energy per layer",
        "Angles and norms per layer",
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


def test_study_equal_error_rate_matches_the_definition(runs):
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


def test_run_page_with_many_classes_and_layers(runs):
    of = study(Run.open(runs / "sigmoid"))
    names = tuple(f"class {number}" for number in range(450))
    draw = torch.Generator().manual_seed(0)
    task = replace(of.task, classes=names)
    vectors = torch.randn(450, 5, generator=draw)
    many = replace(of, task=task, class_vectors=vectors, labels=torch.randint(450, (500,), generator=draw))
    html = page_html(run_page([many]))
    assert "10 of 450 classes" in html
    even = replace(many, features=of.features[:450], labels=torch.arange(450))
    shown = _shown_classes(even).tolist()
    assert len(set(shown)) == 10
    assert (shown[0], shown[-1]) == (0, 449)
    counts = many.labels.bincount(minlength=450)
    assert counts[_shown_classes(many)].min() >= counts.sort(descending=True).values[9]
    assert "The first 400 of 450 classes." in html
    alone = replace(many, features=of.features[:450], labels=torch.arange(450))
    assert ">ROC<" not in page_html(run_page([alone]))  # no two examples of one class
    deep = SimpleNamespace(energies=([1, 2], {f"layer {number}": [0.5, 0.4] for number in range(30)}))
    (map_of_layers,) = _energy(Group("deep", [deep]), alone=True)
    assert isinstance(map_of_layers, HeatMap)
    assert map_of_layers.numbers.shape == (30, 2)


def angles_in_the_page(html):
    """Return the angles of the points of each sphere of a page."""
    scripts = re.findall('<script type="application/json">(.*?)</script>', html)
    found = [json.loads(script.replace("\\u003c", "<")) for script in scripts]
    return [sphere.get("angles") for one in found if "spheres" in one for sphere in one["spheres"]]


def test_sphere_angles_are_computed_in_all_dimensions(runs, page, comparison):
    of = study(Run.open(runs / "sigmoid"))
    x, w = (rows.double().numpy() for rows in (of.features, of.class_vectors[of.labels]))
    cosines = (x * w).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(w, axis=1)
    (angles,) = angles_in_the_page(page.read_text(encoding="utf-8"))
    assert np.allclose(angles, np.degrees(np.arccos(cosines)), atol=0.051)
    flat = project(of.features, of.class_vectors)
    seen = (flat.points * flat.vectors[of.labels]).sum(1)
    seen /= np.linalg.norm(flat.points, axis=1) * np.linalg.norm(flat.vectors[of.labels], axis=1)
    assert np.abs(np.degrees(np.arccos(seen)) - angles).max() > 5  # angles in the projection differ
    assert angles_in_the_page(comparison.read_text(encoding="utf-8"))[0] is None  # 3-d points are not projected


def test_run_page_describes_runs_on_different_data(runs):
    one = study(Run.open(runs / "softmax-0"))
    other = study(Run.open(runs / "sigmoid"))
    job = replace(other.run.job, data={"name": "mnist"})
    made = {**other.run.made_with, "torch": "1.2.3", "machine": "elsewhere"}
    names = tuple(map(str, range(4)))
    kept = other.labels < 4
    changed = replace(
        other,
        run=replace(other.run, job=job, made_with=made),
        task=replace(other.task, classes=names, test_inputs=other.task.test_inputs[kept]),
        features=other.features[kept],
        labels=other.labels[kept],
        class_vectors=other.class_vectors[:4],
    )
    page = run_page([one, changed])
    assert "on 300 examples of 10 classes of digits (limit 300);" in page.lead
    assert "on 300 examples of 4 classes of mnist;" in page.lead
    assert f"accuracy on {int(kept.sum())} test examples." in page.lead
    assert page.meta["torch"].endswith(", 1.2.3")
    assert page.meta["machine"].endswith(", elsewhere")
    html = page_html(page)
    assert f"All pairs of {int(kept.sum())} to 500 test examples" in html
    assert ">simplex of 4 " in html
    assert "simplex of 10" not in html  # ten vectors in 3-d cannot form a simplex
    alike = page_html(run_page([changed]))
    assert ">regular simplex " in alike
    assert "simplex of" not in alike
    assert "classes of mnist" not in run_page([changed]).lead
    assert "so no best run is marked" in html
    assert "class='best'" not in html
    assert html.count("higher is better") == 0


def test_run_table_marks_no_best_energy_across_networks(runs):
    one, other = (study(Run.open(runs / name)) for name in ("softmax-0", "sigmoid"))
    columns = {column.name: column.higher_is_better for column in run_table(grouped([one, other])).columns}
    assert columns["hidden energy"] is None
    assert columns["test accuracy %"] is True
    alike = run_table(grouped([one, study(Run.open(runs / "softmax-1"))])).columns
    assert {column.name: column.higher_is_better for column in alike}["hidden energy"] is False
    names = tuple(f"network.{layer}" for layer in range(len(other.layers.layers)))
    layers = [replace(layer, name=name) for layer, name in zip(other.layers.layers, names, strict=True)]
    renamed = replace(other, layers=replace(other.layers, layers=tuple(layers)))
    titles = [chart.title for chart in _excess(grouped([one, renamed]))]
    assert titles == [f"Energy relative to random neurons: {name}" for name in ("softmax-0", "sigmoid")]


def test_report_shows_settings_in_a_table(runs, page):
    html = page.read_text(encoding="utf-8")
    (title,) = Checker(html).texts["h1"]
    assert "(" not in title
    settings = dict(cells(html, 3))
    assert settings["epochs"] == str(Run.open(runs / "sigmoid").job.epochs)
    assert settings["seed"] == "0"


def test_report_says_that_rates_are_of_the_first_seed(page, comparison):
    assert "First seed only" not in page.read_text(encoding="utf-8")
    assert "First seed only. Rates and mean angles are" in comparison.read_text(encoding="utf-8")


def test_joined_page_names_and_links_its_studies():
    one, two = (Page(title, "", [Text("", "a")]) for title in ("Runs", "A recipe"))
    joined = _joined([one, two])
    assert joined.title == "Runs and A recipe"
    assert page_html(joined).count("<li><a href='#section-") == 2
    assert _joined([one, two, one, two]).title == "4 studies"


def test_report_says_which_pairs_rates_come_from(page):
    html = page.read_text(encoding="utf-8")
    assert "EER and rank-1 for up to 1,500 examples" in html
    assert "`hypersphere evaluate` draws up to 3,000 pairs of a kind, so its rates differ." in html


def test_report_of_runs_without_logged_metrics(plain, rotated, succeeds, tmp_path):
    out = succeeds("report", plain.folder, rotated.folder, "--out", tmp_path / "both.html")
    assert out.endswith(f"Report: {tmp_path / 'both.html'}\n")
    html = (tmp_path / "both.html").read_text(encoding="utf-8")
    assert "Training loss" not in html
    assert "Angles between class vectors" in html


def test_report_rejects_invalid_input_in_one_line(fails, runs, tmp_path):
    assert "a folder of records" in fails(2, "report", tmp_path)
    assert "--out must be a file with suffix .html" in fails(2, "report", runs / "sigmoid", "--out", "x.pdf")
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
def test_folder_name_is_the_shared_prefix(names, together):
    assert folder_name(names) == together
