import io
import json
import pickle
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from sklearn.metrics import roc_auc_score

from hypersphere import data
from hypersphere.cli import measures
from hypersphere.data import draw_all_class_pairs
from hypersphere.evaluation import summary
from hypersphere.report import evaluation_table, print_table
from hypersphere.training import Config

from .conftest import train

PEOPLE, EACH = 12, 4


@pytest.fixture
def faces(tmp_path):
    """Features and labels of a few people, as two files and as arrays."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(PEOPLE), EACH)
    features = rng.normal(size=(PEOPLE, 8))[labels] + 0.8 * rng.normal(size=(PEOPLE * EACH, 8))
    np.save(tmp_path / "features.npy", features)
    np.save(tmp_path / "labels.npy", labels)
    return tmp_path, features, labels


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def test_measure_run_fits_components_on_more_images_than_float32_can_count():
    """In float32 the last of the evenly spaced positions would be rounded up beyond the last image."""
    count = 2**24 + 4
    pixels, label = torch.zeros(1, 1, 1, 1, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    train = data.TensorSource(pixels.expand(count, 1, 1, 1), label.expand(count), ("a",))
    held_out = data.TensorSource(pixels.expand(8, 1, 1, 1), torch.arange(8) % 2, ("b", "c"))
    split = data.DataSplit(train, held_out, open_set=True)
    fitted = []

    def embed(source, mirror=False):
        fitted.append(len(source))
        return torch.randn(len(source), 4), source.labels

    opened = SimpleNamespace(
        experiment=SimpleNamespace(data=split, readable=lambda source: source),
        run=SimpleNamespace(config=Config(), calibration=lambda: None),
        held_out=held_out,
        pairs=None,
        step=1,
        embed=embed,
    )
    measures.measure_run(opened, measures.EvaluationOptions(pca=2, bootstrap=0))
    assert fitted == [8, measures.MAX_PCA_SAMPLES]


def rank_one(features, labels):
    """Return the rank-1 rate with the first sample of each class as gallery and the others as probes."""
    first = np.array([np.flatnonzero(labels == label)[0] for label in np.unique(labels)])
    rest = np.setdiff1d(np.arange(len(labels)), first)
    best = first[(unit(features[rest]) @ unit(features[first]).T).argmax(1)]
    return (labels[best] == labels[rest]).mean()


def area(features, labels, pairs):
    scores = (unit(features[pairs.first.numpy()]) * unit(features[pairs.second.numpy()])).sum(1)
    return roc_auc_score(labels[pairs.first.numpy()] == labels[pairs.second.numpy()], scores)


def test_evaluate_run_matches_the_definitions(plain, succeeds, tmp_path):
    out = succeeds("evaluate", plain.folder, "--json", tmp_path / "new" / "found.json", "--ranks", "1,3")
    found = json.loads((tmp_path / "new" / "found.json").read_text())
    for word in ("classification accuracy", "verification accuracy", "identification at rank 3", "Fisher", "hardness"):
        assert word in out
    assert "\x1b" not in out
    assert "3,000 same and 3,000 different, drawn, in 10 folds" in out
    assert "Rates and thresholds: of all pairs of the samples." in out
    assert "Samples: test data of 10 classes, checkpoint of step 80." in out
    assert "Verification accuracy: mean over the folds ± its standard error." in out
    assert "Hardness: mean ± standard deviation over the samples." in out
    assert "are always 100 % and omitted" not in out
    assert "draws of the pairs" in out  # because training has seen these classes
    experiment = plain.experiment()
    data = experiment.data.validation
    labels = data.labels.numpy()
    with torch.no_grad():
        features = experiment.network(data.inputs.float() / 255).double().numpy()
    w = experiment.head.weight.detach().double().numpy()
    assert found["classification"]["accuracy"] == pytest.approx(((features @ w.T).argmax(1) == labels).mean())
    assert found["classification"]["accuracy"] > 0.3  # there are ten classes
    assert found["identification"]["rank"]["1"] == pytest.approx(rank_one(features, labels), abs=0.01)
    pairs = draw_all_class_pairs(torch.from_numpy(labels), None, seed=0)
    assert found["verification"]["auc"] == pytest.approx(area(features, labels, pairs), abs=1e-4)
    assert (found["verification"]["same"], found["verification"]["different"]) == (3000, 3000)
    angles = np.arccos(np.clip(unit(features) @ unit(w).T, -1, 1))
    hardness = angles[np.arange(len(labels)), labels] / angles.sum(1)
    assert found["hardness"]["mean"] == pytest.approx(hardness.mean(), rel=1e-4)
    assert found["hardness"]["deviation"] == pytest.approx(hardness.std(), rel=1e-4)


def test_evaluate_omits_ranks_that_include_the_whole_gallery(plain, succeeds):
    out = succeeds("evaluate", plain.folder, "--bootstrap", 0, "--ranks", "1,9,10,50")
    assert re.findall(r"identification at rank (\d+)", out) == ["1", "9"]
    assert "a gallery of 10 samples, the first of each class; ranks from 10 on are always 100 % and omitted." in out


def test_evaluate_says_that_rates_of_drawn_pairs_differ_from_the_report(plain, succeeds):
    line = "`report` computes its rates from all pairs of up to 1,500 samples, so they differ."
    assert line in succeeds("evaluate", plain.folder, "--pairs", 3000, "--bootstrap", 0)
    assert line not in succeeds("evaluate", plain.folder, "--bootstrap", 0)


def test_evaluate_embeddings_with_labels(faces, succeeds):
    folder, features, labels = faces
    words = ["--json", folder / "found.json", "--pairs", "40", "--folds", "4", "--seed", "3", "--far", "0.1,1/1000"]
    out = succeeds("evaluate", folder / "features.npy", folder / "labels.npy", *words)
    found = json.loads((folder / "found.json").read_text())
    assert "not resolved" in out
    assert "Not resolved: 40 different pairs are too few for this FAR." in out
    assert "classification" not in out
    assert found["verification"]["auc"] == pytest.approx(
        area(features, labels, draw_all_class_pairs(torch.from_numpy(labels), 40, seed=3))
    )
    assert [point["far"] for point in found["verification"]["tar"]] == [0.1, 0.001]
    assert found["identification"]["rank"]["1"] == pytest.approx(rank_one(features, labels))


def test_evaluate_takes_texts_as_labels(faces, succeeds):
    folder, _, labels = faces
    np.save(folder / "people.npy", np.array([f"person {label}" for label in labels]))
    printed = [
        succeeds("evaluate", folder / "features.npy", folder / name, "--bootstrap", 0)
        for name in ("labels.npy", "people.npy")
    ]
    assert printed[0] == printed[1]


def resampled_people(features, labels, pairs, draws):
    """Return the interval of the AUC when people are resampled with replacement, from the definition."""
    one, two = pairs.first.numpy(), pairs.second.numpy()
    scores = (unit(features[one]) * unit(features[two])).sum(1)
    same = labels[one] == labels[two]
    rng, found = np.random.default_rng(0), []
    for _ in range(draws):
        times = np.bincount(rng.integers(PEOPLE, size=PEOPLE), minlength=PEOPLE)
        weights = np.where(same, times[labels[one]], times[labels[one]] * times[labels[two]])
        found.append(roc_auc_score(same, scores, sample_weight=weights))
    return np.quantile(found, [0.025, 0.975])


@pytest.mark.slow
def test_intervals_of_embeddings_resample_people(faces, succeeds):
    folder, features, labels = faces
    words = [folder / "features.npy", folder / "labels.npy", "--pairs", "60", "--json", folder / "found.json"]
    out = succeeds("evaluate", *words)
    found = json.loads((folder / "found.json").read_text())["verification"]
    assert (found["draws"], found["drawn"]) == (1000, "classes")
    assert "95 %: percentile bootstrap with 1,000 draws of the classes." in out
    for key, (low, high) in found["intervals"].items():
        assert low <= found[key] <= high
        assert low < high
    expected = resampled_people(features, labels, draw_all_class_pairs(torch.from_numpy(labels), 60, seed=0), 1000)
    assert found["intervals"]["auc"] == pytest.approx(expected, abs=0.02)
    tenth = found["tar"][0]
    assert tenth["interval"][0] <= tenth["tar"] <= tenth["interval"][1]
    assert "interval" not in found["tar"][2]  # 60 pairs do not resolve a rate of 0.001
    assert succeeds("evaluate", *words) == out  # the seed determines the draws


def test_intervals_are_optional(faces, succeeds, fails):
    folder, *_ = faces
    words = [folder / "features.npy", folder / "labels.npy", "--json", folder / "found.json", "--bootstrap"]
    assert "95 %" not in succeeds("evaluate", *words, "0")
    assert "intervals" not in json.loads((folder / "found.json").read_text())["verification"]
    succeeds("evaluate", *words, "50")
    assert json.loads((folder / "found.json").read_text())["verification"]["draws"] == 50
    assert "--bootstrap must be 0, or a number of draws >= 2, not 1" in fails(2, "evaluate", *words, "1")


def test_evaluation_table_fits_a_terminal(plain, succeeds, tmp_path):
    succeeds("evaluate", plain.folder, "--json", tmp_path / "found.json", "--bootstrap", 100)
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, no_color=True, color_system=None)
    print_table(evaluation_table(json.loads((tmp_path / "found.json").read_text())), console)
    assert max(map(len, out.getvalue().splitlines())) <= 80
    (line,) = [line for line in out.getvalue().splitlines() if "area under the ROC curve" in line]
    assert line.count("0.") == 3  # the value and both ends of the interval in one line


def test_intervals_of_many_pairs_must_be_requested(faces, succeeds, monkeypatch):
    folder, *_ = faces
    monkeypatch.setattr(summary, "MAX_RESAMPLED_PAIRS", 50)
    words = [folder / "features.npy", folder / "labels.npy", "--pairs", "30"]
    assert "95 %" not in succeeds("evaluate", *words)
    assert "95 %" in succeeds("evaluate", *words, "--bootstrap", "20")


def test_evaluate_paired_embeddings(faces, succeeds, fails):
    folder, features, labels = faces
    first, second = np.random.default_rng(1).integers(len(labels), size=(2, 200))
    for name, array in (("a", features[first]), ("b", features[second]), ("same", labels[first] == labels[second])):
        np.save(folder / f"{name}.npy", array)
    succeeds(
        "evaluate", folder / "a.npy", folder / "b.npy", "--same", folder / "same.npy", "--folds", "5",
        "--json", folder / "found.json",
    )  # fmt: skip
    found = json.loads((folder / "found.json").read_text())
    scores = (unit(features[first]) * unit(features[second])).sum(1)
    assert found["verification"]["auc"] == pytest.approx(roc_auc_score(labels[first] == labels[second], scores))
    assert "two files of embeddings need --same" in fails(2, "evaluate", folder / "a.npy", folder / "b.npy")


@pytest.mark.slow
def test_evaluate_listed_pairs_by_name_and_by_index(faces, succeeds):
    folder, _, labels = faces
    drawn = np.random.default_rng(2).integers(len(labels), size=(300, 2))
    rows = [(i, j, int(labels[i] == labels[j]), k % 3) for k, (i, j) in enumerate(drawn)]
    names = [f"person {label}/{n}.png" for n, label in enumerate(labels)]
    (folder / "features.json").write_text(json.dumps({"names": names, "labels": None, "classes": None}))
    (folder / "names.csv").write_text("\n".join(f"{names[i]},{names[j]},{same},{fold}" for i, j, same, fold in rows))
    out = succeeds("evaluate", folder / "features.npy", "--pairs", folder / "names.csv")
    assert "3 folds" in out
    assert "listed" in out
    assert "identification" not in out  # there are no labels
    (folder / "features.json").unlink()
    (folder / "numbers.txt").write_text("\n".join(f"{i} {j} {same}" for i, j, same, _ in rows))
    by_number = succeeds("evaluate", folder / "features.npy", "--pairs", folder / "numbers.txt", "--folds", "3")
    for line in ("area under the ROC curve", "equal error rate"):
        assert [x.split("|")[2] for x in out.splitlines() if line in x] == [
            x.split("|")[2] for x in by_number.splitlines() if line in x
        ]


def test_evaluate_reads_the_pairs_of_lfw(faces, succeeds):
    folder, features, labels = faces
    names = [f"p{label}/p{label}_{n % EACH + 1:04d}.png" for n, label in enumerate(labels)]
    (folder / "features.json").write_text(json.dumps({"names": names, "labels": None, "classes": None}))
    same = [f"p{person}\t{i}\t{j}" for person in range(6) for i, j in ((1, 2), (3, 4))]
    different = [f"p{person}\t1\tp{person + 1}\t2" for person in range(6) for _ in range(2)]
    folds = [[*same[6 * fold : 6 * fold + 6], *different[6 * fold : 6 * fold + 6]] for fold in range(2)]
    (folder / "pairs.txt").write_text("\n".join(["2\t6", *folds[0], *folds[1]]))
    words = ["evaluate", folder / "features.npy", "--pairs", folder / "pairs.txt", "--json", folder / "found.json"]
    assert "12 same and 12 different, listed, in 2 folds" in succeeds(*words)
    position = {name: place for place, name in enumerate(names)}
    pairs = [line.split("\t") for fold in folds for line in fold]
    ends = [(f[0], f[1], f[0], f[2]) if len(f) == 3 else tuple(f) for f in pairs]
    places = [[position[f"{a}/{a}_{int(i):04d}.png"], position[f"{b}/{b}_{int(j):04d}.png"]] for a, i, b, j in ends]
    one, two = np.array(places).T
    scores = (unit(features[one]) * unit(features[two])).sum(1)
    expected = roc_auc_score([len(fields) == 3 for fields in pairs], scores)
    assert json.loads((folder / "found.json").read_text())["verification"]["auc"] == pytest.approx(expected)


def test_evaluate_subtracts_means_and_projects(faces, succeeds):
    folder, features, labels = faces
    words = ["evaluate", folder / "features.npy", folder / "labels.npy", "--json", folder / "found.json"]
    found = []
    for more in ([], ["--subtract-mean"], ["--pca", "3"], ["--pca", "8"]):
        succeeds(*words, *more, "--bootstrap", 0, "--pairs", 60)
        found.append(json.loads((folder / "found.json").read_text()))
    accuracies = [one["verification"]["auc"] for one in found]
    assert len(set(accuracies)) >= 3
    centred = features - features.mean(0)
    vectors = np.linalg.svd(centred, full_matrices=False)[2][:3]
    pairs = draw_all_class_pairs(torch.from_numpy(labels), 60, seed=0)
    assert accuracies[2] == pytest.approx(area(centred @ vectors.T, labels, pairs))
    assert accuracies[3] == pytest.approx(area(centred, labels, pairs))  # all components: only the mean is removed


@pytest.mark.slow
def test_evaluate_names_selection_data(succeeds, tmp_path):
    run = train(tmp_path / "run", selection=0.2, epochs=1)
    assert "Samples: selection data (0.2 of the training data) of 10 classes" in succeeds("evaluate", run.folder)


@pytest.mark.slow
def test_evaluate_open_set_run_measures_unseen_classes(draw_images, succeeds, tmp_path):
    names = {f"{kind}/{n}.png": 40 * kind + 5 * n for kind in range(5) for n in range(4)}
    draw_images(tmp_path / "images", names)
    data = {"name": "image_folder", "path": str(tmp_path / "images"), "size": 8, "split": "class", "held_out": 2}
    run = train(tmp_path / "run", data=data, epochs=1)
    out = succeeds("evaluate", run.folder)
    assert "classification accuracy" not in out
    assert "verification accuracy" in out
    assert "draws of the classes" in out
    assert "Samples: test data of 2 classes, checkpoint of step" in out


def test_evaluate_reads_the_files_of_embed(plain, succeeds, tmp_path):
    succeeds("embed", plain.folder, "--out", tmp_path / "e.safetensors")
    succeeds("embed", plain.folder, "--out", tmp_path / "e2.npy")
    tables = [succeeds("evaluate", tmp_path / name, "--bootstrap", 20) for name in ("e.safetensors", "e2.npy")]
    rows = [[line for line in table.splitlines() if line.startswith("|")] for table in tables]
    assert rows[0] == rows[1]
    assert "identification at rank 1 " in tables[0]


def test_evaluate_omits_pairs_if_every_class_has_one_sample(draw_images, succeeds, tmp_path):
    names = {f"{kind}/{n}.png": 30 * n + shade for kind, shade in (("a", 10), ("b", 120)) for n in range(4)}
    draw_images(tmp_path / "images", names)
    run = train(tmp_path / "run", data={"name": "image_folder", "path": str(tmp_path / "images"), "size": 8}, epochs=1)
    out = succeeds("evaluate", run.folder)
    assert "classification accuracy" in out
    assert "Omitted: verification and identification need a class with two samples" in out
    assert "verification accuracy" not in out
    assert "Fisher" not in out  # S_w of single samples is zero for any features


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["features.npy"], "embeddings without labels need a second .npy file with labels, or --pairs FILE"),
        (["nothing.npy"], "nothing.npy not found"),
        (["features.npy", "nothing.npy"], "nothing.npy not found"),
        (["features.npy", "short.npy"], "labels must be one integer or text for each of the 48 embeddings"),
        (["features.npy", "float.npy"], "labels must be one integer or text for each of the 48 embeddings"),
        (["labels.npy", "labels.npy"], "must be a non-empty matrix (N, d)"),
        (["features.npy", "alone.npy"], "need a class with two samples; every class has one"),
        (["features.npy", "one.npy"], "labels must be labels of at least two classes"),
        (["nan.npy", "labels.npy"], "must be finite, but row 3 is not"),
        (["features.npy", "labels.npy", "--pairs", "100"], "there are 72 same and 1056 different pairs"),
        (["features.npy", "labels.npy", "--pairs", "pairs.txt"], "pairs.txt not found"),
        (["features.npy", "labels.npy", "--pairs", "²"], "² not found"),
        (["features.npy", "labels.npy", "--ranks", "first"], "--ranks must be numbers separated by commas"),
        (["features.npy", "labels.npy", "--ranks", "0"], "ranks must be integers >= 1"),
        (["features.npy", "labels.npy", "--ranks", "5/2"], "--ranks must be numbers separated by commas, not '5/2'"),
        (["features.npy", "labels.npy", "--prior", "0.2"], "--prior must be omitted without --calibrate, not 0.2"),
        (["features.npy", "labels.npy", "--far", "2"], "far must be a rate in (0, 1)"),
        (["features.npy", "labels.npy", "--far", "1/0"], "--far must be numbers separated by commas"),
        (["features.npy", "labels.npy", "--json", "."], "--json must be a file with suffix .json"),
        (["features.npy", "labels.npy", "--mirror"], "--mirror must be omitted unless RUN is the folder of a run"),
        (["features.npy", "labels.npy", "--step", "3"], "--step must be omitted unless RUN is the folder of a run"),
        (
            ["features.npy", "labels.npy", "--device", "cpu"],
            "--device must be omitted unless RUN is the folder of a run",
        ),
        (
            ["features.txt", "labels.npy"],
            "RUN must be the folder of a run of `hypersphere train` (with a config.json) or a ",
        ),
        (["."], "or a file of embeddings (.npy, .safetensors), not '.'"),
    ],
)
def test_evaluate_rejects_invalid_input_without_writing(words, message, faces, fails, monkeypatch):
    folder, features, labels = faces
    np.save(folder / "short.npy", labels[1:])
    np.save(folder / "float.npy", labels + 0.5)
    np.save(folder / "alone.npy", np.arange(len(labels)))
    np.save(folder / "one.npy", np.zeros_like(labels))
    np.save(folder / "nan.npy", np.where(np.arange(len(labels))[:, None] == 3, np.nan, features))
    before = set(folder.iterdir())
    monkeypatch.chdir(folder)
    out = [] if "--json" in words else ["--json", "found.json"]
    assert message in fails(2, "evaluate", *words, *out)
    assert set(folder.iterdir()) == before


class Evil:
    def __reduce__(self):
        return (open, ("ran", "w"))


def test_evaluate_reports_damaged_files_and_never_unpickles(faces, fails, monkeypatch):
    folder, *_ = faces
    monkeypatch.chdir(folder)
    np.save("objects.npy", np.array([Evil()], dtype=object), allow_pickle=True)
    (folder / "pickle.npy").write_bytes(pickle.dumps(Evil()))
    (folder / "half.npy").write_bytes((folder / "features.npy").read_bytes()[:500])
    (folder / "empty.npy").write_bytes(b"")
    (folder / "half.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    for name in ("objects.npy", "pickle.npy", "half.npy", "empty.npy"):
        fails(3, "evaluate", name, "labels.npy")
        fails(3, "evaluate", "features.npy", name)
    fails(3, "evaluate", "half.safetensors", "labels.npy")
    assert not (folder / "ran").exists()
    (folder / "pairs.txt").write_text("0 1 1\n0 nobody 0\n")
    assert "line 2 must name two of the 48 images" in fails(3, "evaluate", "features.npy", "--pairs", "pairs.txt")
    (folder / "features.json").write_text('{"names": ["a"], "labels": null, "classes": null}')
    assert "must have 48 names" in fails(3, "evaluate", "features.npy", "labels.npy")


def test_evaluate_reports_a_damaged_or_unfinished_run(plain, fails, tmp_path):
    broken = shutil.copytree(plain.folder, tmp_path / "broken")
    for weights in broken.rglob("weights.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-1])
    assert "no intact checkpoint" in fails(3, "evaluate", broken)
    shutil.rmtree(broken / "checkpoints")
    assert "has no checkpoint yet" in fails(2, "evaluate", broken)
    (broken / "config.json").write_text("{")
    assert "damaged" in fails(3, "evaluate", broken)


@pytest.mark.parametrize(
    ("features", "labels"),
    [
        (torch.zeros(()), torch.zeros((), dtype=torch.int64)),
        (torch.zeros(6, 2).to(torch.float8_e4m3fn), torch.arange(6)),
        (torch.zeros(6, 2, dtype=torch.int64), torch.arange(6)),
        (torch.zeros(6, 2), torch.arange(5)),
    ],
)
def test_evaluate_reports_tensors_of_a_wrong_shape_or_dtype(tmp_path, command, features, labels):
    save_file({"features": features, "labels": labels}, tmp_path / "e.safetensors")
    code, _, errors = command("evaluate", tmp_path / "e.safetensors")
    assert (code, errors.count("\n")) == (3, 1)
    assert "must hold floating-point features (N, d)" in errors


def test_evaluate_reports_an_invalid_description_file(tmp_path, command):
    np.save(tmp_path / "e.npy", np.zeros((2, 3), dtype=np.float32))
    (tmp_path / "e.json").write_text('{"names": null, "labels": 3, "classes": null}')
    code, _, errors = command("evaluate", tmp_path / "e.npy")
    assert (code, errors) == (3, f"hypersphere: {tmp_path}/e.json: labels must be a list of integers or null, not 3\n")
