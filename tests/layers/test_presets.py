"""The named operators of the thesis: their values, arguments and signatures."""

import inspect
import pickle

import pytest
import torch

from hypersphere.functions.magnitude import MAGNITUDES, Ball
from hypersphere.layers import PRESETS, DecoupledConv2d, ball_conv2d

from . import reference
from .cases import images

every_preset = pytest.mark.parametrize("name", PRESETS)


@every_preset
def test_presets_compute_the_operator_of_their_name(name):
    torch.manual_seed(0)
    layer = PRESETS[name](4, 6, 3, 2, 1, 1, 2, angular="linear", dtype=torch.float64)
    x = images(2, 4, 5, 5).double()
    expected = reference.convolve(x, layer, name.removesuffix("_conv2d"), "linear")
    torch.testing.assert_close(layer(x), expected)


@every_preset
def test_presets_have_the_arguments_of_the_layer(name):
    ours, theirs = (list(inspect.signature(one).parameters.values()) for one in (PRESETS[name], DecoupledConv2d))
    assert [(p.name, p.default) for p in ours[:8]] == [(p.name, p.default) for p in theirs[:8]]
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]
    assert f"magnitude {name.removesuffix('_conv2d')!r}" in inspect.getdoc(PRESETS[name])
    layer = PRESETS[name](3, 8, 3, padding=1, bias=False, padding_mode="reflect", storage="half")
    assert type(layer.magnitude) is MAGNITUDES[name.removesuffix("_conv2d")]
    assert (layer.padding, layer.bias, layer.padding_mode, layer.storage) == ((1, 1), None, "reflect", "half")


def test_presets_accept_other_numbers_of_their_magnitude():
    assert ball_conv2d(3, 4, 3, magnitude=Ball(radius=2.0)).magnitude == Ball(radius=2.0)


@every_preset
def test_presets_can_be_pickled(name):
    assert pickle.loads(pickle.dumps(PRESETS[name])) is PRESETS[name]


def test_options_are_available_under_their_old_name():
    with pytest.warns(
        DeprecationWarning, match=r"layers\.ConvOptions is deprecated, use hypersphere.layers.OperatorOpt"
    ):
        from hypersphere.layers import ConvOptions
    assert ConvOptions(magnitude="ball", padding_mode="reflect") == {"magnitude": "ball", "padding_mode": "reflect"}
