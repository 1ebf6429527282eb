import pytest
import torch
from torch import nn

from hypersphere.models import Discriminator, Generator
from hypersphere.training import discriminator_loss, generate, generator_loss, train_gan


def test_gan_losses_equal_the_formulas_of_the_thesis():
    real, fake = torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    value = real.sigmoid().log().mean() + (1 - fake.sigmoid()).log().mean()  # V(G, D)
    assert float(discriminator_loss(real, fake)) == pytest.approx(-float(value))
    assert float(generator_loss(fake)) == pytest.approx(-float(fake.sigmoid().log().mean()))


def test_gan_losses_of_extreme_scores_are_finite():
    extreme = torch.tensor([1e4, -1e4])
    assert torch.isfinite(discriminator_loss(extreme, extreme))
    assert torch.isfinite(generator_loss(extreme))


class Point(nn.Module):
    """A generator that ignores the noise: every image has one brightness, which is learned."""

    latent_dim = 2

    def __init__(self):
        super().__init__()
        self.brightness = nn.Parameter(torch.tensor(-0.9))

    def forward(self, noise):
        return self.brightness.expand(len(noise), 1, 2, 2)


class Judge(nn.Module):
    """A discriminator of the mean brightness."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, images):
        return self.layer(images.flatten(1).mean(1, keepdim=True)).squeeze(1)


def test_train_gan_moves_the_generator_towards_the_real_images():
    images = torch.full((40, 1, 2, 2), 0.75)  # 0.5 in [-1, 1]
    generator, steps = Point(), []
    torch.manual_seed(0)
    losses = train_gan(generator, Judge(), images, steps=400, batch_size=8, rate=0.01, on_step=steps.append)
    assert float(generator.brightness.detach()) > 0
    assert len(losses.discriminator) == len(losses.generator) == 400
    assert steps == list(range(1, 401))


def test_train_gan_applies_regularizers_to_the_discriminator():
    def trained(weight):
        torch.manual_seed(0)
        judge = Judge()
        penalty = [lambda: weight * judge.layer.weight.square().sum()]
        train_gan(Point(), judge, torch.rand(40, 1, 2, 2), steps=50, batch_size=8, rate=0.05, regularizers=penalty)
        return float(judge.layer.weight.detach().abs())

    assert trained(10.0) < trained(0.0)


def test_train_gan_is_reproducible_and_depends_on_the_seed():
    def trained(seed):
        torch.manual_seed(0)
        networks = Generator(4, (8, 4)), Discriminator((4, 8), image_size=8)
        images = torch.randint(256, (30, 3, 8, 8), dtype=torch.uint8)
        train_gan(*networks, images, steps=3, batch_size=6, seed=seed)
        return generate(networks[0], 5, batch_size=2)

    assert torch.equal(trained(1), trained(1))
    assert not torch.equal(trained(1), trained(2))
    assert trained(1).shape == (5, 3, 8, 8)
    assert trained(1).min() >= 0
    assert trained(1).max() <= 1


def test_train_gan_scales_uint8_images_to_0_to_1():
    def losses(images):
        torch.manual_seed(0)
        return train_gan(Point(), Judge(), images, steps=3, batch_size=4)

    images = torch.randint(256, (9, 1, 2, 2), dtype=torch.uint8)
    assert losses(images).discriminator == pytest.approx(losses(images.double() / 255).discriminator, rel=1e-5)


def test_train_gan_reports_divergence_with_the_network_and_step():
    with pytest.raises(FloatingPointError, match="loss of the discriminator became nan at step 1"):
        train_gan(Point(), Judge(), torch.full((4, 1, 2, 2), torch.nan), steps=1, batch_size=4)


@pytest.mark.parametrize("options", [{"steps": 0}, {"steps": 1, "batch_size": 5}])
def test_train_gan_rejects_invalid_arguments(options):
    with pytest.raises(ValueError, match=f"{list(options)[-1]} must be"):
        train_gan(Point(), Judge(), torch.zeros(4, 1, 2, 2), **{"batch_size": 4, **options})
