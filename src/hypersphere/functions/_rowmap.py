r"""Learned maps of rows, W = V·Rᵀ: the interface of the menus `orthogonal` and `transform`.

A map has up to two implementations:

* `expression` computes V·Rᵀ in ordinary torch operations. Compilers, tracers, `torch.func` transforms, forward-mode
  differentiation and second derivatives use it. It never reads values.
* `forward_kernel` and `backward_kernel` are a faster pair for eager first-order training. They may read values to
  choose an algorithm, and the backward pass reuses the factorisation of the forward pass. By default they record
  `expression`, also in a subclass that overrides the `expression` of its parent and not the kernels.
"""

from __future__ import annotations

import abc
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from hypersphere import _numerics
from hypersphere.functions._autograd import differentiable_gradients, inner_graph, only_reverse_mode
from hypersphere.functions._overrides import reset_closed_forms

__all__ = ["Gradients", "Residuals", "RowMap", "kernels_usable", "norms_preserved"]

Residuals = Any
"""What a backward kernel needs from its forward kernel: a tuple, which each map defines."""

Gradients = tuple[Tensor, Tensor | None]
"""The gradients of the free parameters and of the rows."""


class RowMap(abc.ABC):
    """A map from free parameters to a matrix R that is applied to rows: V → V·Rᵀ.

    A subclass defines `expression`, and optionally a pair of kernels. The free parameters are a d×d matrix, unless the
    subclass also defines `identity` and `size`. Free parameters and rows may have leading batch dimensions: `free`
    (k, …) and `v` (k, n, d) are k independent maps.
    """

    exact: ClassVar[bool] = True
    """True if R is orthogonal for all values of the parameters."""

    def __init_subclass__(cls) -> None:
        """Drop the kernels of a parent class if the subclass defines another map and no kernels for it."""
        super().__init_subclass__()
        reset_closed_forms(cls, RowMap, ("forward_kernel", "backward_kernel"), "expression", "generator")

    def identity(self, d: int) -> Float[Tensor, "..."]:
        """Return the free parameters for which R is the identity of size `d`."""
        return torch.eye(d)

    @abc.abstractmethod
    def expression(self, free: Float[Tensor, "..."], v: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """Return V·Rᵀ in differentiable torch operations. The inputs have float32 or wider."""

    def forward_kernel(self, free: Tensor, v: Tensor) -> tuple[Tensor, Residuals]:
        """Return V·Rᵀ and what `backward_kernel` needs. The inputs are detached and have float32 or wider."""
        if torch.is_inference_mode_enabled():  # nothing can be recorded, and there will be no backward pass
            return self.expression(free, v), ()
        with inner_graph():
            leaves = free.detach().requires_grad_(), v.detach().requires_grad_()
            w = self.expression(*leaves)
        return w.detach(), (leaves, w)

    def backward_kernel(self, residuals: Residuals, grad: Tensor, *, needs_rows: bool = True) -> Gradients:
        """Return the gradients of the free parameters and of V, given the gradient of V·Rᵀ.

        If `needs_rows` is False, the gradient of V is not needed. Return None for it, unless it is a by-product.
        """
        leaves, w = residuals
        # The graph is retained because one weight may be differentiated by several backward passes.
        grads = torch.autograd.grad(w, leaves if needs_rows else leaves[:1], grad, retain_graph=True)
        return grads[0], grads[1] if needs_rows else None

    def size(self, free: Float[Tensor, "..."]) -> int:
        """Return d, the size of R."""
        return free.shape[-1]

    def degrees_of_freedom(self, d: int) -> int:
        """Return the dimension of the set of matrices R of size `d`: d(d−1)/2 for rotations."""
        return d * (d - 1) // 2

    def __call__(
        self, free: Float[Tensor, "..."], v: Float[Tensor, "*batch n d"] | None = None
    ) -> Float[Tensor, "*batch n d"]:
        """Return the rows V·Rᵀ, or the matrix R if no rows are given."""
        if v is None:
            # Dimensions of `free` beyond those of one set of parameters are batch dimensions.
            batch = free.shape[: free.ndim - self.identity(1).ndim]
            eye = torch.eye(self.size(free), dtype=free.dtype, device=free.device)
            return self(free, eye.expand(*batch, -1, -1)).mT
        if not kernels_usable(free, v):
            return self._wide_expression(free, v)
        return _KernelFunction.apply(self, free, v)

    def _wide_expression(self, free: Tensor, v: Tensor) -> Tensor:
        """Evaluate `expression` in float32 or wider and return the dtype of `v`."""
        with _numerics.autocast_disabled(v):
            return _numerics.narrow(self.expression(_numerics.widen(free), _numerics.widen(v)), v.dtype)


class _KernelFunction(torch.autograd.Function):
    """V·Rᵀ by the kernels of a map. Its backward pass is differentiable."""

    @staticmethod
    def forward(ctx: Any, method: RowMap, free: Tensor, v: Tensor) -> Tensor:
        with _numerics.autocast_disabled(v):
            w, ctx.residuals = method.forward_kernel(_numerics.widen(free.detach()), _numerics.widen(v.detach()))
        ctx.method = method
        ctx.save_for_backward(free, v)
        return _numerics.narrow(w, v.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        free, v = ctx.saved_tensors
        _, *needs = ctx.needs_input_grad
        if torch.is_grad_enabled():  # create_graph=True: the gradients must themselves be differentiable
            return None, *differentiable_gradients(ctx.method._wide_expression, (free, v), needs, grad)
        with _numerics.autocast_disabled(grad):
            grad_free, grad_v = ctx.method.backward_kernel(ctx.residuals, _numerics.widen(grad), needs_rows=needs[1])
        return (
            None,
            _numerics.narrow(grad_free, free.dtype),
            None if grad_v is None else _numerics.narrow(grad_v, v.dtype),
        )


def kernels_usable(free: Tensor, v: Tensor) -> bool:
    """Return True in ordinary eager mode, where values can be read and only reverse mode differentiates."""
    return only_reverse_mode(free, v)


def norms_preserved(w: Tensor, v: Tensor) -> bool:
    """Return True if the rows kept their norms. This is the cheapest sign that a factorisation lost no digits."""
    before, after = v.square().sum(-1), w.square().sum(-1)
    return bool(((after - before).abs() <= _numerics.rotation_tolerance(v.dtype) * before).all())
