import pytest
import torch
from torch import nn

import hypersphere as hs
from hypersphere.layers import DecoupledConv2d, DecoupledLinear
from hypersphere.models import ToyCNN


def test_makers_decide_what_the_toy_network_is_made_of():
    made = []

    def conv(*words, **more):
        made.append(nn.Conv2d(*words, **more))
        return made[-1]

    def linear(*words, **more):
        made.append(nn.Linear(*words, bias=False, **more))
        return made[-1]

    model = ToyCNN(1, 8, 2, (4, 6), conv=conv, linear=linear)
    assert [module for module in model.modules() if isinstance(module, (nn.Conv2d, nn.Linear))] == made
    assert [type(module) for module in made] == [nn.Conv2d] * 4 + [nn.Linear]
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 2)


def test_images_may_be_wider_than_high():
    assert ToyCNN(1, (8, 12))(torch.zeros(2, 1, 8, 12)).shape == (2, 3)


def test_a_toy_network_of_spheres():
    torch.manual_seed(0)
    model = ToyCNN(1, 8, 3, (4,), conv=DecoupledConv2d, linear=DecoupledLinear)
    x = torch.rand(2, 1, 8, 8)
    first = model.stages[0]
    assert isinstance(first, DecoupledConv2d)
    torch.testing.assert_close(first(x), first(7 * x))  # only directions matter
    model(x).sum().backward()
    assert all(bool(torch.isfinite(parameter.grad).all()) for parameter in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 10, 3), "image_size must be a multiple of 4"),
        ((1, 8, 0), "feature_dim must be"),
        ((1, 8, 3, (4, 0)), "widths"),
    ],
)
def test_sizes_that_cannot_be_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        hs.models.ToyCNN(*arguments)
