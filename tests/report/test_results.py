"""What notebooks display for results."""

import importlib.util

import numpy as np
import pytest
import torch

import hypersphere as hs
from hypersphere.report import Sphere, Spheres, result_page
from hypersphere.robustness import RobustAccuracy, Strength

from .document import Checker


def features():
    labels = torch.arange(60) % 12
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(0))[labels] + 0.6 * torch.randn(60, 8), labels


def verification():
    x, y = features()
    first, second = torch.triu_indices(60, 60, offset=1)
    return hs.evaluation.verify(x[first], x[second], y[first] == y[second], far=[0.1, 0.01, 1e-6])


def calibration(method="logistic"):
    verified = verification()
    return hs.evaluation.Calibration.fit(verified.scores, verified.same, method=method)


RESULTS = {
    "verification": verification,
    "all pairs": lambda: hs.evaluation.verify_blocks(hs.evaluation.AllPairs(*features()), far=[0.1, 1e-6]),
    "roc": lambda: verification().roc,
    "identification": lambda: hs.evaluation.identify(*features(), ranks=[1, 5]),
    "logistic": calibration,
    "isotonic": lambda: calibration("isotonic"),
    "inspection": lambda: hs.energy.inspect(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))),
    "sphere": lambda: Sphere("points", np.eye(3), [0, 1, 2]),
    "spheres": lambda: Spheres("points", [Sphere("points", np.eye(3), [0, 1, 2])]),
}


def inner_page(result):
    """Return the document in the frame that a notebook shows."""
    ((tag, attributes),) = Checker(result._repr_html_()).elements  # nothing is outside of the frame
    assert tag == "iframe"
    assert "src" not in attributes
    return attributes["srcdoc"]


@pytest.mark.parametrize("name", RESULTS)
def test_notebook_shows_results_in_a_self_contained_frame(name):
    page = inner_page(RESULTS[name]())
    document = Checker(page)
    assert page.startswith("<!DOCTYPE html>")
    for tag, attributes in document.elements:
        for attribute in ("src", "href"):
            target = attributes.get(attribute)
            assert target is None or target.startswith(("#", "data:")), (tag, target)
    policies = [a["content"] for tag, a in document.elements if tag == "meta" and "http-equiv" in a]
    assert policies
    assert policies[0].startswith("default-src 'none'")


def test_page_of_a_verification_shows_its_numbers():
    verified = verification()
    page = inner_page(verified)
    for number in (verified.accuracy, verified.best_accuracy, verified.eer, verified.points[1].true_rate):
        assert f"{number:.2%}".removesuffix("%") in page
    assert f"{verified.points[0].threshold:.4f}" in page
    assert "different pairs are too few for FAR 1e-06." in page
    assert page.count('"mark"') >= 2


def test_page_of_a_calibration_shows_thresholds():
    fitted = calibration()
    curve = hs.evaluation.roc(fitted.scores, fitted.same)
    assert f"{curve.at(0.1).threshold:.4f}" in inner_page(fitted)


def test_pages_without_the_extra_have_tables_only(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "altair" else found(name, *a))
    for make in (verification, calibration, RESULTS["identification"], RESULTS["inspection"]):
        page = inner_page(make())
        assert "vega" not in page
        assert "<table" in page


def test_result_page_rejects_other_objects():
    with pytest.raises(ValueError, match=r"result must be one of Verification, .*, not 'int'"):
        result_page(3)


@pytest.mark.slow
def test_frame_draws_charts_in_a_browser(browser, tmp_path):
    path = tmp_path / "notebook.html"
    body = "".join(RESULTS[name]()._repr_html_() for name in ("verification", "logistic", "spheres"))
    path.write_text(f"<!DOCTYPE html><meta charset=utf-8><body style='color: rgb(1, 2, 3)'><p id=mine>cell</p>{body}")
    browser.visit(path)
    browser.settle()
    drawn = """
        return [...document.querySelectorAll('iframe')].map(
            (frame) => frame.contentDocument.querySelectorAll('svg.marks, canvas').length);
    """
    assert min(browser.run(drawn)) >= 1
    assert browser.run("return getComputedStyle(document.querySelector('#mine')).color") == "rgb(1, 2, 3)"
    assert browser.run("return getComputedStyle(document.body).fontFamily") == browser.run(
        "const p = document.createElement('iframe'); document.body.append(p);"
        "return getComputedStyle(p.contentDocument.body).fontFamily"
    )
    assert browser.console() == []


def test_attack_charts_show_one_curve_per_model():
    result = RobustAccuracy("FGSM", True, 10, 0.9, (4 / 255, 8 / 255), (0.5, 0.2))
    spec = hs.report.accuracy_chart({"CNN": result, "sphere": result}).to_dict()
    assert "transferred" in spec["title"]
    assert spec["description"].startswith("2 curves of accuracy over ε · 255 from 0 to 8")
    fooled = torch.tensor([True, True, False])
    strength = Strength(torch.tensor([0.3, 0.1, 0.2]), torch.tensor([0.1, 0.1, 0.1]), fooled, ~fooled)
    assert "CNN: 0.3" in hs.report.strength_chart({"CNN": strength}).to_dict()["description"]


def test_attack_charts_reject_invalid_arguments():
    with pytest.raises(ValueError, match="results must be a mapping with at least one result"):
        hs.report.accuracy_chart({})
    with pytest.raises(ValueError, match="norm must be 'l2' or 'linf'"):
        hs.report.strength_chart({}, "l1")
    with pytest.raises(ValueError, match="results must be a mapping with at least one model that was fooled"):
        hs.report.strength_chart({})
