import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from hypersphere import data
from hypersphere.cli import commands, config, progress
from hypersphere.cli import train as module
from hypersphere.training import Job
from hypersphere.training.run import Run
from hypersphere.training.session import Session

COMMAND = [sys.executable, "-m", "hypersphere", "train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = os.environ | {"COLUMNS": "120", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
SMALL = ["--data.limit=70", "--model=mlp", "--model.widths=[8]", "--batch-size=16", "--epochs=2"]
SMALL_JOB = Job.of(
    {
        "data": {"name": "digits", "limit": 70},
        "model": {"name": "mlp", "widths": [8]},
        "batch_size": 16,
        "epochs": 2,
    }
)


@pytest.fixture
def train(monkeypatch, capsys):
    """Run the command in this process; return its code, its output and its errors."""
    threads = torch.get_num_threads()

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["hypersphere", "train", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            commands.main()
        return ended.value.code or 0, *capsys.readouterr()

    yield run
    torch.set_num_threads(threads)


def wait_for(holds, process, seconds=300):
    for _ in range(seconds * 50):
        if holds() or process.poll() is not None:
            return
        time.sleep(0.02)
    raise AssertionError("nothing happened")


def steps_in(folder):
    """The steps of the checkpoints there, the last one last."""
    return sorted(int(path.name[5:13]) for path in (folder / "checkpoints").glob("step-*"))


def weights(folder):
    return Run.open(folder).checkpoints(on_damage=pytest.fail).latest().weights()["objective"]


def numbers(folder, *keys):
    return [[line[key] for key in keys] for line in Run.open(folder).metrics() if line["kind"] == "epoch"]


# --- what comes out


def test_a_run_leaves_its_settings_its_numbers_and_checkpoints(tmp_path, train):
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
    assert "has a run already; go on with --resume auto" in errors
    code, out, errors = train("--out", tmp_path / "run", "--resume=auto")  # finished: nothing is left to do
    assert (code, errors) == (0, "")
    assert out.splitlines() == ["going on from step 10 of 10", f"Run: {tmp_path / 'run'}"]
    code, _, errors = train("--out", tmp_path / "run", "--resume=auto", "--head.m=4", "--seed", 1)
    assert code == 2
    assert "has a run with other settings: head was {'name': 'a_softmax', 'm': 3} and is" in errors
    assert "seed was 0 and is 1" in errors


def test_a_live_bar_on_a_terminal(tmp_path):
    out = io.StringIO()
    run = Run.create(tmp_path, SMALL_JOB)
    with progress.View(Console(file=out, force_terminal=True, width=140)) as view:
        view.every = 0
        Session(run, run.job.build(), log_every=1, on_step=view).train()
    shown = out.getvalue()
    for word in ("epoch 2/2", "100%", "loss ", "accuracy 0.", "energy 0.", "examples/s", "ETA 0:00:00", "\x1b["):
        assert word in shown


def test_tensorboard_gets_the_same_numbers(tmp_path, train, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert train("--out", tmp_path, *SMALL, "--tensorboard")[0] == 0
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [event.value for event in events.Scalars("epoch/test_accuracy")]
    assert found == pytest.approx([line[0] for line in numbers(tmp_path, "test_accuracy")])
    assert [event.step for event in events.Scalars("epoch/energy/head")] == [5, 10]


def test_tensorboard_needs_its_extra(tmp_path, train, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    code, _, errors = train("--out", tmp_path, *SMALL, "--tensorboard")
    assert list(tmp_path.iterdir()) == []
    assert (code, errors) == (2, "hypersphere: this needs tensorboard: pip install 'hypersphere[track]'\n")


# --- settings


def test_files_options_and_words_in_this_order(tmp_path, train):
    (tmp_path / "job.yaml").write_text(
        "head: {name: arcface, s: 20}\nmodel: mlp\noptimizer: {lr: 1e-2}\nepochs: 3\nregularizer: none\n"
    )
    words = ["--config", tmp_path / "job.yaml", "--epochs=1", "--data.limit", "40", "--head.m", "0.2", "--seed=5"]
    assert train("--out", tmp_path / "run", *words)[0] == 0
    job = Run.open(tmp_path / "run").job
    assert job.head == {"name": "arcface", "s": 20, "m": 0.2}
    assert job.optimizer == {**Job().optimizer, "lr": 0.01}
    assert (job.epochs, job.seed, job.regularizer) == (1, 5, {"name": "none"})
    again = tmp_path / "run" / "config.json"  # a run's settings serve as a file
    assert train("--out", tmp_path / "again", "--config", again, "--head", "softmax")[0] == 0
    assert Run.open(tmp_path / "again").job.settings() == {**job.settings(), "head": {"name": "softmax"}}


def test_settings_are_set_deep_inside():
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
        (["--epoch", "3"], "--epoch is no option; did you mean --epochs?"),
        (["--epochs", "many"], "Invalid value for '--epochs'"),
        (["--epochs=0"], "epochs must be a whole number >= 1, not 0"),
        (["stray"], "stray is no option"),
        (["--hed.m=4"], "--hed.m is no option; did you mean --head.m?"),
        (["--head."], "--head. is no option"),
        (["--head=asoftmax"], "head.name must be one of softmax,"),
        (["--head=a_softmax", "--head.M=3"], "head.M is no option of a_softmax; did you mean m?"),
        (["--model.widths=abc"], "model 'toy_cnn' cannot be made of"),
        (["--model.in_channels=3"], "the model toy_cnn does not fit inputs of shape (1, 8, 8): "),
        (["--data.pool=16"], "the job cannot be built"),
        (["--optimizer.lr=fast"], "optimizer 'adamw' cannot be made of {'lr': 'fast'}"),
        (["--augment.shfit=1"], "augment.shfit is no option; did you mean shift?"),
        (["--data=mnist"], "no data folder"),
        (["--data=image_folder", "--data.path=/nowhere"], "/nowhere not found"),
        (["--model=gcn"], "model.name must be 'gcn' on a graph"),
        (["--device=nothing"], "--device nothing cannot be used"),
        (["--resume=perhaps"], "--resume must be one of never, auto, not 'perhaps'"),
        (["--log-every=0"], "--log-every must be a number >= 1"),
        (["--save-every=-1"], "--save-every must be a number >= 0"),
        (["--config=nothing.json"], "--config nothing.json cannot be read: No such file"),
        (["--config=settings.txt"], "--config must be a file that ends in .json, .yaml, .yml"),
        (["--config=list.json"], "--config must be a mapping of settings"),
        (["--config=broken.json"], "--config broken.json cannot be read: Expecting"),
        (["--config=broken.yaml"], "--config broken.yaml cannot be read: "),
        (["--config=unknown.yaml"], "epoch is no setting of a job; did you mean epochs?"),
        (["--config=date.yaml"], "settings must be plain numbers"),
        (["--out=/proc/nowhere"], "/proc/nowhere must be a folder that can be written"),
        (["--out=list.json"], "list.json must be a folder that can be written"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_misuse_is_one_line_and_leaves_nothing(words, message, tmp_path, train, monkeypatch):
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


def test_a_yaml_file_without_its_package(tmp_path, train, monkeypatch):
    (tmp_path / "job.yaml").write_text("epochs: 1")
    monkeypatch.setitem(sys.modules, "yaml", None)
    code, _, errors = train("--out", tmp_path / "run", "--config", tmp_path / "job.yaml")
    assert (code, errors.count("\n")) == (2, 1)
    assert "a YAML file needs PyYAML" in errors


# --- what goes wrong


def test_a_run_that_diverges_is_one_line_and_code_1(tmp_path, train):
    code, _, errors = train("--out", tmp_path, *SMALL, "--optimizer=sgd", "--optimizer.lr=1e30")
    assert code == 1
    assert errors.count("\n") == 1
    assert "a smaller learning rate may help" in errors


def test_a_full_disk_is_told_and_what_was_saved_stays(tmp_path, train, monkeypatch):
    monkeypatch.setattr(Session, "_is_due", lambda self, patience=0: self.progress.step == 3)
    save, limits = Session._save, resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(session):
        if session.progress.step > 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        save(session)

    monkeypatch.setattr(Session, "_save", limited)
    try:
        code, _, errors = train("--out", tmp_path, *SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (code, errors.count("\n")) == (1, 1)
    assert f"the checkpoint of step 10 cannot be saved in {tmp_path / 'checkpoints'}: " in errors
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    monkeypatch.undo()
    assert train("--out", tmp_path, "--resume=auto")[0] == 0


def test_damage_is_told_and_the_checkpoint_before_it_used(tmp_path, train):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert train("--out", whole, *SMALL)[0] == 0
    assert train("--out", broken, *SMALL, "--save-every=0")[0] == 0
    assert steps_in(broken) == [8, 9, 10]
    for step, name in ((10, "weights.safetensors"), (9, "state.pt")):
        file = broken / "checkpoints" / f"step-{step:08d}" / name
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content if step == 10 else content[:-7])
    code, out, errors = train("--out", broken, "--resume=auto")
    assert code == 0
    assert "step-00000010 is damaged: the SHA-256 of weights.safetensors is" in errors
    assert "step-00000009 is damaged: the size of state.pt is" in errors
    assert errors.count("; using step-00000008 instead\n") == 2
    assert out.startswith("going on from step 8 of 10\n")
    assert all(torch.equal(value, weights(broken)[key]) for key, value in weights(whole).items())
    assert numbers(broken, "loss", "test_accuracy") == numbers(whole, "loss", "test_accuracy")
    for path in (broken / "checkpoints").glob("*/manifest.json"):
        path.write_text("{}")
    code, _, errors = train("--out", broken, "--resume=auto")
    assert (code, errors.count("\n")) == (3, 1)
    assert errors.startswith("hypersphere: no good checkpoint in")
    (broken / "config.json").write_text("{")
    assert train("--out", broken, "--resume=auto")[0] == 3


def test_other_threads_are_told(tmp_path, train):
    assert train("--out", tmp_path, *SMALL)[0] == 0
    path = next((tmp_path / "checkpoints").glob("*10"))
    threads = json.loads((path / "manifest.json").read_text())["made_with"]["threads"]
    _, _, errors = train("--out", tmp_path, "--resume=auto", "--threads", threads + 1)
    assert f"saved with {threads} threads, now {threads + 1}: the last bits may differ" in errors


def test_an_interrupt_before_the_first_step(tmp_path, train, monkeypatch):
    monkeypatch.setattr(module, "_built", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    code, out, errors = train("--out", tmp_path / "run", *SMALL)
    assert (code, out) == (130, "")
    assert errors == f"hypersphere: interrupted; nothing new is saved in {tmp_path / 'run'}\n"


class Two:
    """Two processes, as far as what cannot be divided is concerned."""

    size, rank = 2, 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"data": {"name": "digits", "limit": 20}, "model": "mlp", "optimizer": {"name": "sgd", "clip": 1.0}}, "clip"),
        ({"regularizer": "mhe"}, "regularizer mhe needs all class vectors in one process"),
        ({"data": "cora", "model": "gcn"}, "data cora is one graph, which processes cannot divide"),
    ],
)
def test_what_processes_cannot_divide_is_refused(words, message, monkeypatch):
    monkeypatch.setattr(module, "Processes", Two)
    if "regularizer" in words:
        monkeypatch.setattr(sys.modules[Job.__module__], "Processes", Two)
    nodes = torch.arange(6)
    edges = torch.stack([nodes, nodes.roll(1)])
    masks = [nodes % 3 == part for part in range(3)]
    graph = data.Graph(torch.rand(6, 3), nodes % 2, edges, *masks, ("a", "b"))
    monkeypatch.setitem(data.DATASETS, "cora", lambda root: graph)
    job = Job.of({**words, "head": {"name": "softmax", "sharded": "data" not in words or words["data"] != "cora"}})
    with pytest.raises(ValueError, match=message):
        module._built(job, None, torch.get_default_device())


# --- in processes of its own


STATEFUL = [
    "--model=embedding_cnn", "--model.widths=[4,4]", "--model.feature_dim=4", "--augment.shift=1", "--augment.mirror",
    "--head=a_softmax", "--head.annealing.start=10", "--regularizer=mhe", "--regularizer.batch=3",
    "--rotation=stochastic", "--rotation.every=5", "--data.limit=400", "--epochs=4", "--batch-size=32", "--threads=1",
]  # fmt: skip


def test_killed_at_any_moment_it_ends_in_the_same_bits(tmp_path, train):
    """Killed three times at random moments, mostly within a save, a checkpoint cut off once on top of that."""
    assert train("--out", tmp_path / "whole", *STATEFUL)[0] == 0
    out, chance = tmp_path / "killed", random.Random(os.getpid())
    words = [*COMMAND, "--out", str(out), *STATEFUL, "--resume=auto", "--save-every=0"]
    reached, said = 0, ""
    for attempt in range(3):
        process = subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        wait_for(lambda reached=reached: steps_in(out)[-1:] > [reached], process)
        time.sleep(chance.uniform(0, 0.1))
        process.kill()
        _, errors = process.communicate()
        said += errors
        assert process.returncode in (-signal.SIGKILL, 0), errors
        reached = steps_in(out)[-1]
        if attempt == 1:
            (damaged,) = (out / "checkpoints").glob(f"step-{reached:08d}")
            os.truncate(damaged / "state.pt", 100)
    code, _, errors = train(*words[len(COMMAND) :])
    assert code == 0, errors
    assert f"{damaged.name} is damaged: the size of state.pt is 100" in said
    found, expected = weights(out), weights(tmp_path / "whole")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    keys = ("epoch", "step", "loss", "test_accuracy", "energy")
    assert numbers(out, *keys) == numbers(tmp_path / "whole", *keys)


def test_an_interrupt_saves_and_ends_with_130(tmp_path, train):
    words = ["--out", str(tmp_path / "run"), *SMALL, "--epochs=300"]
    process = subprocess.Popen([*COMMAND, *words], env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait_for((tmp_path / "run" / "metrics.jsonl").exists, process)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=120)[1].decode()
    assert process.returncode == 130
    (step,) = steps_in(tmp_path / "run")[-1:]
    assert errors == (
        f"hypersphere: interrupted; step {step} is saved in {tmp_path / 'run'}; "
        "the same command with --resume auto goes on\n"
    )
    assert Run.open(tmp_path / "run").checkpoints(on_damage=pytest.fail).latest().step == step


# 33 rows in batches of 16: the last batch has one row, and the second process none
SPREAD = [
    "--data.limit=33", "--model=mlp", "--model.widths=[8]", "--model.norm=none", "--batch-size=16", "--epochs=6",
    "--optimizer=sgd", "--optimizer.lr=0.05", "--threads=1",
]  # fmt: skip


def assert_close(folder, alone):
    expected = weights(alone)
    for key, value in weights(folder).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)
    ours, theirs = (numbers(one, "step", "loss", "test_accuracy") for one in (folder, alone))
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_two_processes_with_a_sharded_head_are_as_one(tmp_path, train):
    words = [*SPREAD, "--head=arcface", "--head.s=8", "--augment.shift=1", "--optimizer.momentum=0.9"]
    assert train("--out", tmp_path / "alone", *words)[0] == 0
    spread = ["--out", str(tmp_path / "spread"), *words, "--head.sharded"]
    done = subprocess.run(
        [*TORCHRUN, "-m", "hypersphere", "train", *spread], capture_output=True, text=True, env=ENVIRONMENT, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Run: ") == 1
    assert_close(tmp_path / "spread", tmp_path / "alone")
    # the checkpoint is that of one process, optimiser included: one process goes on from it
    *_, last = sorted((tmp_path / "spread" / "checkpoints").iterdir())
    (last / "manifest.json").unlink()
    assert train(*spread, "--resume=auto")[0] == 0
    assert_close(tmp_path / "spread", tmp_path / "alone")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds a worker through /proc")
def test_a_killed_worker_is_started_again_and_the_end_is_that_of_one_process(tmp_path, train):
    words = [
        *SPREAD, "--epochs=30", "--regularizer=mhe", "--head.label_smoothing=0.1",
        "--head.class_weights=[1,2,1,1,1,1,1,1,1,0.5]",
    ]  # fmt: skip
    assert train("--out", tmp_path / "alone", *words)[0] == 0
    out = tmp_path / "spread"
    launched = [*TORCHRUN, "--max-restarts", "1", "-m", "hypersphere", "train", "--out", str(out), *words]
    process = subprocess.Popen(
        [*launched, "--save-every=0"], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: steps_in(out)[-1:] > [5], process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "going on from step" in printed
    assert_close(out, tmp_path / "alone")
