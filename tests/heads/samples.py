"""Batches that the tests of heads share."""

import numpy as np
import torch

import oracle


def problem(batch=6, dim=5, classes=4, dtype=torch.float64, seed=0):
    """Return features with norms of about 3√dim, and labels."""
    generator = torch.Generator().manual_seed(1000 + seed)  # not the seed that class vectors are drawn from
    x = 3 * torch.randn(batch, dim, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(classes, (batch,), generator=generator)


def class_problem(batch=9, dim=6, classes=40, seed=0):
    """Return features, class vectors, labels of which one is −1, and biases."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, dim, generator=generator, dtype=torch.float64)
    w = torch.randn(classes, dim, generator=generator, dtype=torch.float64)
    y = torch.randint(-1, classes, (batch,), generator=generator)
    y[0], y[1], y[2] = -1, 0, classes - 1
    bias = torch.randn(classes, generator=generator, dtype=torch.float64)
    return x, w, y, bias


def features_near_class_vectors(dim, classes, batch=20):
    """Return features, labels and class vectors as NumPy arrays, with target angles below π − 0.5."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((classes, dim))
    labels = rng.integers(classes, size=batch)
    features = weight[labels] / np.linalg.norm(weight[labels], axis=1, keepdims=True)
    return features + 0.6 * rng.standard_normal((batch, dim)), labels, weight


def angles(x, w):
    """Return all angles between rows of x and w, computed by the oracle."""
    return np.array([[oracle.angle(a, b) for b in w.detach().numpy()] for a in x.detach().numpy()])
