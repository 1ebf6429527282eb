"""Dtype conversion, tolerances and scaling."""

import math

import numpy as np
import pytest
import torch

from hypersphere import _numerics, sphere


def test_require_finite_rows_names_the_first_invalid_row():
    x = torch.ones(4, 3)
    x[2, 1] = float("inf")
    with pytest.raises(ValueError, match=r"features must be finite, but row 2 is not \(1 such rows of 4\)"):
        _numerics.require_finite_rows("features", x)


def test_require_finite_rows_accepts_finite_rows_whose_sum_overflows():
    x = torch.full((2, 4), 3e38)
    assert x.sum().isinf()
    _numerics.require_finite_rows("features", x)
    _numerics.require_finite_rows("features", torch.zeros(0, 3))


def test_widen_converts_half_and_integers_only():
    dtypes = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.int64: torch.float32}
    for dtype in (torch.float32, torch.float64, torch.complex64):
        dtypes[dtype] = dtype
    for dtype, expected in dtypes.items():
        assert _numerics.widen(torch.zeros(2, dtype=dtype)).dtype == expected


def test_widen_parameter_clamps_the_float16_gradient():
    weight = torch.ones(2, dtype=torch.float16, requires_grad=True)
    (_numerics.widen_parameter(weight) * torch.tensor([1e6, -1e6])).sum().backward()
    assert weight.grad.tolist() == [65504.0, -65504.0]


def test_narrow_keeps_infinity_visible_as_nan():
    assert _numerics.narrow(torch.tensor([math.inf, 1.0]), torch.float16).isnan().tolist() == [True, False]


def test_narrow_clamps_values_to_float16_and_keeps_gradients():
    x = torch.tensor([1e6, 1.0], requires_grad=True)
    y = _numerics.narrow(x, torch.float16)
    assert y.tolist() == [65504.0, 1.0]
    y.sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]


def test_values_are_not_readable_on_meta_in_transforms_and_while_compiling():
    assert _numerics.values_readable(torch.zeros(1))
    assert not _numerics.values_readable(torch.zeros(1), torch.zeros(1, device="meta"))
    readable = []
    torch.func.vmap(lambda x: readable.append(_numerics.values_readable(x)) or x)(torch.zeros(2))
    compiled = torch.compile(
        lambda x: x + 1 if _numerics.values_readable(x) else x - 1, fullgraph=True, backend="eager"
    )
    assert readable == [False]
    assert float(compiled(torch.zeros(()))) == -1


def test_all_on_cpu_only_on_the_cpu():
    assert _numerics.all_on_cpu(torch.zeros(1), torch.zeros(1))
    assert not _numerics.all_on_cpu(torch.zeros(1), torch.zeros(1, device="meta"))


def test_unit_scale_is_a_power_of_two_that_brings_the_peak_below_one():
    peaks = torch.tensor([1e-30, 0.3, 1.0, 5.0, 1e30])
    scale = _numerics.unit_scale(peaks)
    mantissa, _ = np.frexp(scale.numpy())
    np.testing.assert_array_equal(mantissa, 0.5)
    scaled = (peaks * scale).numpy()
    assert ((scaled > 0.5) & (scaled <= 1)).all()
    assert _numerics.unit_scale(torch.tensor([0.0, math.inf, math.nan])).tolist() == [1, 1, 1]


def test_safe_scale_changes_only_entries_whose_squares_would_leave_the_range():
    assert _numerics.safe_scale(torch.tensor([1e-3, 1.0, 1e6])).tolist() == [1, 1, 1]
    for peak in (1e-30, 1e30):
        square = (torch.tensor(peak) * _numerics.safe_scale(torch.tensor(peak))).square()
        assert 0.1 < float(square) <= 1


def test_norms_in_bounds_rejects_extreme_zero_and_nan_norms():
    assert _numerics.norms_in_bounds(torch.tensor([1e-3, 1.0, 1e6]))
    for norm in (0.0, 1e-25, 1e25, math.nan, math.inf):
        assert not _numerics.norms_in_bounds(torch.tensor([1.0, norm]))


def test_squared_distance_floor_is_raised_in_float32_for_large_powers():
    assert _numerics.squared_distance_floor(torch.float32, 3) == _numerics.distance_floor() ** 2
    assert _numerics.squared_distance_floor(torch.float32, 4) > _numerics.distance_floor() ** 2


def test_squared_distance_floor_keeps_large_powers_finite():
    for power in (1, 2, 7, 20, 50):
        floor = _numerics.squared_distance_floor(torch.float32, power)
        chord = torch.tensor(floor).sqrt()
        assert torch.isfinite(chord**-power * power / chord * 1e3)


def test_angle_derivative_matches_autograd_inside_and_is_zero_outside():
    c = torch.linspace(-0.999, 0.999, 11, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(c.acos().sum(), c)
    torch.testing.assert_close(_numerics.angle_derivative(c.detach()), expected)
    assert _numerics.angle_derivative(torch.tensor([1.0, -1.0, 1.1])).tolist() == [0, 0, 0]


def test_tolerances_treat_half_precision_as_float32():
    for tolerance in (_numerics.close_pair_threshold, _numerics.tie_tolerance, _numerics.rotation_tolerance):
        assert tolerance(torch.bfloat16) == tolerance(torch.float32) > tolerance(torch.float64)


def test_tie_tolerance_covers_rounding_of_products():
    for dim in (64, 512, 2048):
        point = torch.randn(1, dim, generator=torch.Generator().manual_seed(dim))
        x = sphere.row_directions(point * torch.linspace(0.1, 3, 200)[:, None])
        spread = (x @ x.mT - (x[:1] * x).sum(1)).abs().max()
        assert spread < _numerics.tie_tolerance(torch.float32)
