"""Faults that were found by trying, and must not come back."""

import copy

import pytest
import torch
from torch import nn

from hypersphere.layers import DecoupledConv2d, DecoupledLinear, SphereNorm, convert_, revert_
from hypersphere.optim import WeightedGradients
from hypersphere.rotation import fold_, rotate_


def test_whole_numbers_are_refused_and_the_wider_type_wins():
    with pytest.raises(ValueError, match=r"x must be a tensor of a floating-point dtype, not torch\.uint8"):
        DecoupledConv2d(1, 2, 3)(torch.randint(0, 255, (1, 1, 4, 4), dtype=torch.uint8))
    for magnitude in ("sphere", "linear", "inner_product", "tanh"):
        layer = DecoupledLinear(3, 2, magnitude=magnitude, dtype=torch.float64)
        assert layer(torch.rand(1, 3)).dtype == torch.float64
        assert DecoupledLinear(3, 2, magnitude=magnitude)(torch.rand(1, 3).bfloat16()).dtype == torch.float32


def test_a_parametrised_layer_is_not_reverted_into_ruins():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    convert_(model)
    rotate_(model, output=True)
    x = torch.rand(1, 3, 4, 4)
    before = model(x)
    with pytest.raises(ValueError, match="fold it"):
        revert_(model)
    assert torch.equal(model(x), before)
    assert type(revert_(fold_(model))[0]) is nn.Conv2d


def test_a_sphere_norm_keeps_its_operator():
    model = nn.Sequential(SphereNorm(nn.Conv2d(3, 4, 3)), nn.Conv2d(4, 4, 3))
    x = torch.rand(1, 3, 8, 8)
    before = model[0](x)
    convert_(model, where=lambda name, _: name == "1")
    assert type(revert_(model)[1]) is nn.Conv2d
    assert torch.equal(model[0](x), before)
    with pytest.raises(ValueError, match="layer must be a plain Conv1d"):
        SphereNorm(nn.BatchNorm2d(3))


class Looks(nn.Module):
    """As a linear layer does, but computes something else."""

    def __init__(self, twice):
        super().__init__()
        self.in_channels, self.out_channels, self.twice = 3, 2, twice
        self.weight, self.bias = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return (2 if self.twice else 1) * nn.functional.linear(x, self.weight, self.bias)


def test_only_what_computes_a_linear_layer_is_taken_for_one():
    model = nn.ModuleDict({"scaled": Looks(True), "plain": Looks(False), "last": nn.Linear(3, 2)})
    convert_(model)
    assert isinstance(model["scaled"], Looks)
    assert isinstance(model["plain"], DecoupledLinear)
    assert model["plain"].in_features == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_running_mean_survives_a_bad_batch_and_half_precision(bad):
    layer = DecoupledConv2d(2, 3, 1, magnitude="tanh", learn_radius="layer")
    x = torch.rand(2, 2, 3, 3)
    layer(x.clone().fill_(bad))
    assert int(layer.batches) == 0
    layer(x)
    mean = layer.mean_norm.clone()
    layer(torch.full_like(x, bad))
    assert torch.equal(layer.mean_norm, mean)
    assert layer.half().mean_norm.dtype == torch.float32
    assert torch.equal(layer.mean_norm, mean)


def test_resetting_starts_learned_numbers_again():
    layer = DecoupledConv2d(2, 3, 1, angular="sigmoid", learn_k="filter", magnitude="tanh", learn_radius="layer")
    start = copy.deepcopy(layer.state_dict())
    with torch.no_grad():
        layer.log_k.add_(3)
        layer.log_radius.add_(1)
    layer(torch.rand(2, 2, 3, 3))
    layer.reset_parameters()
    for name in ("log_k", "log_radius", "mean_norm", "batches"):
        assert torch.equal(layer.state_dict()[name], start[name])
    assert not torch.equal(layer.weight, start["weight"])


def test_weighted_gradients_leave_frozen_weights_and_do_not_pile_up():
    model = nn.Sequential(DecoupledLinear(3, 4), DecoupledLinear(4, 2))
    model[1].weight.requires_grad_(False)
    weighted = WeightedGradients(model)
    with pytest.raises(ValueError, match="weighted already"):
        WeightedGradients(model)
    weighted.remove()
    WeightedGradients(model).remove()
