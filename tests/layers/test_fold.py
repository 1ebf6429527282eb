"""Folding decoupled layers into layers of torch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from hypersphere.functions.magnitude import Linear
from hypersphere.layers import DecoupledConv2d, DecoupledLinear, convert_, equivalent_weight, fold_operator_

INNER_PRODUCTS = {
    "inner product": {"magnitude": "inner_product"},
    "linear": {"magnitude": "linear"},
    "scaled": {"magnitude": Linear(alpha=2.5)},
    "scaled and weighted": {"magnitude": Linear(alpha=2.5), "weighting": "linear"},
}


def network(**options):
    torch.manual_seed(0)
    return nn.Sequential(
        DecoupledConv2d(3, 4, 3, **options), nn.ReLU(), nn.Flatten(), DecoupledLinear(36, 2, **options)
    )


def images():
    return torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", INNER_PRODUCTS)
def test_fold_operator_keeps_the_responses_of_inner_products(kind):
    model, x = network(**INNER_PRODUCTS[kind]), images()
    before = model(x)
    assert fold_operator_(model) == 2
    assert [type(module) for module in model] == [nn.Conv2d, nn.ReLU, nn.Flatten, nn.Linear]
    torch.testing.assert_close(model(x), before)
    assert fold_operator_(model) == 0


@pytest.mark.parametrize("options", [{"magnitude": "tanh"}, {"magnitude": "linear", "angular": "linear"}])
def test_fold_operator_leaves_a_model_with_another_response_unchanged(options):
    model = network(**INNER_PRODUCTS["scaled"])
    model[3] = DecoupledLinear(36, 2, **options)
    state = copy.deepcopy(model.state_dict())
    assert equivalent_weight(model[3]) is None
    assert fold_operator_(model) == 0
    assert isinstance(model[0], DecoupledConv2d)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)


@pytest.mark.parametrize("kind", INNER_PRODUCTS)
def test_fold_operator_leaves_a_model_with_a_parametrised_layer_unchanged(kind):
    model, x = network(**INNER_PRODUCTS[kind]), images()
    parametrizations.weight_norm(model[3])
    before, state = model(x), copy.deepcopy(model.state_dict())
    with pytest.raises(
        ValueError, match=r"^model must have no parametrised decoupled layers, but '3' is parametrised: fold it"
    ):
        fold_operator_(model)
    assert parametrize.is_parametrized(model[3])
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    torch.testing.assert_close(model(x), before, rtol=0, atol=0)


def tied(first, second):
    """Return a model of two layers with the same weight."""
    second.weight = first.weight
    return nn.ModuleDict({"first": first, "second": second})


def linear(alpha):
    return DecoupledLinear(4, 4, bias=False, magnitude=Linear(alpha=alpha))


@pytest.mark.parametrize(
    "layers",
    [
        lambda: (nn.Embedding(7, 4), DecoupledLinear(4, 7, bias=False, magnitude="linear")),
        lambda: (DecoupledLinear(4, 7, bias=False, magnitude="linear"), nn.Linear(4, 7)),
        lambda: (linear(1.0), linear(2.0)),
    ],
    ids=["embedding", "linear layer", "other scale"],
)
def test_fold_operator_refuses_to_change_a_tied_weight(layers):
    model = tied(*layers())
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(
        ValueError, match=r"^layer 'first' must not share its weight, but it shares it with 'second', and folding"
    ):
        fold_operator_(model)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert any(isinstance(layer, DecoupledLinear) for layer in model.values())


def test_fold_operator_refuses_weights_that_share_their_memory():
    first, second = linear(1.0), linear(2.0)
    second.weight.data = first.weight.data
    with pytest.raises(ValueError, match=r"^layer '0' must not share its weight, but it shares it with '1'"):
        fold_operator_(nn.Sequential(first, second))


@pytest.mark.parametrize(
    "layers",
    [
        lambda: (nn.Embedding(7, 4), DecoupledLinear(4, 7, bias=False, magnitude="inner_product")),
        lambda: (linear(2.0), linear(2.0)),
    ],
    ids=["inner product", "same scale"],
)
def test_fold_operator_keeps_ties_of_layers_that_need_the_same_weight(layers):
    model = tied(*layers())
    x = torch.randn(3, 4)
    before = model["second"](x)
    assert fold_operator_(model) > 0
    assert model["first"].weight is model["second"].weight
    torch.testing.assert_close(model["second"](x), before)


def test_fold_operator_refuses_tied_attention_with_different_operators():
    model = nn.ModuleDict({"first": nn.MultiheadAttention(4, 2), "second": nn.MultiheadAttention(4, 2)})
    model["second"].in_proj_weight = model["first"].in_proj_weight
    convert_(model, where=lambda name, _: name == "first", magnitude="linear")
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="layer 'first' must not share its weight, but it shares it with 'second'"):
        fold_operator_(model)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    convert_(model, where=lambda name, _: name == "second", magnitude="linear")
    assert fold_operator_(model) == 6
    assert model["first"].in_proj_weight is model["second"].in_proj_weight


def test_equivalent_weight_is_available_under_its_old_name():
    with pytest.warns(DeprecationWarning, match="layers.plain_weight is deprecated, use .*equivalent_weight instead"):
        from hypersphere.layers import plain_weight
    assert plain_weight is equivalent_weight
