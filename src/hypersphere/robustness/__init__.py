"""Robustness: attacks, accuracy under them, and training against them."""

from hypersphere.robustness.accuracy import RobustAccuracy, Strength, accuracy_under, fooling_strength
from hypersphere.robustness.attacks import ATTACKS, BIM, FGSM, Attack, DeepFool
from hypersphere.robustness.bridge import Foolbox
from hypersphere.robustness.classifier import Classifier
from hypersphere.robustness.plot import plot_accuracy, plot_strength
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
