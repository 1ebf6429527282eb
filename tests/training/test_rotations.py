"""The menu of rotations: which layers are rotated, and what a rotation adds to training."""

import copy
import inspect
import itertools

import pytest
import torch
from torch import nn

from hypersphere.functions.orthogonal import Cayley, Free
from hypersphere.heads import AngularHead
from hypersphere.optim import OGD, OGDAdam
from hypersphere.rotation import RotationPenalty, rotate_, rotated_layers, rotation_parameters
from hypersphere.rotation.rotate import METHODS
from hypersphere.training.components import create
from hypersphere.training.config import Component
from hypersphere.training.rotations import ROTATIONS, NeuronPreparation, RotationOptions

KINDS = (RotationOptions, NeuronPreparation)
NEURON_OPTIONS = {"normalize": False, "refine": None, "refine_steps": 5000, "refine_rate": 0.1}


def network(*widths):
    """Return a network of linear layers and a head, as an experiment passes them to a rotation."""
    torch.manual_seed(0)
    layers = [nn.Linear(i, o) for i, o in itertools.pairwise(widths)]
    return nn.ModuleDict({"network": nn.Sequential(*layers), "head": AngularHead(widths[-1], 3)})


def rotations(modules):
    return {name: rotation for name, _, rotation in rotated_layers(modules)}


def defaults(name):
    parameters = list(inspect.signature(ROTATIONS[name]).parameters.values())
    assert parameters[0].name == "modules"
    return {one.name: one.default for one in parameters[1:]}


@pytest.mark.parametrize("name", METHODS)
def test_rotation_by_a_map_has_the_options_of_the_map_and_of_rotations(name):
    map_options = {key: one.default for key, one in inspect.signature(METHODS[name]).parameters.items()}
    rotation_options = {key: one.default for kind in KINDS for key, one in inspect.signature(kind).parameters.items()}
    assert sum(len(inspect.signature(kind).parameters) for kind in KINDS) == len(rotation_options)
    assert not map_options.keys() & rotation_options.keys()  # a name must not have two meanings
    assert defaults(name) == map_options | rotation_options
    assert ROTATIONS[name].__doc__ == METHODS[name].__doc__


def test_special_rotations_have_only_their_own_options():
    assert defaults("none") == NEURON_OPTIONS
    assert defaults("penalized") == {"weight": 1.0} | NEURON_OPTIONS
    layout = {"blocks": 1, "shared": False, "whole_first": False}
    assert defaults("descent") == {"momentum": 0.9, "adam": False} | layout | NEURON_OPTIONS
    own = {"fraction": 0.25, "every": 750, "method": "cayley", "whole_first": True}
    assert defaults("stochastic") == own | NEURON_OPTIONS
    own = {"block_size": 64, "every": 200, "sides": "both", "start": "normalized", "scale": 1.0, "method": "cayley"}
    assert defaults("equivalence") == own


def test_none_rotates_no_layer():
    modules = network(4, 6)
    added = ROTATIONS["none"](modules)
    assert not rotations(modules)
    assert added.penalty is added.periodic_fold is None
    assert added.orthogonal_parameters == []


@pytest.mark.parametrize("options", [{"normalize": True}, {"normalize": True, "refine": "mhe", "refine_steps": 2}])
def test_none_prepares_hidden_neurons_as_a_rotation_does(options):
    modules, rotated = network(4, 6, 8), network(4, 6, 8)
    ROTATIONS["none"](modules, **options)
    ROTATIONS["free"](rotated, **options)
    assert not rotations(modules)
    for one, other in zip(modules["network"], rotated["network"], strict=True):
        torch.testing.assert_close(one.weight, other.weight, rtol=0, atol=1e-6)
    assert torch.equal(modules["head"].weight, rotated["head"].weight)
    assert all(p.requires_grad for p in modules.parameters())


def test_none_refines_experts_and_groups_separately_as_a_rotation_does():
    torch.manual_seed(0)
    experts = nn.Module()
    experts.num_experts, experts.weight = 3, nn.Parameter(torch.randn(3, 6, 4))
    body = nn.Sequential(nn.Conv2d(4, 12, 3, groups=2), experts)
    modules = nn.ModuleDict({"network": body, "head": AngularHead(4, 3)})
    rotated = copy.deepcopy(modules)
    for name, one in (("none", modules), ("free", rotated)):
        ROTATIONS[name](one, normalize=True, refine="mhe", refine_steps=5)
    for one, other in zip(modules["network"], rotated["network"], strict=True):
        torch.testing.assert_close(one.weight, other.weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_rotation_by_a_map_equals_rotate(name):
    modules, expected = network(4, 6, 8), network(4, 6, 8)
    torch.manual_seed(1)
    ROTATIONS[name](modules, blocks=2, spread=0.1, normalize=True, learn_neurons=True)
    torch.manual_seed(1)
    rotate_(expected, name, blocks=2, spread=0.1, normalize=True, learn_neurons=True)
    assert list(rotations(modules)) == ["network.0", "network.1"]
    torch.testing.assert_close(modules.state_dict(), expected.state_dict(), rtol=0, atol=0)


def test_rotation_by_a_map_passes_the_options_of_the_map():
    modules = network(4, 6)
    ROTATIONS["cayley"](modules, bound=0.5, factors=2, blocks=2, shared=True)
    (rotation,) = rotations(modules).values()
    assert rotation.method == Cayley(bound=0.5)
    assert (rotation.layout.blocks, rotation.layout.shared, rotation.layout.factors) == (2, True, 2)


def test_rotation_by_a_map_passes_the_options_of_rotate():
    modules = network(4, 6, 8)
    options = {"block_size": 2, "side": "input", "dropout": 0.25, "quantize": "int8"}
    ROTATIONS["cayley"](modules, **options, whole_first=True)
    first, second = rotations(modules).values()
    assert [one.layout.block_size for one in (first, second)] == [4, 2]
    assert {one.side for one in (first, second)} == {"input"}
    assert {one.dropout for one in (first, second)} == {0.25}
    assert {layer.parametrizations.weight.original0.dtype for layer in modules["network"]} == {torch.int8}
    embedded = nn.ModuleDict({"network": nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4)), "head": AngularHead(4, 3)})
    ROTATIONS["cayley"](copy.deepcopy(embedded), embeddings=False)
    ROTATIONS["cayley"](embedded, embeddings=True)
    assert list(rotations(embedded)) == ["network.0", "network.1"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["network.0", "network.1"]),
        ({"output": True}, ["network.0", "network.1", "head"]),
        ({"output": True, "hidden": False}, ["head"]),
    ],
)
def test_rotation_selects_hidden_layers_and_the_head(options, expected):
    modules = network(4, 6, 8)
    ROTATIONS["cayley"](modules, **options)
    assert list(rotations(modules)) == expected


@pytest.mark.parametrize("name", ["cayley", "descent"])
def test_whole_first_rotates_the_first_layer_by_one_matrix(name):
    modules = network(5, 6, 8)  # 5 is not divisible by the number of blocks
    ROTATIONS[name](modules, blocks=2, shared=True, whole_first=True)
    layouts = [rotation.layout for rotation in rotations(modules).values()]
    assert [(layout.size, layout.blocks, layout.shared) for layout in layouts] == [(5, 1, False), (6, 2, True)]


@pytest.mark.parametrize("name", ["cayley", "descent", "stochastic"])
def test_whole_first_accepts_a_network_of_one_layer(name):
    modules = network(5, 6)
    ROTATIONS[name](modules, whole_first=True)
    ((layer, rotation),) = rotations(modules).items()
    assert layer == "network.0"
    assert rotation.layout.size == 5


def test_penalized_adds_a_penalty_of_free_matrices():
    modules = network(4, 6, 8)
    added = ROTATIONS["penalized"](modules, weight=0.3, normalize=True)
    assert isinstance(added.penalty, RotationPenalty)
    assert added.penalty.weight == 0.3
    assert {rotation.method for rotation in rotations(modules).values()} == {Free()}
    torch.testing.assert_close(modules["network"][0].weight.norm(dim=1), torch.ones(6))


@pytest.mark.parametrize(("options", "kind"), [({"momentum": 0.5}, OGD), ({"adam": True}, OGDAdam)])
def test_descent_trains_matrices_on_the_orthogonal_group(options, kind):
    modules = network(4, 6, 8)
    added = ROTATIONS["descent"](modules, **options)
    assert all(a is b for a, b in zip(added.orthogonal_parameters, rotation_parameters(modules), strict=True))
    optimizer = added.orthogonal_optimizer(added.orthogonal_parameters, lr=0.1)
    assert type(optimizer) is kind
    assert options.items() <= optimizer.defaults.items() or kind is OGDAdam


def test_stochastic_prepares_neurons_and_rotates_dimensions():
    modules, plain = network(4, 6, 8), network(4, 6, 8)
    torch.manual_seed(1)
    added = ROTATIONS["stochastic"](
        modules, fraction=3, every=7, method="lowdin", normalize=True, refine="mhe", refine_steps=2
    )
    assert added.periodic_fold.every == 7
    assert [rotation.layout.size for rotation in rotations(modules).values()] == [4, 3]
    weight = modules["network"][0].weight
    torch.testing.assert_close(weight.norm(dim=1), torch.ones(6))
    assert (weight - nn.functional.normalize(plain["network"][0].weight)).abs().max() > 1e-3  # refined


def test_stochastic_draws_dimensions_that_do_not_depend_on_the_refinement():
    drawn = []
    for options in ({}, {"refine": "comhe", "refine_steps": 2}):
        modules = network(4, 16, 8)
        torch.manual_seed(1)
        ROTATIONS["stochastic"](modules, **options)
        drawn.append(rotations(modules)["network.1"].dimensions)
    assert torch.equal(*drawn)


def test_equivalence_rotates_the_hidden_layers_of_the_network():
    modules = network(4, 6, 8)
    torch.manual_seed(1)
    added = ROTATIONS["equivalence"](modules, block_size=3, every=7, sides="output", scale=2.0)
    assert (added.periodic_fold.every, added.periodic_fold.sides) == (7, "output")
    assert [rotation.output.layout.blocks for rotation in rotations(modules).values()] == [2, 3]
    torch.testing.assert_close(modules["network"][0].weight.norm(dim=1), torch.full((6,), 2.0))
    assert modules["head"].weight.requires_grad


def test_stochastic_with_fraction_zero_freezes_the_neurons():
    modules = network(4, 6)
    before = copy.deepcopy(modules.state_dict())
    added = ROTATIONS["stochastic"](modules, fraction=0)
    assert added.periodic_fold is None
    assert not rotations(modules)
    assert not modules["network"][0].weight.requires_grad
    assert modules["head"].weight.requires_grad
    torch.testing.assert_close(modules.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "cayley",
            {"bond": 1.0},
            r"^rotation\.bond is not an option of cayley; did you mean bound\? Options: bound, blo",
        ),
        ("lowdin", {"bound": 1.0}, r"^rotation\.bound is not an option of lowdin"),
        ("penalized", {"blocks": 2}, r"^rotation\.blocks is not an option of penalized"),
        ("descent", {"spread": 1.0}, r"^rotation\.spread is not an option of descent"),
        ("none", {"blocks": 2}, r"^rotation\.blocks is not an option of none"),
        ("cayley", {"bound": -1.0}, "^bound must be None or a positive number, not -1.0$"),
        ("cayley", {"blocks": 2.5}, r"^rotation\.blocks must be an integer, not 2.5$"),
        ("cayley", {"blocks": 3}, "^layer 'network.0': blocks must be a divisor of 4"),
        ("descent", {"refine": "max"}, "^refine must be a callable of rows or one of 'mhe'"),
        ("stochastic", {"every": 0}, "^every must be an integer >= 1, not 0$"),
        ("equivalence", {"sides": "left"}, "^sides must be 'both', 'input' or 'output', not 'left'$"),
        ("equivalence", {"fraction": 0.5}, r"^rotation\.fraction is not an option of equivalence"),
    ],
)
def test_rotations_name_invalid_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        create(Component(name, options), "rotation", network(4, 6))


def test_rotation_options_reject_unknown_names():
    with pytest.raises(TypeError, match=r"^rotate has no option 'block'; did you mean blocks\?$"):
        ROTATIONS["cayley"](network(4, 6), block=2)
