import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from hypersphere.models import Discriminator, Generator


def test_discriminator_accepts_spectrally_normalised_layers():
    def spectral(factory):
        return lambda *args, **kwargs: parametrizations.spectral_norm(factory(*args, **kwargs))

    model = Discriminator((4, 6), image_size=8, conv=spectral(nn.Conv2d), linear=spectral(nn.Linear)).eval()
    assert model(Generator(5, (8, 4))(torch.randn(3, 5))).shape == (3,)
    norms = [
        torch.linalg.matrix_norm(m.weight.detach().flatten(1), 2) for m in model.modules() if hasattr(m, "kernel_size")
    ]
    assert all(0.9 < float(norm) < 1.1 for norm in norms)


def test_generator_images_are_in_the_range_of_tanh():
    images = Generator(5, (8, 4))(10 * torch.randn(3, 5))
    assert images.shape == (3, 3, 8, 8)
    assert images.abs().max() <= 1


def test_discriminator_rejects_an_image_size_that_cannot_be_halved():
    with pytest.raises(ValueError, match="image_size must be a multiple of 8, not 20"):
        Discriminator(image_size=20)
