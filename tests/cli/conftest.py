import sys

import pytest
from PIL import Image

from hypersphere.cli import commands
from hypersphere.training import Job, minimize
from hypersphere.training.run import Run

SETTINGS = {
    "data": {"name": "digits", "limit": 600},
    "model": {"name": "toy_cnn", "widths": [4, 8], "feature_dim": 6},
    "optimizer": {"name": "adamw", "lr": 0.02},
    "epochs": 8,
}


def train(folder, **settings):
    """A small run, by the library alone."""
    job = Job.of(SETTINGS | settings)
    assembly = job.build()
    minimize(
        assembly.objective.train(),
        assembly.batches,
        epochs=job.epochs,
        optimizer=assembly.optimizer,
        scheduler=assembly.scheduler,
        on_step=lambda progress: assembly.after_step(progress.step),
    )
    run = Run.create(folder, job)
    run.checkpoints().save(assembly.scheduler.done, {"objective": assembly.objective})
    return run


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs") / "plain")


@pytest.fixture(scope="session")
def tanh(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs") / "tanh", operator={"name": "tanh"}, epochs=1)


@pytest.fixture(scope="session")
def rotated(tmp_path_factory):
    """A run with rotated layers, a regulariser, and an objective that is not softmax."""
    return train(
        tmp_path_factory.mktemp("runs") / "rotated",
        rotation="cayley",
        head={"name": "a_softmax", "m": 2},
        regularizer="mhe",
        epochs=1,
    )


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
    """Run the command that is to fail with a code, in one line and without output; return that line."""

    def run(expected, *words):
        code, out, errors = command(*words)
        assert (code, out) == (expected, ""), errors
        assert errors.startswith("hypersphere: ")
        assert errors.count("\n") == 1
        return errors

    return run


@pytest.fixture
def draw_images():
    """Write pictures, each of one grey, under their names below a folder."""

    def draw(folder, greys, size=(10, 12)):
        for name, grey in greys.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", size, grey).save(path)
        return folder

    return draw
