"""IResNet and MobileFaceNet with the parameter names of insightface, so that its checkpoints can be loaded.

insightface trains on aligned 112×112 RGB faces normalised to (x − 127.5)/127.5. Other image sizes are possible here;
the layers whose size depends on the image then differ from the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn

from hypersphere._validation import require
from hypersphere.models._blocks import LayerFactory, height_and_width

__all__ = ["IResNet", "MobileFaceNet"]

_SHRINKAGE = 16  # both networks halve the image four times


class _IResNetUnit(nn.Module):
    """y = shortcut(x) + bn3(conv2(prelu(bn2(conv1(bn1(x)))))), with the stride in the second convolution."""

    def __init__(self, channels: int, width: int, stride: int, conv: LayerFactory) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = conv(channels, width, 3, stride=1, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.prelu = nn.PReLU(width)
        self.conv2 = conv(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        changes_shape = stride != 1 or channels != width
        self.downsample = (
            nn.Sequential(conv(channels, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width))
            if changes_shape
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        return shortcut + self.bn3(self.conv2(self.prelu(self.bn2(self.conv1(self.bn1(x))))))


class IResNet(nn.Module):
    """Residual network for faces (Duta et al. 2020, as used by ArcFace): four stages, each halving the image.

    Maps images (batch, in_channels, height, width) to features (batch, feature_dim). The last layer is a BatchNorm
    whose weight is fixed at 1, so that all coordinates of the feature have the same scale.

    Args:
        depths: units per stage: (2, 2, 2, 2) is IResNet-18, (3, 4, 6, 3) 34, (3, 4, 14, 3) 50, (3, 13, 30, 3) 100.
        widths: number of filters of each stage. The stem has as many as the first stage.
        in_channels: channels of the image.
        image_size: (height, width), or one integer for both.
        feature_dim: dimension of the feature.
        dropout: dropout probability before the linear layer.
        conv: factory of the convolutions, called like `nn.Conv2d`.

    Example:
        >>> import torch
        >>> IResNet((1, 1, 1, 1), (4, 4, 8, 8), image_size=32, feature_dim=16)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 16])
    """

    def __init__(
        self,
        depths: Sequence[int] = (3, 4, 14, 3),
        widths: Sequence[int] = (64, 128, 256, 512),
        *,
        in_channels: int = 3,
        image_size: int | tuple[int, int] = 112,
        feature_dim: int = 512,
        dropout: float = 0.0,
        conv: LayerFactory = nn.Conv2d,
    ) -> None:
        super().__init__()
        fits = len(depths) == len(widths) == 4 and min(*depths, *widths) >= 1
        require(fits, "depths and widths", "four integers >= 1 each", (tuple(depths), tuple(widths)))
        height, width = height_and_width(image_size, _SHRINKAGE)
        self.feature_dim = feature_dim
        self.conv1 = conv(in_channels, widths[0], 3, stride=1, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.prelu = nn.PReLU(widths[0])
        channels = widths[0]
        for stage, (depth, filters) in enumerate(zip(depths, widths, strict=True), 1):
            units = [
                _IResNetUnit(channels if index == 0 else filters, filters, 2 if index == 0 else 1, conv)
                for index in range(depth)
            ]
            setattr(self, f"layer{stage}", nn.Sequential(*units))
            channels = filters
        self.bn2 = nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout(dropout)
        # A padded convolution of stride 2 rounds up, so four of them map a side of n pixels to ⌈n/16⌉.
        self.fc = nn.Linear(channels * -(-height // _SHRINKAGE) * -(-width // _SHRINKAGE), feature_dim)
        self.features = nn.BatchNorm1d(feature_dim)
        self.features.weight.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, 0.0, 0.1)

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch feature_dim"]:
        """Map images to features."""
        x = self.prelu(self.bn1(self.conv1(images)))
        for stage in ("layer1", "layer2", "layer3", "layer4"):
            x = self.get_submodule(stage)(x)
        return self.features(self.fc(self.dropout(self.bn2(x).flatten(1))))


class _Layers(nn.Module):
    """A sequence called `layers`, as in the parameter names of insightface's MobileFaceNet."""

    def __init__(self, *layers: nn.Module, residual: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return x + y if self.residual else y


class MobileFaceNet(nn.Module):
    """Small network of depthwise convolutions for faces (Chen et al. 2018), in the form that insightface trains.

    Maps images (batch, in_channels, height, width) to features (batch, feature_dim). A depthwise convolution over the
    whole last feature map replaces the pooling, so that each position gets its own weight.

    Args:
        depths: units per stage; insightface's large network has (2, 8, 12, 4).
        scale: the stages have 64, 64, 128 and 128 times this many channels; 4 for the large network.
        in_channels: channels of the image.
        image_size: (height, width), or one integer for both.
        feature_dim: dimension of the feature.
        conv: factory of the convolutions, called like `nn.Conv2d`.

    Example:
        >>> import torch
        >>> MobileFaceNet((1, 1, 1, 1), 1, image_size=32, feature_dim=16).eval()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 16])
    """

    def __init__(
        self,
        depths: Sequence[int] = (1, 4, 6, 2),
        scale: int = 2,
        *,
        in_channels: int = 3,
        image_size: int | tuple[int, int] = 112,
        feature_dim: int = 512,
        conv: LayerFactory = nn.Conv2d,
    ) -> None:
        super().__init__()
        fits = len(depths) == 4 and min(depths) >= 1
        require(fits, "depths", "four integers >= 1", tuple(depths))
        require(scale >= 1, "scale", "an integer >= 1", scale)
        height, width = height_and_width(image_size, _SHRINKAGE)

        def unit(channels: int, filters: int, size: int = 1, *, stride: int = 1, groups: int = 1) -> _Layers:
            layer = conv(channels, filters, size, stride=stride, padding=size // 2, groups=groups, bias=False)
            return _Layers(layer, nn.BatchNorm2d(filters), nn.PReLU(filters))

        def linear_unit(channels: int, filters: int, size: int | tuple[int, int] = 1, groups: int = 1) -> _Layers:
            layer = conv(channels, filters, size, stride=1, padding=0, groups=groups, bias=False)
            return _Layers(layer, nn.BatchNorm2d(filters))

        def bottleneck(channels: int, filters: int, inner: int, *, stride: int = 2, residual: bool = False) -> _Layers:
            # Expand to `inner` channels, filter each of them separately, and project to `filters` channels.
            return _Layers(
                unit(channels, inner),
                unit(inner, inner, 3, stride=stride, groups=inner),
                linear_unit(inner, filters),
                residual=residual,
            )

        def stage(channels: int, inner: int, depth: int) -> _Layers:
            return _Layers(*(bottleneck(channels, channels, inner, stride=1, residual=True) for _ in range(depth)))

        narrow, wide = 64 * scale, 128 * scale
        self.feature_dim = feature_dim
        self.layers = nn.ModuleList(
            [
                unit(in_channels, narrow, 3, stride=2),
                # A single unit of the first stage is a grouped convolution without expansion.
                unit(narrow, narrow, 3, groups=64) if depths[0] == 1 else stage(narrow, 128, depths[0]),
                bottleneck(narrow, narrow, 128),
                stage(narrow, 128, depths[1]),
                bottleneck(narrow, wide, 256),
                stage(wide, 256, depths[2]),
                bottleneck(wide, wide, 512),
                stage(wide, 256, depths[3]),
            ]
        )
        self.conv_sep = unit(wide, 512)
        map_size = (-(-height // _SHRINKAGE), -(-width // _SHRINKAGE))
        self.features = _Layers(
            linear_unit(512, 512, map_size, groups=512),
            nn.Flatten(),
            nn.Linear(512, feature_dim, bias=False),
            nn.BatchNorm1d(feature_dim),
        )
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch feature_dim"]:
        """Map images to features."""
        for layer in self.layers:
            images = layer(images)
        return self.features(self.conv_sep(images))
