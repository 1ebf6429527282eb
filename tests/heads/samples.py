"""Batches that the tests of heads share."""

import numpy as np
import torch

import oracle


def problem(batch=6, dim=5, classes=4, dtype=torch.float64, seed=0):
    """Return features with norms of about 3√dim, and labels."""
    generator = torch.Generator().manual_seed(1000 + seed)  # not the seed that class vectors are drawn from
    x = 3 * torch.randn(batch, dim, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(classes, (batch,), generator=generator)


def angles(x, w):
    """Return all angles between rows of x and w, computed by the oracle."""
    return np.array([[oracle.angle(a, b) for b in w.detach().numpy()] for a in x.detach().numpy()])
