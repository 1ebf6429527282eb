r"""Sums of pair potentials over directions, with fused gradients and accurate close pairs.

`pair_energy` computes two sums, with ŵ = w/‖w‖ and a potential φ of the cosine c (`kernel.PairPotential`):

    mutual:  E = Σ_{i≠j} φ(ŵᵢ·ŵⱼ)          all ordered pairs of rows of one set, or of each set of a stack
    cross:   E = Σ_i Σ_{j≠yᵢ} φ(r̂ᵢ·ŵⱼ)     rows r with labels y against all rows of w: a batch against all classes

**Gradient.** Let s = φ′(c) be the matrix of derivatives. With respect to a unit row, ∂E/∂r̂ᵢ = Σⱼ sᵢⱼ·ŵⱼ. Normalisation
removes the radial part and divides by the norm:

    ∂E/∂rᵢ = (Σⱼ sᵢⱼ·ŵⱼ − (Σⱼ sᵢⱼ·cᵢⱼ)·r̂ᵢ) / ‖rᵢ‖.

In the mutual sum every pair occurs twice, so the same expression is multiplied by 2, and the radial term can be written
on the diagonal of s: ∂E/∂W = 2·(s − diag(Σⱼ sᵢⱼ·cᵢⱼ))·Ŵ / ‖w‖.

**Close pairs.** The squared chord is u = 2 − 2c, and 2 + 2c for the mirror image −ŵⱼ. Its rounding error is a few eps,
so for close pairs all digits cancel. The largest cosine, which is read once, decides how a matrix is computed:

* no close pair (the usual case): in the dtype of the rows, without any clamping;
* a squared chord below `close_pair_threshold`: the matrix is recomputed in float64, and the few squared chords below
  `exact_difference_threshold` come from the differences ŵᵢ − ŵⱼ of float64 directions.

**Mean.** The mean over ordered pairs divides a mutual sum by N(N−1). In half space it is the mean over the 2N(2N−1)
pairs of the vectors ±ŵᵢ, which include every ŵᵢ with −ŵᵢ.

**Four ways** to compute a sum. `pair_energies` chooses one for each:

* reference (`_reference_sum`): differentiable operations on float64 cosines of all pairs. Under `torch.compile`,
  `torch.func` and forward mode, for learned weights β, and for second derivatives of the other three.
* dense (`_dense_sum`): value and gradient from one matrix of all pairs in the dtype of the rows. For mutual sums of at
  most `_DENSE_PAIRS` pairs, with ordinary norms and no close pair. The cosines of many layers are computed together, so
  that the host waits for the device once.
* float64 (`_float64_sum`): the same from float64 directions. For mutual sums of this size with a close pair, or with
  rows that are zero, tiny, huge or not finite.
* blocked (`_blocked_sum`): value and gradient from blocks of pairs that fit into the cache, each in float64 if it has a
  close pair. For larger sets and for cross sums.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere.functions._autograd import differentiable_gradients
from hypersphere.functions.kernel import PairPotential

__all__ = ["PairSum", "pair_energies", "pair_energy"]

_DENSE_PAIRS = 2**22  # sets with at most this many pairs in total are dense sums
_PAIRS_IN_CACHE = 2**20  # pairs per block of larger sets
_ROWS_IN_CACHE = 2**12  # rows whose norms are computed at once
_SMALLEST_MIRRORED_GRAM = 192  # from this many rows on, copying a quarter of the Gram matrix beats computing it
_LARGEST_DIFFERENCES = 2**24  # entries of ŵᵢ − ŵⱼ that are formed at once; beyond it float64 cosines are used


class PairSum(NamedTuple):
    """One sum of potentials: mutual, or cross if there are labels.

    Attributes:
        w: rows (…, N, d) in float32 or float64; (N, d) for a cross sum. A zero row has cosine 0 and no gradient.
        potential: φ.
        weights: (…, N) factors β of the unit rows of a mutual sum; None for factors of 1.
        labels: (B,) for each row r of a cross sum, the index of the wⱼ that it is not paired with; −1 for none, if
            `rows` are given.
        rows: (B, d) the rows r; None for the rows `w[labels]`, which saves a second gradient.
        counted: (B,) booleans, True for the rows r that count; None if all do.
        mean: divide a mutual sum by the number of pairs.
        sampled_from: if each set is a sample from that many rows, the mean estimates the mean of all rows without bias.
    """

    w: Tensor
    potential: PairPotential
    weights: Tensor | None = None
    labels: Tensor | None = None
    rows: Tensor | None = None
    counted: Tensor | None = None
    mean: bool = False
    sampled_from: int | None = None

    @property
    def is_fusable(self) -> bool:
        """True if value and gradient may be computed together. The fused gradient treats β as constant."""
        tensors = [t for t in (self.w, self.rows, self.labels) if t is not None]
        return _numerics.custom_backward_allowed(*tensors) and (self.weights is None or not self.weights.requires_grad)

    @property
    def requires_grad(self) -> bool:
        """True if a gradient of `w` or `rows` is needed."""
        return self.w.requires_grad or (self.rows is not None and self.rows.requires_grad)

    @property
    def pairs(self) -> float:
        """The size of the matrices of a dense sum; infinite for a cross sum, which needs blocks."""
        return math.inf if self.labels is not None else self.w.shape[:-1].numel() * self.w.shape[-2]

    def split(self) -> list[PairSum]:
        """Return mutual sums of stacks (S, N, d) with at most `_DENSE_PAIRS` pairs, or of one larger set."""
        if self.labels is not None:
            return [self]
        w = self.w.reshape(-1, *self.w.shape[-2:])
        weights = None if self.weights is None else self.weights.expand(self.w.shape[:-1]).reshape(w.shape[:-1])
        size = max(_DENSE_PAIRS // max(w.shape[-2] ** 2, 1), 1)
        if len(w) <= size:
            return [PairSum(w, self.potential, weights)]
        betas = () if weights is None else weights.split(size)
        return [PairSum(part, self.potential, beta) for part, beta in itertools.zip_longest(w.split(size), betas)]


class _Result(NamedTuple):
    """A sum with its gradients.

    Attributes:
        total: the sum.
        grad_w: ∂E/∂W; None if it is not needed, or if there is a factor instead.
        grad_rows: the gradient of the rows of a cross sum; None if it is not needed.
        factor_w: (S, N, N) a matrix whose product with W is ∂E/∂W, where it is smaller than the gradient; else None.
        is_finite: whether the sum is known to be finite.
    """

    total: Tensor
    grad_w: Tensor | None = None
    grad_rows: Tensor | None = None
    factor_w: Tensor | None = None
    is_finite: bool = False

    @property
    def has_gradient(self) -> bool:
        """True if the gradient was computed."""
        return self.grad_w is not None or self.factor_w is not None


def pair_energy(pair_sum: PairSum) -> Tensor:
    """Return a sum or mean of φ over pairs: one number per set of a stack, or one for a batch against all rows.

    Memory does not grow with the number of pairs beyond a few million. For backward a mutual sum keeps N·min(N, d)
    numbers per set, a cross sum its gradients.

    >>> w, potential = torch.eye(3), PairPotential()
    >>> pair_energy(PairSum(w, potential)), pair_energy(PairSum(w, potential, mean=True))
    (tensor(3.), tensor(0.5000))
    >>> pair_energy(PairSum(w, potential, labels=torch.tensor([0])))
    tensor(1.)
    """
    return pair_energies([pair_sum])[0][0]


def pair_energies(sums: Sequence[PairSum]) -> tuple[list[Tensor], bool]:
    """Return several sums, and whether they are known to be finite.

    Reading a value makes the host wait for the device. Computed one at a time, every sum reads values; together they
    do so once, or once per `_DENSE_PAIRS` pairs. A sum that is computed in blocks reads values in each block.

    The flag is True if all norms are ordinary, no pair is close and the kernels are `bounded_by_power`. Then every φ,
    and their mean, is smaller than the largest number of the dtype by the factor `_numerics.ENERGY_HEADROOM` (see
    `_numerics.close_pair_threshold`).

    >>> pair_energies([PairSum(torch.eye(3), PairPotential()), PairSum(torch.eye(2), PairPotential())])
    ([tensor(3.), tensor(1.)], True)
    """
    totals: list[list[Tensor]] = [[] for _ in sums]
    fused: list[tuple[int, PairSum]] = []  # parts of sums, with the position of their sum
    is_finite = all(pair_sum.w.shape[-2] > 1 for pair_sum in sums)
    for k, pair_sum in enumerate(sums):
        if pair_sum.is_fusable:
            fused += [(k, part) for part in pair_sum.split()]
        else:
            with _numerics.autocast_disabled(pair_sum.w):
                totals[k].append(_reference_sum(pair_sum))
            is_finite = False
    for batch in _batches(fused):
        parts = [part for _, part in batch]
        for (k, part), result in zip(batch, _fused_sums(parts), strict=True):
            is_finite = is_finite and result.is_finite
            total = result.total
            # `w` and `rows` are passed again, because autograd does not see tensors inside a `PairSum`.
            totals[k].append(_Differentiable.apply(part, result, part.w, part.rows) if result.has_gradient else total)
    energies = []
    for pair_sum, part_totals in zip(sums, totals, strict=True):
        total = part_totals[0] if len(part_totals) == 1 else torch.cat(part_totals)
        total = total.reshape(pair_sum.w.shape[:-2])
        energies.append(_mean(pair_sum, total) if pair_sum.mean else total)
    return energies, is_finite


def _fused_sums(parts: Sequence[PairSum]) -> list[_Result]:
    """Return the sums of a batch with the gradients that are required: one large blocked sum, or several dense ones."""
    needs = [torch.is_grad_enabled() and part.requires_grad for part in parts]
    with _numerics.autocast_disabled(parts[0].w), torch.no_grad():
        if parts[0].pairs > _DENSE_PAIRS:
            return [_blocked_sum(parts[0], needs[0])]
        # All cosines first, then their extremes, then the potentials: the list below is the only read of values.
        cosines = [_cosines(part.w) for part in parts]
        extremes = torch.stack([c.extremes for c in cosines]).tolist()
        return [_dense_sum(*arguments) for arguments in zip(parts, cosines, extremes, needs, strict=True)]


def _mean(pair_sum: PairSum, total: Tensor) -> Tensor:
    """Return the mean over ordered pairs, given the sum over the pairs of one set or of each set of a stack."""
    w, potential, n = pair_sum.w, pair_sum.potential, pair_sum.w.shape[-2]
    count = n if pair_sum.sampled_from is None else pair_sum.sampled_from
    # Extrapolate the sum of a sample to all pairs. All pairs are equally likely in it, so this is unbiased. A single
    # neuron has no pairs, but its sum must be connected to the graph, and not finite if the neuron is not.
    total = total * (count * (count - 1) / (n * (n - 1))) if n > 1 else w.sum((-2, -1)) * 0
    if not potential.half_space:
        return total / (count * (count - 1))
    # Each of the `count` vectors is also paired with its mirror image, at the squared chord 4. With weights these terms
    # differ per row. For a sample, their mean over the n rows estimates the mean over all `count` rows.
    betas = None if pair_sum.weights is None else (pair_sum.weights, pair_sum.weights)
    antipodal = PairPotential(potential.kernel, potential.distance)(w.new_full((), 4.0), w.new_zeros(()), betas)
    antipodal = count * (antipodal if betas is None else antipodal.mean(-1))
    # Each pair {i, j} gives four pairs of signed vectors: two at the distance of ŵⱼ and two at the distance of −ŵⱼ.
    return 2 * (total + antipodal) / (2 * count * (2 * count - 1))


def _batches(parts: Sequence[tuple[int, PairSum]]) -> Iterator[list[tuple[int, PairSum]]]:
    """Group consecutive sums of one device and dtype, up to `_DENSE_PAIRS` pairs; a larger one is alone."""
    batch: list[tuple[int, PairSum]] = []
    pairs = 0.0
    for k, part in parts:
        if batch:
            last = batch[-1][1].w
            is_compatible = (part.w.device, part.w.dtype) == (last.device, last.dtype)
            if not is_compatible or pairs + part.pairs > _DENSE_PAIRS:
                yield batch
                batch, pairs = [], 0.0
        batch.append((k, part))
        pairs += part.pairs
    if batch:
        yield batch


class _Differentiable(torch.autograd.Function):
    """Attach the precomputed gradients of a sum to its value."""

    @staticmethod
    def forward(ctx: Any, pair_sum: PairSum, result: _Result, w: Tensor, rows: Tensor | None) -> Tensor:
        ctx.potential = pair_sum.potential
        inputs = (w, rows, pair_sum.weights, pair_sum.labels, pair_sum.counted)
        ctx.save_for_backward(*inputs, result.grad_w, result.factor_w, result.grad_rows)
        return result.total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        # Read once: activation checkpointing allows only one access to `saved_tensors`.
        w, rows, weights, labels, counted, grad_w, factor_w, grad_rows = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        with _numerics.autocast_disabled(w):
            if torch.is_grad_enabled():  # the gradients themselves will be differentiated

                def reference(w: Tensor, rows: Tensor | None = None) -> Tensor:
                    return _reference_sum(PairSum(w, ctx.potential, weights, labels, rows, counted))

                inputs = [w] if rows is None else [w, rows]
                grads = differentiable_gradients(reference, inputs, needs[: len(inputs)], grad_output)
                return None, None, *grads, *([None] if rows is None else [])
            # One factor per set; the batch of a cross sum has one in total.
            scale = grad_output[..., None, None]
            if needs[0]:
                grad_w = scale * grad_w if factor_w is None else (scale * factor_w) @ w
            return None, None, grad_w if needs[0] else None, scale * grad_rows if needs[1] else None


# Reference -----------------------------------------------------------------------------------------------------------


def _reference_sum(pair_sum: PairSum) -> Tensor:
    """Return a sum in differentiable operations, from float64 cosines."""
    w, weights = pair_sum.w, pair_sum.weights
    columns = sphere.polar(_numerics.to_float64(w))[1]
    if pair_sum.labels is None:
        rows, excluded = columns, torch.eye(w.shape[-2], dtype=torch.bool, device=columns.device)
    else:
        if pair_sum.rows is None:
            rows = columns[pair_sum.labels.to(columns.device)]
        else:
            rows = sphere.polar(_numerics.to_float64(pair_sum.rows))[1]
        excluded = _excluded_entries(pair_sum, slice(None), slice(0, len(w))).to(columns.device)
    # Mask before and after φ: the cosine 1 of a row with itself would have an infinite derivative, and a masked value
    # alone would turn it into 0·∞ = NaN in backward.
    c = (rows @ columns.mT).masked_fill(excluded, 0.0)
    betas = None if weights is None else (weights.unsqueeze(-1).to(c), weights.unsqueeze(-2).to(c))
    values = pair_sum.potential(2 - 2 * c, 2 + 2 * c, betas, w.dtype)
    return _saturate(values.masked_fill(excluded, 0.0).sum((-2, -1)), w)


def _excluded_entries(pair_sum: PairSum, rows: slice, columns: slice) -> Tensor:
    """Return True for excluded entries of a cross sum: a row with itself, and rows that do not count."""
    assert pair_sum.labels is not None
    is_itself = pair_sum.labels[rows, None] == torch.arange(columns.start, columns.stop, device=pair_sum.labels.device)
    return is_itself if pair_sum.counted is None else is_itself | ~pair_sum.counted[rows, None]


# Dense ---------------------------------------------------------------------------------------------------------------


class _Cosines(NamedTuple):
    """The cosines of sets (S, N, d).

    Attributes:
        values: (S, N, N), with a zero diagonal.
        inverse_norms: (S, N).
        extremes: least norm, largest norm, least cosine and largest cosine, in a tensor that has not been read yet.
    """

    values: Tensor
    inverse_norms: Tensor
    extremes: Tensor


def _cosines(w: Tensor) -> _Cosines:
    """Return the cosines of sets (S, N, d) of rows with ordinary norms, without reading a value."""
    # Cosines from the Gram matrix of w itself: scaling N·N cosines is cheaper than normalising N·d entries.
    c = _gram(w)
    diagonal = c.diagonal(dim1=-2, dim2=-1)
    norms = diagonal.sqrt()
    inverse_norms = 1 / norms
    c.mul_(inverse_norms.unsqueeze(-1)).mul_(inverse_norms.unsqueeze(-2))
    diagonal.zero_()  # not a pair: the cosine 0 cannot be mistaken for a close pair
    # aminmax of an empty tensor is an error. Norms of 0 send empty sets to `_float64_sum`, which accepts them.
    extremes = torch.stack([*torch.aminmax(norms), *torch.aminmax(c)]) if w.numel() else w.new_zeros(4)
    return _Cosines(c, inverse_norms, extremes)


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


def _dense_sum(pair_sum: PairSum, cosines: _Cosines, extremes: list[float], with_gradient: bool) -> _Result:
    """Return the totals of sets (S, N, d) and their gradient.

    Args:
        pair_sum: the sets.
        cosines: their cosines, which are only valid if the norms are ordinary, and only accurate without close pairs.
        extremes: the values of `cosines.extremes`.
        with_gradient: whether the gradient is needed.
    """
    w, potential = pair_sum.w, pair_sum.potential
    least_norm, largest_norm, bottom, top = extremes
    low, high = _numerics.safe_norm_bounds(w.dtype)
    # NaN fails these comparisons, so rows that are not finite count as not ordinary.
    has_ordinary_norms = least_norm > low and largest_norm < high
    if not has_ordinary_norms or _has_close_pair(top, bottom, potential, w.dtype):
        return _float64_sum(pair_sum, with_gradient)
    total, factor = _total_and_factor(pair_sum, w, cosines.values, with_gradient, is_close=False)
    is_finite = pair_sum.weights is None and potential.kernel.bounded_by_power
    if factor is None:
        return _Result(total, is_finite=is_finite)
    # For a product with W instead of Ŵ, the factor 1/‖wⱼ‖ belongs to the matrix, and so does the outer factor 1/‖wᵢ‖.
    factor.mul_(cosines.inverse_norms.unsqueeze(-1)).mul_(cosines.inverse_norms.unsqueeze(-2))
    # Backward keeps the smaller of this factor (N, N) and the gradient (N, d). W itself costs no memory.
    if w.shape[-2] <= w.shape[-1]:
        return _Result(total, factor_w=factor, is_finite=is_finite)
    return _Result(total, factor @ w, is_finite=is_finite)


def _float64_sum(pair_sum: PairSum, with_gradient: bool) -> _Result:
    """Return totals and gradient computed from float64 directions, for close pairs and zero, tiny or huge rows."""
    w = pair_sum.w
    lengths, unit = sphere.polar(_numerics.to_float64(w))
    c = _gram(unit)
    c.diagonal(dim1=-2, dim2=-1).zero_()
    total, factor = _total_and_factor(pair_sum, unit, c, with_gradient, is_close=True)
    if factor is None:
        return _Result(total)
    # The factor 1/‖w‖ comes last, because the others may overflow with it.
    gradient = (factor @ unit).mul_(_inverse(lengths))
    return _Result(total, _saturate(gradient, w))


def _total_and_factor(
    pair_sum: PairSum, unit: Tensor, c: Tensor, with_gradient: bool, *, is_close: bool
) -> tuple[Tensor, Tensor | None]:
    """Return E and the matrix 2·(s − diag(Σⱼ sᵢⱼ·cᵢⱼ)), whose product with Ŵ is ‖w‖·∂E/∂W."""
    dtype, weights = pair_sum.w.dtype, pair_sum.weights
    betas = None if weights is None else (weights.unsqueeze(-1).to(c), weights.unsqueeze(-2).to(c))
    value, slope = _evaluate(pair_sum.potential, unit, unit, c, betas, dtype, with_gradient, is_close=is_close)
    # The diagonal is not a pair: set it to 0.
    value.diagonal(dim1=-2, dim2=-1).zero_()
    total = _saturate(value.sum((-2, -1)), pair_sum.w)
    if slope is None:
        return total, None
    # The same holds for s. Its diagonal then is free, so it can hold the radial term.
    diagonal = slope.diagonal(dim1=-2, dim2=-1)
    diagonal.zero_()
    diagonal.copy_(-(slope * c).sum(-1))
    return total, slope.mul_(2)


def _has_close_pair(top: float, bottom: float, potential: PairPotential, dtype: torch.dtype) -> bool:
    """Return True if the largest or, in half space, the smallest cosine belongs to a close pair."""
    limit = 1 - _numerics.close_pair_threshold(dtype, potential.kernel.power) / 2
    return top > limit or (potential.half_space and bottom < -limit)


def _evaluate(
    potential: PairPotential,
    rows: Tensor,
    columns: Tensor,
    c: Tensor,
    weights: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype,
    with_derivative: bool,
    *,
    is_close: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return φ and dφ/dc for the cosines of unit rows and columns. Excluded entries must hold the cosine 0."""
    if with_derivative and not is_close and weights is None and potential.distance == "euclidean":
        return potential.unclamped_with_derivative(c)
    u, v = torch.rsub(c, 2, alpha=2), torch.rsub(c, 2, alpha=-2)
    if is_close:
        _replace_small_chords_(u, rows, columns)
        if potential.half_space:
            _replace_small_chords_(v, rows, -columns)
    if with_derivative:
        return potential.with_derivative(u, v, weights, dtype)
    return potential(u, v, weights, dtype), None


def _replace_small_chords_(squared: Tensor, rows: Tensor, columns: Tensor) -> None:
    """Overwrite the smallest squared chords between unit vectors in float64 by the squared norms of differences."""
    index = (squared < _numerics.exact_difference_threshold()).nonzero()
    # A layer whose neurons all coincide has too many such pairs. Its chords are computed from float64 cosines, which
    # are accurate to the smallest distance at which kernels are evaluated.
    if 0 < len(index) * rows.shape[-1] <= _LARGEST_DIFFERENCES:
        *sets, i, j = index.unbind(1)
        pair, row, column = (*sets, i, j), (*sets, i), (*sets, j)
        squared[pair] = (rows[row] - columns[column]).square().sum(-1)


def _inverse(length: Tensor) -> Tensor:
    """Return 1/‖w‖, and 0 for a zero row, which therefore has a zero gradient."""
    return torch.where(length > 0, 1 / length, 0.0)


def _saturate(x: Tensor, like: Tensor) -> Tensor:
    """Convert to dtype and device of `like`; numbers that the dtype cannot represent become its largest ones."""
    largest = torch.finfo(like.dtype).max
    return x.clamp(-largest, largest).to(like.dtype).to(like.device)


# Blocked -------------------------------------------------------------------------------------------------------------


def _blocked_sum(pair_sum: PairSum, with_gradient: bool) -> _Result:
    """Return a cross sum, or the mutual sum of one large set (1, N, d), with gradients."""
    is_mutual = pair_sum.labels is None
    w = pair_sum.w.flatten(0, -2)
    rows = w if is_mutual else w[pair_sum.labels] if pair_sum.rows is None else pair_sum.rows
    total = _numerics.to_float64(w.new_zeros(()))
    grad_w = torch.zeros_like(w) if with_gradient else None
    grad_rows = grad_w if is_mutual or grad_w is None else torch.zeros_like(rows)
    for block in _blocks(pair_sum, rows, w):
        value, block_grad_rows, block_grad_columns = block.sum(pair_sum.potential, with_gradient)
        total += block.multiplicity * value
        if grad_w is not None and grad_rows is not None:
            grad_rows[block.i].add_(block_grad_rows, alpha=block.multiplicity)
            grad_w[block.j].add_(block_grad_columns, alpha=block.multiplicity)
    total = _saturate(total, w).reshape(pair_sum.w.shape[:-2])
    if grad_w is None or grad_rows is None:
        return _Result(total)
    grad_w = _divide_by_norms_(grad_w, w)
    if pair_sum.labels is None:
        return _Result(total, grad_w.view_as(pair_sum.w))
    grad_rows = _divide_by_norms_(grad_rows, rows)
    if pair_sum.rows is None:
        return _Result(total, grad_w.index_add_(0, pair_sum.labels, grad_rows))
    return _Result(total, grad_w, grad_rows)


def _divide_by_norms_(gradient: Tensor, w: Tensor) -> Tensor:
    """Multiply by the factor 1/‖wᵢ‖ in place. It comes after the sum over blocks, which all have the same factor."""
    for i in _slices(len(w), _ROWS_IN_CACHE):
        gradient[i].mul_(_inverse(sphere.row_polar(w[i])[0]))
    return _saturate(gradient, gradient)


def _slices(n: int, size: int, start: int = 0) -> Iterator[slice]:
    """Yield slices of length `size` that cover start to n."""
    return (slice(k, min(k + size, n)) for k in range(start, n, size))


def _blocks(pair_sum: PairSum, rows: Tensor, w: Tensor) -> Iterator[_Block]:
    """Yield the pairs of `rows` and the rows of `w` in blocks that fit into the cache."""
    is_mutual = pair_sum.labels is None
    weights = None if pair_sum.weights is None else pair_sum.weights.flatten()
    height = max(min(len(rows), math.isqrt(_PAIRS_IN_CACHE)), 1)
    # Blocks of a mutual sum are square, so that a row meets itself only in blocks on the diagonal, where i == j.
    width = height if is_mutual else _PAIRS_IN_CACHE // height
    for i in _slices(len(rows), height):
        unit_rows = sphere.row_directions(rows[i])
        # The mutual sum is symmetric: blocks on and above the diagonal are sufficient.
        for j in _slices(len(w), width, start=i.start if is_mutual else 0):
            on_diagonal = is_mutual and i == j
            unit_columns = unit_rows if on_diagonal else sphere.row_directions(w[j])
            if on_diagonal:
                excluded: Tensor | None = torch.eye(len(unit_rows), dtype=torch.bool, device=w.device)
            else:
                excluded = None if is_mutual else _excluded_entries(pair_sum, i, j)
            betas = None if weights is None else (weights[i, None], weights[None, j])
            # A block above the diagonal also represents its mirror image.
            multiplicity = 2 if is_mutual and not on_diagonal else 1
            yield _Block(i, j, (rows[i], w[j]), (unit_rows, unit_columns), betas, excluded, multiplicity, on_diagonal)


class _Block(NamedTuple):
    """Pairs of rows (B, d) and columns (M, d).

    Attributes:
        i: the position of the rows.
        j: the position of the columns.
        values: rows and columns as they are.
        directions: their directions.
        weights: their factors β as (B, 1) and (1, M); None for factors of 1.
        excluded: (B, M) booleans, True for entries that do not count; None if all count.
        multiplicity: how often the block counts.
        is_symmetric: whether rows and columns are the same vectors, so that they have the same gradient.
    """

    i: slice
    j: slice
    values: tuple[Tensor, Tensor]
    directions: tuple[Tensor, Tensor]
    weights: tuple[Tensor, Tensor] | None
    excluded: Tensor | None
    multiplicity: int
    is_symmetric: bool

    def cosines(self) -> Tensor:
        """Return all cosines, 0 for excluded entries."""
        c = self.directions[0] @ self.directions[1].mT
        return c if self.excluded is None else c.masked_fill_(self.excluded, 0.0)

    def in_float64(self) -> _Block:
        """Return the same block with float64 directions, computed from the values."""
        rows, columns = (sphere.polar(_numerics.to_float64(x))[1] for x in self.values)
        return self._replace(
            directions=(rows, columns),
            weights=None if self.weights is None else (self.weights[0].to(rows), self.weights[1].to(rows)),
            excluded=None if self.excluded is None else self.excluded.to(rows.device),
        )

    def sum(self, potential: PairPotential, with_gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return Σ φ and the tangential parts of its gradients with respect to unit rows and columns."""
        block, dtype = self, self.directions[0].dtype
        c = block.cosines()
        bottom, top = torch.stack(torch.aminmax(c)).tolist() if c.numel() else (0.0, 0.0)
        is_close = _has_close_pair(top, bottom, potential, dtype)
        if is_close:
            block = self.in_float64()
            c = block.cosines()
        rows, columns = block.directions
        value, slope = _evaluate(potential, rows, columns, c, block.weights, dtype, with_gradient, is_close=is_close)
        # Excluded entries hold φ(0): set them to 0.
        if block.excluded is not None:
            value.masked_fill_(block.excluded, 0.0)
        # Rows first: blocks would be slower to add in float64, and some devices do not have it.
        total = _numerics.to_float64(value.sum(1)).sum()
        if slope is None:
            return total, rows[:0], columns[:0]
        if block.excluded is not None:
            slope.masked_fill_(block.excluded, 0.0)
        # ∂E/∂r̂ᵢ: Σⱼ sᵢⱼ·ŵⱼ minus its radial part (Σⱼ sᵢⱼ·cᵢⱼ)·r̂ᵢ, which is subtracted here, in the dtype of the block,
        # because the two nearly cancel for close pairs.
        radial = slope * c
        grad_rows = torch.addcmul(slope @ columns, radial.sum(1, keepdim=True), rows, value=-1)
        grad_rows = _saturate(grad_rows, self.directions[0])
        if self.is_symmetric:
            return total, grad_rows, grad_rows
        # ∂E/∂ŵⱼ: the same with rows and columns exchanged.
        grad_columns = torch.addcmul(slope.mT @ rows, radial.sum(0).unsqueeze(1), columns, value=-1)
        return total, grad_rows, _saturate(grad_columns, self.directions[1])
