import math
import time

import pytest
import torch

from hypersphere.energy import hyperspherical_energy
from hypersphere.training import Job, embed, predict
from hypersphere.training.job_run import Run
from hypersphere.training.measure import accuracy, layer_energies
from hypersphere.training.session import Session

SMALL = {
    "data": {"name": "digits", "limit": 70},
    "model": {"name": "mlp", "widths": [8]},
    "batch_size": 16,
    "epochs": 3,
}
CONVOLUTIONS = {"model": {"name": "embedding_cnn", "widths": [4, 4], "feature_dim": 4}}
JOBS = {
    "plain": {},
    "a row too many for norms of batches": {
        "data": {"name": "digits", "limit": 81},
        "model": {"name": "mlp", "widths": [8], "norm": "batch"},
    },
    "moved images, norms, annealing": {
        **CONVOLUTIONS,
        "augment": {"shift": 1, "mirror": True},
        "head": {"name": "a_softmax", "annealing": {"start": 10.0, "gamma": 1.0, "end": 0.0}},
        "optimizer": {"name": "sgd", "lr": 0.05, "nesterov": True},
    },
    "radius and angle learned": {
        **CONVOLUTIONS,
        "operator": {"name": "tanh", "angular": "sigmoid", "learn_k": "layer", "learn_radius": "filter"},
        "schedule": "steps",
    },
    "random projections": {"regularizer": {"name": "comhe", "projection": {"name": "random", "dim": 4, "every": 3}}},
    "learned projections": {"regularizer": {"name": "comhe", "projection": {"name": "adversarial", "dim": 4}}},
    "drawn neurons": {"regularizer": {"name": "mhe", "batch": 4}, "head": "sphereface_plus"},
    "spectral": {"regularizer": "srip", "head": "adaface"},
    "stochastic rotation": {"rotation": {"name": "stochastic", "every": 4}, "optimizer": {"name": "adam", "lr": 0.01}},
    "descent on the group": {"rotation": "descent", "optimizer": {"name": "sgd", "lr": 0.01, "rotation_lr": 0.1}},
    "penalty": {"rotation": "penalized", "precision": "bfloat16"},
}


def session(folder, settings, **more):
    job = Job.of({**SMALL, **settings})
    run = Run.open(folder) if (folder / "config.json").exists() else Run.create(folder, job)
    return Session(run, job.build(), **more)


class After:
    """Requests a stop after a number of steps."""

    def __init__(self, steps):
        self.left = steps

    def __call__(self):
        self.left -= 1
        return self.left <= 0


def lines(run):
    """Return the logged lines of a run without times."""
    timed = ("seconds", "examples_per_second")
    return [{key: value for key, value in line.items() if key not in timed} for line in run.metrics()]


def bits(folder):
    checkpoint = Run.open(folder).checkpoints(on_damage=pytest.fail).latest()
    return checkpoint.weights()["objective"], checkpoint.state()


def assert_same(a, b, name=""):
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), name
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), name
        for key in a:
            if key != "seconds":
                assert_same(a[key], b[key], f"{name}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), name
        for at, pair in enumerate(zip(a, b, strict=True)):
            assert_same(*pair, f"{name}[{at}]")
    else:
        assert a == b or (a != a and b != b), name


@pytest.mark.parametrize("name", JOBS)
def test_session_stopped_and_resumed_gives_identical_results(name, tmp_path):
    """Stopped within the first epoch, between two epochs and within the last, each time with new objects."""
    assert session(tmp_path / "whole", JOBS[name]).train()
    parts = tmp_path / "parts"
    for steps, reached in ((3, 3), (2, 5), (7, 12)):
        torch.manual_seed(steps)  # the initial random state of a new process must not matter
        stopped = session(parts, JOBS[name], stop=After(steps))
        stopped.resume()
        assert not stopped.train()
        assert stopped.progress.step == reached
    last = session(parts, JOBS[name])
    assert last.resume().step == 12
    assert last.train()
    assert last.finished
    for one, other in zip(bits(parts), bits(tmp_path / "whole"), strict=True):
        assert_same(one, other)
    assert lines(Run.open(parts)) == lines(Run.open(tmp_path / "whole"))


def test_session_restarts_without_a_checkpoint_and_skips_a_finished_run(tmp_path):
    first = session(tmp_path, {})
    first.run.log({"kind": "step", "step": 1})
    assert first.resume() is None
    assert first.run.metrics() == []
    assert first.train()
    before = sorted((tmp_path / "checkpoints").iterdir())
    again = session(tmp_path, {})
    assert again.resume().step == 15
    assert again.measured["epoch"] == 3
    assert again.train()
    assert sorted((tmp_path / "checkpoints").iterdir()) == before
    assert len([line for line in again.run.metrics() if line["kind"] == "epoch"]) == 3


def test_session_logs_correct_metrics(tmp_path):
    logged, seen = [], []
    one = session(tmp_path, {}, log=logged.append, log_every=4, on_step=lambda s: seen.append(s.progress.step))
    rates = []
    step = one.assembly.optimizer.step
    one.assembly.optimizer.step = lambda: (
        rates.append(one.assembly.optimizer.optimizers[0].param_groups[0]["lr"]),
        step(),
    )
    one.train()
    steps = [line for line in logged if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1, 4, 8, 12]
    assert [line["epoch"] for line in steps] == [0, 0, 1, 2]
    assert [line["rate"] for line in steps] == [rates[line["step"] - 1] for line in steps]
    assert all(line["examples_per_second"] > 0 and math.isfinite(line["loss"]) for line in steps)
    epochs = [line for line in logged if line["kind"] == "epoch"]
    assert [(line["epoch"], line["step"]) for line in epochs] == [(1, 5), (2, 10), (3, 15)]
    features, labels = embed(one.assembly.network, one.assembly.test_batches())
    right = (predict(one.assembly.head, features) == labels).double().mean().item()
    assert epochs[-1]["test_accuracy"] == pytest.approx(right)
    assert epochs[-1]["energy"].keys() == {"layers.0", "head"}
    assert epochs[-1]["energy"]["head"] == pytest.approx(hyperspherical_energy(one.assembly.head.weight).item())
    half = hyperspherical_energy(one.assembly.network.body.layers[0].weight, half_space=True)
    assert epochs[-1]["energy"]["layers.0"] == pytest.approx(half.item())
    assert seen == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 10, 11, 12, 13, 14, 15, 15]


@pytest.mark.parametrize(
    ("every", "cost", "expected"),
    [
        (0.0, 1.0, list(range(1, 16))),
        (1e9, 0.0, [5, 10, 15]),  # saving is free, so after each epoch
        (1e9, 0.09, [5, 10, 15]),  # 2 % of 4.5 seconds; an epoch takes 5
        (1e9, 0.11, [5, 15]),  # the end of the first epoch is always saved
        (3.0, 1.0, [3, 6, 9, 12, 15]),
    ],
)
def test_session_saves_at_the_requested_times_and_at_the_end(every, cost, expected, tmp_path, monkeypatch):
    """With a simulated clock: a step takes one second, a save `cost`, and everything else nothing."""
    now, saved = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    one = session(tmp_path, {}, save_every=every)

    def passes(seconds):
        now[0] += seconds

    step = one.assembly.optimizer.step
    monkeypatch.setattr(one.assembly.optimizer, "step", lambda: (step(), passes(1.0)))
    monkeypatch.setattr(one.checkpoints, "save", lambda at, *more: (saved.append(at), passes(cost)))
    one.train()
    assert saved == expected
    assert one.saved == 15


def test_session_never_saves_diverged_weights(tmp_path):
    one = session(tmp_path, {}, save_every=0)

    def spoil(running):
        if running.progress.step == 3:
            with torch.no_grad():
                running.assembly.head.weight[0] = float("nan")

    one.on_step = spoil
    with pytest.raises(FloatingPointError, match="training diverged before step 4; a smaller learning rate may help"):
        one.train()
    assert one.checkpoints.latest().step == 2
    other = session(tmp_path / "other", {})
    with torch.no_grad():
        other.assembly.network.body.layers[0].weight.fill_(3e38)
    with pytest.raises(FloatingPointError, match="the features or scores of test data are not finite"):
        accuracy(other.assembly.objective, other.assembly.test_batches())


def test_session_keeps_frozen_modules_in_evaluation_mode(tmp_path):
    settings = {"model": {"name": "mlp", "widths": [8], "norm": "batch"}}
    one = session(tmp_path, settings)
    frozen = next(module for module in one.assembly.network.modules() if isinstance(module, torch.nn.BatchNorm1d))
    one.assembly.objective.train()
    frozen.eval()
    accuracy(one.assembly.objective, one.assembly.test_batches())
    assert not frozen.training
    assert one.assembly.objective.training
    assert one.assembly.head.training
    one.assembly.objective.eval()
    accuracy(one.assembly.objective, one.assembly.test_batches())
    assert not one.assembly.objective.training


def test_session_compile_keeps_names_in_checkpoints(tmp_path, monkeypatch):
    compiled = torch.nn.Module.compile
    asked = []

    def light(module):
        asked.append(type(module).__name__)
        compiled(module, backend="aot_eager")

    monkeypatch.setattr(torch.nn.Module, "compile", light)
    assert session(tmp_path / "plain", {"epochs": 1}).train()
    assert session(tmp_path / "compiled", {"epochs": 1, "compile": True}).train()
    assert asked == ["Network"]
    plain, other = bits(tmp_path / "plain")[0], bits(tmp_path / "compiled")[0]
    assert plain.keys() == other.keys()
    for key, value in plain.items():
        torch.testing.assert_close(other[key], value, rtol=1e-4, atol=1e-5)


def test_layer_energies_sample_large_layers(monkeypatch):
    body = torch.nn.Sequential(torch.nn.Conv2d(4, 6, 3, groups=2), torch.nn.Linear(3, 1))
    rows = torch.randn(5000, 16)
    found = layer_energies(body, rows)
    assert list(found) == ["0", "head"]
    halves = [hyperspherical_energy(part, half_space=True) for part in body[0].weight.flatten(1).split(3)]
    assert found["0"] == pytest.approx(sum(halves).item() / 2)
    assert found["head"] == pytest.approx(hyperspherical_energy(rows).item(), rel=0.02)
