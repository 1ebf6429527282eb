"""Compare the training loop with a minimal loop in plain PyTorch, on the digits, from the first step to the last.

Both train the same network and head with the same batches, optimiser and schedule, and compute the test accuracy after
every epoch. The training loop also logs, checks that losses are finite, computes energies and saves checkpoints.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import torch

from benchmarks.timing import compare, save
from hypersphere.data import DATA, DataSplit
from hypersphere.training import Config, Run, Trainer, minimize
from hypersphere.training.build import build

SETTINGS = {"model": "toy_cnn"}


def by_plain_loop(config: Config, data: DataSplit) -> None:
    """Train with a plain loop, `torch.optim` and `torch.optim.lr_scheduler`."""
    experiment = build(config, split=data)
    network, head, train, test = experiment.network, experiment.head, data.train, data.validation
    groups = experiment.optimizer.param_groups
    optimizer = torch.optim.AdamW([{"params": g["params"], "weight_decay": g["weight_decay"]} for g in groups], lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    rates = {"total_steps": experiment.steps + 1, "cycle_momentum": False}
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, **rates)
    for _ in range(config.epochs):
        network.train()
        for chunk in torch.randperm(len(train), generator=generator).split(config.batch_size):
            x, y = train.inputs[chunk].float() / 255, train.labels[chunk]
            loss = head(network(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            loss.item()
        network.eval()
        right = 0
        with torch.no_grad():
            for at in range(0, len(test), 500):
                x, y = test.inputs[at : at + 500].float() / 255, test.labels[at : at + 500]
                right += int((head.scores(network(x)).argmax(1) == y).sum())


def by_loop(config: Config, data: DataSplit) -> None:
    """Train with `minimize`."""
    experiment = build(config.patched({"validation": {"energy": False}}), split=data)
    objective = experiment.objective.train()
    batches = _Batches(experiment)
    minimize(
        objective,
        batches,
        epochs=config.epochs,
        optimizer=experiment.optimizer,
        scheduler=experiment.scheduler,
        check_every=config.log_every,
        on_step=lambda progress: experiment.after_step(progress.step),
        on_epoch=lambda epoch: experiment.validation(objective) and None,
    )


class _Batches:
    def __init__(self, experiment):
        self.experiment = experiment

    def __iter__(self):
        return (self.experiment.prepare(*batch) for batch in self.experiment.loader)


def by_trainer(config: Config, data: DataSplit) -> None:
    """Train as `hypersphere train` does once the data are read."""
    with tempfile.TemporaryDirectory() as folder:
        experiment = build(config, split=data)
        Trainer(experiment, Run.of(folder, experiment)).train()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="./run bench loop", description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--cpu-clock",
        action="store_true",
        help="measure process time, which varies less on a busy machine with one thread",
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    config = Config.of({**SETTINGS, "epochs": options.epochs})
    data = DATA["digits"](None)
    contenders = {
        "plain PyTorch": lambda: by_plain_loop(config, data),
        "minimize": lambda: by_loop(config, data),
        "train command": lambda: by_trainer(config, data),
    }
    clock = time.process_time if options.cpu_clock else time.perf_counter
    table = compare(contenders, baseline="plain PyTorch", rounds=options.rounds, warmup=1, clock=clock)
    size = f"digits, {options.epochs} epochs of {-(-len(data.train) // config.batch_size)} steps"
    notes = ["The train command also logs, computes the energy of every layer, and saves checkpoints."]
    save("loop", "The training loop", {size: table}, dict.fromkeys(["minimize", "train command"], 1.05), notes)
