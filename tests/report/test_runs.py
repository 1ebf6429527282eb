"""The page of runs, built from plain data."""

from __future__ import annotations

import json
import math
import re
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch

from hypersphere import energy, evaluation
from hypersphere.report import Page, RunResult, Text, join_pages, page_html, project, run_page
from hypersphere.report._vega import chart_spec
from hypersphere.report.runs import _energies, _excess, grouped, metric_name, run_table, shared_name, shown_classes

from .document import Checker

SETTINGS = {
    "data": {"name": "digits", "limit": 300},
    "model": {"name": "toy_cnn"},
    "head": {"name": "softmax"},
    "operator": {"name": "none"},
    "epochs": 2,
    "seed": 0,
}


def made(name: str = "softmax-0", *, dim: int = 3, seed: int = 0, classes: int = 4, **changes: object) -> RunResult:
    """Return a run with features around its class vectors."""
    draw = torch.Generator().manual_seed(seed)
    vectors = torch.randn(classes, dim, generator=draw)
    labels = torch.arange(60) % classes
    features = vectors[labels] * 2 + 0.5 * torch.randn(60, dim, generator=draw)
    weights = {"network.conv": torch.randn(8, 27, generator=draw), "head": vectors}
    metrics: list[dict] = [{"kind": "step", "step": step, "loss": 2.0 / step, "rate": 0.1} for step in (10, 20)]
    for epoch in (1, 2):
        line = {"kind": "epoch", "epoch": epoch, "step": 10 * epoch, "loss": 1.0 / epoch + seed, "seconds": 1.5 * epoch}
        metrics.append(line | {"accuracy": 0.4 * epoch, "energy": {"conv": 0.5 / epoch, "head": 1.0}})
    settings = {**SETTINGS, "seed": seed, **changes.pop("settings", {})}  # type: ignore[dict-item]
    run = RunResult(name, settings, metrics, tuple(f"class {k}" for k in range(classes)), features, labels, 300)
    inspected = energy.inspect(weights, probes=64)
    run = replace(run, accuracy=0.8 + 0.01 * seed, class_vectors=vectors, layers=inspected)
    return replace(run, **{"facts": {"torch": "2.9", "commit": None}, **changes})


def titles(html: str) -> list[str]:
    texts = Checker(html).texts
    return [words for level in ("h2", "h3", "h4", "h5") for words in texts.get(level, ())]


@pytest.fixture(scope="module")
def complete() -> str:
    """The page of one run with everything that a run can have."""
    a = torch.linspace(-1, 1, 3)
    grids = {"loss": torch.rand(3, 3) + 1, "error": 100 * torch.rand(3, 3)}
    around = evaluation.Landscape(a, a, grids, {"loss": 1.0, "error": 10.0})
    learned = {"k": torch.rand(20) + 0.3, "radius_factor": torch.rand(5)}
    extra = {"learned": learned, "starts": {"k": 0.5}, "filters": torch.randn(8, 3, 5, 5), "landscape": around}
    return page_html(run_page([made("first", dim=5, **extra)]))


def test_page_of_one_run_has_all_tabs(complete: str) -> None:
    found = titles(complete)
    for words in (
        *("Training", "Features", "Verification", "Class vectors", "Layers", "Landscape"),
        *("Training loss", "Test accuracy", "Batch loss", "Learning rate", "Hidden layers", "ROC", "CMC"),
        *("Angles of pairs of test features", "Angles between class vectors", "Norms of test features"),
        *("Mean angle of test features to class vectors", "Learned k", "Learned factor of ρ", "Test error"),
        *("Filters of the first layer", "Neurons per layer", "Energies, angles and norms", "Settings"),
    ):
        assert words in found, words
    assert re.search("5-d, projected to three directions with [0-9]+% of the squared norm; angles are in 5-d", complete)
    assert "softmax on digits" in complete
    assert "80.0% accuracy on 60 test examples" in complete
    assert not re.search(r"""(src|href)=["']?https?:""", complete)


def test_two_dimensional_features_are_also_shown_with_norms() -> None:
    html = page_html(run_page([made(dim=2)]))
    assert "Features with norms" in html
    assert "Scatter plot of 60 features of 4 classes." in html
    assert "Features with norms" not in page_html(run_page([made(dim=3)]))


def test_runs_that_differ_in_their_seed_share_a_row() -> None:
    runs = [made("softmax-0"), made("softmax-1", seed=1), made("sphere", settings={"operator": {"name": "sphere"}})]
    first, second = run_table(grouped(runs)).rows
    values = [80.0, 81.0]
    assert first[:3] == [
        "softmax",
        2,
        (pytest.approx(statistics.fmean(values)), pytest.approx(statistics.stdev(values)), 2),
    ]
    assert second[:2] == ["sphere", 1]
    page = run_page(runs)
    html = page_html(page)
    assert page.sections[1].rows == [["softmax", "none"], ["sphere", "sphere"]]  # type: ignore[union-attr]
    assert html.count("<canvas") == 2
    assert "mean ± one standard deviation over 2 seeds" in html
    assert "A run with one seed has unknown noise, so no best run is marked." in html
    assert "class='best'" not in html
    assert dict(row[:2] for row in page.sections[-1].rows)["seeds"] == "0, 1"  # type: ignore[union-attr]


def test_run_table_marks_only_differences_beyond_the_noise() -> None:
    runs = [made(f"a-{seed}", seed=seed) for seed in range(3)]
    other = {"operator": {"name": "tanh"}}
    runs += [replace(made(f"b-{seed}", seed=seed, settings=other), accuracy=0.5 + 0.01 * seed) for seed in range(3)]
    html = page_html(run_page(runs))
    summary = html[html.index("id='section-1'") : html.index("id='section-2'")]
    assert "81.00 ± 1.00<span class='unseen'> (best)" in summary
    assert summary.count("class='unseen'") == 1  # all other columns have equal values


def test_equal_error_rate_matches_the_definition() -> None:
    run = made(dim=3, seed=3)
    x = torch.nn.functional.normalize(run.features.double(), dim=1).numpy()
    same = [float(x[i] @ x[j]) for i in range(60) for j in range(i) if run.labels[i] == run.labels[j]]
    other = [float(x[i] @ x[j]) for i in range(60) for j in range(i) if run.labels[i] != run.labels[j]]
    assert run.verified is not None
    threshold = math.cos(math.radians(run.verified.threshold))
    refused = np.mean([score < threshold for score in same])
    accepted = np.mean([score >= threshold for score in other])
    assert abs(refused - accepted) < 0.02
    assert 50 * (refused + accepted) == pytest.approx(run.numbers["eer"], abs=1)


@pytest.mark.slow
def test_page_with_many_classes_and_layers() -> None:
    draw = torch.Generator().manual_seed(0)
    names = tuple(f"class {number}" for number in range(450))
    labels = torch.randint(450, (500,), generator=draw)
    features = torch.randn(500, 5, generator=draw)
    vectors = torch.randn(450, 5, generator=draw)
    many = replace(made(), classes=names, class_vectors=vectors, labels=labels, features=features)
    html = page_html(run_page([many]))
    assert "10 of 450 classes" in html
    assert "The first 400 of 450 classes." in html
    counts = labels.bincount(minlength=450)
    assert counts[shown_classes(many)].min() >= counts.sort(descending=True).values[9]
    alone = replace(many, features=features[:450], labels=torch.arange(450))
    assert shown_classes(alone).tolist()[::9] == [0, 449]
    assert ">ROC<" not in page_html(run_page([alone]))  # no two examples of one class
    energies = {f"layer {number}": 0.5 for number in range(30)}
    deep = replace(made(), metrics=[{"kind": "epoch", "epoch": epoch, "energy": energies} for epoch in (1, 2)])
    chart = _energies("Hidden layers", [deep], "epoch")
    assert chart is not None
    assert chart.chart.description.startswith("Heat map of energy, 30 × 2.")


def test_sphere_angles_are_computed_in_all_dimensions(complete: str) -> None:
    run = made("first", dim=5)
    assert run.class_vectors is not None
    x, w = (rows.double().numpy() for rows in (run.features, run.class_vectors[run.labels]))
    cosines = (x * w).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(w, axis=1)
    data = next(words for words in Checker(complete).texts["script"] if '"spheres"' in words and words[0] == "{")
    angles = json.loads(data)["spheres"][0]["angles"]
    assert np.allclose(angles, np.degrees(np.arccos(cosines)), atol=0.051)
    flat = project(run.features, run.class_vectors)
    assert flat.vectors is not None
    seen = (flat.points * flat.vectors[run.labels]).sum(1)
    seen /= np.linalg.norm(flat.points, axis=1) * np.linalg.norm(flat.vectors[run.labels], axis=1)
    assert np.abs(np.degrees(np.arccos(seen)) - angles).max() > 2  # angles in the projection differ


def test_page_describes_runs_on_different_data() -> None:
    other = made("other", dim=3, classes=3, settings={"data": {"name": "mnist"}}, facts={"torch": "1.2.3"})
    page = run_page([made("one"), other])
    assert page.lead == "2 runs on digits (limit 300) and mnist."
    assert page.meta["torch"] == "2.9, 1.2.3"
    html = page_html(page)
    assert "regular simplex" not in html
    assert "so no best run is marked" in html
    assert "class='best'" not in html
    assert "higher is better" not in html
    assert "regular simplex" in page_html(run_page([other]))


def test_layers_of_different_networks_have_separate_charts() -> None:
    one, other = made("one"), made("two", settings={"head": {"name": "arcface"}})
    assert [chart.title for chart in _excess(grouped([one, other]))] == ["Energy relative to random neurons"]
    weights = {"network.fc": torch.randn(5, 9), "head": torch.randn(4, 3)}
    renamed = replace(other, layers=energy.inspect(weights, probes=64))
    titles = [chart.title for chart in _excess(grouped([one, renamed]))]
    assert titles == [f"Energy relative to random neurons: {name}" for name in ("one", "two")]


def test_page_of_an_open_set_run_has_no_class_vectors() -> None:
    html = page_html(run_page([replace(made(), class_vectors=None, accuracy=None)]))
    assert "Angles between class vectors" not in html
    assert "the smallest angle is" not in html
    assert "300 examples of 4 classes; validated on 60 examples of 4 other classes." in html
    assert "so this is not an open-set protocol" not in html
    assert "<canvas" in html


def test_page_of_an_open_set_run_counts_training_classes() -> None:
    page = run_page([replace(made(), class_vectors=None, accuracy=None, training_classes=7)])
    assert page.lead.endswith("300 examples of 7 classes; validated on 60 examples of 4 other classes.")


def test_page_of_runs_with_selection_does_not_mention_test_data() -> None:
    selected = made("selected", settings={"selection": 0.2})
    html = page_html(run_page([selected]))
    assert "80.0% accuracy on 60 selection examples." in html
    assert {"Selection accuracy", "Norms of selection features"} <= set(titles(html))
    assert not re.search(r"\btest (data|examples?|features|accuracy)", html)
    mixed = page_html(run_page([selected, made("tested")]))
    assert "Last checkpoint, held-out data." in mixed


def test_validation_metrics_of_any_name_are_drawn() -> None:
    metrics = [{"kind": "epoch", "epoch": e, "loss": 1.0, "verification.accuracy": 0.9, "eer": 0.1} for e in (1, 2)]
    html = page_html(run_page([replace(made(), metrics=metrics)]))
    assert "Verification: accuracy" in titles(html)
    assert "curve of equal error rate over epoch" in html


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("verification.eer", "verification: equal error rate"),
        ("verification.lfw.auc", "verification lfw: area under the ROC curve"),
        ("identification.rank10", "identification: accuracy at rank 10"),
        ("retrieval.map_at_r", "retrieval: mean average precision at R"),
        ("retrieval.recall1", "retrieval: recall at 1"),
        ("my_protocol.rank_5", "my protocol: rank 5"),
        ("top5", "top-5 accuracy"),
    ],
)
def test_metric_name_is_readable(key: str, name: str) -> None:
    assert metric_name(key) == name


def test_page_names_the_step_of_an_earlier_checkpoint() -> None:
    run = replace(made(), step=10)
    page = run_page([run])
    assert page.lead.endswith("accuracy on 60 test examples, checkpoint of step 10.")
    assert run_table({"run": [run]}).caption.startswith("Checkpoint of step 10, test data.")
    assert (run.numbers["loss"], run.numbers["seconds"]) == (1.0, 1.5)  # of the first epoch
    both = [replace(run, name="one"), made("two", seed=1)]
    assert run_table(grouped(both)).caption.startswith("Checkpoints step 10 (one), last (two), test data.")
    assert run_table({"run": [made()]}).caption.startswith("Last checkpoint, test data.")


def test_curves_of_validations_within_epochs_are_drawn_by_step() -> None:
    metrics: list[dict] = [{"kind": "step", "step": 1, "epoch": 0, "loss": 2.0, "rate": 0.1}]
    for step, share in ((10, 0.5), (20, 0.7)):
        line = {"kind": "validation", "epoch": 0, "step": step, "accuracy": share}
        metrics.append(line | {"energy": {"conv": share, "head": 1.0}})
    metrics.append({"kind": "epoch", "epoch": 1, "step": 21, "loss": 1.5})  # not validated
    metrics.append(metrics[1] | {"kind": "epoch", "epoch": 2, "step": 25, "loss": 1.0, "accuracy": 0.8})
    (tabs,) = (
        section for section in run_page([replace(made(), metrics=metrics)]).sections if section.title == "Measurements"
    )
    curves, energies = tabs.sections[0].sections  # type: ignore[union-attr]
    specs = {chart.title: chart_spec(chart.chart) for chart in (*curves.sections, *energies.sections)}
    places = {title: [row["x"] for row in spec["data"]["values"]] for title, spec in specs.items()}
    assert places["Training loss"] == [1, 2]
    assert places["Test accuracy"] == places["Hidden layers"] == places["Class vectors"] == [10, 20, 25]
    names = {title: spec["layer"][-1]["encoding"]["x"]["title"] for title, spec in specs.items()}
    assert (names["Training loss"], names["Test accuracy"], names["Hidden layers"]) == ("epoch", "step", "step")
    assert energies.title == "Hyperspherical energy by step"


def test_page_of_a_run_without_logged_metrics() -> None:
    html = page_html(run_page([replace(made(), metrics=[], layers=None)]))
    assert "Training loss" not in html
    assert "Angles between class vectors" in html


def test_curves_of_seeds_share_their_positions() -> None:
    one, other = made("a-0"), made("a-1", seed=1)
    late = replace(other, metrics=[line for line in other.metrics if line.get("epoch") != 1])
    page = run_page([one, late])
    training = page.sections[1].sections[0]  # type: ignore[union-attr]
    chart = training.sections[0].sections[0].chart
    rows = chart_spec(chart)["data"]["values"]
    assert [(row["x"], row["y"]) for row in rows] == [(1, 1.0), (2, 1.0)]  # mean of 0.5 and 1.5 at epoch 2


def test_joined_pages_name_and_link_their_studies() -> None:
    one, two = (Page(title, "", [Text("", "a")], {"torch": title}) for title in ("Runs", "A recipe"))
    joined = join_pages([one, two])
    assert joined.title == "Runs and A recipe"
    assert joined.meta == {"torch": "Runs, A recipe"}
    assert page_html(joined).count("<li><a href='#section-") == 2
    assert join_pages([one, two, one, two]).title == "4 studies"
    assert join_pages([one]) is one


@pytest.mark.parametrize(
    ("names", "together"),
    [
        (["arcface"], "arcface"),
        (["softmax-seed0", "softmax-seed1"], "softmax"),
        (["cnn9_0", "cnn9_1", "cnn9_10"], "cnn9"),
        (["one", "two"], ""),
    ],
)
def test_shared_name_is_the_shared_prefix(names: list[str], together: str) -> None:
    assert shared_name(names) == together
