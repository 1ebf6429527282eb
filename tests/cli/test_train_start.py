import functools
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from hypersphere.training import Config, Run, Trainer, build_experiment
from hypersphere.training.config import with_absolute_paths

from .trained import SMALL, SMALL_CONFIG, steps_in, weights


@pytest.fixture
def train(command):
    return functools.partial(command, "train")


@pytest.fixture
def two_classes(tmp_path, draw_images):
    """Images of two classes in the size of digits."""
    greys = {f"photos/{kind}/{n}.png": 60 * kind + 10 * n for kind in (1, 2) for n in range(9)}
    draw_images(tmp_path, greys, size=(8, 8))
    return ["--data=image_folder", "--data.path=photos", "--model=mlp", "--model.widths=[8]", "--batch-size=8"]


# --- initial weights


def first_weights(train, monkeypatch, *words):
    """Return the weights of a run before its first step, and its output."""
    seen = {}

    def look(trainer):
        seen.update({name: value.clone() for name, value in trainer.experiment.objective.state_dict().items()})
        trainer.finished = True

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train", look)
        code, out, errors = train(*words)
    assert code == 0, errors
    return seen, out


def test_train_from_loads_the_weights_of_a_run(tmp_path, train, monkeypatch):
    assert train("--out", tmp_path / "first", *SMALL)[0] == 0
    words = ["--out", tmp_path / "second", *SMALL, "--seed=4", "--from", tmp_path / "first"]
    begun, out = first_weights(train, monkeypatch, *words)
    trained = weights(tmp_path / "first")
    assert begun.keys() == trained.keys()
    assert all(torch.equal(begun[name], value) for name, value in trained.items())
    assert out.startswith(f"from {tmp_path / 'first'}: loaded 5 tensors (network.mean, ")
    assert "randomly initialised" not in out
    assert Run.open(tmp_path / "second").weights == str(tmp_path / "first")


def test_train_resume_reads_initial_weights_only_without_a_checkpoint(tmp_path, train, monkeypatch):
    assert train("--out", tmp_path / "first", *SMALL)[0] == 0
    words = ["--out", tmp_path / "second", "--resume=auto"]
    begun, _ = first_weights(train, monkeypatch, *words, *SMALL, "--from", tmp_path / "first")
    again, out = first_weights(train, monkeypatch, *words)
    assert all(torch.equal(begun[name], value) for name, value in again.items())
    assert out.startswith(f"from {tmp_path / 'first'}: loaded ")
    code, _, errors = train(*words, "--from", tmp_path / "other")
    assert code == 2
    assert f"--from was {tmp_path / 'first'} and is {tmp_path / 'other'}" in errors
    assert train(*words)[0] == 0
    (tmp_path / "first").rename(tmp_path / "away")
    code, out, _ = train(*words)
    assert code == 0
    assert "resuming from step 10 of 10" in out


def test_train_from_file_with_and_without_rotation(tmp_path, train, monkeypatch, succeeds):
    turned = ["--rotation=cayley", "--rotation.output=true", "--seed=5"]
    assert train("--out", tmp_path / "turned", *SMALL, *turned)[0] == 0
    succeeds("fold", tmp_path / "turned", "--out", tmp_path / "plain")
    file = tmp_path / "plain" / "model.safetensors"
    begun, _ = first_weights(train, monkeypatch, "--out", tmp_path / "a", *SMALL, "--from", file)
    assert all(torch.equal(begun[name], value) for name, value in load_file(file).items())
    words = ["--out", tmp_path / "b", *SMALL, *turned, "--from", file]
    begun, _ = first_weights(train, monkeypatch, *words)
    original = begun["network.body.layers.0.parametrizations.weight.original"]
    assert torch.equal(original, load_file(file)["network.body.layers.0.weight"])
    code, out, _ = train("--out", tmp_path / "c", *SMALL, "--from", tmp_path / "turned", "--dry-run")
    assert code == 0
    assert "randomly initialised: network.body.layers.0.weight" in out
    assert "to load rotated layers, fold that run first (hypersphere fold)" in out


def test_train_from_keeps_a_new_head_for_other_classes(tmp_path, train, monkeypatch, two_classes):
    monkeypatch.chdir(tmp_path)
    assert train("--out", tmp_path / "first", *SMALL)[0] == 0
    code, out, errors = train("--out", "second", *two_classes, "--epochs=1", "--from", "first")
    assert code == 0, errors
    assert "randomly initialised: head.weight; not loaded: head.weight (10×8, not 2×8)" in out.splitlines()[0]


def test_train_from_rejects_invalid_sources(tmp_path, fails, train):
    def refuse(code, source, *words):
        error = fails(code, "train", "--out", tmp_path / "run", *SMALL, "--from", source, *words)
        assert not (tmp_path / "run").exists()
        return error

    assert "initial weights (--from) must be the folder of a run or an existing .safetensors file" in refuse(
        2, tmp_path
    )
    assert "initial weights (--from) must be the folder of a run or an existing .safetensors file" in refuse(
        2, tmp_path / "nowhere"
    )
    Run.create(tmp_path / "empty", SMALL_CONFIG)
    assert "has no checkpoint yet" in refuse(2, tmp_path / "empty")
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    assert "is not a valid safetensors file" in refuse(3, tmp_path / "broken.safetensors")
    save_file({"other.weight": torch.ones(3)}, tmp_path / "other.safetensors")
    assert "none of the initial weights matches: the file has other.weight" in refuse(2, tmp_path / "other.safetensors")


# --- dry run


def test_dry_run_names_selection_examples_and_a_single_step(tmp_path, train):
    out = train("--out", tmp_path / "run", *SMALL, "--batch-size=64", "--selection=0.2", "--dry-run")[1]
    assert re.search("^# 5[0-9] training examples of shape 1×8×8, 1[0-9] selection examples, 10 classes$", out, re.M)
    assert "# 1 step per epoch, 2 in total" in out.splitlines()


def test_train_suggests_how_to_read_a_folder(tmp_path, fails, monkeypatch):
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path)
    error = fails(2, "train", "--data", "photos")
    assert error.endswith("not the folder 'photos'; did you mean --data image_folder --data.path=photos?\n")
    assert error == fails(2, "train", "--data", "photos", "--data-root", tmp_path)
    assert "data.name must be one of digits," in fails(2, "train", "--data", "pictures")


def test_dry_run_writes_nothing_and_prints_valid_settings(tmp_path, train, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, "--head=arcface", "--head.m=0.2", "--optimizer.lr=1e-5"]
    code, out, errors = train("--out=run", *words, "--dry-run")
    assert (code, errors) == (0, "")
    assert list(tmp_path.iterdir()) == []
    for line in (
        "# 70 training examples of shape 1×8×8, 500 test examples, 10 classes",
        "# 5 steps per epoch, 10 in total",
        "# network: 520 parameters, 520 trained, 8 features",
        "# head: 80 parameters, 80 trained",
        "# run: a new run",
    ):
        assert line in out.splitlines()
    (tmp_path / "job.yaml").write_text(out)
    assert train("--out=run", *words)[0] == 0
    assert train("--out=again", "--config=job.yaml")[0] == 0
    assert Run.open("again").config == Run.open("run").config
    assert train("--out=run", *words, "--dry-run")[0] == 2
    _, out, _ = train("--out=run", "--resume=auto", "--dry-run")
    assert out.splitlines()[-1] == "# run: would continue from step 10"


def test_dry_run_prints_changed_settings_first(tmp_path, train):
    out = train("--out", tmp_path / "run", *SMALL, "--seed=0", "--head=arcface", "--dry-run")[1]
    lines = out.splitlines()
    assert lines[1] == ' "data": {"name": "digits", "limit": 70},'
    assert lines[3] == ' "head": {"name": "arcface"},'
    assert '"seed": 0' in out.partition('"selection": 0.0, ')[2]
    assert len(lines) < 30


def test_train_keeps_the_last_checkpoints(tmp_path, train, fails):
    assert train("--out", tmp_path / "run", *SMALL, "--save-every=0", "--keep=2")[0] == 0
    assert steps_in(tmp_path / "run") == [9, 10]
    assert "keep must be an integer >= 1, not 0" in fails(2, "train", "--out", tmp_path / "other", "--keep=0")


# --- a folder of images


@pytest.mark.parametrize("root", [True, False])
def test_train_on_images_works_from_any_directory(root, tmp_path, train, succeeds, monkeypatch, two_classes):
    below = ["--data-root", tmp_path] if root else []
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere" if root else tmp_path)
    code, _, errors = train("--out", tmp_path / "run", *two_classes, "--epochs=1", *below)
    assert code == 0, errors
    assert Run.open(tmp_path / "run").config.data.options["path"] == ("photos" if root else str(tmp_path / "photos"))
    assert train("--out", tmp_path / "run", "--resume=auto", *two_classes, "--epochs=1", *below)[0] == 0
    monkeypatch.chdir("/")
    succeeds("evaluate", tmp_path / "run", *below)
    assert train("--out", tmp_path / "run", "--resume=auto", *below)[0] == 0


def test_run_made_in_python_can_be_opened_from_any_directory(tmp_path, train, succeeds, monkeypatch, two_classes):
    monkeypatch.chdir(tmp_path)
    settings = {"data": {"name": "image_folder", "path": "photos"}, "model": {"name": "mlp", "widths": [8]}}
    experiment = build_experiment(Config.of({**settings, "batch_size": 8, "epochs": 1}))
    assert Trainer(experiment, Run.of("python", experiment)).train()
    assert train("--out", "command", *two_classes, "--epochs=1")[0] == 0
    assert Run.open("python").config == Run.open("command").config
    assert Run.open("python").config.data.options == {"path": str(tmp_path / "photos")}
    monkeypatch.chdir("/")
    succeeds("evaluate", tmp_path / "python")


@pytest.mark.parametrize(
    ("data", "changed"),
    [
        (
            {"name": "image_list", "path": "a.csv", "validation": "b.csv", "images": "photos"},
            {"path", "validation", "images"},
        ),
        ({"name": "shards", "path": "shards/{000..003}.tar"}, {"path"}),
        ({"name": "hf_dataset", "path": "cifar10", "validation": "photos"}, set()),
        ({"name": "recordio", "path": "photos", "validation": "photos"}, {"path"}),
        ({"name": "image_folder", "path": "photos", "pairs": "nowhere.txt", "size": 8}, {"path"}),
    ],
    ids=lambda value: value.get("name", "") if isinstance(value, dict) else "",
)
def test_absolute_paths_are_those_that_exist(data, changed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).touch()
    options = with_absolute_paths(Config.of({"data": data})).data.options
    for key, value in options.items():
        assert value == (str(tmp_path / data[key]) if key in changed else data[key])
