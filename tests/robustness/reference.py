"""A small network with a batch of images, and FGSM and BIM on a linear model in float64 NumPy."""

import numpy as np
import torch
from torch import nn

from hypersphere.models import PlainCNN


def network(conv=nn.Conv2d, norm=nn.BatchNorm2d):
    torch.manual_seed(0)
    return PlainCNN(3, (4, 6, 6), 8, in_channels=1, image_size=8, num_classes=4, conv=conv, norm=norm)


def batch(n=12):
    generator = torch.Generator().manual_seed(1)
    return torch.rand(n, 1, 8, 8, generator=generator), torch.randint(4, (n,), generator=generator)


def loss_gradient(weight, x, y):
    """Return the gradient of the cross-entropy of softmax(W x) with respect to x."""
    logits = weight @ x
    p = np.exp(logits - logits.max())
    p /= p.sum()
    p[y] -= 1
    return weight.T @ p


def bim(weight, x, y, epsilon, step, steps):
    attacked = x.copy()
    for _ in range(steps):
        attacked = attacked + step * np.sign(loss_gradient(weight, attacked, y))
        attacked = np.clip(np.clip(attacked, x - epsilon, x + epsilon), 0, 1)
    return attacked
