"""One YAML file: a Hugging Face encoder, Kornia augmentations, half precision, accumulation, open-set validation, W&B.

The job is killed twice while workers decode images, and must end with the same bits as without a kill.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("transformers")
pytest.importorskip("kornia")
pytest.importorskip("wandb")
pytest.importorskip("torchdata")
Image = pytest.importorskip("PIL.Image")

from hypersphere.training import Config, Run, Trainer  # noqa: E402
from hypersphere.training.build import build  # noqa: E402

CONFIG = """
data: {{name: image_folder, path: {photos}, split: class, held_out: 4, size: 16}}
model: {{name: "hf:vit", hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 32,
        patch_size: 4}}
embedding: {{dim: 8, pool: first, neck: linear_batch_norm}}
augment: [{{name: crop, scale: [0.7, 1.0]}}, flip, {{name: colour, brightness: 0.2}}]
head: {{name: arcface, s: 16}}
optimizer: {{name: adamw, lr: 0.001, layer_decay: 0.8}}
precision: {precision}
accumulate: 4
ema: 0.9
batch_size: 8
workers: 2
steps: 9
save_every: 0.0
log_every: 1
validation: {{protocols: [verification], best: verification.accuracy}}
trackers: [{{name: wandb, mode: offline}}]
"""

# A server that imports everything once and forks one process per line that it reads, with the path of a config and that
# of a folder. The process trains in the folder and prints its number and each step.
SERVER = """
import os, random, sys
from pathlib import Path
import numpy, torch, torch._dynamo, wandb
sys.path.insert(0, sys.argv[1])
from test_foreign_job import experiment_of, train

torch.set_num_threads(1)
for count, line in enumerate(sys.stdin):
    config, folder = map(Path, line.rstrip("\\n").split("\\t"))
    if count == 0:
        experiment_of(config)  # imports the encoder and the augmentations
    process = os.fork()
    if process == 0:
        status = 1
        try:
            os.setsid()
            for seed in (random.seed, numpy.random.seed, torch.seed):  # a new process begins with other random numbers
                seed()
            train(config, folder, lambda trainer: print(os.getpid(), trainer.progress.step, flush=True))
            status = 0
        finally:
            os._exit(status)
    print("ended", os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


def experiment_of(config):
    return build(Config.of(yaml.safe_load(config.read_text())))


def train(config, folder, on_step=None):
    experiment = experiment_of(config)
    run = Run.open(folder) if (folder / "config.json").exists() else Run.of(folder, experiment)
    trainer = Trainer(experiment, run, on_step=on_step)
    trainer.resume()
    trainer.train()


def write_photos(folder):
    generator = torch.Generator().manual_seed(0)
    for label in range(12):
        (folder / f"person-{label}").mkdir(parents=True)
        colour = torch.rand(3, 1, 1, generator=generator)
        for number in range(8):
            pixels = (colour + 0.2 * torch.rand(3, 20, 20, generator=generator)).clamp(0, 1)
            image = Image.fromarray((255 * pixels).to(torch.uint8).permute(1, 2, 0).numpy())
            image.save(folder / f"person-{label}" / f"{number}.jpg")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    command, pipe = [sys.executable, "-c", SERVER, str(Path(__file__).parent)], subprocess.PIPE
    folder = tmp_path_factory.mktemp("server")
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=folder) as process:
        yield process
        process.stdin.close()
    assert process.returncode == 0


def train_in_server(server, config, folder, kill_after=None):
    """Train in another process and return its exit code; kill it and its workers after a step if asked to."""
    print(config, folder, sep="\t", file=server.stdin, flush=True)
    for line in server.stdout:
        process, number = line.split()
        if process == "ended":
            return int(number)
        if kill_after is not None and int(number) >= kill_after:
            os.killpg(int(process), signal.SIGKILL)
            kill_after = None
    raise AssertionError("the server has ended")


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "kills"), [("bfloat16", [2, 5]), ("float16", [4])])
def test_foreign_job_resumes_bit_identically_after_kills(tmp_path, precision, kills, server, monkeypatch):
    write_photos(tmp_path / "photos")
    config = tmp_path / "job.yaml"
    config.write_text(CONFIG.format(photos=tmp_path / "photos", precision=precision))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train(config, tmp_path / "whole")
    finally:
        torch.set_num_threads(threads)
    for step in kills:
        assert train_in_server(server, config, tmp_path / "killed", step) == -signal.SIGKILL
    assert train_in_server(server, config, tmp_path / "killed") == 0
    runs = [Run.open(tmp_path / name) for name in ("whole", "killed")]
    weights = [run.checkpoint().weights() for run in runs]
    assert weights[0].keys() == weights[1].keys() >= {"objective", "ema"}
    for module, tensors in weights[0].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, weights[1][module][name]), (module, name)
    lines = [
        [{key: value for key, value in line.items() if key not in ("seconds", "examples_per_second")} for line in lines]
        for lines in (run.metrics() for run in runs)
    ]
    assert lines[0] == lines[1]
    assert any("verification.accuracy" in line for line in lines[0])
    assert list(Path(tmp_path).rglob("run-*.wandb"))
