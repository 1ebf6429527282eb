r"""A convolutional autoencoder that can be decoded from angles alone or from norms alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from hypersphere import sphere
from hypersphere._validation import require
from hypersphere.models.units import ByChannels, layers_by, relu

__all__ = ["Autoencoder"]

KEEPS = ("product", "angle", "norm")


class Autoencoder(nn.Module):
    r"""Strided convolutions to a code ⟨w, x⟩ and deconvolutions back to an image (thesis, figure 1.1).

    Once it is trained, the code may keep only a part of the inner product of a filter w and a patch x, all weights as
    they are: cos θ(w, x) ("angle"), or ‖w‖‖x‖ ("norm"). The last layer of the encoder has no bias and no activation.

    Args:
        in_channels: channels of the image.
        widths: channels after each 4×4 convolution of stride 2, which halves the sides; the last is the code's.
        norm: maker of a norm from a number of channels, or None.
        activation: maker of an activation from a number of channels, or None.

    Example:
        >>> import torch
        >>> net = Autoencoder(1, (4, 8))
        >>> net(torch.zeros(2, 1, 8, 8)).shape, net.encode(torch.zeros(2, 1, 8, 8), keep="angle").shape
        (torch.Size([2, 1, 8, 8]), torch.Size([2, 8, 2, 2]))
    """

    def __init__(
        self,
        in_channels: int = 3,
        widths: Sequence[int] = (32, 64, 128),
        *,
        norm: ByChannels | None = nn.BatchNorm2d,
        activation: ByChannels | None = relu,
    ) -> None:
        super().__init__()
        require(len(widths) >= 2, "widths", "two numbers or more", tuple(widths))
        before: list[nn.Module] = []
        after: list[nn.Module] = []
        sizes = (in_channels, *widths)
        for channels, width in pairwise(sizes[:-1]):
            before += [nn.Conv2d(channels, width, 4, stride=2, padding=1), *layers_by((norm, activation), width)]
        for channels, width in pairwise(sizes[:0:-1]):
            after.append(nn.ConvTranspose2d(channels, width, 4, stride=2, padding=1))
            after += layers_by((norm, activation), width)
        self.before = nn.Sequential(*before)
        self.code = nn.Conv2d(widths[-2], widths[-1], 4, stride=2, padding=1, bias=False)
        self.decoder = nn.Sequential(
            *after, nn.ConvTranspose2d(widths[0], in_channels, 4, stride=2, padding=1), nn.Sigmoid()
        )

    def encode(self, images: Tensor, *, keep: str = "product", rescale: bool = False) -> Tensor:
        """Map images (B, C, H, W) to codes.

        Args:
            images: their sides are multiples of 2 for every width.
            keep: "product", "angle" or "norm".
            rescale: whether to bring an angle or norm code to the root mean square of the product code, the scale that
                the decoder knows; the thesis does not say that it did.
        """
        require(keep in KEEPS, "keep", f"one of {', '.join(map(repr, KEEPS))}", keep)
        x = self.before(images)
        product = self.code(x)
        if keep == "product":
            return product
        patches = F.unfold(x, 4, stride=2, padding=1).mT  # (B, L, d): a picture for the eye, so plain rather than fast
        neurons = self.code.weight.flatten(1)
        if keep == "angle":
            kept = sphere.cosines(patches.flatten(0, 1), neurons).view(*patches.shape[:2], -1)
        else:
            kept = sphere.norm(patches, keepdim=True) * sphere.norm(neurons)
        kept = kept.mT.reshape(product.shape)
        if not rescale:
            return kept
        size = sphere.norm(kept.flatten())
        return kept * (sphere.norm(product.flatten()) / size.masked_fill(size == 0, 1.0))

    def decode(self, codes: Tensor) -> Tensor:
        """Map codes to images (B, C, H, W) in [0, 1]."""
        return self.decoder(codes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) in [0, 1] to their reconstructions."""
        return self.decode(self.encode(images))
