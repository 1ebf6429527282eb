"""A convolutional autoencoder whose code can be reduced to angles or to norms."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hypersphere import sphere
from hypersphere._validation import require
from hypersphere.models._blocks import ChannelFactory, make_layers, relu, require_widths
from hypersphere.models._old_names import accept_old_names

__all__ = ["Autoencoder"]

# What `encode` can return: ⟨w, x⟩ = cos θ(w, x) · ‖w‖‖x‖, or one of the two factors.
CODES = ("product", "angle", "norm")


class Autoencoder(nn.Module):
    r"""Strided convolutions to a code ⟨w, x⟩ and transposed convolutions back to an image (thesis, figure 1.1).

    After training, `encode` can replace the inner product of a filter w and a patch x by one of its factors, without
    changing any weight: cos θ(w, x) ("angle") or ‖w‖‖x‖ ("norm"). For this reason the last layer of the encoder has
    neither bias nor activation.

    Args:
        widths: channels after each 4×4 convolution of stride 2, which halves height and width. The last entry is the
            number of channels of the code.
        in_channels, norm, activation: see `hypersphere.models`.

    Example:
        >>> import torch
        >>> model = Autoencoder(1, (4, 8))
        >>> model(torch.zeros(2, 1, 8, 8)).shape, model.encode(torch.zeros(2, 1, 8, 8), keep="angle").shape
        (torch.Size([2, 1, 8, 8]), torch.Size([2, 8, 2, 2]))
    """

    def __init__(
        self,
        in_channels: int = 3,
        widths: Sequence[int] = (32, 64, 128),
        *,
        norm: ChannelFactory | None = nn.BatchNorm2d,
        activation: ChannelFactory | None = relu,
    ) -> None:
        super().__init__()
        require_widths(widths, minimum=2)
        # A 4×4 convolution of stride 2 and padding 1 maps a side of 2n pixels to n, its transpose maps n to 2n. The
        # decoder mirrors the encoder, so reconstructions have the size of the images.
        encoder: list[nn.Module] = []
        decoder: list[nn.Module] = []
        for channels, width in pairwise((in_channels, *widths[:-1])):
            encoder.append(nn.Conv2d(channels, width, 4, stride=2, padding=1))
            encoder += make_layers(width, norm, activation)
        for channels, width in pairwise(widths[::-1]):
            decoder.append(nn.ConvTranspose2d(channels, width, 4, stride=2, padding=1))
            decoder += make_layers(width, norm, activation)
        self.encoder = nn.Sequential(*encoder)
        # Without a bias, the code is exactly the product of the two factors.
        self.code = nn.Conv2d(widths[-2], widths[-1], 4, stride=2, padding=1, bias=False)
        self.decoder = nn.Sequential(
            *decoder, nn.ConvTranspose2d(widths[0], in_channels, 4, stride=2, padding=1), nn.Sigmoid()
        )
        accept_old_names(self, {"before": "encoder"})

    def encode(
        self, images: Float[Tensor, "batch channels height width"], *, keep: str = "product", rescale: bool = False
    ) -> Float[Tensor, "batch code_channels code_height code_width"]:
        """Map images to codes.

        Args:
            images: images whose height and width are multiples of 2^len(widths).
            keep: "product", "angle" or "norm".
            rescale: scale an angle or norm code to the root mean square of the product code, on which the decoder was
                trained. The thesis does not say whether it did so.
        """
        require(keep in CODES, "keep", f"one of {', '.join(map(repr, CODES))}", keep)
        x = self.encoder(images)
        product = self.code(x)
        if keep == "product":
            return product
        # The factors need the patches, which a convolution does not form. Batches are small here, so the memory of
        # `unfold` does not matter.
        patches = F.unfold(x, 4, stride=2, padding=1).mT  # (batch, positions, patch size)
        filters = self.code.weight.flatten(1)
        if keep == "angle":
            code = sphere.cosines(patches.flatten(0, 1), filters).view(*patches.shape[:2], -1)
        else:
            code = sphere.norm(patches, keepdim=True) * sphere.norm(filters)
        code = code.mT.reshape(product.shape)  # positions become height and width again
        if not rescale:
            return code
        # Codes have equal sizes, so the ratio of norms is the ratio of root mean squares. A zero code stays zero.
        code_norm = sphere.norm(code.flatten())
        return code * (sphere.norm(product.flatten()) / code_norm.masked_fill(code_norm == 0, 1.0))

    def decode(
        self, codes: Float[Tensor, "batch code_channels code_height code_width"]
    ) -> Float[Tensor, "batch channels height width"]:
        """Map codes to images in [0, 1]."""
        return self.decoder(codes)

    def forward(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch channels height width"]:
        """Map images in [0, 1] to their reconstructions."""
        return self.decode(self.encode(images))
