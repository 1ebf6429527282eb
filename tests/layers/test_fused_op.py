"""The fused operator: blocks, derivatives, the poles, the contract of custom operators, and memory."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from benchmarks.layers import saved_bytes
from torch import nn
from torch.library import opcheck

from hypersphere.layers import DecoupledConv1d, DecoupledConv2d, DecoupledConv3d, DecoupledLinear
from hypersphere.layers._fused_op import PRODUCT_BLOCK
from hypersphere.layers._geometry import ConvGeometry, batch_blocks

from .cases import KINDS, every_kind, randn


def gradients(layer, x):
    y = layer(x)
    return y, torch.autograd.grad((y * randn(*y.shape, seed=2)).sum(), [x, *layer.parameters()])


@pytest.mark.slow
@every_kind
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_fused_op_on_several_blocks_agrees_with_the_reference(kind, memory_format):
    samples, side = 33, 16
    samples *= torch.get_num_threads()
    assert len(batch_blocks(PRODUCT_BLOCK, 64 * side**2, torch.empty(samples))) == 2
    layer = DecoupledConv2d(4, 64, 3, padding=1, groups=2, dtype=torch.float64, **KINDS[kind])
    layer = layer.to(memory_format=memory_format).eval()
    x = randn(samples, 4, side, side).to(memory_format=memory_format).requires_grad_()
    y, ours = gradients(layer, x)
    assert y.is_contiguous(memory_format=memory_format)
    expected, expected_gradients = reference_gradients(layer, x, randn(*y.shape, seed=2))
    torch.testing.assert_close(y, expected, atol=1e-11, rtol=0)
    for a, b in zip(ours, expected_gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("g", ["linear", "sigmoid"])
def test_fused_op_has_zero_gradient_at_the_poles(g, dtype):
    layer = DecoupledLinear(3, 1, bias=False, angular=g, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[2.0, 0.0, 0.0]]))
    x = torch.tensor([[3.0, 0, 0], [-5.0, 0, 0], [0, 1.0, 0]], dtype=dtype, requires_grad=True)
    y = layer(x)
    assert y.flatten().tolist() == pytest.approx([1, -1, 0], abs=1e-6)
    (grad_x,) = torch.autograd.grad(y.sum(), x)
    assert grad_x[:2].abs().max() == 0
    assert grad_x[2, 0] > 0


@pytest.mark.parametrize("learn_k", [None, "filter"])
@pytest.mark.parametrize("angle", [0.01, 0.1, 1.0, 3.13])
def test_fused_op_gradient_near_the_poles_in_float32(angle, learn_k):
    layer = DecoupledLinear(2, 1, bias=False, angular="sigmoid", learn_k=learn_k)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 0.0]]))
    x = torch.tensor([[math.cos(angle), math.sin(angle)]], requires_grad=True)
    (ours,) = torch.autograd.grad(layer(x).sum(), x)
    wide = x.detach().double().requires_grad_()
    (theirs,) = torch.autograd.grad(layer.double()(wide).sum(), wide)
    assert (ours - theirs).norm() < 2e-3 * theirs.norm()


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (DecoupledConv1d(4, 6, 3, bias=False), (2, 4, 7)),
        (DecoupledConv2d(4, 6, 3, bias=False, angular="linear"), (2, 4, 5, 5)),
        (DecoupledConv3d(4, 6, 2, bias=False, magnitude="tanh"), (2, 4, 3, 3, 3)),
        (DecoupledLinear(4, 6, bias=False, angular="sigmoid"), (5, 4)),
        (DecoupledLinear(4, 6, weighting="linear"), (5, 4)),
    ],
)
def test_fused_op_allows_an_inplace_activation_after_any_layer(layer, shape):
    x = randn(*shape).float().requires_grad_()
    ours = torch.autograd.grad(F.relu(layer(x), inplace=True).sum(), [x, layer.weight])
    theirs = torch.autograd.grad(F.relu(layer(x)).sum(), [x, layer.weight])
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_fused_op_partial_gradients_equal_those_of_the_full_set():
    x = randn(2, 4, 6, 6)
    for kind in KINDS.values():
        layer = DecoupledConv2d(4, 6, 3, dtype=torch.float64, **kind).eval()
        full = gradients(layer, x.clone().requires_grad_())[1][1:]
        y = layer(x)
        alone = torch.autograd.grad((y * randn(*y.shape, seed=2)).sum(), list(layer.parameters()))
        for a, b in zip(alone, full, strict=True):
            torch.testing.assert_close(a, b)
        layer.requires_grad_(False)
        some = x.clone().requires_grad_()
        (grad_x,) = torch.autograd.grad((layer(some) * randn(*y.shape, seed=2)).sum(), some)
        torch.testing.assert_close(grad_x, gradients(layer.requires_grad_(), some)[1][0])


def test_fused_op_passes_opcheck():
    geometry = ConvGeometry((3, 3), (1, 1), (1, 1), (1, 1)).to_list()
    x, weight, ones = torch.randn(2, 2, 4, 4), torch.randn(3, 2, 3, 3), torch.ones(2, 1, 1, 1)
    reciprocal = torch.rand(2, 1, 1, 4, 4) / 10
    norm = reciprocal.reciprocal()
    a, k = torch.rand(1, 3, 1, 1) + 0.5, torch.rand(1, 3, 1, 1) + 0.5
    for learned in (x, weight, a, k):
        learned.requires_grad_()
    forward = torch.ops.hypersphere.decoupled.default
    norms = (norm, reciprocal, ones, geometry)
    fixed = (x, weight, None, None, None, *norms, "sphere", [1.0], "cosine", [], "products")
    learned = (x, weight, a, a, k, *norms, "tanh", [1.0, 1.0], "sigmoid", [0.5], "cotangents")
    for arguments in (fixed, learned):
        assert set(opcheck(forward, arguments).values()) == {"SUCCESS"}


@pytest.mark.slow
@pytest.mark.parametrize("g", ["cosine", "linear", "sigmoid"])
def test_fused_op_memory_for_backward_when_compiled(g):
    x = torch.randn(4, 64, 16, 16, requires_grad=True)
    layer = DecoupledConv2d(64, 64, 3, padding=1, bias=False, angular=g)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    compiled(x)
    weights = layer.weight.nbytes  # of which the sphere keeps the directions
    assert saved_bytes(compiled, x) - 2 * weights <= 2.1 * (saved_bytes(nn.Conv2d(64, 64, 3), x) - weights)


def test_fused_op_memory_for_backward():
    x = randn(4, 64, 16, 16).float().requires_grad_()
    for g in ("cosine", "linear", "sigmoid"):
        layer = DecoupledConv2d(64, 64, 3, padding=1, bias=False, angular=g)
        ours, theirs = saved_bytes(layer, x), saved_bytes(nn.Conv2d(64, 64, 3, padding=1, bias=False), x)
        weights = layer.weight.nbytes  # of which the sphere keeps the directions
        assert ours - weights <= 2.1 * (theirs - weights)


def reference_gradients(layer, x, grad):
    """Return the output and gradients of ordinary operations in the dtype of `x`: `torch.func` excludes fused ones."""
    names = [name for name, _ in layer.named_parameters()]

    def reference(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    y, backward = torch.func.vjp(reference, x.detach(), *[p.detach() for p in layer.parameters()])
    return y, backward(grad)


def relative_error(ours, exact):
    return ((ours.double() - exact).norm() / exact.norm()).item()


def near_filters(kind, angle, seed=0):
    """Return a float32 layer, inputs at `angle` from one filter of each group, and an output gradient."""
    torch.manual_seed(seed)
    layer = DecoupledConv2d(16, 24, 3, groups=2, **KINDS[kind]).eval()
    x = torch.randn(8, 16, 3, 3)
    if angle is not None:
        filters = torch.cat([layer.weight[:8], layer.weight[12:20]], 1).detach()
        x = filters / filters.std() + angle * x
    return layer, x.requires_grad_(), torch.randn(8, 24, 1, 1)


def sums_of_magnitudes(layer, x, grad, name):
    """Return Σ|G·∂y/∂v| over the responses for each entry v of a learned number, without cancellation in the sum."""
    number = layer.get_parameter(name).detach()

    def respond(number):
        return torch.func.functional_call(layer, {name: number}, (x.detach(),))

    # A response depends on one entry, so one direction of ones gives the derivatives of all responses.
    derivatives = torch.func.jvp(respond, (number,), (torch.ones_like(number),))[1]
    return (grad * derivatives).abs().sum((0, 2, 3)).sum_to_size(number.shape)


@every_kind
@pytest.mark.parametrize("angle", [None, 0.3, 0.03])
def test_fused_op_float32_gradients_agree_with_exact_ones(kind, angle):
    layer, x, grad = near_filters(kind, angle)
    ours = torch.autograd.grad(layer(x), [x, *layer.parameters()], grad)
    _, reference = reference_gradients(layer, x, grad)
    wide, wide_x, wide_grad = copy.deepcopy(layer).double(), x.double(), grad.double()
    _, exact = reference_gradients(wide, wide_x, wide_grad)
    names = ["x", *(name for name, _ in layer.named_parameters())]
    for name, a, b, c in zip(names, ours, reference, exact, strict=True):
        bound = 1e-5
        if angle == 0.03 and name.startswith("log_"):
            # The gradient of a learned number adds terms of both signs over all responses, and its relative error
            # grows with their cancellation: the terms are 20 times larger than their sum. Their own error is small.
            terms = sums_of_magnitudes(wide, wide_x, wide_grad, name)
            assert (a - c).norm() < 5e-6 * terms.norm()
            bound = 2e-5
        assert relative_error(a, c) < max(bound, 2 * relative_error(b, c))


@pytest.mark.parametrize("kind", ["mix", "weighted ball"])
def test_fused_op_float32_gradient_of_k_is_as_accurate_as_ordinary_operations(kind):
    # Both start from float32 cosines. Near a filter, an error of 6e-8 in the cosine is one of 6e-8/θ in θ, to which
    # ∂g/∂k is proportional. Averaged over draws, neither is more accurate than the other.
    fused, ordinary = [], []
    for seed in range(20):
        layer, x, grad = near_filters(kind, 0.03, seed)
        wide, wide_x, wide_grad = copy.deepcopy(layer).double(), x.double(), grad.double()
        position = [name for name, _ in layer.named_parameters()].index("log_k") + 1
        (ours,) = torch.autograd.grad(layer(x), [layer.log_k], grad)
        reference = reference_gradients(layer, x, grad)[1][position]
        exact = reference_gradients(wide, wide_x, wide_grad)[1][position]
        terms = sums_of_magnitudes(wide, wide_x, wide_grad, "log_k").norm()
        fused.append(((ours - exact).norm() / terms).item())
        ordinary.append(((reference - exact).norm() / terms).item())
    assert sum(fused) < 1.5 * sum(ordinary)
    assert max(fused) < 5e-6


@every_kind
def test_fused_op_half_storage_saves_memory_and_rounds_gradients(kind):
    torch.manual_seed(0)
    layer = DecoupledConv2d(64, 64, 3, padding=1, bias=False, storage="half", **KINDS[kind]).eval()
    full = DecoupledConv2d(64, 64, 3, padding=1, bias=False, **KINDS[kind]).eval()
    full.load_state_dict(layer.state_dict())
    x, grad = torch.randn(2, 64, 16, 16, requires_grad=True), torch.randn(2, 64, 16, 16)
    ours = torch.autograd.grad(layer(x), [x, *layer.parameters()], grad)
    exact = torch.autograd.grad(full(x), [x, *full.parameters()], grad)
    assert relative_error(ours[0], exact[0].double()) < 3e-4
    assert relative_error(ours[1], exact[1].double()) < 3e-4
    assert torch.equal(layer(x), full(x))
    outputs = grad.numel()
    assert saved_bytes(full, x) - saved_bytes(layer, x) == pytest.approx(2 * outputs, rel=0.01)
    assert "storage='half'" in repr(layer)


@pytest.mark.parametrize("magnitude", ["sphere", "ball", "tanh", "linear", "seg", "log", "mix"])
@pytest.mark.parametrize("angular", ["cosine", "sigmoid"])
@pytest.mark.parametrize("size", [0.1, 10.0])
def test_fused_op_half_storage_is_exact_for_filters_of_any_norm(magnitude, angular, size):
    torch.manual_seed(0)
    # With the cosine, `magnitude="linear"` is an inner product, which does not use the operator.
    options = {"magnitude": magnitude, "angular": angular, "weighting": "linear"}
    layer, full = (DecoupledConv2d(4, 6, 3, storage=storage, **options) for storage in ("half", "full"))
    with torch.no_grad():
        layer.weight.mul_(size / layer.weight.flatten(1).norm(dim=1).view(-1, 1, 1, 1))
    full.load_state_dict(layer.state_dict())
    x, grad = torch.randn(2, 4, 6, 6, requires_grad=True), torch.randn(2, 6, 4, 4)
    y, expected = layer(x), full(x)
    torch.testing.assert_close(y, expected)
    ours = torch.autograd.grad(y, [x, *layer.parameters()], grad)
    exact = torch.autograd.grad(expected, [x, *full.parameters()], grad)
    for a, b in zip(ours, exact, strict=True):
        assert relative_error(a, b.double()) < 5e-4
