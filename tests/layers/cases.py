"""Layers and inputs that several test modules of this folder use."""

import pytest
import torch

from hypersphere.layers import DecoupledConv2d

KINDS = {
    "sphere": {},
    "ball": {"magnitude": "ball"},
    "tanh": {"magnitude": "tanh", "learn_radius": "layer"},
    "linear angle": {"magnitude": "seg", "angular": "linear"},
    "square cosine": {"magnitude": "log", "angular": "square_cosine"},
    "sigmoid": {"angular": "sigmoid", "learn_k": "filter"},
    "mix": {"magnitude": "mix", "angular": "sigmoid", "learn_k": "filter"},
    "filter radius": {"magnitude": "tanh", "learn_radius": "filter"},
    "seg": {"magnitude": "seg", "angular": "square_cosine", "learn_radius": "filter"},
    "filter radius and k": {"magnitude": "seg", "learn_radius": "filter", "angular": "sigmoid", "learn_k": "filter"},
    "joint": {"magnitude": "tanh", "weighting": "joint", "angular": "linear"},
    "separate": {"magnitude": "tanh", "weighting": "separate", "learn_radius": "layer", "angular": "square_cosine"},
    "separate filters": {"magnitude": "tanh", "weighting": "separate", "learn_radius": "filter", "angular": "sigmoid"}
    | {"learn_k": "layer"},
    "weighted ball": {"magnitude": "ball", "weighting": "linear", "angular": "sigmoid", "learn_k": "layer"},
    "weighted logarithm": {"magnitude": "log", "weighting": "linear", "angular": "power_cosine"},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def conv(kind="sphere", inputs=4, filters=6, **more):
    torch.manual_seed(5)
    return DecoupledConv2d(inputs, filters, 3, padding=1, **(KINDS[kind] | more))


def images(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def randn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(layer, x):
    """Return the output, and the gradients of the input and of all parameters for a fixed output gradient."""
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    grad = images(*y.shape, seed=7).to(y.dtype)
    return y, torch.autograd.grad((y * grad).sum(), [x, *layer.parameters()])
