"""Adversarial training: a loss on images and on their attacked versions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hypersphere._validation import is_number, require
from hypersphere.robustness.attacks import FGSM, Attack
from hypersphere.robustness.gradient import Loss, Model

__all__ = ["adversarial_loss"]


def adversarial_loss(
    model: Model,
    images: Tensor,
    labels: Tensor,
    *,
    attack: Attack | None = None,
    weight: float = 0.5,
    loss: Loss = F.cross_entropy,
) -> Tensor:
    r"""(1 − weight)·J(x, y) + weight·J(x̃, y) with x̃ attacked anew (Goodfellow et al. 2015; thesis, C.1.2).

    x̃ is made in evaluation mode and counts as data. Both go through the model as one batch in its own mode, so batch
    statistics are those of the mixture, and the loss is called twice (a head's schedule then advances twice a step).

    Args:
        model: images to logits, or to features if the loss is a head.
        images: (B, …) in [0, 1].
        labels: (B,).
        attack: how images are attacked; FGSM() with ε = 8/255 if None.
        weight: the share of the attacked images in the loss, in [0, 1].
        loss: of outputs and labels: `torch.nn.functional.cross_entropy` or a head.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> adversarial_loss(model, torch.rand(4, 2), torch.tensor([0, 1, 0, 1])).backward()
    """
    require(is_number(weight, 0, 1), "weight", "a number in [0, 1]", weight)
    attacked = (FGSM() if attack is None else attack)(model, images, labels, loss)
    clean, hard = model(torch.cat([images, attacked])).chunk(2)
    return (1 - weight) * loss(clean, labels) + weight * loss(hard, labels)
