"""What layers, regularisers and heads do between construction and deletion: copies, files, dtypes, resets.

Presets and menu entries are read from their dictionaries, so a new one is tested at once. Classes outside of them are
listed by name; of the layers that `convert_` makes, a transposed convolution stands for all.
"""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from hypersphere import heads
from hypersphere.energy import REGULARIZERS, FeatureEnergy
from hypersphere.functions.projection import AnglePreserving, Random
from hypersphere.layers import PRESETS, DecoupledConv1d, DecoupledConv3d, DecoupledLinear, SphereNorm, convert_

LEARNED = {"magnitude": "tanh", "learn_radius": "filter", "angular": "sigmoid", "learn_k": "layer"}


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 5))


class Regularized(nn.Module):
    """A regulariser together with its model, as it is part of a training."""

    def __init__(self, name, **options):
        super().__init__()
        self.net = network()
        self.regularizer = REGULARIZERS[name](self.net, **options)

    def forward(self):
        return self.regularizer()


REGULARIZER_OPTIONS = {"comhe": {"projection": Random(dim=4)}}
# name: a function that builds the module, the shape of its input
LAYERS = {
    **{name: (lambda make=make: make(4, 6, 3, padding=1), (2, 4, 5, 5)) for name, make in PRESETS.items()},
    "learned convolution": (lambda: PRESETS["tanh_conv2d"](4, 6, 3, **LEARNED), (2, 4, 5, 5)),
    "half storage": (lambda: PRESETS["sphere_conv2d"](4, 6, 3, storage="half"), (2, 4, 5, 5)),
    "DecoupledConv1d": (lambda: DecoupledConv1d(4, 6, 3), (2, 4, 5)),
    "DecoupledConv3d": (lambda: DecoupledConv3d(4, 6, 2), (2, 4, 3, 3, 3)),
    "DecoupledLinear": (lambda: DecoupledLinear(6, 5, **LEARNED), (3, 6)),
    "transposed convolution": (lambda: convert_(nn.ConvTranspose2d(4, 6, 3, stride=2)), (2, 4, 5, 5)),
    "SphereNorm": (lambda: SphereNorm(nn.Conv2d(4, 6, 3), rescale="learned"), (2, 4, 5, 5)),
}
HEADS = {
    **{name: (lambda make=make: make(6, 5), (7, 6)) for name, make in heads.PRESETS.items()},
    "CenterHead": (lambda: heads.CenterHead(6, 5), (7, 6)),
    "FixedHead": (lambda: heads.FixedHead(torch.eye(5, 6)), (7, 6)),
    "MetricLearningHead": (lambda: heads.MetricLearningHead(6, 5), (7, 6)),
    "HingeHead": (lambda: heads.HingeHead(6, 5), (7, 6)),
    "annealed head": (lambda: heads.a_softmax(6, 5, annealing=heads.Annealing()), (7, 6)),
    "ShardedHead": (lambda: heads.ShardedHead(heads.arcface(6, 5)), (7, 6)),
}
REGULARIZED = {
    **{name: (lambda name=name: Regularized(name, **REGULARIZER_OPTIONS.get(name, {})), None) for name in REGULARIZERS},
    "random batches": (lambda: Regularized("mhe", batch=4), None),
    "learned basis": (lambda: Regularized("comhe", projection=AnglePreserving(dim=4)), None),
    "every third step": (lambda: Regularized("mhe", every=3, auto_advance=False), None),
}
FEATURES = {"FeatureEnergy": (FeatureEnergy, (7, 6))}
CASES = {**LAYERS, **HEADS, **REGULARIZED, **FEATURES}
every_case = pytest.mark.parametrize("name", CASES)


def build(name, seed=0):
    torch.manual_seed(seed)
    return CASES[name][0]()


def call(name, module, seed=1, dtype=torch.float32):
    """Return what one training call of a module computes: responses, a loss or the value of a regulariser."""
    torch.manual_seed(seed)
    shape = CASES[name][1]
    if shape is None:
        return module()
    x = torch.randn(shape).to(dtype)
    return module(x, torch.arange(7) % 5) if name in HEADS else module(x)


def state(module):
    return {key: value.clone() for key, value in module.state_dict().items()}


def assert_same_state(first, second):
    assert list(first) == list(second)
    for key, value in first.items():
        assert torch.equal(value, second[key]), key


def through_torch_save(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": through_torch_save,
}


@every_case
@pytest.mark.parametrize("way", COPIES)
def test_lifecycle_copy_continues_independently(name, way):
    module = build(name)
    call(name, module)  # so that there is a state to be copied: running means, counters, learned bases
    twin = COPIES[way](module)
    before = state(module)
    assert_same_state(before, state(twin))
    of_twin = call(name, twin, seed=2)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
    assert_same_state(state(module), before)
    assert torch.equal(call(name, module, seed=2), of_twin)


@every_case
def test_lifecycle_state_dict_restores_another_module(name):
    source, target = build(name), build(name, seed=5)
    for seed in (1, 2):
        call(name, source, seed)
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True))
    assert_same_state(state(source), state(target))
    for seed in (3, 4):
        assert torch.equal(call(name, source, seed), call(name, target, seed))
    assert_same_state(state(source), state(target))


@every_case
def test_lifecycle_call_has_no_effect_if_it_fails(name):
    module = build(name)
    call(name, module)
    before = state(module)
    if CASES[name][1] is None:
        weight = module.net[0].weight.detach().clone()
        with torch.no_grad():
            module.net[0].weight.fill_(torch.nan)
        with pytest.raises(ValueError, match="must be finite"):
            module()
        with torch.no_grad():
            module.net[0].weight.copy_(weight)
    else:
        with pytest.raises((ValueError, TypeError)):
            module(torch.ones(2, 3), torch.tensor([0, 1])) if name in HEADS else module(torch.ones(1, dtype=torch.long))
    assert_same_state(state(module), before)


@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_lifecycle_moves_to_another_dtype(name, dtype):
    reference, module = build(name), build(name).to(dtype)
    assert {parameter.dtype for parameter in module.parameters()} <= {dtype}
    value = call(name, module, dtype=dtype)
    assert value.dtype in (dtype, torch.float32)
    assert torch.isfinite(value).all()
    tolerance = 1e-4 if dtype == torch.float64 else 0.1
    torch.testing.assert_close(value.double(), call(name, reference).double(), rtol=tolerance, atol=tolerance)
    if value.requires_grad:
        value.sum().backward()
    for parameter in module.parameters():
        assert parameter.grad is None or torch.isfinite(parameter.grad).all()


@pytest.mark.parametrize("name", [name for name in (*LAYERS, *HEADS) if name not in ("SphereNorm", "ShardedHead")])
def test_lifecycle_reset_parameters_returns_to_a_new_module(name):
    module = build(name)
    call(name, module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.5)
    torch.manual_seed(0)
    module.reset_parameters()
    assert_same_state(state(module), state(build(name)))


def fingerprint(module):
    """Return all that a constructor could leave in a module: its class, attributes, hooks, parameters and buffers."""
    return [
        (
            path,
            type(part),
            sorted(part.__dict__),
            len(part._forward_hooks),
            len(part._forward_pre_hooks),
            sorted(tensors),
        )
        for path, part in module.named_modules()
        for tensors in [dict(part.named_parameters()) | dict(part.named_buffers())]
    ]


FAILING = {
    **{f"{name} with an invalid option": (network, REGULARIZERS[name], {"every": 0}) for name in REGULARIZERS},
    **{f"{name} with an unknown layer": (network, REGULARIZERS[name], {"output_layer": "7"}) for name in REGULARIZERS},
    "neuron weights of a wrong size": (network, REGULARIZERS["mhe"], {"neuron_weights": {"0": [1.0]}}),
    "a projection that does not exist": (network, REGULARIZERS["comhe"], {"projection": "fourier"}),
    "SphereNorm with an invalid scale": (lambda: nn.Conv2d(4, 6, 3), SphereNorm, {"rescale": "fixed"}),
    "SphereNorm with an invalid activation": (lambda: nn.Conv2d(4, 6, 3), SphereNorm, {"angular": "cosin"}),
    "SphereNorm with an invalid storage": (lambda: nn.Linear(4, 6), SphereNorm, {"storage": "quarter"}),
}


@pytest.mark.parametrize("name", FAILING)
def test_lifecycle_failed_constructor_leaves_its_argument_unchanged(name):
    make, kind, options = FAILING[name]
    argument = make()
    before, tensors, generator = fingerprint(argument), state(argument), torch.get_rng_state()
    with pytest.raises(ValueError, match="must"):
        kind(argument, **options)
    assert fingerprint(argument) == before
    assert_same_state(state(argument), tensors)
    assert torch.equal(torch.get_rng_state(), generator)
