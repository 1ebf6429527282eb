r"""Descent on the orthogonal group: each step is itself a rotation, so no map from free numbers is needed.

With U orthogonal and M a descent direction, W = Ŵ − Ŵᵀ, Ŵ = M·Uᵀ − ½U(Uᵀ·M·Uᵀ), is skew, and the Cayley curve
Y = U + (λ/2)·W·(U + Y) stays orthogonal (OPT, equations 3 and 4, where the sign of ∇f is to be read as that of M). In
the frame of U it is Y = U + (λ/2)(U + Y)·Ω with Ω = ½(UᵀM − MᵀU), which needs four products for two fixed-point steps.

Reference:
    Li, Li and Todorovic, Efficient Riemannian Optimization on the Stiefel Manifold via the Cayley Transform, ICLR 2020.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hypersphere import _numerics
from hypersphere._validation import is_integer, is_number, require

__all__ = ["OGD", "OGDAdam"]


class _OnTheGroup(torch.optim.Optimizer, abc.ABC):
    """What both share: square matrices, a guarded Cayley step, and putting them back on the group."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        require(is_number(defaults["lr"], 0) and defaults["lr"] > 0, "lr", "a positive number", defaults["lr"])
        guard, every = defaults["guard"], defaults["restore_every"]
        require(is_number(guard, 0, 1) and guard > 0, "guard", "a number in (0, 1]", guard)
        require(every is None or is_integer(every, 1), "restore_every", "None or a whole number >= 1", every)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add matrices, once they are known to be square and orthogonal."""
        super().add_param_group(param_group)
        try:
            for p in self.param_groups[-1]["params"]:
                _require_orthogonal(p.detach())
        except ValueError:
            self.param_groups.pop()
            raise

    @abc.abstractmethod
    def _direction(
        self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> tuple[Tensor, Tensor | float]:
        """The averaged descent direction M, and what its skew part is to be divided by."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move every matrix along its Cayley curve."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._move(p, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state back as wide as it was, where torch would narrow it to the type of the parameters."""
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for p, place in zip(group["params"], saved["params"], strict=True):
                for key, value in state_dict["state"].get(place, {}).items():
                    if isinstance(value, Tensor):
                        self.state[p][key] = value.detach().to(p.device, copy=True)

    def _move(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["steps"] = 0
            state["momentum"] = torch.zeros_like(_numerics.widen(p.detach()))
        state["steps"] += 1
        u = _numerics.widen(p.detach())
        m, scale = self._direction(_numerics.widen(p.grad), state, group)  # type: ignore[arg-type]
        with _numerics.autocast_disabled(u):
            a = u.mT @ m
            omega = 0.5 * (a - a.mT) / scale
            tangent = u @ omega
            state["momentum"].copy_(tangent * scale)
            length = torch.linalg.matrix_norm(omega).unsqueeze(-1).unsqueeze(-1)
            rate = torch.clamp(2 * group["guard"] / length.masked_fill(length == 0, 1.0), max=group["lr"])
            y = u + rate * tangent
            for _ in range(2):
                y = u + 0.5 * rate * ((u + y) @ omega)
            if group["restore_every"] is not None:
                due = state["steps"] % group["restore_every"] == 0
                y = _restored(y, due=due, turned=rate * length)
        p.copy_(_numerics.narrow(y, p.dtype))


def _restored(y: Tensor, *, due: bool, turned: Tensor) -> Tensor:
    """U ← U(3I − UᵀU)/2: once where it is due, and after a long step λ‖Ω‖ until what truncation left is gone."""
    tolerance = _numerics.rotation_tolerance(y.dtype)
    if due:
        y = 1.5 * y - 0.5 * y @ (y.mT @ y)
    far = turned**5 / 16 > tolerance  # more than which two fixed-point steps leave, matrix by matrix
    for _ in range(6):  # each squares the error
        if not bool(far.any()):
            break
        gram = y.mT @ y
        far = far & (_off(gram) > tolerance)
        y = torch.where(far, 1.5 * y - 0.5 * y @ gram, y)
    return y


def _off(gram: Tensor) -> Tensor:
    """How far each UᵀU is from I, (…, 1, 1)."""
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return (gram - eye).abs().amax((-2, -1), keepdim=True)


def _require_orthogonal(p: Tensor) -> None:
    """Raise unless p is a square orthogonal matrix or a batch of them, up to the rounding of a narrow type."""
    square = p.ndim >= 2 and p.shape[-1] == p.shape[-2]
    require(square, "params", "square matrices, or batches of them (…, d, d)", tuple(p.shape))
    if p.numel() and _numerics.values_readable(p):
        wide = _numerics.widen(p)
        error = float(_off(wide.mT @ wide).max())
        allowed = max(_numerics.machine_epsilon(p.dtype), _numerics.machine_epsilon(torch.float32)) ** 0.5
        if not error <= allowed:
            raise ValueError(f"params must be orthogonal matrices, but max |UᵀU − I| is {error:.2g}")


class OGD(_OnTheGroup):
    r"""Gradient descent with momentum on orthogonal matrices: M ← μM − ∇f, then the Cayley step (OPT, section 3.5).

    Args:
        params: orthogonal matrices (…, d, d), such as `rotation_parameters(rotate_(model, "free"))`; the other
            parameters of a model go to any other optimiser.
        lr: λ, the length of a step.
        momentum: μ.
        guard: q, where λ·‖W‖ would be larger than 2q it is shortened, so that the fixed-point steps converge.
        restore_every: after how many steps U ← U(3I − UᵀU)/2 removes what rounding left; what two fixed-point steps
            leave of a long step is removed at once. None does neither.

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

    def _direction(
        self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> tuple[Tensor, Tensor | float]:
        return group["momentum"] * state["momentum"] - gradient, 1.0


class OGDAdam(_OnTheGroup):
    r"""The adaptive form: M ← β₁M − (1−β₁)∇f, divided by the root of a running mean of ‖∇f‖² of each matrix.

    Args:
        params: orthogonal matrices (…, d, d).
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
        two = isinstance(betas, (tuple, list)) and len(betas) == 2 and all(is_number(b, 0) and b < 1 for b in betas)
        require(two, "betas", "two numbers in [0, 1)", betas)
        super().__init__(params, {"lr": lr, "betas": betas, "guard": guard, "restore_every": restore_every})

    def _direction(
        self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> tuple[Tensor, Tensor | float]:
        first, second = group["betas"]
        square = gradient.square().sum((-2, -1), keepdim=True)
        mean = second * state.get("square", torch.zeros_like(square)) + (1 - second) * square
        state["square"] = mean
        size = (mean / (1 - second ** state["steps"])).sqrt()
        m = first * state["momentum"] - (1 - first) * gradient
        return m, (1 - first ** state["steps"]) * size.masked_fill(size == 0, 1.0)
