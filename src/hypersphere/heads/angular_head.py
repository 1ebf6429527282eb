r"""The one head: scores h(‖w‖, ‖x‖)·g(θ), with a margin ψ on the target class."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hypersphere import sphere
from hypersphere.functions.angular import ANGULARS, Angular, Cosine
from hypersphere.functions.margin import MARGINS, Margin, NormAdaptive
from hypersphere.functions.menu import choose, is_number, require
from hypersphere.heads.annealing import Annealing, Ramp
from hypersphere.heads.batch import check_features, counted_rows
from hypersphere.heads.classes import Classes
from hypersphere.heads.cross_entropy import reduce_rows, row_losses
from hypersphere.heads.gradients import normalized_correction, straight_through
from hypersphere.heads.settings import checked_class_weights, learned_fields, magnitude_of
from hypersphere.heads.terms import LOG_SUM_EXP, Reduction, Terms, Wanted

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
        annealing: a schedule from the plain target score to the one with the margin.
        ramp: a schedule of the strength of the margin. The step counter of both is part of the state dict; every call
            in training mode advances it (`advance` does so for those who train through `logits`).
        bias: whether to learn a bias per class.
        gradient: "true"; "detached" to let the gradient pass g and ψ as if both were the cosine; or "normalized", the
            original SphereFace's (see `docs/gradients.md`).
        energy_weight: λ_M of the data-dependent hyperspherical energy of the class vectors, added to the loss.
        norm_weight: weight of mean |‖x‖ − norm_target|, added to the loss (soft feature normalisation).
        norm_target: the norm that this pulls features to.
        class_weights: (C,) weights of the classes, as in `torch.nn.CrossEntropyLoss`.
        label_smoothing: as in `torch.nn.CrossEntropyLoss`, in [0, 1).
        ignore_index: a label whose rows do not count.
        reduction: "mean", "sum" or "none".

    Example:
        >>> head = AngularHead(8, 3, margin="multiplicative")
        >>> head(torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])).shape
        torch.Size([])
    """

    weight: Tensor
    steps: Tensor
    norm_mean: Tensor
    norm_std: Tensor
    class_weights: Tensor | None
    reduction_over_classes: Reduction = LOG_SUM_EXP
    classes: Classes = Classes()

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
        require(is_number(in_features, 1), "in_features", "a number >= 1", in_features)
        require(is_number(num_classes, 2), "num_classes", "a number >= 2", num_classes)
        gradients = ("true", "detached", "normalized")
        require(gradient in gradients, "gradient", f"one of {', '.join(map(repr, gradients))}", gradient)
        for name, schedule in (("annealing", annealing), ("ramp", ramp)):
            require(schedule is None or callable(schedule), name, "a schedule or None", schedule)
            require(schedule is None or margin is not None, name, "None when there is no margin", schedule)
        require(is_number(energy_weight, 0), "energy_weight", "a number >= 0", energy_weight)
        require(is_number(norm_weight, 0), "norm_weight", "a number >= 0", norm_weight)
        require(is_number(norm_target, 0) and norm_target > 0, "norm_target", "a positive number", norm_target)
        smooth = is_number(label_smoothing, 0, 1) and label_smoothing < 1
        require(smooth, "label_smoothing", "a number in [0, 1)", label_smoothing)
        reductions = ("mean", "sum", "none")
        require(reduction in reductions, "reduction", f"one of {', '.join(map(repr, reductions))}", reduction)
        self.in_features = in_features
        self.num_classes = num_classes
        self.radius = radius
        self.weight_norm = weight_norm
        self.magnitude = magnitude_of(radius, weight_norm)
        self.angular = choose(ANGULARS, angular, "angular")
        self.margin = None if margin is None else choose(MARGINS, margin, "margin")
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
            touched = isinstance(self.margin, Margin) and self.margin.touches_others
            fits = margin is not None and radius == "feature" and weight_norm and isinstance(self.angular, Cosine)
            accepted = (
                "'true' or 'detached' except for a margin on the target, feature radius, unit class vectors, cosine"
            )
            require(fits and not touched, "gradient", accepted, gradient)
        for name, parameter in learned_fields(self.angular, self.margin).items():
            self.register_parameter(name, parameter)
        self.weight = nn.Parameter(torch.empty(num_classes, in_features))
        self.bias = nn.Parameter(torch.empty(self._bias_size())) if bias else None
        if annealing is not None or ramp is not None:
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        if isinstance(self.margin, NormAdaptive):
            self.register_buffer("norm_mean", torch.empty(()))
            self.register_buffer("norm_std", torch.empty(()))
        self.register_buffer("class_weights", checked_class_weights(class_weights, num_classes), persistent=False)
        self.reset_parameters()

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
        with sphere.full_precision(x):
            x_norm, x_hat = self._polar(x)
            if self.training:
                self._observe_norms(x_norm, counted)
            terms, target, magnitude = self._terms(x_norm, x_hat, labels)
            score = self._target_score(magnitude, target, x_norm, x_hat, labels)
            losses = self._losses(terms, score, labels)
            loss = self._reduced(losses, labels, counted) + self._penalties(x_norm, labels, counted)
        if sphere.inspectable(loss) and not bool(torch.isfinite(loss.detach()).all()):
            sphere.require_finite_rows("x", x)
            sphere.require_finite_rows("weight", self.weight)
        if self.training:
            self.advance()
        return self._narrowed(loss, x)

    def scores(self, x: Tensor) -> Tensor:
        """Return the plain scores (B, C), without margin: those a prediction is made from."""
        check_features(x, self.in_features)
        sphere.require_finite_rows("x", x)
        with sphere.full_precision(x):
            magnitudes, c = self._cosines(*self._polar(x))
            plain = magnitudes * self.angular(c)
            return self._narrowed(plain if self.bias is None else plain + self.bias.to(plain.dtype), x)

    def logits(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the scores (B, C) with the margin on each target, for any loss of one's own.

        Schedules do not advance here; call `advance` once a step.
        """
        check_features(x, self.in_features)
        labels, _ = counted_rows(x, y, self.num_classes, self.ignore_index)
        sphere.require_finite_rows("x", x)
        with sphere.full_precision(x):
            x_norm, x_hat = self._polar(x)
            magnitudes, c = self._cosines(x_norm, x_hat)
            plain = magnitudes * self._passed(c, self._others_response(c))
            column = labels.unsqueeze(1)
            magnitude = magnitudes.expand_as(c).gather(1, column).squeeze(1)
            target = c.gather(1, column).squeeze(1)
            score = self._target_score(magnitude, target, x_norm, x_hat, labels, with_bias=False)
            out = plain.scatter(1, column, score.unsqueeze(1))
            return self._narrowed(out if self.bias is None else out + self.bias.to(out.dtype), x)

    def advance(self) -> None:
        """Count one training step of the schedules; `forward` does so by itself in training mode."""
        if hasattr(self, "steps"):
            self.steps = self.steps + 1  # a new tensor: a compiled backward may still read the old one

    def extra_repr(self) -> str:
        """Show what makes this head differ from another."""
        shown = ["radius", "weight_norm", "angular", "margin", "annealing", "ramp", "gradient"]
        parts = [f"{name}={getattr(self, name)!r}" for name in shown if getattr(self, name) is not None]
        return ", ".join([f"{self.in_features}, {self.num_classes}", *parts, f"bias={self.bias is not None}"])

    def _bias_size(self) -> int:
        return self.num_classes

    def _polar(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Norms (B, 1) and directions of the features, in the wider of the features' and the weight's type."""
        norm, direction = sphere.polar(x)
        wide = torch.promote_types(direction.dtype, sphere.widen(self.weight).dtype)
        return norm.to(wide), direction.to(wide)

    def _narrowed(self, out: Tensor, x: Tensor) -> Tensor:
        return sphere.narrow(out, torch.promote_types(x.dtype, self.weight.dtype))

    def _cosines(self, x_norm: Tensor, x_hat: Tensor) -> tuple[Tensor, Tensor]:
        """Magnitudes (broadcasting) and cosines (B, C) of all classes."""
        w_norm, w_hat = sphere.polar(self.weight)
        return self.magnitude(w_norm.mT.to(x_hat.dtype), x_norm), x_hat @ w_hat.mT.to(x_hat.dtype)

    def _terms(self, x_norm: Tensor, x_hat: Tensor, labels: Tensor) -> tuple[Terms, Tensor, Tensor]:
        """The terms of the loss, and the target's cosine and magnitude, (B,) each."""
        touched = isinstance(self.margin, Margin) and self.margin.touches_others
        as_products = isinstance(self.angular, Cosine) and not touched
        rho = (x_norm if self.radius == "feature" else torch.full_like(x_norm, float(self.radius))).squeeze(1)
        wanted = Wanted(
            unit_rows=self.weight_norm,
            response=None if as_products else self._others_response,
            slope=self.angular.slope if isinstance(self.angular, Angular) and not touched else None,
            detached=self.gradient == "detached",
            reduction=self.reduction_over_classes,
            total_weights=self._smoothing_weights(x_hat),
        )
        features = rho.unsqueeze(1) * x_hat if as_products else x_hat
        weight, bias = sphere.widen(self.weight).to(x_hat.dtype), None
        if self.bias is not None:
            bias = self.bias.to(x_hat.dtype)
        terms = self.classes.terms(
            features,
            weight,
            labels,
            None if as_products else rho,
            bias,
            wanted,
            fused=as_products or self._known_response(),
        )
        magnitude = rho if terms.target_norm is None else rho * terms.target_norm
        if not as_products:
            return terms, terms.target, magnitude
        nonzero = magnitude > 0
        return terms, torch.where(nonzero, terms.target / magnitude.masked_fill(~nonzero, 1), 0), magnitude

    def _known_response(self) -> bool:
        """Whether the other classes' response is ours and has nothing to learn, so that the fused pass may have it."""
        return isinstance(self.angular, Angular) and not learned_fields(self.angular, self.margin)

    def _others_response(self, c: Tensor) -> Tensor:
        if isinstance(self.margin, Margin) and self.margin.touches_others:
            return self.margin.others(c, self.angular, self._strength(c))
        return self.angular(c)

    def _passed(self, c: Tensor, response: Tensor) -> Tensor:
        return straight_through(c, response) if self.gradient == "detached" else response

    def _strength(self, like: Tensor) -> float | Tensor:
        return 1.0 if self.ramp is None else self.ramp(self.steps.to(like.dtype))

    def _target_score(
        self, magnitude: Tensor, c: Tensor, x_norm: Tensor, x_hat: Tensor, labels: Tensor, *, with_bias: bool = True
    ) -> Tensor:
        """f_y: magnitude times ψ, with the chosen gradient, blended with the plain score while annealing."""
        plain = magnitude * self._passed(c, self.angular(c))
        score = plain
        if self.margin is not None:
            score = magnitude * self._passed(c, self._psi(c, x_norm.squeeze(1)))
            if self.gradient == "normalized":
                correction = normalized_correction(self._psi, c, x_norm, x_hat, self._target_directions(labels))
                score = straight_through(plain, score) + correction
            if self.annealing is not None:
                share = self.annealing(self.steps.to(c.dtype))
                score = (share * plain + score) / (1 + share)
        if self.bias is None or not with_bias:
            return score
        return score + (self.bias if self._bias_size() == 1 else self.classes.rows(self.bias, labels)).to(score.dtype)

    def _target_directions(self, labels: Tensor) -> Tensor:
        """Unit class vectors of the labels, without gradient."""
        return sphere.polar(self.classes.rows(self.weight.detach(), labels))[1]

    def _psi(self, c: Tensor, x_norm: Tensor) -> Tensor:
        strength = self._strength(c)
        if isinstance(self.margin, NormAdaptive):
            quality = self.margin.quality(x_norm.detach(), self.norm_mean.to(c.dtype), self.norm_std.to(c.dtype))
            return self.margin.for_quality(quality)(c, self.angular, strength)
        if isinstance(self.margin, Margin):
            return self.margin(c, self.angular, strength)
        assert self.margin is not None
        return self.margin(c)

    def _losses(self, terms: Terms, score: Tensor, labels: Tensor) -> Tensor:
        weights = None if self.class_weights is None else self.class_weights.to(score.dtype)
        return row_losses(terms.others, terms.total, score, labels, self.num_classes, weights, self.label_smoothing)

    def _smoothing_weights(self, like: Tensor) -> Tensor | None:
        if not self.label_smoothing:
            return None
        return like.new_ones(self.num_classes) if self.class_weights is None else self.class_weights.to(like.dtype)

    def _reduced(self, losses: Tensor, labels: Tensor, counted: Tensor | None) -> Tensor:
        weights = None if self.class_weights is None else self.class_weights.to(losses.dtype)
        return reduce_rows(losses, labels, weights, counted, self.reduction)

    def _penalties(self, x_norm: Tensor, labels: Tensor, counted: Tensor | None) -> Tensor | float:
        """Energy of the class vectors and softly normalised features, where they are asked for."""
        extra: Tensor | float = 0.0
        if self.energy_weight:
            chosen = labels if counted is None or not sphere.inspectable(counted) else labels[counted]
            extra = extra + self.energy_weight * self.classes.energy(self.weight, chosen).to(x_norm.dtype)
        if self.norm_weight:
            away = (x_norm.squeeze(1) - self.norm_target).abs()
            share = torch.ones_like(away) if counted is None else counted.to(away.dtype)
            extra = extra + self.norm_weight * (away * share).sum() / share.sum().clamp_min(1)
        return extra

    @torch.no_grad()
    def _observe_norms(self, x_norm: Tensor, counted: Tensor | None) -> None:
        """Move the running mean and deviation of the feature norm, for a margin that depends on them."""
        if not isinstance(self.margin, NormAdaptive) or len(x_norm) < 2:
            return
        if counted is not None and sphere.inspectable(counted):
            x_norm = x_norm[counted]
        deviation, mean = torch.std_mean(x_norm)
        momentum = self.margin.momentum
        self.norm_mean = self.norm_mean.lerp(mean.to(self.norm_mean.dtype), momentum)
        self.norm_std = self.norm_std.lerp(deviation.to(self.norm_std.dtype), momentum)
