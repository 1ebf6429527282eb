"""PointNet, with and without its transformation networks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from hypersphere.models.units import ByChannels, Maker, layers_by, relu

__all__ = ["PointNet", "TransformNet", "transform_penalty"]


class TransformNet(nn.Module):
    """T-Net: a (k, k) matrix for each cloud from its k channels, the identity at the start.

    >>> TransformNet(3, (4, 8), (8,))(torch.zeros(2, 3, 10)).shape
    torch.Size([2, 3, 3])
    """

    def __init__(
        self,
        channels: int,
        widths: Sequence[int] = (64, 128, 1024),
        hidden: Sequence[int] = (512, 256),
        *,
        bias: bool = False,
        conv: Maker = nn.Conv1d,
        linear: Maker = nn.Linear,
        norm: ByChannels | None = nn.BatchNorm1d,
        activation: ByChannels | None = relu,
    ) -> None:
        super().__init__()
        self.points = _shared(channels, widths, bias, conv, norm, activation)
        self.whole = _connected(widths[-1], hidden, bias, linear, norm, activation)
        self.matrix = nn.Linear(hidden[-1], channels**2)
        nn.init.zeros_(self.matrix.weight)
        with torch.no_grad():
            self.matrix.bias.copy_(torch.eye(channels).flatten())
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        """Map clouds (B, k, P) to matrices (B, k, k)."""
        return self.matrix(self.whole(self.points(x).amax(2))).unflatten(1, (self.channels, self.channels))


class PointNet(nn.Module):
    """The same small network for every point, a maximum over points, and fully connected layers (Qi et al. 2017).

    It maps clouds (B, P, 3) to features (B, hidden[-1]) for a head.

    Args:
        transforms: whether to turn the points, and the features of points, by the matrices of T-Nets.
        dropout: share of features dropped in training: of the last layer, with transforms of each hidden one.
        per_point: widths of the 1×1 convolutions; a feature transform comes after the first two.
        hidden: widths of the fully connected layers.
        bias: whether layers have biases.
        conv: maker of 1×1 convolutions, called as `nn.Conv1d` is.
        linear: maker of the fully connected layers, called as `nn.Linear` is.
        norm: maker of a norm from a number of channels, for (B, C) and (B, C, P) alike, or None.
        activation: maker of an activation from a number of channels, or None.

    Example:
        >>> PointNet()(torch.rand(2, 16, 3)).shape
        torch.Size([2, 256])
    """

    def __init__(
        self,
        *,
        transforms: bool = False,
        dropout: float = 0.3,
        per_point: Sequence[int] = (64, 64, 64, 128, 1024),
        hidden: Sequence[int] = (512, 256),
        bias: bool = False,
        conv: Maker = nn.Conv1d,
        linear: Maker = nn.Linear,
        norm: ByChannels | None = nn.BatchNorm1d,
        activation: ByChannels | None = relu,
    ) -> None:
        super().__init__()
        self.turn_points: TransformNet | None = None
        self.turn_features: TransformNet | None = None
        if transforms:
            self.turn_points, self.turn_features = (
                TransformNet(channels, bias=bias, conv=conv, linear=linear, norm=norm, activation=activation)
                for channels in (3, per_point[1])
            )
        self.early = _shared(3, per_point[:2], bias, conv, norm, activation)
        self.late = _shared(per_point[1], per_point[2:], bias, conv, norm, activation)
        between = dropout if transforms else 0.0
        self.whole = _connected(per_point[-1], hidden, bias, linear, norm, activation, between)
        self.dropout = nn.Dropout(dropout)
        self.feature_dim = hidden[-1]

    def with_transform(self, points: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the features, and the matrices (B, k, k) of the feature transform, for `transform_penalty`."""
        x, matrices = points.mT, None
        if self.turn_points is not None:
            x = (points @ self.turn_points(x)).mT
        x = self.early(x)
        if self.turn_features is not None:
            matrices = self.turn_features(x)
            x = (x.mT @ matrices).mT
        return self.dropout(self.whole(self.late(x).amax(2))), matrices

    def forward(self, points: Tensor) -> Tensor:
        """Map clouds (B, P, 3) to features (B, feature_dim)."""
        return self.with_transform(points)[0]


def transform_penalty(matrices: Tensor) -> Tensor:
    """½ Σ ‖I − AAᵀ‖²_F over the batch, which keeps T-Nets near rotations; the authors add 0.001 times it to the loss.

    >>> transform_penalty(2 * torch.eye(2).unsqueeze(0))
    tensor(9.)
    """
    identity = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    return (identity - matrices @ matrices.mT).square().sum() / 2


def _shared(
    channels: int,
    widths: Sequence[int],
    bias: bool,
    conv: Maker,
    norm: ByChannels | None,
    activation: ByChannels | None,
) -> nn.Sequential:
    """1×1 convolutions: the same layers for every point."""
    layers: list[nn.Module] = []
    for before, width in pairwise((channels, *widths)):
        layers += [conv(before, width, 1, bias=bias), *layers_by((norm, activation), width)]
    return nn.Sequential(*layers)


def _connected(
    channels: int,
    widths: Sequence[int],
    bias: bool,
    linear: Maker,
    norm: ByChannels | None,
    activation: ByChannels | None,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Fully connected layers, with dropout between them."""
    layers: list[nn.Module] = []
    for before, width in pairwise((channels, *widths)):
        if layers and dropout:
            layers.append(nn.Dropout(dropout))
        layers += [linear(before, width, bias=bias), *layers_by((norm, activation), width)]
    return nn.Sequential(*layers)
