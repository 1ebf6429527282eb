"""Which implementation computes a layer."""

import pytest
import torch
from torch import nn

from hypersphere.functions.angular import Cosine, Sigmoid
from hypersphere.functions.magnitude import Ball, InnerProduct, Linear, Sphere, Tanh
from hypersphere.layers._operator import choose_implementation


class Cubic(Cosine):
    def __call__(self, c):
        return c**3


def choose(magnitude=Sphere(), angular=Cosine(), x=torch.ones(2, 3), learns_radius=False, learns_k=False):  # noqa: B008
    filters = torch.ones(4, 3)
    return choose_implementation(magnitude, angular, x, filters, learns_radius=learns_radius, learns_k=learns_k)


@pytest.mark.parametrize("magnitude", [InnerProduct(), Linear(), Linear(alpha=2.0)])
def test_choose_implementation_computes_inner_products_with_torch(magnitude):
    assert choose(magnitude) == "torch"
    assert choose(magnitude, Sigmoid()) == "fused"
    assert choose(magnitude, Cubic()) == "reference"


def test_choose_implementation_fuses_only_entries_of_the_menus():
    class Ramp(Ball):
        def __call__(self, w_norm, x_norm):
            return x_norm

    assert choose() == "fused"
    assert choose(Ramp()) == "reference"
    assert choose(lambda w_norm, x_norm: x_norm) == "reference"
    assert choose(angular=lambda c: c) == "reference"


def test_choose_implementation_fuses_only_tensors_that_the_layer_learns():
    number = nn.Parameter(torch.tensor(0.5))
    assert choose(Sphere(alpha=number)) == "reference"
    assert choose(Tanh(radius=number)) == "reference"
    assert choose(Tanh(radius=number), learns_radius=True) == "fused"
    assert choose(angular=Sigmoid(number)) == "reference"
    assert choose(angular=Sigmoid(number), learns_k=True) == "fused"


def test_choose_implementation_avoids_the_custom_operator_outside_of_ordinary_eager_mode():
    assert choose(x=torch.rand(0, 3)) == "reference"
    assert choose(x=torch.rand(2, 3, device="meta")) == "reference"
    chosen = []
    torch.func.vmap(lambda row: chosen.append(choose(x=row[None])) or row)(torch.rand(2, 3))
    with torch.autograd.forward_ad.dual_level():
        chosen.append(choose())
    assert chosen == ["reference", "reference"]
