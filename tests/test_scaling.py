"""The cost model of a sharded head against the tensors of real heads in one process."""

import dataclasses

import pytest
import torch
from benchmarks.scaling import MAKE_OPTIMIZER, Job

from hypersphere.heads import ShardedHead, arcface, fused_loss

DENSE = [Job(1000, 1, dim=16, batch=8, optimizer=name) for name in ("sgd", "momentum", "adamw")]
SAMPLED = [Job(20_000, 1, dim=16, batch=8, sample=0.1, optimizer=name) for name in ("sgd", "sparse_adam")]


def size(tensor):
    if tensor.is_sparse:
        return size(tensor._indices()) + size(tensor._values())
    return tensor.nbytes


def train(job, steps=2):
    """Train a head; return it, its optimiser, and the products that the last forward pass saved."""
    torch.manual_seed(0)
    head = ShardedHead(arcface(job.dim, job.classes), sample=job.sample)
    optimizer = MAKE_OPTIMIZER[job.optimizer](head.parameters())
    for _ in range(steps):
        products = {}

        def pack(tensor):
            if tensor.ndim == 2 and len(tensor) == job.batch and tensor.shape[1] not in (1, job.dim):
                products[tensor.data_ptr()] = tensor  # noqa: B023
            return tensor

        x = torch.randn(job.batch, job.dim, requires_grad=True)
        optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = head(x, torch.randint(job.classes, (job.batch,)))
        loss.backward()
        optimizer.step()
    return head, optimizer, list(products.values())


@pytest.mark.parametrize("job", DENSE + SAMPLED, ids=lambda job: f"{job.optimizer}-{job.sample}")
def test_job_memory_is_the_size_of_the_tensors(job):
    head, optimizer, _ = train(job)
    states = [value for value in optimizer.state[head.weight].values() if torch.is_tensor(value) and value.ndim == 2]
    assert job.memory["weight"] == size(head.weight) == job.checkpoint - job.memory["optimizer"]
    assert job.memory["optimizer"] == sum(map(size, states))
    # The number of sampled classes is random.
    assert job.memory["gradient"] == pytest.approx(size(head.weight.grad), rel=0.1 if job.sample else 0)


@pytest.mark.parametrize("limit", [2**26, 2**18])
def test_job_knows_which_products_are_saved(monkeypatch, limit):
    monkeypatch.setattr(fused_loss, "_SAVED_PRODUCTS", limit)
    job = Job(140_000, 1, dim=64, batch=8)
    *_, products = train(job, steps=1)
    saved = sum(map(size, products))
    assert saved == (4 * job.products if job.saves_products else 0)
    largest = max((product.numel() for product in products), default=job._block_products())
    assert largest == job._block_products()
    without = dataclasses.replace(job, optimizer="sgd").memory["temporary"]
    assert without == saved + 4 * (3 * largest + 3 * job.dim * job.batch)


def test_job_traffic_is_the_sum_of_its_collectives():
    job = Job(10**6, 4, dim=512, batch=32, sample=0.5)
    assert job.traffic == 3 * (4 * 512 * 32 + 8 * 512 * 32 + 8 * 32 + 16 * 32 + 32)
    assert dataclasses.replace(job, classes=10**8, sample=None).traffic == job.traffic
    assert dataclasses.replace(job, ranks=1).traffic == 0
