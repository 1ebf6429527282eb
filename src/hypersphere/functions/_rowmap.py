r"""Learned maps of rows, W = V·Rᵀ: the interface of the menus `orthogonal` and `transform`.

Every map defines `expression`: V·Rᵀ in ordinary torch operations. Where autograd of these operations is slow, a map
adds a pair of kernels: `forward_kernel`, and `backward_kernel`, which reuses the factorisation of the forward pass.
`RowMap.evaluate` uses the kernels of a map that has them in eager mode, and `expression` in all other cases. `Cayley`,
`Neumann` and `Exponential` override it, because their choice depends on values. In this table, "elsewhere" means
compilation, tracing, `torch.func`, forward mode and the meta device:

    map                      eager mode on the CPU                       eager mode on other devices    elsewhere
    GramSchmidt              kernels; reflections if they lose digits    kernels with reflections       expression
    Householder              kernels                                     kernels                        expression
    Lowdin                   kernels; an SVD if they lose digits         kernels with an SVD            expression
    Cayley                   expression; in float64 if it loses digits   expression                     expression
    Neumann                  the series; Cayley if it is too short       expression                     expression
    Exponential              kernels                                     expression                     expression (*)
    Free, all transforms     expression                                  expression                     expression

(*) In a compiled graph on the CPU, `expression` is a custom op that calls the kernels.

The backward pass of kernels is differentiable: second derivatives (`create_graph=True`) come from `expression`. The
matrix R alone, without rows, is computed by `RowMap.matrix`, for which `Cayley` has a series of products.

Values decide about algorithms only on the CPU, where reading them is free (`_numerics.may_branch_on_values`): a fast
factorisation is checked there, and repeated by a stable one if it lost digits. On other devices no map makes the host
wait in a training step, except that torch's SVD (Lowdin) does so itself. No map checks that its inputs are finite: a
NaN or an infinity gives a weight that is not finite.
"""

from __future__ import annotations

import abc
import warnings
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from hypersphere import _numerics
from hypersphere._deprecation import deprecated_attribute
from hypersphere.functions._autograd import differentiable_gradients
from hypersphere.functions._entries import reset_outdated_attributes

__all__ = ["Gradients", "Residuals", "RowMap", "norms_preserved"]

Residuals = Any
"""What a backward kernel needs in addition to its inputs: a NamedTuple of tensors (or None), one type per map."""

Gradients = tuple[Tensor, Tensor | None]
"""The gradients of the free parameters and of the rows."""


class RowMap(abc.ABC):
    """A map from free parameters to a matrix R that is applied to rows: V → V·Rᵀ.

    A subclass defines `expression`, and optionally a pair of kernels. The free parameters are a d×d matrix, unless the
    subclass also defines `identity` and `size`. Free parameters and rows may have leading batch dimensions: `free`
    (k, …) and `v` (k, n, d) are k independent maps.
    """

    always_orthogonal: ClassVar[bool] = True
    """True if R is orthogonal for all values of the parameters."""

    exact = deprecated_attribute("exact", "always_orthogonal")

    has_kernels: ClassVar[bool] = False
    """True if the class has kernels for its `expression`. A subclass that overrides only `expression` has none."""

    def __init_subclass__(cls) -> None:
        """Drop algorithms of a parent class if the subclass defines another map and no algorithms for it."""
        super().__init_subclass__()
        if isinstance(vars(cls).get("exact"), bool):  # the name in version 0.1
            message = f"{cls.__name__}.exact is deprecated, use always_orthogonal instead"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            cls.always_orthogonal = vars(cls)["exact"]
        algorithms = ("evaluate", "forward_kernel", "backward_kernel", "matrix")
        reset_outdated_attributes(cls, RowMap, algorithms, of=("expression", "generator"))
        cls.has_kernels = cls.forward_kernel is not RowMap.forward_kernel

    def identity(self, d: int) -> Float[Tensor, "..."]:
        """Return the free parameters for which R is the identity of size `d`."""
        return torch.eye(d)

    @abc.abstractmethod
    def expression(self, free: Float[Tensor, "..."], v: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """Return V·Rᵀ in differentiable torch operations. The inputs have float32 or wider."""

    def evaluate(self, free: Float[Tensor, "..."], v: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """Return V·Rᵀ, by the kernels or by `expression`. The inputs have float32 or wider.

        A map whose precision depends on the values overrides this method to choose another dtype or algorithm.
        """
        if self.has_kernels and _numerics.custom_backward_allowed(free, v):
            return _KernelFunction.apply(self, free, v)
        return self.expression(free, v)

    def forward_kernel(self, free: Tensor, v: Tensor) -> tuple[Tensor, Residuals]:
        """Return V·Rᵀ and the residuals for `backward_kernel`. The inputs have float32 or wider."""
        raise NotImplementedError

    def backward_kernel(
        self, free: Tensor, v: Tensor, residuals: Residuals, grad: Tensor, *, needs_rows: bool = True
    ) -> Gradients:
        """Return the gradients of the free parameters and of V, given the gradient of V·Rᵀ.

        If `needs_rows` is False, the gradient of V is not needed. Return None for it, unless it is a by-product.
        """
        raise NotImplementedError

    def matrix(self, free: Float[Tensor, "..."]) -> Float[Tensor, "*batch d d"]:
        """Return R. A map that computes R faster than the rows V·Rᵀ of V = I overrides this method."""
        # Dimensions of `free` beyond the dimensions of one set of parameters are batch dimensions.
        batch = free.shape[: free.ndim - self.identity(1).ndim]
        eye = torch.eye(self.size(free), dtype=free.dtype, device=free.device)
        return self(free, eye.expand(*batch, -1, -1)).mT

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
            return self.matrix(free)
        # Factorisations need float32, also under autocast and for half-precision parameters.
        with _numerics.autocast_disabled(v):
            wide_free, wide_v = _numerics.widen_parameter(free), _numerics.widen_parameter(v)
            return _numerics.narrow(self.evaluate(wide_free, wide_v), v.dtype)


class _KernelFunction(torch.autograd.Function):
    """V·Rᵀ by the kernels of a map. Its backward pass is differentiable."""

    @staticmethod
    def forward(ctx: Any, method: RowMap, free: Tensor, v: Tensor) -> Tensor:
        w, residuals = method.forward_kernel(free, v)
        ctx.method, ctx.residuals_type = method, type(residuals)
        ctx.save_for_backward(free, v, *residuals)
        return w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        free, v, *residuals = ctx.saved_tensors
        _, *needs = ctx.needs_input_grad
        # The backward pass may be called under autocast although the forward pass disabled it.
        with _numerics.autocast_disabled(grad):
            if torch.is_grad_enabled():  # create_graph=True: the gradients must themselves be differentiable
                return None, *differentiable_gradients(ctx.method.expression, (free, v), needs, grad)
            residuals = ctx.residuals_type(*residuals)
            return None, *ctx.method.backward_kernel(free, v, residuals, grad, needs_rows=needs[1])


def norms_preserved(w: Tensor, v: Tensor) -> bool:
    """Return True if the rows kept their norms. This is the cheapest sign that a factorisation lost no digits."""
    before, after = v.square().sum(-1), w.square().sum(-1)
    return bool(((after - before).abs() <= _numerics.rotation_tolerance(v.dtype) * before).all())
