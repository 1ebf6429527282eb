"""Layers at their edges: what once went wrong, silently or with a raw error."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import oracle
from hypersphere.energy import (
    MHE,
    SRIP,
    CoMHE,
    Orthogonal,
    Orthonormal,
    data_dependent_energy,
    hyperspherical_energy,
    low_rank_,
    minimize,
    random_energy,
)
from hypersphere.energy.draws import seeded
from hypersphere.energy.neurons import find_neurons
from hypersphere.functions.projection import Adversarial, AnglePreserving, Group, Random
from hypersphere.heads import AngularHead, ShardedHead


def pyramid(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 12), nn.Linear(12, 4)).to(dtype)


def test_spectral_iteration_survives_an_orthonormal_layer():
    w = torch.eye(5)
    regulariser = SRIP({"w": w}, 1.0, iterations=9)
    assert regulariser().item() == 0
    w.mul_(2)
    assert regulariser().item() == pytest.approx(3)


@pytest.mark.parametrize(
    "make",
    [
        SRIP,
        lambda net: CoMHE(net, projection=AnglePreserving(dim=4)),
        lambda net: CoMHE(net, projection=Adversarial(dim=4)),
        lambda net: MHE(net, batch=4),
    ],
)
def test_a_step_that_fails_leaves_the_state(make):
    net = pyramid()
    regulariser = make(net)
    regulariser()
    before = {name: value.clone() for name, value in regulariser.state_dict().items()}
    kept = net[0].weight.detach().clone()
    with torch.no_grad():
        net[0].weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="weight of 0 must be finite"):
        regulariser()
    for name, value in regulariser.state_dict().items():
        assert torch.equal(value, before[name])
    with torch.no_grad():
        net[0].weight.copy_(kept)
    assert torch.isfinite(regulariser())


@pytest.mark.parametrize("make", [Orthonormal, Orthogonal, SRIP])
def test_finite_weights_that_overflow_are_blamed(make):
    net = pyramid()
    with torch.no_grad():
        net[1].weight.mul_(1e25)
    with pytest.raises(ValueError, match="though all weights are finite: those of 1 are too large"):
        make(net)()


def test_a_wrapped_head_counts_once_as_an_output(monkeypatch):
    head = AngularHead(8, 5)
    model = nn.ModuleList([nn.Linear(4, 8), ShardedHead(head), AngularHead(8, 3)])
    found = find_neurons(model)
    assert [layer.name for layer in found.hidden] == ["0"]
    assert [layer.shape[1] for layer in found.outputs] == [5, 3]
    expected = sum(oracle.energy(model[k].weight.detach().numpy(), 2) for k in (1, 2))
    assert MHE(model, hidden=0)().item() == pytest.approx(expected, rel=1e-5)
    monkeypatch.setattr(type(model[1].processes), "size", property(lambda processes: 2))
    with pytest.raises(ValueError, match=r"1 must be a head whose class vectors .* energy_weight serves"):
        MHE(model)


class Adapted(nn.Module):
    """A layer with an adapter, built as such libraries do."""

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.in_features = base, base.in_features
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    @property
    def weight(self):
        return self.base_layer.weight


def test_an_adapted_layer_counts_once_without_its_adapter():
    found = find_neurons(nn.Sequential(Adapted(nn.Linear(8, 6)), nn.Linear(6, 4)))
    assert [layer.name for layer in found.layers] == ["0.base_layer", "1"]


def test_groups_of_one_number_join_their_neighbour():
    w = torch.randn(6, 9, dtype=torch.float64)
    value = CoMHE({"w": w}, projection=Group(channels=4), half_space=False)().item()
    expected = [oracle.energy(part.numpy(), 2) for part in (w[:, :4], w[:, 4:])]
    assert value == pytest.approx(np.mean(expected))
    with pytest.raises(ValueError, match="channels must be at least 2 where a channel has one number"):
        CoMHE({"w": w}, projection=Group(channels=1))
    with pytest.warns(UserWarning, match="left out, with neurons of one number: thin"):
        both = CoMHE({"thin": torch.randn(6, 1), "w": w}, projection=Group(channels=4), half_space=False)
    assert both().item() == pytest.approx(value)


def test_draws_are_not_the_stream_of_a_user():
    first = torch.randn(4, generator=seeded(0, 0))
    assert not torch.equal(first, torch.randn(4, generator=torch.Generator().manual_seed(0)))
    firsts = {tuple(torch.rand(2, generator=seeded(a, b)).tolist()) for a in range(-9, 9) for b in range(20)}
    assert len(firsts) == 360


@pytest.mark.parametrize("make", [SRIP, lambda net: CoMHE(net, projection=AnglePreserving(dim=4))])
def test_float64_state_resumes_exactly(make):
    net = pyramid(torch.float64)
    regulariser, resumed = make(net), make(net)
    regulariser()
    resumed.load_state_dict(regulariser.state_dict())
    assert resumed().item() == regulariser().item()


def test_gradients_of_half_precision_saturate():
    w = torch.tensor([[1e-3, 0, 0], [1e-3, 4e-6, 0], [0, 0, 1e-3]], dtype=torch.float16, requires_grad=True)
    MHE({"w": w}, half_space=False)().backward()
    assert torch.isfinite(w.grad).all()
    assert w.grad.abs().max() == torch.finfo(torch.float16).max


def test_labels_see_the_neurons_of_transposed_outputs():
    up, labels = nn.ConvTranspose1d(6, 4, 2), torch.tensor([0, 3])
    rows = up.weight.detach().transpose(0, 1).flatten(1)
    torch.testing.assert_close(MHE(up)(labels), data_dependent_energy(rows, labels))
    with pytest.raises(ValueError, match="labels must be None without one output layer"):
        MHE({"w": torch.randn(4, 3)})(labels)


def test_layers_are_told_apart_by_their_names():
    generator = torch.Generator().manual_seed(0)
    pairs = [(name, torch.randn(6, 8, generator=generator)) for name in ("a.b", "a_b", "a.~1b")]
    regulariser = CoMHE(pairs, projection=AnglePreserving(dim=3), shared=False)
    assert sum(name.startswith("basis") for name in regulariser.state_dict()) == 3
    with pytest.raises(ValueError, match="model must be pairs with different names, not \"with 'a' twice\""):
        MHE([("a", pairs[0][1]), ("a", pairs[1][1])])


@pytest.mark.parametrize("power", [0, 1, 2, 3])
@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e5, 1e18])
def test_weighted_energies_of_any_scale(power, scale):
    generator = torch.Generator().manual_seed(0)
    w, beta = torch.randn(6, 4, generator=generator), torch.rand(6, generator=generator) + 0.5
    w.requires_grad_()
    one = hyperspherical_energy(w, power=power, weights=beta)
    (slope,) = torch.autograd.grad(one, w)
    scaled = hyperspherical_energy(w, power=power, weights=beta * scale)
    (scaled_slope,) = torch.autograd.grad(scaled, w)
    if power == 0:
        assert scaled.item() == pytest.approx(one.item() - math.log(scale), rel=1e-4)
        torch.testing.assert_close(scaled_slope, slope)
    elif scale < 1e15 or power == 1:
        assert scaled.item() == pytest.approx(one.item() * scale**-power, rel=1e-4)
        torch.testing.assert_close(scaled_slope * scale**power, slope, rtol=1e-3, atol=1e-5)
    assert torch.isfinite(scaled_slope).all()


@pytest.mark.parametrize("length", [1e-30, 1e30])
def test_close_rows_of_extreme_length_have_finite_gradients(length):
    w = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    w = w / w.norm(dim=1, keepdim=True)
    w[1] = w[0] + torch.tensor([2e-3, 0, 0])
    w = (w * length).requires_grad_()
    hyperspherical_energy(w).backward()
    assert torch.isfinite(w.grad).all()


class Counted(nn.Module):
    """Counts how often it is evaluated."""

    calls = 0

    def forward(self, w):
        Counted.calls += 1
        return 2 * w


def test_parametrisations_are_evaluated_once():
    net = pyramid()
    for layer in net:
        parametrize.register_parametrization(layer, "weight", Counted())
    for make in (MHE, Orthonormal, SRIP, lambda net: CoMHE(net, projection=Random(dim=4))):
        Counted.calls = 0
        regulariser = make(net)
        assert Counted.calls == 3
        regulariser()
        assert Counted.calls == 6
    layer = parametrizations.spectral_norm(nn.Linear(6, 5))
    before = layer.parametrizations.weight[0]._u.clone()
    MHE(layer)
    assert torch.equal(before, layer.parametrizations.weight[0]._u)
    assert layer.parametrizations.weight[0].training


def test_backward_inside_autocast_is_exact():
    generator = torch.Generator().manual_seed(0)
    w, labels = torch.randn(20, 6, generator=generator, requires_grad=True), torch.tensor([1, 2])
    for energy in (hyperspherical_energy, lambda w: data_dependent_energy(w, labels)):
        (expected,) = torch.autograd.grad(energy(w), w)
        with torch.autocast("cpu", torch.bfloat16):
            (ours,) = torch.autograd.grad(energy(w), w)
            (plain,) = torch.autograd.grad(energy(w), w, create_graph=True)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(plain, expected, rtol=1e-4, atol=1e-7)


def test_defaults_of_the_sources():
    net = pyramid()
    half, full = (sum(oracle.energy(net[k].weight.detach().numpy(), 2, half_space=h) for k in (0, 1)) for h in (1, 0))
    assert MHE(net, output=0)().item() == pytest.approx(half, rel=1e-5)
    assert MHE(net, output=0, half_space=False)().item() == pytest.approx(10 * full, rel=1e-5)
    only = nn.Linear(8, 4)
    assert MHE(only)().item() == pytest.approx(oracle.energy(only.weight.detach().numpy(), 2), rel=1e-5)


def test_low_rank_starts_near_and_all_or_nothing():
    net, wanted = pyramid(), pyramid()
    low_rank_(net, 6)
    left, values, right = torch.linalg.svd(wanted[0].weight.detach(), full_matrices=False)
    best = left[:, :6] * values[:6] @ right[:6]
    torch.testing.assert_close(net[0].weight, best, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="0 must be a layer whose weight has no parametrisation yet"):
        low_rank_(net, 6)
    net = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 4), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"rank must be an integer from 1 to 4, .* in 1"):
        low_rank_(net, 6)
    assert not parametrize.is_parametrized(net[0])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MHE(None), "model must be a module, a mapping of names to tensors, or pairs of both, not 'NoneType'"),
        (lambda: MHE(torch.ones(3, 3)), "model must be a module, a mapping"),
        (lambda: MHE([torch.ones(3, 3)]), "model must be a module, a mapping"),
        (lambda: MHE("foo"), "model must be a module, .* not 'foo'"),
        (lambda: MHE(pyramid(), half_space="0"), "half_space must be None, a bool or a list"),
        (lambda: MHE(pyramid(), hidden="1"), "hidden must be None or a number >= 0, not '1'"),
        (lambda: MHE(pyramid(), batch=2.5), "batch must be None or an integer >= 2, not 2.5"),
        (lambda: MHE(pyramid(), seed=1.5), "seed must be an integer of 64 bits, not 1.5"),
        (lambda: CoMHE(pyramid(), half_space=["0"]), "half_space must be a bool"),
        (lambda: Random(4.0), "dim must be an integer >= 2, not 4.0"),
        (lambda: minimize(7.0, 3), "n must be an integer, not 7.0"),
        (lambda: minimize(2, 1, half_space=True), "d must be at least 2"),
        (lambda: hyperspherical_energy(np.ones((3, 3))), "w must be a floating-point matrix"),
        (lambda: random_energy(1, 5), "n must be at least 2"),
        (lambda: random_energy(5, 5, 2, "chord"), "distance must be 'euclidean' or 'angular'"),
        (lambda: random_energy(5, 5, torch.exp), "power must be a number >= 0 or a kernel"),
        (
            lambda: data_dependent_energy(torch.tensor([[1.0, 0], [math.nan, 1]]), torch.tensor([0])),
            "w must be finite, but row 1 is not",
        ),
    ],
)
def test_bad_input_names_itself(make, words):
    with pytest.raises(ValueError, match=words):
        make()
