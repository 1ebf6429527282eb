"""Muon against the optimisers of torch."""

import io

import pytest
import torch
from torch import nn

from hypersphere.optim import Muon


def make_parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 4), (5, 2, 3, 3), (6,), ()]
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(parameters, step):
    generator = torch.Generator().manual_seed(step)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def test_muon_equals_the_optimizers_of_torch():
    """Convolutions are the matrices of their filters, and vectors are trained by AdamW."""
    parameters, references = make_parameters(), make_parameters()
    references[1] = nn.Parameter(references[1].detach().flatten(1))
    optimizer = Muon(parameters, lr=0.01)
    matrices = torch.optim.Muon(references[:2], lr=0.01, adjust_lr_fn="match_rms_adamw")
    vectors = torch.optim.AdamW(references[2:], lr=0.01, weight_decay=0.1)
    for step in range(10):
        set_gradients(parameters, step)
        for p, q in zip(parameters, references, strict=True):
            q.grad = p.grad.view(q.shape)
        for one in (optimizer, matrices, vectors):
            one.step()
    for p, q in zip(parameters, references, strict=True):
        torch.testing.assert_close(p.detach().view(q.shape), q.detach(), rtol=0, atol=0)


def test_muon_updates_are_orthogonal_with_the_size_of_those_of_adamw():
    p = nn.Parameter(torch.zeros(64, 16, 3, 3))
    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    Muon([p], lr=0.01, weight_decay=0.0).step()
    singular = torch.linalg.svdvals(p.detach().flatten(1))
    assert singular.max() < 2 * singular.min()  # five Newton–Schulz steps are approximate
    assert p.detach().square().mean().sqrt().item() == pytest.approx(0.2 * 0.01, rel=0.2)


def test_muon_accepts_other_memory_formats():
    weights = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        p = nn.Parameter(make_parameters()[1].detach().to(memory_format=memory_format))
        optimizer = Muon([p], lr=0.01)
        for step in range(3):
            set_gradients([p], step)
            optimizer.step()
        weights.append(p.detach())
    torch.testing.assert_close(*weights)


def test_muon_resumes_bit_for_bit():
    def run(parameters, optimizer, steps):
        for step in steps:
            set_gradients(parameters, step)
            optimizer.step()

    parameters = make_parameters()
    optimizer = Muon(parameters, lr=0.01)
    run(parameters, optimizer, range(4))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = [nn.Parameter(p.detach().clone()) for p in parameters]
    other = Muon(resumed)
    other.load_state_dict(torch.load(file))
    run(parameters, optimizer, range(4, 8))
    run(resumed, other, range(4, 8))
    assert all(torch.equal(p, q) for p, q in zip(parameters, resumed, strict=True))


def test_muon_trains_a_model_of_all_kinds_of_layers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, 2))
    x, y = torch.randn(32, 1, 5, 5), torch.arange(32) % 2
    optimizer = Muon(model.parameters(), lr=0.1, weight_decay=0.0)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(30)]
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be a number >= 0"),
        ({"weight_decay": -1.0}, "weight_decay must be a number >= 0"),
        ({"momentum": 1.0}, "momentum must be a number in"),
        ({"steps": 0}, "steps must be an integer in"),
        ({"betas": 0.9}, "betas must be two numbers in"),
    ],
)
def test_muon_rejects_invalid_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        Muon(make_parameters(), **options)
