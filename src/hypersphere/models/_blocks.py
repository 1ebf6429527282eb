"""Building blocks of the networks: layer factories, the convolution unit, image sizes and initialisation.

A layer factory is called like the torch class that it replaces, so one constructor gives the plain network
(`nn.Conv2d`), the sphere network (`hypersphere.layers.sphere_conv2d`), a decoupled one
(`functools.partial(DecoupledConv2d, ...)`) or one with spectrally normalised layers. A rotated network is a plain
network after `hypersphere.rotation.rotate_`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import nn
from torch.nn.utils import parametrize

from hypersphere._validation import is_integer, require

__all__ = [
    "ChannelFactory",
    "LayerFactory",
    "conv_unit",
    "he_normal_",
    "height_and_width",
    "large_stem_layers",
    "make_layers",
    "relu",
    "require_num_classes",
    "require_per_stage",
    "require_widths",
]

LayerFactory: TypeAlias = Callable[..., nn.Module]
"""A callable with the arguments of the torch layer that it replaces, `nn.Conv2d` or `nn.Linear`."""

ChannelFactory: TypeAlias = Callable[[int], nn.Module]
"""A callable that makes a normalisation or an activation for a given number of channels."""


def relu(channels: int) -> nn.Module:
    """Return a ReLU. The number of channels is ignored; other activations, such as `nn.PReLU`, need it.

    >>> relu(64)
    ReLU()
    """
    return nn.ReLU()


def make_layers(channels: int, *factories: ChannelFactory | None) -> list[nn.Module]:
    """Call each factory with the number of channels; None makes no layer.

    >>> make_layers(4, None, relu)
    [ReLU()]
    """
    return [factory(channels) for factory in factories if factory is not None]


def conv_unit(
    channels: int,
    width: int,
    kernel_size: int = 3,
    *,
    stride: int = 1,
    bias: bool,
    conv: LayerFactory,
    norm: ChannelFactory | None,
    activation: ChannelFactory | None,
) -> list[nn.Module]:
    """Return a convolution, then its normalisation and activation. Odd kernels of stride 1 keep the image size."""
    layer = conv(channels, width, kernel_size, stride=stride, padding=kernel_size // 2, bias=bias)
    return [layer, *make_layers(width, norm, activation)]


def large_stem_layers(
    channels: int,
    width: int,
    *,
    bias: bool,
    conv: LayerFactory,
    norm: ChannelFactory | None,
    activation: ChannelFactory | None,
) -> list[nn.Module]:
    """Return the first layers of an ImageNet network: a 7×7 convolution and a 3×3 max-pool, both with stride 2."""
    first = conv_unit(channels, width, 7, stride=2, bias=bias, conv=conv, norm=norm, activation=activation)
    # Both layers are padded and round up: a side of n pixels becomes ⌈⌈n/2⌉/2⌉ = ⌈n/4⌉.
    return [*first, nn.MaxPool2d(3, stride=2, padding=1)]


def height_and_width(image_size: int | tuple[int, int], minimum: int) -> tuple[int, int]:
    """Return the height and width of an image, each at least `minimum`.

    >>> height_and_width(32, 8)
    (32, 32)
    """
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    require(min(height, width) >= minimum, "image_size", f"at least {minimum} in height and width", image_size)
    return height, width


def require_per_stage(counts: Sequence[int], widths: Sequence[int], argument: str, minimum: int) -> None:
    """Raise a ValueError unless `widths` is valid and `counts` has as many entries, each >= `minimum`."""
    require_widths(widths)
    fits = len(counts) == len(widths) and all(is_integer(count, minimum) for count in counts)
    require(fits, argument, f"{len(widths)} integers >= {minimum}, one per entry of widths", tuple(counts))


def require_widths(widths: Sequence[int], argument: str = "widths", minimum: int = 1) -> None:
    """Raise a ValueError unless `widths` has at least `minimum` entries, all positive integers."""
    fits = isinstance(widths, Sequence) and len(widths) >= minimum and all(is_integer(width, 1) for width in widths)
    require(fits, argument, f"a sequence of {minimum} or more integers >= 1", widths)


def require_num_classes(num_classes: int | None) -> None:
    """Raise a ValueError unless `num_classes` is None or at least 2."""
    require(num_classes is None or is_integer(num_classes, 2), "num_classes", "None or an integer >= 2", num_classes)


def he_normal_(model: nn.Module) -> None:
    """Draw the weights of plain layers from N(0, 2/fan_in) and set their biases to zero (He et al. 2015).

    A layer with a parametrisation keeps the weights of its factory, because assigning through a parametrisation would
    require its inverse.
    """
    # Decoupled layers subclass these classes, so they start from the same weights as the plain network.
    for module in model.modules():
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Linear)) and not parametrize.is_parametrized(module):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
