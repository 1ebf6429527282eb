"""How many images a model still gets right under attack, and how strong an attack has to be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hypersphere import sphere
from hypersphere._validation import is_number, require
from hypersphere.robustness.attacks import FGSM, Attack, DeepFool
from hypersphere.robustness.gradient import Loss, Model, evaluating

__all__ = ["RobustAccuracy", "Strength", "accuracy_under", "fooling_strength"]

Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class RobustAccuracy:
    """The share of images classified rightly: clean, and attacked with each ε.

    Attributes:
        attack: the name of the attack.
        transferred: whether the attack was made on another model.
        images: how many there were.
        clean: accuracy without an attack, in [0, 1].
        epsilons: the strengths.
        accuracies: one for each ε.
    """

    attack: str
    transferred: bool
    images: int
    clean: float
    epsilons: tuple[float, ...]
    accuracies: tuple[float, ...]

    def at(self, epsilon: float) -> float:
        """The accuracy at one of the strengths."""
        found = [place for place, known in enumerate(self.epsilons) if math.isclose(known, epsilon)]
        require(bool(found), "epsilon", f"one of {', '.join(f'{known:g}' for known in self.epsilons)}", epsilon)
        return self.accuracies[found[0]]


@dataclass(frozen=True, eq=False)
class Strength:
    """How far images were moved, in order of the data (thesis, figure C.1).

    Attributes:
        l2: (N,) Euclidean lengths of the perturbations.
        linf: (N,) their largest pixels.
        fooled: (N,) whether the model then errs.
        wrong: (N,) whether it erred before; these images are not moved.
    """

    l2: Tensor
    linf: Tensor
    fooled: Tensor
    wrong: Tensor

    def median(self, norm: str = "l2") -> float:
        """The median strength of the images that were right and are fooled, the others left out; NaN if none is."""
        require(norm in ("l2", "linf"), "norm", "'l2' or 'linf'", norm)
        moved = (self.l2 if norm == "l2" else self.linf)[self.fooled & ~self.wrong]
        return float(moved.median()) if len(moved) else math.nan

    def __repr__(self) -> str:
        return (
            f"Strength({len(self.fooled)} images, {float(self.fooled.double().mean()):.1%} fooled, "
            f"median l2 {self.median('l2'):.4g}, linf {self.median('linf'):.4g})"
        )


def accuracy_under(
    model: Model,
    data: Batches,
    attack: Attack | None = None,
    *,
    epsilons: Sequence[float] | None = None,
    source: Model | None = None,
    loss: Loss = F.cross_entropy,
) -> RobustAccuracy:
    """Measure accuracy, clean and under an attack of one strength or several.

    Args:
        model: images in [0, 1] to logits; a module is put in evaluation mode meanwhile.
        data: yields (images, labels).
        attack: one with a field `epsilon`; FGSM() if None.
        epsilons: strengths to use in turn; that of the attack if None.
        source: the model that the attack is made on, for transferred attacks; the model itself if None (white box).
        loss: what the attack ascends, of the output of `source` and labels.

    Example:
        >>> batch = (torch.tensor([[0.6, 0.4], [0.9, 0.1]]), torch.tensor([0, 0]))
        >>> accuracy_under(lambda x: x, [batch], epsilons=(0.05, 0.2, 0.5))
        RobustAccuracy(attack='FGSM', transferred=False, images=2, clean=1.0, epsilons=(0.05, 0.2, 0.5),
                       accuracies=(1.0, 0.5, 0.0))
    """
    attack = FGSM() if attack is None else attack
    with_strength = dataclasses.is_dataclass(attack) and hasattr(attack, "epsilon")
    require(with_strength, "attack", "a dataclass with a field epsilon (else see fooling_strength)", attack)
    strengths = (attack.epsilon,) if epsilons is None else tuple(epsilons)  # type: ignore[attr-defined]
    sound = bool(strengths) and all(is_number(strength, 0) for strength in strengths)
    require(sound, "epsilons", "numbers >= 0", strengths)
    attacks = [dataclasses.replace(attack, epsilon=strength) for strength in strengths]  # type: ignore[type-var]
    victim = model if source is None else source
    images, clean, hits = 0, 0, [0] * len(attacks)
    for x, y in data:
        images += len(y)
        clean += int((_predict(model, x) == y).sum())
        for place, one in enumerate(attacks):
            hits[place] += int((_predict(model, one(victim, x, y, loss)) == y).sum())
    require(images > 0, "data", "something that yields at least one image", data)
    name, accuracies = type(attack).__name__, tuple(hit / images for hit in hits)
    return RobustAccuracy(name, source is not None, images, clean / images, strengths, accuracies)


def fooling_strength(
    model: Model, data: Batches, attack: Attack | None = None, *, source: Model | None = None
) -> Strength:
    """Measure how far images have to be moved until a model errs.

    Args:
        model: images in [0, 1] to logits; a module is put in evaluation mode meanwhile.
        data: yields (images, labels).
        attack: one that seeks the smallest perturbation; DeepFool() if None.
        source: the model that the attack is made on; the model itself if None.

    Example:
        >>> batch = (torch.tensor([[0.6, 0.4], [0.9, 0.1]]), torch.tensor([0, 0]))
        >>> fooling_strength(lambda x: x, [batch], DeepFool("linf"))
        Strength(2 images, 100.0% fooled, median l2 0.1444, linf 0.1021)
    """
    attack = DeepFool() if attack is None else attack
    parts = []
    for x, y in data:
        moved = attack(model if source is None else source, x, y)
        change = (moved - x).flatten(1)
        largest = change.abs().amax(1) if change.shape[1] else change.new_zeros(len(change))
        parts.append((sphere.norm(change), largest, _predict(model, moved) != y, _predict(model, x) != y))
    require(bool(parts), "data", "something that yields at least one batch", data)
    return Strength(*(torch.cat(part) for part in zip(*parts, strict=True)))


@torch.no_grad()
def _predict(model: Model, images: Tensor) -> Tensor:
    with evaluating(model):
        return model(images).argmax(1)
