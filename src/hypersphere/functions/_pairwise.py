r"""Sums of pair potentials over directions, with fused gradients and accurate close pairs.

Two sums are computed here, with ŵ = w/‖w‖ and a potential φ of the cosine c (`PairPotential`):

    mutual:  E = Σ_{i≠j} φ(ŵᵢ·ŵⱼ)          all ordered pairs of rows of one set, or of each set of a stack
    cross:   E = Σ_i Σ_{j≠yᵢ} φ(r̂ᵢ·ŵⱼ)     some rows r against all rows of w, for example a batch against all classes

**Gradient.** Let s = φ′(c) be the matrix of derivatives. With respect to a unit row, ∂E/∂r̂ᵢ = Σⱼ sᵢⱼ·ŵⱼ. Normalisation
removes the radial part and divides by the norm:

    ∂E/∂rᵢ = (Σⱼ sᵢⱼ·ŵⱼ − (Σⱼ sᵢⱼ·cᵢⱼ)·r̂ᵢ) / ‖rᵢ‖.

In the mutual sum every pair occurs twice, so the same expression is multiplied by 2, and the radial term can be written
on the diagonal of s: ∂E/∂W = 2·(s − diag(Σⱼ sᵢⱼ·cᵢⱼ))·Ŵ / ‖w‖. Value and gradient are computed in one pass over blocks
of cosines that fit into the cache, so backward needs no second pass over the pairs.

**Close pairs.** The squared chord is u = 2 − 2c, and 2 + 2c for the mirror image −ŵⱼ. Its rounding error is a few eps,
so for close pairs all digits cancel. The largest cosine of a block, which is read once, decides how it is computed:

* no close pair (the usual case): in the dtype of the rows, without any clamping;
* a squared chord below `close_pair_threshold`: the block is recomputed in float64, and the few squared chords below
  `exact_difference_threshold` come from the differences ŵᵢ − ŵⱼ of float64 directions.

**Plain form.** `torch.compile`, `torch.func` and second derivatives need ordinary differentiable operations. They use
the same sums written out, with float64 cosines and a matrix of all pairs.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere._validation import require
from hypersphere.functions.kernel import Kernel, Logarithmic, Riesz, kernel_of

__all__ = [
    "PairPotential",
    "PairSum",
    "cross_repulsion",
    "data_dependent_energy",
    "inner_graph",
    "mutual_repulsion",
    "mutual_repulsions",
]

_PAIRS_AT_ONCE = 2**22  # stacks with at most this many pairs are computed by one batched product
_PAIRS_IN_CACHE = 2**20  # pairs per block of larger sets
_SMALLEST_MIRRORED_GRAM = 192  # from this many rows on, copying a quarter of the Gram matrix beats computing it
_LARGEST_DIFFERENCES = 2**24  # entries of ŵᵢ − ŵⱼ that are formed at once; beyond it float64 cosines are used
_CALLABLE_POWER = 4.0  # growth rate that is assumed of a user's callable when its smallest distance is chosen


@contextlib.contextmanager
def inner_graph() -> Iterator[None]:
    """Record a graph that is differentiated before the forward pass ends.

    Its tensors bypass the hooks of activation checkpointing, which would repeat the forward pass to restore them.
    """
    plain = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with torch.enable_grad(), plain if _numerics.values_readable() else contextlib.nullcontext():
        yield


# The potential of one pair -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairPotential:
    r"""The repulsion φ of two directions: a kernel f of their distance; half space adds f of the distance to −ŵⱼ.

    It is evaluated at the squared chords u = ‖ŵᵢ − ŵⱼ‖² and v = ‖ŵᵢ + ŵⱼ‖² = 4 − u.

    >>> PairPotential(Riesz(2))(torch.tensor([2.0, 4.0]), torch.tensor([2.0, 0.0]))
    tensor([0.5000, 0.2500])
    """

    kernel: Callable[[Tensor], Tensor] = Riesz(2)  # noqa: RUF009
    distance: str = "euclidean"
    half_space: bool = False

    def __post_init__(self) -> None:
        """Check the distance."""
        require(self.distance in ("euclidean", "angular"), "distance", "'euclidean' or 'angular'", self.distance)

    @property
    def power(self) -> float:
        """The growth rate of the kernel at small distances."""
        return self.kernel.power if isinstance(self.kernel, Kernel) else _CALLABLE_POWER

    def __call__(
        self,
        u: Tensor,
        v: Tensor,
        row_weights: Tensor | None = None,
        column_weights: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return φ at squared chords.

        Args:
            u: squared chords ‖ŵᵢ − ŵⱼ‖².
            v: squared chords ‖ŵᵢ + ŵⱼ‖².
            row_weights: factors βᵢ of weighted vectors βᵢ·ŵᵢ, which broadcast with `u`.
            column_weights: factors βⱼ.
            dtype: the dtype of the final result, which determines the smallest distance; None for the dtype of `u`.
        """
        direct = self._one_sided(u, v, row_weights, column_weights, dtype or u.dtype)
        if not self.half_space:
            return direct
        return direct + self._one_sided(v, u, row_weights, column_weights, dtype or u.dtype)

    def with_derivative(
        self,
        u: Tensor,
        v: Tensor,
        row_weights: Tensor | None = None,
        column_weights: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return φ and its derivative dφ/dc, where du/dc = −2 and dv/dc = 2."""
        arguments = row_weights, column_weights, dtype or u.dtype
        value, derivative = self._one_sided_with_derivative(u, v, *arguments)
        derivative = derivative.mul_(-2)
        if self.half_space:
            mirrored, mirrored_derivative = self._one_sided_with_derivative(v, u, *arguments)
            value, derivative = value.add_(mirrored), derivative.add_(mirrored_derivative, alpha=2)
        return value, derivative

    def _one_sided(
        self, u: Tensor, v: Tensor, row_weights: Tensor | None, column_weights: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Return f at the distance whose squared chord is `u`, without the mirror image."""
        floor = _numerics.squared_distance_floor(dtype, self.power)
        if self.distance == "angular":
            # θ = 2·atan2(√u, √v) is accurate at both ends. At θ = π the clamp of v removes the infinite derivative.
            theta = 2 * torch.atan2(u.clamp_min(floor).sqrt(), v.clamp_min(torch.finfo(v.dtype).tiny).sqrt())
            return (
                self.kernel.of_square(theta.square(), dtype) if isinstance(self.kernel, Kernel) else self.kernel(theta)
            )
        if row_weights is not None and column_weights is not None:
            return self._weighted(u, row_weights, column_weights, dtype)
        if isinstance(self.kernel, Kernel):
            return self.kernel.of_square(u, dtype)
        return self.kernel(u.clamp_min(floor).sqrt())

    def _weighted(self, u: Tensor, row_weights: Tensor, column_weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Return f of ‖βᵢŵᵢ − βⱼŵⱼ‖² = βᵢβⱼ·((√(βᵢ/βⱼ) − √(βⱼ/βᵢ))² + u). Only the second factor has a floor."""
        ratio = (row_weights / column_weights).sqrt()
        relative = (ratio - 1 / ratio).square() + u
        if isinstance(self.kernel, Riesz):
            half = -self.kernel.power / 2
            return self.kernel.of_square(relative, dtype) * row_weights.pow(half) * column_weights.pow(half)
        if isinstance(self.kernel, Logarithmic):
            return self.kernel.of_square(relative, dtype) - (row_weights.log() + column_weights.log()) / 2
        floored = relative.clamp_min(_numerics.squared_distance_floor(dtype, self.power))
        return self.kernel(floored.sqrt() * row_weights.sqrt() * column_weights.sqrt())

    def _one_sided_with_derivative(
        self, u: Tensor, v: Tensor, row_weights: Tensor | None, column_weights: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return f and df/du."""
        if row_weights is None and self.distance == "euclidean" and isinstance(self.kernel, (Riesz, Logarithmic)):
            return _chord_derivative(self.kernel, u, dtype)
        with inner_graph():
            leaf = u.detach().requires_grad_()
            opposite = v.detach() + (u.detach() - leaf)  # equal to v, with derivative −1
            value = self._one_sided(leaf, opposite, row_weights, column_weights, dtype)
            (derivative,) = torch.autograd.grad(value, leaf, torch.ones_like(value))
        return value.detach(), derivative


def _chord_derivative(kernel: Riesz | Logarithmic, u: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return f(√u) and df/du = −(s/2)·f/u, or −1/(2u) for the logarithm; the derivative is 0 below the floor."""
    floor = _numerics.squared_distance_floor(dtype, kernel.power)
    floored = u.clamp_min(floor)
    value = kernel.at_square(floored)
    derivative = (value * (-kernel.power / 2)).div_(floored) if isinstance(kernel, Riesz) else -0.5 / floored
    return value, derivative.mul_(u >= floor)


def _distant_pairs(kernel: Riesz | Logarithmic, c: Tensor, *, half_space: bool) -> tuple[Tensor, Tensor]:
    """Return φ and dφ/dc of Euclidean distances for cosines without a close pair, in as few passes as possible."""
    if half_space and isinstance(kernel, Riesz) and kernel.power == 2:
        # 1/(2 − 2c) + 1/(2 + 2c) = 1/(1 − c²), whose derivative is 2c/(1 − c²)².
        value = torch.addcmul(torch.ones_like(c), c, c, value=-1).reciprocal_()
        return value, (value * value).mul_(c).mul_(2)
    u = torch.rsub(c, 2, alpha=2)
    value = kernel.at_square(u)
    derivative = (value * kernel.power).div_(u) if isinstance(kernel, Riesz) else u.reciprocal_()
    if half_space:
        mirrored, mirrored_derivative = _distant_pairs(kernel, -c, half_space=False)
        value, derivative = value.add_(mirrored), derivative.sub_(mirrored_derivative)
    return value, derivative


# Blocks of pairs -----------------------------------------------------------------------------------------------------


def _has_close_pair(top: float, bottom: float, potential: PairPotential, dtype: torch.dtype) -> bool:
    """Return True if the largest or, in half space, the smallest cosine of a block belongs to a close pair."""
    limit = 1 - _numerics.close_pair_threshold(dtype, potential.power) / 2
    return top > limit or (potential.half_space and bottom < -limit)


def _evaluate_pairs(
    rows: Tensor,
    columns: Tensor,
    c: Tensor,
    potential: PairPotential,
    weights: tuple[Tensor | None, Tensor | None],
    dtype: torch.dtype,
    *,
    close: bool,
    with_derivative: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return φ and dφ/dc for the cosines of unit rows and columns. Entries that are no pair must hold the cosine 0."""
    kernel, weighted = potential.kernel, weights[0] is not None
    fused = potential.distance == "euclidean" and isinstance(kernel, (Riesz, Logarithmic)) and not weighted
    if fused and not close:
        assert isinstance(kernel, (Riesz, Logarithmic))
        return _distant_pairs(kernel, c, half_space=potential.half_space)
    u, v = torch.rsub(c, 2, alpha=2), torch.add(2 * c, 2)
    if close:
        _replace_small_chords_(u, rows, columns)
        if potential.half_space:
            _replace_small_chords_(v, rows, -columns)
    if with_derivative:
        return potential.with_derivative(u, v, *weights, dtype)
    return potential(u, v, *weights, dtype), None


def _replace_small_chords_(squared: Tensor, rows: Tensor, columns: Tensor) -> None:
    """Overwrite the smallest squared chords between unit vectors in float64 by the squared norms of differences."""
    index = (squared < _numerics.exact_difference_threshold()).nonzero()
    # A layer whose neurons all coincide has too many such pairs. Its chords stay those of the float64 cosines, which
    # are accurate to the smallest distance at which kernels are evaluated.
    if 0 < len(index) * rows.shape[-1] <= _LARGEST_DIFFERENCES:
        *stack, i, j = index.unbind(1)
        row_index, column_index = (*stack, i), (*stack, j)
        pair_index = (*stack, i, j)
        squared[pair_index] = (rows[row_index] - columns[column_index]).square().sum(-1)


def _gram(w: Tensor) -> Tensor:
    """Return all products of rows. For large sets the lower left quarter is copied from the upper right one."""
    n, half = w.shape[-2], w.shape[-2] // 2
    if n < _SMALLEST_MIRRORED_GRAM:
        return w @ w.mT
    c = w.new_empty(*w.shape[:-1], n)
    c[..., :half, :] = w[..., :half, :] @ w.mT
    c[..., half:, half:] = w[..., half:, :] @ w[..., half:, :].mT
    c[..., half:, :half] = c[..., :half, half:].mT
    return c


def _inverse(length: Tensor) -> Tensor:
    """Return 1/‖w‖, and 0 for a zero row, which therefore has a zero gradient."""
    return torch.where(length > 0, 1 / length, 0.0)


def _saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to `dtype`; numbers that it cannot represent become its largest ones."""
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def _slices(n: int, size: int, start: int = 0) -> Iterator[slice]:
    """Yield slices of length `size` that cover start to n."""
    return (slice(k, min(k + size, n)) for k in range(start, n, size))


# The mutual sum ------------------------------------------------------------------------------------------------------


class PairSum(NamedTuple):
    """One mutual sum: rows (…, N, d) in float32 or float64, their potential φ, and factors β (…, N) or None."""

    w: Tensor
    potential: PairPotential
    weights: Tensor | None = None

    def part(self, sets: slice) -> PairSum:
        """Return the sum of some of the sets of a stack (S, N, d)."""
        return PairSum(self.w[sets], self.potential, None if self.weights is None else self.weights[sets])


def mutual_repulsion(w: Tensor, potential: PairPotential, weights: Tensor | None = None) -> Tensor:
    r"""Return Σ_{i≠j} φ(cos(wᵢ, wⱼ)) over ordered pairs of rows, for one set (N, d) or each set of a stack (…, N, d).

    Memory does not grow with the number of pairs beyond a few million. For backward it keeps N·min(N, d) numbers per
    set.

    Args:
        w: rows in float32 or float64. A zero row has cosine 0 with every other row and no gradient.
        potential: φ.
        weights: (…, N) factors β of the unit rows, or None.

    Returns:
        One number per set.

    Example:
        >>> mutual_repulsion(torch.eye(3), PairPotential())
        tensor(3.)
    """
    return mutual_repulsions([PairSum(w, potential, weights)])[0][0]


def mutual_repulsions(sums: Sequence[PairSum]) -> tuple[list[Tensor], bool]:
    """Return several mutual sums, and whether they are known to be finite.

    Reading a value makes the host wait for the device. Computed one at a time, every sum reads values; together they
    do so once, or once per `_PAIRS_AT_ONCE` pairs. The flag is True if all norms are ordinary, no pair is close and the
    kernels are Riesz or logarithmic. Then every φ is below 10⁻⁴ of the largest number of the dtype, as is their mean
    (see `_numerics.close_pair_threshold`).

    >>> mutual_repulsions([PairSum(torch.eye(3), PairPotential()), PairSum(torch.eye(2), PairPotential())])
    ([tensor(3.), tensor(1.)], True)
    """
    totals: dict[int, Tensor] = {}
    fused: dict[tuple[torch.device, torch.dtype], dict[int, PairSum]] = {}
    is_finite = True
    for k, (w, potential, weights) in enumerate(sums):
        # The fused gradient treats β as constant, so weights that need a gradient use the plain form.
        if not _numerics.values_readable(w) or (weights is not None and weights.requires_grad):
            with _numerics.autocast_disabled(w):
                totals[k] = _plain_mutual(w, potential, weights)
            is_finite = False
            continue
        sets = w.reshape(-1, *w.shape[-2:])
        if weights is not None:
            weights = weights.expand(w.shape[:-1]).reshape(sets.shape[:-1])
        # One read can only combine tensors of one device and dtype.
        fused.setdefault((w.device, w.dtype), {})[k] = PairSum(sets, potential, weights)
    for members in fused.values():
        stacks = [member.w for member in members.values()]
        needs_gradient = torch.is_grad_enabled() and any(w.requires_grad for w in stacks)
        with _numerics.autocast_disabled(stacks[0]), torch.no_grad():
            results, is_bounded = _compute_mutual(list(members.values()), with_gradient=needs_gradient)
        is_finite = is_finite and is_bounded
        values = tuple(result.totals for result in results)
        if needs_gradient:
            weights_of_sums = [member.weights for member in members.values()]
            potentials = [member.potential for member in members.values()]
            values = _MutualFunction.apply(potentials, results, *stacks, *weights_of_sums)
        totals |= {k: value.reshape(sums[k].w.shape[:-2]) for k, value in zip(members, values, strict=True)}
    return [totals[k] for k in range(len(sums))], is_finite


def _plain_mutual(w: Tensor, potential: PairPotential, weights: Tensor | None) -> Tensor:
    """Return the mutual sum in differentiable operations, from float64 cosines."""
    unit = sphere.polar(_numerics.to_float64(w))[1]
    no_pair = torch.eye(w.shape[-2], dtype=torch.bool, device=unit.device)
    # Mask before and after φ: the cosine 1 of a row with itself would have an infinite derivative, and a masked value
    # alone would turn it into 0·∞ = NaN in backward.
    c = (unit @ unit.mT).masked_fill(no_pair, 0.0)
    betas = (None, None) if weights is None else (weights.unsqueeze(-1), weights.unsqueeze(-2))
    values = potential(2 - 2 * c, 2 + 2 * c, betas[0], betas[1], w.dtype)
    return _saturate(values.masked_fill(no_pair, 0.0).sum((-2, -1)), w.dtype).to(w.device)


class _GradientFactors(NamedTuple):
    """A gradient as the product (left @ right)·scale, which backward evaluates with the incoming gradient included.

    For N ≤ d the factor `left` (N, N) is smaller than the gradient (N, d), and `right` is usually the weight itself,
    which costs no memory. If `right` is None, `left` is the gradient.
    """

    left: Tensor
    right: Tensor | None = None
    scale: Tensor | None = None

    def product(self, grad_output: Tensor | None, dtype: torch.dtype) -> Tensor:
        left = self.left if grad_output is None else grad_output.to(self.left.dtype) * self.left
        if self.right is None:
            return left
        gradient = left @ self.right
        return gradient if self.scale is None else _saturate(gradient.mul_(self.scale), dtype)


@dataclass
class _MutualResult:
    """The totals (S,) of the sets of one sum, and their gradient."""

    totals: Tensor
    gradient: _GradientFactors | None


class _Cosines(NamedTuple):
    """Cosines (S, N, N) with a zero diagonal, the inverse norms (S, N), and (least norm, largest norm, least, largest
    cosine) as a tensor that has not been read yet."""

    values: Tensor
    inverse_norms: Tensor
    extremes: Tensor


def _keeps_factors(w: Tensor) -> bool:
    """Return True if backward keeps the factors of the gradient of all sets, because they are not larger than it."""
    n, d = w.shape[-2:]
    return n <= d and 0 < len(w) * n * n <= _PAIRS_AT_ONCE


def _batches(sums: Sequence[PairSum]) -> Iterator[list[tuple[int, slice]]]:
    """Yield lists of (sum, sets) of at most `_PAIRS_AT_ONCE` pairs in total; a larger set is alone in its list."""
    batch: list[tuple[int, slice]] = []
    pairs = 0
    for k, (w, _, _) in enumerate(sums):
        pairs_per_set = w.shape[-2] ** 2
        for sets in _slices(len(w), max(_PAIRS_AT_ONCE // max(pairs_per_set, 1), 1)):
            more = (sets.stop - sets.start) * pairs_per_set
            if batch and pairs + more > _PAIRS_AT_ONCE:
                yield batch
                batch, pairs = [], 0
            batch.append((k, sets))
            pairs += more
    if batch:
        yield batch


def _compute_mutual(sums: Sequence[PairSum], *, with_gradient: bool) -> tuple[list[_MutualResult], bool]:
    """Return sums over sets (S, N, d) of one device and dtype, and whether they are known to be finite."""
    results = []
    for w, _, _ in sums:
        differentiated = with_gradient and w.requires_grad
        # Sums that keep factors get them below, from the only part that they consist of.
        gradient = _GradientFactors(torch.empty_like(w)) if differentiated and not _keeps_factors(w) else None
        results.append(_MutualResult(w.new_empty(len(w)), gradient))
    is_finite = True
    for batch in _batches(sums):
        parts = [sums[k].part(sets) for k, sets in batch]
        if parts[0].w.shape[-2] ** 2 > _PAIRS_AT_ONCE:
            k, sets = batch[0]
            differentiated = with_gradient and sums[k].w.requires_grad
            results[k].totals[sets], set_gradient = _mutual_in_blocks(parts[0], with_gradient=differentiated)
            factors = None if set_gradient is None else _GradientFactors(set_gradient)
            _store_gradient_(results[k], sets, factors, parts[0].w.dtype)
            is_finite = False
            continue
        # All cosines first, then their extremes, then the potentials: the list below is the only read of values.
        cosines = [_cosines(part.w) for part in parts]
        extremes = torch.stack([c.extremes for c in cosines]).tolist()
        for (k, sets), part, c, extreme in zip(batch, parts, cosines, extremes, strict=True):
            differentiated = with_gradient and sums[k].w.requires_grad
            totals, factors, is_bounded = _mutual_at_once(part, c, extreme, with_gradient=differentiated)
            results[k].totals[sets] = totals
            _store_gradient_(results[k], sets, factors, part.w.dtype)
            is_finite = is_finite and is_bounded
    return results, is_finite


def _store_gradient_(result: _MutualResult, sets: slice, factors: _GradientFactors | None, dtype: torch.dtype) -> None:
    """Keep the factors of a gradient, or write their product into the gradient of all sets."""
    if result.gradient is None:
        result.gradient = factors
    elif factors is not None:
        result.gradient.left[sets] = factors.product(None, dtype)


def _cosines(w: Tensor) -> _Cosines:
    """Return the cosines of sets (S, N, d) of rows with ordinary norms, without reading a value."""
    # Cosines from the Gram matrix of w itself: scaling N·N cosines is cheaper than normalising N·d entries.
    c = _gram(w)
    diagonal = c.diagonal(dim1=-2, dim2=-1)
    norms = diagonal.sqrt()
    inverse_norms = 1 / norms
    c.mul_(inverse_norms.unsqueeze(-1)).mul_(inverse_norms.unsqueeze(-2))
    diagonal.zero_()  # no pair: the cosine 0 cannot be mistaken for a close pair
    # aminmax of an empty tensor is an error. Norms of 0 send empty sets to the careful path, which accepts them.
    extremes = torch.stack([*torch.aminmax(norms), *torch.aminmax(c)]) if w.numel() else w.new_zeros(4)
    return _Cosines(c, inverse_norms, extremes)


def _mutual_at_once(
    part: PairSum, cosines: _Cosines, extremes: list[float], *, with_gradient: bool
) -> tuple[Tensor, _GradientFactors | None, bool]:
    """Return the totals of sets (S, N, d), factors of their gradient, and whether the totals are known to be finite.

    Args:
        part: the sets.
        cosines: their cosines, which are only valid if the norms are ordinary, and only accurate without close pairs.
        extremes: the values of `cosines.extremes`.
        with_gradient: whether the gradient is needed.
    """
    w, potential, weights = part
    c, inverse_norms, _ = cosines
    least_norm, largest_norm, bottom, top = extremes
    low, high = _numerics.safe_square_range(w.dtype)
    # NaN fails these comparisons, so rows that are not finite count as not ordinary.
    is_ordinary = least_norm > low and largest_norm < high
    close = _has_close_pair(top, bottom, potential, w.dtype)
    right, scale = w, None
    is_bounded = is_ordinary and not close and weights is None and isinstance(potential.kernel, (Riesz, Logarithmic))
    if not is_ordinary or close:
        # Zero, tiny or huge rows need scaling before their entries are squared; close pairs need float64 cosines. The
        # factor 1/‖w‖ is applied last, because the other factors may overflow with it.
        lengths, right = sphere.polar(_numerics.to_float64(w))
        scale, close = _inverse(lengths), True
        c = _gram(right)
        c.diagonal(dim1=-2, dim2=-1).zero_()
    # φ and s = dφ/dc of every pair.
    betas = (None, None) if weights is None else (weights.unsqueeze(-1).to(c), weights.unsqueeze(-2).to(c))
    value, slope = _evaluate_pairs(
        right, right, c, potential, betas, w.dtype, close=close, with_derivative=with_gradient
    )
    # E: the diagonal holds φ(0), which is no pair.
    value.diagonal(dim1=-2, dim2=-1).zero_()
    totals = _saturate(value.sum((-2, -1)), w.dtype).to(w.device)
    if slope is None or not with_gradient:
        return totals, None, is_bounded
    # ∂E/∂W: left = 2·(s − diag(Σⱼ sᵢⱼ·cᵢⱼ)). The diagonal of s is no pair either and takes the radial term.
    slope_diagonal = slope.diagonal(dim1=-2, dim2=-1)
    slope_diagonal.zero_()
    slope_diagonal.copy_(-(slope * c).sum(-1))
    slope.mul_(2)
    if scale is None:
        # right is w instead of Ŵ, so its factor 1/‖wⱼ‖ and the outer factor 1/‖wᵢ‖ both belong to left.
        slope.mul_(inverse_norms.unsqueeze(-1)).mul_(inverse_norms.unsqueeze(-2))
    return totals, _GradientFactors(slope, right, scale), is_bounded


def _mutual_in_blocks(part: PairSum, *, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Return the sum of one large set (1, N, d) and its gradient from the blocks on and above the diagonal."""
    w, potential = part.w[0], part.potential
    weights = None if part.weights is None else part.weights[0]
    lengths, unit = sphere.row_polar(w)
    n, size = len(w), math.isqrt(_PAIRS_IN_CACHE)
    gradient = torch.zeros_like(unit) if with_gradient else None
    total = torch.zeros((), dtype=torch.float64, device=w.device)
    for i in _slices(n, size):
        for j in _slices(n, size, start=i.start):
            on_diagonal = i == j
            betas = (None, None) if weights is None else (weights[i, None], weights[None, j])
            no_pair = torch.eye(len(unit[i]), dtype=torch.bool, device=w.device) if on_diagonal else None
            value, grad_rows, grad_columns = _block(
                (w[i], unit[i]),
                (w[j], unit[j]),
                potential,
                no_pair,
                betas,
                with_gradient=with_gradient,
                with_column_gradient=not on_diagonal,
            )
            total += value if on_diagonal else 2 * value  # a block above the diagonal stands for its mirror image too
            if gradient is not None:
                gradient[i].add_(grad_rows, alpha=2)  # every pair occurs twice
                if not on_diagonal:
                    gradient[j].add_(grad_columns, alpha=2)
    total = _saturate(total, w.dtype)
    # The factor 1/‖rᵢ‖ of the gradient. It comes last, because it is the same for all blocks of a row.
    return total, None if gradient is None else _saturate(gradient.mul_(_inverse(lengths)), w.dtype)


def _block(
    rows: tuple[Tensor, Tensor],
    columns: tuple[Tensor, Tensor],
    potential: PairPotential,
    no_pair: Tensor | None,
    weights: tuple[Tensor | None, Tensor | None],
    *,
    with_gradient: bool,
    with_column_gradient: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Σ φ over a block of pairs and the tangential parts of its gradients with respect to unit rows and columns.

    Args:
        rows: the rows (B, d) as they are, and their directions.
        columns: the columns (M, d) as they are, and their directions.
        potential: φ.
        no_pair: (B, M) booleans, True for entries that do not count; None if all count.
        weights: the factors β of rows (B, 1) and columns (1, M), or a pair of None.
        with_gradient: whether gradients are needed; they are empty if not.
        with_column_gradient: False if rows and columns are the same vectors, so that the row gradient is sufficient.
    """
    (row_values, row), (column_values, column) = rows, columns
    dtype = row.dtype
    c = row @ column.mT
    if no_pair is not None:
        c.masked_fill_(no_pair, 0.0)
    bottom, top = torch.stack(torch.aminmax(c)).tolist() if c.numel() else (0.0, 0.0)
    close = _has_close_pair(top, bottom, potential, dtype)
    if close:
        row, column = (sphere.polar(_numerics.to_float64(x))[1] for x in (row_values, column_values))
        c = row @ column.mT
        if no_pair is not None:
            c.masked_fill_(no_pair.to(c.device), 0.0)
        weights = tuple(None if beta is None else beta.to(c) for beta in weights)  # type: ignore[assignment]
    value, slope = _evaluate_pairs(
        row, column, c, potential, weights, dtype, close=close, with_derivative=with_gradient
    )
    if no_pair is not None:
        value.masked_fill_(no_pair, 0.0)
    total = value.sum(dtype=torch.float64)
    if slope is None or not with_gradient:
        return total, row[:0], column[:0]
    if no_pair is not None:
        slope.masked_fill_(no_pair, 0.0)
    # Σⱼ sᵢⱼ·ŵⱼ minus its radial part (Σⱼ sᵢⱼ·cᵢⱼ)·r̂ᵢ, and the same with rows and columns exchanged. The radial part is
    # subtracted here, in the dtype of the block, because the two nearly cancel for close pairs.
    radial = slope * c
    grad_rows = torch.addcmul(slope @ column, radial.sum(1, keepdim=True), row, value=-1)
    grad_columns = column[:0]
    if with_column_gradient:
        grad_columns = torch.addcmul(slope.mT @ row, radial.sum(0).unsqueeze(1), column, value=-1)
    if close:  # the gradients are in float64
        grad_rows, grad_columns = _saturate(grad_rows, dtype), _saturate(grad_columns, dtype)
    return total, grad_rows, grad_columns


class _MutualFunction(torch.autograd.Function):
    """Attach gradients to mutual sums of sets (S, N, d) that have been computed already."""

    @staticmethod
    def forward(
        ctx: Any, potentials: list[PairPotential], results: list[_MutualResult], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        # `tensors` are the rows of all sums, then their weights. Three tensors per sum follow: its gradient in factors.
        ctx.potentials = potentials
        no_gradient = (None, None, None)
        factors = [no_gradient if result.gradient is None else result.gradient for result in results]
        ctx.save_for_backward(*tensors, *itertools.chain.from_iterable(factors))
        return tuple(result.totals for result in results)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        count = len(grad_outputs)
        tensors = ctx.saved_tensors  # activation checkpointing allows one access
        rows, weights, saved = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
        gradients: list[Tensor | None] = [None] * count
        for k, w in enumerate(rows):
            if not ctx.needs_input_grad[2 + k]:
                continue
            factor = grad_outputs[k][:, None, None]
            with _numerics.autocast_disabled(w):
                if torch.is_grad_enabled():  # the gradient itself will be differentiated
                    total = _plain_mutual(w, ctx.potentials[k], weights[k])
                    gradients[k] = factor * torch.autograd.grad(total.sum(), w, create_graph=True)[0]
                else:
                    product = _GradientFactors(*saved[3 * k : 3 * k + 3]).product(factor, w.dtype)
                    gradients[k] = product.to(w.device)
        return None, None, *gradients, *(None for _ in range(count))


# The cross sum -------------------------------------------------------------------------------------------------------


def cross_repulsion(
    rows: Tensor | None, w: Tensor, labels: Tensor, potential: PairPotential, counted: Tensor | None = None
) -> Tensor:
    r"""Return Σ_i Σ_j φ(cos(rᵢ, wⱼ)) without the pairs in which wⱼ is rᵢ itself. Blocks of w are processed in turn.

    Args:
        rows: (B, d), in float32 or float64; None for the rows `w[labels]`, which saves a second gradient.
        w: (N, d), of the same dtype.
        labels: (B,) the index j of the wⱼ that each row is; −1 for none.
        potential: φ.
        counted: (B,) booleans, True for the rows that count; None if all do.

    Example:
        >>> cross_repulsion(torch.eye(3)[:1], torch.eye(3), torch.tensor([0]), PairPotential())
        tensor(1.)
    """
    tensors = [t for t in (rows, w, labels, counted) if t is not None]
    with _numerics.autocast_disabled(w):
        if not _numerics.values_readable(*tensors):
            return _plain_cross(rows, w, labels, potential, counted)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return _CrossFunction.apply(rows, w, labels, potential, counted)
        return _compute_cross(rows, w, labels, potential, counted, with_gradient=False)[0]


def _plain_cross(
    rows: Tensor | None, w: Tensor, labels: Tensor, potential: PairPotential, counted: Tensor | None
) -> Tensor:
    """Return the cross sum in differentiable operations, from float64 cosines."""
    unit = sphere.polar(_numerics.to_float64(w))[1]
    row = unit[labels] if rows is None else sphere.polar(_numerics.to_float64(rows))[1]
    no_pair = _no_pair(labels, counted, slice(0, len(w))).to(unit.device)
    c = (row @ unit.mT).masked_fill(no_pair, 0.0)
    values = potential(2 - 2 * c, 2 + 2 * c, dtype=w.dtype).masked_fill(no_pair, 0.0)
    return _saturate(values.sum(), w.dtype).to(w.device)


def _no_pair(labels: Tensor, counted: Tensor | None, block: slice) -> Tensor:
    """Return True for entries that do not count: a row with itself, and every entry of a row that does not count."""
    is_itself = labels[:, None] == torch.arange(block.start, block.stop, device=labels.device)
    return is_itself if counted is None else is_itself | ~counted[:, None]


def _compute_cross(
    rows: Tensor | None,
    w: Tensor,
    labels: Tensor,
    potential: PairPotential,
    counted: Tensor | None,
    *,
    with_gradient: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the sum and its gradients with respect to `rows` and `w`; for rows of `w` both are in the second."""
    row_values = w[labels] if rows is None else rows
    row_lengths, row = sphere.row_polar(row_values)
    row_gradient = torch.zeros_like(row)
    gradient = torch.empty_like(w) if with_gradient else None
    total = torch.zeros((), dtype=torch.float64, device=w.device)
    for j in _slices(len(w), max(256, _PAIRS_IN_CACHE // max(len(labels), 1)) if len(labels) else len(w)):
        lengths, unit = sphere.row_polar(w[j])
        value, grad_rows, grad_columns = _block(
            (row_values, row),
            (w[j], unit),
            potential,
            _no_pair(labels, counted, j),
            (None, None),
            with_gradient=with_gradient,
        )
        total += value
        if gradient is not None:
            row_gradient += grad_rows
            gradient[j] = _saturate(grad_columns.mul_(_inverse(lengths)), w.dtype)
    total = _saturate(total, w.dtype)
    if gradient is None:
        return total, None, None
    row_gradient = _saturate(row_gradient.mul_(_inverse(row_lengths)), w.dtype)
    if rows is None:
        return total, None, gradient.index_add_(0, labels, row_gradient)
    return total, row_gradient, gradient


class _CrossFunction(torch.autograd.Function):
    """The cross sum. Forward keeps the gradients."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor | None, w: Tensor, labels: Tensor, potential: PairPotential, counted: Tensor | None
    ) -> Tensor:
        total, *gradients = _compute_cross(rows, w, labels, potential, counted, with_gradient=True)
        ctx.save_for_backward(rows, w, labels, counted, *gradients)
        ctx.potential = potential
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        rows, w, labels, counted, *gradients = ctx.saved_tensors
        needed = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():  # the gradients themselves will be differentiated
            with _numerics.autocast_disabled(w):
                total = _plain_cross(rows, w, labels, ctx.potential, counted)
                variables = [t for t, need in zip((rows, w), needed, strict=True) if need]
                computed = iter(torch.autograd.grad(total, variables, create_graph=True))
            gradients = [next(computed) if need else None for need in needed]
        return *(grad_output * g if need else None for g, need in zip(gradients, needed, strict=True)), None, None, None


# The data-dependent energy, which heads and energies share -----------------------------------------------------------


def data_dependent_energy(
    w: Float[Tensor, "classes dim"],
    labels: Int[Tensor, "..."],
    *,
    power: float | str | Callable[[Tensor], Tensor] = 2,
    distance: str = "euclidean",
    min_distance: float | None = None,
    counted: Bool[Tensor, "..."] | None = None,
    ignore_index: int = -100,
) -> Float[Tensor, ""]:
    r"""Return the energy of the class vectors of a batch against all other class vectors (thesis, section 5.3.6).

        1/(B(N−1))·Σ_{i≤B} Σ_{j≠y_i} f_s(dist(ŵ_{y_i}, ŵ_j))

    For labels drawn uniformly, its expectation is the mean energy of all N vectors. Classes are processed in blocks, so
    a million of them need no memory beyond one gradient of `w`.

    Args:
        w: (N, d) class vectors, N ≥ 2. Only their directions matter.
        labels: integers in [0, N), of any shape. An empty batch has energy 0.
        power: s ≥ 0, a kernel of `hypersphere.kernel`, or a callable of the distance.
        distance: "euclidean" (the chord) or "angular" (the arc).
        min_distance: below this distance the energy continues linearly, which bounds the gradient; None for no bound.
        counted: booleans of the shape of `labels`, True for the labels that count; None if all do.
        ignore_index: labels of this value do not count, as in `torch.nn.functional.cross_entropy`.

    Returns:
        A scalar of the dtype of `w`. It is 0 if no label counts.

    Example:
        >>> data_dependent_energy(torch.eye(3), torch.tensor([0, 0, 2]), power=2)
        tensor(0.5000)

    Reference:
        Liu et al., Learning towards Minimum Hyperspherical Energy, NeurIPS 2018.
    """
    potential = PairPotential(kernel_of(power, min_distance), distance)
    _check_classes(w, labels, counted)
    labels = labels.flatten().long()
    counted = None if counted is None else counted.flatten()
    ignored = labels == ignore_index
    if not _numerics.values_readable(labels) or bool(ignored.any()):
        counted = ~ignored if counted is None else counted & ~ignored
        labels = labels.masked_fill(ignored, 0)
    if labels.numel() and _numerics.values_readable(w, labels):
        low, high = (int(v) for v in torch.aminmax(labels))
        require(low >= 0 and high < len(w), "labels", f"integers in [0, {len(w)})", f"{low} to {high}")
    total = cross_repulsion(None, _numerics.widen(w), labels, potential, counted)
    if _numerics.values_readable(total) and not math.isfinite(total.detach().item()):
        _numerics.require_finite_rows("w", w)
    number = max(len(labels), 1) if counted is None else counted.sum().clamp_min(1)
    return _numerics.narrow(total / (number * (len(w) - 1)), w.dtype)


def _check_classes(w: Tensor, labels: Tensor, counted: Tensor | None) -> None:
    """Check types and shapes."""
    accepted = "a floating-point matrix (N, d) with N >= 2"
    for name, tensor in (("w", w), ("labels", labels)):
        require(isinstance(tensor, Tensor), name, "a tensor", type(tensor).__name__)
    require(w.ndim == 2 and len(w) >= 2 and w.is_floating_point(), "w", accepted, f"{w.dtype} {tuple(w.shape)}")
    integers = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    require(integers, "labels", "a tensor of integers", f"{labels.dtype} {tuple(labels.shape)}")
    if counted is not None:
        fits = counted.shape == labels.shape and counted.dtype == torch.bool
        accepted = f"booleans of shape {tuple(labels.shape)}"
        require(fits, "counted", accepted, f"{counted.dtype} {tuple(counted.shape)}")
