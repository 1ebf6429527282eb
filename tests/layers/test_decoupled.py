"""Values and derivatives of every operator against the definition, over all arguments of a convolution."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call
from torch.nn.utils import parametrize

from hypersphere.functions import angular, magnitude
from hypersphere.layers import DecoupledConv1d, DecoupledConv2d, DecoupledConv3d, DecoupledLayer, DecoupledLinear

from . import reference
from .cases import randn

OPERATORS = list(itertools.product(reference.MAGNITUDES, reference.ANGULARS, [None]))
OPERATORS += [(h, g, "linear") for h in reference.MAGNITUDES if h != "inner_product" for g in ("cosine", "linear")]
OPERATORS += [("tanh", g, w) for w in ("joint", "separate") for g in ("cosine", "sigmoid")]

ARGUMENTS = {
    "plain": (DecoupledConv2d, {}, (2, 4, 5, 6)),
    "stride": (DecoupledConv2d, {"stride": (2, 1), "padding": (0, 1)}, (2, 4, 6, 5)),
    "dilation": (DecoupledConv2d, {"dilation": 2, "padding": 2}, (2, 4, 5, 5)),
    "groups": (DecoupledConv2d, {"groups": 2, "padding": 1, "stride": 2}, (2, 4, 5, 6)),
    "depthwise": (DecoupledConv2d, {"groups": 4, "padding": 1, "out_channels": 8}, (2, 4, 4, 4)),
    "same": (DecoupledConv2d, {"padding": "same", "kernel_size": (2, 3), "dilation": (1, 2)}, (2, 4, 5, 5)),
    "valid": (DecoupledConv2d, {"padding": "valid", "bias": False}, (2, 4, 5, 5)),
    "reflect": (DecoupledConv2d, {"padding": (1, 2), "padding_mode": "reflect"}, (2, 4, 5, 5)),
    "circular": (DecoupledConv2d, {"padding": 1, "padding_mode": "circular", "groups": 2}, (2, 4, 4, 5)),
    "replicate": (DecoupledConv2d, {"padding": "same", "padding_mode": "replicate"}, (2, 4, 4, 5)),
    "pointwise": (DecoupledConv2d, {"kernel_size": 1, "stride": 2}, (2, 4, 5, 5)),
    "one pixel": (DecoupledConv2d, {"padding": 1}, (2, 4, 1, 1)),
    "1d": (DecoupledConv1d, {"padding": 1, "dilation": 2, "stride": 2}, (2, 4, 9)),
    "1d even same": (DecoupledConv1d, {"padding": "same", "kernel_size": 4}, (2, 4, 7)),
    "3d": (DecoupledConv3d, {"padding": (1, 0, 1), "groups": 2, "kernel_size": (3, 1, 2)}, (1, 4, 3, 4, 3)),
}


def build(kind, settings, **more):
    settings = {"out_channels": 6, "kernel_size": 3} | settings | more
    torch.manual_seed(3)
    layer = kind(4, **settings, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.mul_(3)
    return layer


def batch(shape):
    return randn(*shape).requires_grad_()


def gradients(layer, x, y):
    direction = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(2))
    return torch.autograd.grad((y * direction).sum(), [x, *layer.parameters()])


def test_reference_covers_the_menus():
    assert reference.ANGULARS.keys() == angular.ANGULARS.keys()
    assert reference.MAGNITUDES.keys() == magnitude.MAGNITUDES.keys()
    assert reference.WEIGHTINGS.keys() - {None} == magnitude.WEIGHTINGS.keys()


@pytest.mark.parametrize(("h", "g", "weighting"), OPERATORS)
def test_decoupled_convolution_agrees_with_the_definition_for_every_operator(h, g, weighting):
    layer = build(*ARGUMENTS["groups"][:2], magnitude=h, angular=g, weighting=weighting)
    x = batch(ARGUMENTS["groups"][2])
    y, expected = layer(x), reference.convolve(x, layer, h, g, weighting)
    torch.testing.assert_close(y, expected, atol=1e-10, rtol=0)
    for ours, theirs in zip(gradients(layer, x, y), gradients(layer, x, expected), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("case", ARGUMENTS)
@pytest.mark.parametrize(("h", "g"), [("sphere", "cosine"), ("tanh", "linear")])
def test_decoupled_convolution_agrees_with_the_definition_for_every_argument(case, h, g):
    kind, settings, shape = ARGUMENTS[case]
    layer, x = build(kind, settings, magnitude=h, angular=g), batch(shape)
    y, expected = layer(x), reference.convolve(x, layer, h, g)
    torch.testing.assert_close(y, expected, atol=1e-10, rtol=0)
    for ours, theirs in zip(gradients(layer, x, y), gradients(layer, x, expected), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("h", "g", "weighting"),
    [
        ("sphere", "cosine", None),
        ("log", "cosine", None),
        ("tanh", "sigmoid", None),
        ("sphere", "linear", None),
        ("seg", "square_cosine", None),
        ("tanh", "cosine", "joint"),
        ("mix", "linear", "linear"),
    ],
)
def test_decoupled_convolution_passes_gradcheck(h, g, weighting):
    layer = build(DecoupledConv2d, {"groups": 2, "kernel_size": 2}, magnitude=h, angular=g, weighting=weighting)
    x = batch((1, 4, 3, 3))

    def run(x, weight, bias):
        return functional_call(layer, {"weight": weight, "bias": bias}, (x,))

    assert gradcheck(run, (x, layer.weight, layer.bias))


@pytest.mark.parametrize(("h", "g", "weighting"), OPERATORS)
def test_decoupled_linear_layer_agrees_with_the_definition_for_every_operator(h, g, weighting):
    torch.manual_seed(0)
    layer = DecoupledLinear(5, 3, bias=False, magnitude=h, angular=g, weighting=weighting, dtype=torch.float64)
    x = batch((2, 4, 5))
    y, expected = layer(x), reference.respond(x, layer.weight, h, g, weighting)
    torch.testing.assert_close(y, expected, atol=1e-10, rtol=0)
    for ours, theirs in zip(gradients(layer, x, y), gradients(layer, x, expected), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(layer(x[0, 0]), y[0, 0], atol=1e-12, rtol=0)
    assert layer(x[:0]).shape == (0, 4, 3)


@pytest.mark.parametrize("case", ARGUMENTS)
def test_decoupled_inner_product_with_cosine_equals_the_convolution_of_torch(case):
    kind, settings, shape = ARGUMENTS[case]
    ours = build(kind, settings, magnitude="inner_product").float()
    names = ["kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"]
    theirs = kind.__bases__[1](4, ours.out_channels, **{n: getattr(ours, n) for n in names}, bias=ours.bias is not None)
    theirs.load_state_dict(ours.state_dict())
    x = batch(shape).detach().float()
    assert torch.equal(ours(x), theirs(x))


def test_decoupled_weighted_linear_with_cosine_equals_the_convolution_of_torch():
    layer = build(DecoupledConv2d, {"padding": 1}, magnitude="linear", weighting="linear")
    x = batch((2, 4, 5, 5))
    assert torch.equal(layer(x), nn.functional.conv2d(x, layer.weight, layer.bias, padding=1))


def test_decoupled_user_callables_agree_with_the_definition():
    layer = build(DecoupledConv2d, {"padding": 1}, magnitude=lambda w, x: w * x.sqrt(), angular=lambda c: c**3)
    x = batch((2, 4, 5, 5))
    ours = build(DecoupledConv2d, {"padding": 1}, magnitude="sphere")
    c = ours(x) - ours.bias.view(-1, 1, 1)
    norm = nn.functional.conv2d(x.square(), torch.ones(1, 4, 3, 3, dtype=x.dtype), padding=1).sqrt()
    w = layer.weight.flatten(1).norm(dim=1).view(-1, 1, 1)
    torch.testing.assert_close(layer(x), w * norm.sqrt() * c**3 + layer.bias.view(-1, 1, 1))
    torch.nn.init.normal_(layer.weight)
    layer(x).sum().backward()
    assert torch.isfinite(layer.weight.grad).all()


def test_decoupled_user_callable_with_parameters_learns():
    class Cubic(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

        def forward(self, c):
            return c + self.a * c**3

    layer = build(DecoupledConv2d, {}, angular=Cubic())
    layer(batch((2, 4, 5, 5))).sum().backward()
    assert layer.angular.a.grad.abs() > 0
    assert "angular.a" in layer.state_dict()


@pytest.mark.parametrize("h", magnitude.MAGNITUDES)
@pytest.mark.parametrize("g", angular.ANGULARS)
def test_decoupled_menu_entries_are_accepted_by_name(h, g):
    layer = DecoupledConv2d(2, 3, 3, magnitude=h, angular=g)
    assert torch.isfinite(layer(torch.randn(1, 2, 4, 4))).all()


@pytest.mark.slow
@pytest.mark.parametrize("g", angular.ANGULARS)
@pytest.mark.parametrize(
    ("h", "weighting"),
    [(h, None) for h in magnitude.MAGNITUDES]
    + [(h, "linear") for h in ("sphere", "ball", "log")]
    + [("tanh", "joint"), ("tanh", "separate")],
)
def test_decoupled_linear_layer_passes_gradgradcheck_for_every_operator(h, g, weighting):
    torch.manual_seed(0)
    layer = DecoupledLinear(3, 2, magnitude=h, angular=g, weighting=weighting, dtype=torch.float64)
    x = 0.4 * batch((2, 3)).detach()

    def run(x, weight):
        return functional_call(layer, {"weight": weight}, (x,))

    assert gradgradcheck(run, (x.requires_grad_(), layer.weight), atol=1e-4)


@pytest.mark.parametrize("kind", ["filter", "layer"])
def test_decoupled_learned_numbers_pass_gradgradcheck(kind):
    settings = {"learn_k": kind, "learn_radius": kind, "groups": 2, "kernel_size": 2}
    layer = build(DecoupledConv2d, settings, magnitude="tanh", angular="sigmoid").eval()
    x = batch((1, 4, 3, 3))

    def run(x, log_k, log_radius):
        return functional_call(layer, {"log_k": log_k, "log_radius": log_radius}, (x,))

    assert gradgradcheck(run, (x, layer.log_k, layer.log_radius), atol=1e-4)


def test_decoupled_gradient_penalty_agrees_with_the_definition():
    layer, x = build(DecoupledConv2d, {}), batch((1, 4, 3, 3))

    def penalty(respond):
        (grad,) = torch.autograd.grad(respond(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [x, layer.weight])

    for ours, theirs in zip(
        penalty(layer), penalty(lambda x: reference.convolve(x, layer, "sphere", "cosine")), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DecoupledConv2d(2, 3, 3, magnitude="cube"), "magnitude must be one of 'sphere'.*not 'cube'"),
        (lambda: DecoupledConv2d(2, 3, 3, angular=3), "angular must be one of 'cosine'.*not 3"),
        (
            lambda: DecoupledConv2d(2, 3, 3, weighting="joint"),
            "^weighting 'joint' is defined for the magnitude Tanh, not",
        ),
        (
            lambda: DecoupledConv2d(2, 3, 3, learn_k="layer"),
            r"^learn_k must be None for Cosine\(\); only a Sigmoid has a k$",
        ),
        (
            lambda: DecoupledConv2d(2, 3, 3, angular="sigmoid", learn_k="net"),
            "^learn_k must be None, 'layer', 'filter' or a parameter with 1 or 3 entries, not 'net'$",
        ),
        (
            lambda: DecoupledConv2d(2, 3, 3, learn_radius="layer"),
            r"^learn_radius must be None for Sphere\(alpha=1\.0\); only Ball, Tanh and Seg have a radius$",
        ),
        (
            lambda: DecoupledLinear(2, 3, magnitude="ball", learn_radius="net"),
            "^learn_radius must be None, 'layer' or 'filter', not 'net'$",
        ),
        (lambda: DecoupledLinear(2, 3, momentum=0), r"^momentum must be a number in \(0, 1\], not 0$"),
        (
            lambda: DecoupledConv2d(2, 3, 3, padding_mode="wrap"),
            r"padding_mode must be one of .*got padding_mode='wrap'",
        ),
    ],
)
def test_decoupled_names_invalid_arguments_in_the_error(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_decoupled_layer_is_abstract():
    class Incomplete(DecoupledLayer, nn.Linear):
        def _check_shape(self, x, filter_channels):
            pass

    for kind in (DecoupledLayer, Incomplete):
        with pytest.raises(TypeError, match=r"abstract.*_from_batch.*_inner_product.*_to_batch"):
            kind(3, 2)


class CountedReads(nn.Module):
    """A parametrisation that counts how often the weight is computed."""

    def __init__(self):
        super().__init__()
        self.reads = 0

    def forward(self, weight):
        self.reads += 1
        return weight


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (DecoupledConv2d(2, 3, 3, groups=1, magnitude="tanh"), (2, 2, 5, 5)),
        (DecoupledConv2d(4, 4, 3, groups=2, magnitude="linear"), (4, 5, 5)),
        (DecoupledLinear(4, 3, magnitude="ball"), (2, 4)),
    ],
)
def test_decoupled_forward_reads_a_parametrised_weight_once(layer, shape):
    layer = copy.deepcopy(layer)
    parametrize.register_parametrization(layer, "weight", CountedReads())
    counted = layer.parametrizations.weight[0]
    counted.reads = 0
    layer(torch.randn(shape)).sum().backward()
    assert counted.reads == 1
