r"""Losses that the sources compare with: hinge loss, centre loss, and those of pytorch-metric-learning.

Each is the loss of a linear classifier, with another term or in another form, so that it can replace any other head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from hypersphere import _numerics
from hypersphere._validation import is_number, nearest_name, require, require_package
from hypersphere.functions._recomputation import PassHistory
from hypersphere.heads._checks import (
    int64_labels,
    require_features,
    require_finite_scores,
    require_labels,
    without_ignored,
)
from hypersphere.heads._state import call_fingerprint
from hypersphere.heads.head import AngularHead

__all__ = ["BASELINES", "CenterHead", "HingeHead", "MetricLearningHead"]

Choice = str | Mapping[str, Any]
# Options of losses and miners that are objects of pytorch-metric-learning themselves, with the module of each.
NESTED = {"distance": "distances", "reducer": "reducers", "embedding_regularizer": "regularizers"}


class _LinearHead(AngularHead):
    """A linear classifier f_j = ⟨w_j, x⟩ + b_j, without margin and schedules."""

    def __init__(self, in_features: int, num_classes: int, *, bias: bool = False) -> None:
        super().__init__(in_features, num_classes, normalize_weight=False, bias=bias)

    def _counted(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the checked features and labels of the samples that count."""
        require_features(x, self.in_features)
        y = int64_labels(y, len(x))
        require_labels(y, self.num_classes, self.ignore_index)
        # Checked here, so that the message counts all rows and not only those without ignored ones.
        _numerics.require_finite_rows("x", without_ignored(x, y, self.ignore_index))
        counted = y != self.ignore_index
        return x[counted], y[counted]


class HingeHead(_LinearHead):
    r"""One hinge loss per class: the mean over samples of Σ_j max(0, 1 − δ_j·f_j)^p, with δ_y = 1 and δ_j = −1 else.

    This is the hinge loss of Caffe, in which the thesis trained its networks (tables 2.2 to 2.4).

    Args:
        in_features: d, the length of a feature.
        num_classes: C ≥ 2.
        power: p, 1 or 2.
        bias: whether to learn one bias per class.

    Example:
        >>> head = HingeHead(8, 3)
        >>> head(torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])).shape
        torch.Size([])
    """

    def __init__(self, in_features: int, num_classes: int, *, power: int = 1, bias: bool = False) -> None:
        super().__init__(in_features, num_classes, bias=bias)
        require(power in (1, 2), "power", "1 or 2", power)
        self.power = power

    def forward(self, x: Float[Tensor, "batch dim"], y: Integer[Tensor, " batch"]) -> Float[Tensor, ""]:
        """Return the mean loss of features `x` with labels `y`."""
        x, y = self._counted(x, y)
        scores = self.scores(x)
        wide = _numerics.widen(scores)  # the sum over samples and classes exceeds the range of float16
        signs = torch.full_like(wide, -1.0).scatter_(1, y.unsqueeze(1), 1.0)
        loss = (1 - signs * wide).clamp_min(0).pow(self.power).sum() / max(len(y), 1)
        return _numerics.narrow(loss, scores.dtype)


class CenterHead(_LinearHead):
    r"""Softmax plus centre loss, λ/2·mean ‖x − c_y‖² (Wen et al., ECCV 2016).

    The centres c are a buffer and not trained by gradients. Each training call moves those of its classes towards the
    features of the batch: c_j ← c_j − α·Σ_{i: y_i=j}(c_j − x_i)/(1 + n_j) for a class with n_j samples.

    Args:
        in_features: d, the length of a feature.
        num_classes: C ≥ 2.
        center_weight: λ.
        rate: α in [0, 1].
        bias: whether to learn one bias per class.

    Example:
        >>> head = CenterHead(8, 3)
        >>> head(torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])).shape
        torch.Size([])
    """

    centers: Tensor
    class_buffers = AngularHead.class_buffers | {"centers": 0.0}

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        center_weight: float = 0.003,
        rate: float = 0.5,
        bias: bool = False,
    ) -> None:
        super().__init__(in_features, num_classes, bias=bias)
        require(is_number(center_weight, 0), "center_weight", "a number >= 0", center_weight)
        require(is_number(rate, 0, 1), "rate", "a number in [0, 1]", rate)
        self.center_weight, self.rate = center_weight, rate
        self._center_passes = PassHistory("the current centres")
        self.register_buffer("centers", torch.zeros(num_classes, in_features))

    def reset_parameters(self) -> None:
        """Draw class vectors uniformly, and set all centres to zero."""
        super().reset_parameters()
        if hasattr(self, "centers"):  # not yet when the parent's constructor calls this method
            nn.init.zeros_(self.centers)
            self._center_passes.clear()

    def forward(self, x: Float[Tensor, "batch dim"], y: Integer[Tensor, " batch"]) -> Float[Tensor, ""]:
        """Return the mean loss of features `x` with labels `y`; in training mode, move the centres."""
        loss = super().forward(x, y)
        features = without_ignored(x, int64_labels(y, len(x)), self.ignore_index)
        x, y = self._counted(x, y)
        centers = self.centers[y]
        if self.training and _numerics.in_backward():  # activation checkpointing repeats a pass that moved the centres
            (centers,) = self._center_passes.recall(call_fingerprint(x, y), (centers,))  # type: ignore[assignment]
        wide = _numerics.widen(x)  # sums over samples exceed the range of float16
        deviations = wide - centers.to(wide.dtype)
        center_loss = self.center_weight / 2 * deviations.square().sum() / max(len(y), 1)
        require_finite_scores(center_loss, features, self.weight)  # before the centres follow the features
        if self.training and _numerics.can_update_state(x):
            self._center_passes.record(call_fingerprint(x, y), (centers,))
            self._move_centers(deviations.detach().to(_numerics.compute_dtype(self.centers.dtype)), y)
        return _numerics.narrow(loss + center_loss, loss.dtype)

    def _move_centers(self, deviations: Tensor, y: Tensor) -> None:
        sums = torch.zeros_like(self.centers, dtype=deviations.dtype).index_add_(0, y, deviations)
        counts = y.bincount(minlength=self.num_classes).unsqueeze(1)
        # A new tensor, because the backward pass reads the old one.
        self.centers = (self.centers + self.rate * sums / (1 + counts)).to(self.centers.dtype)


class MetricLearningHead(_LinearHead):
    r"""Softmax plus a loss of pytorch-metric-learning: softmax_weight·softmax + loss_weight·loss(x, y).

    With `softmax_weight` 0 features are trained by the other loss alone. The classifier is then trained on features
    without gradient, so that accuracies can still be measured and features do not depend on it.

    Losses and miners are given by the name of their class, or by a mapping of `name` and options. Options may be
    mappings of this form too, such as `distance`. Sizes (`num_classes`, `embedding_size`) are filled in. A batch should
    have several samples of a class: use the sampler `m_per_class`.

    Args:
        in_features: d, the length of a feature.
        num_classes: C ≥ 2.
        loss: a loss of `pytorch_metric_learning.losses`.
        miner: a miner of `pytorch_metric_learning.miners` that selects pairs or triplets, or None for all.
        loss_weight: weight of this loss.
        softmax_weight: weight of the softmax loss.
        bias: whether the classifier has one bias per class.

    Example:
        >>> head = MetricLearningHead(8, 3, loss={"name": "TripletMarginLoss", "margin": 0.2}, softmax_weight=0.0)
        >>> head(torch.randn(6, 8), torch.tensor([0, 0, 1, 1, 2, 2])).shape
        torch.Size([])
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        loss: Choice = "ContrastiveLoss",
        miner: Choice | None = None,
        loss_weight: float = 1.0,
        softmax_weight: float = 1.0,
        bias: bool = False,
    ) -> None:
        super().__init__(in_features, num_classes, bias=bias)
        require(is_number(loss_weight, 0), "loss_weight", "a number >= 0", loss_weight)
        require(is_number(softmax_weight, 0), "softmax_weight", "a number >= 0", softmax_weight)
        self.loss_weight, self.softmax_weight = loss_weight, softmax_weight
        sizes = {"num_classes": num_classes, "embedding_size": in_features}
        self.loss = _create("losses", loss, "loss", sizes)
        self.miner = None if miner is None else _create("miners", miner, "miner", sizes)

    def forward(self, x: Float[Tensor, "batch dim"], y: Integer[Tensor, " batch"]) -> Float[Tensor, ""]:
        """Return the weighted sum of both losses of features `x` with labels `y`."""
        detached = self.softmax_weight == 0
        classified = super().forward(x.detach() if detached else x, y)
        x, y = self._counted(x, y)
        x = _numerics.widen(x)  # the library's distances are not implemented for bfloat16 on every device
        selected = None if self.miner is None else self.miner(x, y)
        return (1.0 if detached else self.softmax_weight) * classified + self.loss_weight * self.loss(x, y, selected)


def _create(module: str, choice: Choice, argument: str, sizes: Mapping[str, int]) -> Any:
    """Return the object of a module of pytorch-metric-learning that a name, or a mapping of name and options, gives."""
    library = require_package(f"pytorch_metric_learning.{module}", "pytorch-metric-learning", "compare")
    options = {"name": choice} if isinstance(choice, str) else dict(choice)
    name = str(options.pop("name", None))
    names = [key for key, value in vars(library).items() if inspect.isclass(value)]
    if name not in names:
        near = nearest_name(name, names) or f"; the classes are {', '.join(names)}"
        raise ValueError(f"{argument} must name a class of pytorch_metric_learning.{module}, not {name!r}{near}")
    factory: Callable[..., Any] = getattr(library, name)
    parameters = inspect.signature(factory).parameters
    arguments: dict[str, Any] = {key: value for key, value in sizes.items() if key in parameters}
    for key, value in options.items():
        is_object = key in NESTED and isinstance(value, (str, Mapping))
        arguments[key] = _create(NESTED[key], value, f"{argument}.{key}", sizes) if is_object else value
    try:
        return factory(**arguments)
    except TypeError as error:
        raise ValueError(f"{argument} {name!r} does not accept {options}: {error}") from error


BASELINES: dict[str, Callable[..., AngularHead]] = {
    "hinge": HingeHead,
    "center": CenterHead,
    "metric_learning": MetricLearningHead,
}
