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
    with pytest.raises(ValueError, match=r"^rescale must be None, \(beta, gamma\) or 'learned', not "):
        SphereNorm(nn.Linear(4, 3), rescale="yes")


@pytest.mark.parametrize("rescale", [None, (2.0, 0.5), "learned"])
def test_sphere_norm_reports_the_rescaling_it_applies(rescale):
    norm = SphereNorm(nn.Conv2d(4, 6, 3), rescale=rescale)
    assert norm.rescale == rescale
    assert f"rescale={rescale!r}" in repr(norm)
    assert ("beta" in dict(norm.named_parameters())) == (rescale == "learned")
    with pytest.raises(AttributeError):
        norm.rescale = None


class Shifted(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (torch.nn.utils.weight_norm(nn.Linear(4, 3)), "it does not own its weight: a hook computes it"),
        (
            torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
            "it is parametrised: remove the parametrisation",
        ),
        (Shifted(4, 3), "Shifted overrides forward, which would be lost"),
        (nn.LazyLinear(3), "it has no weight yet: run a batch through the model first"),
    ],
    ids=["hook", "parametrised", "custom forward", "lazy"],
)
def test_sphere_norm_refuses_a_layer_that_cannot_be_converted(layer, message):
    with pytest.raises(ValueError, match=f"^layer must be a layer that can be converted, but {message}"):
        SphereNorm(layer)
    assert not hasattr(layer, "magnitude")


@pytest.mark.parametrize("beta", [-1e35, 1e35])
def test_sphere_norm_accepts_any_finite_rescaling(beta):
    assert SphereNorm(nn.Linear(3, 2), rescale=(beta, 0.0)).rescale == (beta, 0.0)
    with pytest.raises(ValueError, match=r"^rescale must be None, \(beta, gamma\) or 'learned', not "):
        SphereNorm(nn.Linear(3, 2), rescale=(beta * 1e300, 0.0))


def test_sphere_norm_leaves_a_layer_unchanged_if_an_option_is_invalid():
    layer, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 5, 5)
    before, attributes = layer(x), set(vars(layer))
    with pytest.raises(ValueError, match="angular must be one of"):
        SphereNorm(layer, angular="typo")
    assert type(layer) is nn.Conv2d
    assert set(vars(layer)) == attributes
    torch.testing.assert_close(layer(x), before, atol=0, rtol=0)
