"""Attacks of foolbox as ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypersphere.robustness.gradient import Loss, Model, check_batch, evaluating

__all__ = ["Foolbox"]


@dataclass(frozen=True)
class Foolbox:
    """Any attack of foolbox (extra `attack`) on any callable, as one of ours: no trace is left in the model.

    Args:
        attack: an attack of `foolbox.attacks`; it has a loss of its own.
        epsilon: the largest perturbation, in the norm of the attack; None for attacks that seek the smallest.

    Example: `Foolbox(foolbox.attacks.L2CarliniWagnerAttack())(model, images, labels)`.
    """

    attack: Any
    epsilon: float | None = None

    def __call__(self, model: Model, images: Tensor, labels: Tensor, /, loss: Loss = F.cross_entropy) -> Tensor:
        """Return attacked images."""
        from foolbox.models.pytorch import PyTorchModel

        check_batch(images, labels)
        with evaluating(model):
            victim = PyTorchModel(_Isolated(model).eval(), bounds=(0, 1), device=images.device)
            _, attacked, _ = self.attack(victim, images.detach(), labels, epsilons=self.epsilon)
        return attacked.detach()


class _Isolated(nn.Module):
    """A model whose output depends on its input alone: foolbox goes backward through all, and would leave gradients."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.call = [model]  # in a list, so that it is no submodule and nothing is done to it

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the model."""
        return _Isolate.apply(x, self.call[0])


class _Isolate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Model) -> Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = model(ctx.x)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.autograd.grad(ctx.y, ctx.x, gradient)[0], None
