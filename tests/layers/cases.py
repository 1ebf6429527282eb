"""Layers and inputs that several test modules of this folder use."""

import pytest
import torch

from hypersphere.layers import DecoupledConv2d

KINDS = {
    "sphere": {},
    "ball": {"magnitude": "ball"},
    "tanh": {"magnitude": "tanh", "learn_radius": "layer"},
    "linear angle": {"angular": "linear"},
    "sigmoid": {"angular": "sigmoid", "learn_k": "filter"},
    "seg": {"magnitude": "seg", "angular": "square_cosine", "learn_radius": "filter"},
    "joint": {"magnitude": "tanh", "weighting": "joint", "angular": "linear"},
    "separate": {"magnitude": "tanh", "weighting": "separate", "learn_radius": "filter", "learn_k": "layer"}
    | {"angular": "sigmoid"},
    "linear weighting": {"magnitude": "log", "weighting": "linear", "angular": "power_cosine"},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def conv(kind="sphere", inputs=4, filters=6, **more):
    torch.manual_seed(5)
    return DecoupledConv2d(inputs, filters, 3, padding=1, **(KINDS[kind] | more))


def images(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(layer, x):
    """Return the output, and the gradients of the input and of all parameters for a fixed output gradient."""
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    grad = images(*y.shape, seed=7).to(y.dtype)
    return y, torch.autograd.grad((y * grad).sum(), [x, *layer.parameters()])
