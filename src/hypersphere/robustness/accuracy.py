"""Accuracy of a model under attack, and the size of the perturbations that fool it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from hypersphere import sphere
from hypersphere._modes import evaluation_mode
from hypersphere._validation import is_number, require
from hypersphere.robustness.attacks import FGSM, AttackFunction, DeepFool, Loss, Model

__all__ = ["RobustAccuracy", "Strength", "accuracy_under", "fooling_strength"]

Batches: TypeAlias = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class RobustAccuracy:
    """Result of `accuracy_under`: accuracies in [0, 1], without an attack and for each ε.

    Attributes:
        attack: name of the attack.
        transferred: True if the attack was computed on another model.
        images: number of images.
        clean: accuracy without an attack.
        epsilons: attack strengths ε.
        accuracies: accuracy for each ε.
    """

    attack: str
    transferred: bool
    images: int
    clean: float
    epsilons: tuple[float, ...]
    accuracies: tuple[float, ...]

    def at(self, epsilon: float) -> float:
        """Return the accuracy for one of `epsilons`."""
        for measured, accuracy in zip(self.epsilons, self.accuracies, strict=True):
            if math.isclose(measured, epsilon):
                return accuracy
        raise ValueError(f"epsilon must be one of {', '.join(f'{e:g}' for e in self.epsilons)}, not {epsilon!r}")


@dataclass(frozen=True, eq=False)
class Strength:
    """Result of `fooling_strength`: the perturbation of each image (thesis, figure C.1).

    Attributes:
        l2: Euclidean norms of the perturbations.
        linf: their largest absolute entries.
        fooled: True where the model misclassifies the attacked image.
        wrong: True where it misclassifies the original image. DeepFool does not change such images.
    """

    l2: Float[Tensor, " images"]
    linf: Float[Tensor, " images"]
    fooled: Bool[Tensor, " images"]
    wrong: Bool[Tensor, " images"]

    def median(self, norm: str = "l2") -> float:
        """Return the median norm over images that are misclassified only if attacked, or NaN if there are none."""
        selected = self.norms(norm)[self.fooled & ~self.wrong]
        # `Tensor.median` would return the lower of two middle values instead of their mean.
        return float(selected.double().quantile(0.5)) if len(selected) else math.nan

    def norms(self, norm: str) -> Float[Tensor, " images"]:
        """Return `l2` or `linf`, by name."""
        require(norm in ("l2", "linf"), "norm", "'l2' or 'linf'", norm)
        return self.l2 if norm == "l2" else self.linf

    def __repr__(self) -> str:
        return (
            f"Strength({len(self.fooled)} images, {float(self.fooled.double().mean()):.1%} fooled, "
            f"median l2 {self.median('l2'):.4g}, linf {self.median('linf'):.4g})"
        )


def accuracy_under(
    model: Model,
    data: Batches,
    attack: AttackFunction | None = None,
    *,
    epsilons: Sequence[float] | None = None,
    source: Model | None = None,
    loss: Loss = F.cross_entropy,
) -> RobustAccuracy:
    """Measure the accuracy without an attack and under an attack of one or several strengths.

    Args:
        model: maps images in [0, 1] to logits. A module is put into evaluation mode during the call.
        data: yields (images, labels).
        attack: a dataclass with a field `epsilon`; FGSM() if None.
        epsilons: attack strengths; `attack.epsilon` if None.
        source: the model on which a transferred attack is computed; `model` itself if None (white box).
        loss: the function that the attack increases. Its arguments are the output of `source` and the labels.

    Example:
        >>> batch = (torch.tensor([[0.6, 0.4], [0.9, 0.1]]), torch.tensor([0, 0]))
        >>> accuracy_under(lambda x: x, [batch], epsilons=(0.05, 0.2, 0.5))
        RobustAccuracy(attack='FGSM', transferred=False, images=2, clean=1.0, epsilons=(0.05, 0.2, 0.5),
                       accuracies=(1.0, 0.5, 0.0))
    """
    attack = FGSM() if attack is None else attack
    has_epsilon = dataclasses.is_dataclass(attack) and hasattr(attack, "epsilon")
    require(has_epsilon, "attack", "a dataclass with a field epsilon (otherwise use fooling_strength)", attack)
    strengths = (attack.epsilon,) if epsilons is None else epsilons  # type: ignore[union-attr]
    are_strengths = isinstance(strengths, (tuple, list)) and all(is_number(strength, 0) for strength in strengths)
    require(are_strengths and len(strengths) > 0, "epsilons", "a sequence of numbers >= 0", strengths)
    strengths = tuple(strengths)
    # `replace` calls the constructor, which validates the strength.
    attacks = [dataclasses.replace(attack, epsilon=strength) for strength in strengths]  # type: ignore[type-var]
    # A transferred attack is computed on the source, but its images are classified by the model.
    attacked_model = model if source is None else source
    images, clean_correct, correct = 0, 0, [0] * len(attacks)
    for x, y in data:
        images += len(y)
        clean_correct += int((_predict(model, x) == y).sum())
        for i, scaled_attack in enumerate(attacks):
            attacked = scaled_attack(attacked_model, x, y, loss)
            correct[i] += int((_predict(model, attacked) == y).sum())
    require(images > 0, "data", "an iterable that yields at least one image", data)
    accuracies = tuple(count / images for count in correct)
    return RobustAccuracy(
        type(attack).__name__, source is not None, images, clean_correct / images, strengths, accuracies
    )


def fooling_strength(
    model: Model, data: Batches, attack: AttackFunction | None = None, *, source: Model | None = None
) -> Strength:
    """Measure the size of the perturbation with which an attack makes the model misclassify each image.

    Args:
        model: maps images in [0, 1] to logits. A module is put into evaluation mode during the call.
        data: yields (images, labels).
        attack: an attack that minimises the perturbation; DeepFool() if None.
        source: the model on which the attack is computed; `model` itself if None.

    Example:
        >>> batch = (torch.tensor([[0.6, 0.4], [0.9, 0.1]]), torch.tensor([0, 0]))
        >>> fooling_strength(lambda x: x, [batch], DeepFool("linf"))
        Strength(2 images, 100.0% fooled, median l2 0.3608, linf 0.2551)
    """
    attack = DeepFool() if attack is None else attack
    parts = []
    for x, y in data:
        attacked = attack(model if source is None else source, x, y)
        change = (attacked - x).flatten(1)
        # `amax` raises an error for images without pixels.
        largest = change.abs().amax(1) if change.shape[1] else change.new_zeros(len(change))
        parts.append((sphere.norm(change), largest, _predict(model, attacked) != y, _predict(model, x) != y))
    require(bool(parts), "data", "an iterable that yields at least one batch", data)
    return Strength(*(torch.cat(part) for part in zip(*parts, strict=True)))


@torch.no_grad()
def _predict(model: Model, images: Tensor) -> Tensor:
    with evaluation_mode(model):
        return model(images).argmax(1)
