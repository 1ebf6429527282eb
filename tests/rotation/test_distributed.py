"""Two processes train the same rotated model to the same parameters as one."""

import os
import socket

import pytest
import torch
import torch.multiprocessing as processes
from torch import nn

from hypersphere.rotation import Stochastic, fold_


def train(model, stochastic, batches, rank=0, world=1):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for x in batches:
        optimizer.zero_grad()
        model(x[rank::world]).square().mean().backward()
        optimizer.step()
        stochastic.step(optimizer)


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, Stochastic(model, 0.5, every=3, generator=torch.Generator().manual_seed(1)), torch.randn(8, 16, 6)


def worker(rank, port, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    model, stochastic, batches = make()
    train(nn.parallel.DistributedDataParallel(model), stochastic, batches, rank, 2)
    torch.save(fold_(model).state_dict(), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_two_processes_train_as_one(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes.spawn(worker, args=(port, str(tmp_path)), nprocs=2)
    model, stochastic, batches = make()
    train(model, stochastic, batches)
    alone = fold_(model).state_dict()
    for rank in range(2):
        together = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)
