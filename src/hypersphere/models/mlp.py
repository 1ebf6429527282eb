"""The multilayer perceptron of the sources."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from hypersphere._validation import require
from hypersphere.models.units import ByChannels, Maker, layers_by, relu

__all__ = ["MLP"]


class MLP(nn.Module):
    """Fully connected layers, 784-256-256 by default, and ten logits more with `num_classes=10` (thesis, F.3).

    It maps inputs of any shape, flattened, to features (B, widths[-1]) for a head.

    Args:
        in_features: numbers of one input.
        widths: neurons in each layer.
        num_classes: None for features, a number for logits.
        bias: whether layers have biases.
        linear: maker of the layers, called as `nn.Linear` is; the classifier is an `nn.Linear`.
        norm: maker of a norm from a number of neurons, such as `nn.BatchNorm1d`, or None.
        activation: maker of an activation from a number of neurons, or None.

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
        linear: Maker = nn.Linear,
        norm: ByChannels | None = None,
        activation: ByChannels | None = relu,
    ) -> None:
        super().__init__()
        require(len(widths) > 0, "widths", "one number or more", tuple(widths))
        layers: list[nn.Module] = []
        for before, width in pairwise((in_features, *widths)):
            layers += [linear(before, width, bias=bias), *layers_by((norm, activation), width)]
        self.feature_dim = widths[-1]
        self.layers = nn.Sequential(*layers)
        self.classifier = None if num_classes is None else nn.Linear(widths[-1], num_classes, bias=bias)

    def features(self, inputs: Tensor) -> Tensor:
        """Map inputs (B, …) to features (B, feature_dim)."""
        return self.layers(inputs.flatten(1))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (B, …) to features (B, feature_dim), or to logits (B, num_classes) if there are classes."""
        features = self.features(inputs)
        return features if self.classifier is None else self.classifier(features)
