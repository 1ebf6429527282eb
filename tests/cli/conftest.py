import sys

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from hypersphere.cli import commands
from hypersphere.training import Config, Run, Trainer, build_experiment

SETTINGS = {
    "data": {"name": "digits", "limit": 600},
    "model": {"name": "toy_cnn", "widths": [4, 8], "feature_dim": 6},
    "optimizer": {"name": "adamw", "lr": 0.02},
    "epochs": 8,
}

SMALL = [
    "--epochs=4", "--batch-size=50", "--data.limit=300", "--model=toy_cnn", "--model.widths=[4,4]",
    "--optimizer.lr=0.02", "--log-every=2",
]  # fmt: skip
SIGMOID = ["--operator=sphere", "--operator.angular=sigmoid", "--operator.learn_k=filter", "--model.feature_dim=5"]


def train(folder, **settings):
    """Train a small run through the Python API."""
    experiment = build_experiment(Config.of(SETTINGS | settings))
    run = Run.of(folder, experiment)
    assert Trainer(experiment, run).train()
    return run


def invoke(*words):
    """Run the command in this process, for fixtures that all tests share."""
    done = CliRunner().invoke(commands.app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs") / "plain")


@pytest.fixture(scope="session")
def tanh(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs") / "tanh", operator={"name": "tanh"}, epochs=1)


@pytest.fixture(scope="session")
def rotated(tmp_path_factory):
    """A run with rotated layers, a regulariser and A-Softmax."""
    return train(
        tmp_path_factory.mktemp("runs") / "rotated",
        rotation="cayley",
        head={"name": "a_softmax", "m": 2},
        regularizers="mhe",
        epochs=1,
    )


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """A folder of grey images of 20 people, 6 of each: a random pattern per person with noise."""
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for person in range(20):
        pattern = rng.uniform(60, 200, size=(8, 8))
        (folder / f"person-{person:02d}").mkdir()
        for number in range(6):
            pixels = (pattern + 35 * rng.normal(size=(8, 8))).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"person-{person:02d}" / f"{number}.png")
    return folder


@pytest.fixture(scope="session")
def people(photos, tmp_path_factory):
    """A run that was trained on ten of these people; the other ten are held out."""
    data = {"name": "image_folder", "path": str(photos), "size": 8, "split": "class", "held_out": 10}
    return train(tmp_path_factory.mktemp("runs") / "people", data=data, epochs=3)


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command in this process; return its code, its output and its errors."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["hypersphere", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            commands.main()
        return ended.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture
def succeeds(command):
    def run(*words):
        code, out, errors = command(*words)
        assert code == 0, errors
        return out

    return run


@pytest.fixture
def fails(command):
    """Run a command that must fail with a code, one line of error and no output; return that line."""

    def run(expected, *words):
        code, out, errors = command(*words)
        assert (code, out) == (expected, ""), errors
        assert errors.startswith("hypersphere: ")
        assert errors.count("\n") == 1
        return errors

    return run


@pytest.fixture
def draw_images():
    """Write uniform grey images under the given names in a folder."""

    def draw(folder, greys, size=(10, 12)):
        for name, grey in greys.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", size, grey).save(path)
        return folder

    return draw


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Runs of `hypersphere train`: two that differ in their seed, one with another operator, and one in bfloat16."""
    root = tmp_path_factory.mktemp("runs")
    for name, words in (
        ("softmax-0", []),
        ("softmax-1", ["--seed=1"]),
        ("sigmoid", SIGMOID),
        ("half", ["--precision=bfloat16", "--model.feature_dim=8"]),
    ):
        invoke("train", "--out", root / name, *SMALL, *words)
    return root


@pytest.fixture(scope="session")
def page(runs):
    invoke("report", runs / "sigmoid", "--landscape")
    return runs / "sigmoid" / "report.html"


@pytest.fixture(scope="session")
def comparison(runs, tmp_path_factory):
    page = tmp_path_factory.mktemp("pages") / "all.html"
    invoke("report", *(runs / name for name in ("softmax-0", "softmax-1", "sigmoid")), "--out", page)
    return page
