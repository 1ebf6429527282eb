"""Robustness: adversarial attacks, accuracy under attack, adversarial training."""

from hypersphere._deprecation import deprecated_names
from hypersphere.robustness.accuracy import (
    RobustAccuracy,
    Strength,
    accuracy_under,
    fooling_strength,
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
]

__getattr__ = deprecated_names(
    __name__,
    {"plot_accuracy": "hypersphere.report:accuracy_chart", "plot_strength": "hypersphere.report:strength_chart"},
)
