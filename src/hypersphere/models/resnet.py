"""Residual networks: for 32×32 images (ResNet-20, 32) and for large ones (ResNet-18, 34), of any widths."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from hypersphere._validation import require
from hypersphere.models.units import ByChannels, Maker, conv_unit, he_normal_, large_stem_layers, layers_by, relu

__all__ = ["ResNet", "ResidualUnit"]

SHORTCUTS = ("pad", "projection")


class ResidualUnit(nn.Module):
    """y = activation(shortcut(x) + norm(conv(activation(norm(conv(x)))))), both convolutions 3×3 (He et al. 2016).

    The shortcut is the identity where shapes agree. Else "pad" takes every stride-th pixel and appends channels of
    zeros, and "projection" is a 1×1 convolution with a norm.

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
        bias: bool = False,
        conv: Maker = nn.Conv2d,
        norm: ByChannels | None = nn.BatchNorm2d,
        activation: ByChannels | None = relu,
    ) -> None:
        super().__init__()
        require(shortcut in SHORTCUTS, "shortcut", "'pad' or 'projection'", shortcut)
        self.residual = nn.Sequential(
            *conv_unit(channels, width, stride=stride, bias=bias, conv=conv, norm=norm, activation=activation),
            *conv_unit(width, width, bias=bias, conv=conv, norm=norm, activation=None),
        )
        same = stride == 1 and channels == width
        projected = not same and shortcut == "projection"
        require(same or projected or width >= channels, "shortcut", "'projection' where widths fall", shortcut)
        self.projection = (
            nn.Sequential(
                *conv_unit(channels, width, 1, stride=stride, bias=bias, conv=conv, norm=norm, activation=None)
            )
            if projected
            else None
        )
        self.stride, self.missing = stride, width - channels
        self.activation = nn.Sequential(*layers_by((activation,), width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, channels, H, W) to (B, width, H/stride, W/stride)."""
        return self.activation(self._shortcut(x) + self.residual(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.projection is not None:
            return self.projection(x)
        if self.stride == 1 and not self.missing:
            return x
        return F.pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.missing))


class ResNet(nn.Module):
    """Stages of residual units, the first of each later stage with stride 2, then the mean over the image.

    It maps images of any size to features (B, widths[-1]) for a head (thesis, tables B.2, C.1, D.2, E.2, F.2); with
    `num_classes` a linear classifier follows.

    Args:
        depths: residual units in each stage: (n, n, n) is ResNet-(6n+2), (2, 2, 2, 2) is ResNet-18.
        widths: filters in each stage; the stem has those of the first.
        in_channels: channels of the image.
        num_classes: None for features, a number for logits.
        large_stem: begin with 7×7, stride 2, and a 3×3 max-pool of stride 2, instead of with 3×3.
        shortcut: "pad" (no parameters; ResNet-20, 32) or "projection" (ResNet-18, 34), where shapes change.
        bias: whether convolutions have biases.
        conv: maker of convolutions, called as `nn.Conv2d` is; those of kernel size 1 are projections.
        norm: maker of a norm from a number of channels, or None.
        activation: maker of an activation from a number of channels, or None.

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
        large_stem: bool = False,
        shortcut: str = "pad",
        bias: bool = False,
        conv: Maker = nn.Conv2d,
        norm: ByChannels | None = nn.BatchNorm2d,
        activation: ByChannels | None = relu,
    ) -> None:
        super().__init__()
        fits = len(depths) == len(widths) > 0 and all(depth >= 1 for depth in depths)
        require(fits, "depths", f"{len(widths)} numbers >= 1, one for each of widths", tuple(depths))
        require(num_classes is None or num_classes >= 2, "num_classes", "None or a number >= 2", num_classes)
        begin = large_stem_layers if large_stem else conv_unit
        stem = begin(in_channels, widths[0], bias=bias, conv=conv, norm=norm, activation=activation)
        units, channels = [], widths[0]
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            for place in range(depth):
                units.append(
                    ResidualUnit(
                        channels,
                        width,
                        stride=2 if stage and not place else 1,
                        shortcut=shortcut,
                        bias=bias,
                        conv=conv,
                        norm=norm,
                        activation=activation,
                    )
                )
                channels = width
        self.feature_dim = channels
        self.stem = nn.Sequential(*stem)
        self.units = nn.Sequential(*units)
        self.classifier = None if num_classes is None else nn.Linear(channels, num_classes)
        he_normal_(self)

    def features(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) to features (B, feature_dim)."""
        return self.units(self.stem(images)).mean((2, 3))

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) to features (B, feature_dim), or to logits (B, num_classes) if there are classes."""
        features = self.features(images)
        return features if self.classifier is None else self.classifier(features)
