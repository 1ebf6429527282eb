r"""Norms, directions, cosines and angles with finite values and gradients everywhere.

The functions follow three rules:

* half precision is computed in float32, and results are returned in the caller's dtype (except by `polar`);
* a zero vector has no direction: its direction is the zero vector, and its gradient is zero;
* a huge or tiny vector keeps its direction: entries are divided by the largest one before they are squared.

`torch.nn.functional.normalize` does not satisfy the last two. This module contains the only arc cosine of the library.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from hypersphere._deprecation import deprecated_names
from hypersphere._numerics import autocast_disabled, narrow, norms_in_bounds, values_readable, widen, zero_floor

__all__ = ["angle", "cosine", "cosines", "norm", "normalize", "polar"]


def polar(x: Float[Tensor, "..."], dim: int = -1) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    r"""Split vectors into norms and directions: x = ‖x‖·x̂.

    Args:
        x: vectors along `dim`.
        dim: the dimension that holds the entries of a vector.

    Returns:
        Norms, with `dim` kept at size 1, and directions, both in float32 or wider.

    Example:
        >>> polar(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        (tensor([[5.],
                [0.]]), tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]]))
    """
    # The floor belongs to the caller's dtype: a float16 vector that float16 cannot resolve counts as zero.
    floor = zero_floor(x.dtype if x.is_floating_point() else torch.get_default_dtype())
    x = widen(x)
    if x.shape[dim] == 0:  # amax of an empty dimension is an error
        return x.sum(dim, keepdim=True), x
    # Scale by the largest entry, so that squares neither overflow nor underflow. The peak is a constant for autograd:
    # it cancels in the direction and in the norm.
    peak = x.detach().abs().amax(dim, keepdim=True)
    is_zero = peak < floor  # False for NaN, so that a NaN stays visible
    peak = peak.masked_fill(is_zero, 1.0)
    scaled = x / peak
    # Replace the norm of a zero vector before the square root, whose derivative at 0 is infinite.
    length = scaled.square().sum(dim, keepdim=True).masked_fill(is_zero, 1.0).sqrt()
    return (peak * length).masked_fill(is_zero, 0.0), (scaled / length).masked_fill(is_zero, 0.0)


def row_polar(x: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return the norms and directions of rows like `polar`, but faster for ordinary norms.

    The fast path squares entries without scaling them first. It applies if all norms are far from overflow and
    underflow. Testing this synchronises with the device once.

    >>> row_polar(torch.tensor([[3.0, 4.0], [3e30, 4e30]]))[1]
    tensor([[0.6000, 0.8000],
            [0.6000, 0.8000]])
    """
    if x.numel() and values_readable(x):
        wide = widen(x)
        norms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        if norms_in_bounds(norms.detach()):
            return norms, wide / norms
    return polar(x)


def row_directions(x: Tensor) -> Tensor:
    r"""Return the directions of `row_polar`.

    >>> row_directions(torch.tensor([[3.0, 4.0], [3e30, 4e30]]))
    tensor([[0.6000, 0.8000],
            [0.6000, 0.8000]])
    """
    return row_polar(x)[1]


def norm(x: Float[Tensor, "..."], dim: int = -1, *, keepdim: bool = False) -> Float[Tensor, "..."]:
    r"""Return the Euclidean norm ‖x‖. Its gradient at zero is zero, and huge entries do not overflow.

    >>> norm(torch.tensor([3e20, 4e20]))
    tensor(5.0000e+20)
    """
    length = narrow(polar(x, dim)[0], x.dtype)
    return length if keepdim else length.squeeze(dim)


def normalize(x: Float[Tensor, "*shape"], dim: int = -1) -> Float[Tensor, "*shape"]:
    r"""Return the direction x̂ = x/‖x‖. The direction of the zero vector is the zero vector.

    >>> normalize(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """
    return narrow(polar(x, dim)[1], x.dtype)


def cosine(x: Float[Tensor, "..."], w: Float[Tensor, "..."], dim: int = -1) -> Float[Tensor, "..."]:
    r"""Return cos θ(x, w) of corresponding vectors, or 0 where either vector is zero.

    >>> cosine(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0]))
    tensor(0.7071)
    """
    c = (polar(x, dim)[1] * polar(w, dim)[1]).sum(dim)
    return c.to(torch.promote_types(x.dtype, w.dtype))


def cosines(x: Float[Tensor, "*#batch rows dim"], w: Float[Tensor, "*#batch columns dim"]) -> Float[Tensor, "..."]:
    r"""Return the matrix of cosines between all rows of `x` and all rows of `w`.

    >>> cosines(torch.eye(2), torch.tensor([[1.0, 1.0]]))
    tensor([[0.7071],
            [0.7071]])
    """
    with autocast_disabled(x):
        x_hat, w_hat = polar(x)[1], polar(w)[1]
        dtype = torch.promote_types(x_hat.dtype, w_hat.dtype)
        c = x_hat.to(dtype) @ w_hat.to(dtype).mT
    return c.to(torch.promote_types(x.dtype, w.dtype))


def angle(c: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    r"""Return θ = arccos c in [0, π]. Rounding may have moved `c` beyond ±1.

    The derivative is −1/√(1−c²) for |c| < 1 and zero at and beyond ±1, where the exact derivative is infinite.

    >>> angle(torch.tensor([1.0000001, 0.0, -2.0]))
    tensor([0.0000, 1.5708, 3.1416])
    """
    wide = widen(c)
    if not (wide.requires_grad and torch.is_grad_enabled()):
        return narrow(wide.clamp(-1, 1).acos(), c.dtype)
    # The derivative of acos is infinite at ±1, and masking the result would multiply it by zero, which gives NaN.
    # Replace these cosines by 0 first.
    outside = wide.abs() >= 1  # False for NaN, so that a NaN stays visible
    theta = wide.masked_fill(outside, 0.0).acos()
    return narrow(theta.masked_fill(outside, 0.0).masked_fill(wide <= -1, math.pi), c.dtype)


# Names of version 0.1.
_NUMERICS = "hypersphere._numerics"

__getattr__ = deprecated_names(
    __name__,
    {
        "angle_slope": f"{_NUMERICS}:angle_derivative",
        "cotangent": f"{_NUMERICS}:cotangent",
        "directions": "hypersphere.sphere:row_directions",
        "elevation_": f"{_NUMERICS}:arcsin_",
        "full_precision": f"{_NUMERICS}:autocast_disabled",
        "inspectable": f"{_NUMERICS}:values_readable",
        "may_become_state": f"{_NUMERICS}:can_update_state",
        "parallel_width": f"{_NUMERICS}:parallel_tolerance",
        "quick_polar": "hypersphere.sphere:row_polar",
        "rank_floor": f"{_NUMERICS}:rank_tolerance",
        "require_finite_rows": f"{_NUMERICS}:require_finite_rows",
        "resolution": f"{_NUMERICS}:machine_epsilon",
        "safe_scale": f"{_NUMERICS}:safe_scale",
        "squared_distance_floor": f"{_NUMERICS}:squared_distance_floor",
        "tie_width": f"{_NUMERICS}:tie_tolerance",
        "unit_scale": f"{_NUMERICS}:unit_scale",
        "vanishes": f"{_NUMERICS}:squared_norm_is_zero",
        "widen_weight": f"{_NUMERICS}:widen_parameter",
        "widest": f"{_NUMERICS}:to_float64",
    },
)
