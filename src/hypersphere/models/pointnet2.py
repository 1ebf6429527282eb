"""PointNet++ with single-scale grouping: PointNets on nested neighbourhoods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from hypersphere.models.grouping import ball_query, farthest_points, gather
from hypersphere.models.units import ByChannels, Maker, conv_unit, layers_by, relu

__all__ = ["LEVELS", "Level", "PointNet2"]


@dataclass(frozen=True)
class Level:
    """One level: how many points stand for the cloud, the ball and the neighbours of each, and the widths there."""

    points: int
    radius: float
    neighbours: int
    widths: tuple[int, ...]


LEVELS = (Level(512, 0.2, 32, (64, 64, 128)), Level(128, 0.4, 64, (128, 128, 256)))


class PointNet2(nn.Module):
    """Levels of grouping, one PointNet over what is left, and fully connected layers (Qi et al. 2017, SSG).

    It maps clouds (B, P, 3) to features (B, hidden[-1]) for a head.

    Args:
        levels: the grouping, from fine to coarse.
        whole: widths of the 1×1 convolutions over the points of the last level, before their maximum.
        hidden: widths of the fully connected layers.
        dropout: share of features dropped after each of these in training.
        bias: whether layers have biases.
        conv: maker of 1×1 convolutions over (B, C, points, neighbours), called as `nn.Conv2d` is.
        linear: maker of the fully connected layers, called as `nn.Linear` is.
        norm: maker of a norm of convolutions from a number of channels, or None.
        flat_norm: maker of a norm of fully connected layers, or None.
        activation: maker of an activation from a number of channels, or None.

    Example:
        >>> net = PointNet2((Level(8, 0.5, 4, (4, 8)),), (8, 16), (8,))
        >>> net(torch.rand(2, 20, 3)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        levels: Sequence[Level] = LEVELS,
        whole: Sequence[int] = (256, 512, 1024),
        hidden: Sequence[int] = (512, 256),
        *,
        dropout: float = 0.5,
        bias: bool = False,
        conv: Maker = nn.Conv2d,
        linear: Maker = nn.Linear,
        norm: ByChannels | None = nn.BatchNorm2d,
        flat_norm: ByChannels | None = nn.BatchNorm1d,
        activation: ByChannels | None = relu,
    ) -> None:
        super().__init__()
        self.levels = tuple(levels)
        nets, channels = [], 0
        for widths in (*(level.widths for level in levels), whole):
            layers: list[nn.Module] = []
            for before, width in pairwise((channels + 3, *widths)):
                layers += conv_unit(before, width, 1, bias=bias, conv=conv, norm=norm, activation=activation)
            nets.append(nn.Sequential(*layers))
            channels = widths[-1]
        self.nets = nn.ModuleList(nets)
        tail: list[nn.Module] = []
        for before, width in pairwise((channels, *hidden)):
            tail += [linear(before, width, bias=bias), *layers_by((flat_norm, activation), width), nn.Dropout(dropout)]
        self.tail = nn.Sequential(*tail)
        self.feature_dim = hidden[-1]

    def forward(self, points: Tensor) -> Tensor:
        """Map clouds (B, P, 3) to features (B, feature_dim)."""
        values: Tensor | None = None
        *nets, last = self.nets
        for level, net in zip(self.levels, nets, strict=True):
            centres = gather(points, farthest_points(points, level.points))
            index = ball_query(points, centres, level.radius, level.neighbours)
            around = gather(points, index) - centres.unsqueeze(2)
            values = self._pooled(net, around, None if values is None else gather(values, index))
            points = centres
        everything = self._pooled(last, points.unsqueeze(1), None if values is None else values.unsqueeze(1))
        return self.tail(everything.squeeze(1))

    @staticmethod
    def _pooled(net: nn.Module, places: Tensor, values: Tensor | None) -> Tensor:
        """The maximum of a net over neighbours: (B, M, K, 3) and (B, M, K, C) to (B, M, width)."""
        x = places if values is None else torch.cat([places, values], dim=3)
        return net(x.permute(0, 3, 1, 2)).amax(3).mT
