"""A process that loads torch once and forks children that save or train in a folder until they are killed."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy
import torch
import torch._dynamo  # otherwise imported by the first optimizer of every child
from torch import nn

import hypersphere as hs
from hypersphere.training import Batches
from hypersphere.training.checkpoint import Checkpoints
from hypersphere.training.random_state import RandomState

EPOCHS, BATCHES = 3, 5


def content(step):
    """Return a module and a state that depend only on the step."""
    module = nn.Linear(300, 500)
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module, {"noise": torch.randn(1000, 100, generator=generator), "text": f"step {step}"}


def save_on(folder, count):
    """Save `count` more steps after the last checkpoint."""
    checkpoints = Checkpoints(folder, keep=2)
    last = checkpoints.latest()
    first = 0 if last is None else last.step + 1
    for step in range(first, first + count):
        module, state = content(step)
        checkpoints.save(step, {"module": module}, state)


def train(folder, stop=None):
    """Train with every kind of stateful object and save after every step; resume from the last checkpoint."""
    checkpoints = Checkpoints(folder, on_damage=lambda words: sys.exit(words))
    last = checkpoints.latest()
    seed = 0 if last is None else int.from_bytes(os.urandom(4), "little")
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(5))
    data = Batches(x, x[:, :3].argmax(1), 13, torch.Generator().manual_seed(seed))
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))
    head = hs.heads.a_softmax(4, 3)
    energy = hs.energy.MHE(model, batch=8)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=EPOCHS * BATCHES)
    modules = {"model": model, "head": head, "energy": energy}
    parts = {"optimizer": optimizer, "scheduler": scheduler, "data": data, "random": RandomState()}
    first, step = 1, 0
    if last is not None:
        last.restore_(modules, parts)
        first, step = last.state()["epoch"], last.step
    for epoch in range(first, EPOCHS + 1):
        for inputs, labels in data:
            jitter = 0.1 * random.gauss(0, 1) + 0.1 * numpy.random.normal()  # noqa: NPY002
            loss = head(model(inputs + jitter), labels) + 0.01 * energy()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            checkpoints.save(step, modules, {**parts, "epoch": epoch})
            if step == stop:
                return


def kill_at_event(number, folder):
    """Kill this process just before its `number`-th file system operation in the folder."""
    left = number

    def watch(event, arguments):
        nonlocal left
        removing = event in ("os.remove", "os.rmdir")  # these get a name relative to an open folder
        if removing or (event in ("open", "os.mkdir", "os.rename") and str(folder) in str(arguments[0])):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def child(work, *arguments):
    process = os.fork()
    if process == 0:
        status = 1
        try:
            work(*arguments)
            status = 0
        finally:
            os._exit(status)
    return process


def tell(word):
    """Print what happened and wait until the parent process has read it."""
    print(word, flush=True)
    sys.stdin.readline()


def wait_for(process):
    _, status = os.waitpid(process, 0)
    return "killed" if os.WIFSIGNALED(status) else "done" if os.WEXITSTATUS(status) == 0 else "failed"


def killed_after(seconds, work, *arguments):
    process = child(work, *arguments)
    time.sleep(seconds)
    os.kill(process, signal.SIGKILL)
    return wait_for(process)


def killed_at_event(number, folder):
    kill_at_event(number, folder)
    save_on(folder, 1)


def main():
    """Read a mode and a folder from each line and kill children until the mode is finished."""
    torch.set_num_threads(1)
    moments = random.Random(7)
    for line in sys.stdin:
        mode, folder = line.split(maxsplit=1)
        folder = Path(folder.strip())
        warm = folder / "warm"
        save_on(warm, 1)
        began = time.perf_counter()
        save_on(warm, 3)
        one = (time.perf_counter() - began) / 3
        if mode == "random":
            for _ in range(15):
                tell(killed_after(one * moments.uniform(0, 5), save_on, folder / "run", 10**6))
        if mode == "events":
            save_on(folder / "run", 3)
            for number in range(1, 200):
                word = wait_for(child(killed_at_event, number, folder / "run"))
                tell(word)
                if word != "killed":
                    break
        if mode == "train":
            tell(wait_for(child(train, folder / "whole")))
            for attempt in range(200):  # increasing delays, so that it also ends on a slow machine
                word = killed_after(one * moments.uniform(1, 7) * 1.05**attempt, train, folder / "run")
                tell(word)
                if word != "killed":
                    break
        tell("end")


if __name__ == "__main__":
    main()
