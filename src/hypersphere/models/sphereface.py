"""The SphereFace networks, and the modified ResNet-18 that has the same structure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hypersphere.models._blocks import (
    ChannelFactory,
    LayerFactory,
    conv_unit,
    height_and_width,
    large_stem_layers,
    make_layers,
    require_per_stage,
)

__all__ = ["SphereFaceNet", "SphereFaceUnit"]

# Standard deviation of the initial weights in residual units. It is small, so that each unit is almost the identity.
RESIDUAL_STD = 0.01


class SphereFaceUnit(nn.Module):
    """y = x + unit(unit(x)): an activation after each convolution and none after the sum (thesis, table 2.7).

    Args:
        width: channels of the input and of the output.
        bias, conv, norm, activation: see `hypersphere.models`.

    Example:
        >>> import torch
        >>> SphereFaceUnit(4)(torch.zeros(1, 4, 5, 5)).shape
        torch.Size([1, 4, 5, 5])
    """

    def __init__(
        self,
        width: int,
        *,
        bias: bool = True,
        conv: LayerFactory = nn.Conv2d,
        norm: ChannelFactory | None = None,
        activation: ChannelFactory | None = nn.PReLU,
    ) -> None:
        super().__init__()
        unit = partial(conv_unit, width, width, bias=bias, conv=conv, norm=norm, activation=activation)
        self.residual = nn.Sequential(*unit(), *unit())

    def forward(self, x: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch channels height width"]:
        """Add the residual to the input."""
        return x + self.residual(x)


class SphereFaceNet(nn.Module):
    """Stages of one convolution with stride 2 followed by residual units (thesis, tables 2.7 and C.1).

    Maps images (batch, in_channels, height, width), 112×96 in the thesis, to features (batch, feature_dim) for a head
    of `hypersphere.heads`. There is no activation after FC1 by default (thesis, A.1).

    Args:
        units: residual units per stage. SphereFace-4 has (0, 0, 0, 0), -10 (0, 1, 2, 0), -20 (1, 2, 4, 1),
            -36 (2, 4, 8, 2) and -64 (3, 8, 16, 3); the modified ResNet-18 has (1, 2, 3, 0).
        widths: number of filters of each stage.
        feature_dim: width of FC1. None replaces FC1 by global average pooling, with widths[-1] features.
        large_stem: start with a 7×7 convolution of stride 2 and a 3×3 max-pool of stride 2.
        feature_activation: factory of an activation after the features, or None.
        in_channels, image_size, bias, conv, linear, norm, activation: see `hypersphere.models`.

    Example:
        >>> import torch
        >>> SphereFaceNet((0, 1), (4, 8), 16, image_size=(12, 10))(torch.zeros(2, 3, 12, 10)).shape
        torch.Size([2, 16])
    """

    def __init__(
        self,
        units: Sequence[int] = (1, 2, 4, 1),
        widths: Sequence[int] = (64, 128, 256, 512),
        feature_dim: int | None = 512,
        *,
        in_channels: int = 3,
        image_size: int | tuple[int, int] = (112, 96),
        large_stem: bool = False,
        bias: bool = True,
        conv: LayerFactory = nn.Conv2d,
        linear: LayerFactory = nn.Linear,
        norm: ChannelFactory | None = None,
        activation: ChannelFactory | None = nn.PReLU,
        feature_activation: ChannelFactory | None = None,
    ) -> None:
        super().__init__()
        require_per_stage(units, widths, "units", 0)
        height, width = height_and_width(image_size, 2)
        # Every stage begins with stride 2; a large stem has a stride of 4 in total.
        reduction = 2 ** len(widths) * (4 if large_stem else 1)
        layers: list[nn.Module] = []
        channels = in_channels
        if large_stem:
            layers += large_stem_layers(channels, widths[0], bias=bias, conv=conv, norm=norm, activation=activation)
            channels = widths[0]
        for count, filters in zip(units, widths, strict=True):
            layers += conv_unit(channels, filters, stride=2, bias=bias, conv=conv, norm=norm, activation=activation)
            for _ in range(count):
                layers.append(SphereFaceUnit(filters, bias=bias, conv=conv, norm=norm, activation=activation))
            channels = filters
        # Padded convolutions of stride 2 round sizes up: 112×96 becomes 7×6.
        flat_dim = channels * -(-height // reduction) * -(-width // reduction)
        self.feature_dim = channels if feature_dim is None else feature_dim
        self.stages = nn.Sequential(*layers)
        self.feature = None if feature_dim is None else linear(flat_dim, feature_dim, bias=bias)
        self.feature_activation = nn.Sequential(*make_layers(self.feature_dim, feature_activation))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise like the authors: N(0, 0.01²) in residual units, Xavier uniform elsewhere, biases zero."""
        # Collect ids, because a module does not know its parent.
        in_residual_unit = {
            id(module) for unit in self.modules() if isinstance(unit, SphereFaceUnit) for module in unit.modules()
        }
        # As in `he_normal_`, parametrised layers keep the weights of their factory.
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)) and not parametrize.is_parametrized(module):
                if id(module) in in_residual_unit:
                    nn.init.normal_(module.weight, std=RESIDUAL_STD)
                else:
                    nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch feature_dim"]:
        """Map images to features."""
        x = self.stages(images)
        features = x.mean((2, 3)) if self.feature is None else self.feature(x.flatten(1))
        return self.feature_activation(features)
