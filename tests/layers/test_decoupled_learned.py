"""Learned k and radius of decoupled layers, the running patch norm, and the state dict."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hypersphere.functions.angular import Sigmoid
from hypersphere.functions.magnitude import Ball, Linear, LinearlyWeighted, Sphere, Tanh
from hypersphere.layers import DecoupledConv2d, DecoupledLinear, shared_k

from .cases import KINDS, conv, every_kind, images, run


@every_kind
def test_decoupled_state_dict_and_copies_restore_the_layer(kind):
    layer, x = conv(kind), images(2, 4, 5, 5)
    run(layer, x)
    stream = io.BytesIO()
    torch.save(layer.state_dict(), stream)
    stream.seek(0)
    other = DecoupledConv2d(4, 6, 3, padding=1, **KINDS[kind])
    other.load_state_dict(torch.load(stream))
    assert torch.equal(other.eval()(x), layer.eval()(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert f"magnitude={layer.magnitude!r}" in repr(layer)


def test_decoupled_learned_radius_follows_the_patch_norm():
    layer = conv("tanh", momentum=0.25, magnitude=Tanh(radius=2.0), bias=False)
    x = images(2, 4, 5, 5)

    def mean(x):
        return F.conv2d(x.square(), torch.ones(1, 4, 3, 3), padding=1).sqrt().mean()

    assert layer.log_radius.exp().item() == pytest.approx(2)
    layer.eval()(x)
    assert layer.mean_norm == 1
    layer.train()(x)
    assert layer.mean_norm.item() == pytest.approx(mean(x).item(), rel=1e-5)
    layer(3 * x)
    assert layer.mean_norm.item() == pytest.approx(1.5 * mean(x).item(), rel=1e-5)
    layer.eval()
    expected = DecoupledConv2d(4, 6, 3, padding=1, bias=False, magnitude=Tanh(radius=2 * layer.mean_norm.item()))
    expected.load_state_dict({"weight": layer.weight})
    torch.testing.assert_close(layer(x), expected(x))
    layer(x).sum().backward()
    assert layer.log_radius.grad.abs() > 0


@pytest.mark.parametrize("kind", [Ball, Linear, Sphere])
def test_decoupled_tensor_as_alpha_has_a_gradient(kind):
    alpha = torch.tensor(1.0, requires_grad=True)
    layer = DecoupledConv2d(4, 6, 3, padding=1, bias=False, magnitude=kind(alpha=alpha))
    y = layer(images(2, 4, 5, 5))
    (grad,) = torch.autograd.grad(y.sum(), alpha)
    torch.testing.assert_close(grad, y.sum() / alpha)  # y is proportional to α


def test_decoupled_learned_radius_per_filter():
    layer = conv("ball", learn_radius="filter", bias=False)
    with torch.no_grad():
        layer.log_radius.copy_(torch.linspace(-1, 1, 6))
        layer.mean_norm.fill_(3.0)
    x = images(2, 4, 5, 5)
    y = layer.eval()(x)
    for j in range(6):
        one = DecoupledConv2d(
            4, 1, 3, padding=1, bias=False, magnitude=Ball(radius=3 * layer.log_radius[j].exp().item())
        )
        one.load_state_dict({"weight": layer.weight[j : j + 1]})
        torch.testing.assert_close(y[:, j : j + 1], one(x), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("radius_norm", ["running", "batch"])
def test_decoupled_learned_radius_is_used_with_any_angular_function(radius_norm):
    settings = {"magnitude": Tanh(radius=2.0), "learn_radius": "layer", "radius_norm": radius_norm, "bias": False}
    layer = DecoupledConv2d(4, 6, 3, padding=1, angular="square_cosine", **settings)
    same = DecoupledConv2d(4, 6, 3, padding=1, angular=lambda c: c * c.abs(), **settings)
    same.load_state_dict(layer.state_dict())
    x = images(2, 4, 5, 5)
    torch.testing.assert_close(same(x), layer(x))
    torch.testing.assert_close(same.mean_norm, layer.mean_norm)
    grads = [torch.autograd.grad(module(x).square().sum(), module.log_radius)[0] for module in (same, layer)]
    assert grads[0].abs() > 0
    torch.testing.assert_close(*grads)


def test_decoupled_learned_k_per_layer_per_filter_and_shared():
    x = images(2, 4, 5, 5)
    assert conv("sigmoid", learn_k="layer").log_k.shape == (1,)
    layer = conv("sigmoid", bias=False)
    with torch.no_grad():
        layer.log_k.copy_(torch.linspace(-2, 0, 6))
    y = layer(x)
    for j in range(6):
        g = Sigmoid(k=layer.log_k[j].exp().item())
        one = DecoupledConv2d(4, 1, 3, padding=1, bias=False, angular=g)
        one.load_state_dict({"weight": layer.weight[j : j + 1]})
        torch.testing.assert_close(y[:, j : j + 1], one(x), atol=1e-6, rtol=1e-5)
    k = shared_k(0.3)
    network = nn.Sequential(conv("sigmoid", learn_k=k), DecoupledConv2d(6, 2, 3, angular="sigmoid", learn_k=k))
    assert network[0].log_k is network[1].log_k is k
    assert sum(p is k for p in network.parameters()) == 1
    network(x).sum().backward()
    assert k.grad.abs() > 0
    with pytest.raises(
        ValueError, match=r"^angular must have a fixed k; to learn k, pass learn_k='layer', 'filter' or shared_k\(\)$"
    ):
        conv(angular=Sigmoid(k=nn.Parameter(torch.tensor(0.5))))


def test_decoupled_learned_k_and_radius_pass_gradcheck():
    layer = DecoupledConv2d(
        2,
        4,
        2,
        groups=2,
        magnitude="tanh",
        angular="sigmoid",
        learn_k="filter",
        learn_radius="layer",
        dtype=torch.float64,
    ).eval()
    x = images(1, 2, 3, 3).double()

    def response(k, radius):
        return torch.func.functional_call(layer, {"log_k": k, "log_radius": radius}, (x,))

    assert torch.autograd.gradcheck(response, (layer.log_k, layer.log_radius))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_decoupled_running_mean_ignores_non_finite_batches_and_stays_in_float32(bad):
    layer = DecoupledConv2d(2, 3, 1, magnitude="tanh", learn_radius="layer")
    x = torch.rand(2, 2, 3, 3)
    layer(x.clone().fill_(bad))
    assert int(layer.num_batches_tracked) == 0
    layer(x)
    mean = layer.mean_norm.clone()
    layer(torch.full_like(x, bad))
    assert torch.equal(layer.mean_norm, mean)
    assert layer.half().mean_norm.dtype == torch.float32
    assert torch.equal(layer.mean_norm, mean)


def test_decoupled_reset_parameters_restores_learned_numbers():
    layer = DecoupledConv2d(2, 3, 1, angular="sigmoid", learn_k="filter", magnitude="tanh", learn_radius="layer")
    start = copy.deepcopy(layer.state_dict())
    with torch.no_grad():
        layer.log_k.add_(3)
        layer.log_radius.add_(1)
    layer(torch.rand(2, 2, 3, 3))
    layer.reset_parameters()
    for name in ("log_k", "log_radius", "mean_norm", "num_batches_tracked"):
        assert torch.equal(layer.state_dict()[name], start[name])
    assert not torch.equal(layer.weight, start["weight"])


def test_decoupled_running_mean_of_a_group_starts_at_its_first_nonzero_batch():
    layer = DecoupledConv2d(2, 2, 1, groups=2, magnitude="tanh", learn_radius="layer")
    x = torch.full((2, 2, 3, 3), 5.0)
    layer(x * torch.tensor([1.0, 0.0]).view(1, 2, 1, 1))
    assert layer.mean_norm.tolist() == pytest.approx([5, 1])
    layer(2 * x)
    assert layer.mean_norm.tolist() == pytest.approx([5.5, 10])
    assert layer.num_batches_tracked.tolist() == [2, 1]


@pytest.mark.parametrize("learn_radius", ["layer", "filter"])
def test_decoupled_running_mean_is_kept_per_group(learn_radius):
    layer = DecoupledConv2d(2, 2, 3, groups=2, bias=False, magnitude="tanh", learn_radius=learn_radius)
    x = images(8, 2, 12, 12)
    x[:, 1] *= 100
    layer(x)
    norms = F.conv2d(x.square(), torch.ones(2, 1, 3, 3), groups=2).sqrt()
    torch.testing.assert_close(layer.mean_norm, norms.mean((0, 2, 3)), rtol=1e-5, atol=0)
    with torch.no_grad():
        layer.weight.fill_(1)
    cosine = F.conv2d(x, torch.ones(2, 1, 3, 3), groups=2) / (3 * norms)
    magnitude = (layer.eval()(x) / cosine).mean((0, 2, 3))
    assert magnitude.tolist() == pytest.approx([0.74, 0.74], abs=0.02)


def test_decoupled_state_dict_of_version_0_1_loads():
    settings = {"magnitude": "tanh", "angular": "sigmoid", "learn_radius": "layer", "learn_k": "layer"}
    layer = DecoupledConv2d(4, 6, 3, groups=2, **settings)
    old = {
        "weight": layer.weight,
        "bias": layer.bias,
        "log_k": torch.tensor(-0.3),
        "log_radius": torch.tensor(0.2),
        "mean_norm": torch.tensor(3.0),
        "batches": torch.tensor(7),
    }
    layer.load_state_dict(old)
    assert layer.log_k.tolist() == pytest.approx([-0.3])
    assert layer.log_radius.tolist() == pytest.approx([0.2])
    assert layer.mean_norm.tolist() == [3, 3]
    assert layer.num_batches_tracked.tolist() == [7, 7]
    assert old["mean_norm"].shape == old["batches"].shape == ()
    nn.Sequential(layer).load_state_dict({f"0.{name}": value for name, value in old.items()})
    with pytest.warns(DeprecationWarning, match=r"batches is deprecated, use DecoupledConv2d\.num_batches_tracked"):
        assert layer.batches is layer.num_batches_tracked


def test_decoupled_parameters_have_at_least_one_dimension():
    layer = conv(magnitude="ball", angular="sigmoid", learn_radius="layer", learn_k="layer")
    assert all(p.ndim > 0 for p in [*layer.parameters(), shared_k()])
    assert conv("sigmoid", learn_k=nn.Parameter(torch.tensor(0.1))).log_k.ndim == 0  # a parameter of the user


@pytest.mark.parametrize("learn_radius", ["layer", "filter"])
def test_decoupled_batch_radius_uses_the_mean_of_the_batch_with_its_gradient(learn_radius):
    layer = conv(magnitude="tanh", learn_radius=learn_radius, radius_norm="batch", bias=False).double()
    x = images(2, 4, 5, 5).double().requires_grad_()
    layer(5 * x.detach())  # moves the running mean away from that of the next batch

    def definition(x):
        norms = F.conv2d(x.square(), torch.ones(1, 4, 3, 3).double(), padding=1).sqrt()
        filters = layer.weight / layer.weight.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        return torch.tanh(norms / norms.mean()) * F.conv2d(x, filters, padding=1) / norms

    y, expected, grad = layer(x), definition(x), images(2, 6, 5, 5).double()
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y, x, grad), torch.autograd.grad(expected, x, grad))
    assert layer.mean_norm.item() == pytest.approx(
        F.conv2d(x.square(), torch.ones(1, 4, 3, 3).double(), padding=1).sqrt().mean().item() * (0.9 * 5 + 0.1)
    )
    assert not torch.allclose(layer.eval()(x), expected)
    with pytest.raises(ValueError, match=r"^radius_norm must be 'running' or 'batch', not 'mean'$"):
        conv("tanh", radius_norm="mean")


@pytest.mark.parametrize("radius_norm", ["running", "batch"])
@pytest.mark.parametrize("angular", ["cosine", "sigmoid"])
@pytest.mark.parametrize("scale", [1e20, 1e-20])
def test_decoupled_learned_radius_of_seg_is_exact_for_huge_and_tiny_inputs(angular, radius_norm, scale):
    settings = {"magnitude": "seg", "angular": angular, "learn_radius": "filter", "radius_norm": radius_norm}
    layer = DecoupledConv2d(2, 3, 3, **settings)
    wide = copy.deepcopy(layer).double()
    x = (scale * torch.randn(2, 2, 5, 5)).requires_grad_()
    x_wide = x.detach().double().requires_grad_()
    y, y_wide = layer(x), wide(x_wide)
    torch.testing.assert_close(y.double(), y_wide, rtol=1e-4, atol=1e-5 * scale)
    grads = torch.autograd.grad(y.sum(), [x, layer.weight, layer.log_radius])
    expected = torch.autograd.grad(y_wide.sum(), [x_wide, wide.weight, wide.log_radius])
    for grad, reference_grad in zip(grads, expected, strict=True):
        torch.testing.assert_close(
            grad.double(), reference_grad, rtol=1e-3, atol=1e-4 * float(reference_grad.abs().max())
        )


@pytest.mark.parametrize(
    "magnitude", [Ball(radius=torch.tensor(2.0)), LinearlyWeighted(Ball(radius=torch.tensor(2.0)))]
)
def test_decoupled_moves_fixed_tensors_of_its_entries_with_its_parameters(magnitude):
    angular = Sigmoid(torch.tensor([0.5]))
    layer = DecoupledConv2d(2, 3, 1, magnitude=magnitude, angular=angular)
    x = torch.rand(2, 2, 3, 3)
    expected = layer(x)
    with torch.device("meta"):
        other = DecoupledConv2d(2, 3, 1, magnitude=magnitude, angular=angular)
    other.to_empty(device="cpu").load_state_dict(layer.state_dict())
    torch.testing.assert_close(other(x), expected)  # `to_empty` does not overwrite fixed tensors
    layer.to("meta")
    ball = layer.magnitude if isinstance(layer.magnitude, Ball) else layer.magnitude.magnitude
    assert layer.angular.k.is_meta
    assert ball.radius.is_meta
    assert layer(x.to("meta")).is_meta
    assert angular.k.device.type == "cpu"


def test_decoupled_uses_weight_norm_of_a_callable_unless_it_says_otherwise():
    def ignoring(w_norm, x_norm):
        return x_norm

    ignoring.uses_weight_norm = False
    assert conv(magnitude=lambda w_norm, x_norm: w_norm).uses_weight_norm
    assert not conv(magnitude=ignoring).uses_weight_norm
    assert not conv(magnitude=ignoring, weighting=None).uses_weight_norm
    assert conv(magnitude="tanh", weighting="linear").uses_weight_norm


def test_reset_parameters_restores_a_shared_k():
    k = shared_k(2.0)
    layers = [DecoupledLinear(4, 3, angular="sigmoid", learn_k=k) for _ in range(2)]
    with torch.no_grad():
        k.fill_(5.0)
    layers[0].reset_parameters()
    torch.testing.assert_close(k.detach().exp(), torch.tensor([2.0]))
