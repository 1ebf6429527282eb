r"""Descent on the orthogonal group: every step is a rotation, so no map from free parameters is needed.

Derivation. Let U be orthogonal and M a descent direction. With Ŵ = M·Uᵀ − ½U(Uᵀ·M·Uᵀ), the matrix W = Ŵ − Ŵᵀ is skew,
and the Cayley curve Y(λ) = U + (λ/2)·W·(U + Y) stays orthogonal (OPT, equations 3 and 4, with M = −∇f; the
sign in the paper ascends). Since U is square, W·U = U·Ω with the skew matrix Ω = ½(UᵀM − MᵀU), so the curve is

    Y = U + (λ/2)·(U + Y)·Ω.

Starting from Y = U + λUΩ, two fixed-point steps solve it up to an error of λ⁴UΩ⁴/8: four d×d products in total.

Reference:
    Li, Li and Todorovic, Efficient Riemannian Optimization on the Stiefel Manifold via the Cayley Transform, ICLR 2020.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere._validation import is_integer, is_number, require, require_betas
from hypersphere.functions._factorizations import newton_schulz_step
from hypersphere.optim.torch_optimizers import restore_saved_dtypes

__all__ = ["OGD", "OGDAdam"]


class _CayleyDescent(torch.optim.Optimizer, abc.ABC):
    """The step that `OGD` and `OGDAdam` share. They differ in the descent direction M and its scale."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        require(is_number(defaults["lr"], 0) and defaults["lr"] > 0, "lr", "a positive number", defaults["lr"])
        guard, every = defaults["guard"], defaults["restore_every"]
        require(is_number(guard, 0, 1) and guard > 0, "guard", "a number in (0, 1]", guard)
        require(every is None or is_integer(every, 1), "restore_every", "None or an integer >= 1", every)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add matrices after checking that they are square and orthogonal."""
        super().add_param_group(param_group)
        # torch adds the group before it can be checked. Remove an invalid one, so that the optimiser stays usable.
        try:
            for p in self.param_groups[-1]["params"]:
                _require_orthogonal(_gather(p.detach()))
        except ValueError:
            self.param_groups.pop()
            raise

    @abc.abstractmethod
    def _direction(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> tuple[Tensor, Tensor | float]:
        """Return the descent direction M with momentum, and the number by which it must still be divided."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move every matrix along its Cayley curve.

        Raises:
            ValueError: a gradient is not finite. The matrix that the message names and those after it are unchanged.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is not None and p.numel():
                    self._move(p, group, name=group["param_names"][i] if "param_names" in group else f"params[{i}]")
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state in the precision in which it was saved. torch would round it to the dtype of the parameters."""
        super().load_state_dict(state_dict)
        restore_saved_dtypes(self, state_dict)

    def _move(self, p: Tensor, group: dict[str, Any], *, name: str) -> None:
        """Move one matrix, or one batch of matrices, along its Cayley curve, and update its state."""
        # FSDP2 distributes matrices over processes. A step needs the full matrix, so every process computes all of it.
        u, grad = _numerics.widen(_gather(p.detach())), _numerics.widen(_gather(p.grad))  # type: ignore[arg-type]
        state = {key: _gather(value) if isinstance(value, Tensor) else value for key, value in self.state[p].items()}
        state["steps"] = state.get("steps", 0) + 1
        state.setdefault("momentum", torch.zeros_like(u))
        m, scale = self._direction(grad, state, group)
        with _numerics.autocast_disabled(u):
            # Multiply M by a power of two, so that neither the product nor its norm overflows. M is not divided by
            # `scale` either, so the matrix `omega` is Ω' = power·scale·Ω.
            power = _numerics.unit_scale(m.abs().amax((-2, -1), keepdim=True))
            a = u.mT @ (m * power)
            omega = 0.5 * (a - a.mT)
            tangent = u @ omega
            # Only the part of M that is tangent to the group is remembered, so momentum does not pull U off it.
            state["momentum"] = tangent / power
            # λ' = λ/(power·scale) makes up for both factors. It is reduced if necessary to λ‖Ω‖ ≤ 2q, where the
            # fixed-point steps converge.
            omega_norm = torch.linalg.matrix_norm(omega).unsqueeze(-1).unsqueeze(-1)
            largest_rate = 2 * group["guard"] / omega_norm.masked_fill(omega_norm == 0, 1.0)
            rate = torch.minimum(group["lr"] / (power * scale), largest_rate)
            y = u + rate * tangent
            half_step = 0.5 * rate * omega
            for _ in range(2):
                y = u + (u + y) @ half_step
            if group["restore_every"] is not None:
                if state["steps"] % group["restore_every"] == 0:
                    y = newton_schulz_step(y)
                # Two fixed-point steps leave YᵀY − I ≈ −λ⁴Ω⁴/4. Singular values of a skew matrix come in pairs,
                # ‖Ω‖₂² ≤ ‖Ω‖_F²/2, so this is at most (λ‖Ω‖_F)⁴/16. The negation makes NaN a long step, so that one
                # read of the device finds both long steps and gradients that are not finite.
                is_long = ~((rate * omega_norm) ** 4 / 16 <= _numerics.rotation_tolerance(y.dtype))
                if bool(is_long.any()):
                    _require_finite(m, name)
                    y = _restore_orthogonality(y, is_long)
        self.state[p].update({key: _shard(v, p) if isinstance(v, Tensor) else v for key, v in state.items()})
        p.copy_(_shard(_numerics.narrow(y, p.dtype), p))


class OGD(_CayleyDescent):
    r"""Gradient descent with momentum on orthogonal matrices: M ← μM − ∇f, then the Cayley step (OPT, section 3.5).

    Args:
        params: orthogonal matrices (…, d, d), such as `rotation_parameters(rotate_(model, "free"))`. Matrices that
            FSDP2 has distributed are accepted. Give the other parameters of a model to another optimiser.
        lr: λ, the length of a step.
        momentum: μ.
        guard: q. Steps are shortened to λ‖Ω‖ ≤ 2q, so that the fixed-point steps converge.
        restore_every: the number of steps after which U ← U(3I − UᵀU)/2 removes rounding errors. The larger error of a
            long step is removed at once. None disables both, and the error for gradients that are not finite: then a
            step reads no values from the device.

    Example:
        >>> u = torch.nn.Parameter(torch.eye(3))
        >>> target = torch.tensor([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
        >>> optimizer = OGD([u], lr=0.1)
        >>> for _ in range(100):
        ...     u.grad = u.detach() - target
        ...     optimizer.step()
        >>> bool((u - target).abs().max() < 0.01)
        True
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        *,
        guard: float = 0.5,
        restore_every: int | None = 10,
    ) -> None:
        require(is_number(momentum, 0) and momentum < 1, "momentum", "a number in [0, 1)", momentum)
        super().__init__(params, {"lr": lr, "momentum": momentum, "guard": guard, "restore_every": restore_every})

    def _direction(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> tuple[Tensor, Tensor | float]:
        return group["momentum"] * state["momentum"] - grad, 1.0


class OGDAdam(_CayleyDescent):
    r"""The adaptive form: M ← β₁M − (1−β₁)∇f, divided by the running root mean square of ‖∇f‖_F of each matrix.

    Args:
        params: orthogonal matrices (…, d, d), as in `OGD`.
        lr: λ, the length of a step.
        betas: β₁ and β₂.
        guard: as in `OGD`.
        restore_every: as in `OGD`.

    Example:
        >>> u = torch.nn.Parameter(torch.eye(2))
        >>> optimizer = OGDAdam([u], lr=0.05)
        >>> for _ in range(100):
        ...     u.grad = u.detach() - torch.tensor([[0.0, -1.0], [1.0, 0.0]])
        ...     optimizer.step()
        >>> bool(u[1, 0] > 0.99)
        True
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        *,
        guard: float = 0.5,
        restore_every: int | None = 10,
    ) -> None:
        require_betas(betas)
        super().__init__(params, {"lr": lr, "betas": betas, "guard": guard, "restore_every": restore_every})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. Version 0.1 stored the running mean of squares instead of its root."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            if "square" in state:
                state["rms"] = state.pop("square").sqrt()

    def _direction(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> tuple[Tensor, Tensor | float]:
        beta1, beta2 = group["betas"]
        # Squares of float32 gradients overflow from 1.8e19 on. So the state is the root mean square, updated by hypot,
        # and `sphere.norm` scales entries before it squares them.
        norm = sphere.norm(grad.flatten(-2), keepdim=True).unsqueeze(-1)
        norm = norm.clamp_max(torch.finfo(norm.dtype).max)
        previous = state.get("rms", torch.zeros_like(norm))
        state["rms"] = torch.hypot(beta2**0.5 * previous, (1 - beta2) ** 0.5 * norm)
        # Bias corrections as in Adam: both averages start at zero.
        rms = state["rms"] / (1 - beta2 ** state["steps"]) ** 0.5
        m = beta1 * state["momentum"] - (1 - beta1) * grad
        return m, (1 - beta1 ** state["steps"]) * rms.masked_fill(rms == 0, 1.0)


def _restore_orthogonality(y: Tensor, is_inexact: Tensor) -> Tensor:
    """Apply Newton–Schulz steps to the inexact matrices of a batch until they are orthogonal."""
    for _ in range(6):  # convergence is quadratic
        gram = y.mT @ y
        is_inexact = is_inexact & (_gram_error(gram) > _numerics.rotation_tolerance(y.dtype))
        if not bool(is_inexact.any()):
            break
        y = torch.where(is_inexact, newton_schulz_step(y, gram), y)
    return y


def _require_finite(m: Tensor, name: str) -> None:
    """Raise a `ValueError` if the momentum M of the gradients is not finite."""
    invalid = int((~torch.isfinite(m)).sum())
    if invalid:
        count = f"{invalid} of {m.numel()} entries"
        raise ValueError(f"gradients of {name} must be finite, but {count} of their momentum are not")


def _gram_error(gram: Tensor) -> Tensor:
    """Return max |UᵀU − I| of each matrix, (…, 1, 1)."""
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return (gram - eye).abs().amax((-2, -1), keepdim=True)


def _require_orthogonal(p: Tensor) -> None:
    """Raise a `ValueError` unless `p` is an orthogonal matrix or a batch of them, up to the rounding of its dtype."""
    is_square = p.ndim >= 2 and p.shape[-1] == p.shape[-2]
    require(is_square, "params", "square matrices, or batches of them (…, d, d)", tuple(p.shape))
    if p.numel() and _numerics.values_readable(p):
        wide = _numerics.widen(p)
        error = float(_gram_error(wide.mT @ wide).max())
        # A matrix that was orthogonal before it was rounded to half precision must be accepted.
        allowed = max(_numerics.machine_epsilon(p.dtype), _numerics.machine_epsilon(torch.float32)) ** 0.5
        if not error <= allowed:
            raise ValueError(f"params must be orthogonal matrices, but max |UᵀU − I| is {error:.2g}")


# Distributed tensors -------------------------------------------------------------------------------------------------


def _gather(x: Tensor) -> Tensor:
    """Return the full tensor if `x` is distributed over processes (a DTensor), else `x`."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _shard(x: Tensor, like: Tensor) -> Tensor:
    """Return this process's part of `x`, distributed like the parameter `like`, or `x` if `like` is not distributed."""
    if not hasattr(like, "full_tensor") or x.shape != like.shape:  # a root mean square has one number per matrix
        return x
    from torch.distributed.tensor import distribute_tensor

    # All processes hold the same full tensor, so no data need be sent.
    return distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]
