"""Layer factories: one constructor gives plain, decoupled and sphere networks."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import hypersphere as hs
from hypersphere.layers import DecoupledConv2d
from hypersphere.models._blocks import he_normal_


@pytest.mark.parametrize("magnitude", ["sphere", "tanh", "inner_product"])
def test_conv_factory_makes_every_convolution_decoupled(small_networks, magnitude):
    torch.manual_seed(0)
    for model, size in small_networks(partial(DecoupledConv2d, magnitude=magnitude)):
        convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
        expected = hs.magnitude.MAGNITUDES[magnitude]()
        assert all(isinstance(m, DecoupledConv2d) and m.magnitude == expected for m in convs)
        model(torch.rand(3, 3, *size)).sum().backward()
        assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())


def test_inner_product_networks_equal_plain_networks(small_networks):
    torch.manual_seed(1)
    plain = small_networks(nn.Conv2d)[0][0]
    torch.manual_seed(1)
    decoupled = small_networks(partial(DecoupledConv2d, magnitude="inner_product"))[0][0]
    x = torch.rand(2, 3, 8, 8)
    assert torch.equal(plain(x), decoupled(x))


def test_he_normal_draws_by_fan_in_and_leaves_parametrised_layers():
    torch.manual_seed(0)
    fixed = parametrizations.weight_norm(nn.Linear(8, 8))
    before = fixed.weight.detach().clone()
    model = nn.Sequential(nn.Linear(200, 100), nn.Conv2d(20, 50, 3), fixed)
    he_normal_(model)
    assert float(model[0].weight.detach().std()) == pytest.approx((2 / 200) ** 0.5, rel=0.05)
    assert float(model[1].weight.detach().std()) == pytest.approx((2 / 180) ** 0.5, rel=0.05)
    assert not model[0].bias.any()
    assert torch.equal(fixed.weight, before)
