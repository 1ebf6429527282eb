r"""Learned maps of rows: how free parameters become V·Rᵀ, with a gradient that re-uses the factorisation."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

import torch
from torch import Tensor

from hypersphere import _numerics

__all__ = ["Memory", "RowMap", "keeps_norms"]

Memory = tuple[Any, ...]


class RowMap(abc.ABC):
    """What the library asks of a map: where it is the identity, the rotated rows, and the gradient back."""

    exact: ClassVar[bool] = True
    """Whether R is orthogonal whatever the parameters are."""

    @abc.abstractmethod
    def identity(self, d: int) -> Tensor:
        """Return the free parameters of R = I for neurons of `d` numbers."""

    @abc.abstractmethod
    def apply(self, free: Tensor, v: Tensor) -> tuple[Tensor, Memory]:
        """Return V·Rᵀ and what `pull` needs, in the type of `v`, float32 or wider; not recorded by autograd."""

    @abc.abstractmethod
    def pull(self, memory: Memory, gradient: Tensor, *, rows: bool = True) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the free parameters and of V (None unless `rows`) for a gradient of V·Rᵀ."""

    def size(self, free: Tensor) -> int:
        """Return d."""
        return free.shape[-1]

    def degrees_of_freedom(self, d: int) -> int:
        """Return how many numbers R depends on."""
        return d * (d - 1) // 2

    def __call__(self, free: Tensor, v: Tensor | None = None) -> Tensor:
        """Return the rows V·Rᵀ, or R itself where no rows are given, differentiably."""
        if v is None:
            eye = torch.eye(self.size(free), dtype=free.dtype, device=free.device)
            return self(free, eye.expand(*free.shape[: free.ndim - self.identity(1).ndim], -1, -1)).mT
        return _Rotated.apply(self, free, v)


class _Rotated(torch.autograd.Function):
    """V·Rᵀ with the gradient that the map itself knows."""

    @staticmethod
    def forward(ctx: Any, method: RowMap, free: Tensor, v: Tensor) -> Tensor:
        with _numerics.autocast_disabled(v):
            w, ctx.memory = method.apply(_numerics.widen(free.detach()), _numerics.widen(v.detach()))
        ctx.method, ctx.types = method, (free.dtype, v.dtype)
        return _numerics.narrow(w, v.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor | None]:
        with _numerics.autocast_disabled(gradient):
            free, v = ctx.method.pull(ctx.memory, _numerics.widen(gradient), rows=ctx.needs_input_grad[2])
        return None, _numerics.narrow(free, ctx.types[0]), None if v is None else _numerics.narrow(v, ctx.types[1])


def keeps_norms(w: Tensor, v: Tensor) -> bool:
    """Whether the rows kept their lengths: the cheapest sign that a factorisation lost no digits."""
    if not _numerics.values_readable(w):
        return True
    before, after = v.square().sum(-1), w.square().sum(-1)
    return bool(((after - before).abs() <= _numerics.rotation_tolerance(v.dtype) * before).all())
