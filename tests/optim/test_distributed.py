"""OGD on matrices that FSDP2 distributes over two processes."""

import os
import socket

import pytest
import torch
import torch.multiprocessing as processes
from torch import nn

from hypersphere.optim import OGD, OGDAdam
from hypersphere.rotation import rotate_, rotation_parameters

KINDS = {"OGD": OGD, "OGDAdam": OGDAdam}


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 2))
    rotate_(model, "free")
    return model, torch.randn(6, 16, 6)


def train(model, optimizer, batches, rank=0, world=1):
    for x in batches:
        optimizer.zero_grad()
        (20 * model(x[rank::world]).square().mean()).backward()
        optimizer.step()


def result(model, optimizer):
    values = [p.detach() for p in rotation_parameters(model)]
    values += [optimizer.state[p]["momentum"] for p in rotation_parameters(model)]
    return [value.full_tensor() if hasattr(value, "full_tensor") else value for value in values]


def worker(rank, port, folder):
    from torch.distributed.fsdp import fully_shard

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    saved = {}
    for name, kind in KINDS.items():
        model, batches = make()
        for layer in (model[0], model[2], model):
            fully_shard(layer)
        optimizer = kind(rotation_parameters(model), lr=0.2)
        train(model, optimizer, batches[:3], rank, 2)
        # A state that is saved and loaded continues the same run.
        resumed = kind(rotation_parameters(model), lr=0.2)
        resumed.load_state_dict(optimizer.state_dict())
        train(model, resumed, batches[3:], rank, 2)
        assert all(p.to_local().numel() < p.numel() for p in rotation_parameters(model))
        saved[name] = result(model, resumed)
    torch.save(saved, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_ogd_under_fsdp2_equals_one_process(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes.spawn(worker, args=(port, str(tmp_path)), nprocs=2)
    for name, kind in KINDS.items():
        model, batches = make()
        optimizer = kind(rotation_parameters(model), lr=0.2)
        train(model, optimizer, batches)
        expected = result(model, optimizer)
        assert (expected[0] - torch.eye(6)).abs().max() > 0.05
        for rank in range(2):
            torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt")[name], expected, atol=1e-5, rtol=1e-4)
