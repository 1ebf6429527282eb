"""PointNet, with and without T-Nets, and PointNet++ with single-scale grouping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hypersphere._deprecation import deprecated_argument
from hypersphere._validation import require
from hypersphere.models._blocks import ChannelFactory, LayerFactory, make_layers, relu, require_widths
from hypersphere.models._old_names import accept_old_names

__all__ = ["Level", "PointNet", "PointNet2", "TransformNet", "ball_query", "farthest_points", "transform_penalty"]


class TransformNet(nn.Module):
    """T-Net: predicts one (k, k) matrix per cloud from its k channels (Qi et al. 2017, PointNet, figure 2).

    The last layer starts with zero weights and the identity as bias, so the matrices are the identity at first.

    Args:
        channels: k, the number of channels per point.
        widths: widths of the 1×1 convolutions before the maximum over points.
        hidden: widths of the fully connected layers after it.
        bias, conv, linear, norm, activation: see `hypersphere.models`. The last layer always has a bias.

    Example:
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
        conv: LayerFactory = nn.Conv1d,
        linear: LayerFactory = nn.Linear,
        norm: ChannelFactory | None = nn.BatchNorm1d,
        activation: ChannelFactory | None = relu,
    ) -> None:
        super().__init__()
        self.point_mlp = _point_mlp(channels, widths, bias, conv, norm, activation)
        self.global_mlp = _mlp(widths[-1], hidden, partial(linear, bias=bias), norm, activation)
        # The last layer is plain and has a bias, whatever the factories, because it must be able to give the identity.
        self.matrix = nn.Linear(hidden[-1], channels**2)
        nn.init.zeros_(self.matrix.weight)
        with torch.no_grad():
            self.matrix.bias.copy_(torch.eye(channels).flatten())
        self.channels = channels
        accept_old_names(self, {"points": "point_mlp", "whole": "global_mlp"})

    def forward(self, x: Float[Tensor, "batch channels points"]) -> Float[Tensor, "batch channels channels"]:
        """Map clouds to matrices."""
        # The maximum over points makes the matrix independent of their order.
        entries = self.matrix(self.global_mlp(self.point_mlp(x).amax(2)))
        return entries.unflatten(1, (self.channels, self.channels))


class PointNet(nn.Module):
    """A shared MLP for every point, a maximum over points, fully connected layers (Qi et al. 2017; thesis, 7.5).

    Maps clouds (batch, points, 3) to features (batch, hidden[-1]) for a head of `hypersphere.heads`. The paper
    (table 6) prints 0.8M parameters without T-Nets and 3.5M with them, both with 40 classes.

    With `transforms` the authors add 0.001 · ½ Σ ‖I − AAᵀ‖² to the loss, where A are the matrices of the feature
    transform. `penalty` returns the sum for the last training batch: `loss = head(model(points), labels) + 0.001 *
    model.penalty()`.

    Args:
        transforms: multiply the points, and later their features, by the matrices of T-Nets.
        dropout: fraction of features dropped in training, after the last layer and, with `transforms`, between the
            fully connected layers.
        per_point: widths of the 1×1 convolutions. The feature transform comes after the first two.
        hidden: widths of the fully connected layers.
        bias, conv, linear, activation: see `hypersphere.models`.
        norm: see `hypersphere.models`; it must accept (batch, channels) and (batch, channels, points).

    Example:
        >>> model = PointNet(transforms=True)
        >>> model(torch.rand(2, 16, 3)).shape
        torch.Size([2, 256])
        >>> model.penalty().item()  # T-Nets start with identity matrices
        0.0
    """

    def __init__(
        self,
        *,
        transforms: bool = False,
        dropout: float = 0.3,
        per_point: Sequence[int] = (64, 64, 64, 128, 1024),
        hidden: Sequence[int] = (512, 256),
        bias: bool = False,
        conv: LayerFactory = nn.Conv1d,
        linear: LayerFactory = nn.Linear,
        norm: ChannelFactory | None = nn.BatchNorm1d,
        activation: ChannelFactory | None = relu,
    ) -> None:
        super().__init__()
        require_widths(per_point, "per_point", 3)
        require_widths(hidden, "hidden")
        self.input_transform: TransformNet | None = None
        self.feature_transform: TransformNet | None = None
        if transforms:
            self.input_transform, self.feature_transform = (
                TransformNet(channels, bias=bias, conv=conv, linear=linear, norm=norm, activation=activation)
                for channels in (3, per_point[1])
            )
        # Two parts, because the feature transform acts between them.
        self.point_mlp1 = _point_mlp(3, per_point[:2], bias, conv, norm, activation)
        self.point_mlp2 = _point_mlp(per_point[1], per_point[2:], bias, conv, norm, activation)
        # The released code has dropout between the fully connected layers only in the model with T-Nets.
        dropout_between = dropout if transforms else 0.0
        self.global_mlp = _mlp(per_point[-1], hidden, partial(linear, bias=bias), norm, activation, dropout_between)
        self.dropout = nn.Dropout(dropout)
        self.feature_dim = hidden[-1]
        self._last_matrices: Tensor | None = None
        accept_old_names(
            self,
            {
                "turn_points": "input_transform",
                "turn_features": "feature_transform",
                "early": "point_mlp1",
                "late": "point_mlp2",
                "whole": "global_mlp",
            },
        )

    def __getstate__(self) -> dict[str, Any]:
        # The matrices belong to an autograd graph, which can be neither pickled nor copied.
        return {**self.__dict__, "_last_matrices": None}

    def with_transform(
        self, points: Float[Tensor, "batch points 3"]
    ) -> tuple[Float[Tensor, "batch feature_dim"], Float[Tensor, "batch k k"] | None]:
        """Return the features and the matrices of the feature transform, or None without T-Nets."""
        x, matrices = points.mT, None
        if self.input_transform is not None:
            x = (points @ self.input_transform(x)).mT  # points are rows: x' = x A, as in the released code
        x = self.point_mlp1(x)
        if self.feature_transform is not None:
            matrices = self.feature_transform(x)
            x = (x.mT @ matrices).mT
        return self.dropout(self.global_mlp(self.point_mlp2(x).amax(2))), matrices

    def forward(self, points: Float[Tensor, "batch points 3"]) -> Float[Tensor, "batch feature_dim"]:
        """Map clouds to features. In training mode, the matrices of the feature transform are kept for `penalty`."""
        features, matrices = self.with_transform(points)
        if self.training:  # an exported model must not assign attributes
            self._last_matrices = matrices
        return features

    def penalty(self) -> Float[Tensor, ""]:
        """Return ½ Σ ‖I − AAᵀ‖²_F over the matrices A of the last forward pass in training mode; zero without T-Nets.

        The value is differentiable. The authors add 0.001 times it to the loss.

        Raises:
            RuntimeError: if the network has T-Nets and no forward pass in training mode came before.
        """
        if self.feature_transform is None:
            return next(self.parameters()).new_zeros(())
        if self._last_matrices is None:
            raise RuntimeError("penalty() needs a forward pass in training mode; call the model on points first")
        return transform_penalty(self._last_matrices)


def transform_penalty(matrices: Float[Tensor, "*batch k k"]) -> Float[Tensor, ""]:
    """Return ½ Σ ‖I − AAᵀ‖²_F over all matrices A, which is zero if every A is orthogonal.

    >>> transform_penalty(2 * torch.eye(2).unsqueeze(0))
    tensor(9.)
    """
    identity = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    return (identity - matrices @ matrices.mT).square().sum() / 2


def _point_mlp(
    channels: int,
    widths: Sequence[int],
    bias: bool,
    conv: LayerFactory,
    norm: ChannelFactory | None,
    activation: ChannelFactory | None,
) -> nn.Sequential:
    """Return 1×1 convolutions: an MLP that is applied to every point separately."""
    return _mlp(channels, widths, lambda in_width, width: conv(in_width, width, 1, bias=bias), norm, activation)


def _mlp(
    channels: int,
    widths: Sequence[int],
    layer: LayerFactory,
    norm: ChannelFactory | None,
    activation: ChannelFactory | None,
    dropout_between: float = 0.0,
) -> nn.Sequential:
    """Return layers with normalisation and activation, and dropout between them."""
    layers: list[nn.Module] = []
    for in_width, width in pairwise((channels, *widths)):
        if layers and dropout_between:
            layers.append(nn.Dropout(dropout_between))
        layers += [layer(in_width, width), *make_layers(width, norm, activation)]
    return nn.Sequential(*layers)


@dataclass(frozen=True)
class Level:
    """One set-abstraction level of PointNet++.

    Attributes:
        points: number of centres that represent the cloud after this level.
        radius: radius of the ball around each centre.
        neighbours: number of points sampled from each ball.
        widths: widths of the 1×1 convolutions that are applied to these points.
    """

    points: int
    radius: float
    neighbours: int
    widths: tuple[int, ...]


class PointNet2(nn.Module):
    """PointNet++ with single-scale grouping (Qi et al. 2017, PointNet++, appendix B.1; thesis, 6.6.3).

    Each level chooses centres by farthest point sampling and applies a small PointNet to the ball around each centre.
    A last PointNet reduces all centres to one vector, which passes through fully connected layers. Maps clouds
    (batch, points, 3), with at least `levels[0].points` points, to features (batch, hidden[-1]) for a head.

    Args:
        levels: set-abstraction levels, from fine to coarse. The default is SA(512, 0.2, [64, 64, 128]) and
            SA(128, 0.4, [128, 128, 256]) of the paper, with 32 and 64 neighbours as in its code.
        group_all_widths: widths of the 1×1 convolutions of the last PointNet, which groups all centres of the last
            level ("group all" in the authors' code).
        hidden: widths of the fully connected layers.
        dropout: fraction of features dropped in training after each fully connected layer.
        bias, conv, linear, norm, activation: see `hypersphere.models`. Convolutions are 1×1, over (batch, channels,
            points, neighbours).
        flat_norm: factory of the normalisation after fully connected layers, or None; `norm` follows convolutions.

    Example:
        >>> model = PointNet2((Level(8, 0.5, 4, (4, 8)),), (8, 16), (8,))
        >>> model(torch.rand(2, 20, 3)).shape
        torch.Size([2, 8])
    """

    @deprecated_argument("whole", "group_all_widths")
    def __init__(
        self,
        levels: Sequence[Level] = (Level(512, 0.2, 32, (64, 64, 128)), Level(128, 0.4, 64, (128, 128, 256))),
        group_all_widths: Sequence[int] = (256, 512, 1024),
        hidden: Sequence[int] = (512, 256),
        *,
        dropout: float = 0.5,
        bias: bool = False,
        conv: LayerFactory = nn.Conv2d,
        linear: LayerFactory = nn.Linear,
        norm: ChannelFactory | None = nn.BatchNorm2d,
        flat_norm: ChannelFactory | None = nn.BatchNorm1d,
        activation: ChannelFactory | None = relu,
    ) -> None:
        super().__init__()
        self.levels = tuple(levels)
        point_mlps, channels = [], 0  # before the first level, a point has no features
        for widths in (*(level.widths for level in levels), group_all_widths):
            # Convolutions are 2-d, because their input has two dimensions of points: centres and neighbours. Every MLP
            # gets the three coordinates of a point in addition to its features from the previous level.
            point_mlps.append(_point_mlp(channels + 3, widths, bias, conv, norm, activation))
            channels = widths[-1]
        self.point_mlps = nn.ModuleList(point_mlps)
        global_layers: list[nn.Module] = []
        for in_width, width in pairwise((channels, *hidden)):
            global_layers += [linear(in_width, width, bias=bias), *make_layers(width, flat_norm, activation)]
            global_layers.append(nn.Dropout(dropout))
        self.global_mlp = nn.Sequential(*global_layers)
        self.feature_dim = hidden[-1]
        accept_old_names(self, {"nets": "point_mlps", "tail": "global_mlp"})

    def forward(self, points: Float[Tensor, "batch points 3"]) -> Float[Tensor, "batch feature_dim"]:
        """Map clouds to features."""
        centres, features = points, None
        *level_mlps, last_mlp = self.point_mlps
        for level, point_mlp in zip(self.levels, level_mlps, strict=True):
            candidates = centres
            centres = _gather(candidates, farthest_points(candidates, level.points))
            index = ball_query(candidates, centres, level.radius, level.neighbours)
            # Use coordinates relative to the centre, so that features do not depend on the position of a shape.
            offsets = _gather(candidates, index) - centres.unsqueeze(2)
            neighbour_features = None if features is None else _gather(features, index)
            features = _pool_neighbours(point_mlp, offsets, neighbour_features)
        # The last PointNet treats all centres as neighbours of one common centre, the origin.
        all_features = None if features is None else features.unsqueeze(1)
        pooled = _pool_neighbours(last_mlp, centres.unsqueeze(1), all_features)
        return self.global_mlp(pooled.squeeze(1))


@torch.no_grad()
def farthest_points(points: Float[Tensor, "batch points dim"], count: int) -> Int[Tensor, "batch count"]:
    """Return the indices chosen by farthest point sampling.

    The first index is 0; each further point is the one farthest from all points chosen before it.

    >>> farthest_points(torch.tensor([[[0.0], [1.0], [5.0], [2.0]]]), 3)
    tensor([[0, 2, 3]])
    """
    require(1 <= count <= points.shape[1], "count", f"in 1..{points.shape[1]}, the number of points", count)
    batch = torch.arange(len(points), device=points.device)
    chosen = torch.zeros(len(points), count, dtype=torch.int64, device=points.device)
    # Squared distance of every point from the nearest chosen point.
    distances = torch.full(points.shape[:2], torch.inf, dtype=points.dtype, device=points.device)
    # The loop is sequential, because a choice depends on all earlier ones. A step costs O(points) per cloud.
    for position in range(1, count):
        newest = points[batch, chosen[:, position - 1]].unsqueeze(1)
        distances = torch.minimum(distances, (points - newest).square().sum(2))
        chosen[:, position] = distances.argmax(1)
    return chosen


@torch.no_grad()
def ball_query(
    points: Float[Tensor, "batch points dim"], centres: Float[Tensor, "batch centres dim"], radius: float, count: int
) -> Int[Tensor, "batch centres neighbours"]:
    """Return the indices of the first `count` points within a radius of each centre.

    If a ball has fewer points, its first point is repeated. Every ball must contain at least one point, which holds if
    the centres are points of the cloud.

    >>> ball_query(torch.tensor([[[0.0], [1.0], [5.0]]]), torch.tensor([[[0.5], [5.0]]]), 1.0, 2)
    tensor([[[0, 1],
             [2, 2]]])
    """
    # Computing distances from squared norms and products would be inaccurate for the small distances that matter here.
    # The ball is open, as in the authors' code.
    outside = torch.cdist(centres, points, compute_mode="donot_use_mm_for_euclid_dist") >= radius
    num_points = points.shape[1]
    # Points outside the ball get the index num_points, so that the smallest indices are the first points inside.
    index = torch.arange(num_points, device=points.device).expand(outside.shape).masked_fill(outside, num_points)
    index = index.topk(min(count, num_points), largest=False, sorted=True).values
    return torch.where(index == num_points, index[..., :1], index)


def _gather(values: Tensor, index: Tensor) -> Tensor:
    """Return the rows (batch, …, channels) of values (batch, points, channels) at indices (batch, …)."""
    batch = torch.arange(len(values), device=values.device).reshape(-1, *[1] * (index.ndim - 1))
    return values[batch, index]


def _pool_neighbours(point_mlp: nn.Module, offsets: Tensor, features: Tensor | None) -> Tensor:
    """Apply an MLP to (batch, centres, neighbours, 3 + channels) and take the maximum over neighbours."""
    x = offsets if features is None else torch.cat([offsets, features], dim=3)
    # Convolutions need channels in dimension 1; the result is (batch, centres, channels) again.
    return point_mlp(x.permute(0, 3, 1, 2)).amax(3).mT
