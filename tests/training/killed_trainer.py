"""Train in a process that is killed again and again, until training has reached its end."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # otherwise imported by the first optimizer of every child

from hypersphere.training import Config, Run, Trainer
from hypersphere.training.build import build


def train(folder, settings):
    experiment = build(Config.of(settings))
    run = Run.open(folder) if (folder / "config.json").exists() else Run.of(folder, experiment)
    trainer = Trainer(experiment, run, on_message=sys.exit)  # a damaged checkpoint is an error
    trainer.resume()
    trainer.train()


def child(folder, settings):
    process = os.fork()
    if process == 0:
        status = 1
        try:
            train(folder, settings)
            status = 0
        finally:
            os._exit(status)
    return process


def main():
    """Train in one process, and in another folder in processes that are killed after random times."""
    torch.set_num_threads(1)
    place, settings = Path(sys.argv[1]), eval(sys.argv[2])
    build(Config.of(settings))  # imports what the children need
    began = time.perf_counter()
    assert os.waitpid(child(place / "complete", settings), 0)[1] == 0
    duration = time.perf_counter() - began
    moments, kills = random.Random(3), 0
    for attempt in range(100):
        process = child(place / "killed", settings)
        time.sleep(duration * moments.uniform(0.1, 0.6) * 1.03**attempt)
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        kills += 1
    print(kills)


if __name__ == "__main__":
    main()
