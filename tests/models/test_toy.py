import pytest
import torch
from torch import nn

from hypersphere.layers import DecoupledConv2d, DecoupledLinear
from hypersphere.models import ToyCNN


def test_toy_cnn_makes_all_layers_with_the_given_factories():
    made = []

    def conv(*args, **kwargs):
        made.append(nn.Conv2d(*args, **kwargs))
        return made[-1]

    def linear(*args, **kwargs):
        made.append(nn.Linear(*args, bias=False, **kwargs))
        return made[-1]

    model = ToyCNN(1, 8, 2, (4, 6), conv=conv, linear=linear)
    assert [module for module in model.modules() if isinstance(module, (nn.Conv2d, nn.Linear))] == made
    assert [type(module) for module in made] == [nn.Conv2d] * 4 + [nn.Linear]
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 2)


def test_toy_cnn_accepts_images_that_are_not_square():
    assert ToyCNN(1, (8, 12))(torch.zeros(2, 1, 8, 12)).shape == (2, 3)


def test_toy_cnn_accepts_decoupled_layers():
    torch.manual_seed(0)
    model = ToyCNN(1, 8, 3, (4,), conv=DecoupledConv2d, linear=DecoupledLinear)
    x = torch.rand(2, 1, 8, 8)
    first = model.stages[0]
    assert isinstance(first, DecoupledConv2d)
    torch.testing.assert_close(first(x), first(7 * x))  # the sphere operator depends on directions only
    model(x).sum().backward()
    assert all(bool(torch.isfinite(parameter.grad).all()) for parameter in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 10, 3), "image_size must be a multiple of 4"),
        ((1, 8, 0), "feature_dim must be an integer >= 1, not 0"),
        ((1, 8, 3, (4, 0)), r"widths must be a sequence of 1 or more integers >= 1, not \(4, 0\)"),
    ],
)
def test_toy_cnn_rejects_invalid_sizes(arguments, message):
    with pytest.raises(ValueError, match=message):
        ToyCNN(*arguments)
