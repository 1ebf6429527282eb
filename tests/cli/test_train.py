import functools
import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from hypersphere.cli import config, progress
from hypersphere.training import Job
from hypersphere.training.job_run import Run
from hypersphere.training.session import Session

from .trained import SMALL, SMALL_JOB, numbers, steps_in


@pytest.fixture
def train(command):
    threads = torch.get_num_threads()
    yield functools.partial(command, "train")
    torch.set_num_threads(threads)


# --- output


def test_train_writes_settings_metrics_and_checkpoints(tmp_path, train):
    code, out, errors = train("--out", tmp_path / "run", *SMALL, "--head", "a_softmax", "--head.m=3", "--log-every=3")
    assert (code, errors) == (0, "")
    first, *_, last, end = out.splitlines()
    assert first.startswith("epoch 1/2  step 1/10  loss ")
    assert last.startswith("epoch 2/2 done  step 10/10  loss ")
    for word in ("accuracy 0.", "energy 0.", "examples/s", "ETA 0:00:0"):
        assert word in last
    assert end == f"Run: {tmp_path / 'run'}"
    run = Run.open(tmp_path / "run")
    assert run.job.head == {"name": "a_softmax", "m": 3}
    assert run.job.settings() == {**SMALL_JOB.settings(), "head": run.job.head}
    assert {path.name for path in run.folder.iterdir()} == {"config.json", "metrics.jsonl", "checkpoints"}
    assert steps_in(run.folder)[-1] == 10
    steps = [line for line in run.metrics() if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1, 3, 6, 9]
    assert set(steps[0]) == {"kind", "step", "epoch", "seconds", "loss", "rate", "examples_per_second"}
    epochs = [line for line in run.metrics() if line["kind"] == "epoch"]
    assert set(epochs[0]) == {"kind", "epoch", "step", "loss", "test_accuracy", "energy", "seconds"}
    assert set(epochs[0]["energy"]) == {"layers.0", "head"}
    code, _, errors = train("--out", tmp_path / "run", *SMALL)
    assert code == 2
    assert "already holds a run; continue it with --resume auto" in errors
    code, out, errors = train("--out", tmp_path / "run", "--resume=auto")  # the run is finished
    assert (code, errors) == (0, "")
    assert out.splitlines() == ["resuming from step 10 of 10", f"Run: {tmp_path / 'run'}"]
    code, _, errors = train("--out", tmp_path / "run", "--resume=auto", "--head.m=4", "--seed", 1)
    assert code == 2
    assert "holds a run with different settings: head was {'name': 'a_softmax', 'm': 3} and is" in errors
    assert "seed was 0 and is 1" in errors


def test_view_shows_a_live_bar_on_a_terminal(tmp_path):
    out = io.StringIO()
    run = Run.create(tmp_path, SMALL_JOB)
    with progress.View(Console(file=out, force_terminal=True, width=140)) as view:
        view.every = 0
        Session(run, run.job.build(), log_every=1, on_step=view).train()
    shown = out.getvalue()
    for word in ("epoch 2/2", "100%", "loss ", "accuracy 0.", "energy 0.", "examples/s", "ETA 0:00:00", "\x1b["):
        assert word in shown


def test_view_on_a_narrow_terminal_is_not_truncated(tmp_path):
    out = io.StringIO()
    run = Run.create(tmp_path, SMALL_JOB)
    with progress.View(Console(file=out, force_terminal=True, width=72, color_system=None)) as view:
        view.every = 0
        Session(run, run.job.build(), log_every=1, on_step=view).train()
    lines = re.split(r"[\r\n]|\x1b\[[0-9]*[A-Za-z]", out.getvalue())
    assert "…" not in out.getvalue()
    last = run.metrics()[-1]
    assert sum(line.startswith("epoch 2/2 done") and f"loss {last['loss']:.4f}" in line for line in lines) == 1
    assert any(re.search(r"epoch 2/2 .*100% loss \d", line) for line in lines)


def test_train_records_all_defaults_and_the_data(tmp_path, train):
    assert train("--out", tmp_path, *SMALL)[0] == 0
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["resolved"]["optimizer"]["rotation_lr"] is None
    assert written["resolved"]["head"].keys() > {"name", "label_smoothing"}
    assert written["data"]["shape"] == [1, 8, 8]
    assert written["settings"] == SMALL_JOB.settings()


def test_tensorboard_events_equal_the_metrics(tmp_path, train, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert train("--out", tmp_path, *SMALL, "--tensorboard")[0] == 0
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [event.value for event in events.Scalars("epoch/test_accuracy")]
    assert found == pytest.approx([line[0] for line in numbers(tmp_path, "test_accuracy")])
    assert [event.step for event in events.Scalars("epoch/energy/head")] == [5, 10]


def test_tensorboard_missing_names_its_extra(tmp_path, train, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    code, _, errors = train("--out", tmp_path, *SMALL, "--tensorboard")
    assert list(tmp_path.iterdir()) == []
    assert (code, errors) == (2, "hypersphere: this needs tensorboard: pip install 'torch-hypersphere[track]'\n")


# --- settings


def test_train_settings_precedence_is_file_then_options_then_arguments(tmp_path, train):
    (tmp_path / "job.yaml").write_text(
        "head: {name: arcface, s: 20}\nmodel: mlp\noptimizer: {lr: 1e-2}\nepochs: 3\nregularizer: none\n"
    )
    words = ["--config", tmp_path / "job.yaml", "--epochs=1", "--data.limit", "40", "--head.m", "0.2", "--seed=5"]
    assert train("--out", tmp_path / "run", *words)[0] == 0
    job = Run.open(tmp_path / "run").job
    assert job.head == {"name": "arcface", "s": 20, "m": 0.2}
    assert job.optimizer == {**Job().optimizer, "lr": 0.01}
    assert (job.epochs, job.seed, job.regularizer) == (1, 5, {"name": "none"})
    again = tmp_path / "run" / "config.json"  # the settings of a run are also a settings file
    assert train("--out", tmp_path / "again", "--config", again, "--head", "softmax")[0] == 0
    assert Run.open(tmp_path / "again").job.settings() == {**job.settings(), "head": {"name": "softmax"}}


def test_docs_example_settings_file_is_valid(tmp_path, train):
    page = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")
    (example,) = re.findall(r'^```yaml title="job.yaml"\n(.*?)^```$', page, re.S | re.M)
    (tmp_path / "job.yaml").write_text(example)
    code, out, errors = train("--out", tmp_path / "run", "--config", tmp_path / "job.yaml", "--dry-run")
    assert (code, errors) == (0, "")
    assert "# 1,000 training examples of shape 1×8×8, 200 test examples, 10 classes" in out


def test_resolve_sets_nested_options():
    words = [
        "--head.annealing.start=5",
        "--operator.angular=sigmoid",
        "--operator.angular.k",
        "0.3",
        "--data.keep.3=0.5",
    ]
    found = config.resolve(
        Job().settings(), {}, {"head": "a_softmax", "operator": "ball"}, config.dotted_words(words, [])
    )
    assert found["head"] == {"name": "a_softmax", "annealing": {"start": 5}}
    assert found["operator"] == {"name": "ball", "angular": {"name": "sigmoid", "k": 0.3}}
    assert found["data"] == {"name": "digits", "keep": {"3": 0.5}}
    same = config.resolve({**Job().settings(), "head": {"name": "arcface", "m": 0.3}}, {}, {"head": "arcface"}, [])
    assert same["head"] == {"name": "arcface", "m": 0.3}  # the same name keeps its options


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epoch", "3"], "--epoch is not an option; did you mean --epochs?"),
        (["--epochs", "many"], "Invalid value for '--epochs'"),
        (["--epochs=0"], "epochs must be an integer >= 1, not 0"),
        (["--lr=0.1"], "--lr is not an option; did you mean --optimizer.lr?"),
        (["--weight-decay", "1"], "--weight-decay is not an option; did you mean --optimizer.weight_decay?"),
        (["stray"], "stray is not an option"),
        (["--hed.m=4"], "--hed.m is not an option; did you mean --head.m?"),
        (["--head."], "--head. is not an option"),
        (["--head=asoftmax"], "head.name must be one of softmax,"),
        (["--head=a_softmax", "--head.M=3"], "head.M is not an option of a_softmax; did you mean m?"),
        (["--model.widths=abc"], "model 'toy_cnn' does not accept"),
        (["--model.in_channels=3"], "the model toy_cnn does not fit inputs of shape (1, 8, 8): "),
        (["--data.pool=16"], "the job cannot be built"),
        (["--optimizer.lr=fast"], "optimizer 'adamw' does not accept {'lr': 'fast'}"),
        (["--augment.shfit=1"], "augment.shfit is not an option of augment; did you mean shift?"),
        (["--data=mnist"], "no data folder"),
        (["--data=image_folder", "--data.path=/nowhere"], "/nowhere not found"),
        (["--model=gcn"], "model.name must be 'gcn' on a graph"),
        (["--device=nothing"], "--device nothing cannot be used"),
        (["--resume=perhaps"], "--resume must be one of never, auto, not 'perhaps'"),
        (["--log-every=0"], "--log-every must be a number >= 1"),
        (["--save-every=-1"], "--save-every must be a number >= 0"),
        (["--config=nothing.json"], "--config nothing.json cannot be read: No such file"),
        (["--config=settings.txt"], "--config must be a file with suffix .json, .yaml, .yml"),
        (["--config=list.json"], "--config must be a mapping of settings"),
        (["--config=broken.json"], "--config broken.json cannot be read: Expecting"),
        (["--config=broken.yaml"], "--config broken.yaml cannot be read: "),
        (["--config=unknown.yaml"], "epoch is not a setting of a job; did you mean epochs?"),
        (["--config=date.yaml"], "settings must consist of numbers"),
        (["--out=/proc/nowhere"], "/proc/nowhere must be a writable folder"),
        (["--out=list.json"], "list.json must be a writable folder"),
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
        "date.yaml": "head: {name: arcface, s: 2020-01-01}",
    }
    for name, text in files.items():
        Path(name).write_text(text)
    code, out, errors = train("--out=run", "--epochs=1", *words)
    assert (code, out) == (2, "")
    assert errors.startswith(f"hypersphere: {message}")
    assert errors.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == set(files)


def test_train_suggests_the_preset_for_a_name_of_the_literature(tmp_path, train):
    code, _, errors = train(f"--out={tmp_path / 'run'}", "--head=cosface")
    assert code == 2
    assert errors.endswith("not 'cosface'; did you mean am_softmax?\n")


def test_train_with_yaml_names_the_missing_package(tmp_path, train, monkeypatch):
    (tmp_path / "job.yaml").write_text("epochs: 1")
    monkeypatch.setitem(sys.modules, "yaml", None)
    code, _, errors = train("--out", tmp_path / "run", "--config", tmp_path / "job.yaml")
    assert (code, errors.count("\n")) == (2, 1)
    assert "a YAML file needs PyYAML" in errors
