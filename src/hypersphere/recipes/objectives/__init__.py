"""Angular margins: features, classification, verification and identification (chapters 1 and 2, appendix A).

The face experiments of chapter 5 and appendix D are here too, because they share networks and data.
"""

from hypersphere.recipes.objectives import (
    angles,
    classification,
    faces,
    features,
    growing_head,
    label_noise,
    open_set,
    sphereface_plus,
)
from hypersphere.recipes.recipe import Recipe

__all__ = ["RECIPES"]

RECIPES: tuple[Recipe, ...] = (
    features.DIGITS,
    angles.RECONSTRUCTION,
    angles.HARDNESS,
    features.MNIST,
    classification.TARGET,
    classification.MNIST,
    classification.CIFAR10,
    classification.CIFAR100,
    faces.L_SOFTMAX,
    features.FACES,
    faces.LFW,
    faces.DEPTH,
    faces.LOSSES,
    features.CLASS_VECTORS,
    faces.ABLATION,
    open_set.OMNIGLOT,
    label_noise.LABEL_NOISE,
    label_noise.FACE_LABEL_NOISE,
    growing_head.GROWING_HEAD,
    sphereface_plus.PLUS,
    sphereface_plus.TRAINING_SETS,
)
