"""Generator and discriminator of 32×32 images (SN-GAN)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from hypersphere._validation import require
from hypersphere.models.units import ByChannels, Maker, layers_by, relu

__all__ = ["Discriminator", "Generator", "leaky_relu"]

SLOPE = 0.1


def leaky_relu(channels: int) -> nn.Module:
    """A leaky ReLU of slope 0.1 for any number of channels.

    >>> leaky_relu(64)
    LeakyReLU(negative_slope=0.1)
    """
    return nn.LeakyReLU(SLOPE)


class Generator(nn.Module):
    """Noise (B, latent_dim) to images in [−1, 1]: a dense layer, three 4×4 deconvolutions, a convolution (table D.5a).

    As in the table, nothing stands between the dense layer and the first deconvolution.

    Args:
        latent_dim: numbers of a noise vector.
        widths: channels of the first image and after each deconvolution, which doubles its sides.
        out_channels: channels of the image.
        side: of the first image; the last one is 2^(len(widths) − 1) times as large.
        norm: maker of a norm from a number of channels, or None.
        activation: maker of an activation from a number of channels, or None.

    Example:
        >>> import torch
        >>> Generator(8, (16, 8, 8, 4))(torch.zeros(2, 8)).shape
        torch.Size([2, 3, 32, 32])
    """

    def __init__(
        self,
        latent_dim: int = 128,
        widths: Sequence[int] = (512, 256, 128, 64),
        *,
        out_channels: int = 3,
        side: int = 4,
        norm: ByChannels | None = nn.BatchNorm2d,
        activation: ByChannels | None = relu,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(latent_dim, widths[0] * side**2), nn.Unflatten(1, (widths[0], side, side))]
        for before, width in pairwise(widths):
            layers.append(nn.ConvTranspose2d(before, width, 4, stride=2, padding=1))
            layers += layers_by((norm, activation), width)
        self.layers = nn.Sequential(*layers, nn.Conv2d(widths[-1], out_channels, 3, padding=1), nn.Tanh())
        self.latent_dim = latent_dim

    def forward(self, noise: Tensor) -> Tensor:
        """Map noise (B, latent_dim) to images (B, out_channels, H, W)."""
        return self.layers(noise)


class Discriminator(nn.Module):
    """Images to one score each: 3×3 and 4×4 stride-2 convolutions in turn, a last 3×3, a dense layer (table D.5b).

    Spectral normalisation is a matter of makers: `conv=lambda *a, **k: spectral_norm(nn.Conv2d(*a, **k))`.

    Args:
        widths: filters of each stage; every one but the last halves the sides of the image.
        in_channels: channels of the image.
        image_size: side of the image.
        conv: maker of convolutions, called as `nn.Conv2d` is.
        linear: maker of the dense layer, called as `nn.Linear` is.
        activation: maker of an activation from a number of channels, or None.

    Example:
        >>> import torch
        >>> Discriminator((4, 8, 8, 16))(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2])
    """

    def __init__(
        self,
        widths: Sequence[int] = (64, 128, 256, 512),
        *,
        in_channels: int = 3,
        image_size: int = 32,
        conv: Maker = nn.Conv2d,
        linear: Maker = nn.Linear,
        activation: ByChannels | None = leaky_relu,
    ) -> None:
        super().__init__()
        side, left_over = divmod(image_size, 2 ** (len(widths) - 1))
        require(side >= 1 and not left_over, "image_size", f"a multiple of {2 ** (len(widths) - 1)}", image_size)
        layers: list[nn.Module] = []
        before = in_channels
        for stage, width in enumerate(widths):
            layers += [conv(before, width, 3, padding=1), *layers_by((activation,), width)]
            if stage < len(widths) - 1:
                layers += [conv(width, width, 4, stride=2, padding=1), *layers_by((activation,), width)]
            before = width
        self.layers = nn.Sequential(*layers, nn.Flatten())
        self.feature_dim = before * side**2
        self.score = linear(self.feature_dim, 1)

    def features(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) to features (B, feature_dim)."""
        return self.layers(images)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) to scores (B,), high for real ones."""
        return self.score(self.features(images)).squeeze(1)
