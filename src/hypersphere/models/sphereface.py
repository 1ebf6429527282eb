"""The SphereFace networks, and the ResNet-18 that was modified after them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.utils import parametrize

from hypersphere._validation import require
from hypersphere.models.units import ByChannels, Maker, conv_unit, large_stem_layers, two_sides

__all__ = ["SphereFaceNet", "SphereFaceUnit"]

RESIDUAL_STD = 0.01  # of the weights in residual units at the start, so that deep networks begin nearly shallow


class SphereFaceUnit(nn.Module):
    """y = x + unit(unit(x)): an activation after each convolution and none after the sum.

    >>> import torch
    >>> SphereFaceUnit(4)(torch.zeros(1, 4, 5, 5)).shape
    torch.Size([1, 4, 5, 5])
    """

    def __init__(
        self,
        width: int,
        *,
        bias: bool = True,
        conv: Maker = nn.Conv2d,
        norm: ByChannels | None = None,
        activation: ByChannels | None = nn.PReLU,
    ) -> None:
        super().__init__()
        both = [conv_unit(width, width, bias=bias, conv=conv, norm=norm, activation=activation) for _ in range(2)]
        self.residual = nn.Sequential(*both[0], *both[1])

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, width, H, W) to the same shape."""
        return x + self.residual(x)


class SphereFaceNet(nn.Module):
    """Stages of a convolution with stride 2 and residual units after it (thesis, tables 2.7 and C.1).

    It maps images to features (B, feature_dim), with no activation after FC1 (thesis, A.1), for a head.

    Args:
        units: residual units in each stage. SphereFace-4 has (0, 0, 0, 0), -10 (0, 1, 2, 0), -20 (1, 2, 4, 1),
            -36 (2, 4, 8, 2) and -64 (3, 8, 16, 3); the modified ResNet-18 has (1, 2, 3, 0).
        widths: filters in each stage.
        feature_dim: width of FC1; None for the mean over the image instead, of widths[-1] numbers.
        in_channels: channels of the image.
        image_size: (height, width) or one number for both; 112×96 in the source.
        large_stem: begin with 7×7, stride 2, and a 3×3 max-pool of stride 2.
        bias: whether layers have biases.
        conv: maker of convolutions, called as `nn.Conv2d` is.
        linear: maker of FC1, called as `nn.Linear` is.
        norm: maker of a norm from a number of channels, or None.
        activation: maker of an activation from a number of channels, or None.

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
        conv: Maker = nn.Conv2d,
        linear: Maker = nn.Linear,
        norm: ByChannels | None = None,
        activation: ByChannels | None = nn.PReLU,
    ) -> None:
        super().__init__()
        fits = len(units) == len(widths) > 0 and all(count >= 0 for count in units)
        require(fits, "units", f"{len(widths)} numbers >= 0, one for each of widths", tuple(units))
        height, width = two_sides(image_size, 2)
        reduction = 2 ** len(widths) * (4 if large_stem else 1)
        layers, channels = [], in_channels
        if large_stem:
            layers = large_stem_layers(channels, widths[0], bias=bias, conv=conv, norm=norm, activation=activation)
            channels = widths[0]
        for count, filters in zip(units, widths, strict=True):
            layers += conv_unit(channels, filters, stride=2, bias=bias, conv=conv, norm=norm, activation=activation)
            layers += [
                SphereFaceUnit(filters, bias=bias, conv=conv, norm=norm, activation=activation) for _ in range(count)
            ]
            channels = filters
        flat = channels * -(-height // reduction) * -(-width // reduction)
        self.feature_dim = channels if feature_dim is None else feature_dim
        self.stages = nn.Sequential(*layers)
        self.feature = None if feature_dim is None else linear(flat, feature_dim, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights as the authors did: Xavier's, but N(0, 0.01²) within residual units; biases zero."""
        inner = {id(m) for unit in self.modules() if isinstance(unit, SphereFaceUnit) for m in unit.modules()}
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)) and not parametrize.is_parametrized(module):
                if id(module) in inner:
                    nn.init.normal_(module.weight, std=RESIDUAL_STD)
                else:
                    nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) to features (B, feature_dim)."""
        x = self.stages(images)
        return x.mean((2, 3)) if self.feature is None else self.feature(x.flatten(1))
