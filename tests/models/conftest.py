"""Small networks of every family with 2-d convolutions."""

import pytest
from torch import nn

from hypersphere.models import Discriminator, PlainCNN, ResNet, SphereFaceNet


@pytest.fixture
def small_networks():
    """Return a function that maps a convolution factory to networks and the image sizes that they take."""

    def make(conv) -> list[tuple[nn.Module, tuple[int, int]]]:
        return [
            (PlainCNN(3, (4, 4, 6), 8, image_size=8, norm=None, conv=conv), (8, 8)),
            (PlainCNN(4, (4, 6, 6), 8, image_size=32, large_stem=True, conv=conv), (32, 32)),
            (ResNet((1, 2), (4, 6), conv=conv), (8, 8)),
            (ResNet((1, 1), (4, 6), large_stem=True, shortcut="projection", conv=conv), (16, 16)),
            (SphereFaceNet((0, 1), (4, 6), 8, image_size=(9, 7), conv=conv), (9, 7)),
            (Discriminator((4, 6), image_size=8, conv=conv), (8, 8)),
        ]

    return make
