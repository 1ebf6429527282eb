"""Compare the training loop with a minimal loop in plain PyTorch, on the digits job, from the first step to the last.

Both train the same network and head with the same batches, optimiser and schedule, and compute the test accuracy after
every epoch. The training loop also logs, checks that losses are finite, computes energies and saves checkpoints.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.timing import compare, save
from hypersphere.training import Assembly, Job, Objective, minimize
from hypersphere.training.job_run import Run
from hypersphere.training.measure import accuracy
from hypersphere.training.session import Session
from hypersphere.training.task import Task, load_task


def by_plain_loop(job: Job, task: Task) -> None:
    """Train with a plain loop, `torch.optim` and `torch.optim.lr_scheduler`."""
    assembly = Assembly(job, task)
    network, head = assembly.network, assembly.head
    groups = assembly.optimizer.optimizers[0].param_groups
    optimizer = torch.optim.AdamW([{"params": g["params"], "weight_decay": g["weight_decay"]} for g in groups], lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    steps = job.epochs * -(-len(task.inputs) // job.batch_size)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps + 1, cycle_momentum=False)
    for _ in range(job.epochs):
        network.train()
        for chunk in torch.randperm(len(task.inputs), generator=generator).split(job.batch_size):
            x, y = task.inputs[chunk].float() / 255, task.labels[chunk]
            loss = head(network(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            loss.item()
        network.eval()
        right = 0
        with torch.no_grad():
            for at in range(0, len(task.test_inputs), 500):
                x, y = task.test_inputs[at : at + 500].float() / 255, task.test_labels[at : at + 500]
                right += int((head.scores(network(x)).argmax(1) == y).sum())


def by_loop(job: Job, task: Task) -> None:
    """Train with `minimize`."""
    assembly = Assembly(job, task)
    objective: Objective = assembly.objective
    minimize(
        objective.train(),
        assembly.batches,
        epochs=job.epochs,
        optimizer=assembly.optimizer,
        scheduler=assembly.scheduler,
        on_step=lambda progress: assembly.after_step(progress.step),
        on_epoch=lambda epoch: accuracy(objective, assembly.test_batches()) and None,
    )


def by_session(job: Job, task: Task) -> None:
    """Train as `hypersphere train` does once the data are read and the settings are written."""
    with tempfile.TemporaryDirectory() as folder:
        Session(Run(Path(folder), job, {}), Assembly(job, task)).train()


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
    job = Job(epochs=options.epochs)
    task = load_task(job.data)
    contenders = {
        "plain PyTorch": lambda: by_plain_loop(job, task),
        "minimize": lambda: by_loop(job, task),
        "train command": lambda: by_session(job, task),
    }
    clock = time.process_time if options.cpu_clock else time.perf_counter
    table = compare(contenders, baseline="plain PyTorch", rounds=options.rounds, warmup=1, clock=clock)
    size = f"digits, {options.epochs} epochs of {-(-len(task.inputs) // job.batch_size)} steps"
    notes = ["The train command also logs, computes the energy of every layer, and saves checkpoints."]
    save("loop", "The training loop", {size: table}, dict.fromkeys(["minimize", "train command"], 1.05), notes)
