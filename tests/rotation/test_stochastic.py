"""Stochastic rotations (S-OPT)."""

from functools import partial

import pytest
import torch
from torch import nn

import oracle
from hypersphere.optim import Optimizers
from hypersphere.rotation import Equivalence, Stochastic, fold_, rotated_layers

from .samples import left_unchanged, mlp, perturb_


def neurons(layer):
    return layer.parametrizations.weight.original


def test_stochastic_rotates_the_drawn_dimensions_and_the_whole_first_layer():
    model = mlp()
    v = model[2].weight.detach().clone()
    Stochastic(model, 0.25, generator=torch.Generator().manual_seed(0))
    perturb_(model)
    first, second = [rotation for _, _, rotation in rotated_layers(model)]
    assert first.dimensions is None
    assert len(second.dimensions) == len(set(second.dimensions.tolist())) == 4
    moved = (model[2].weight - v).abs().amax(0) > 1e-6
    assert moved.nonzero().flatten().tolist() == second.dimensions.tolist()
    r = second.matrices()
    torch.testing.assert_close(model[2].weight[:, second.dimensions], v[:, second.dimensions] @ r.mT)
    x = torch.randn(3, 10)
    y = model(x)
    torch.testing.assert_close(fold_(model)(x), y, atol=1e-6, rtol=0)


def test_stochastic_gradient_matches_autograd():
    torch.manual_seed(0)
    model = mlp().double()
    Stochastic(model, 5, method="lowdin", whole_first=False)
    perturb_(model)
    _, layer, rotation = next(iter(rotated_layers(model)))
    neurons(layer).requires_grad_()
    g = torch.randn_like(layer.weight)
    ours = torch.autograd.grad((layer.weight * g).sum(), [rotation.parameter, neurons(layer)])
    free, v = rotation.parameter.detach().requires_grad_(), neurons(layer).detach().requires_grad_()
    u, _, vh = torch.linalg.svd(free)
    w = v.clone()
    w[:, rotation.dimensions] = v[:, rotation.dimensions] @ (u @ vh).mT
    torch.testing.assert_close(ours, torch.autograd.grad((w * g).sum(), [free, v]))


@pytest.mark.parametrize("method", ["cayley", "gram_schmidt", "lowdin"])
def test_stochastic_step_keeps_the_output_and_draws_other_dimensions(method):
    model, x = mlp(), torch.randn(5, 10)
    stochastic = Stochastic(model, 0.5, every=3, method=method)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    second = list(rotated_layers(model))[1][2]
    seen = set(second.dimensions.tolist())
    for step in range(1, 40):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        y = model(x)
        assert stochastic.step(optimizer) == (step % 3 == 0)
        torch.testing.assert_close(model(x), y, atol=1e-5, rtol=1e-5)
        if step % 3 == 0:
            assert torch.equal(second.parameter.detach(), second.identity())
            assert second.parameter not in optimizer.state
        seen |= set(second.dimensions.tolist())
    assert seen == set(range(16))


def test_stochastic_keeps_the_energy_over_two_thousand_folds():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 2))
    start = oracle.energy(model[0].weight.detach().double().numpy(), 2)
    norms = model[0].weight.detach().double().norm(dim=1)
    stochastic = Stochastic(model, 0.25, every=1, method="gram_schmidt", whole_first=False)
    _, layer, rotation = next(iter(rotated_layers(model)))
    first, eye = neurons(layer).clone(), rotation.identity()
    for _ in range(2_000):
        with torch.no_grad():
            rotation.parameter.copy_(eye + 0.5 * torch.randn_like(eye))
        stochastic.step()
    assert (neurons(layer) - first).abs().max() > 0.1
    end = neurons(layer).double()  # folds are computed in float64, so errors do not add up
    assert oracle.energy(end.numpy(), 2) == pytest.approx(start, rel=5e-7)
    torch.testing.assert_close(end.norm(dim=1), norms, rtol=5e-6, atol=0)


def test_stochastic_state_resumes_with_the_same_dimensions():
    def run(steps, resume=None):
        model = mlp()
        stochastic = Stochastic(model, 0.5, every=2, generator=torch.Generator().manual_seed(5))
        if resume:
            model.load_state_dict(resume[0])
            stochastic.load_state_dict(resume[1])
        drawn = []
        for _ in range(steps):
            stochastic.step()
            drawn.append(list(rotated_layers(model))[1][2].dimensions.tolist())
        return drawn, ({k: v.clone() for k, v in model.state_dict().items()}, stochastic.state_dict())

    uninterrupted, _ = run(8)
    half, state = run(3)
    rest, _ = run(5, state)
    assert half + rest == uninterrupted
    assert any("dimensions" in key for key in state[0])


def test_stochastic_fraction_may_be_a_share_a_number_or_a_mapping():
    def counts(fraction):
        model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(4)])
        Stochastic(model, fraction)
        return [rotation.layout.size for _, _, rotation in rotated_layers(model)]

    assert counts(0.25) == [16, 4, 4]
    assert counts(6) == [16, 6, 6]
    assert counts({"1": 0.5, "2": 3}) == [16, 8, 3]
    assert counts(1.0) == [16, 16, 16]


def test_stochastic_leaves_the_model_unchanged_after_an_error():
    model = mlp()
    with pytest.raises(TypeError):
        Stochastic(model, generator="no generator")
    assert not list(rotated_layers(model))


def test_stochastic_step_rejects_a_folded_model():
    model = mlp()
    stochastic = Stochastic(model, 0.5, every=1)
    fold_(model)
    with pytest.raises(ValueError, match="was folded; create a new"):
        stochastic.step()


@pytest.mark.parametrize("make", [partial(Stochastic, fraction=0.5), partial(Equivalence, block_size=4)])
def test_step_drops_the_state_of_several_optimizers(make):
    model, x = mlp(), torch.randn(5, 10)
    folded = make(model, every=1)
    rotated = {p for _, rotation in folded._folded_layers() for p in rotation.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    others = [p for p in trained if p not in rotated]
    optimizers = Optimizers([torch.optim.Adam(group) for group in (list(rotated), others)])
    model(x).square().sum().backward()
    optimizers.step()
    assert folded.step(optimizers)
    first, second = optimizers.optimizers
    assert not first.state
    assert set(second.state) == set(others)


@pytest.mark.parametrize("make", [partial(Stochastic, whole_first=False), partial(Equivalence, block_size=4)])
def test_step_leaves_everything_unchanged_after_an_error(make):
    model = mlp()
    folded = make(model, every=1)
    perturb_(model)
    with (
        left_unchanged(model),
        pytest.raises(ValueError, match=r"^optimizer must be None, an optimiser .*, not 'list'"),
    ):
        folded.step([torch.optim.Adam(model.parameters())])
    (*_, (_, last)) = folded._folded_layers()
    with torch.no_grad():
        next(last.parameters()).fill_(torch.nan)
    weight = model[0].parametrizations.weight.original.clone()
    with pytest.raises(ValueError, match="the parameters of a rotation must be finite"):
        folded.step()
    assert torch.equal(model[0].parametrizations.weight.original, weight)
    assert folded.steps == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fraction": 1}, r"fraction must be .* a share of them as a float in \(0, 1\], not 1"),
        ({"fraction": 0.0}, r"fraction must be a share in \(0, 1\], not 0.0"),
        ({"fraction": 1.5}, r"fraction must be a share in \(0, 1\], not 1.5"),
        ({"fraction": 99}, r"fraction must be a number of dimensions in \[2, 16\] of layer '2'"),
        ({"fraction": {"0": 0.5}}, "fraction must be a mapping with an entry for every layer"),
        ({"fraction": {"0": 0.5, "2": 0.5, "x": 2}}, r"fraction must be a mapping from names .*not \['x'\]"),
        ({"every": 0}, "every must be an integer >= 1, not 0"),
        ({"every": 2.5}, "every must be an integer >= 1, not 2.5"),
        ({"method": lambda d: nn.Linear(d, d)}, "method must be a name or an object"),
        ({"whole_first": 3}, "^whole_first must be a bool.*, not 3$"),
        ({"output": 3}, "^output must be a bool.*, not 3$"),
        ({"report": 3}, "^report must be a bool.*, not 3$"),
    ],
)
def test_stochastic_rejects_invalid_input_and_leaves_the_model_unchanged(options, message):
    model = mlp()
    with left_unchanged(model), pytest.raises(ValueError, match=message):
        Stochastic(model, **options)


def test_stochastic_accepts_the_old_name_of_partially_rotated():
    stochastic = Stochastic(mlp(), 0.5)
    with pytest.warns(DeprecationWarning, match="use Stochastic.partially_rotated"):
        assert stochastic.partial is stochastic.partially_rotated
