r"""The one head: scores h(‖w‖, ‖x‖)·g(θ), with a margin ψ on the target class."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hypersphere import _numerics
from hypersphere._validation import choose, require
from hypersphere.functions.angular import ANGULARS, Cosine
from hypersphere.functions.margin import MARGINS, Margin, NormAdaptive
from hypersphere.heads.annealing import Annealing, Ramp
from hypersphere.heads.batch import check_features, counted_rows
from hypersphere.heads.cross_entropy import reduce_rows, row_losses
from hypersphere.heads.scoring import Scoring
from hypersphere.heads.settings import (
    DEFAULTS,
    check_choices,
    check_penalties,
    check_schedules,
    check_sizes,
    checked_class_weights,
    magnitude_of,
    tensor_fields,
)
from hypersphere.heads.terms import Terms

__all__ = ["AngularHead"]


class AngularHead(Scoring):
    r"""A classifier whose scores are magnitudes times functions of angles (thesis, 2.4, 2.18, 2.20, 3.10 and 3.11).

        f_j = h(‖w_j‖, ‖x‖)·g(θ_j),   f_y = h(‖w_y‖, ‖x‖)·ψ(θ_y),   loss = mean cross entropy(f, y)

    Args:
        in_features: d, the length of a feature.
        num_classes: C ≥ 2.
        radius: "feature" to keep ‖x‖, or the radius s > 0 that every feature is put on.
        weight_norm: whether class vectors count as unit vectors; False keeps ‖w‖.
        angular: g, a name of `hypersphere.angular`, an object or a callable of the cosine.
        margin: ψ, a name of `hypersphere.margin`, an object, a callable of the target's cosine, or None for g itself.
        annealing: a schedule from the plain target score to the one with the margin.
        ramp: a schedule of the strength of the margin. The step counter of both is part of the state dict; every call
            in training mode advances it (`advance` does so for those who train through `logits`).
        bias: whether to learn a bias per class.
        gradient: "true"; "detached" to let the gradient pass g and ψ as if both were the cosine; or "normalized", the
            original SphereFace's (see `docs/gradients.md`). The last is for A-Softmax alone.
        energy_weight: λ_M of the data-dependent hyperspherical energy of the class vectors, added to the loss.
        norm_weight: weight of mean |‖x‖ − norm_target|, added to the loss (soft feature normalisation).
        norm_target: the norm that this pulls features to.
        class_weights: (C,) weights of the classes, as in `torch.nn.CrossEntropyLoss`.
        label_smoothing: as in `torch.nn.CrossEntropyLoss`, in [0, 1).
        ignore_index: a label whose rows do not count.
        reduction: "mean", "sum" or "none" (not with the penalties above, which are means over a batch).

    Example:
        >>> head = AngularHead(8, 3, margin="multiplicative")
        >>> head(torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])).shape
        torch.Size([])
    """

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
        ramp: Ramp | None = None,
        bias: bool = False,
        gradient: str = "true",
        energy_weight: float = 0.0,
        norm_weight: float = 0.0,
        norm_target: float = 30.0,
        class_weights: Tensor | None = None,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        check_sizes(in_features, num_classes)
        check_choices(
            gradient=gradient, reduction=reduction, label_smoothing=label_smoothing, ignore_index=ignore_index
        )
        check_schedules(margin, annealing, ramp)
        check_penalties(energy_weight, norm_weight, norm_target, reduction)
        self.in_features = in_features
        self.num_classes = num_classes
        self.radius = radius
        self.weight_norm = weight_norm
        self.magnitude = magnitude_of(radius, weight_norm)
        self._angular = choose(ANGULARS, angular, "angular")
        self._margin = None if margin is None else choose(MARGINS, margin, "margin")
        self.annealing = annealing
        self.ramp = ramp
        self.gradient = gradient
        self.energy_weight = energy_weight
        self.norm_weight = norm_weight
        self.norm_target = norm_target
        self.label_smoothing = label_smoothing
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.decay_free_parameters = ("weight",) if weight_norm else ()
        if gradient == "normalized":
            fits = margin is not None and radius == "feature" and weight_norm and isinstance(self._angular, Cosine)
            accepted = (
                "'true' or 'detached' except for a margin on the target, feature radius, unit class vectors, cosine"
            )
            require(fits and not self._margin_on_others(), "gradient", accepted, gradient)
        for owner, entry in (("angular", self._angular), ("margin", self._margin)):
            for name, value in tensor_fields(owner, entry).items():
                if isinstance(value, nn.Parameter):
                    self.register_parameter(f"{owner}_{name}", value)
        self.weight = nn.Parameter(torch.empty(num_classes, in_features))
        self.bias = nn.Parameter(torch.empty(self._bias_size())) if bias else None
        if annealing is not None or ramp is not None:
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        if isinstance(self._margin, NormAdaptive):
            self.register_buffer("norm_mean", torch.empty(()))
            self.register_buffer("norm_std", torch.empty(()))
        self.register_buffer("class_weights", checked_class_weights(class_weights, num_classes), persistent=False)
        self.reset_parameters()

    @property
    def uses_weight_norm(self) -> bool:
        """True if scores depend on ‖w‖, False if class vectors count as unit vectors."""
        return not self.weight_norm

    def reset_parameters(self) -> None:
        """Draw class vectors uniformly over the sphere, with norms near 1; start schedules and statistics anew."""
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if hasattr(self, "steps"):
            nn.init.zeros_(self.steps)
        if hasattr(self, "norm_mean"):
            nn.init.constant_(self.norm_mean, 20.0)  # AdaFace's start, forgotten with the margin's momentum
            nn.init.constant_(self.norm_std, 100.0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of features `x` (B, d) with labels `y` (B,); a mean over no rows is 0."""
        check_features(x, self.in_features)
        labels, counted = counted_rows(x, y, self.num_classes, self.ignore_index)
        with _numerics.autocast_disabled(x):
            x_norm, x_hat = self._polar(x if counted is None else x.masked_fill(~counted.unsqueeze(1), 0))
            before = self._observe_norms(x_norm, counted)
            terms, target, magnitude = self._terms(x_norm, x_hat, labels)
            score = self._target_score(magnitude, target, x_norm, x_hat, labels, terms.target)
            losses = self._losses(terms, score, labels)
            loss = self._with_penalties(self._reduced(losses, labels, counted), x_norm, labels, counted)
        try:
            self._require_finite(loss, x)
        except ValueError:
            self._restore_norms(before)
            raise
        if self.training and _numerics.can_update_state(labels):
            self.advance()
        return self._narrowed(loss, x)

    def scores(self, x: Tensor) -> Tensor:
        """Return the plain scores (B, C), without margin: those a prediction is made from."""
        check_features(x, self.in_features)
        with _numerics.autocast_disabled(x):
            magnitudes, c = self._cosines(*self._polar(x))
            plain = magnitudes * self.angular(c)
            plain = plain if self.bias is None else plain + self.bias.to(plain.dtype)
        self._require_finite(plain, x)
        return self._narrowed(plain, x)

    def logits(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the scores (B, C) with the margin on each target, for any loss of one's own.

        Schedules do not advance here; call `advance` once a step.
        """
        check_features(x, self.in_features)
        labels, _ = counted_rows(x, y, self.num_classes, self.ignore_index)
        with _numerics.autocast_disabled(x):
            x_norm, x_hat = self._polar(x)
            magnitudes, c = self._cosines(x_norm, x_hat)
            plain = magnitudes * self._passed(c, self._others_response(c, self._strength(c)))
            column = labels.unsqueeze(1)
            magnitude = magnitudes.expand_as(c).gather(1, column).squeeze(1)
            target = c.gather(1, column).squeeze(1)
            score = self._target_score(magnitude, target, x_norm, x_hat, labels, with_bias=False)
            out = plain.scatter(1, column, score.unsqueeze(1))
            out = out if self.bias is None else out + self.bias.to(out.dtype)
        self._require_finite(out, x)
        return self._narrowed(out, x)

    def advance(self) -> None:
        """Count one training step of the schedules; `forward` does so by itself in training mode."""
        if hasattr(self, "steps"):
            self.steps = self.steps + 1  # a new tensor: a compiled backward may still read the old one

    def extra_repr(self) -> str:
        """Show the sizes and every setting that is not the default."""
        shown = {name: getattr(self, name) for name in DEFAULTS}
        different = [f"{name}={value!r}" for name, value in shown.items() if value != DEFAULTS[name]]
        extra = ["bias=True"] * (self.bias is not None) + ["class_weights"] * (self.class_weights is not None)
        return ", ".join([str(self.in_features), str(self.num_classes), *different, *extra])

    def _losses(self, terms: Terms, score: Tensor, labels: Tensor) -> Tensor:
        weights = None if self.class_weights is None else self.class_weights.to(score.dtype)
        return row_losses(terms.others, terms.total, score, labels, self.num_classes, weights, self.label_smoothing)

    def _reduced(self, losses: Tensor, labels: Tensor, counted: Tensor | None) -> Tensor:
        weights = None if self.class_weights is None else self.class_weights.to(losses.dtype)
        return reduce_rows(losses, labels, weights, counted, self.reduction)

    def _with_penalties(self, loss: Tensor, x_norm: Tensor, labels: Tensor, counted: Tensor | None) -> Tensor:
        """Add the energy of the class vectors and softly normalised features, where they are asked for."""
        if self.energy_weight:
            energy = self.classes.energy(self.weight, labels, counted)
            loss = loss + self.energy_weight * energy.to(x_norm.dtype)
        if self.norm_weight:
            away = (x_norm.squeeze(1) - self.norm_target).abs()
            share = torch.ones_like(away) if counted is None else counted.to(away.dtype)
            loss = loss + self.norm_weight * (away * share).sum() / share.sum().clamp_min(1)
        return loss

    def _require_finite(self, result: Tensor, x: Tensor) -> None:
        """Where a result is not finite, name the feature or the class vector that is to blame."""
        if _numerics.values_readable(result) and not bool(torch.isfinite(result.detach()).all()):
            _numerics.require_finite_rows("x", x)
            _numerics.require_finite_rows("weight", self.weight)
