import functools
import json
import os
import resource
import signal
import sys

import pytest
import torch

from hypersphere.cli import training
from hypersphere.training import Run, Trainer, build_experiment, checkpoint

from .trained import SMALL, numbers, steps_in, weights


@pytest.fixture
def train(command):
    threads = torch.get_num_threads()
    yield functools.partial(command, "train")
    torch.set_num_threads(threads)


def test_train_divergence_is_one_line_and_code_1(tmp_path, train):
    code, _, errors = train("--out", tmp_path, *SMALL, "--optimizer=sgd", "--optimizer.lr=1e30")
    assert code == 1
    assert errors.count("\n") == 1
    assert "a smaller learning rate may help" in errors


def test_train_starts_a_run_without_a_checkpoint_again(tmp_path, train):
    words = ["--out", tmp_path, *SMALL, "--optimizer=sgd"]
    assert train(*words, "--optimizer.lr=1e30")[0] == 1
    assert {"config.json", "metrics.jsonl"} <= {path.name for path in tmp_path.iterdir()}
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "wandb.id").write_text("of the first run")
    with Run.open(tmp_path).locked():  # it could still be training
        code, _, errors = train(*words, "--optimizer.lr=0.1")
    assert (code, "is in use by another training process" in errors) == (2, True)
    assert Run.open(tmp_path).config.optimizer.options["lr"] == 1e30
    code, _, errors = train(*words, "--optimizer.lr=0.1")
    assert (code, errors) == (0, "")
    run = Run.open(tmp_path)
    assert run.config.optimizer.options == {"lr": 0.1}
    assert [line["step"] for line in run.metrics()] == [1, 5, 10, 10]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "wandb.id").exists()
    before = (tmp_path / "config.json").read_bytes(), (tmp_path / "metrics.jsonl").read_bytes()
    assert "already holds a run" in train(*words, "--optimizer.lr=0.1")[2]  # now it has a checkpoint
    for path in (tmp_path / "checkpoints").iterdir():
        path.rename(path.with_name(f"damaged-{path.name}"))
    assert "already holds a run" in train(*words, "--optimizer.lr=0.1")[2]
    assert ((tmp_path / "config.json").read_bytes(), (tmp_path / "metrics.jsonl").read_bytes()) == before


def test_train_does_not_replace_a_config_of_another_program(tmp_path, train):
    for text in ('{"model_type": "bert"}', "{", '{"format": 1}'):
        (tmp_path / "config.json").write_text(text)
        code, _, errors = train("--out", tmp_path, *SMALL)
        assert (code, "already holds a run" in errors) == (2, True)
        assert (tmp_path / "config.json").read_text() == text


def test_train_checks_the_settings_before_the_folder(tmp_path, train):
    (tmp_path / "config.json").write_text("{")
    for words, message in (
        (["--epochs=three"], "epochs must be an integer"),
        (["--head=arcfce"], "did you mean arcface?"),
        (["--head.q=3"], "head.q is not an option of softmax"),
        (["--model=auto", "--model.width=3"], "already holds a run"),
    ):
        code, _, errors = train("--out", tmp_path, *words)
        assert code == 2
        assert message in errors


def test_train_full_disk_keeps_earlier_checkpoints(tmp_path, train, monkeypatch):
    monkeypatch.setattr(Trainer, "_is_due", lambda self, interval=0: self.progress.step == 3)
    save, limits = Trainer._save, resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(trainer, **more):
        if trainer.progress.step > 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        save(trainer, **more)

    monkeypatch.setattr(Trainer, "_save", limited)
    try:
        code, _, errors = train("--out", tmp_path, *SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (code, errors.count("\n")) == (1, 1)
    assert f"the checkpoint of step 10 cannot be saved in {tmp_path / 'checkpoints'}: " in errors
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    monkeypatch.undo()
    assert train("--out", tmp_path, "--resume=auto")[0] == 0


def test_train_resumes_from_the_last_intact_checkpoint(tmp_path, train):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert train("--out", whole, *SMALL)[0] == 0
    assert train("--out", broken, *SMALL, "--save-every=0")[0] == 0
    assert steps_in(broken) == [8, 9, 10]
    for step, name in ((10, "weights.safetensors"), (9, "state.safetensors")):
        file = broken / "checkpoints" / f"step-{step:08d}" / name
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content if step == 10 else content[:-7])
    code, out, errors = train("--out", broken, "--resume=auto")
    assert code == 0
    assert "step-00000010 is damaged: the SHA-256 of weights.safetensors is" in errors
    assert "step-00000009 is damaged: the size of state.safetensors is" in errors
    assert errors.count("; using step-00000008 instead\n") == 2
    assert "\nresuming from step 8 of 10\n" in out
    assert all(torch.equal(value, weights(broken)[key]) for key, value in weights(whole).items())
    assert numbers(broken, "loss", "accuracy") == numbers(whole, "loss", "accuracy")
    for path in (broken / "checkpoints").glob("*/manifest.json"):
        path.write_text("{}")
    code, _, errors = train("--out", broken, "--resume=auto")
    assert (code, errors.count("\n")) == (3, 1)
    assert errors.startswith("hypersphere: no intact checkpoint in")
    (broken / "config.json").write_text("{")
    assert train("--out", broken, "--resume=auto")[0] == 3


def test_train_resume_reports_another_number_of_threads(tmp_path, train):
    assert train("--out", tmp_path, *SMALL)[0] == 0
    path = next((tmp_path / "checkpoints").glob("*10"))
    threads = json.loads((path / "manifest.json").read_text())["made_with"]["threads"]
    _, _, errors = train("--out", tmp_path, "--resume=auto", "--threads", threads + 1)
    assert f"saved with {threads} threads, now {threads + 1}: results may differ in rounding" in errors


def test_train_interrupt_before_the_first_step(tmp_path, train, monkeypatch):
    monkeypatch.setattr(training, "check_experiment", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    code, out, errors = train("--out", tmp_path / "run", *SMALL)
    assert (code, out) == (130, "")
    assert errors == f"hypersphere: interrupted; nothing new was saved in {tmp_path / 'run'}\n"


def test_train_second_interrupt_names_the_last_saved_step(tmp_path, train, monkeypatch):
    after_epoch = Trainer._after_epoch

    def ended(trainer, epoch):
        after_epoch(trainer, epoch)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Trainer, "_after_epoch", ended)
    code, _, errors = train("--out", tmp_path / "run", *SMALL)
    words = f"step 5 is saved in {tmp_path / 'run'}; run the same command with --resume auto to continue"
    assert (code, errors) == (130, f"hypersphere: interrupted; {words}\n")
    assert steps_in(tmp_path / "run") == [5]


def test_train_cannot_resume_from_weights_only(tmp_path, train):
    assert train("--out", tmp_path, *SMALL)[0] == 0
    Run.open(tmp_path).checkpoints().save(20, {"objective": build_experiment(Run.open(tmp_path).config).objective})
    code, _, error = train("--out", tmp_path, "--resume=auto", "--epochs=4")
    assert code == 2
    assert "holds weights only, so training cannot resume from it; start a new run from them" in error


def test_train_read_error_of_the_disk_is_not_treated_as_damage(tmp_path, train, monkeypatch):
    assert train("--out", tmp_path, *SMALL, "--save-every=0")[0] == 0
    monkeypatch.setattr(
        checkpoint, "file_summary", lambda path: (_ for _ in ()).throw(OSError(5, "Input/output error"))
    )
    code, _, errors = train("--out", tmp_path, "--resume=auto")
    assert (code, errors.count("\n")) == (1, 1)
    assert errors.endswith("step-00000010 cannot be read: Input/output error\n")
    assert steps_in(tmp_path) == [8, 9, 10]


# --- concurrent commands


def test_train_locks_the_folder(tmp_path, train):
    assert train("--out", tmp_path, *SMALL)[0] == 0
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with Run.open(tmp_path).locked():
        code, out, errors = train("--out", tmp_path, "--resume=auto")
    assert (code, out) == (2, "")
    words = "is in use by another training process; wait until it ends, or choose another folder"
    assert errors == f"hypersphere: {tmp_path} {words}\n"
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert train("--out", tmp_path, "--resume=auto")[0] == 0


def test_train_rejects_a_run_created_in_the_meantime(tmp_path, train, monkeypatch):
    def slowly(experiment, on_message):
        Run.create(tmp_path / "run", experiment.config.patched({"seed": 3}))

    monkeypatch.setattr(training, "check_experiment", slowly)
    for words, message in (
        (["--resume=auto"], "holds a run with different settings: seed was 3 and is 0"),
        ([], "already holds a run"),
    ):
        code, out, errors = train("--out", tmp_path / "run", *SMALL, *words)
        assert (code, out, errors.count("\n")) == (2, "", 1)
        assert message in errors
        names = {path.name for path in (tmp_path / "run").iterdir()} - {".lock"}
        assert names == {"config.json"}
        (tmp_path / "run" / "config.json").unlink()


def test_train_reports_a_model_larger_than_memory(tmp_path, fails):
    line = fails(1, "train", "--out", tmp_path / "run", *SMALL, "--embedding.dim=1000000000000")
    assert line.startswith("hypersphere: out of memory (could not allocate ")


def test_train_warns_about_bfloat16_without_instructions(tmp_path, train, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    code, _, errors = train("--out", tmp_path, *SMALL, "--precision=bfloat16", "--dry-run", "--device=cpu")
    assert code == 0
    assert errors == "hypersphere: this processor has no bfloat16 instructions; float32 is probably faster\n"


# --- foreign code and changed data


MODULE = """
import torch

print("imported")


class Net(torch.nn.Sequential):
    def __init__(self, in_channels: int = 1, width: int = 8) -> None:
        pool = torch.nn.AdaptiveAvgPool2d(1)
        super().__init__(torch.nn.Conv2d(in_channels, width, 3), torch.nn.ReLU(), pool, torch.nn.Flatten())
        self.feature_dim = width
"""


@pytest.fixture
def foreign(tmp_path, monkeypatch, train, capsys):
    """A run with a model of the user's, in the folder of its module."""
    (tmp_path / "my_net.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    words = ["--data.limit=70", "--model=my_net:Net", "--model.width=4", "--batch-size=16", "--epochs=1"]
    code, out, errors = train("--out", "run", *words)
    assert (code, errors) == (0, "")
    assert "my_net:Net with 4 features" in out
    sys.modules.pop("my_net")
    yield words
    sys.modules.pop("my_net", None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["evaluate", "embed", "inspect", "fold", "export", "attack", "report"])
def test_commands_import_foreign_code_only_if_trusted(name, foreign, fails, command):
    error = fails(2, name, "run")
    assert "(model my_net:Net), which is imported only with --trust-code" in error
    assert "my_net" not in sys.modules
    code, out, errors = command(name, "run", "--trust-code", *(["--to=torch"] if name == "export" else []))
    assert "imported" in out
    expected = (2, "hypersphere: run cannot be folded: all its layers are plain\n") if name == "fold" else (0, "")
    assert (code, errors) == expected


def test_train_resume_trusts_only_code_that_the_user_named(foreign, fails, train):
    error = fails(2, "train", "--out", "run", "--resume=auto")
    assert "the settings name code outside hypersphere (model my_net:Net), which needs --trust-code" in error
    error = fails(2, "train", "--out", "new", "--config", "run/config.json")
    assert "which needs --trust-code" in error
    assert "my_net" not in sys.modules
    assert train("--out", "run", "--resume=auto", "--epochs=2", "--trust-code")[0] == 0
    assert train("--out", "run", "--resume=auto", *foreign[:-1], "--epochs=3")[0] == 0


def test_train_names_the_wrong_option_of_foreign_code(foreign, command):
    code, _, error = command("train", "--out", "new", "--model=my_net:Net", "--model.widht=3")
    assert code == 2
    assert "model.widht is not an option of my_net:Net; did you mean width?" in error


def test_commands_notice_changed_data(tmp_path, draw_images, train, fails):
    greys = {f"photos/{kind}/{n}.png": 60 * kind + 10 * n for kind in (1, 2) for n in range(9)}
    draw_images(tmp_path, greys, size=(8, 8))
    words = ["--data=image_folder", f"--data.path={tmp_path / 'photos'}", *SMALL[1:]]
    code, _, errors = train("--out", tmp_path / "run", *words)
    assert (code, errors) == (0, "")
    (tmp_path / "photos" / "1").rename(tmp_path / "photos" / "3")
    message = f"the data have changed since {tmp_path / 'run'} was created: class '1' is now '2'"
    assert message in fails(2, "evaluate", tmp_path / "run")
    code, _, errors = train("--out", tmp_path / "run", "--resume=auto", "--epochs=3")
    assert code == 2
    assert message in errors
