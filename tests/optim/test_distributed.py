"""OGD and OGDAdam on matrices that FSDP2 distributes over two processes."""

import itertools

import pytest
import torch
from torch import nn

from hypersphere.optim import OGD, OGDAdam
from hypersphere.rotation import rotate_, rotation_parameters
from processes import run_processes


def rotated_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 2))
    return rotate_(model, "free"), torch.randn(4, 16, 6)


def make_optimizers(model):
    """One optimiser per rotated layer, so that a single run tests both."""
    first, second = rotation_parameters(model)
    return OGD([first], lr=0.2), OGDAdam([second], lr=0.2)


def train(model, optimizers, batches, rank=0, world=1):
    for x in batches:
        model.zero_grad()
        (20 * model(x[rank::world]).square().mean()).backward()
        for optimizer in optimizers:
            optimizer.step()


def matrices_and_momenta(model, optimizers):
    """Return the rotations and the momenta as full tensors."""
    values = []
    for p, optimizer in zip(rotation_parameters(model), optimizers, strict=True):
        values += [p.detach(), optimizer.state[p]["momentum"]]
    return [value.full_tensor() if hasattr(value, "full_tensor") else value for value in values]


def worker(rank, folder):
    for case in ("model", "layers"):
        torch.save(train_sharded(case, rank), f"{folder}/{case}_{rank}.pt")


def train_sharded(case, rank):
    """Distribute the model as one unit or layer by layer, train it, and return its matrices and momenta."""
    from torch.distributed.fsdp import fully_shard

    model, batches = rotated_model()
    if case == "layers":
        for layer in (model[0], model[2], model[4]):
            fully_shard(layer)
    fully_shard(model)
    optimizers = make_optimizers(model)
    train(model, optimizers, batches[:2], rank, 2)
    # A state that is saved and loaded continues the same run.
    resumed = make_optimizers(model)
    for optimizer, saved in zip(resumed, optimizers, strict=True):
        optimizer.load_state_dict(saved.state_dict())
    train(model, resumed, batches[2:], rank, 2)
    assert all(p.to_local().numel() < p.numel() for p in rotation_parameters(model))
    return matrices_and_momenta(model, resumed)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_ogd_under_fsdp2_equals_one_process(tmp_path):
    run_processes(worker, 2, tmp_path, tmp_path)
    model, batches = rotated_model()
    optimizers = make_optimizers(model)
    train(model, optimizers, batches)
    expected = matrices_and_momenta(model, optimizers)
    assert (expected[0] - torch.eye(6)).abs().max() > 0.05
    for case, rank in itertools.product(("model", "layers"), range(2)):
        torch.testing.assert_close(torch.load(tmp_path / f"{case}_{rank}.pt"), expected, atol=1e-5, rtol=1e-4)
