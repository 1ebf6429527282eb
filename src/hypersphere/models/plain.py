"""Plain CNNs: stages of 3×3 convolutions with a pool after each, and one fully connected layer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from hypersphere._validation import require
from hypersphere.models.units import (
    ByChannels,
    Maker,
    conv_unit,
    he_normal_,
    large_stem_layers,
    layers_by,
    relu,
    two_sides,
)

__all__ = ["PlainCNN"]


class PlainCNN(nn.Module):
    """CNN-N of the sources: no shortcuts, a 2×2 max-pool after each stage (thesis, tables B.1, C.1, D.1, E.1, F.1).

    It maps images to features (B, feature_dim), with nothing after the fully connected layer, for a head of
    `hypersphere.heads`. With `num_classes` an activation and a linear classifier follow, and it gives logits.
    `features` gives the features in either case.

    Args:
        depth: N, the number of convolutions, spread evenly over the stages; or their number in each stage.
        widths: filters in each stage.
        feature_dim: width of the fully connected layer; None for no such layer: the feature is the flat image.
        in_channels: channels of the image.
        image_size: height and width, or one number for both.
        num_classes: None for features, a number for logits.
        kernel_size: of all convolutions but a large stem's.
        large_stem: begin with 7×7, stride 2, and a 3×3 max-pool of stride 2; it counts as one convolution of N.
        bias: whether layers have biases. The parameter counts of the sources have none.
        conv: maker of convolutions, called as `nn.Conv2d` is.
        linear: maker of the fully connected layer, called as `nn.Linear` is.
        norm: maker of a norm from a number of channels, or None.
        activation: maker of an activation from a number of channels, or None.

    Example:
        >>> import torch
        >>> PlainCNN(6, (4, 8, 8), 16)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 16])
        >>> PlainCNN(6, (4, 8, 8), 16, num_classes=10)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        depth: int | Sequence[int] = 9,
        widths: Sequence[int] = (64, 128, 256),
        feature_dim: int | None = 256,
        *,
        in_channels: int = 3,
        image_size: int | tuple[int, int] = 32,
        num_classes: int | None = None,
        kernel_size: int = 3,
        large_stem: bool = False,
        bias: bool = False,
        conv: Maker = nn.Conv2d,
        linear: Maker = nn.Linear,
        norm: ByChannels | None = nn.BatchNorm2d,
        activation: ByChannels | None = relu,
    ) -> None:
        super().__init__()
        counts = _by_stage(depth, len(widths), large_stem)
        require(kernel_size % 2 == 1, "kernel_size", "an odd number", kernel_size)
        require(num_classes is None or num_classes >= 2, "num_classes", "None or a number >= 2", num_classes)
        reduction = 2 ** len(widths) * (4 if large_stem else 1)
        height, width = two_sides(image_size, reduction)
        layers, channels = [], in_channels
        if large_stem:
            layers = large_stem_layers(channels, widths[0], bias=bias, conv=conv, norm=norm, activation=activation)
            height, width, channels = -(-height // 4), -(-width // 4), widths[0]
        for count, filters in zip(counts, widths, strict=True):
            for _ in range(count):
                layers += conv_unit(
                    channels, filters, kernel_size, bias=bias, conv=conv, norm=norm, activation=activation
                )
                channels = filters
            layers.append(nn.MaxPool2d(2))
            height, width = height // 2, width // 2
        flat = channels * height * width
        self.feature_dim = flat if feature_dim is None else feature_dim
        self.stages = nn.Sequential(*layers)
        self.feature = nn.Identity() if feature_dim is None else linear(flat, feature_dim, bias=bias)
        before = [] if feature_dim is None else layers_by((activation,), feature_dim)
        self.classifier = (
            None if num_classes is None else nn.Sequential(*before, nn.Linear(self.feature_dim, num_classes, bias=bias))
        )
        he_normal_(self)

    def features(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) to features (B, feature_dim)."""
        return self.feature(self.stages(images).flatten(1))

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) to features (B, feature_dim), or to logits (B, num_classes) if there are classes."""
        features = self.features(images)
        return features if self.classifier is None else self.classifier(features)


def _by_stage(depth: int | Sequence[int], stages: int, large_stem: bool) -> Sequence[int]:
    """How many convolutions each stage has."""
    if not isinstance(depth, int):
        fits = len(depth) == stages and all(count >= 1 for count in depth)
        require(fits, "depth", f"{stages} numbers >= 1, one for each of widths", tuple(depth))
        return depth
    count, left_over = divmod(depth - large_stem, stages)
    more = " and one more for the large stem" if large_stem else ""
    require(count >= 1 and left_over == 0, "depth", f"a multiple of the {stages} stages{more}", depth)
    return [count] * stages
