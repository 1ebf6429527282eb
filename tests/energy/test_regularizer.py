"""What all regularisers of neurons share: layers, steps, schedules, state."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from hypersphere.energy import (
    MHE,
    SRIP,
    CoMHE,
    Orthonormal,
    data_dependent_energy,
    hyperspherical_energy,
    minimize,
    random_energy,
)
from hypersphere.energy._regularizer import seeded_generator
from hypersphere.functions.projection import Adversarial, AnglePreserving, Random

from .networks import network, pyramid


def test_regularizers_work_compiled_and_data_parallel():
    net = network()
    made = torch.compile(MHE(net), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(made(), MHE(net)())
    projected = CoMHE(net, projection=Random(dim=4))
    expected = [projected().item() for _ in range(2)]
    compiled = torch.compile(CoMHE(net, projection=Random(dim=4)), backend="aot_eager")
    assert [compiled().item() for _ in range(2)] == pytest.approx(expected, rel=1e-4)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(net)
        regulariser = CoMHE(parallel, projection=AnglePreserving(dim=4))
        (parallel(torch.randn(2, 4, 4, 4)).square().mean() + regulariser()).backward()
        assert net[0].weight.grad.abs().sum() > 0
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("make", [MHE, Orthonormal, SRIP, lambda net: CoMHE(net, projection=Random(dim=4))])
def test_regularizers_name_weights_that_are_not_finite(make):
    net = network()
    regulariser = make(net)
    with torch.no_grad():
        net[3].weight[2, 1] = float("nan")
    with pytest.raises(ValueError, match="weight of 3 must be finite, but row 2 is not"):
        regulariser()


@pytest.mark.parametrize(
    "make",
    [
        SRIP,
        lambda net: CoMHE(net, projection=AnglePreserving(dim=4)),
        lambda net: CoMHE(net, projection=Adversarial(dim=4)),
        lambda net: MHE(net, batch=4),
    ],
)
def test_regularizers_keep_their_state_if_a_step_fails(make):
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
    selection = MHE(nn.Sequential(Adapted(nn.Linear(8, 6)), nn.Linear(6, 4))).selection
    assert [layer.name for layer in selection] == ["0.base_layer", "1"]


def test_seeded_generator_differs_from_the_stream_of_manual_seed():
    first = torch.randn(4, generator=seeded_generator(0, 0))
    assert not torch.equal(first, torch.randn(4, generator=torch.Generator().manual_seed(0)))
    firsts = {tuple(torch.rand(2, generator=seeded_generator(a, b)).tolist()) for a in range(-9, 9) for b in range(20)}
    assert len(firsts) == 360


@pytest.mark.parametrize("make", [SRIP, lambda net: CoMHE(net, projection=AnglePreserving(dim=4))])
def test_regularizers_resume_float64_state_exactly(make):
    net = pyramid(torch.float64)
    regulariser, resumed = make(net), make(net)
    regulariser()
    resumed.load_state_dict(regulariser.state_dict())
    assert resumed().item() == regulariser().item()


class Counted(nn.Module):
    """Counts how often it is evaluated."""

    calls = 0

    def forward(self, w):
        Counted.calls += 1
        return 2 * w


def test_regularizers_evaluate_parametrisations_once():
    net = pyramid()
    for layer in net:
        parametrize.register_parametrization(layer, "weight", Counted())
    regularizers = (
        MHE,
        lambda net: Orthonormal(net, output=True),
        lambda net: SRIP(net, output=True),
        lambda net: CoMHE(net, projection=Random(dim=4)),
    )
    for make in regularizers:
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


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MHE(nn.ReLU()), "model must be one with a layer of two or more neurons"),
        (lambda: MHE({}), "model must be one with a layer of two or more neurons"),
        (
            lambda: MHE(nn.Linear(3, 4), half_space=True, output_layer="weight"),
            "half_space must be False if the only layer",
        ),
        (lambda: MHE(network(), half_space=["5"]), "half_space must not name the output layer '5'"),
        (
            lambda: MHE(network(), half_space=["conv"]),
            "half_space must be None, a bool or a list of some",
        ),
        (lambda: MHE(network(), output_layer="conv"), "output must be 'auto', None or one of '0'"),
        (lambda: MHE(network(), hidden=-1), "hidden must be None or a number >= 0"),
        (lambda: MHE({"w": torch.ones(3)}), "w must be a floating-point tensor"),
        (lambda: MHE(nn.Sequential(nn.LazyLinear(3))), "0: its weight is not initialised: run a batch"),
        (lambda: CoMHE(network(), projection="fourier"), "projection must be one of 'random'"),
        (lambda: CoMHE(nn.Linear(40, 4), output_layer="weight"), "model must be one with a hidden layer"),
        (lambda: Orthonormal(network(), -1), "weight must be a number >= 0"),
    ],
)
def test_regularizers_reject_bad_input(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: MHE(None),
            "model must be a module, a mapping from names to tensors, or pairs of both, not 'None",
        ),
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
def test_arguments_are_named_in_errors(make, words):
    with pytest.raises(ValueError, match=words):
        make()
