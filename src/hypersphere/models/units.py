"""What networks are made of: makers of layers, and a convolution with its norm and activation.

A maker is called as the torch layer it stands for, so one constructor gives the plain network (`nn.Conv2d`), the
sphere one (`hypersphere.layers.sphere_conv2d`), a decoupled one (`functools.partial(DecoupledConv2d, ...)`), or one of
spectrally normalised layers. A rotated network is a plain one after `hypersphere.rotation.rotate_`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import nn
from torch.nn.utils import parametrize

from hypersphere._validation import require

__all__ = ["ByChannels", "Maker", "conv_unit", "he_normal_", "large_stem_layers", "layers_by", "relu", "two_sides"]

Maker: TypeAlias = Callable[..., nn.Module]
ByChannels: TypeAlias = Callable[[int], nn.Module]

_PLAIN = (nn.Conv1d, nn.Conv2d, nn.Linear)


def relu(channels: int) -> nn.Module:
    """A ReLU for any number of channels; other makers, such as `nn.PReLU`, need to know it.

    >>> relu(64)
    ReLU()
    """
    return nn.ReLU()


def layers_by(makers: tuple[ByChannels | None, ...], channels: int) -> list[nn.Module]:
    """What these makers make for so many channels; None makes nothing."""
    return [maker(channels) for maker in makers if maker is not None]


def conv_unit(
    channels: int,
    width: int,
    kernel_size: int = 3,
    *,
    stride: int = 1,
    bias: bool,
    conv: Maker,
    norm: ByChannels | None,
    activation: ByChannels | None,
) -> list[nn.Module]:
    """A convolution that keeps the size of the image (but for its stride), then a norm, then an activation."""
    layer = conv(channels, width, kernel_size, stride=stride, padding=kernel_size // 2, bias=bias)
    return [layer, *layers_by((norm, activation), width)]


def large_stem_layers(
    channels: int, width: int, *, bias: bool, conv: Maker, norm: ByChannels | None, activation: ByChannels | None
) -> list[nn.Module]:
    """The beginning of a network for large images: 7×7 with stride 2, then a 3×3 max-pool with stride 2."""
    first = conv_unit(channels, width, 7, stride=2, bias=bias, conv=conv, norm=norm, activation=activation)
    return [*first, nn.MaxPool2d(3, stride=2, padding=1)]


def two_sides(image_size: int | tuple[int, int], least: int) -> tuple[int, int]:
    """Height and width of an image, each at least `least`.

    >>> two_sides(32, 8)
    (32, 32)
    """
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    require(min(height, width) >= least, "image_size", f"at least {least} high and wide", image_size)
    return height, width


def he_normal_(model: nn.Module) -> None:
    """Draw the weights of plain layers from N(0, 2/fan_in) and zero their biases (He et al. 2015), as the sources do.

    Layers whose weight is parametrised by their maker keep what it gave them.
    """
    for module in model.modules():
        if isinstance(module, _PLAIN) and not parametrize.is_parametrized(module):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
