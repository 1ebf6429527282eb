"""The toy network of the sources: a small CNN whose feature is 2- or 3-dimensional, so that one can see it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from hypersphere._validation import require
from hypersphere.models.units import two_sides

__all__ = ["ToyCNN"]


class ToyCNN(nn.Module):
    """Two convolutions a stage, PReLU, a pool after each stage, and a linear feature without activation after it.

    Args:
        in_channels: channels of the image.
        image_size: height and width, divisible by 2 for every stage.
        feature_dim: length of the feature, 2 or 3 for pictures.
        widths: channels of each stage.
        conv: makes a convolution; called with the channels in and out, the kernel size 3 and `padding=1`.
        linear: makes the feature; called with the numbers in and out.

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
        widths: tuple[int, ...] = (32, 64),
        *,
        conv: Callable[..., nn.Module] = nn.Conv2d,
        linear: Callable[..., nn.Module] = nn.Linear,
    ) -> None:
        super().__init__()
        require(feature_dim >= 1, "feature_dim", "a number >= 1", feature_dim)
        require(all(width >= 1 for width in widths), "widths", "numbers >= 1", widths)
        step = 2 ** len(widths)
        height, width = two_sides(image_size, 1)
        require(
            height % step == width % step == 0,
            "image_size",
            f"a multiple of {step}, or two of them (height, width)",
            image_size,
        )
        layers: list[nn.Module] = []
        before = in_channels
        for filters in widths:
            for channels in (before, filters):
                layers += [conv(channels, filters, 3, padding=1), nn.PReLU(filters)]
            layers.append(nn.MaxPool2d(2))
            before = filters
        self.stages = nn.Sequential(*layers)
        self.feature_dim = feature_dim
        self.feature = linear(before * (height // step) * (width // step), feature_dim)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) to features (B, feature_dim)."""
        return self.feature(self.stages(images).flatten(1))
