"""The toy network of the sources: a small CNN whose feature is 2- or 3-dimensional, so that one can see it."""

from __future__ import annotations

from torch import Tensor, nn

from hypersphere.functions.menu import require

__all__ = ["ToyCNN"]


class ToyCNN(nn.Module):
    """Two convolutions a stage, PReLU, a pool after each stage, and a linear feature without activation after it.

    Args:
        in_channels: channels of the image.
        image_size: height and width, divisible by 2 for every stage.
        feature_dim: length of the feature, 2 or 3 for pictures.
        widths: channels of each stage.

    Example:
        >>> import torch
        >>> ToyCNN(1, 8, 3)(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 3])
    """

    def __init__(
        self, in_channels: int, image_size: int, feature_dim: int = 3, widths: tuple[int, ...] = (32, 64)
    ) -> None:
        super().__init__()
        side, left_over = divmod(image_size, 2 ** len(widths))
        require(side >= 1 and left_over == 0, "image_size", f"a multiple of {2 ** len(widths)}", image_size)
        layers: list[nn.Module] = []
        before = in_channels
        for width in widths:
            for channels in (before, width):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.PReLU(width)]
            layers.append(nn.MaxPool2d(2))
            before = width
        self.stages = nn.Sequential(*layers)
        self.feature = nn.Linear(before * side * side, feature_dim)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) to features (B, feature_dim)."""
        return self.feature(self.stages(images).flatten(1))
