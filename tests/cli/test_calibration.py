"""`evaluate --calibrate`, the stored calibration, and how `evaluate` and `export` apply it."""

import json
import shutil

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from hypersphere import data
from hypersphere.evaluation import Calibration
from hypersphere.training import Run, RunCalibration

from .conftest import invoke, train


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def all_pairs(run):
    """Return the cosines of all pairs of held-out images, and the classes of both sides, with NumPy."""
    experiment = run.experiment()
    x, labels = (part.double().numpy() for part in experiment.embed())
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    first, second = np.triu_indices(len(x), 1)
    names = np.array(experiment.data.validation.classes)
    return (x[first] * x[second]).sum(1), names[labels[first].astype(int)], names[labels[second].astype(int)]


@pytest.fixture(scope="module")
def calibrated_once(people, tmp_path_factory):
    """A copy of the run with a calibration, what the command printed, and its results."""
    folder = tmp_path_factory.mktemp("calibrated")
    run = Run.open(shutil.copytree(people.folder, folder / "run"))
    words = ["--calibrate", "--far", "0.1,0.02", "--bootstrap", 50, "--json", folder / "found.json"]
    return run, invoke("evaluate", run.folder, *words), read(folder / "found.json")


@pytest.fixture
def calibrated(calibrated_once, tmp_path):
    """The same in a folder that a test may change."""
    run, *results = calibrated_once
    return Run.open(shutil.copytree(run.folder, tmp_path / "run")), *results


@pytest.mark.slow
def test_evaluate_prints_thresholds_of_all_pairs(people, succeeds, tmp_path):
    out = succeeds("evaluate", people.folder, "--far", "0.1,0.02,1e-9", "--json", tmp_path / "found.json")
    found = read(tmp_path / "found.json")["verification"]
    scores, one, two = all_pairs(people)
    same = one == two
    assert (found["rates"]["same"], found["rates"]["different"]) == (same.sum(), (~same).sum()) == (150, 1620)
    for point in found["tar"][:2]:
        # The lowest score of a pair at which no more than this share of the different pairs is accepted.
        allowed = [s for s in scores if (scores[~same] >= s).mean() <= point["far"]]
        assert point["threshold"] == pytest.approx(min(allowed), abs=1e-6)
        assert point["tar"] == pytest.approx((scores[same] >= min(allowed)).mean())
        for low, value, high in (
            (point["interval"][0], point["tar"], point["interval"][1]),
            (point["threshold_interval"][0], point["threshold"], point["threshold_interval"][1]),
        ):
            assert low <= value <= high
            assert low < high
        assert f"threshold at FAR {point['far']:g}" in out
        assert f"{point['threshold']:.4f}" in out
    assert "threshold at FAR 1e-09" not in out  # not resolved
    assert "Not resolved: 1,620 different pairs" in out


def test_evaluate_shows_the_calibration_of_data_without_pairs(calibrated, succeeds, monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise data.NoPairsError("every class has one sample")

    monkeypatch.setattr(data, "draw_all_class_pairs", refuse)
    run, *_ = calibrated
    succeeds("evaluate", run.folder, "--json", tmp_path / "found.json")
    found = read(tmp_path / "found.json")
    assert found["left_out"] == "every class has one sample"
    assert found["calibration"]["fitted"]


def test_evaluate_never_labels_an_accuracy_as_a_threshold(calibrated):
    _, out, _ = calibrated
    for line in out.splitlines():
        if line.startswith("|") and "threshold" in line.split("|")[1]:
            assert "%" not in line.split("|")[2]
            assert "accuracy" not in line


def test_evaluate_thresholds_have_intervals_over_people(people, succeeds, tmp_path):
    succeeds("evaluate", people.folder, "--far", "0.1", "--bootstrap", 400, "--json", tmp_path / "found.json")
    found = read(tmp_path / "found.json")["verification"]
    scores, one, two = all_pairs(people)
    names, rng, drawn = np.unique(one), np.random.default_rng(0), []
    for _ in range(400):
        times = dict(
            zip(names, np.bincount(rng.integers(len(names), size=len(names)), minlength=len(names)), strict=True)
        )
        weights = np.array([times[a] * (times[b] if a != b else 1) for a, b in zip(one, two, strict=True)])
        different = one != two
        order = np.argsort(-scores[different])
        accepted = np.cumsum(weights[different][order]) / weights[different].sum()
        drawn.append(scores[different][order][accepted <= 0.1][-1])
    expected = np.quantile(drawn, [0.025, 0.975])
    assert found["tar"][0]["threshold_interval"] == pytest.approx(expected, abs=0.04)


def test_calibrate_fits_on_half_of_the_people_and_measures_on_the_others(calibrated):
    run, out, found = calibrated
    stored, measured = run.calibration(), found["calibration"]
    held_out = set(run.experiment().data.validation.classes)
    assert len(stored.classes) == measured["classes"] == 5
    assert set(stored.classes) < held_out
    scores, one, two = all_pairs(run)
    fitted = np.isin(one, stored.classes) & np.isin(two, stored.classes)
    tested = ~np.isin(one, stored.classes) & ~np.isin(two, stored.classes)
    same = one == two
    # Logistic regression in which both kinds of pairs have the same total weight.
    weights = np.where(same[fitted], 1 / same[fitted].sum(), 1 / (~same[fitted]).sum()) * fitted.sum()
    peer = LogisticRegression(C=1e12, tol=1e-10, max_iter=10_000)
    peer.fit(scores[fitted][:, None], same[fitted], sample_weight=weights)
    assert float(stored.calibration.llr(0.7)) == pytest.approx(peer.decision_function([[0.7]])[0], rel=1e-3)
    llr = peer.decision_function(scores[tested][:, None])
    bits = [np.log2(1 + np.exp(-llr[same[tested]])).mean(), np.log2(1 + np.exp(llr[~same[tested]])).mean()]
    assert measured["cllr"] == pytest.approx(np.mean(bits), rel=1e-3)
    assert measured["min_cllr"] <= measured["cllr"]
    assert measured["min_dcf"] <= measured["actual_dcf"]
    for point in measured["far"]:
        above = scores >= point["threshold"] - 1e-9
        assert point["measured"] == pytest.approx(above[tested & ~same].mean(), abs=2 / (tested & ~same).sum())
        assert above[fitted & ~same].mean() <= point["promised"] + 1 / (fitted & ~same).sum()
        assert point["probability"] == pytest.approx(peer.predict_proba([[point["threshold"]]])[0, 1], rel=1e-3)
    assert "fitted on 5 classes, measured on 5 others" in out
    assert "FAR, promised 0.1" in out
    assert f"Stored in {found['calibration']['file']}." in out


def test_later_evaluations_apply_the_stored_calibration(calibrated, succeeds, tmp_path):
    run, _, found = calibrated
    again = succeeds("evaluate", run.folder, "--bootstrap", 0, "--json", tmp_path / "again.json")
    later = read(tmp_path / "again.json")["calibration"]
    assert {**later, "file": found["calibration"]["file"]} == found["calibration"]
    assert "Cllr, in bits" in again
    assert "Stored in" not in again
    assert "Calibration not applied: it applies to unchanged embeddings only." in succeeds(
        "evaluate", run.folder, "--pca", 3, "--bootstrap", 0
    )


def test_calibration_of_other_weights_is_not_applied(calibrated, succeeds, fails, tmp_path):
    run, *_ = calibrated
    stored = read(run.folder / "calibration.json")
    (run.folder / "calibration.json").write_text(json.dumps(stored | {"fingerprint": "0", "step": 1}))
    out = succeeds("evaluate", run.folder, "--bootstrap", 0)
    assert "Calibration not applied: the calibration is that of step 1, not of the weights of step" in out
    assert "Cllr" not in out
    target = ["--to", "torch", "--out", tmp_path / "m.pt2"]
    assert "--no-calibration" in fails(2, "export", run.folder, *target)
    succeeds("export", run.folder, "--no-calibration", *target)
    assert not (tmp_path / "m.pair.pt2").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"format": 3}', "[" * 10_000])
def test_damaged_calibration_is_reported_in_one_line(content, calibrated, fails):
    run, *_ = calibrated
    (run.folder / "calibration.json").write_text(content)
    assert "calibration.json is damaged" in fails(3, "evaluate", run.folder)


def test_calibrate_reports_false_accept_rates_that_it_cannot_resolve(calibrated, succeeds, tmp_path):
    run, out, _ = calibrated
    assert "is not promised" not in out
    words = ["--calibrate", "--far", "0.1,1e-6,1e-9", "--bootstrap", 0, "--json", tmp_path / "found.json"]
    out = succeeds("evaluate", run.folder, *words)
    reason = "because the different pairs of the fitted classes cannot resolve it"
    assert f"FAR 1e-06, 1e-09 is not promised, {reason}." in " ".join(out.split())
    found = read(tmp_path / "found.json")["calibration"]
    assert [point["promised"] for point in found["far"]] == [0.1]
    assert found["unresolved"] == [1e-6, 1e-9]


def test_calibrate_warns_if_training_has_seen_the_classes(plain, succeeds, tmp_path):
    folder = shutil.copytree(plain.folder, tmp_path / "run")
    out = succeeds("evaluate", folder, "--calibrate", "--prior", "0.01", "--bootstrap", 0)
    assert "Training has seen these classes, so the calibration is too optimistic for new ones." in out
    assert "assume that 1% of the pairs are same" in out


@pytest.mark.parametrize(("paired", "single"), [(2, 2), (3, 1), (2, 3), (4, 0), (3, 4)])
def test_run_calibration_halves_of_few_classes_have_both_kinds_of_pairs(paired, single):
    labels = torch.tensor([*range(paired), *range(paired + single)]).sort().values
    features = torch.randn(len(labels), 5, generator=torch.Generator().manual_seed(0))
    names = [f"person {number}" for number in range(paired + single)]
    for seed in range(5):
        fitted = RunCalibration.fit(features, labels, names, step=0, fingerprint="", open_set=True, seed=seed)
        measured = fitted.measure(features, labels, names)
        assert measured["classes"] == paired + single - len(fitted.classes)
        assert min(measured["same"], measured["different"]) >= 1


def test_calibrate_rejects_unsuitable_options_and_data(people, photos, fails, tmp_path):
    for words in (["--pca", 3], ["--mirror"], ["--subtract-mean"]):
        assert f"{words[0]} must be omitted with --calibrate" in fails(
            2, "evaluate", people.folder, "--calibrate", *words
        )
    line = fails(2, "evaluate", people.folder, "--same", tmp_path / "same.npy")
    assert "--same must be omitted if RUN is the folder of a run" in line
    assert "--prior must be a probability" in fails(2, "evaluate", people.folder, "--calibrate", "--prior", 1)
    np.save(tmp_path / "x.npy", np.eye(4))
    line = fails(2, "evaluate", tmp_path / "x.npy", tmp_path / "x.npy", "--calibrate")
    assert "--calibrate must be omitted unless RUN is the folder of a run" in line
    data = {"name": "image_folder", "path": str(photos), "size": 8, "split": "class", "held_out": 3}
    few = train(tmp_path / "few", data=data, epochs=1)
    assert "of at least four classes" in fails(2, "evaluate", few.folder, "--calibrate")
    assert not (few.folder / "calibration.json").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["logistic", "isotonic"])
def test_exported_pair_graph_gives_the_probability(method, calibrated, succeeds, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    run, *_ = calibrated
    stored = run.calibration()
    pairs = stored.calibration
    other = Calibration.fit(pairs.scores, pairs.same, method=method, prior=0.2)
    thresholds, classes = stored.thresholds, stored.classes
    RunCalibration(other, thresholds, classes, True, stored.step, stored.fingerprint).save(run.folder)
    out = succeeds("export", run.folder, "--out", tmp_path / "m.onnx")
    assert f"{tmp_path / 'm.pair.onnx'}: two matrices of features to cosine, llr, probability" in out
    images = run.experiment().data.validation
    inputs = np.stack([images[index].numpy() for index in range(len(images))]).astype(np.float32) / 255
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    (features,) = session.run(["features"], {"inputs": inputs})
    pair = onnxruntime.InferenceSession(tmp_path / "m.pair.onnx")
    given = {"first": features, "second": features[::-1].copy()}
    cosine, llr, probability = pair.run(["cosine", "llr", "probability"], given)
    unit = features.astype(float) / np.linalg.norm(features.astype(float), axis=1, keepdims=True)
    expected = (unit * unit[::-1]).sum(1)
    np.testing.assert_allclose(cosine, expected, atol=1e-6)
    np.testing.assert_allclose(llr, other.llr(expected), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(probability, other.probability(expected), rtol=1e-4, atol=1e-6)
    (single,) = pair.run(["probability"], {name: rows[:1] for name, rows in given.items()})
    assert single.shape == (1,)
    zero = np.zeros((1, features.shape[1]), np.float32)  # has no direction, so its cosine is 0
    (cosine_of_zero,) = pair.run(["cosine"], {"first": zero, "second": features[:1]})
    assert cosine_of_zero.tolist() == [0.0]
    card = read(tmp_path / "m.onnx.json")["calibration"]
    assert (card["file"], card["method"], card["prior"]) == ("m.pair.onnx", method, 0.2)
    assert [point["far"] for point in card["thresholds"]] == [0.1, 0.02]
    if method == "logistic":
        by_card = 1 / (1 + np.exp(-(card["map"]["slope"] * expected + card["map"]["intercept"]) - np.log(0.2 / 0.8)))
        np.testing.assert_allclose(probability, by_card, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_export_replaces_its_own_pair_graph_and_no_other(calibrated, succeeds, fails, tmp_path):
    run, *_ = calibrated
    words = ["export", run.folder, "--to", "torch", "--out", tmp_path / "m.pt2"]
    (tmp_path / "m.pair.pt2").write_text("mine")
    assert "m.pair.pt2 exists and was not written by this command" in fails(2, *words)
    succeeds(*words, "--no-calibration")
    assert (tmp_path / "m.pair.pt2").read_text() == "mine"
    (tmp_path / "m.pair.pt2").unlink()
    succeeds(*words)
    with torch.no_grad():
        found = torch.export.load(tmp_path / "m.pair.pt2").module()(torch.eye(6), torch.eye(6))
    assert float(found[2][0]) == pytest.approx(float(run.calibration().calibration.probability(1.0)), rel=1e-5)
    succeeds(*words)
    succeeds(*words, "--no-calibration")  # removes the graph of the earlier export
    assert not (tmp_path / "m.pair.pt2").exists()
