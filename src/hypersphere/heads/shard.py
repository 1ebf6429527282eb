r"""Class vectors spread over processes: each has a run of classes and computes its part of what a loss asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hypersphere import _numerics
from hypersphere._validation import require
from hypersphere.functions._pairwise import PairPotential, cross_repulsion
from hypersphere.functions.kernel import Riesz
from hypersphere.heads.classes import Classes
from hypersphere.heads.collectives import Processes
from hypersphere.heads.terms import Terms, Wanted, class_terms

__all__ = ["Shard", "numbered_blocks"]

_NUMBERS_A_SEED = 2**16


class Shard(Classes):
    """The classes of this process; in a step with sampling, some of them.

    Args:
        processes: all that have classes.
        sizes: how many classes each of them has, in order.
        one_bias: whether all classes share one bias.
    """

    def __init__(self, processes: Processes, sizes: Sequence[int], *, one_bias: bool) -> None:
        plan = f"{processes.size} positive numbers, the classes of each process"
        fits = len(sizes) == processes.size and all(size >= 1 for size in sizes)
        require(fits, "sizes", f"{plan} (there may be no more processes than classes)", tuple(sizes))
        self.processes = processes
        self.sizes = tuple(sizes)
        self.one_bias = one_bias
        self.first = sum(sizes[: processes.rank])
        self.size = sizes[processes.rank]
        self.chosen: Tensor | None = None

    @property
    def mine(self) -> slice:
        """Where the classes of this process lie among all."""
        return slice(self.first, self.first + self.size)

    def choose(self, labels: Tensor, fraction: float, seed: int, step: int) -> None:
        """Take the labels' classes and a random fraction of the others until `choose_all`; at least one.

        Whether a class is taken depends on seed, step and class alone, not on how classes are spread.
        """
        generator = torch.Generator()
        keep = torch.empty(self.size, dtype=torch.bool, device=generator.device)
        blocks = -(-sum(self.sizes) // _NUMBERS_A_SEED)
        for number, block, here in numbered_blocks(self.mine, _NUMBERS_A_SEED):
            generator.manual_seed((seed + step * blocks + number) % 2**63)
            drawn = torch.rand(_NUMBERS_A_SEED, generator=generator, device=generator.device)[block]
            keep[here] = drawn < fraction
        local = labels.to(keep.device) - self.first
        keep[local[(local >= 0) & (local < self.size)]] = True
        if not bool(keep.any()):
            keep[0] = True
        self.chosen = keep.nonzero().flatten().to(labels.device)

    def choose_all(self) -> None:
        """Take all classes again."""
        self.chosen = None

    def terms(
        self, x: Tensor, w: Tensor, y: Tensor, rho: Tensor | None, bias: Tensor | None, wanted: Wanted, *, fused: bool
    ) -> Terms:
        """Return the terms of all classes from those of the classes here."""
        shared_bias = bias if self.one_bias else None
        features, rho, shared_bias = self.processes.shared(x, rho, shared_bias)
        assert features is not None
        here_bias = shared_bias if self.one_bias or bias is None else self._taken(bias)
        if wanted.total_weights is not None:
            wanted = replace(wanted, total_weights=self._taken(wanted.total_weights[self.mine]))
        part = class_terms(features, self._taken(w), self._here(y), rho, here_bias, wanted, fused=fused)
        stacked = self.processes.stacked(torch.stack([numbers for numbers in part if numbers is not None]))
        # no class at all is a very small number here, since the derivative of log 0 is none
        others = wanted.reduction.across(stacked[:, 0].mT.clamp_min(torch.finfo(x.dtype).min))
        sums = iter(stacked[:, 1:].sum(0))
        total, target, target_norm = (None if numbers is None else next(sums) for numbers in part[1:])
        assert target is not None
        return Terms(others, total, target, target_norm)

    def rows(self, values: Tensor, labels: Tensor) -> Tensor:
        """Return the rows of a parameter that belong to the labels, wherever they are."""
        here = self._here(labels)
        own = self._taken(values)[here.clamp_min(0)]
        absent = (here < 0).view(-1, *[1] * (own.ndim - 1))
        return self.processes.summed(own.masked_fill(absent, 0))

    def energy(self, w: Tensor, labels: Tensor, counted: Tensor | None = None) -> Tensor:
        """Return the energy of the class vectors of the labels that count against all others that are taken."""
        wide = _numerics.widen(w)
        (rows,) = self.processes.shared(self.rows(wide, labels))
        taken = self._taken(wide)
        part = cross_repulsion(rows, taken, self._here(labels), PairPotential(Riesz(2)), counted)
        others = sum(self.sizes) - 1
        if self.chosen is not None:
            others = max(int(self.processes.add_(torch.tensor(len(taken), device=w.device))) - 1, 1)
        number = max(len(labels), 1) if counted is None else counted.sum().clamp_min(1)
        return _numerics.narrow(self.processes.summed(part) / (number * others), w.dtype)

    def _here(self, labels: Tensor) -> Tensor:
        """Which of the classes taken here each label is, −1 for none."""
        local = labels - self.first
        if self.chosen is None:
            return local.masked_fill((local < 0) | (local >= self.size), -1)
        place = torch.searchsorted(self.chosen, local).clamp_max(len(self.chosen) - 1)
        return place.masked_fill(self.chosen[place] != local, -1)

    def _taken(self, values: Tensor) -> Tensor:
        """The rows of the classes taken, with a sparse gradient."""
        return values if self.chosen is None else _SparseRows.apply(values, self.chosen)


def numbered_blocks(classes: slice, size: int) -> Iterator[tuple[int, slice, slice]]:
    """Cut a run of classes where multiples of `size` lie: the number of each block, its part, and where that lies.

    >>> list(numbered_blocks(slice(3, 6), 4))
    [(0, slice(3, 4, None), slice(0, 1, None)), (1, slice(0, 2, None), slice(1, 3, None))]
    """
    for number in range(classes.start // size, -(-classes.stop // size)):
        start, stop = max(classes.start, number * size), min(classes.stop, (number + 1) * size)
        base = number * size
        yield number, slice(start - base, stop - base), slice(start - classes.start, stop - classes.start)


class _SparseRows(torch.autograd.Function):
    """Some rows of a parameter; the gradient holds those rows and no others."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor) -> Tensor:
        ctx.rows, ctx.shape = rows, values.shape
        return values[rows]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.sparse_coo_tensor(ctx.rows[None], grad, ctx.shape, is_coalesced=True, check_invariants=False), None
