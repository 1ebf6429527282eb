"""Checks: what one process refuses all refuse, and a process that dies takes nobody into a hang."""

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from hypersphere.heads import AngularHead
from hypersphere.heads.sharded import ShardedHead

from .problem import CLASSES, DIM, HEADS, batch, made, raises


def check_errors(folder, groups):
    """What one process cannot accept, all refuse; afterwards the head works and has not changed."""
    size, rank = dist.get_world_size(), dist.get_rank()
    last = size - 1
    raises(lambda: ShardedHead(AngularHead(DIM, size - 1)), "sizes", "no more processes than classes")
    raises(lambda: ShardedHead(made(HEADS["arcface"]), sizes=[CLASSES]), "sizes", str(size))
    raises(lambda: ShardedHead(made(HEADS["arcface"]), sizes=[1] * (CLASSES + 1)), "sizes", str(CLASSES))
    raises(lambda: ShardedHead(AngularHead(DIM, CLASSES + rank)), "head", "same arguments")
    raises(lambda: ShardedHead(made(HEADS["arcface"]), sample=0.5 if rank else 2.0), "process 0", "sample")
    raises(lambda: ShardedHead(made(HEADS["smooth"]), sample=0.5), "label smoothing")
    head = ShardedHead(made(HEADS["annealed"]))
    good, y = batch(1)[:2]

    def with_row(value, dtype=torch.float64):
        x = good.clone()
        x[3, 2] = value if rank == last else 0.0
        return x.to(dtype)

    bad = y.clone()
    bad[2] = CLASSES if rank == last else 0
    raises(lambda: head(good, bad), f"process {last}", "row 2", str(CLASSES))
    raises(lambda: head(with_row(float("nan")), y), f"process {last}", "x must be finite", "row 3")
    raises(lambda: head.scores(with_row(float("inf"))), f"process {last}", "x must be finite", "row 3")
    raises(lambda: head(with_row(0.0, torch.float32 if rank == last else torch.float64), y), "one type", "float32")
    raises(lambda: head(good[:, : DIM - (rank == last)], y), f"process {last}", "shape")
    raises(lambda: head(good, y.double() if rank == last else y), f"process {last}", "labels")
    with torch.no_grad():
        kept = head.weight[0].clone()
        head.weight[0] = float("nan") if rank == last else kept
    raises(lambda: head(good, y), f"process {last}", "weight", "row 0")
    with torch.no_grad():
        head.weight[0] = kept
    assert head.head.steps.item() == 0
    assert head(good, y).isfinite()
    assert head.head.steps.item() == 1


def check_silence(folder, groups):
    """One process stops answering, and later is killed."""
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=2))
    x, y, _ = batch(1)
    head = ShardedHead(made(HEADS["arcface"]), group=group)
    head(x.requires_grad_(), y).backward()
    other = ShardedHead(made(HEADS["arcface"]))
    other(x, y).backward()
    loss = other(x, y)
    if rank == 1:
        time.sleep(6)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    raises(lambda: head(x, y), "process 0 of 2", "time-out", kind=RuntimeError)
    assert 1 < time.monotonic() - began < 15
    raises(loss.backward, "process 0 of 2", "has ended", kind=RuntimeError)  # waits for the end, and no longer
    raises(lambda: other(x, y), "process 0 of 2", "has ended", kind=RuntimeError)
    assert time.monotonic() - began < 20
    (folder / "survived").touch()
    os._exit(0)  # no farewell to the dead
