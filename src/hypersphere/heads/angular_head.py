r"""The one head: scores h(‖w‖, ‖x‖)·g(θ), with a margin ψ on the target class."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypersphere import sphere
from hypersphere.functions.angular import ANGULARS
from hypersphere.functions.magnitude import InnerProduct, Linear, LinearlyWeighted, Magnitude, Sphere
from hypersphere.functions.margin import MARGINS, Margin
from hypersphere.functions.menu import choose, require
from hypersphere.heads.annealing import Annealing

__all__ = ["AngularHead"]


class AngularHead(nn.Module):
    r"""A classifier whose scores are magnitudes times functions of angles (thesis, 2.4, 2.18, 2.20, 3.10 and 3.11).

    .. math:: f_j = h(\|w_j\|, \|x\|)\,g(\theta_j), \quad f_y = h(\|w_y\|, \|x\|)\,\psi(\theta_y), \quad
              \mathrm{loss} = \mathrm{mean}\ \mathrm{cross\ entropy}(f, y)

    Args:
        in_features: d, the length of a feature.
        num_classes: C ≥ 2.
        radius: "feature" to keep ‖x‖, or the radius s > 0 that every feature is put on.
        weight_norm: whether class vectors count as unit vectors; False keeps ‖w‖.
        angular: g, a name of `hypersphere.angular`, an object or a callable of the cosine.
        margin: ψ, a name of `hypersphere.margin`, an object, a callable of the target's cosine, or None for g itself.
        annealing: a schedule from the plain target score to the one with the margin; its step counter is part of the
            state dict and advances with every training step.
        bias: whether to learn a bias per class.
        gradient: "true", or "detached" to let the gradient pass the margin as if it were not there.

    Example:
        >>> head = AngularHead(8, 3, margin="multiplicative")
        >>> head(torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])).shape
        torch.Size([])
    """

    weight: Tensor
    steps: Tensor

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        radius: str | float = "feature",
        weight_norm: bool = True,
        angular: str | Callable[[Tensor], Tensor] = "cosine",
        margin: str | Margin | Callable[[Tensor], Tensor] | None = None,
        annealing: Annealing | None = None,
        bias: bool = False,
        gradient: str = "true",
    ) -> None:
        super().__init__()
        require(in_features >= 1, "in_features", "a number >= 1", in_features)
        require(num_classes >= 2, "num_classes", "a number >= 2", num_classes)
        require(gradient in ("true", "detached"), "gradient", "'true' or 'detached'", gradient)
        require(margin is not None or annealing is None, "annealing", "None when there is no margin", annealing)
        self.in_features = in_features
        self.num_classes = num_classes
        self.radius = radius
        self.weight_norm = weight_norm
        self.magnitude = _magnitude(radius, weight_norm)
        self.angular = choose(ANGULARS, angular, "angular")
        self.margin = None if margin is None else choose(MARGINS, margin, "margin")
        self.annealing = annealing
        self.gradient = gradient
        self.weight = nn.Parameter(torch.empty(num_classes, in_features))
        self.bias = nn.Parameter(torch.empty(num_classes)) if bias else None
        if annealing is not None:
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw class vectors uniformly over the sphere, with norms near 1."""
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of features `x` (B, d) with labels `y` (B,); 0 for an empty batch."""
        logits = self.logits(x, y)
        if self.annealing is not None and self.training:
            self.steps += 1
        if len(x) == 0:
            return logits.sum() + 0 * self.weight.sum()
        return F.cross_entropy(logits, y.long())

    def scores(self, x: Tensor) -> Tensor:
        """Return the plain scores (B, C), without margin: those a prediction is made from."""
        self._check_features(x)
        return self._plain(x)[0]

    def logits(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the scores (B, C) with the margin on each target, for any loss of one's own."""
        self._check_features(x)
        self._check_labels(x, y)
        plain, cosines, magnitudes = self._plain(x)
        if self.margin is None:
            return plain
        column = y.long().unsqueeze(1)
        c = cosines.gather(1, column)
        h = magnitudes.expand_as(plain).gather(1, column)
        target = h * self._target_response(c)
        if self.bias is not None:
            target = target + self.bias.to(plain.dtype)[column]
        return plain.scatter(1, column, target)

    def _plain(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with sphere.full_precision(x):
            x_norm, x_hat = sphere.polar(x)
            w_norm, w_hat = sphere.polar(self.weight)
            wide = torch.promote_types(x_hat.dtype, w_hat.dtype)
            c = x_hat.to(wide) @ w_hat.to(wide).mT
            h = self.magnitude(w_norm.mT.to(wide), x_norm.to(wide))
            plain = h * self.angular(c)
            if self.bias is not None:
                plain = plain + self.bias.to(wide)
        return plain, c, h

    def _target_response(self, c: Tensor) -> Tensor:
        """The target's response in place of g: ψ, straight-through if asked for, blended with g while annealing."""
        assert self.margin is not None
        plain = self.angular(c)
        psi = self.margin(c, self.angular) if isinstance(self.margin, Margin) else self.margin(c)
        if self.gradient == "detached":
            psi = plain + (psi - plain).detach()
        if self.annealing is None:
            return psi
        share = self.annealing(self.steps).to(c.dtype)
        return (share * plain + psi) / (1 + share)

    def _check_features(self, x: Tensor) -> None:
        if x.ndim != 2 or x.shape[1] != self.in_features or not x.is_floating_point():
            raise ValueError(
                f"x must be floating-point features of shape (B, {self.in_features}), not {x.dtype} {tuple(x.shape)}"
            )
        sphere.require_finite_rows("x", x)

    def _check_labels(self, x: Tensor, y: Tensor) -> None:
        if y.shape != x.shape[:1] or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            raise ValueError(f"y must be {len(x)} integer labels, one a row of x, not {y.dtype} {tuple(y.shape)}")
        if len(y) and sphere.inspectable(y):
            low, high = (int(v) for v in torch.aminmax(y))
            if low < 0 or high >= self.num_classes:
                row = int(((y < 0) | (y >= self.num_classes)).nonzero()[0])
                raise ValueError(f"y must lie in [0, {self.num_classes}), but row {row} is {int(y[row])}")

    def extra_repr(self) -> str:
        """Show what makes this head differ from another."""
        return (
            f"{self.in_features}, {self.num_classes}, radius={self.radius!r}, weight_norm={self.weight_norm}, "
            f"angular={self.angular!r}, margin={self.margin!r}, annealing={self.annealing!r}, "
            f"bias={self.bias is not None}, gradient={self.gradient!r}"
        )


def _magnitude(radius: str | float, weight_norm: bool) -> Magnitude:
    """ρ(x)·ν(w) of the head as one of the magnitudes h that layers use."""
    if radius == "feature":
        return Linear() if weight_norm else InnerProduct()
    accepted = "'feature' or a positive number"
    require(isinstance(radius, (int, float)) and 0 < radius < math.inf, "radius", accepted, radius)
    fixed = Sphere(alpha=float(radius))
    return fixed if weight_norm else LinearlyWeighted(fixed)
