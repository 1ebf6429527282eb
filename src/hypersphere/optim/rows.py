r"""Optimisers that update only the rows of a parameter that have a gradient.

A step with sampled classes (`ShardedHead(sample=...)`) has a sparse gradient: some class vectors were drawn, the others
have no gradient. Momentum and weight decay of a dense optimiser would move all of them. Here every row has its own
step count, which advances when the row is drawn:

    a row moves exactly as the dense optimiser would move it if the steps in which it is not drawn did not exist.

Missed steps are skipped, not repeated later, for two reasons. Momentum keeps its effect: a gradient moves its row by
η·∇f/(1 − μ) in total, as in the dense optimiser, whatever the rate at which rows are drawn, and no row jumps along an
old momentum when it is drawn again. Weight decay is applied once per gradient, so the balance between the two does
not depend on the rate either. If all rows are drawn, both optimisers equal their namesakes in `torch.optim`.
"""

from __future__ import annotations

import abc
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from hypersphere import _numerics
from hypersphere._validation import is_number, require, require_betas
from hypersphere.optim.torch_optimizers import restore_saved_dtypes

__all__ = ["RowAdamW", "RowSGD"]

_ADAMW_EPS: float = inspect.signature(torch.optim.AdamW).parameters["eps"].default
_BLOCK = 2**20  # numbers of a parameter that are updated at once, which bounds temporary memory


class _RowOptimizer(torch.optim.Optimizer, abc.ABC):
    """The loop that `RowSGD` and `RowAdamW` share. They differ in the state and in the update of rows."""

    _state_names: ClassVar[tuple[str, ...]]

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        for name in ("lr", "weight_decay"):
            require(is_number(defaults[name], 0), name, "a number >= 0", defaults[name])
        super().__init__(params, defaults)

    @abc.abstractmethod
    def _initial_state(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the state before the first step. Every tensor has one entry or one row per row of the weight."""

    @abc.abstractmethod
    def _update(self, w: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
        """Return new values of rows, given their values, gradients and state, whose tensors it replaces."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the rows that have a gradient: the rows of a sparse gradient, or all rows of a dense one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step_parameter(p, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state in the dtypes in which it was saved. torch would convert it to the dtype of the parameters."""
        super().load_state_dict(state_dict)
        restore_saved_dtypes(self, state_dict)

    def _step_parameter(self, p: Tensor, group: dict[str, Any]) -> None:
        weight, grad, rows = torch.atleast_1d(p.detach()), p.grad, None
        assert grad is not None
        if grad.is_sparse:
            require(
                grad.sparse_dim() == 1,
                "gradients",
                "dense, or sparse in rows only",
                f"sparse in {grad.sparse_dim()} dimensions",
            )
            grad = grad.coalesce()  # adds the gradients of a row that occurs more than once
            rows, grad = grad.indices()[0], grad.values()
        grad, state = torch.atleast_1d(grad), self.state[p]
        if not any(name in state for name in self._state_names):
            state.update(self._initial_state(weight, group))
        per_row = {
            name: state[name] for name in self._state_names if name in state
        }  # the state may also hold entries of other code
        num_rows = max(1, _BLOCK * len(weight) // max(weight.numel(), 1))
        for start in range(0, len(grad), num_rows):
            block = slice(start, start + num_rows)
            index = block if rows is None else rows[block]
            values = {name: _rows(value, index) for name, value in per_row.items()}
            w = self._update(_numerics.widen(_rows(weight, index)), _numerics.widen(grad[block]), values, group)
            weight[index] = _numerics.narrow(w, weight.dtype)
            for name, value in values.items():
                per_row[name][index] = value


class RowSGD(_RowOptimizer):
    r"""Stochastic gradient descent that updates only the rows that have a gradient.

    A row w of a sparse gradient with the value ∇f is updated by

        g = ∇f + λw,    b ← μb + g,    w ← w − η·b    (Nesterov: w ← w − η·(g + μb)).

    Other rows and their momenta b do not change: the momentum and the decay of steps in which a row is not drawn are
    skipped. A row of a sparse gradient counts as drawn even if its gradient is zero. A dense gradient draws all rows,
    and then the optimiser equals `torch.optim.SGD`.

    A step takes time and temporary memory for the drawn rows only. The momentum has the size of the parameter, in
    float32 or wider; there is none if μ is 0.

    Args:
        params: parameters or parameter groups, such as the class vectors of a `ShardedHead` with `sample`.
        lr: η.
        momentum: μ.
        weight_decay: λ.
        nesterov: use Nesterov momentum.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3, 2))
        >>> optimizer = RowSGD([weight], lr=0.1, momentum=0.9)
        >>> weight.grad = torch.sparse_coo_tensor([[2]], [[1.0, 2.0]], (3, 2), check_invariants=True)
        >>> optimizer.step()
        >>> weight.detach()
        tensor([[1.0000, 1.0000],
                [1.0000, 1.0000],
                [0.9000, 0.8000]])
    """

    _state_names = ("momentum",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
    ) -> None:
        require(is_number(momentum, 0) and momentum < 1, "momentum", "a number in [0, 1)", momentum)
        require(not nesterov or momentum > 0, "momentum", "a positive number with nesterov", momentum)
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov})

    def _initial_state(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"momentum": _wide_zeros(weight)} if group["momentum"] else {}

    def _update(self, w: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
        # The same operations as in `torch.optim.SGD`, so that the results are equal bit for bit.
        if group["weight_decay"]:
            grad = grad.add(w, alpha=group["weight_decay"])
        if "momentum" in state:
            state["momentum"] = state["momentum"].mul(group["momentum"]).add_(grad)
            grad = grad.add(state["momentum"], alpha=group["momentum"]) if group["nesterov"] else state["momentum"]
        return w.add(grad, alpha=-group["lr"])


class RowAdamW(_RowOptimizer):
    r"""AdamW that updates only the rows that have a gradient, with a step count per row.

    A row w of a sparse gradient with the value g is updated by

        t ← t + 1,    m ← β₁m + (1−β₁)g,    v ← β₂v + (1−β₂)g²,
        w ← (1 − ηλ)w − η·m̂/(√v̂ + ε),    m̂ = m/(1 − β₁ᵗ),    v̂ = v/(1 − β₂ᵗ).

    Other rows, their moments m and v, and their counts t do not change: the decay of weights and moments in steps in
    which a row is not drawn is skipped. A row of a sparse gradient counts as drawn even if its gradient is zero. A
    dense gradient draws all rows, and then the optimiser equals `torch.optim.AdamW`. `torch.optim.SparseAdam` counts
    the steps of the optimiser instead, so the first step of a row that is drawn late has the length 3.2·η per entry
    instead of η.

    A step takes time and temporary memory for the drawn rows only. Each moment has the size of the parameter, in
    float32 or wider.

    Args:
        params: parameters or parameter groups, as in `RowSGD`.
        lr: η.
        betas: β₁ and β₂.
        eps: ε, by default the same as in `torch.optim.AdamW`.
        weight_decay: λ.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3, 2))
        >>> optimizer = RowAdamW([weight], lr=0.1, weight_decay=0.0)
        >>> weight.grad = torch.sparse_coo_tensor([[2]], [[1.0, 2.0]], (3, 2), check_invariants=True)
        >>> optimizer.step()
        >>> weight.detach()
        tensor([[1.0000, 1.0000],
                [1.0000, 1.0000],
                [0.9000, 0.9000]])
    """

    _state_names = ("steps", "mean", "mean_square")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = _ADAMW_EPS,
        weight_decay: float = 0.01,
    ) -> None:
        require_betas(betas)
        require(is_number(eps, 0) and eps > 0, "eps", "a positive number", eps)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _initial_state(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        steps = torch.zeros(len(weight), dtype=torch.int32, device=weight.device)
        return {"steps": steps, "mean": _wide_zeros(weight), "mean_square": _wide_zeros(weight)}

    def _update(self, w: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
        beta1, beta2 = group["betas"]
        steps = state["steps"] + 1
        mean = torch.lerp(state["mean"], grad, 1 - beta1)
        mean_square = torch.addcmul(beta2 * state["mean_square"], grad, grad, value=1 - beta2)
        state |= {"steps": steps, "mean": mean, "mean_square": mean_square}
        # 1 − βᵗ is computed as −expm1(t·log β), because the difference would lose three digits for β₂ at small t.
        t = steps.to(w.dtype).view(-1, *[1] * (w.ndim - 1))
        first_bias, second_bias = (-torch.expm1(t * (math.log(beta) if beta else -math.inf)) for beta in group["betas"])
        denominator = (mean_square / second_bias).sqrt_().add_(group["eps"])
        decayed = w.mul(1 - group["lr"] * group["weight_decay"])
        return decayed.addcdiv_(mean / first_bias, denominator, value=-group["lr"])


def _wide_zeros(weight: Tensor) -> Tensor:
    """Return zeros of the shape of a weight, in float32 or wider."""
    return torch.zeros_like(weight, dtype=_numerics.compute_dtype(weight.dtype))


def _rows(t: Tensor, index: Tensor | slice) -> Tensor:
    """Return the indexed rows. `index_select` takes half the time of t[index]."""
    return t[index] if isinstance(index, slice) else t.index_select(0, index)
