"""Attacks of the library foolbox, with the interface of this package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere.robustness.attacks import Attack, Loss, Model

__all__ = ["Foolbox"]


@dataclass(frozen=True)
class Foolbox(Attack):
    """An attack of the library foolbox (extra `attack`), on any callable. Modes and gradients do not change.

    Args:
        attack: an attack of `foolbox.attacks`, which also defines the loss.
        epsilon: the largest perturbation, in the norm of the attack; None for attacks that minimise it.

    Example: `Foolbox(foolbox.attacks.L2CarliniWagnerAttack())(model, images, labels)`.
    """

    attack: Any
    epsilon: float | None = None

    def perturb(self, model: Model, images: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return attacked images."""
        from foolbox.models.pytorch import PyTorchModel

        # foolbox accepts only modules and warns in training mode. `eval` reaches the wrapper, not the model inside.
        target = PyTorchModel(_IsolatedModel(model).eval(), bounds=(0, 1), device=images.device)
        _, attacked, _ = self.attack(target, images, labels, epsilons=self.epsilon)
        return attacked.detach()


class _IsolatedModel(nn.Module):
    """A model whose output is differentiable with respect to its input only.

    foolbox calls `backward`, which would otherwise accumulate gradients in the parameters.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.hidden_model = [model]  # in a list, so that it is not registered as a submodule and `eval` skips it

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the model."""
        return _InputGradientOnly.apply(x, self.hidden_model[0])


class _InputGradientOnly(torch.autograd.Function):
    """Call a model in a separate graph and differentiate that graph with respect to the input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Model) -> Tensor:
        with torch.enable_grad():  # a custom function runs forward without a graph
            ctx.x = x.detach().requires_grad_()
            ctx.output = model(ctx.x)
        return ctx.output.detach()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return torch.autograd.grad(ctx.output, ctx.x, grad_output)[0], None
