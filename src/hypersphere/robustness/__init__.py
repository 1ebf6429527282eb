"""Robustness: adversarial attacks, accuracy under attack, adversarial training."""

from hypersphere.robustness.accuracy import (
    RobustAccuracy,
    Strength,
    accuracy_under,
    fooling_strength,
    plot_accuracy,
    plot_strength,
)
from hypersphere.robustness.attacks import ATTACKS, BIM, FGSM, Attack, Classifier, DeepFool, Foolbox
from hypersphere.robustness.training import adversarial_loss

__all__ = [
    "ATTACKS",
    "BIM",
    "FGSM",
    "Attack",
    "Classifier",
    "DeepFool",
    "Foolbox",
    "RobustAccuracy",
    "Strength",
    "accuracy_under",
    "adversarial_loss",
    "fooling_strength",
    "plot_accuracy",
    "plot_strength",
]
