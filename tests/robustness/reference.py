"""FGSM and BIM on a linear model, from the definition, in float64 NumPy."""

import numpy as np


def slope(weight, x, y):
    """The gradient of the cross entropy of softmax(W x) with respect to x."""
    logits = weight @ x
    p = np.exp(logits - logits.max())
    p /= p.sum()
    p[y] -= 1
    return weight.T @ p


def bim(weight, x, y, epsilon, step, steps):
    moved = x.copy()
    for _ in range(steps):
        moved = moved + step * np.sign(slope(weight, moved, y))
        moved = np.clip(np.clip(moved, x - epsilon, x + epsilon), 0, 1)
    return moved
