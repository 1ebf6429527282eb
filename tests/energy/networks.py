"""Small networks that the tests of regularisers share."""

import torch
from torch import nn


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 12), nn.Linear(12, 12), nn.Linear(12, 5)
    )


def pyramid(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 12), nn.Linear(12, 4)).to(dtype)
