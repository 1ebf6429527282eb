"""Residual networks: for 32×32 images (ResNet-20, 32) and for ImageNet (ResNet-18, 34, 50), with any widths."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hypersphere._validation import require
from hypersphere.models._blocks import (
    ChannelFactory,
    LayerFactory,
    conv_unit,
    he_normal_,
    large_stem_layers,
    make_layers,
    relu,
    require_num_classes,
    require_per_stage,
)

__all__ = ["ResNet", "ResidualUnit"]

# Options A and B of He et al. 2016, section 4.1. ResNet-20 and 32 use A, ResNet-18 and 34 use B.
SHORTCUTS = ("pad", "projection")
EXPANSION = 4  # output channels of a bottleneck unit per filter of its 3×3 convolution


class ResidualUnit(nn.Module):
    """y = activation(shortcut(x) + norm(conv(activation(norm(conv(x)))))), both convolutions 3×3 (He et al. 2016).

    With `bottleneck` there are three convolutions: 1×1, 3×3 and 1×1, of which the first two have few filters. The
    shortcut is the identity if input and output have the same shape. Otherwise "pad" takes every stride-th pixel
    and appends channels of zeros, and "projection" is a 1×1 convolution with a normalisation.

    Args:
        channels: channels of the input.
        width: channels of the output.
        stride: stride of the first convolution.
        shortcut: "pad" or "projection".
        bottleneck: filters of the first two of three convolutions, or None for two convolutions.
        bias, conv, norm, activation: see `hypersphere.models`.

    Example:
        >>> import torch
        >>> ResidualUnit(4, 8, stride=2, shortcut="pad")(torch.zeros(1, 4, 6, 6)).shape
        torch.Size([1, 8, 3, 3])
    """

    def __init__(
        self,
        channels: int,
        width: int,
        *,
        stride: int = 1,
        shortcut: str = "projection",
        bottleneck: int | None = None,
        bias: bool = False,
        conv: LayerFactory = nn.Conv2d,
        norm: ChannelFactory | None = nn.BatchNorm2d,
        activation: ChannelFactory | None = relu,
    ) -> None:
        super().__init__()
        require(shortcut in SHORTCUTS, "shortcut", "'pad' or 'projection'", shortcut)
        same_shape = stride == 1 and channels == width
        # Padding can only add channels.
        can_pad = same_shape or width >= channels
        require(can_pad or shortcut == "projection", "shortcut", "'projection' if widths decrease", shortcut)
        unit = partial(conv_unit, bias=bias, conv=conv, norm=norm)
        # The last convolution has no activation, which comes after the sum.
        if bottleneck is None:
            residual = [
                *unit(channels, width, stride=stride, activation=activation),
                *unit(width, width, activation=None),
            ]
        else:
            residual = [
                *unit(channels, bottleneck, 1, stride=stride, activation=activation),
                *unit(bottleneck, bottleneck, activation=activation),
                *unit(bottleneck, width, 1, activation=None),
            ]
        self.residual = nn.Sequential(*residual)
        self.projection: nn.Sequential | None = None
        if not same_shape and shortcut == "projection":
            self.projection = nn.Sequential(*unit(channels, width, 1, stride=stride, activation=None))
        self.stride = stride
        self.extra_channels = width - channels
        self.activation = nn.Sequential(*make_layers(width, activation))

    def forward(
        self, x: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch out_channels out_height out_width"]:
        """Map (batch, channels, H, W) to (batch, width, H/stride, W/stride)."""
        return self.activation(self._shortcut(x) + self.residual(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.projection is not None:
            return self.projection(x)
        if self.stride == 1 and not self.extra_channels:
            return x
        # The last pair of `pad` counts channels: none before, `extra_channels` zeros after.
        return F.pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra_channels))


class ResNet(nn.Module):
    """Stages of residual units followed by global average pooling (thesis, tables B.2, C.1, D.2, E.2, F.2).

    Maps images (batch, in_channels, height, width) of any size to features (batch, widths[-1]), or four times as many
    with `bottleneck`, for a head of `hypersphere.heads`. With `num_classes` a linear classifier follows. The first unit
    of every stage except the first has stride 2.

    Parameter counts as printed: ResNet-20 0.27M, ResNet-32 0.46M (He et al. 2016, table 6, 10 classes), ResNet-18
    11.7M, ResNet-34 21.8M, ResNet-50 25.6M (1,000 classes).

    Args:
        depths: residual units per stage: (n, n, n) is ResNet-(6n+2), (2, 2, 2, 2) is ResNet-18.
        widths: number of filters of each stage. The stem has as many as the first stage.
        bottleneck: use units of three convolutions whose output has four times as many channels (ResNet-50).
        large_stem: start with a 7×7 convolution of stride 2 and a 3×3 max-pool of stride 2 instead of a 3×3
            convolution.
        shortcut: "pad" (no parameters; ResNet-20, 32) or "projection" (ResNet-18, 34) for units that change the shape.
        in_channels, num_classes, bias, conv, norm, activation: see `hypersphere.models`.

    Example:
        >>> import torch
        >>> ResNet((1, 1), (4, 8))(torch.zeros(2, 3, 16, 16)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        depths: Sequence[int] = (5, 5, 5),
        widths: Sequence[int] = (16, 32, 64),
        *,
        in_channels: int = 3,
        num_classes: int | None = None,
        bottleneck: bool = False,
        large_stem: bool = False,
        shortcut: str = "pad",
        bias: bool = False,
        conv: LayerFactory = nn.Conv2d,
        norm: ChannelFactory | None = nn.BatchNorm2d,
        activation: ChannelFactory | None = relu,
    ) -> None:
        super().__init__()
        require_per_stage(depths, widths, "depths", 1)
        require_num_classes(num_classes)
        stem_layers = large_stem_layers if large_stem else conv_unit
        stem = stem_layers(in_channels, widths[0], bias=bias, conv=conv, norm=norm, activation=activation)
        unit = partial(ResidualUnit, shortcut=shortcut, bias=bias, conv=conv, norm=norm, activation=activation)
        units, channels = [], widths[0]
        for stage, (depth, filters) in enumerate(zip(depths, widths, strict=True)):
            width = EXPANSION * filters if bottleneck else filters
            for position in range(depth):
                # The first stage follows the stem at the same resolution.
                halves_image = stage > 0 and position == 0
                stride = 2 if halves_image else 1
                units.append(unit(channels, width, stride=stride, bottleneck=filters if bottleneck else None))
                channels = width
        self.feature_dim = channels
        self.stem = nn.Sequential(*stem)
        self.units = nn.Sequential(*units)
        self.classifier = None if num_classes is None else nn.Linear(channels, num_classes)
        he_normal_(self)

    def features(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch feature_dim"]:
        """Map images to features, without the classifier."""
        return self.units(self.stem(images)).mean((2, 3))

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch outputs"]:
        """Map images to features (batch, feature_dim), or to logits (batch, num_classes) if there is a classifier."""
        features = self.features(images)
        return features if self.classifier is None else self.classifier(features)
