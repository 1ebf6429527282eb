import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from hypersphere._state_files import TensorFiles
from hypersphere.data import DataSplit, TensorSource
from hypersphere.energy import hyperspherical_energy
from hypersphere.optim import MovingAverage
from hypersphere.training import Config, Run, Trainer, embed, predict
from hypersphere.training.build import build
from hypersphere.training.random_state import RandomState

SMALL = {
    "data": {"name": "digits", "limit": 70},
    "model": {"name": "mlp", "widths": [8]},
    "batch_size": 16,
    "epochs": 3,
}
CONVOLUTIONS = {"model": {"name": "embedding_cnn", "widths": [4, 4], "feature_dim": 4}}
EXPERIMENTS = {
    "plain": {},
    "last batch of one row": {
        "data": {"name": "digits", "limit": 81},
        "model": {"name": "mlp", "widths": [8], "norm": "batch"},
    },
    "augmentation, BatchNorm, annealing": {
        **CONVOLUTIONS,
        "augment": [{"name": "shift", "pixels": 1}, "mirror"],
        "head": {"name": "a_softmax", "annealing": {"start": 10.0, "gamma": 1.0, "end": 0.0}},
        "optimizer": {"name": "sgd", "lr": 0.05, "nesterov": True},
    },
    "Kornia augmentation": {**CONVOLUTIONS, "augment": ["crop", "flip", "erase"]},
    "learned radius and angle": {
        **CONVOLUTIONS,
        "operator": {"name": "tanh", "angular": "sigmoid", "learn_k": "layer", "learn_radius": "filter"},
        "schedule": "steps",
    },
    "random projections": {"regularizers": [{"name": "comhe", "projection": {"name": "random", "dim": 4, "every": 3}}]},
    "learned projections": {"regularizers": [{"name": "comhe", "projection": {"name": "adversarial", "dim": 4}}]},
    "several regularisers": {"regularizers": [{"name": "mhe", "batch": 4}, "orthonormal"], "head": "sphereface_plus"},
    "spectral": {"regularizers": "srip", "head": "adaface"},
    "stochastic rotation": {"rotation": {"name": "stochastic", "every": 4}, "optimizer": {"name": "adam", "lr": 0.01}},
    "orthogonal equivalence": {"rotation": {"name": "equivalence", "block_size": 4, "every": 4}},
    "descent on the group": {"rotation": "descent", "optimizer": {"name": "sgd", "lr": 0.01, "rotation_lr": 0.1}},
    "penalty": {"rotation": "penalized", "precision": "bfloat16"},
    "accumulation and ramp": {
        "batch_size": 8,
        "accumulate": 2,
        "head": {"name": "arcface", "ramp": {"steps": 10}},
        "regularizers": [{"name": "mhe", "batch": 4}],
    },
    "float16, EMA and clipping": {"precision": "float16", "ema": 0.9, "clip": 1.0},
    "plateau and best": {
        "schedule": {"name": "plateau", "metric": "accuracy", "patience": 0, "factor": 0.5},
        "validation": {"best": "accuracy"},
    },
    "steps and validation within epochs": {
        "epochs": None,
        "steps": 14,
        "validation": {"every": 4, "every_unit": "steps", "best": "top5"},
    },
    "checkpointed activations": {**CONVOLUTIONS, "checkpoint_activations": True},
    "channels last": {**CONVOLUTIONS, "channels_last": True, "ema": 0.9},
    "adversarial": {**CONVOLUTIONS, "adversarial": {"name": "fgsm", "epsilon": 0.1}},
    "renormalised class vectors": {"head": {"name": "arcface", "renormalize": True}, "sampler": "class_balanced"},
}


def trainer(folder, settings=None, **more):
    experiment = build(Config.of({**SMALL, **(settings or {})}))
    run = Run.open(folder) if (folder / "config.json").exists() else Run.of(folder, experiment)
    return Trainer(experiment, run, **more)


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


def bits(folder, step=None):
    checkpoint = Run.open(folder).checkpoint(step, on_damage=pytest.fail)
    return checkpoint.weights(), checkpoint.state()


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


# --- resuming


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_trainer_stopped_and_resumed_gives_identical_results(name, tmp_path):
    """Stopped within the first epoch, between two epochs and within the last, each time with new objects."""
    settings = EXPERIMENTS[name]
    assert trainer(tmp_path / "complete", settings).train()
    parts = tmp_path / "parts"
    for steps, reached in ((3, 3), (2, 5), (7, 12)):
        torch.manual_seed(steps)  # the initial random state of a new process must not matter
        stopped = trainer(parts, settings, stop=After(steps))
        stopped.resume()
        assert not stopped.train()
        assert stopped.progress.step == reached
    last = trainer(parts, settings)
    assert last.resume().step == 12
    assert last.train()
    assert last.finished
    for one, other in zip(bits(parts), bits(tmp_path / "complete"), strict=True):
        assert_same(one, other)
    assert lines(Run.open(parts)) == lines(Run.open(tmp_path / "complete"))
    if "best" in settings.get("validation", {}):
        assert_same(bits(parts, "best"), bits(tmp_path / "complete", "best"))


def test_trainer_resume_reads_no_tensor_twice(tmp_path, monkeypatch):
    """A second read would be of all rows, including those of other processes."""
    assert trainer(tmp_path, {"epochs": 1}).train()
    names, read = [], TensorFiles.read
    monkeypatch.setattr(
        TensorFiles, "read", lambda files, name, rows=None: names.append(name) or read(files, name, rows)
    )
    assert trainer(tmp_path, {"epochs": 1}).resume().step == 5
    assert "optimizer.0.state.0.exp_avg" in names
    assert len(names) == len(set(names))


def test_trainer_restarts_without_a_checkpoint_and_skips_a_finished_run(tmp_path):
    first = trainer(tmp_path)
    first.run.log({"kind": "step", "step": 1})
    assert first.resume() is None
    assert first.run.metrics() == []
    assert first.train()
    before = sorted((tmp_path / "checkpoints").iterdir())
    again = trainer(tmp_path)
    assert again.resume().step == 15
    assert again.metrics["epoch"] == 3
    assert again.train()
    assert sorted((tmp_path / "checkpoints").iterdir()) == before
    assert len([line for line in again.run.metrics() if line["kind"] == "epoch"]) == 3


def test_trainer_resumes_with_a_damaged_inner_line_of_metrics(tmp_path):
    assert not trainer(tmp_path, stop=After(7)).train()
    path = tmp_path / "metrics.jsonl"
    content = path.read_text().split("\n")
    path.write_text("\n".join([content[0], '{"kind": epoch"', *content[1:]]))
    last = trainer(tmp_path)
    with pytest.warns(UserWarning, match="line 2 of .* is damaged and ignored"):
        last.resume()
    assert last.train()
    assert [line["epoch"] for line in last.run.metrics() if line["kind"] == "epoch"] == [1, 2, 3]


def test_trainer_warns_if_it_resumes_from_an_older_checkpoint(tmp_path):
    assert trainer(tmp_path, {"save_every": 0}).train()
    (tmp_path / "checkpoints" / "step-00000015" / "state.json").write_text("{}")
    with pytest.warns(UserWarning, match="step-00000015 is damaged: .*; using step-00000014 instead"):
        assert trainer(tmp_path).resume().step == 14


@pytest.mark.parametrize(("budget", "longer"), [({"epochs": 2}, {"epochs": 3}), ({"steps": 5}, {"steps": 7})])
def test_trainer_extends_a_finished_run(budget, longer, tmp_path):
    constant = {"schedule": "constant", "epochs": None, **budget}
    assert trainer(tmp_path / "run", constant).train()
    experiment = build(Config.of({**SMALL, **constant, **longer}))
    run = Run.open(tmp_path / "run").with_config(experiment.config)
    extended = Trainer(experiment, run)
    extended.resume()
    assert extended.train()
    assert extended.progress.step == experiment.steps
    direct = trainer(tmp_path / "direct", {**constant, **longer})
    direct.train()
    assert_same(extended.experiment.objective.state_dict(), direct.experiment.objective.state_dict())
    with pytest.raises(ValueError, match="different settings: seed was 0 and is 1; choose another folder"):
        run.with_config(Config.of({**experiment.config.settings(), "seed": 1}))


# --- what is logged and saved


def test_trainer_logs_correct_metrics(tmp_path):
    seen = []
    one = trainer(tmp_path, {"log_every": 4}, on_step=lambda trainer: seen.append(trainer.progress.step))
    experiment, rates = one.experiment, []
    step = experiment.optimizer.step
    experiment.optimizer.step = lambda: (rates.append(experiment.optimizer.param_groups[0]["lr"]), step())
    one.train()
    logged = one.run.metrics()
    steps = [line for line in logged if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1, 4, 8, 12]
    assert [line["epoch"] for line in steps] == [0, 0, 1, 2]
    assert [line["rate"] for line in steps] == [rates[line["step"] - 1] for line in steps]
    assert all(line["examples_per_second"] > 0 and math.isfinite(line["loss"]) for line in steps)
    epochs = [line for line in logged if line["kind"] == "epoch"]
    assert [(line["epoch"], line["step"]) for line in epochs] == [(1, 5), (2, 10), (3, 15)]
    features, labels = experiment.embed()
    assert epochs[-1]["accuracy"] == pytest.approx((predict(experiment.head, features) == labels).double().mean())
    best = experiment.head.scores(features).topk(5).indices.tolist()
    among = [label in five for label, five in zip(labels.tolist(), best, strict=True)]
    assert epochs[-1]["top5"] == pytest.approx(sum(among) / len(among))
    assert epochs[-1]["energy"].keys() == {"layers.0", "head"}
    assert epochs[-1]["energy"]["head"] == pytest.approx(hyperspherical_energy(experiment.head.weight).item())
    half = hyperspherical_energy(experiment.network.body.layers[0].weight, half_space=True)
    assert epochs[-1]["energy"]["layers.0"] == pytest.approx(half.item())
    assert seen == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 10, 11, 12, 13, 14, 15, 15]
    assert one.history == one.history[:3]
    assert [line["epoch"] for line in one.history] == [1, 2, 3]


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
def test_trainer_saves_at_the_requested_times_and_at_the_end(every, cost, expected, tmp_path, monkeypatch):
    """With a simulated clock: a step takes one second, a save `cost`, and everything else nothing."""
    now, saved = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    one = trainer(tmp_path, {"save_every": every})

    def passes(seconds):
        now[0] += seconds

    step = one.experiment.optimizer.step
    monkeypatch.setattr(one.experiment.optimizer, "step", lambda: (step(), passes(1.0)))
    monkeypatch.setattr(one.checkpoints, "save", lambda at, *more: (saved.append(at), passes(cost)))
    one.train()
    assert saved == expected
    assert one.saved == 15


def test_trainer_never_saves_diverged_weights_and_names_the_last_good_checkpoint(tmp_path):
    one = trainer(tmp_path, {"save_every": 0})

    def spoil(running):
        if running.progress.step == 3:
            with torch.no_grad():
                running.experiment.head.weight[0] = float("nan")

    one.on_step = spoil
    with pytest.raises(FloatingPointError) as caught:
        one.train()
    assert "the weights are not finite after step 3; a smaller learning rate may help" in str(caught.value)
    assert f"the last good checkpoint is that of step 2 in {tmp_path}" in str(caught.value)
    assert one.checkpoints.latest().step == 2
    other = trainer(tmp_path / "other")
    with torch.no_grad():
        other.experiment.network.body.layers[0].weight.fill_(3e38)
    with pytest.raises(FloatingPointError, match="the features or scores of validation data are not finite"):
        other.experiment.validation(other.experiment.objective)


def test_trainer_stops_at_the_next_logged_step_if_the_loss_is_nan(tmp_path):
    def nan(running):
        if running.progress.step == 5:
            running.experiment.objective.penalties.append(lambda: torch.tensor(float("nan")))

    one = trainer(tmp_path, {"log_every": 4}, on_step=nan)
    with pytest.raises(FloatingPointError, match=r"the loss became nan in epoch 2.* step 5 in"):
        one.train()
    assert one.progress.step == 7  # found before step 8, which is logged


def test_trainer_reads_losses_only_where_they_are_logged(tmp_path, monkeypatch):
    one = trainer(tmp_path, {"log_every": 5})
    types = []
    one.on_step = lambda running: types.append(type(running.progress.loss))
    one.train()
    read = [step for step, kind in enumerate(types[:5], 1) if kind is float]
    assert read == [1, 5]


def test_trainer_keeps_frozen_modules_in_evaluation_mode(tmp_path):
    settings = {"model": {"name": "mlp", "widths": [8, 8], "norm": "batch"}, "freeze": ["body.layers.[01].*"]}
    one = trainer(tmp_path, settings)
    norms = [module for module in one.experiment.network.modules() if isinstance(module, nn.BatchNorm1d)]
    frozen = {name: p.clone() for name, p in one.experiment.network.named_parameters() if not p.requires_grad}
    before = norms[0].running_mean.clone(), norms[1].running_mean.clone()
    one.train()
    assert set(frozen) == {"body.layers.0.weight", "body.layers.0.bias", "body.layers.1.weight", "body.layers.1.bias"}
    trained = dict(one.experiment.network.named_parameters())
    assert all(torch.equal(trained[name], value) for name, value in frozen.items())
    assert torch.equal(norms[0].running_mean, before[0])
    assert not torch.equal(norms[1].running_mean, before[1])
    assert not norms[0].training
    assert norms[1].training
    assert one.experiment.head.training
    with pytest.raises(ValueError, match=r"freeze must be patterns of parameter names such as body\.layers\.0\.weight"):
        trainer(tmp_path / "other", {"freeze": ["stem.*"]})


@pytest.fixture
def asked(monkeypatch):
    """Compile with a fast backend; return the types of the compiled modules."""
    compiled, asked = nn.Module.compile, []

    def light(module):
        asked.append(type(module).__name__)
        compiled(module, backend="aot_eager")

    monkeypatch.setattr(nn.Module, "compile", light)
    return asked


@pytest.mark.slow
def test_trainer_compile_keeps_names_in_checkpoints(tmp_path, asked):
    assert trainer(tmp_path / "plain", {"epochs": 1}).train()
    assert trainer(tmp_path / "compiled", {"epochs": 1, "compile": True}).train()
    assert asked == ["Network"]
    plain, other = bits(tmp_path / "plain")[0]["objective"], bits(tmp_path / "compiled")[0]["objective"]
    assert plain.keys() == other.keys()
    for key, value in plain.items():
        torch.testing.assert_close(other[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_trainer_combines_compile_ema_and_checkpointed_activations(tmp_path, asked):
    """Trained in two parts and opened again, the run has the weights and metrics of plain training."""
    settings = {**CONVOLUTIONS, "ema": 0.8, "epochs": 1}
    saving = {**settings, "compile": True, "checkpoint_activations": True}
    assert trainer(tmp_path / "plain", settings).train()
    assert not trainer(tmp_path / "saving", saving, stop=After(2)).train()
    last = trainer(tmp_path / "saving", saving)
    assert last.resume().step == 2
    assert last.train()
    assert asked == ["Network", "Network"]
    plain, other = (bits(tmp_path / name)[0] for name in ("plain", "saving"))
    for part in ("objective", "ema"):
        for key, value in plain[part].items():
            torch.testing.assert_close(other[part][key], value, rtol=1e-3, atol=1e-4, msg=f"{part} {key}")
    opened = Run.open(tmp_path / "saving").experiment()
    features, labels = opened.embed()
    accuracy = (predict(opened.head, features) == labels).double().mean().item()
    assert last.metrics["accuracy"] == pytest.approx(accuracy)


# --- independent references


def reference_loop(experiment, epochs, *, accumulate=1):
    """Train with plain PyTorch, with the batches of the experiment's sampler; return the losses of the steps."""
    source = experiment.data.train
    inputs = source.inputs.float() / 255
    optimizer = torch.optim.AdamW(experiment.objective.parameters(), lr=1e-2, weight_decay=0.0)
    order = torch.Generator().manual_seed(experiment.config.seed)
    losses = []
    for _ in range(epochs):
        for rows in torch.randperm(len(source), generator=order).split(16 * accumulate):
            x = (inputs[rows] - experiment.network.mean) / experiment.network.deviation
            loss = experiment.head(experiment.network.body(x), source.labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


PLAIN = {"optimizer": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.0}, "schedule": "constant", "log_every": 1}


def test_trainer_agrees_with_a_plain_loop(tmp_path):
    one = trainer(tmp_path, PLAIN)
    one.train()
    plain = build(Config.of({**SMALL, **PLAIN}))
    plain.objective.train()
    losses = reference_loop(plain, 3)
    assert [line["loss"] for line in one.run.metrics() if line["kind"] == "step"] == losses
    assert_same(one.experiment.objective.state_dict(), plain.objective.state_dict())


@pytest.mark.parametrize("head", ["softmax", {"name": "softmax", "class_weights": [1.0, 3.0] * 5}])
def test_accumulation_equals_a_large_batch(head, tmp_path):
    """Four batches of 16 in a step, also where the last step has fewer and smaller ones."""
    settings = {**PLAIN, "head": head, "optimizer": {"name": "sgd", "lr": 0.1}, "data": {"name": "digits", "limit": 90}}
    settings["regularizers"] = [{"name": "mhe", "hidden": 10.0}]
    small = trainer(tmp_path / "small", {**settings, "accumulate": 4})
    large = trainer(tmp_path / "large", {**settings, "batch_size": 64})
    assert small.train()
    assert large.train()
    assert small.steps == large.steps == 6
    ours, theirs = small.experiment.objective.state_dict(), large.experiment.objective.state_dict()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6)
    losses = [[line["loss"] for line in one.run.metrics() if line["kind"] == "step"] for one in (small, large)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_margins_and_regularizers_advance_once_per_optimizer_step(tmp_path):
    settings = {"accumulate": 2, "head": {"name": "arcface", "ramp": {"steps": 10}}, "epochs": 2}
    one = trainer(tmp_path, {**settings, "regularizers": [{"name": "mhe", "batch": 4}]})
    assert one.train()
    assert one.progress.step == one.steps == 6  # five batches make three steps
    assert one.experiment.head.steps == 6
    assert one.experiment.objective.regularizers[0].steps == 6
    assert one.experiment.scheduler.done == 6


def test_float16_scales_the_loss_and_skips_steps_that_overflow(tmp_path):
    one = trainer(tmp_path, {"precision": "float16", "head": {"name": "arcface", "ramp": {"steps": 100}}})
    one.experiment.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    before = {name: p.detach().clone() for name, p in one.experiment.objective.named_parameters()}
    counts = []

    def watch(running):
        skipped = all(torch.equal(before[name], p) for name, p in running.experiment.objective.named_parameters())
        counts.append((skipped, int(running.experiment.head.steps)))

    one.on_step = watch
    one.train()
    assert counts[0] == (True, 0)  # infinite gradients: neither weights nor margin change
    assert one.experiment.scaler.get_scale() < 2.0**100


@pytest.mark.parametrize("head", ["arcface", {"name": "arcface", "sharded": True, "sample": 0.5}])  # a sparse gradient
def test_clip_limits_the_norm_of_the_gradient(tmp_path, head):
    one = trainer(tmp_path, {"clip": 0.01, "epochs": 1, "head": head})
    norms = []
    step = one.experiment.optimizer.step

    def watched():
        grads = [p.grad for p in one.experiment.objective.parameters() if p.grad is not None]
        norms.append(torch.cat([grad.to_dense().flatten() for grad in grads]).norm().item())
        step()

    one.experiment.optimizer.step = watched
    one.train()
    assert max(norms) == pytest.approx(0.01, rel=1e-4)


def test_ema_is_the_average_of_the_weights(tmp_path):
    one = trainer(tmp_path, {"ema": 0.8})
    expected = {name: p.detach().clone() for name, p in one.experiment.objective.named_parameters()}
    validated = []
    measure = one.experiment.validation

    def validate(objective):
        validated.append({name: p.detach().clone() for name, p in objective.named_parameters()})
        return measure(objective)

    one.experiment.validation = validate

    def average(running):
        if running.metrics is not running.__dict__.get("last"):
            running.last = running.metrics  # an epoch: no step in between
            return
        for name, p in running.experiment.objective.named_parameters():
            expected[name] = 0.8 * expected[name] + 0.2 * p.detach()

    one.last = one.metrics
    one.on_step = average
    one.train()
    weights = bits(tmp_path)[0]
    opened = Run.open(tmp_path).experiment()
    for name, value in expected.items():
        torch.testing.assert_close(weights["ema"][name], value)
        torch.testing.assert_close(validated[-1][name], value)
        torch.testing.assert_close(dict(opened.objective.named_parameters())[name], value)
    assert not torch.equal(weights["objective"]["head.weight"], weights["ema"]["head.weight"])


def test_moving_average_rejects_a_decay_of_one_and_folding_rotations(tmp_path):
    with pytest.raises(ValueError, match=r"decay must be a number in \[0, 1\), not 1"):
        MovingAverage(nn.Linear(1, 1), 1)
    with pytest.raises(ValueError, match="ema must be unset with the rotation stochastic"):
        trainer(tmp_path, {"ema": 0.9, "rotation": "stochastic"})


@pytest.mark.parametrize("change", ["grow", "drop and grow"])
def test_moving_average_refuses_weights_that_were_replaced(change, tmp_path):
    """Even if they have the same shape, because the rows are then those of other classes."""
    experiment = trainer(tmp_path, {"ema": 0.9, "head": "arcface"}).experiment
    if change == "drop and grow":
        experiment.head.drop([3], optimizer=experiment.optimizer)
    experiment.head.grow(1, optimizer=experiment.optimizer)
    before = experiment.head.weight.detach().clone()
    reason = "^parameters were replaced, as by `head.grow`: head.weight; create a new MovingAverage$"
    with pytest.raises(ValueError, match=reason):
        experiment.after_step(1)
    with pytest.raises(ValueError, match=reason), experiment.ema.applied():
        pass
    assert torch.equal(experiment.head.weight, before)
    experiment.ema = MovingAverage(experiment.objective, 0.9)
    experiment.after_step(1)


def test_trainer_and_its_parts_have_short_reprs(tmp_path):
    one = trainer(tmp_path / "run", {"epochs": 1})
    steps = one.steps
    assert repr(one).startswith(f"Trainer({str(tmp_path / 'run')!r}, step 0 of {steps}: mlp with ")
    assert repr(one.experiment.validation) == "Validator(accuracy, energy)"
    one.train()
    assert repr(one.checkpoints) == f"Checkpoints({str(tmp_path / 'run' / 'checkpoints')!r}, steps [{steps}])"
    assert repr(one.checkpoints.latest()) == f"Checkpoint(path={one.checkpoints.latest().path!r}, step={steps})"
    assert repr(RandomState({"noise": torch.Generator()})) == "RandomState(python, numpy, torch, noise)"


def test_checkpointed_activations_change_no_result(tmp_path):
    """Not even the statistics of BatchNorm, which the second forward pass must not update again."""
    one = trainer(tmp_path / "plain", CONVOLUTIONS)
    other = trainer(tmp_path / "recomputed", {**CONVOLUTIONS, "checkpoint_activations": True})
    one.train()
    other.train()
    assert_same(one.experiment.objective.state_dict(), other.experiment.objective.state_dict())


def test_channels_last_changes_the_layout_and_results_by_rounding_only(tmp_path):
    settings = {**CONVOLUTIONS, "optimizer": {"name": "sgd", "lr": 0.01}}
    one = trainer(tmp_path / "plain", settings)
    other = trainer(tmp_path / "channels last", {**settings, "channels_last": True})
    filters = [p for p in other.experiment.network.parameters() if p.ndim == 4 and p.shape[1] > 1]
    assert filters
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in filters)
    one.train()
    other.train()
    for name, value in one.experiment.objective.state_dict().items():
        torch.testing.assert_close(other.experiment.objective.state_dict()[name], value, rtol=1e-3, atol=1e-4)


def test_renormalize_keeps_class_vectors_on_the_sphere(tmp_path):
    one = trainer(tmp_path / "plain", {"head": "arcface"})
    other = trainer(tmp_path / "other", {"head": {"name": "arcface", "renormalize": True}})
    one.train()
    other.train()
    assert not torch.allclose(one.experiment.head.weight.norm(dim=1), torch.ones(10), atol=1e-3)
    torch.testing.assert_close(other.experiment.head.weight.norm(dim=1), torch.ones(10))


# --- best checkpoint and early stopping


def scripted(values):
    """Return a validation that returns given accuracies one after another."""
    rest = iter(values)
    return lambda objective: {"accuracy": next(rest)}


def test_trainer_keeps_the_best_checkpoint_and_stops_early(tmp_path):
    one = trainer(tmp_path, {"epochs": 9, "validation": {"best": "accuracy", "patience": 2}, "keep": 1})
    one.experiment.validation = scripted([0.1, 0.5, 0.4, 0.5, 0.9])
    weights = {}
    one.on_step = lambda running: weights.setdefault(running.progress.step, running.experiment.head.weight.tolist())
    assert one.train()
    assert one.finished
    assert one.progress.epoch == 4  # two validations without improvement
    assert one.best == {"value": 0.5, "step": 10, "bad": 2}
    assert Run.open(tmp_path).checkpoint("best").step == 10
    opened = Run.open(tmp_path).experiment(step="best")
    assert opened.head.weight.tolist() == weights[10]
    assert Run.open(tmp_path).checkpoint().step == 20
    again = trainer(tmp_path, {"epochs": 9, "validation": {"best": "accuracy", "patience": 2}, "keep": 1})
    again.resume()
    assert again.train()  # nothing left to do
    assert again.progress.epoch == 4


def test_trainer_saves_when_validation_by_steps_stops_early(tmp_path):
    validation = {"best": "accuracy", "patience": 2, "every": 2, "every_unit": "steps"}
    settings = {"epochs": 9, "validation": validation, "save_every": 1000}
    one = trainer(tmp_path, settings)
    one.experiment.validation = scripted([0.5, 0.4, 0.3])
    assert one.train()
    assert one.progress.step == one.saved == 6
    assert Run.open(tmp_path).checkpoint().step == 6
    again = trainer(tmp_path, settings)
    assert again.resume().step == 6
    assert again.best == {"value": 0.5, "step": 2, "bad": 2}
    assert again.train()  # nothing left to do
    assert again.progress.step == 6


@pytest.mark.parametrize(("every", "unit", "last"), [(2, "epochs", 10), (3, "steps", 6)])
def test_trainer_extends_a_run_whose_last_validation_was_not_scheduled(tmp_path, every, unit, last):
    """One epoch has five steps. The validation at the end of training does not count against the patience."""
    validation = {"best": "accuracy", "patience": 1, "every": every, "every_unit": unit}
    one = trainer(tmp_path, {"epochs": 1, "validation": validation})
    one.experiment.validation = scripted([0.5, 0.5])
    assert one.train()
    assert one.progress.step == 5
    again = trainer(tmp_path, {"epochs": 9, "validation": validation})
    again.resume()
    again.experiment.validation = scripted([0.4])
    assert again.train()
    assert again.progress.step == last  # the next validation of the schedule


def test_trainer_extends_a_run_that_ended_within_an_epoch(tmp_path):
    """One epoch has five steps, and every second epoch is validated: after 10 steps, also if training paused at 7."""
    settings = {"epochs": None, "validation": {"best": "accuracy", "patience": 1, "every": 2}}
    one = trainer(tmp_path, {**settings, "steps": 7})
    one.experiment.validation = scripted([0.5])
    assert one.train()
    again = trainer(tmp_path, {**settings, "steps": 30})
    again.resume()
    again.experiment.validation = scripted([0.4])
    assert again.train()
    assert again.progress.step == 10


@pytest.mark.parametrize("steps", [7, 10])
def test_trainer_validates_after_a_stop_at_the_last_step(tmp_path, steps):
    settings = {"epochs": None, "steps": steps}
    assert trainer(tmp_path / "whole", settings).train()
    stopped = trainer(tmp_path / "parts", settings, stop=After(steps))
    assert not stopped.train()
    assert stopped.saved == steps
    resumed = trainer(tmp_path / "parts", settings)
    resumed.resume()
    assert resumed.train()
    whole, parts = (
        [{**line, "seconds": 0} for line in Run.open(tmp_path / name).metrics() if line["kind"] == "epoch"]
        for name in ("whole", "parts")
    )
    assert parts == whole
    assert "accuracy" in parts[-1]
    assert trainer(tmp_path / "parts", settings).resume().state("progress")["progress"]["batches"] == 0


def test_trainer_rejects_an_unknown_metric(tmp_path):
    with pytest.raises(ValueError, match=r"validation\.best must be one of loss, accuracy, top5, not 'acuracy'"):
        trainer(tmp_path, {"validation": {"best": "acuracy"}}).train()


# --- open sets


def faces(seed=0, people=20, each=6):
    """Return images of people: a fixed pattern per person plus noise; the last quarter of the people is held out."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.rand(people, 1, 1, 8, 8, generator=generator)
    images = (patterns + 0.2 * torch.randn(people, each, 1, 8, 8, generator=generator)).clamp(0, 1)
    pixels = (255 * images).to(torch.uint8).flatten(0, 1)
    labels = torch.arange(people).repeat_interleave(each)
    names = [f"person {number}" for number in range(people)]
    held = labels >= (cut := 3 * people // 4)
    train = TensorSource(pixels[~held], labels[~held], names[:cut])
    return DataSplit(train, TensorSource(pixels[held], labels[held] - cut, names[cut:]), open_set=True)


def test_trainer_validates_on_unseen_people(tmp_path):
    protocols = ["verification", "identification", "retrieval"]
    validation = {"protocols": protocols, "best": "verification.eer"}
    config = Config.of({**SMALL, "epochs": 2, "validation": validation})
    experiment = build(config, split=faces())
    run = Run.of(tmp_path, experiment)
    assert Trainer(experiment, run).train()
    last = run.metrics()[-1]
    names = {"verification.accuracy", "verification.eer", "verification.auc", "identification.rank1"}
    assert names | {"identification.rank5", "retrieval.recall1", "retrieval.map_at_r"} <= last.keys()
    assert "accuracy" not in last
    assert last["verification.auc"] > 0.8
    assert run.checkpoint("best").step in (6, 12)
    assert build(Config.of(SMALL), split=faces()).config.validation.protocols[0].name == "verification"
    with pytest.raises(ValueError, match=r"validation\.protocols must be without accuracy, because the classes of the"):
        build(Config.of({**SMALL, "validation": {"protocols": "accuracy"}}), split=faces())


# --- trackers


def test_tensorboard_gets_all_lines(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    settings = {"trackers": "tensorboard", "log_every": 5}
    assert not trainer(tmp_path, settings, stop=After(7)).train()
    last = trainer(tmp_path, settings)
    last.resume()
    last.train()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("epoch/accuracy")] == [5, 10, 15]
    assert [event.step for event in events.Scalars("step/loss")] == [1, 5, 10, 15]
    assert events.Scalars("epoch/loss")[-1].value == pytest.approx(last.metrics["loss"])


def test_wandb_offline_continues_the_same_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = {"trackers": [{"name": "wandb", "mode": "offline", "project": "tests"}], "epochs": 1}
    assert not trainer(tmp_path, settings, stop=After(2)).train()
    identity = (tmp_path / "wandb.id").read_text()
    last = trainer(tmp_path, settings)
    last.resume()
    assert last.train()
    assert (tmp_path / "wandb.id").read_text() == identity
    folders = [path for path in (tmp_path / "wandb").iterdir() if path.name.endswith(identity) and path.is_dir()]
    assert len(folders) >= 1
    assert any(any(folder.glob("*.wandb")) for folder in folders)


class Lines:
    """A tracker that writes JSON to a file of its choice."""

    def __init__(self, path):
        self.path = path

    def start(self, run, config):
        self.lines = [config.seed]

    def log(self, line):
        self.lines.append(line["kind"])

    def finish(self):
        with open(self.path, "w") as file:
            json.dump(self.lines, file)


def test_trainer_imports_a_tracker_from_an_import_path(tmp_path):
    settings = {"trackers": {"name": f"{__name__}:Lines", "path": str(tmp_path / "lines.json")}, "epochs": 1}
    trainer(tmp_path / "run", settings).train()
    assert json.loads((tmp_path / "lines.json").read_text()) == [0, "step", "epoch"]


def test_experiment_embed_agrees_with_the_network(tmp_path):
    one = trainer(tmp_path)
    source = one.experiment.data.validation
    features, labels = one.experiment.embed(batch_size=64)
    again, _ = embed(one.experiment.network, [(source.inputs, source.labels)])
    torch.testing.assert_close(features, again)
    assert torch.equal(labels, source.labels)


# --- killed processes


def test_killed_training_with_workers_gives_identical_results(tmp_path):
    """Images decoded by two workers, augmentation, accumulation, averaged weights and float16."""
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for person in range(6):
        (tmp_path / "photos" / str(person)).mkdir(parents=True)
        for number in range(20):
            pixels = torch.randint(40 * person, 40 * person + 50, (12, 12, 3), generator=generator)
            Image.fromarray(pixels.to(torch.uint8).numpy()).save(tmp_path / "photos" / str(person) / f"{number}.png")
    settings = {
        "data": {"name": "image_folder", "path": str(tmp_path / "photos"), "split": "class", "held_out": 2},
        "model": {"name": "embedding_cnn", "widths": [4, 4], "feature_dim": 8},
        "augment": ["mirror", {"name": "shift", "pixels": 1}],
        "head": {"name": "arcface", "ramp": {"steps": 20}},
        "regularizers": [{"name": "mhe", "batch": 4}],
        "validation": {"best": "verification.auc"},
        "precision": "float16",
        "batch_size": 8,
        "accumulate": 2,
        "ema": 0.9,
        "workers": 2,
        "epochs": 4,
        "save_every": 0,
        "log_every": 3,
    }
    script = Path(__file__).with_name("killed_trainer.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, tmp_path, repr(settings)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 2
    for one, other in zip(bits(tmp_path / "killed"), bits(tmp_path / "complete"), strict=True):
        assert_same(one, other)
    assert_same(bits(tmp_path / "killed", "best"), bits(tmp_path / "complete", "best"))
    assert lines(Run.open(tmp_path / "killed")) == lines(Run.open(tmp_path / "complete"))


def test_float16_that_overflows_at_every_step_is_divergence(tmp_path):
    settings = {**SMALL, "precision": "float16", "head": {"name": "arcface", "s": 1e30}, "epochs": 10, "log_every": 1}
    with pytest.raises(FloatingPointError, match="overflow in float16 at every step"):
        Trainer(build(Config.of(settings))).train()


def test_moving_average_averages_tied_weights_under_all_their_names():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    average, before = MovingAverage(model, 0.5), first.weight.detach().clone()
    nn.init.zeros_(first.weight)
    average.update()
    state = average.state_dict()
    torch.testing.assert_close(state["0.weight"], before / 2)
    torch.testing.assert_close(state["1.weight"], before / 2)
    average.load_state_dict(state)
