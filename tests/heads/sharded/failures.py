"""Checks: all processes reject what one of them rejects, and none waits for a process that has ended."""

import os
import signal
import time
from datetime import timedelta
from inspect import signature

import torch
import torch.distributed as dist

from hypersphere import margin
from hypersphere.heads import AngularHead, Annealing, BinaryHead, NonFiniteScoresError, Ramp, class_vectors
from hypersphere.heads.sharded import ShardedHead

from .problem import CLASSES, DIM, HEADS, batch, build_head, raises


def varied(**options):
    return AngularHead(DIM, CLASSES, **{"radius": 8.0, "margin": "additive_angle", "bias": True} | options)


def check_settings(folder, groups):
    """Settings that differ between processes are rejected, and the message names the setting."""
    last = dist.get_rank() == dist.get_world_size() - 1
    different = {
        "radius": 9.0,
        "normalize_weight": False,
        "angular": "linear",
        "margin": margin.AdditiveAngle(0.1),
        "annealing": Annealing(),
        "ramp": Ramp(7),
        "bias": False,
        "gradient": "detached",
        "energy_weight": 0.5,
        "energy_start": 5,
        "norm_weight": 0.1,
        "norm_target": 8.0,
        "class_weights": torch.arange(CLASSES) / 3,
        "label_smoothing": 0.1,
        "ignore_index": 2,
        "reduction": "sum",
        "centers": 2,
        "hard_margin": 0.1,
        "interclass_filter": 0.5,
        "curriculum": 0.9,
        "class_margins": torch.arange(CLASSES) / CLASSES,
        "class_sizes": torch.arange(CLASSES) + 1,
        "hard_negatives": 2,
    }
    assert different.keys() | {"self", "in_features", "num_classes"} == set(signature(AngularHead.__init__).parameters)
    words = {"class_sizes": ("same arguments", "class_margins")}
    for name, value in different.items():
        expected = words.get(name, ("same arguments", name))
        raises(lambda n=name, v=value: ShardedHead(varied(**{n: v} if last else {})), *expected)
    weights = torch.ones(CLASSES) + (torch.arange(CLASSES) == 3) * (0.001 if last else 0)
    raises(lambda: ShardedHead(varied(class_weights=weights)), "class_weights")
    raises(lambda: ShardedHead(BinaryHead(DIM, CLASSES, balance=0.6 if last else 0.7)), "balance", "0.6", "0.7")
    raises(lambda: ShardedHead(varied().to(torch.float64 if last else torch.float32)), "weight", "float64")
    for options in ({"sample": 0.3 if last else 0.4}, {"backbone": "summed" if last else "averaged"}):
        raises(lambda options=options: ShardedHead(varied(), **options), "same arguments", *options)
    head = varied(annealing=Annealing())
    if last:
        head.advance()
    raises(lambda: ShardedHead(head), "steps")
    ShardedHead(varied(angular=lambda c: c, class_weights=torch.ones(CLASSES)))  # addresses differ


def check_errors(folder, groups):
    """All processes raise if one has invalid input, and the head is unchanged and works afterwards."""
    size, rank = dist.get_world_size(), dist.get_rank()
    last = size - 1
    raises(lambda: ShardedHead(AngularHead(DIM, size - 1)), "sizes", "no more processes than classes")
    raises(lambda: ShardedHead(build_head(HEADS["arcface"]), sizes=[CLASSES]), "sizes", str(size))
    raises(lambda: ShardedHead(build_head(HEADS["arcface"]), sizes=[1] * (CLASSES + 1)), "sizes", str(CLASSES))
    raises(lambda: ShardedHead(AngularHead(DIM, CLASSES + rank)), "head", "same arguments")
    raises(lambda: ShardedHead(build_head(HEADS["arcface"]), sample=0.5 if rank else 2.0), "process 0", "sample")
    raises(lambda: ShardedHead(build_head(HEADS["smooth"]), sample=0.5), "label smoothing")
    head = ShardedHead(build_head(HEADS["annealed"]))
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
    raises(lambda: head(good.tolist() if rank == last else good, y), f"process {last}", "tensor")
    raises(lambda: class_vectors(head, good, y), "head", f"{head.sizes[rank]} of {CLASSES} classes")
    with torch.no_grad():
        class_vector = head.weight[0].clone()
        head.weight[0] = float("nan") if rank == last else class_vector
    raises(lambda: head(good, y), f"process {last}", "weight", "row 0", kind=NonFiniteScoresError)
    raises(lambda: head.scores(good), f"process {last}", "weight", "row 0", kind=NonFiniteScoresError)
    with torch.no_grad():
        head.weight[0] = class_vector
    assert head.head.steps.item() == 0
    assert head(good, y).isfinite()
    assert head.head.steps.item() == 1


def check_silence(folder, groups):
    """A process raises if the other one stops responding, and again after it was killed."""
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=2))
    x, y, _ = batch(1)
    head = ShardedHead(build_head(HEADS["arcface"]), group=group)
    head(x.requires_grad_(), y).backward()
    other = ShardedHead(build_head(HEADS["arcface"]))
    other(x, y).backward()
    loss = other(x, y)
    if rank == 1:
        time.sleep(6)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    raises(lambda: head(x, y), "process 0 of 2", "time-out", kind=RuntimeError)
    assert 1 < time.monotonic() - start < 15
    raises(loss.backward, "process 0 of 2", "has ended", kind=RuntimeError)  # waits until the other has ended
    raises(lambda: other(x, y), "process 0 of 2", "has ended", kind=RuntimeError)
    assert time.monotonic() - start < 20
    (folder / "survived").touch()
    os._exit(0)  # a regular exit would wait for the other process
