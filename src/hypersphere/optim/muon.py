r"""Muon for models that have more than matrices.

`torch.optim.Muon` accepts parameters with two dimensions only. `Muon` uses its update for all weights, including those
of convolutions, and AdamW for vectors, so one optimiser trains a whole model.

References:
    Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024.
    Liu et al., Muon is Scalable for LLM Training, 2025 (equal learning rates of matrices and vectors).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim._muon import muon
from torch.optim.adamw import adamw

from hypersphere._validation import is_integer, is_number, require, require_betas

__all__ = ["Muon"]

_MUON, _ADAMW = (
    {name: parameter.default for name, parameter in inspect.signature(optimizer).parameters.items()}
    for optimizer in (torch.optim.Muon, torch.optim.AdamW)
)


class Muon(torch.optim.Optimizer):
    r"""Orthogonalise the momentum of every weight, and use AdamW for biases and other vectors.

    A weight W with two or more dimensions is a matrix of its rows (neurons or filters), (out, in·k·k) for a
    convolution. With the gradient G,

        M ← μM + (1−μ)G,    N = μM + (1−μ)G,    W ← (1 − ηλ)W − 0.2·η·√(max(out, in·k·k))·O(N),

    where O(N) is approximately the orthogonal matrix nearest to the Nesterov momentum N (`torch.optim.Muon` with
    "match_rms_adamw"). The root mean square of an update is about 0.2·η, as for AdamW, so matrices and vectors share
    learning rate and weight decay.

    Embeddings and output layers are usually trained with AdamW. Give them to a separate optimiser:

        hs.optim.Optimizers([hs.optim.Muon(hidden.parameters()), torch.optim.AdamW(head.parameters())])

    Args:
        params: parameters or parameter groups of any shapes.
        lr: η.
        weight_decay: λ.
        momentum: μ.
        steps: the number of Newton–Schulz steps that compute O(N).
        betas: β₁ and β₂ of AdamW.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> optimizer = Muon(model.parameters(), lr=1e-3)
        >>> model(torch.randn(2, 3, 5, 5)).square().mean().backward()
        >>> optimizer.step()
        >>> [sorted(state) for state in optimizer.state.values()][:2]
        [['momentum'], ['exp_avg', 'exp_avg_sq', 'step']]
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            require(is_number(value, 0), name, "a number >= 0", value)
        require(is_number(momentum, 0) and momentum < 1, "momentum", "a number in [0, 1)", momentum)
        require(is_integer(steps, 1, 99), "steps", "an integer in [1, 99]", steps)
        require_betas(betas)
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "steps": steps, "betas": betas}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None and p.numel()]
            self._step_matrices([p for p in trained if p.ndim >= 2], group)
            self._step_vectors([p for p in trained if p.ndim < 2], group)
        return loss

    def _step_matrices(self, params: list[Tensor], group: dict[str, Any]) -> None:
        matrices, grads = [p.flatten(1) for p in params], [p.grad.flatten(1) for p in params]  # type: ignore[union-attr]
        momenta = []
        for p, matrix in zip(params, matrices, strict=True):
            state = self.state[p]
            if not state:
                state["momentum"] = torch.zeros_like(matrix)
            momenta.append(state["momentum"])
        muon(
            matrices,
            grads,
            momenta,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            nesterov=True,
            ns_coefficients=_MUON["ns_coefficients"],
            eps=_MUON["eps"],
            ns_steps=group["steps"],
            adjust_lr_fn="match_rms_adamw",
            has_complex=False,
        )
        for p, matrix in zip(params, matrices, strict=True):
            if not p.is_contiguous():  # then `flatten` has returned a copy
                p.copy_(matrix.view(p.shape))

    def _step_vectors(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for p in params:
            if not self.state[p]:
                moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                self.state[p].update(moments, step=torch.zeros((), dtype=torch.float32))
        states = [self.state[p] for p in params]
        adamw(
            params,
            [p.grad for p in params],  # type: ignore[misc]
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=_ADAMW["eps"],
            maximize=False,
        )
