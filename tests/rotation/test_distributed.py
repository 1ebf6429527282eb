"""Two processes train the same rotated model to the same parameters as one."""

import pytest
import torch
from torch import nn

from hypersphere.rotation import Equivalence, Stochastic, fold_, rotate_, rotation_parameters
from processes import run_processes


def train(model, stochastic, batches, rank=0, world=1):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for x in batches:
        optimizer.zero_grad()
        model(x[rank::world]).square().mean().backward()
        optimizer.step()
        stochastic.step(optimizer)


def make(generator=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    batches = torch.randn(8, 16, 6)
    return model, Stochastic(model, 0.5, every=3, generator=generator), batches


def broadcast(model):
    """Make all processes start from the tensors of the first one, written through `.data`."""
    for tensor in (*model.parameters(), *model.buffers()):
        torch.distributed.broadcast(tensor.data, 0)


def worker(rank, folder):
    model, stochastic, batches = make(torch.Generator().manual_seed(1))
    train(nn.parallel.DistributedDataParallel(model), stochastic, batches, rank, 2)
    torch.save(fold_(model).state_dict(), f"{folder}/same_seed_{rank}.pt")

    # Two forward passes before one backward pass. The model broadcasts its buffers, the dimensions, in each of them.
    model, _, batches = make()
    replica = nn.parallel.DistributedDataParallel(model)
    (replica(batches[0]) + replica(batches[1])).square().mean().backward()

    # Processes with different global seeds.
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    stochastic = Stochastic(model, 0.5, every=3)
    train(nn.parallel.DistributedDataParallel(model), stochastic, batches, rank, 2)
    torch.save(fold_(model).state_dict(), f"{folder}/other_seed_{rank}.pt")

    # Orthogonal equivalence: weights, seeds and permutations differ before the model is wrapped.
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    equivalence = Equivalence(model, 4, every=3)
    replica = nn.parallel.DistributedDataParallel(model)
    (replica(batches[0]) + replica(batches[1])).square().mean().backward()
    train(replica, equivalence, batches, rank, 2)
    torch.save(fold_(model).state_dict(), f"{folder}/equivalence_{rank}.pt")

    # Neurons that a broadcast overwrites after the weight was read, without changing their version counter.
    torch.manual_seed(rank)
    layer = rotate_(nn.Linear(6, 4), "cayley")
    layer(batches[0])
    broadcast(layer)
    torch.save(layer(batches[0]).detach(), f"{folder}/broadcast_{rank}.pt")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_rotations_agree_between_two_processes(tmp_path):
    run_processes(worker, 2, tmp_path, tmp_path)
    model, stochastic, batches = make(torch.Generator().manual_seed(1))
    train(model, stochastic, batches)
    alone = fold_(model).state_dict()
    for rank in range(2):
        together = torch.load(tmp_path / f"same_seed_{rank}.pt")
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)
    for case in ("other_seed", "equivalence", "broadcast"):
        first, second = (torch.load(tmp_path / f"{case}_{rank}.pt") for rank in range(2))
        torch.testing.assert_close(first, second, atol=0, rtol=0)


def test_rotation_notices_writes_to_fixed_neurons_through_data():
    layer, x = rotate_(nn.Linear(6, 4), "cayley"), torch.randn(3, 6)
    with torch.no_grad():
        rotation_parameters(layer)[0].normal_()
    neurons = layer.parametrizations.weight.original
    for mode in (True, False):
        layer.train(mode)
        before = layer(x)
        neurons.data.mul_(-1)
        torch.testing.assert_close(layer(x) - layer.bias, -(before - layer.bias))
        neurons.data[[0, 1]] = neurons.data[[1, 0]]  # a permutation, which a comparison of sums would miss
        torch.testing.assert_close((layer(x) - layer.bias)[:, 0], -(before - layer.bias)[:, 1])
        neurons.data.copy_(-neurons[[1, 0, 2, 3]].detach())
