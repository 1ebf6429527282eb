"""Train generative adversarial networks: a generator against a discriminator (thesis, appendix D.7)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from hypersphere._modes import evaluation_mode
from hypersphere._validation import is_integer, require

__all__ = ["GanLosses", "discriminator_loss", "generate", "generator_loss", "train_gan"]


@dataclass(frozen=True)
class GanLosses:
    """The losses of all steps.

    Attributes:
        discriminator: losses of the discriminator, without regularisers.
        generator: losses of the generator.
    """

    discriminator: list[float]
    generator: list[float]

    def __repr__(self) -> str:
        return f"GanLosses({len(self.generator)} steps)"


def discriminator_loss(real: Float[Tensor, " batch"], fake: Float[Tensor, " batch"]) -> Float[Tensor, ""]:
    r"""Return −E log D(x) − E log(1 − D(G(z))) from scores; D is their sigmoid   (thesis, D.12).

    >>> discriminator_loss(torch.zeros(2), torch.zeros(2))  # 2·log 2
    tensor(1.3863)
    """
    # −log σ(s) = softplus(−s) and −log(1 − σ(s)) = softplus(s), which cannot overflow.
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def generator_loss(fake: Float[Tensor, " batch"]) -> Float[Tensor, ""]:
    r"""Return −E log D(G(z)), whose gradient does not vanish while the discriminator wins (thesis, below D.12).

    >>> generator_loss(torch.zeros(2))
    tensor(0.6931)
    """
    return F.softplus(-fake).mean()


def train_gan(
    generator: nn.Module,
    discriminator: nn.Module,
    images: Shaped[Tensor, "n channels height width"],
    *,
    steps: int,
    batch_size: int = 64,
    rate: float = 1e-4,
    regularizers: Sequence[Callable[[], Tensor]] = (),
    seed: int = 0,
    on_step: Callable[[int], None] | None = None,
) -> GanLosses:
    """Train a generator and a discriminator in place, in turn by one step of Adam each.

    Args:
        generator: maps noise (batch, generator.latent_dim) to images in [−1, 1].
        discriminator: maps images to one score each, high for real ones.
        images: real images, uint8 or floats in [0, 1].
        steps: number of steps of each network.
        batch_size: number of real and of generated images per step.
        rate: learning rate of both networks.
        regularizers: functions without arguments whose results are added to the loss of the discriminator.
        seed: seed for the order of the images and for the noise.
        on_step: called after each step with the number of steps so far.

    Returns:
        The losses of both networks at each step.

    Raises:
        FloatingPointError: if a loss is not finite.

    Example:
        >>> from hypersphere.models import Discriminator, Generator
        >>> networks = Generator(4, (8, 4)), Discriminator((4, 8), image_size=8)
        >>> len(train_gan(*networks, torch.rand(20, 3, 8, 8), steps=2, batch_size=5).generator)
        2
    """
    for name, value in (("steps", steps), ("batch_size", batch_size)):
        require(is_integer(value, 1), name, "an integer >= 1", value)
    require(batch_size <= len(images), "batch_size", f"at most {len(images)}, the number of images", batch_size)
    device = next(generator.parameters()).device
    rng = torch.Generator().manual_seed(seed)
    optimizers = [
        torch.optim.Adam(network.parameters(), lr=rate, betas=(0.5, 0.999)) for network in (discriminator, generator)
    ]
    generator.train()
    discriminator.train()
    losses = GanLosses([], [])
    batches = _batches(images, batch_size, rng)
    for step in range(1, steps + 1):
        real = next(batches).to(device)
        # This step does not change the generator, so its images need no gradient.
        with torch.no_grad():
            fake = generator(_noise(generator, batch_size, rng))
        loss = discriminator_loss(discriminator(real), discriminator(fake))
        total = loss + sum(regularizer() for regularizer in regularizers)
        _step(optimizers[0], total, "discriminator", step)
        losses.discriminator.append(float(loss.detach()))
        # Gradients of this loss also reach the discriminator; its optimiser discards them at its next step.
        loss = generator_loss(discriminator(generator(_noise(generator, batch_size, rng))))
        _step(optimizers[1], loss, "generator", step)
        losses.generator.append(float(loss.detach()))
        if on_step is not None:
            on_step(step)
    return losses


@torch.no_grad()
def generate(
    generator: nn.Module, count: int, *, batch_size: int = 500, seed: int = 0
) -> Float[Tensor, "count channels height width"]:
    """Return images of a generator in [0, 1], computed in evaluation mode.

    >>> from hypersphere.models import Generator
    >>> generate(Generator(4, (8, 4)), 3).shape
    torch.Size([3, 3, 8, 8])
    """
    rng = torch.Generator().manual_seed(seed)
    sizes = [min(batch_size, count - start) for start in range(0, count, batch_size)]
    with evaluation_mode(generator):
        parts = [generator(_noise(generator, size, rng)).cpu() for size in sizes]
    return (torch.cat(parts) + 1) / 2


def _noise(generator: nn.Module, count: int, rng: torch.Generator) -> Tensor:
    """Draw z ~ N(0, I)."""
    latent_dim = generator.latent_dim
    require(isinstance(latent_dim, int), "generator.latent_dim", "an integer", latent_dim)
    assert isinstance(latent_dim, int)
    # Drawn on the CPU, so that every device gets the same noise.
    return torch.randn(count, latent_dim, generator=rng).to(next(generator.parameters()).device)


def _batches(images: Tensor, size: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Yield batches in [−1, 1] without end: each pass has all images in a new order, without an incomplete batch."""
    scale = 255.0 if images.dtype == torch.uint8 else 1.0
    while True:
        order = torch.randperm(len(images), generator=rng)
        for rows in order[: len(order) // size * size].split(size):
            yield images[rows].float() / scale * 2 - 1


def _step(optimizer: torch.optim.Optimizer, loss: Tensor, name: str, step: int) -> None:
    if not math.isfinite(loss.detach()):
        raise FloatingPointError(f"the loss of the {name} became {float(loss.detach())} at step {step}")
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
