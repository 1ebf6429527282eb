"""SphereNorm."""

import pytest
import torch
from torch import nn

from hypersphere.layers import DecoupledConv2d, SphereNorm

from .cases import images


def test_sphere_norm_rescales_the_sphere_operator():
    plain = nn.Conv2d(4, 6, 3, bias=False)
    weight, x = plain.weight, images(2, 4, 5, 5)
    norm = SphereNorm(plain, rescale=(2.0, 0.5))
    sphere = DecoupledConv2d(4, 6, 3, bias=False)
    sphere.load_state_dict({"weight": weight})
    assert norm.layer.weight is weight
    torch.testing.assert_close(norm(x), 2 * sphere(x) + 0.5)
    learned = SphereNorm(nn.Linear(4, 3), rescale="learned", angular="linear")
    assert {n for n, _ in learned.named_parameters()} == {"layer.weight", "layer.bias", "beta", "gamma"}
    learned(images(5, 4)).sum().backward()
    assert learned.beta.grad.shape == (3,)
    assert SphereNorm(nn.Conv2d(4, 6, 3))(x).shape == (2, 6, 3, 3)
    with pytest.raises(ValueError, match="rescale must be None"):
        SphereNorm(nn.Linear(4, 3), rescale="yes")


@pytest.mark.parametrize("rescale", [None, (2.0, 0.5), "learned"])
def test_sphere_norm_reports_the_rescaling_it_applies(rescale):
    norm = SphereNorm(nn.Conv2d(4, 6, 3), rescale=rescale)
    assert norm.rescale == rescale
    assert f"rescale={rescale!r}" in repr(norm)
    assert ("beta" in dict(norm.named_parameters())) == (rescale == "learned")
    with pytest.raises(AttributeError):
        norm.rescale = None
