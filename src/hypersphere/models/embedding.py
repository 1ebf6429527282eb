"""A small embedding network: images of any size to features, for open-set experiments that fit on a laptop."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hypersphere.models.units import two_sides

__all__ = ["EmbeddingCNN"]


class EmbeddingCNN(nn.Module):
    """Convolution, norm, activation and 2×2 pool once a stage, then a linear feature with nothing after it.

    Args:
        in_channels: channels of the image.
        image_size: (height, width), or one number for both.
        feature_dim: length of the feature.
        widths: channels of each stage.
        first_stride: stride of the first convolution, for larger images.
        conv: maker of a 3×3 convolution, called as `nn.Conv2d` is.
        norm: maker of a norm from a number of channels.
        activation: maker of an activation from a number of channels.

    Example:
        >>> EmbeddingCNN(1, (28, 28), 64)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 64])
    """

    def __init__(
        self,
        in_channels: int,
        image_size: int | tuple[int, int],
        feature_dim: int = 64,
        widths: tuple[int, ...] = (32, 64, 64),
        *,
        first_stride: int = 1,
        conv: Callable[..., nn.Module] = nn.Conv2d,
        norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
        activation: Callable[[int], nn.Module] = nn.PReLU,
    ) -> None:
        super().__init__()
        height, width = two_sides(image_size, first_stride * 2 ** len(widths))
        layers: list[nn.Module] = []
        before = in_channels
        for stage, channels in enumerate(widths):
            stride = first_stride if stage == 0 else 1
            layers += [
                conv(before, channels, 3, stride=stride, padding=1),
                norm(channels),
                activation(channels),
                nn.MaxPool2d(2),
            ]
            before = channels
        self.stages = nn.Sequential(*layers)
        with torch.no_grad():
            was_training = self.stages.training
            flat = self.stages.eval()(torch.zeros(1, in_channels, height, width)).numel()
            self.stages.train(was_training)
        self.feature_dim = feature_dim
        self.feature = nn.Linear(flat, feature_dim)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) to features (B, feature_dim)."""
        return self.feature(self.stages(images).flatten(1))
