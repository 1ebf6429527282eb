import functools
import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from hypersphere.cli import progress
from hypersphere.cli.settings import changed_settings
from hypersphere.training import Config, Run, Trainer, build_experiment

from .trained import SMALL, SMALL_CONFIG, numbers, steps_in


@pytest.fixture
def train(command):
    threads = torch.get_num_threads()
    yield functools.partial(command, "train")
    torch.set_num_threads(threads)


# --- output


def test_train_writes_settings_metrics_and_checkpoints(tmp_path, train):
    code, out, errors = train("--out", tmp_path / "run", *SMALL, "--head", "a_softmax", "--head.m=3", "--log-every=3")
    assert (code, errors) == (0, "")
    about, first, *_, last, end, advice = out.splitlines()
    examples = "70 examples of 10 classes, 500 validation examples of the same classes"
    assert about == f"mlp with 8 features and 520 parameters, a_softmax, {examples}, 10 steps on cpu"
    assert first.startswith("epoch 1/2  step 1/10  loss ")
    assert last.startswith("epoch 2/2 done  step 10/10  loss ")
    for word in ("accuracy 0.", "energy 0.", "examples/s", "ETA 0:00:0"):
        assert word in last
    assert end == f"Run: {tmp_path / 'run'}"
    assert f"hypersphere evaluate {tmp_path / 'run'}" in advice
    run = Run.open(tmp_path / "run")
    assert run.config.head.options == {"m": 3}
    patch = {"head": {"name": "a_softmax", "m": 3}, "log_every": 3, "validation": {"protocols": ["accuracy"]}}
    assert run.config == SMALL_CONFIG.patched(patch)
    visible = {path.name for path in run.folder.iterdir() if not path.name.startswith(".")}
    assert visible == {"config.json", "metrics.jsonl", "checkpoints"}
    assert steps_in(run.folder)[-1] == 10
    steps = [line for line in run.metrics() if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1, 3, 6, 9]
    assert set(steps[0]) == {"kind", "step", "epoch", "seconds", "loss", "rate", "examples_per_second"}
    epochs = [line for line in run.metrics() if line["kind"] == "epoch"]
    assert set(epochs[0]) == {"kind", "epoch", "step", "loss", "accuracy", "top5", "energy", "seconds"}
    assert set(epochs[0]["energy"]) == {"layers.0", "head"}
    code, _, errors = train("--out", tmp_path / "run", *SMALL)
    assert code == 2
    assert "already holds a run; continue it with --resume auto" in errors
    code, out, errors = train("--out", tmp_path / "run", "--resume=auto")  # the run is finished
    assert (code, errors) == (0, "")
    assert out.splitlines()[1:3] == [
        "resuming from step 10 of 10; the run is finished, and more --epochs or --steps extend it",
        f"Run: {tmp_path / 'run'}",
    ]
    code, _, errors = train("--out", tmp_path / "run", "--resume=auto", "--head.m=4", "--seed", 1)
    assert code == 2
    assert "holds a run with different settings: head was {'name': 'a_softmax', 'm': 3} and is" in errors
    assert "seed was 0 and is 1" in errors


def test_train_extends_a_finished_run(tmp_path, train):
    assert train("--out", tmp_path / "run", *SMALL)[0] == 0
    code, out, errors = train("--out", tmp_path / "run", "--resume=auto", "--epochs=3", "--keep=5")
    assert (code, errors) == (0, "")
    assert "resuming from step 10 of 15" in out
    assert steps_in(tmp_path / "run")[-1] == 15
    run = Run.open(tmp_path / "run")
    assert (run.config.epochs, run.config.keep) == (3, 5)
    assert [line["epoch"] for line in run.metrics() if line["kind"] == "epoch"] == [1, 2, 3]


def test_train_by_steps(tmp_path, train):
    words = [word for word in SMALL if not word.startswith("--epochs")]
    code, out, errors = train("--out", tmp_path / "run", *words, "--steps=7", "--accumulate=2")
    assert (code, errors) == (0, "")
    assert "step 7/7" in out
    assert steps_in(tmp_path / "run")[-1] == 7


def test_training_progress_shows_a_live_bar_on_a_terminal(tmp_path):
    out = io.StringIO()
    experiment = build_experiment(SMALL_CONFIG.patched({"log_every": 1}))
    run = Run.of(tmp_path, experiment)
    with progress.TrainingProgress(Console(file=out, force_terminal=True, width=140)) as view:
        view.every = 0
        Trainer(experiment, run, on_step=view).train()
    shown = out.getvalue()
    for word in ("epoch 2/2", "100%", "loss ", "accuracy 0.", "energy 0.", "examples/s", "ETA 0:00:00", "\x1b["):
        assert word in shown


def test_training_progress_shows_a_validation_after_the_first_step(tmp_path, capsys):
    patch = {"epochs": None, "steps": 3, "validation": {"every": 1, "every_unit": "steps"}}
    for stop_at in (2, None):
        experiment = build_experiment(SMALL_CONFIG.patched(patch))
        run = Run.open(tmp_path) if stop_at is None else Run.of(tmp_path, experiment)
        with progress.TrainingProgress(Console(file=io.StringIO())) as view:
            trainer = Trainer(experiment, run, on_step=view)
            trainer.stop = lambda running=trainer, last=stop_at: running.progress.step == last
            if stop_at is None:
                trainer.resume()
            trainer.train()
    shown = re.findall(r"^(validation|epoch \d done)  step (\d)/3", capsys.readouterr().out, re.MULTILINE)
    assert shown == [("validation", "1"), ("validation", "2"), ("epoch 1 done", "3")]


def test_training_progress_on_a_narrow_terminal_is_not_truncated(tmp_path):
    out = io.StringIO()
    experiment = build_experiment(SMALL_CONFIG.patched({"log_every": 1}))
    run = Run.of(tmp_path, experiment)
    with progress.TrainingProgress(Console(file=out, force_terminal=True, width=72, color_system=None)) as view:
        view.every = 0
        Trainer(experiment, run, on_step=view).train()
    lines = re.split(r"[\r\n]|\x1b\[[0-9]*[A-Za-z]", out.getvalue())
    assert "…" not in out.getvalue()
    last = run.metrics()[-1]
    assert sum(line.startswith("epoch 2/2 done") and f"loss {last['loss']:.4f}" in line for line in lines) == 1
    assert any(re.search(r"epoch 2/2 .*100% loss \d", line) for line in lines)


def test_train_records_all_defaults_and_the_data(tmp_path, train):
    assert train("--out", tmp_path, *SMALL)[0] == 0
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["complete"]["optimizer"]["rotation_lr"] is None
    assert written["complete"]["head"].keys() > {"name", "label_smoothing"}
    assert written["data"]["outline"]["shape"] == [1, 8, 8]
    assert written["config"] == SMALL_CONFIG.patched({"validation": {"protocols": ["accuracy"]}}).settings()


def test_tensorboard_events_equal_the_metrics(tmp_path, train, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert train("--out", tmp_path, *SMALL, "--tensorboard")[0] == 0
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [event.value for event in events.Scalars("epoch/accuracy")]
    assert found == pytest.approx([line[0] for line in numbers(tmp_path, "accuracy")])
    assert [event.step for event in events.Scalars("epoch/energy/head")] == [5, 10]


def test_tensorboard_missing_names_its_extra(tmp_path, train, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    code, _, errors = train("--out", tmp_path, *SMALL, "--tensorboard")
    assert list(tmp_path.iterdir()) == []
    assert (code, errors) == (2, "hypersphere: this needs tensorboard: pip install 'torch-hypersphere[track]'\n")


# --- settings


def test_train_settings_precedence_is_file_then_options_then_arguments(tmp_path, train):
    (tmp_path / "job.yaml").write_text(
        "head: {name: arcface, s: 20}\nmodel: mlp\noptimizer: {lr: 1e-2}\nepochs: 3\nregularizers: []\n"
    )
    words = ["--config", tmp_path / "job.yaml", "--epochs=1", "--data.limit", "40", "--head.m", "0.2", "--seed=5"]
    assert train("--out", tmp_path / "run", *words, "--set", "batch_size=20", "--set", "head.m=0.3")[0] == 0
    config = Run.open(tmp_path / "run").config
    assert config.head.options == {"s": 20, "m": 0.3}
    assert config.optimizer.options == {**Config().optimizer.options, "lr": 0.01}
    assert (config.epochs, config.seed, config.regularizers, config.batch_size) == (1, 5, (), 20)
    again = tmp_path / "run" / "config.json"  # the settings of a run are also a settings file
    assert train("--out", tmp_path / "again", "--config", again, "--head", "softmax")[0] == 0
    assert Run.open(tmp_path / "again").config == config.patched({"head": "softmax"})


def test_docs_example_settings_file_is_valid(tmp_path, train):
    page = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")
    (example,) = re.findall(r'^```yaml title="job.yaml"\n(.*?)^```$', page, re.S | re.M)
    (tmp_path / "job.yaml").write_text(example)
    code, out, errors = train("--out", tmp_path / "run", "--config", tmp_path / "job.yaml", "--dry-run")
    assert (code, errors) == (0, "")
    assert "# 1,000 training examples of shape 1×8×8, 200 test examples, 10 classes" in out


def changed(options, words=(), base=None):
    return changed_settings((base or Config()).settings(), None, options, words)


def test_changed_settings_sets_nested_options():
    words = [
        "--head.annealing.start=5",
        "--operator.angular=sigmoid",
        "--operator.angular.k",
        "0.3",
        "--data.keep.3=0.5",
        "--validation.every=2",
        "--regularizers.mhe.power=1",
        "--augment.mirror",
    ]
    settings = changed({"head": "a_softmax", "operator": "ball", "trackers": ["tensorboard,wandb"]}, words)
    assert settings["head"] == {"name": "a_softmax", "annealing": {"start": 5}}
    assert settings["operator"] == {"name": "ball", "angular": {"name": "sigmoid", "k": 0.3}}
    assert settings["data"] == {"name": "digits", "keep": {"3": 0.5}}
    assert settings["validation"]["every"] == 2
    assert settings["regularizers"] == [{"name": "mhe", "power": 1}]
    assert settings["augment"] == [{"name": "mirror"}]
    assert settings["trackers"] == ["tensorboard", "wandb"]
    same = changed({"head": "arcface"}, base=Config.of({"head": {"name": "arcface", "m": 0.3}}))
    assert same["head"] == {"name": "arcface", "m": 0.3}  # the same name keeps its options


@pytest.mark.parametrize("between", ["-", "_"])
def test_train_accepts_dashes_and_underscores_in_names(between, tmp_path, train):
    words = ["--batch_size=7", "--dry_run", "--data.held_out=100", "--set=validation.every_unit=steps"]
    code, out, errors = train(f"--out={tmp_path / 'run'}", *(f"--{word[2:].replace('_', between)}" for word in words))
    assert (code, errors) == (0, "")
    settings = json.loads("".join(line for line in out.splitlines() if not line.startswith("#")))
    assert settings["batch_size"] == 7
    assert settings["data"]["held_out"] == 100
    assert settings["validation"]["every_unit"] == "steps"
    words = ["--data.keep.a-b_c=0.5", f"--validation.protocols.verification.per{between}fold=9"]
    settings = changed({}, [*words, f"--augment.rand{between}augment.m=3"])
    assert settings["data"]["keep"] == {"a-b_c": 0.5}  # the name of a class
    assert settings["validation"]["protocols"] == [{"name": "verification", "per_fold": 9}]
    assert settings["augment"] == [{"name": "rand_augment", "m": 3}]


@pytest.mark.parametrize(
    "words",
    [
        ["--augment=mirror", "--augment=shift"],
        ["--augment", "mirror,shift"],
        ["--augment", '["mirror", {"name": "shift"}]'],
        ["--augment.mirror", "--augment.shift"],
        ["--augment=mirror", "--augment.shift"],
    ],
)
def test_train_collects_repeated_options(words, tmp_path, train):
    code, out, errors = train("--out", tmp_path / "run", *SMALL, *words, "--dry-run")
    assert (code, errors) == (0, "")
    settings = json.loads("".join(line for line in out.splitlines() if not line.startswith("#")))
    assert settings["augment"] == [{"name": "mirror"}, {"name": "shift"}]


def test_train_adds_tensorboard_to_the_other_trackers(tmp_path, train, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.setitem(sys.modules, "wandb", object())
    _, out, _ = train("--out", tmp_path / "run", *SMALL, "--tensorboard", "--trackers=wandb", "--dry-run")
    settings = json.loads("".join(line for line in out.splitlines() if not line.startswith("#")))
    assert settings["trackers"] == [{"name": "wandb"}, {"name": "tensorboard"}]


def aliases(first, repeat):
    """Return YAML of few lines whose last value is 9 ** 9 times the first."""
    lines = [f"a0: &a0 {first}"]
    for number in range(1, 10):
        lines.append(f"a{number}: &a{number} {repeat.format(', '.join([f'*a{number - 1}'] * 9))}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epoch", "3"], "--epoch is not an option; did you mean --epochs?"),
        (["--epochs", "many"], "epochs must be an integer >= 1, or null, not 'many'"),
        (["--epochs=0"], "epochs must be an integer >= 1, or null, not 0"),
        (["--lr=0.1"], "--lr is not an option; did you mean --optimizer.lr?"),
        (["--weight-decay", "1"], "--weight-decay is not an option; did you mean --optimizer.weight_decay?"),
        (["stray"], "stray is not an option"),
        (["--hed.m=4"], "--hed.m is not an option; did you mean --head.m?"),
        (["--head."], "path must be at most 8 names separated by dots, not 'head.'"),
        (["--head=asoftmax"], "head.name must be one of softmax,"),
        (["--head=a_softmax", "--head.M=3"], "head.M is not an option of a_softmax; did you mean m?"),
        (["--model=toy_cnn", "--model.widths=abc"], "widths must be a sequence of 1 or more integers >= 1, not 'abc'"),
        (["--model=toy_cnn", "--model.in_channels=3"], "the model toy_cnn does not fit inputs of shape (1, 8, 8): "),
        (["--data.pool=16"], "the experiment cannot be built"),
        (["--optimizer.lr=fast"], "optimizer.lr must be a number, not 'fast'"),
        (["--augment=shfit"], "augment.0.name must be one of "),
        (["--data=mnist"], "no data folder"),
        (["--data=image_folder", "--data.path=/nowhere"], "/nowhere not found"),
        (["--model=gcn"], "model.name must be 'gcn' on a graph"),
        (["--device=nothing"], "device 'nothing' cannot be used"),
        (["--resume=perhaps"], "--resume must be one of never, auto, not 'perhaps'"),
        (["--log-every=0"], "log_every must be an integer >= 1, not 0"),
        (
            ["--head=arcface", "--head.s=1e300"],
            "head.s must be a number of at most 3.40282e+38, the largest of float32, ",
        ),
        (
            ["--optimizer.lr=-1e300"],
            "optimizer.lr must be a number of at most 3.40282e+38, the largest of float32, not",
        ),
        (
            ["--regularizers=mhe", "--regularizers.mhe.power=1e300"],
            "regularizers.0.power must be a number of at most 3.40282e+38, the largest of float32, not 1e+300",
        ),
        (
            ["--operator=sphere", '--operator.angular={"name": "sigmoid", "k": 1e300}'],
            "operator.angular.k must be a num",
        ),
        (["--validation.protocols.verification.pairs=nowhere.txt"], "nowhere.txt not found"),
        (["--save-every=-1"], "save_every must be a number >= 0, not -1"),
        (["--config=nothing.json"], "nothing.json cannot be read: No such file"),
        (["--config=settings.txt"], "a settings file must be a file with suffix .json, .yaml, .yml"),
        (["--config=list.json"], "list.json must be a mapping of settings"),
        (["--config=broken.json"], "broken.json cannot be read: Expecting"),
        (["--config=broken.yaml"], "broken.yaml cannot be read: "),
        (["--config=unknown.yaml"], "unknown.yaml: epoch is not a setting; did you mean epochs?"),
        (["--config=date.yaml"], "date.yaml: head must consist of numbers"),
        (["--config=unknown.yaml", "--head=asoftmax"], "unknown.yaml: epoch is not a setting; did you mean epochs?"),
        (["--config=valid.yaml", "--seed=-1"], "seed must be an integer >= 0, not -1"),
        (["--config=loop.yaml"], "loop.yaml: head must consist of numbers, text, lists and mappings: Circular"),
        (["--config=bomb.yaml"], "bomb.yaml cannot be read: the number of values must be at most 100000 with"),
        (["--config=merged.yaml"], "merged.yaml cannot be read: the number of values must be at most 100000"),
        (
            ["--config=twice.yaml"],
            "twice.yaml cannot be read: keys must be different within a mapping, not 'm'",
        ),
        (
            ["--config=twice.json"],
            "twice.json cannot be read: keys must be different within a mapping, not 'm'",
        ),
        (["--config=five.json"], "five.json must be a mapping of settings, not 5"),
        (["--wandb"], "--wandb is not an option; did you mean --trackers wandb?"),
        (["--nonsense"], "--nonsense is not an option\n"),
        (["--head." + ".".join("x" * 2000) + "=1"], "path must be at most 8 names separated by dots"),
        (["--seed=1180591620717411303424"], "seed must be an integer >= 0, not 1180591620717411303424"),
        (["--head.class_weights=heavy"], "head.class_weights must be a list of numbers, not 'heavy'"),
        (["--validation.patience=2"], "validation.patience must be unset without validation.best, the metric that has"),
        (["--steps=3"], "steps must be unset if epochs is set, not 3"),
        (["--set", "epochs"], "--set must be KEY=VALUE, not 'epochs'"),
        (["--model=nowhere:Net"], "model 'nowhere:Net' cannot be imported: No module named 'nowhere'; run the command"),
        (["--out=/proc/nowhere"], "/proc/nowhere must be a writable folder"),
        (["--out=list.json"], "--out must be a folder, not 'list.json'"),
        (["--out=list.json", "--dry-run"], "--out must be a folder, not 'list.json'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_train_rejects_invalid_input_in_one_line_without_writing(words, message, tmp_path, train, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYPERSPHERE_DATA", raising=False)
    files = {
        "list.json": "[1]",
        "broken.json": '{"epochs": ',
        "broken.yaml": "head: {name",
        "unknown.yaml": "epoch: 3",
        "valid.yaml": "batch_size: 8",
        "date.yaml": "head: {name: arcface, s: 2020-01-01}",
        "loop.yaml": "head: &again {name: arcface, again: *again}",
        "bomb.yaml": aliases("[x, x, x]", "[{}]"),
        "merged.yaml": aliases("{x: 1}", "{{<<: [{}]}}"),
        "twice.yaml": "head: {name: arcface, m: 0.2, s: 8, m: 0.3}",
        "twice.json": '{"head": {"name": "arcface", "m": 0.2, "m": 0.3}}',
        "five.json": '{"format": 2, "config": 5}',
    }
    for name, text in files.items():
        Path(name).write_text(text)
    code, out, errors = train("--out=run", "--epochs=1", *words)
    assert (code, out) == (2, "")
    assert errors.startswith(f"hypersphere: {message}")
    assert errors.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == set(files)


def test_train_suggests_the_preset_for_a_name_of_the_literature(tmp_path, train):
    code, _, errors = train(f"--out={tmp_path / 'run'}", "--head=CosFace")
    assert code == 2
    assert errors.endswith("not 'CosFace'; did you mean am_softmax?\n")


def test_train_accepts_a_name_of_the_literature(tmp_path, command):
    assert command("train", f"--out={tmp_path / 'run'}", *SMALL, "--head=cosface", "--head.m=0.1")[0] == 0
    code, out, _ = command("cite", tmp_path / "run")
    assert (code, "wang2018cosface" in out) == (0, True)
