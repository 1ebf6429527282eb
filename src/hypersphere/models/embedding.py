"""A small embedding network for images of any size, for open-set experiments that fit on a laptop."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn

from hypersphere.models._blocks import ChannelFactory, LayerFactory, height_and_width, make_layers, require_widths

__all__ = ["EmbeddingCNN"]


class EmbeddingCNN(nn.Module):
    """Stages of convolution, normalisation, activation and 2×2 max-pool, then a linear feature without activation.

    Maps images (batch, in_channels, height, width) to features (batch, feature_dim) for a head of `hypersphere.heads`.
    This network is not in the thesis.

    Args:
        feature_dim: dimension of the feature.
        widths: number of filters of each stage.
        first_stride: stride of the first convolution, for larger images.
        in_channels, image_size, conv, norm, activation: see `hypersphere.models`.

    Example:
        >>> import torch
        >>> EmbeddingCNN(1, (28, 28), 64)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 64])
    """

    def __init__(
        self,
        in_channels: int,
        image_size: int | tuple[int, int],
        feature_dim: int = 64,
        widths: Sequence[int] = (32, 64, 64),
        *,
        first_stride: int = 1,
        conv: LayerFactory = nn.Conv2d,
        norm: ChannelFactory | None = nn.BatchNorm2d,
        activation: ChannelFactory | None = nn.PReLU,
    ) -> None:
        super().__init__()
        require_widths(widths)
        # Smaller images could be empty after the last pool.
        height, width = height_and_width(image_size, first_stride * 2 ** len(widths))
        # A padded convolution of stride s maps a side of n pixels to ceil(n / s); each pool rounds down.
        height, width = -(-height // first_stride), -(-width // first_stride)
        layers: list[nn.Module] = []
        channels = in_channels
        for stage, filters in enumerate(widths):
            stride = first_stride if stage == 0 else 1
            layers.append(conv(channels, filters, 3, stride=stride, padding=1))
            layers += make_layers(filters, norm, activation)
            layers.append(nn.MaxPool2d(2))
            height, width, channels = height // 2, width // 2, filters
        self.stages = nn.Sequential(*layers)
        self.feature_dim = feature_dim
        # No activation follows: features must be able to point in every direction (thesis, A.1).
        self.feature = nn.Linear(channels * height * width, feature_dim)

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch feature_dim"]:
        """Map images to features."""
        return self.feature(self.stages(images).flatten(1))
