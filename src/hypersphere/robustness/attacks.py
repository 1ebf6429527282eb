r"""Attacks: images x̃ near x that a model takes for something else.

An attack is called with a model, images (B, …) in [0, 1] and their true labels, and returns images of the same kind.
The model is anything that maps images to logits. With `loss=head` it may map images to the features that a head of
`hypersphere.heads` takes. Modules are attacked in evaluation mode, and neither their modes nor their gradients change.
To add an attack, write a frozen dataclass and list it in ATTACKS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from hypersphere._validation import is_number, require
from hypersphere.robustness.deepfool import fooled
from hypersphere.robustness.gradient import Loss, Model, check_batch, evaluating, image_gradient

__all__ = ["ATTACKS", "BIM", "FGSM", "Attack", "DeepFool"]


class Attack(Protocol):
    """What all attacks have in common."""

    def __call__(self, model: Model, images: Tensor, labels: Tensor, /, loss: Loss = F.cross_entropy) -> Tensor:
        """Return attacked images in [0, 1]."""


@dataclass(frozen=True)
class FGSM:
    r"""One step up the loss, as far as allowed in every pixel: x̃ = x + ε·sign ∇ₓJ(x, y) (thesis, C.1.2).

    >>> import torch
    >>> images, labels = torch.full((1, 2), 0.5), torch.tensor([0])
    >>> FGSM(epsilon=0.1)(lambda x: x, images, labels)
    tensor([[0.4000, 0.6000]])
    """

    epsilon: float = 8 / 255

    def __post_init__(self) -> None:
        require(is_number(self.epsilon, 0, 1), "epsilon", "a number in [0, 1]", self.epsilon)

    def __call__(self, model: Model, images: Tensor, labels: Tensor, /, loss: Loss = F.cross_entropy) -> Tensor:
        """Return attacked images."""
        return BIM(self.epsilon, self.epsilon, 1)(model, images, labels, loss)


@dataclass(frozen=True)
class BIM:
    r"""Small steps of FGSM, kept within ε of the image in every pixel (thesis, C.1.2).

        x̃ ← clip_{x, ε}(x̃ + τ·sign ∇J(x̃, y))

    >>> import torch
    >>> images, labels = torch.full((1, 2), 0.5), torch.tensor([0])
    >>> BIM(epsilon=0.1, step=0.04, steps=20)(lambda x: x, images, labels)
    tensor([[0.4000, 0.6000]])
    """

    epsilon: float = 8 / 255
    step: float = 2 / 255
    steps: int = 20

    def __post_init__(self) -> None:
        require(is_number(self.epsilon, 0, 1), "epsilon", "a number in [0, 1]", self.epsilon)
        require(is_number(self.step, 0, 1), "step", "a number in [0, 1]", self.step)
        require(isinstance(self.steps, int) and self.steps >= 1, "steps", "a whole number >= 1", self.steps)

    def __call__(self, model: Model, images: Tensor, labels: Tensor, /, loss: Loss = F.cross_entropy) -> Tensor:
        """Return attacked images."""
        check_batch(images, labels)
        images = images.detach()
        low, high = (images - self.epsilon).clamp(min=0), (images + self.epsilon).clamp(max=1)
        attacked = images
        with evaluating(model, loss):
            for _ in range(self.steps):
                slope = image_gradient(model, attacked, labels, loss)
                attacked = (attacked + self.step * slope.sign()).clamp(low, high)
        return attacked


@dataclass(frozen=True)
class DeepFool:
    r"""The nearest boundary of the linearised model, crossed, until the class changes (Moosavi-Dezfooli et al. 2016).

    With f_k the k-th logit less that of the true class, and w_k its gradient, the step is (|f_k|/‖w_k‖²)·w_k ("l2") or
    (|f_k|/‖w_k‖₁)·sign w_k ("linf") for the k whose boundary is nearest. Images that are misclassified already stay. It
    asks for logits and so has no use for a loss.

    Args:
        norm: "l2" or "linf", what is to be small.
        steps: the most there are.
        overshoot: the whole perturbation is stretched by this share, to be across.
        candidates: how many of the likeliest classes are considered.
        nudge: added to the length of each step, so that none is too short to cross.

    >>> import torch
    >>> images, labels = torch.tensor([[0.6, 0.4]]), torch.tensor([0])
    >>> DeepFool(overshoot=0.02, nudge=0.0)(lambda x: x, images, labels)
    tensor([[0.4980, 0.5020]])
    """

    norm: str = "l2"
    steps: int = 50
    overshoot: float = 0.02
    candidates: int = 10
    nudge: float = 1e-4

    def __post_init__(self) -> None:
        require(self.norm in ("l2", "linf"), "norm", "'l2' or 'linf'", self.norm)
        require(isinstance(self.steps, int) and self.steps >= 1, "steps", "a whole number >= 1", self.steps)
        require(is_number(self.overshoot, 0), "overshoot", "a number >= 0", self.overshoot)
        whole = isinstance(self.candidates, int) and self.candidates >= 2
        require(whole, "candidates", "a whole number >= 2", self.candidates)
        require(is_number(self.nudge, 0), "nudge", "a number >= 0", self.nudge)

    def __call__(self, model: Model, images: Tensor, labels: Tensor, /, loss: Loss = F.cross_entropy) -> Tensor:
        """Return attacked images."""
        check_batch(images, labels)
        with evaluating(model):
            return fooled(
                model,
                images.detach(),
                labels,
                linf=self.norm == "linf",
                steps=self.steps,
                overshoot=self.overshoot,
                candidates=self.candidates,
                nudge=self.nudge,
            )


ATTACKS: dict[str, type[Attack]] = {"fgsm": FGSM, "bim": BIM, "deepfool": DeepFool}
