import math

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import oracle
from hypersphere import _numerics, sphere

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def gradient(function, x):
    x = x.clone().requires_grad_()
    function(x).sum().backward()
    return x.grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", [sphere.norm, sphere.normalize, lambda x: sphere.cosine(x, x.flip(-1))])
def test_zero_vectors_are_finite_with_zero_gradient(dtype, function):
    x = torch.zeros(3, 4, dtype=dtype)
    assert not function(x).any()
    assert not gradient(function, x).any()


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e20), (torch.float16, 4e4), (torch.float64, 1e200)])
def test_huge_vectors_keep_their_direction(dtype, size):
    x = torch.tensor([[1.0, -1.0], [0.5, 0.25]], dtype=dtype) * size
    expected = torch.tensor([[1.0, -1.0], [2.0, 1.0]], dtype=torch.float64)
    expected = expected / expected.norm(dim=1, keepdim=True)
    torch.testing.assert_close(sphere.normalize(x).double(), expected, atol=1e-3, rtol=0)
    assert torch.isfinite(gradient(sphere.normalize, x)).all()


def test_tiny_vectors_keep_their_direction():
    x = torch.tensor([3e-25, 4e-25])
    torch.testing.assert_close(sphere.normalize(x), torch.tensor([0.6, 0.8]))


def test_nan_is_not_hidden():
    x = torch.tensor([[float("nan"), 1.0], [1.0, 0.0]])
    assert sphere.normalize(x)[0].isnan().all()
    assert sphere.norm(x).isnan().tolist() == [True, False]
    assert sphere.angle(torch.tensor([float("nan")])).isnan().all()


def test_derivatives_in_float64():
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    c = torch.linspace(-0.99, 0.99, 7, dtype=torch.float64, requires_grad=True)
    for function, inputs in [
        (sphere.norm, (x,)),
        (sphere.normalize, (x,)),
        (sphere.cosine, (x, w)),
        (sphere.cosines, (x, w)),
        (sphere.angle, (c,)),
    ]:
        assert gradcheck(function, inputs)
        assert gradgradcheck(function, inputs)


def test_angle_agrees_with_an_accurate_formula():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 50, 6))
    ours = sphere.angle(sphere.cosine(torch.from_numpy(a), torch.from_numpy(b))).numpy()
    theirs = [oracle.angle(x, y) for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize("theta", [0.01, 0.02, 0.1, 1.0, 3.0, math.pi - 0.01])
def test_derivative_of_the_angle_in_float32(theta):
    c = torch.tensor(math.cos(theta), dtype=torch.float32)
    assert gradient(sphere.angle, c).item() == pytest.approx(-1 / math.sin(theta), rel=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_angle_at_and_beyond_one(dtype):
    c = torch.tensor([1.0, -1.0, 1.01, -1.01], dtype=dtype)
    torch.testing.assert_close(sphere.angle(c).float(), torch.tensor([0, math.pi, 0, math.pi]), atol=1e-2, rtol=0)
    assert not gradient(sphere.angle, c).any()


def test_cosine_of_a_vector_with_itself_is_safe():
    x = torch.randn(10_000, 37)
    c = sphere.cosine(x, x)
    assert (c > 1).any()  # float32 does exceed 1, which is why the arc cosine has to be safe
    assert torch.isfinite(gradient(lambda v: sphere.angle(sphere.cosine(v, v.detach())), x)).all()


def test_autocast_leaves_products_wide():
    x, w = torch.randn(4, 64), torch.randn(3, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        c = sphere.cosines(x, w)
    assert c.dtype == torch.float32
    torch.testing.assert_close(c, sphere.cosines(x, w))


def test_meta_tensors_pass_through():
    x = torch.empty(4, 8, device="meta")
    assert sphere.cosines(x, x).shape == (4, 4)
    assert sphere.angle(sphere.cosine(x, x)).device.type == "meta"


def test_require_finite_rows_names_the_row():
    x = torch.ones(4, 3)
    x[2, 1] = float("inf")
    with pytest.raises(ValueError, match=r"features must be finite, but row 2"):
        _numerics.require_finite_rows("features", x)
    _numerics.require_finite_rows("features", torch.full((2, 4), 3e38))  # overflows in the sum, but is finite
    _numerics.require_finite_rows("features", torch.zeros(0, 3))


def test_compiles_in_one_graph():
    x, w = torch.randn(4, 8), torch.randn(3, 8)
    compiled = torch.compile(lambda x, w: sphere.angle(sphere.cosines(x, w)), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, w), sphere.angle(sphere.cosines(x, w)))
