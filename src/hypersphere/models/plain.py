"""Plain CNNs: stages of 3×3 convolutions with max-pooling in between, and one fully connected layer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from hypersphere._validation import require
from hypersphere.models._blocks import (
    ChannelFactory,
    LayerFactory,
    conv_unit,
    he_normal_,
    height_and_width,
    large_stem_layers,
    make_layers,
    relu,
    require_num_classes,
    require_per_stage,
    require_widths,
)
from hypersphere.models._old_names import rename_prefixes

__all__ = ["PlainCNN"]


class PlainCNN(nn.Module):
    """CNN-N of the thesis: no shortcuts, a 2×2 max-pool after each stage (tables 2.1 and B.1 to F.3).

    Maps images (batch, in_channels, height, width) to features (batch, feature_dim) for a head of
    `hypersphere.heads`. With `num_classes` a linear classifier follows the features and the output is logits.

    By default the fully connected layer has no activation, with or without `num_classes`: appendix A.1 of the thesis
    removes the last ReLU, which would confine features to one orthant, and the authors' code has none.
    Pass `feature_activation=relu` for networks that have one.

    The OPT paper (table 10) prints 258K weights for CNN-6 of widths 64/64/64 and 2.99M for the wide CNN-9 of widths
    64/128/256, both with 100 classes. These counts contain no biases and no batch normalisation.

    Args:
        depth: N, the number of convolutions, divided evenly among the stages; or one number per stage.
        widths: number of filters of each stage.
        feature_dim: width of the fully connected layer. None omits the layer; the feature is then the flattened image.
        kernel_size: kernel size of all convolutions except that of a large stem.
        first_stride: stride of the first convolution.
        last_pool: add a max-pool after the last stage.
        large_stem: start with a 7×7 convolution of stride 2 and a 3×3 max-pool of stride 2. It counts as one of the N
            convolutions.
        feature_activation: factory of an activation after the fully connected layer, or None.
        in_channels, image_size, num_classes, bias, conv, linear, norm, activation: see `hypersphere.models`.

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
        first_stride: int = 1,
        last_pool: bool = True,
        large_stem: bool = False,
        bias: bool = False,
        conv: LayerFactory = nn.Conv2d,
        linear: LayerFactory = nn.Linear,
        norm: ChannelFactory | None = nn.BatchNorm2d,
        activation: ChannelFactory | None = relu,
        feature_activation: ChannelFactory | None = None,
    ) -> None:
        super().__init__()
        convs_per_stage = _convs_per_stage(depth, widths, large_stem)
        require(not large_stem or first_stride == 1, "first_stride", "1 with a large stem", first_stride)
        require(kernel_size % 2 == 1, "kernel_size", "an odd integer", kernel_size)
        require_num_classes(num_classes)
        # Every stage halves the image, a large stem quarters it. At least one pixel must remain.
        reduction = 2 ** (len(widths) - (not last_pool)) * (4 if large_stem else first_stride)
        height, width = height_and_width(image_size, reduction)
        unit = partial(conv_unit, bias=bias, conv=conv, norm=norm, activation=activation)

        layers: list[nn.Module] = []
        channels = in_channels
        if large_stem:
            layers += large_stem_layers(channels, widths[0], bias=bias, conv=conv, norm=norm, activation=activation)
            # Convolution and pool of the stem pad their input, so sizes are rounded up.
            height, width, channels = -(-height // 4), -(-width // 4), widths[0]
        # A padded convolution of stride s maps n pixels to ⌈n/s⌉.
        height, width = -(-height // first_stride), -(-width // first_stride)
        for stage, (count, filters) in enumerate(zip(convs_per_stage, widths, strict=True)):
            for index in range(count):
                stride = first_stride if stage == index == 0 else 1
                layers += unit(channels, filters, kernel_size, stride=stride)
                channels = filters
            if last_pool or stage < len(widths) - 1:
                layers.append(nn.MaxPool2d(2))  # not padded, so odd sizes are rounded down
                height, width = height // 2, width // 2

        flat_dim = channels * height * width
        self.feature_dim = flat_dim if feature_dim is None else feature_dim
        self.stages = nn.Sequential(*layers)
        self.feature = nn.Identity() if feature_dim is None else linear(flat_dim, feature_dim, bias=bias)
        self.feature_activation = nn.Sequential(*make_layers(self.feature_dim, feature_activation))
        self.classifier = None if num_classes is None else nn.Linear(self.feature_dim, num_classes, bias=bias)
        he_normal_(self)  # includes the fully connected layer and the classifier
        self.register_load_state_dict_pre_hook(_rename_old_classifier)

    def features(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch feature_dim"]:
        """Map images to features, without the classifier."""
        return self.feature_activation(self.feature(self.stages(images).flatten(1)))

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch outputs"]:
        """Map images to features (batch, feature_dim), or to logits (batch, num_classes) if there is a classifier."""
        features = self.features(images)
        return features if self.classifier is None else self.classifier(features)


def _convs_per_stage(depth: int | Sequence[int], widths: Sequence[int], large_stem: bool) -> Sequence[int]:
    """Return the number of convolutions of each stage, not counting the large stem."""
    if not isinstance(depth, int):
        require_per_stage(depth, widths, "depth", 1)
        return depth
    require_widths(widths)
    stages = len(widths)
    count, remainder = divmod(depth - large_stem, stages)
    extra = " plus one for the large stem" if large_stem else ""
    require(count >= 1 and remainder == 0, "depth", f"a multiple of the {stages} stages{extra}", depth)
    return [count] * stages


def _rename_old_classifier(module: PlainCNN, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Rename the keys of version 0.1, in which the classifier was a sequence of an activation and a linear layer.

    Without `activation` or without a fully connected layer, the sequence consisted of the linear layer only.
    """
    if not any(key.startswith(f"{prefix}classifier.1.") for key in state_dict):
        rename_prefixes(state_dict, prefix, {"classifier.0": "classifier"})
        return
    # A PReLU has weights. They load only into a network that has a PReLU at this position.
    rename_prefixes(state_dict, prefix, {"classifier.0": "feature_activation.0", "classifier.1": "classifier"})
    # A ReLU has no weights, so its absence would go unnoticed and change the logits.
    if not len(module.feature_activation):
        message = (
            "this state dict is from version 0.1, whose PlainCNN had an activation before the classifier; "
            "build the network with feature_activation=relu (or the activation of that network) to get the same logits"
        )
        warnings.warn(message, UserWarning, stacklevel=2)
