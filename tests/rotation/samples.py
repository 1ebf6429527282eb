"""Models of the tests of rotations, and functions that change or compare them."""

import contextlib
import copy

import torch
from torch import nn

from hypersphere.rotation import rotation_parameters


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


def cnn6(classes=100):
    """CNN-6 of the OPT paper without biases (its Table 14)."""

    def conv(i):
        return nn.Conv2d(i, 64, 3, padding=1, bias=False)

    body = [
        conv(3),
        conv(64),
        nn.MaxPool2d(2),
        conv(64),
        conv(64),
        nn.MaxPool2d(2),
        conv(64),
        conv(64),
        nn.MaxPool2d(2),
    ]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(1024, 64, bias=False), nn.Linear(64, classes, bias=False))


def perturb_(model, size=0.2):
    """Add fixed noise to all free parameters, so that no rotation is the identity."""
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in rotation_parameters(model):
            p += size * torch.randn(p.shape, generator=random).to(p)


@contextlib.contextmanager
def left_unchanged(model):
    """Check that the block changes no name, value or `requires_grad` of the model's state."""
    before = copy.deepcopy(model.state_dict())
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    yield
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == trained
