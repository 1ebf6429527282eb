import functools
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from hypersphere.training import Run
from processes import Command, command_group

from .trained import ENVIRONMENT, SMALL, TORCHRUN, numbers, steps_in, wait_for, weights


@pytest.fixture
def train(command):
    threads = torch.get_num_threads()
    yield functools.partial(command, "train")
    torch.set_num_threads(threads)


@pytest.fixture
def start(tmp_path):
    """Start the command in another process, which is killed at the end of the test if it is still running."""
    started = []

    def run(words):
        started.append(Command(words, tmp_path / "output"))
        return started[-1]

    yield run
    for process in started:
        process.kill()


@pytest.fixture
def run_group(tmp_path):
    """Run `hypersphere train` in two processes; return their joint output."""
    started = []

    def run(*words):
        group = command_group(["train", *words], 2, tmp_path / "output")
        started.extend(group)
        ends = [process.wait() for process in group]
        assert [code for code, _, _ in ends] == [0, 0], [errors for _, _, errors in ends]
        return "".join(out for _, out, _ in ends)

    yield run
    for process in started:
        process.kill()


STATEFUL = [
    "--model=embedding_cnn", "--model.widths=[4,4]", "--model.feature_dim=4", "--augment.shift.pixels=1",
    "--augment.mirror", "--head=a_softmax", "--head.annealing.start=10", "--regularizers=mhe",
    "--regularizers.mhe.batch=3", "--rotation=stochastic", "--rotation.every=5", "--data.limit=400", "--epochs=4",
    "--batch-size=32", "--threads=1",
]  # fmt: skip


@pytest.mark.slow
def test_train_killed_at_random_moments_gives_identical_results(tmp_path, train, start):
    """Three kills at random moments, mostly during a save, and one truncated checkpoint."""
    assert train("--out", tmp_path / "whole", *STATEFUL)[0] == 0
    out, chance = tmp_path / "killed", random.Random(os.getpid())
    words = ["--out", out, *STATEFUL, "--resume=auto", "--save-every=0"]
    reached, said = 0, ""
    for attempt in range(3):
        process = start(["train", *words])
        wait_for(lambda reached=reached: steps_in(out)[-1:] > [reached], process)
        time.sleep(chance.uniform(0, 0.1))
        process.kill()
        code, _, errors = process.wait()
        said += errors
        assert code in (-signal.SIGKILL, 0), errors
        reached = steps_in(out)[-1]
        if attempt == 1:
            (damaged,) = (out / "checkpoints").glob(f"step-{reached:08d}")
            os.truncate(damaged / "state.safetensors", 100)
    code, _, errors = train(*words)
    assert code == 0, errors
    assert f"{damaged.name} is damaged: the size of state.safetensors is 100" in said
    found, expected = weights(out), weights(tmp_path / "whole")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    keys = ("epoch", "step", "loss", "accuracy", "energy")
    assert numbers(out, *keys) == numbers(tmp_path / "whole", *keys)


def test_train_interrupt_saves_and_exits_with_130(tmp_path, train, start):
    words = ["--out", tmp_path / "run", *SMALL, "--epochs=300"]
    process = start(["train", *words])
    wait_for((tmp_path / "run" / "metrics.jsonl").exists, process)
    code, out, said = train(*words, "--resume=auto")
    assert (code, out, said.count("\n")) == (2, "", 1)
    assert "is in use by another training process" in said
    process.kill(signal.SIGINT)
    code, _, errors = process.wait()
    assert code == 130
    (step,) = steps_in(tmp_path / "run")[-1:]
    assert errors == (
        f"hypersphere: interrupted; step {step} is saved in {tmp_path / 'run'}; "
        "run the same command with --resume auto to continue\n"
    )
    assert Run.open(tmp_path / "run").checkpoints(on_damage=pytest.fail).latest().step == step


# 35 rows in batches of 16: the last batch has three rows, which all go to the first process
SPREAD = [
    "--data.limit=35", "--model=mlp", "--model.widths=[8]", "--model.norm=none", "--batch-size=16", "--epochs=6",
    "--optimizer=sgd", "--optimizer.lr=0.05", "--threads=1",
]  # fmt: skip


def assert_close(folder, alone):
    expected = weights(alone)
    for key, value in weights(folder).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)
    ours, theirs = (numbers(one, "step", "accuracy", "loss") for one in (folder, alone))
    for (*one, loss), (*other, expected_loss) in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
        assert loss == pytest.approx(expected_loss, rel=1e-4)
    for (one,), (other,) in zip(numbers(folder, "energy"), numbers(alone, "energy"), strict=True):
        assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.slow
def test_train_with_a_sharded_head_equals_one_process(tmp_path, train, run_group):
    words = [*SPREAD, "--head=arcface", "--head.s=8", "--optimizer.momentum=0.9"]
    assert train("--out", tmp_path / "alone", *words)[0] == 0
    spread = ["--out", str(tmp_path / "spread"), *words, "--head.sharded"]
    assert run_group(*spread).count("Run: ") == 1
    assert_close(tmp_path / "spread", tmp_path / "alone")
    # one process can resume from the checkpoint, including the state of the optimiser
    *_, last = sorted((tmp_path / "spread" / "checkpoints").iterdir())
    (last / "manifest.json").unlink()
    assert train(*spread, "--resume=auto")[0] == 0
    assert_close(tmp_path / "spread", tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds a worker through /proc")
def test_train_restarted_worker_gives_the_results_of_one_process(tmp_path, train):
    words = [
        *SPREAD, "--epochs=12", "--regularizers=mhe", "--head.label_smoothing=0.1",
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
    assert "resuming from step" in printed
    assert_close(out, tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds workers through /proc")
def test_train_interrupt_of_all_processes_saves_and_resumes_exactly(tmp_path, run_group):
    """With BatchNorm, for which each process needs at least two rows."""
    words = [*SPREAD, "--model.norm=batch", "--augment.shift.pixels=1", "--epochs=25", "--resume=auto"]
    run_group("--out", tmp_path / "whole", *words)
    out = tmp_path / "parts"
    launched = [*TORCHRUN, "-m", "hypersphere", "train", "--out", str(out), *words]
    pipe = subprocess.PIPE
    process = subprocess.Popen(launched, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True)
    wait_for(lambda: last_line(out) > 0, process)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for number in [*workers, process.pid]:  # as a scheduler does; the launcher also forwards its signal to the workers
        os.kill(int(number), signal.SIGTERM)
    _, errors = process.communicate(timeout=300)
    # torch's launcher sometimes aborts while it ends, because its store still has a running thread
    assert process.returncode in (1, -signal.SIGABRT), errors
    (reached,) = steps_in(out)[-1:]
    assert f"hypersphere: interrupted; step {reached} is saved in {out}" in errors
    printed = run_group("--out", out, *words)
    assert f"resuming from step {reached} of 75" in printed
    expected = weights(tmp_path / "whole")
    assert all(torch.equal(value, expected[key]) for key, value in weights(out).items())
    keys = ("epoch", "step", "loss", "accuracy", "energy")
    assert numbers(out, *keys) == numbers(tmp_path / "whole", *keys)


def last_line(folder):
    """Return the last logged step of a run."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines()[:-1] if path.exists() else []
    return max((json.loads(line)["step"] for line in lines), default=0)
