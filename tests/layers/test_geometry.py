"""Window sums, their transpose, and patch norms."""

import pytest
import torch
import torch.nn.functional as F

from hypersphere.layers._geometry import ConvGeometry, measure_patches

from .cases import randn

GEOMETRIES = [
    ConvGeometry((3, 2), (1, 1), (1, 0), (1, 1)),
    ConvGeometry((3, 3), (2, 3), (2, 1), (1, 1)),
    ConvGeometry((2, 3), (3, 1), (0, 2), (2, 2)),
    ConvGeometry((1, 1), (2, 2), (0, 0), (1, 1)),
]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_window_sum_is_a_convolution_with_ones(geometry):
    x = randn(2, 3, 7, 8)
    ones = torch.ones(3, 1, *geometry.kernel, dtype=x.dtype)
    expected = F.conv2d(x, ones, None, geometry.stride, geometry.padding, geometry.dilation, groups=3)
    torch.testing.assert_close(geometry.window_sum(x), expected)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_window_spread_is_the_transpose_of_window_sum(geometry):
    x = randn(2, 3, 7, 8).requires_grad_()
    y = geometry.window_sum(x)
    s = randn(*y.shape, seed=3)
    (expected,) = torch.autograd.grad(y, x, s)
    torch.testing.assert_close(geometry.window_spread(s, x.shape[2:]), expected)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("size", [1.0, 1e25, 1e-25])
def test_measure_patches_returns_norms_of_unfolded_patches(geometry, size):
    x = randn(2, 3, 7, 8)
    patches = F.unfold(x, geometry.kernel, geometry.dilation, geometry.padding, geometry.stride)
    expected = patches.norm(dim=1)
    for with_graph in (False, True):
        patches = measure_patches((x * size).float(), geometry, with_graph=with_graph)
        torch.testing.assert_close(patches.norm.double().flatten(1) / size, expected, rtol=1e-6, atol=0)
        # The reciprocals and the scale are those of the scaled input, which is `x` times a power of two per sample.
        of_scaled = measure_patches(patches.x.double(), geometry, with_graph=False)
        torch.testing.assert_close(patches.reciprocal.double(), of_scaled.reciprocal, rtol=1e-6, atol=0)
        squares = (patches.x * patches.square_range_scale).square().sum((1, 2, 3))
        assert ((squares > 1e-6) & (squares < 1e6)).all()


@pytest.mark.parametrize("size", [1e-4, 1.0, 6e4])
@pytest.mark.parametrize("with_graph", [False, True])
def test_measure_patches_limits_float16_inputs_and_returns_their_norms(size, with_graph):
    x = (size * torch.rand(3, 2, 6, generator=torch.Generator().manual_seed(0))).half()
    geometry = ConvGeometry((3,), (1,), (1,), (1,))
    norms = measure_patches(x, geometry, with_graph=with_graph)
    scaled = norms.x
    assert scaled.dtype == torch.float16
    assert ((scaled.abs().amax((1, 2)) > 64) & (scaled.abs().amax((1, 2)) <= 128)).all()
    expected = measure_patches(x.double(), geometry, with_graph=False).norm
    torch.testing.assert_close(norms.norm.double(), expected, rtol=1e-5, atol=0)


def test_measure_patches_returns_zero_for_zero_patches():
    _, norm, reciprocal, scale = measure_patches(torch.zeros(2, 3, 4, 4), GEOMETRIES[0], with_graph=False)
    assert norm.abs().max() == reciprocal.abs().max() == 0
    assert torch.equal(scale, torch.ones_like(scale))
