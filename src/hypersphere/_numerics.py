r"""Numerical functions shared by all packages: dtype conversion, tolerances, scaling against overflow.

Tolerances that depend on the dtype are defined here, together with the reason for their size. Constants of a single
algorithm, such as the number of its steps, are next to the algorithm. Half precision (float16 and bfloat16) is always
computed in float32, so most tolerances treat it as float32.

Predicates decide what code may do with values and gradients. Each returns True only in the situations listed:

    predicate                   guards                              True
    `values_readable`           checks and error messages           not compiling, no `torch.func` transform, no fake or
                                                                    meta tensors; on every device
    `all_on_cpu`                reads that must not block the host  on the CPU
    `custom_backward_allowed`   explicit backward passes            where `values_readable`, except in forward mode and
                                                                    `torch.jit.trace`
    `may_branch_on_values`      the choice of an algorithm          where `custom_backward_allowed` and `all_on_cpu` are
                                                                    both True
"""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.jit._trace import is_tracing

__all__ = [
    "ENERGY_HEADROOM",
    "SAFE_PARAMETER_RANGE",
    "all_on_cpu",
    "angle_derivative",
    "arcsin",
    "arcsin_",
    "autocast_disabled",
    "can_update_state",
    "close_pair_threshold",
    "compute_dtype",
    "cosecant",
    "cotangent",
    "custom_backward_allowed",
    "distance_floor",
    "evenly_spaced",
    "exact_difference_threshold",
    "in_backward",
    "in_functorch",
    "machine_epsilon",
    "may_branch_on_values",
    "narrow",
    "norms_in_bounds",
    "on_accelerator",
    "parallel_tolerance",
    "rank_tolerance",
    "require_finite_rows",
    "rotation_tolerance",
    "safe_norm_bounds",
    "safe_scale",
    "squared_distance_floor",
    "squared_norm_is_zero",
    "tie_tolerance",
    "to_float64",
    "unit_scale",
    "values_readable",
    "widen",
    "widen_parameter",
    "zero_floor",
]

_HALF = (torch.float16, torch.bfloat16)

SAFE_PARAMETER_RANGE = (1e-6, 1e6)
"""Accepted range of steepness, radius and rate parameters. Outside it, sums with 1 lose all digits in float32."""

ENERGY_HEADROOM = 1e4
"""The energies of pairs that are not close are at least this factor below the largest number of the dtype."""


# Conversion between dtypes -------------------------------------------------------------------------------------------


def widen(x: Tensor) -> Tensor:
    """Convert half precision to float32 and integers to the default dtype. Other tensors are returned unchanged.

    In the backward pass a gradient that float16 cannot represent becomes infinite. Gradient scalers rely on this.
    """
    dtype = compute_dtype(x.dtype)
    return x if x.dtype == dtype else x.to(dtype)


def compute_dtype(dtype: torch.dtype, *others: torch.dtype) -> torch.dtype:
    """Return the dtype of computation with tensors of these dtypes: the widest one, at least float32.

    Integers are computed in the default dtype.
    """
    for other in others:
        dtype = torch.promote_types(dtype, other)
    if dtype in _HALF:
        return torch.float32
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()


def widen_parameter(w: Tensor) -> Tensor:
    """Widen a parameter and clamp its float16 gradient to the representable range.

    `torch.amp.GradScaler` rejects float16 gradients, so nothing would detect an infinite gradient before the optimiser
    adds it to the weight.
    """
    wide = widen(w)
    if w.dtype == torch.float16 and wide.requires_grad and values_readable(w):
        largest = torch.finfo(w.dtype).max
        wide.register_hook(lambda gradient: gradient.clamp(-largest, largest))
    return wide


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` as `dtype`. Values outside the range of float16 are clamped but keep their gradient."""
    if x.dtype == dtype or not dtype.is_floating_point:
        return x
    if dtype == torch.float16:
        largest = torch.finfo(dtype).max
        # The second term is zero and has the gradient of x, which `clamp` alone would set to zero outside the range.
        # For an infinite entry it is ∞ − ∞ = NaN, so divergence stays visible.
        x = x.detach().clamp(-largest, largest) + (x - x.detach())
    return x.to(dtype)


def to_float64(x: Tensor) -> Tensor:
    """Return `x` in float64, on the CPU if its device has no float64.

    >>> to_float64(torch.tensor([1.0]))
    tensor([1.], dtype=torch.float64)
    """
    try:
        return x.double()
    except (TypeError, RuntimeError):  # devices without float64 raise either of the two
        return x.cpu().double()


def autocast_disabled(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context that disables autocast on the device of `x`, so that products of widened tensors stay wide."""
    device = x.device.type
    # Entering the context costs as much as several small operations, so skip it where it would change nothing.
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


# Reading values and replacing gradients ------------------------------------------------------------------------------


def values_readable(*tensors: Tensor) -> bool:
    """Return True if Python may read the values of all tensors.

    Values cannot be read while compiling or exporting, inside `torch.func` transforms, and on the meta device.
    """
    if torch.compiler.is_compiling() or in_functorch():
        return False
    return all(map(_holds_values, tensors))


def in_functorch() -> bool:
    """Return True inside a transform of `torch.func`."""
    return torch._C._are_functorch_transforms_active()


def all_on_cpu(*tensors: Tensor) -> bool:
    """Return True if all tensors are on the CPU, so that reading their values in Python costs nothing.

    On other devices the host would wait until the device has computed the value.
    """
    return all(t.device.type == "cpu" for t in tensors)


def custom_backward_allowed(*tensors: Tensor) -> bool:
    """Return True if an explicit backward pass may replace ordinary operations on these tensors.

    This is so in ordinary eager mode. Compilation, export, `torch.jit.trace`, `torch.func` transforms and forward-mode
    differentiation need ordinary operations, and tensors on the meta device have no values to choose an algorithm by.
    """
    if is_tracing() or forward_ad._current_level >= 0:
        return False
    return values_readable(*tensors)


def may_branch_on_values(*tensors: Tensor) -> bool:
    """Return True if Python may read values to choose an algorithm: in ordinary eager mode on the CPU."""
    return custom_backward_allowed(*tensors) and all_on_cpu(*tensors)


def on_accelerator(x: Tensor) -> bool:
    """Return True if `x` is stored on the machine's accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == x.device.type


def can_update_state(x: Tensor) -> bool:
    """Return True if a buffer may be updated from `x`.

    It returns False in inference mode, inside a `torch.func` transform, and when activation checkpointing repeats a
    forward pass that has already updated the buffer.
    """
    if torch.compiler.is_compiling():
        return True  # the calls below cannot be traced; the compiler turns updates of buffers into outputs
    if torch.is_inference_mode_enabled() or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    return not in_backward()


def in_backward() -> bool:
    """Return True during a backward pass, in which activation checkpointing computes forward passes again."""
    # The autograd engine numbers the backward passes; −1 means that none is running.
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _holds_values(t: Tensor) -> bool:
    """Return False for fake tensors of a tracer and for meta tensors."""
    is_fake = type(t).__module__.startswith("torch._subclasses")
    return not (is_fake or t.is_meta)


def require_finite_rows(name: str, x: Tensor) -> None:
    """Raise a `ValueError` that names the first row of `x` with a NaN or an infinity."""
    # The sum is one cheap reduction. It is not finite if any entry is not.
    if x.numel() and values_readable(x) and not bool(torch.isfinite(x.detach().sum())):
        invalid = (~torch.isfinite(x.detach())).flatten(1).any(1).nonzero().flatten().tolist()
        if invalid:  # otherwise the sum of finite entries has overflowed
            raise ValueError(
                f"{name} must be finite, but row {invalid[0]} is not ({len(invalid)} such rows of {len(x)})"
            )


# Tolerances ----------------------------------------------------------------------------------------------------------


def machine_epsilon(dtype: torch.dtype) -> float:
    """Return eps, the spacing of the numbers of `dtype` at 1."""
    return float(torch.finfo(dtype).eps)


def zero_floor(dtype: torch.dtype) -> float:
    """Return the bound below which a vector counts as zero: all of its entries are smaller in magnitude.

    Such entries are close to the denormal range, where a direction would consist of rounding errors.
    """
    info = torch.finfo(dtype)
    # For float16, tiny/eps is 0.06, far too large. `tiny` suffices, because float16 is computed in float32.
    return info.tiny if dtype == torch.float16 else info.tiny / info.eps


def squared_norm_is_zero(squared_norm: Tensor) -> Tensor:
    """Return True where a sum of squares is too small to define a direction. NaN gives False, so it stays visible."""
    return squared_norm < zero_floor(squared_norm.dtype)


def distance_floor() -> float:
    r"""Return √(8·eps) of float64, 4.2e-8: the smallest chord that can be computed from a cosine in float64.

    The expression 2 − 2c has a rounding error of a few eps, so shorter chords would be noise.
    """
    return math.sqrt(8 * torch.finfo(torch.float64).eps)


def squared_distance_floor(dtype: torch.dtype, power: float = 0.0) -> float:
    r"""Return the square of the smallest distance z at which z^−s is evaluated for results in `dtype`.

    It is `distance_floor`, raised for large powers s so that z^−s and its derivative s·z^(−s−1) stay below the largest
    number of the dtype by the factor `ENERGY_HEADROOM`. In float32 the raised floor applies above s = 3.6; it is 0.23
    at s = 50.
    """
    s = max(power, 1.0)
    # Solve s·z^(−s−1) = max/ENERGY_HEADROOM for z. This also bounds z^−s, because z < 1.
    result = (torch.finfo(compute_dtype(dtype)).max / (ENERGY_HEADROOM * s)) ** (-1 / (power + 1))
    # The second derivative with respect to u = z² is computed in float64 and is of the order s²·z^(−s−4).
    intermediate = (torch.finfo(torch.float64).max / (ENERGY_HEADROOM * s**2)) ** (-1 / (power + 4))
    return max(distance_floor(), float(result), float(intermediate)) ** 2


def close_pair_threshold(dtype: torch.dtype, power: float = 0.0) -> float:
    r"""Return the squared chord below which a cosine of `dtype` is too inaccurate to compute z^−s from it.

    The squared chord u = 2 − 2c has a rounding error of a few eps. Above eps^¼ (0.019 in float32) its relative error is
    therefore at most a few eps^¾, about 1e-5 in float32. For large powers the threshold is raised, so that the second
    derivative of u^(−s/2), of the order s²·u^(−s/2−2), cannot overflow above it.
    """
    info = torch.finfo(compute_dtype(dtype))
    headroom = info.max / (ENERGY_HEADROOM * max(power, 1.0) ** 2)
    return max(float(info.eps) ** 0.25, float(headroom ** (-2 / (power + 4))))


def exact_difference_threshold() -> float:
    r"""Return √eps of float64, 1.5e-8: squared chords below it are computed from differences of float64 vectors.

    From float64 cosines they would have a relative error of more than 1e-7.
    """
    return math.sqrt(torch.finfo(torch.float64).eps)


def tie_tolerance(dtype: torch.dtype) -> float:
    """Return 16·eps, the difference below which two cosines count as tied.

    A matrix product may round the cosines of equal pairs differently, depending on their position in the matrix.
    """
    return 16 * torch.finfo(compute_dtype(dtype)).eps


def parallel_tolerance(dtype: torch.dtype) -> float:
    r"""Return the value of 1 − cos, computed in float64, below which two vectors of `dtype` count as parallel.

    It is α²/2 with α = 16·eps (eps in half precision), and at least the float64 `tie_tolerance`: 1.8e-12 in float32.
    """
    alpha = max(tie_tolerance(dtype), machine_epsilon(dtype))
    return max(alpha**2 / 2, tie_tolerance(torch.float64))


def rank_tolerance(dtype: torch.dtype, size: int) -> float:
    """Return the fraction of the largest eigenvalue of a (size, size) matrix below which an eigenvalue counts as 0."""
    return size * torch.finfo(dtype).eps


def rotation_tolerance(dtype: torch.dtype) -> float:
    r"""Return eps^¾, the relative change of row norms at which a factorisation switches to a more stable algorithm.

    It is 6.4e-6 in float32 and 1.8e-12 in float64.
    """
    return float(torch.finfo(compute_dtype(dtype)).eps ** 0.75)


# Scaling against overflow --------------------------------------------------------------------------------------------


def safe_norm_bounds(dtype: torch.dtype) -> tuple[float, float]:
    """Return bounds between which norms can be squared without overflow or underflow in `dtype`."""
    info = torch.finfo(dtype)
    # A factor of eps on both sides leaves room for sums of squares and for products of two norms.
    return info.tiny**0.5 / info.eps, info.max**0.5 * info.eps


def norms_in_bounds(norms: Tensor) -> bool:
    """Return True if all norms are inside `safe_norm_bounds`, False if one is zero or not finite.

    The host waits for the device.
    """
    low, high = safe_norm_bounds(norms.dtype)
    smallest, largest = torch.aminmax(norms.detach())
    return bool((smallest > low) & (largest < high))


def unit_scale(peak: Tensor) -> Tensor:
    r"""Return the power of two that scales `peak` into (½, 1], or 1 where `peak` is zero or not finite.

    Scaling by a power of two is exact.

    >>> unit_scale(torch.tensor([3.0, 0.5, 0.0]))
    tensor([0.2500, 2.0000, 1.0000])
    """
    usable = (peak > zero_floor(peak.dtype)) & (peak <= torch.finfo(peak.dtype).max)
    return torch.exp2(-torch.log2(peak.masked_fill(~usable, 1.0)).ceil())


def safe_scale(peak: Tensor) -> Tensor:
    r"""Return `unit_scale(peak)` where squares of such entries would overflow or underflow, and 1 elsewhere.

    >>> safe_scale(torch.tensor([3.0, 1e20, 0.0]))
    tensor([1.0000e+00, 6.7763e-21, 1.0000e+00])
    """
    info = torch.finfo(peak.dtype)
    # Wider than `safe_norm_bounds`: entries are squared and summed here, but there are no products of two norms.
    low, high = math.sqrt(info.tiny / info.eps), math.sqrt(info.max * info.eps)
    return unit_scale(peak.masked_fill((peak >= low) & (peak <= high), 1.0))


# Angles for explicit backward passes ---------------------------------------------------------------------------------


def angle_derivative(c: Tensor) -> Tensor:
    r"""Return dθ/dc = −1/√(1−c²), the derivative of `sphere.angle`; zero at and beyond ±1.

    It is −`cosecant`, but accurate to the last digits near ±1, at the cost of two more passes over memory.

    >>> angle_derivative(torch.tensor([0.0, 0.6, 1.0]))
    tensor([-1.0000, -1.2500,  0.0000])
    """
    squared_sine = (1 - c) * (1 + c)  # 1 − c² would cancel near ±1
    return squared_sine.rsqrt().neg_().masked_fill_(squared_sine <= 0, 0.0)


def arcsin(c: Tensor) -> Tensor:
    r"""Return π/2 − θ = arcsin c, clamped to [−π/2, π/2], for code that autograd does not record.

    >>> arcsin(torch.tensor([1.0000001, 0.0, -2.0]))
    tensor([ 1.5708,  0.0000, -1.5708])
    """
    return c.clamp(-1, 1).asin_()


def arcsin_(c: Tensor) -> Tensor:
    r"""Overwrite `c` with `arcsin`.

    >>> arcsin_(torch.tensor([1.0000001, 0.0, -2.0]))
    tensor([ 1.5708,  0.0000, -1.5708])
    """
    return c.clamp_(-1, 1).asin_()


def _pole_cotangent(dtype: torch.dtype) -> float:
    """Return the number that represents cot 0.

    It is larger than the cotangent of any cosine other than ±1, which is at most eps^−½, and in float32 it is 4.1e4, so
    that float16 (up to 6.5e4) can store it.
    """
    return float(torch.finfo(dtype).eps ** (-2 / 3))


def cotangent(c: Tensor) -> Tensor:
    r"""Return cot θ = c/√(1−c²), a form of the cosine that can be stored in float16.

    It is about c near a right angle and about 1/θ near a pole. Rounding therefore preserves the relative precision of c
    near a right angle and of θ near a pole, where a rounded cosine would lose θ.

    >>> cotangent(torch.tensor([0.6, -1.0]))
    tensor([ 7.5000e-01, -4.1285e+04])
    """
    one = torch.ones((), dtype=c.dtype, device=c.device)
    # `addcmul` computes 1 − c² in one pass over memory. Near the poles it is less accurate than (1 − c)(1 + c), but its
    # error is no larger than the one that the rounding of c causes. The clamp bounds the result at the poles.
    return torch.addcmul(one, c, c, value=-1).clamp_min_(_pole_cotangent(c.dtype) ** -2).rsqrt_().mul_(c)


def cosecant(c: Tensor) -> Tensor:
    r"""Return 1/sin θ = 1/√(1−c²), and zero at and beyond the poles, where `sphere.angle` has a zero gradient.

    It needs few passes over memory, which is fast for large blocks. `angle_derivative` is more accurate near the poles.

    >>> cosecant(torch.tensor([0.6, 0.0, 1.0]))
    tensor([1.2500, 1.0000, 0.0000])
    """
    one = torch.ones((), dtype=c.dtype, device=c.device)
    squared_sine = torch.addcmul(one, c, c, value=-1)
    # `threshold` replaces squared sines that are not positive by infinity, whose reciprocal root is zero. It is one
    # kernel without a boolean mask, and it leaves a NaN unchanged.
    return torch.threshold_(squared_sine, 0.0, math.inf).rsqrt_()


def evenly_spaced(count: int, most: int) -> Tensor:
    """Return at most `most` evenly spaced indices of `count` rows, with the first and the last row.

    The rows are the same in every call, so that statistics of them can be compared.

    >>> evenly_spaced(7, 3).tolist()
    [0, 3, 6]
    """
    # Float32 would round the last index beyond the last row if there are more than 2²⁴ rows.
    return torch.linspace(0, count - 1, min(count, most), dtype=torch.float64).long()
