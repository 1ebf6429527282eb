"""Adversarial training: a loss on clean and on attacked images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Num
from torch import Tensor

from hypersphere._modes import evaluation_mode
from hypersphere._validation import is_number, require
from hypersphere.robustness.attacks import FGSM, AttackFunction, Loss, Model

__all__ = ["adversarial_loss"]


def adversarial_loss(
    model: Model,
    images: Num[Tensor, "batch ..."],
    labels: Int[Tensor, " batch"],
    *,
    attack: AttackFunction | None = None,
    weight: float = 0.5,
    loss: Loss = F.cross_entropy,
) -> Float[Tensor, ""]:
    r"""Compute (1 − weight)·J(x, y) + weight·J(x̃, y) with attacked images x̃ (Goodfellow et al. 2015; thesis, C.1.2).

    The attack runs in evaluation mode, and x̃ is treated as data: no gradient flows through the attack. Clean and
    attacked images pass through the model as one batch, so the statistics of BatchNorm are those of the mixture.

    If the loss is a head, its schedule and running statistics are updated once, by the clean images. The loss of the
    attacked images is computed in evaluation mode, at the same point of the schedule.

    Args:
        model: maps images to logits, or to features if the loss is a head.
        images: (B, …) in [0, 1].
        labels: (B,).
        attack: FGSM() with ε = 8/255 if None.
        weight: weight of the attacked images, in [0, 1].
        loss: a function of outputs and labels, such as `torch.nn.functional.cross_entropy`, or a head.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> adversarial_loss(model, torch.rand(4, 2), torch.tensor([0, 1, 0, 1])).backward()
    """
    require(is_number(weight, 0, 1), "weight", "a number in [0, 1]", weight)
    # Attacks switch the model and the loss to evaluation mode, so they change neither statistics nor schedules.
    attacked = (FGSM() if attack is None else attack)(model, images, labels, loss)
    clean_output, attacked_output = model(torch.cat([images, attacked])).chunk(2)
    # Compute the loss of the attacked images first: the call on clean images below advances the schedule of a head.
    with evaluation_mode(loss):
        attacked_loss = loss(attacked_output, labels)
    return (1 - weight) * loss(clean_output, labels) + weight * attacked_loss
