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
def test_sphere_functions_give_zero_vectors_a_zero_gradient(dtype, function):
    x = torch.zeros(3, 4, dtype=dtype)
    assert not function(x).any()
    assert not gradient(function, x).any()


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e20), (torch.float16, 4e4), (torch.float64, 1e200)])
def test_normalize_keeps_the_direction_of_huge_vectors(dtype, size):
    x = torch.tensor([[1.0, -1.0], [0.5, 0.25]], dtype=dtype) * size
    expected = torch.tensor([[1.0, -1.0], [2.0, 1.0]], dtype=torch.float64)
    expected = expected / expected.norm(dim=1, keepdim=True)
    torch.testing.assert_close(sphere.normalize(x).double(), expected, atol=1e-3, rtol=0)
    assert torch.isfinite(gradient(sphere.normalize, x)).all()


def test_normalize_keeps_the_direction_of_tiny_vectors():
    x = torch.tensor([3e-25, 4e-25])
    torch.testing.assert_close(sphere.normalize(x), torch.tensor([0.6, 0.8]))


def test_sphere_functions_propagate_nan():
    x = torch.tensor([[float("nan"), 1.0], [1.0, 0.0]])
    assert sphere.normalize(x)[0].isnan().all()
    assert sphere.norm(x).isnan().tolist() == [True, False]
    assert sphere.angle(torch.tensor([float("nan")])).isnan().all()


def test_sphere_functions_pass_gradcheck_and_gradgradcheck():
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


def test_angle_matches_the_oracle():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 50, 6))
    values = sphere.angle(sphere.cosine(torch.from_numpy(a), torch.from_numpy(b))).numpy()
    expected = [oracle.angle(x, y) for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(values, expected, atol=1e-12)


@pytest.mark.parametrize("theta", [0.01, 0.02, 0.1, 1.0, 3.0, math.pi - 0.01])
def test_angle_has_an_accurate_derivative_in_float32(theta):
    c = torch.tensor(math.cos(theta), dtype=torch.float32)
    assert gradient(sphere.angle, c).item() == pytest.approx(-1 / math.sin(theta), rel=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_angle_is_clamped_with_zero_gradient_at_and_beyond_one(dtype):
    c = torch.tensor([1.0, -1.0, 1.01, -1.01], dtype=dtype)
    torch.testing.assert_close(sphere.angle(c).float(), torch.tensor([0, math.pi, 0, math.pi]), atol=1e-2, rtol=0)
    assert not gradient(sphere.angle, c).any()


def test_angle_is_finite_for_cosines_rounded_above_one():
    x = torch.randn(10_000, 37)
    c = sphere.cosine(x, x)
    assert (c > 1).any()  # in float32, rounding moves some cosines above 1
    assert torch.isfinite(gradient(lambda v: sphere.angle(sphere.cosine(v, v.detach())), x)).all()


def test_cosines_ignore_autocast():
    x, w = torch.randn(4, 64), torch.randn(3, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        c = sphere.cosines(x, w)
    assert c.dtype == torch.float32
    torch.testing.assert_close(c, sphere.cosines(x, w))


def test_sphere_functions_accept_meta_tensors():
    x = torch.empty(4, 8, device="meta")
    assert sphere.cosines(x, x).shape == (4, 4)
    assert sphere.angle(sphere.cosine(x, x)).device.type == "meta"


def test_sphere_functions_compile_in_one_graph():
    x, w = torch.randn(4, 8), torch.randn(3, 8)
    compiled = torch.compile(lambda x, w: sphere.angle(sphere.cosines(x, w)), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, w), sphere.angle(sphere.cosines(x, w)))


@pytest.mark.parametrize("scale", [1.0, 1e25, 1e-25])
def test_row_polar_agrees_with_polar(scale):
    x = torch.randn(6, 5) * scale
    x[2] = 0
    for fast, exact in zip(sphere.row_polar(x), sphere.polar(x), strict=True):
        torch.testing.assert_close(fast, exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_directions_match_polar(dtype):
    x = torch.randn(50, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    torch.testing.assert_close(sphere.row_directions(x), sphere.polar(x)[1])
    for scale in (0.0, 1e-42, 1e-30, 1e30, 3e38):
        # One extreme row must not change the others: it disables the fast path.
        rows = _numerics.widen(x)
        rows = torch.cat([rows, (rows[:1] / rows[:1].abs().max()) * scale])
        torch.testing.assert_close(sphere.row_directions(rows), sphere.polar(rows)[1])
    assert sphere.row_directions(x[:0]).shape == (0, 7)
    with_nan = torch.tensor([[float("nan"), 1.0], [1.0, 0.0]])
    assert sphere.row_directions(with_nan).isnan().any(1).tolist() == [True, False]


def test_sphere_forwards_deprecated_names():
    with pytest.warns(DeprecationWarning, match=r"sphere.widest is deprecated, use hypersphere._numerics.to_float64"):
        assert sphere.widest(torch.zeros(1)).dtype == torch.float64
    with pytest.warns(DeprecationWarning, match="row_directions"):
        assert sphere.directions(torch.eye(2)).shape == (2, 2)
    with pytest.warns(DeprecationWarning, match="safe_scale"):
        assert sphere.safe_scale(torch.ones(1)) == 1
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = sphere.nonsense
