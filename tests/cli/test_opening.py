"""All commands open a run in the same way: its precision, one device, the requested checkpoint."""

import json
import shutil
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from hypersphere import data, report
from hypersphere.cli import opening
from hypersphere.cli.opening import LoadedRun, open_run
from hypersphere.data import MissingData
from hypersphere.training import Config, Run, build_experiment

from .conftest import train
from .pages import cells, logged


@pytest.fixture(scope="module")
def half(runs):
    """A run in bfloat16, its components, and the features of the test data in bfloat16."""
    run = Run.open(runs / "half")
    experiment = run.experiment()
    x = experiment.data.validation.inputs.float() / 255
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        rounded = experiment.network(x).float()
    with torch.no_grad():
        exact = experiment.network(x)
    assert not torch.equal(rounded, exact)
    return run, experiment, rounded


@pytest.mark.slow
def test_commands_evaluate_a_bfloat16_run_in_bfloat16(half, runs, succeeds, tmp_path):
    run, _, features = half
    expected = logged(runs, "half")
    succeeds("evaluate", run.folder, "--json", tmp_path / "e.json", "--bootstrap", 0)
    found = json.loads((tmp_path / "e.json").read_text())
    assert 100 * found["classification"]["accuracy"] == pytest.approx(expected)
    succeeds("attack", run.folder, "--epsilon", "0.02", "--json", tmp_path / "a.json")
    attacked = json.loads((tmp_path / "a.json").read_text())
    assert 100 * attacked["clean"] == pytest.approx(expected)
    succeeds("report", run.folder, "--out", tmp_path / "r.html")
    assert cells((tmp_path / "r.html").read_text(encoding="utf-8"))[0][1] == f"{expected:.2f}"
    succeeds("embed", run.folder, "--out", tmp_path / "e.safetensors")
    assert torch.equal(load_file(tmp_path / "e.safetensors")["features"], features)
    result = report.run_result(run, run.experiment())
    assert torch.equal(result.features, features)


def test_attack_on_a_bfloat16_run_uses_bfloat16_gradients(half, succeeds, tmp_path):
    run, experiment, _ = half
    x = (experiment.data.validation.inputs.float() / 255).requires_grad_()
    y = experiment.data.validation.labels

    def scores(inputs):
        with torch.autocast("cpu", torch.bfloat16):
            features = experiment.network(inputs).float()
        return experiment.head.scores(features)

    (slope,) = torch.autograd.grad(torch.nn.functional.cross_entropy(scores(x), y), x)
    with torch.no_grad():
        right = (scores((x + 0.02 * slope.sign()).clamp(0, 1)).argmax(1) == y).double().mean()
    succeeds("attack", run.folder, "--epsilon", "0.02", "--json", tmp_path / "a.json")
    found = json.loads((tmp_path / "a.json").read_text())["accuracies"][0]
    assert found == pytest.approx(float(right), abs=0.011)  # rounding depends on the batch size


def test_export_and_fold_compare_a_bfloat16_run_in_float32(runs, succeeds, tmp_path):
    out = succeeds("export", runs / "half", "--to", "torch", "--out", tmp_path / "m.pt2")
    assert ", in float32; described in m.pt2.json" in out
    turned = train(tmp_path / "turned", rotation="cayley", precision="bfloat16", epochs=1)
    assert "5 rotated" in succeeds("fold", turned.folder)
    assert Run.open(turned.folder / "folded").config.precision == "bfloat16"


@pytest.fixture
def twice(plain, tmp_path):
    """A run with two checkpoints that have different weights."""
    folder = shutil.copytree(plain.folder, tmp_path / "twice")
    run = Run.open(folder)
    experiment = run.experiment()
    first = run.checkpoints().steps()[-1]
    for path in (folder / "checkpoints").iterdir():
        if path.name != f"step-{first:08d}":
            shutil.rmtree(path)
    with torch.no_grad():
        for parameter in experiment.objective.parameters():
            parameter.mul_(-1)
    run.checkpoints().save(first + 5, {"objective": experiment.objective})
    return run, first, first + 5


@pytest.mark.slow
def test_step_selects_a_checkpoint(twice, plain, succeeds, fails, tmp_path):
    run, first, last = twice
    found = {}
    for step in (None, first, last):
        words = [] if step is None else ["--step", step]
        succeeds("evaluate", run.folder, *words, "--json", tmp_path / "e.json", "--bootstrap", 0)
        found[step] = json.loads((tmp_path / "e.json").read_text())
        succeeds("attack", run.folder, *words, "--limit", "50", "--json", tmp_path / "a.json")
        assert json.loads((tmp_path / "a.json").read_text())["step"] == (step or last)
        succeeds("embed", run.folder, *words, "--out", tmp_path / f"{step}.npy")
        succeeds("export", run.folder, *words, "--to", "torch", "--out", tmp_path / f"{step}.pt2")
    assert found[None] == found[last] != found[first]
    assert (found[first]["step"], found[last]["step"]) == (first, last)
    for form in (".npy", ".pt2"):
        assert (tmp_path / f"{None}{form}").stat().st_size == (tmp_path / f"{last}{form}").stat().st_size
    assert (tmp_path / "None.npy").read_bytes() == (tmp_path / f"{last}.npy").read_bytes()
    assert (tmp_path / "None.npy").read_bytes() != (tmp_path / f"{first}.npy").read_bytes()
    assert f"step must be one of {first}, {last}, not 7" in fails(2, "evaluate", run.folder, "--step", 7)


def test_step_reports_a_damaged_checkpoint(twice, fails, tmp_path):
    run, first, _ = twice
    weights = run.folder / "checkpoints" / f"step-{first:08d}" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert f"step-{first:08d} is damaged" in fails(3, "evaluate", run.folder, "--step", first)
    shutil.rmtree(run.folder / "checkpoints")
    assert "has no checkpoint yet" in fails(2, "evaluate", run.folder, "--step", first)


def test_open_run_uses_the_last_intact_checkpoint_of_a_step(twice):
    run, _, last = twice
    again = run.folder / "checkpoints" / f"step-{last:08d}.2"
    shutil.copytree(run.folder / "checkpoints" / f"step-{last:08d}", again)
    assert open_run(run.folder, step=last).step == last
    (again / "weights.safetensors").unlink()
    assert open_run(run.folder, step=last).step == last


def test_fold_keeps_the_step_of_the_weights(rotated, succeeds, monkeypatch, tmp_path):
    run = Run.open(shutil.copytree(rotated.folder, tmp_path / "run"))
    step = run.checkpoints().steps()[-1]
    inputs = opening.probe_inputs

    def later(experiment):
        run.checkpoints().save(step + 9, {"objective": experiment.objective})  # training continues in the meantime
        return inputs(experiment)

    monkeypatch.setattr(opening, "probe_inputs", later)
    succeeds("fold", run.folder, "--out", tmp_path / "plain")
    assert Run.open(tmp_path / "plain").checkpoints().steps() == [step]
    succeeds("fold", run.folder, "--out", tmp_path / "later", "--step", step + 9)
    assert Run.open(tmp_path / "later").checkpoints().steps() == [step + 9]


def test_embed_appends_the_features_of_mirrored_images():
    source = data.TensorSource(torch.rand(9, 1, 2, 2), torch.zeros(9, dtype=torch.int64), ("a",))

    def embed(images, batch_size):
        assert batch_size == 4
        return torch.stack([images[index].flatten() for index in range(len(images))]), images.labels

    experiment = SimpleNamespace(embed=embed, data=data.DataSplit(source), input_shape=(1, 2, 2))
    features, _ = LoadedRun(SimpleNamespace(), experiment, 1).embed(source, mirror=True, batch=4)
    assert torch.equal(features, torch.cat([source.inputs.flatten(1), source.inputs.flip(3).flatten(1)], dim=1))


@pytest.mark.parametrize("name", ["evaluate", "embed", "report", "cite"])
def test_commands_say_that_the_folder_of_another_library_is_not_a_run(name, fails, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    assert "must be the folder of a run of `hypersphere train`" in fails(2, name, tmp_path)


@pytest.mark.slow
def test_commands_leave_out_broken_files_if_the_run_skips_them(photos, succeeds, tmp_path):
    folder = shutil.copytree(photos, tmp_path / "photos")
    for person in folder.iterdir():
        (person / "2.png").write_text("no image")
    split = {"name": "image_folder", "path": str(folder), "size": 8, "split": "class", "held_out": 10}
    settings = {"broken_files": "skip", "workers": 1, "epochs": 1}
    held_out = build_experiment(Config.of({"data": split, **settings})).data.validation
    names = [held_out.name(index) for index in range(len(held_out))]
    # Pairs of images that follow each other.
    pairs = [f"{one} {two} {int(one.split('/')[0] == two.split('/')[0])}" for one, two in pairwise(names)]
    (tmp_path / "pairs.txt").write_text("\n".join(pairs))
    run = train(tmp_path / "run", data={**split, "pairs": str(tmp_path / "pairs.txt")}, **settings)
    assert len(run.experiment().embed()[0]) == 50
    words = ["--bootstrap", 0, "--pca", 2, "--mirror", "--folds", 3]
    succeeds("evaluate", run.folder, "--json", tmp_path / "e.json", *words)
    found = json.loads((tmp_path / "e.json").read_text())
    assert found["samples"] == 50
    assert (found["verification"]["same"], found["verification"]["different"]) == (30, 9)
    succeeds("embed", run.folder, "--out", tmp_path / "e.npy", "--batch", "8")
    written = json.loads((tmp_path / "e.json").read_text())["names"]
    assert written == [name for name in names if not name.endswith("2.png")]
    succeeds("report", run.folder)


@pytest.mark.slow
def test_landscape_leaves_out_broken_files_if_the_run_skips_them(photos, succeeds, tmp_path):
    folder = shutil.copytree(photos, tmp_path / "photos")
    split = {"name": "image_folder", "path": str(folder), "size": 8, "split": "sample", "held_out": 0.3}
    held_out = build_experiment(Config.of({"data": split})).data.validation
    (folder / held_out.name(1)).write_text("no image")
    run = train(tmp_path / "run", data=split, broken_files="skip", epochs=1)
    succeeds("report", run.folder, "--landscape")
    assert ">Landscape<" in (run.folder / "report.html").read_text(encoding="utf-8")


def test_landscape_rejects_a_run_that_is_tested_on_other_classes(fails, tmp_path):
    run = train(tmp_path / "run", data={"name": "generated", "classes": 8, "open_set": True}, epochs=1)
    problem = f"a landscape needs a run that is tested on its training classes, not {run.folder}"
    assert problem in fails(2, "report", run.folder, "--landscape")


@pytest.mark.parametrize("name", ["evaluate", "embed", "attack", "report", "inspect"])
def test_commands_accept_a_device(name, plain, succeeds, fails, monkeypatch, tmp_path):
    more = {"embed": ["--out", "e.npy"], "report": ["--out", "r.html"], "evaluate": ["--bootstrap", 0]}
    monkeypatch.chdir(tmp_path)
    out = more.get(name, [])
    succeeds(name, plain.folder, "--device", "cpu", *out)
    assert "device 'toaster' cannot be used" in fails(2, name, plain.folder, "--device", "toaster", *out)
    assert "device 'meta' cannot be used" in fails(2, name, plain.folder, "--device", "meta", *out)


def test_commands_on_the_network_work_without_the_data(rotated, succeeds, command, tmp_path, monkeypatch):
    def gone(*_):
        raise MissingData("digits not found")

    monkeypatch.setitem(data.DATA, "digits", gone)
    assert command("evaluate", rotated.folder)[0] == 2
    succeeds("inspect", rotated.folder)
    succeeds("fold", rotated.folder, "--out", tmp_path / "folded")
    succeeds("export", tmp_path / "folded", "--to", "torch", "--out", tmp_path / "m.pt2")
    Image.new("L", (8, 8), 90).save(tmp_path / "one.png")
    (tmp_path / "images").mkdir()
    (tmp_path / "one.png").rename(tmp_path / "images" / "one.png")
    succeeds("embed", rotated.folder, tmp_path / "images", "--out", tmp_path / "e.npy")


def test_run_and_experiment_have_short_reprs(plain):
    assert repr(plain) == f"Run({str(plain.folder)!r}: toy_cnn with softmax on digits; last checkpoint: step 80)"
    experiment = plain.experiment(device="cpu")
    size = f"{sum(parameter.numel() for parameter in experiment.network.parameters()):,}"
    examples = "600 examples of 10 classes, 500 validation examples of the same classes"
    words = f"toy_cnn with 6 features and {size} parameters, softmax, {examples}, 80 steps on cpu"
    assert repr(experiment) == f"Experiment(digits: {words})"
