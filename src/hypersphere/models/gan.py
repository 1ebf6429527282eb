"""Generator and discriminator of SN-GAN for 32×32 images."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from jaxtyping import Float
from torch import Tensor, nn

from hypersphere._validation import require
from hypersphere.models._blocks import ChannelFactory, LayerFactory, make_layers, relu, require_widths

__all__ = ["Discriminator", "Generator", "leaky_relu"]

LEAKY_SLOPE = 0.1  # thesis, table D.5


def leaky_relu(channels: int) -> nn.Module:
    """Return a leaky ReLU of slope 0.1. The number of channels is ignored.

    >>> leaky_relu(64)
    LeakyReLU(negative_slope=0.1)
    """
    return nn.LeakyReLU(LEAKY_SLOPE)


class Generator(nn.Module):
    """Maps noise (batch, latent_dim) to images in [−1, 1] (thesis, table D.5a).

    A dense layer, three 4×4 transposed convolutions of stride 2 and a 3×3 convolution. As in the table, there is no
    activation between the dense layer and the first transposed convolution.

    Args:
        latent_dim: dimension of the noise.
        widths: channels of the first image and after each transposed convolution, which doubles height and width.
        out_channels: channels of the image.
        side: height and width of the first image. The output is 2^(len(widths) − 1) times larger.
        norm, activation: see `hypersphere.models`.

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
        norm: ChannelFactory | None = nn.BatchNorm2d,
        activation: ChannelFactory | None = relu,
    ) -> None:
        super().__init__()
        require_widths(widths)
        # The dense layer gives the pixels of the first, side×side image.
        layers: list[nn.Module] = [nn.Linear(latent_dim, widths[0] * side**2), nn.Unflatten(1, (widths[0], side, side))]
        for channels, width in pairwise(widths):
            layers.append(nn.ConvTranspose2d(channels, width, 4, stride=2, padding=1))
            layers += make_layers(width, norm, activation)
        self.layers = nn.Sequential(*layers, nn.Conv2d(widths[-1], out_channels, 3, padding=1), nn.Tanh())
        self.latent_dim = latent_dim

    def forward(self, noise: Float[Tensor, "batch latent_dim"]) -> Float[Tensor, "batch channels height width"]:
        """Map noise to images."""
        return self.layers(noise)


class Discriminator(nn.Module):
    """Maps images to one score each (thesis, table D.5b).

    Each stage is a 3×3 convolution and, except for the last, a 4×4 convolution of stride 2; a dense layer follows.
    For spectral normalisation pass factories: `conv=lambda *a, **k: spectral_norm(nn.Conv2d(*a, **k))`.

    Args:
        widths: number of filters of each stage. Every stage except the last halves height and width.
        image_size: height and width of the image, which are equal.
        in_channels, conv, linear, activation: see `hypersphere.models`.

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
        conv: LayerFactory = nn.Conv2d,
        linear: LayerFactory = nn.Linear,
        activation: ChannelFactory | None = leaky_relu,
    ) -> None:
        super().__init__()
        require_widths(widths)
        reduction = 2 ** (len(widths) - 1)  # the last stage has no layer of stride 2
        side, remainder = divmod(image_size, reduction)
        require(side >= 1 and not remainder, "image_size", f"a multiple of {reduction}", image_size)
        layers: list[nn.Module] = []
        channels = in_channels
        # No batch normalisation: SN-GAN normalises the weights of the discriminator instead.
        for stage, width in enumerate(widths):
            layers += [conv(channels, width, 3, padding=1), *make_layers(width, activation)]
            if stage < len(widths) - 1:
                layers += [conv(width, width, 4, stride=2, padding=1), *make_layers(width, activation)]
            channels = width
        self.layers = nn.Sequential(*layers, nn.Flatten())
        self.feature_dim = channels * side**2
        self.score = linear(self.feature_dim, 1)

    def features(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch feature_dim"]:
        """Map images to the features before the dense layer."""
        return self.layers(images)

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, " batch"]:
        """Map images to scores, high for real images."""
        return self.score(self.features(images)).squeeze(1)
