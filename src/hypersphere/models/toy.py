"""A small CNN with a feature of two or three dimensions, so that features can be drawn."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn

from hypersphere._validation import require
from hypersphere.models._blocks import LayerFactory, height_and_width, require_widths

__all__ = ["ToyCNN"]


class ToyCNN(nn.Module):
    """Two convolutions with PReLU and a 2×2 max-pool per stage, then a linear feature without activation.

    Maps images (batch, in_channels, height, width) to features (batch, feature_dim). It is a smaller version of the
    network behind figure 2.2 of the thesis, which is `MODELS["mnist_cnn6"]`.

    Args:
        image_size: height and width, or one integer for both; multiples of 2^len(widths).
        feature_dim: dimension of the feature, 2 or 3 for pictures.
        widths: number of filters of each stage.
        in_channels, conv, linear: see `hypersphere.models`.

    Example:
        >>> import torch
        >>> ToyCNN(1, 8, 3)(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        in_channels: int,
        image_size: int | tuple[int, int],
        feature_dim: int = 3,
        widths: Sequence[int] = (32, 64),
        *,
        conv: LayerFactory = nn.Conv2d,
        linear: LayerFactory = nn.Linear,
    ) -> None:
        super().__init__()
        require(feature_dim >= 1, "feature_dim", "an integer >= 1", feature_dim)
        require_widths(widths)
        reduction = 2 ** len(widths)  # one 2×2 max-pool per stage
        height, width = height_and_width(image_size, 1)
        divisible = height % reduction == width % reduction == 0
        accepted = f"a multiple of {reduction}, or (height, width) with two such multiples"
        require(divisible, "image_size", accepted, image_size)
        layers: list[nn.Module] = []
        channels = in_channels
        for filters in widths:
            # Only the first of the two convolutions of a stage changes the number of channels.
            for conv_channels in (channels, filters):
                layers += [conv(conv_channels, filters, 3, padding=1), nn.PReLU(filters)]
            layers.append(nn.MaxPool2d(2))
            channels = filters
        self.stages = nn.Sequential(*layers)
        self.feature_dim = feature_dim
        self.feature = linear(channels * (height // reduction) * (width // reduction), feature_dim)

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch feature_dim"]:
        """Map images to features."""
        return self.feature(self.stages(images).flatten(1))
