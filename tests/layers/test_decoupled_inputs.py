"""Decoupled layers on hard inputs, in all dtypes and memory formats."""

import copy

import pytest
import torch
import torch.nn.functional as F

from hypersphere.functions.angular import Linear, Sigmoid
from hypersphere.layers import DecoupledConv1d, DecoupledConv2d, DecoupledLinear

from .cases import conv, every_kind, images, run


@every_kind
@pytest.mark.parametrize("level", [0.0, 1.0, -3.0])
def test_decoupled_constant_images_have_finite_gradients(kind, level):
    y, gradients = run(conv(kind), torch.full((2, 4, 5, 5), level))
    assert torch.isfinite(y).all()
    assert all(torch.isfinite(g).all() for g in gradients)


@every_kind
def test_decoupled_zero_patches_have_zero_gradient(kind):
    layer = conv(kind, bias=False)
    x = images(2, 4, 9, 9)
    x[:, :, :, 5:] = 0
    x = x.requires_grad_()
    y = layer(x)
    assert torch.isfinite(y).all()
    (gradient,) = torch.autograd.grad(y[..., 7:].sum(), x)  # patches that are all zero
    assert gradient.abs().max() == 0
    if not isinstance(layer.angular, (Linear, Sigmoid)):
        assert y[..., 7:].abs().max() == 0


def test_decoupled_zero_filter_has_zero_gradient():
    layer = conv()
    with torch.no_grad():
        layer.weight[0] = 0
    y, gradients = run(layer, images(2, 4, 5, 5))
    assert torch.equal(y[:, 0], layer.bias[0].expand_as(y[:, 0]))
    assert all(torch.isfinite(g).all() for g in gradients)
    assert gradients[1][0].abs().max() == 0


@pytest.mark.parametrize(
    ("peak", "norm", "is_zero"),
    [
        (1.0, 3.2e-16, False),
        (1.0, 3.1e-16, True),
        (6e15, 3.2e-16, False),  # an absolute bound, although the ratio is 5e-32
        (6e15, 3.1e-16, True),
        (1e20, 7e4, False),  # relative to the largest entry
        (1e20, 2e4, True),
        (1e-20, 1e-30, False),
    ],
)
def test_decoupled_treats_patches_below_the_documented_bound_as_zero(peak, norm, is_zero):
    layer = DecoupledConv1d(1, 1, 1, bias=False)
    y = layer(torch.tensor([[[peak, norm]]]))
    assert y.abs().flatten().tolist() == pytest.approx([1, 0 if is_zero else 1])


@pytest.mark.parametrize("size", [1e20, 1e-20, 1e30, 1e-28])
@pytest.mark.parametrize("g", ["cosine", "linear"])
def test_decoupled_huge_and_tiny_images_keep_their_directions(size, g):
    layer, x = conv(angular=g, bias=False), images(2, 4, 5, 5)
    mixed = torch.stack([x[0] * size, x[1]])  # the other image is ordinary
    y, (to_x, _) = run(layer, mixed)
    expected, (to_expected, _) = run(layer, x)
    torch.testing.assert_close(y, expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(to_x[0] * size, to_expected[0], atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(to_x[1], to_expected[1], atol=2e-4, rtol=2e-4)


def test_decoupled_huge_half_precision_rows_keep_their_directions():
    layer = DecoupledLinear(64, 8, bias=False).half()
    x = (images(3, 64).sign() * 4e4).half()
    expected = copy.deepcopy(layer).double()(x.double())
    torch.testing.assert_close(layer(x).double(), expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("angular", ["cosine", "linear"])
def test_decoupled_float16_products_with_filters_of_large_norm_do_not_overflow(angular):
    layer = DecoupledLinear(576, 1, bias=False, weighting="linear", angular=angular).half()
    with torch.no_grad():
        layer.weight.fill_(5.0)  # ‖w‖ = 5·√576 = 120
    x = torch.ones(1, 576, dtype=torch.float16, requires_grad=True)
    y = layer(x)
    assert y.item() == pytest.approx(120, rel=2e-3)
    assert torch.func.vmap(layer)(x).item() == pytest.approx(120, rel=2e-3)  # ordinary operations
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(y.sum(), [x, layer.weight]))


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decoupled_half_precision_and_autocast_agree_with_float32(kind, dtype):
    layer, x = conv(kind, inputs=16), images(2, 16, 6, 6)
    expected, wide_gradients = run(layer.eval(), x)
    with torch.autocast("cpu", dtype=dtype):
        y, gradients = run(layer, x)
    narrow = copy.deepcopy(layer).to(dtype)
    ours, half_gradients = run(narrow, x.to(dtype))
    assert y.dtype == ours.dtype == dtype
    tolerance = 0.03 if dtype == torch.bfloat16 else 0.005
    torch.testing.assert_close(y.float(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(ours.float(), expected, atol=tolerance, rtol=tolerance)
    for a, b, wide in zip(gradients, half_gradients, wide_gradients, strict=True):
        assert a.dtype == torch.float32
        assert b.dtype == dtype
        assert (a - wide).norm() < 2 * tolerance * wide.norm()
        # float16 numbers below 6e-5 have a spacing of 6e-8.
        assert (b - wide).abs().max() < 2 * tolerance * wide.norm() + 6e-8


@every_kind
def test_decoupled_keeps_the_channels_last_format(kind):
    layer, x = conv(kind, inputs=8, groups=2), images(2, 8, 6, 6)
    expected, gradients = run(layer.eval(), x)
    layer = layer.to(memory_format=torch.channels_last)
    y, ours = run(layer, x.to(memory_format=torch.channels_last))
    if kind != "joint":  # its magnitude is as large as the output
        assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, expected, atol=1e-6, rtol=1e-5)
    for a, b in zip(ours, gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_decoupled_single_sample_empty_batch_meta_and_inference_mode():
    layer, x = conv("tanh").eval(), images(2, 4, 5, 5)
    torch.testing.assert_close(layer(x[0]), layer(x)[0])
    assert layer(x[:0]).shape == (0, 6, 5, 5)
    meta = DecoupledConv2d(4, 6, 3, device="meta", magnitude="tanh", angular="sigmoid", learn_radius="layer")
    assert meta(torch.empty(2, 4, 5, 5, device="meta")).shape == (2, 6, 3, 3)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), conv("tanh").eval()(x))


def test_decoupled_leaves_its_input_unchanged_and_allows_an_inplace_activation():
    layer, x = conv(), images(2, 4, 5, 5).requires_grad_()
    before = x.detach().clone()
    F.relu(layer(x), inplace=True).sum().backward()
    first = x.grad.clone()
    x.grad = None
    F.relu(layer(x)).sum().backward()
    assert torch.equal(first, x.grad)
    assert torch.equal(before, x)


def test_decoupled_refuses_integers_and_promotes_dtypes():
    with pytest.raises(ValueError, match=r"input must be a tensor of a floating-point dtype, not torch\.uint8"):
        DecoupledConv2d(1, 2, 3)(torch.randint(0, 255, (1, 1, 4, 4), dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"input must be a tensor of a floating-point dtype, not <class 'list'>"):
        DecoupledLinear(1, 2)([[1.0]])
    with pytest.raises(ValueError, match=r"input must be a tensor with 3 or 4 dimensions and 1 channels, not \(2, 1\)"):
        DecoupledConv2d(1, 2, 3)(torch.rand(2, 1))
    for magnitude in ("sphere", "linear", "inner_product", "tanh"):
        layer = DecoupledLinear(3, 2, magnitude=magnitude, dtype=torch.float64)
        assert layer(torch.rand(1, 3)).dtype == torch.float64
        assert DecoupledLinear(3, 2, magnitude=magnitude)(torch.rand(1, 3).bfloat16()).dtype == torch.float32


@every_kind
@pytest.mark.parametrize("groups", [1, 2])
def test_decoupled_empty_batch_has_a_backward(kind, groups):
    layer = conv(kind, groups=groups)
    x = torch.zeros(0, 4, 5, 5, requires_grad=True)
    y = layer(x)
    gradients = torch.autograd.grad(y.sum(), [x, *layer.parameters()])
    assert y.shape == (0, 6, 5, 5)
    assert gradients[0].shape == x.shape
    assert all(g.abs().sum() == 0 for g in gradients)
    rows = DecoupledLinear(4, 3, **{**layer_settings(layer)})
    assert torch.autograd.grad(rows(torch.zeros(0, 4)).sum(), rows.weight)[0].abs().sum() == 0


def layer_settings(layer):
    return {"magnitude": layer.magnitude, "angular": layer.angular, "weighting": layer.weighting}


@pytest.mark.parametrize("weighting", [None, "joint", "separate"])
@pytest.mark.parametrize("learn_radius", [None, "layer", "filter"])
@pytest.mark.parametrize("radius_norm", ["running", "batch"])
@pytest.mark.parametrize("size", [1e-18, 1e-21, 1e-24, 1e-27])
def test_decoupled_tiny_inputs_have_exact_gradients(weighting, learn_radius, radius_norm, size):
    layer = conv(magnitude="tanh", weighting=weighting, learn_radius=learn_radius, radius_norm=radius_norm, bias=False)
    wide = copy.deepcopy(layer).double()
    x = images(2, 4, 5, 5) * size
    (y, ours), (expected, exact) = run(layer, x), run(wide, x.double())
    torch.testing.assert_close(y.double(), expected, rtol=3e-5, atol=0)
    for a, b in zip(ours, exact, strict=True):
        # Relative to the largest entry: single entries may cancel, or may be below the smallest float32 number.
        assert torch.isfinite(a).all()
        assert (a.double() - b).abs().max() <= 1e-4 * b.abs().max() + 1e-37


@pytest.mark.parametrize("angular", ["cosine", "sigmoid"])
@pytest.mark.parametrize("magnitude", ["seg", "mix"])
def test_decoupled_input_gradient_of_large_float16_inputs_is_finite(magnitude, angular):
    layer = DecoupledConv2d(4, 6, 3, magnitude=magnitude, angular=angular).half()
    wide = copy.deepcopy(layer).double()
    x = (1e4 * torch.randn(2, 4, 5, 5)).half().requires_grad_()
    x_wide = x.detach().double().requires_grad_()
    (grad,) = torch.autograd.grad(layer(x), x, torch.ones(2, 6, 3, 3, dtype=torch.float16))
    (expected,) = torch.autograd.grad(wide(x_wide).sum(), x_wide)
    torch.testing.assert_close(grad.double(), expected, rtol=0.02, atol=0.02)


def test_decoupled_names_the_expected_shape():
    with pytest.raises(
        ValueError, match=r"input must be a tensor with 3 or 4 dimensions and 4 channels, not \(2, 5, 6, 6\)"
    ):
        DecoupledConv2d(4, 6, 3)(torch.randn(2, 5, 6, 6))
    with pytest.raises(ValueError, match=r"^input must be a tensor with 3 or 4 dimensions and 4 channels, not "):
        DecoupledConv2d(4, 6, 3, groups=2, magnitude="linear")(torch.randn(4, 6))
    with pytest.raises(ValueError, match=r"input must be a tensor whose last dimension has 4 entries, not \(2, 5\)"):
        DecoupledLinear(4, 6)(torch.randn(2, 5))


def test_decoupled_names_the_class_for_an_unknown_option():
    with pytest.raises(TypeError, match=r"DecoupledConv1d has no option 'magnitud'; did you mean magnitude\?"):
        DecoupledConv1d(4, 6, 3, magnitud="ball")
