"""The multilayer perceptron of the thesis."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from jaxtyping import Float
from torch import Tensor, nn

from hypersphere.models._blocks import (
    ChannelFactory,
    LayerFactory,
    make_layers,
    relu,
    require_num_classes,
    require_widths,
)

__all__ = ["MLP"]


class MLP(nn.Module):
    """Fully connected layers, each followed by an activation; 784-256-256 by default (thesis, F.3).

    Maps inputs of any shape, flattened, to features (batch, widths[-1]) for a head of `hypersphere.heads`. With
    `num_classes=10` it is the 784-256-256-10 network of the thesis.

    Args:
        in_features: numbers per input.
        widths: neurons of each layer.
        num_classes, bias, linear, norm, activation: see `hypersphere.models`.

    Example:
        >>> import torch
        >>> MLP()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 256])
    """

    def __init__(
        self,
        in_features: int = 784,
        widths: Sequence[int] = (256, 256),
        *,
        num_classes: int | None = None,
        bias: bool = True,
        linear: LayerFactory = nn.Linear,
        norm: ChannelFactory | None = None,
        activation: ChannelFactory | None = relu,
    ) -> None:
        super().__init__()
        require_widths(widths)
        require_num_classes(num_classes)
        layers: list[nn.Module] = []
        for in_width, width in pairwise((in_features, *widths)):
            layers += [linear(in_width, width, bias=bias), *make_layers(width, norm, activation)]
        self.feature_dim = widths[-1]
        self.layers = nn.Sequential(*layers)
        # `linear` makes only the hidden layers. For a decoupled classifier, use a head.
        self.classifier = None if num_classes is None else nn.Linear(widths[-1], num_classes, bias=bias)

    def features(self, inputs: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch feature_dim"]:
        """Map inputs to features, without the classifier."""
        return self.layers(inputs.flatten(1))

    def forward(self, inputs: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch outputs"]:
        """Map inputs to features (batch, feature_dim), or to logits (batch, num_classes) if there is a classifier."""
        features = self.features(inputs)
        return features if self.classifier is None else self.classifier(features)
