"""Checks: a head in several processes computes what it computes in one."""

import copy
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hypersphere.heads import fixed
from hypersphere.heads.sharded import ShardedHead

from .problem import CLASSES, DIM, HEADS, batch, build_head, close, local_classes, local_rows, raises


def compare(make, group, dtype, tolerance):
    """Compare two training steps with the head of one process: losses, gradients, statistics, scores."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    reference = build_head(make, dtype)
    head = ShardedHead(reference, group=group, backbone="summed")
    for step in range(2):
        x, y, parts = batch(size, dtype, seed=step)
        features, local_features = x.clone().requires_grad_(), x[parts[rank]].clone().requires_grad_()
        expected, loss = reference(features, y), head(local_features, y[parts[rank]])
        close(loss, expected, tolerance)
        reference.zero_grad()
        head.zero_grad()
        expected.backward()
        loss.backward()
        close(local_features.grad, features.grad[parts[rank]], tolerance)
        close(head.weight.grad, reference.weight.grad[local_rows(head)], tolerance)
        if reference.bias is not None:
            one = len(reference.bias) == 1
            close(
                head.head.bias.grad, reference.bias.grad if one else reference.bias.grad[local_classes(head)], tolerance
            )
    close(head.scores(x[parts[rank]]), reference.scores(x)[parts[rank]].detach(), tolerance)
    for (name, buffer), (_, expected) in zip(head.head.named_buffers(), reference.named_buffers(), strict=True):
        # Sums over processes are rounded differently from sums over all classes.
        torch.testing.assert_close(
            buffer, expected, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def check_equality(folder, groups):
    for group in groups:
        for name, make in HEADS.items():
            try:
                compare(make, group, torch.float64, 1e-10)
            except AssertionError as error:
                raise AssertionError(f"{name} in {dist.get_world_size(group)} processes: {error}") from error


def check_fixed(folder, groups):
    """A fixed head in several processes has the losses, feature gradients and scores of one process."""
    for group in groups:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        torch.manual_seed(4)
        reference = fixed(DIM, CLASSES, s=8.0, vectors="energy", margin="additive_angle", hard_negatives=2).double()
        head = ShardedHead(reference, group=group, backbone="summed")
        assert [name for name, p in head.named_parameters() if not p.requires_grad] == ["head.weight"]
        assert not list(head.buffers())
        assert torch.equal(head.weight, reference.weight[local_rows(head)])
        x, y, parts = batch(size)
        features, local_features = x.clone().requires_grad_(), x[parts[rank]].clone().requires_grad_()
        expected, loss = reference(features, y), head(local_features, y[parts[rank]])
        close(loss, expected)
        expected.backward()
        loss.backward()
        close(local_features.grad, features.grad[parts[rank]])
        close(head.scores(x[parts[rank]]), reference.scores(x)[parts[rank]].detach())
        state = head.processes.all_gather_objects(head.full_state_dict())[0]
        assert torch.equal(state["weight"], reference.weight)
        with torch.no_grad():
            head.weight.zero_()
        head.load_full_state_dict(state)
        close(head(x[parts[rank]], y[parts[rank]]), expected.detach())
        other = fixed(DIM, CLASSES, vectors=torch.ones(CLASSES, DIM).tril() + rank)
        raises(lambda other=other, group=group: ShardedHead(other, group=group), "same arguments", "weight")


def check_float32(folder, groups):
    for name in ("arcface", "softmax", "sphereface_plus", "sphereface2"):
        make = partial(HEADS[name], s=8.0) if name == "arcface" else HEADS[name]
        compare(make, groups[0], torch.float32, 1e-5)  # matrix products of other sizes are rounded differently


def check_half(folder, groups):
    """Half-precision features under autocast give the loss of one process; parameters are not cast."""
    size, rank = dist.get_world_size(), dist.get_rank()
    reference = build_head(HEADS["arcface"], torch.float32)
    head = ShardedHead(reference, backbone="summed")
    x, y, parts = batch(size, torch.bfloat16)
    features, local_features = x.clone().requires_grad_(), x[parts[rank]].clone().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16):
        expected, loss = reference(features, y), head(local_features, y[parts[rank]])
    close(loss, expected, 1e-5)
    loss.backward()
    expected.backward()
    close(local_features.grad, features.grad[parts[rank]], 1e-2)
    close(head.weight.grad, reference.weight.grad[local_rows(head)], 1e-5)


def check_rows(folder, groups):
    """Losses per sample can be used differently in each process; the objective is the sum over processes."""
    size, rank = dist.get_world_size(), dist.get_rank()
    reference = build_head(partial(HEADS["arcface"]))
    reference.reduction = "none"
    head = ShardedHead(reference, backbone="summed")
    x, y, parts = batch(size)
    factors = torch.linspace(-1, 2, len(y), dtype=x.dtype)
    features, local_features = x.clone().requires_grad_(), x[parts[rank]].clone().requires_grad_()
    expected, loss = reference(features, y), head(local_features, y[parts[rank]])
    close(loss, expected[parts[rank]])
    (expected * factors).sum().backward()
    (loss * factors[parts[rank]]).sum().backward()
    close(local_features.grad, features.grad[parts[rank]])
    close(head.weight.grad, reference.weight.grad[local_rows(head)])


def check_empty(folder, groups):
    """No process has samples; then only the first has, and the features of the others require no gradient."""
    rank = dist.get_rank()
    head = ShardedHead(build_head(HEADS["sphereface_plus"]))
    none = torch.empty(0, DIM, dtype=torch.float64, requires_grad=True)
    loss = head(none, torch.empty(0, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0
    assert not head.weight.grad.any()
    x, y, _ = batch(1)
    part = slice(0, len(x) if rank == 0 else 0)
    head(x[part].requires_grad_(rank == 0), y[part]).backward()
    assert head.weight.grad.isfinite().all()


def check_sizes(folder, groups):
    """Classes can be distributed unevenly."""
    sizes = (1, 4, 1, 1)[: dist.get_world_size()]
    reference = build_head(HEADS["biased"])
    head = ShardedHead(reference, sizes=sizes)
    assert len(head.weight) == len(head.head.bias) == sizes[dist.get_rank()]
    x, y, parts = batch(len(sizes))
    close(head(x[parts[dist.get_rank()]], y[parts[dist.get_rank()]]), reference(x, y))


def check_ddp(folder, groups):
    """A backbone in `DistributedDataParallel` and a sharded head train as in one process."""
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(3)
    backbone = torch.nn.Sequential(torch.nn.Linear(DIM, 8), torch.nn.Tanh(), torch.nn.Linear(8, DIM)).double()
    reference = build_head(HEADS["am_softmax"])
    head = ShardedHead(reference)
    parallel = DistributedDataParallel(copy.deepcopy(backbone))
    optimizer = torch.optim.SGD([*backbone.parameters(), *reference.parameters()], lr=0.1, momentum=0.9)
    parallel_optimizer = torch.optim.SGD([*parallel.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
    for step in range(4):
        x, y, parts = batch(size, seed=step)
        losses = reference(backbone(x), y), head(parallel(x[parts[rank]]), y[parts[rank]])
        for one, loss in zip((optimizer, parallel_optimizer), losses, strict=True):
            one.zero_grad()
            loss.backward()
            one.step()
    for parameter, expected in zip(parallel.parameters(), backbone.parameters(), strict=True):
        close(parameter, expected)
    close(head.weight, reference.weight[local_rows(head)])
