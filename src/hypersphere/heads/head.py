r"""The angular head: scores h(‖w‖, ‖x‖)·g(θ) with a margin ψ on the target class, and their cross entropy.

The forward pass has four steps, in this order: the terms of all classes (`fused_loss`), the target score with margin
and schedules (`target_score`), the loss per sample, and penalties. `BinaryHead` replaces the third step; `ShardedHead`
replaces `compute_terms`, the method that computes the first.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn

from hypersphere import _numerics, sphere
from hypersphere._validation import choose, is_integer, require
from hypersphere.functions._tensor_fields import fields_on_device
from hypersphere.functions.angular import ANGULARS, Angular, Cosine
from hypersphere.functions.margin import (
    MARGINS,
    AffineAngleMargin,
    Margin,
    NormAdaptive,
    NormLinear,
    RandomAngle,
)
from hypersphere.heads._centers import largest_per_class, rows_of_winners
from hypersphere.heads._checks import (
    check_features,
    check_labels,
    check_loss_options,
    check_negatives,
    check_penalties,
    check_schedules,
    checked_class_weights,
    checked_margin_strengths,
    require_labels,
)
from hypersphere.heads._class_changes import ChangingClasses
from hypersphere.heads._negatives import Negatives
from hypersphere.heads._settings import CallableMargin, magnitude_of, tensor_field_names
from hypersphere.heads._state import HeadState, StatefulHead, update_hardness, update_norm_statistics, update_scale
from hypersphere.heads.fused_loss import (
    LOG_SUM_EXP,
    ClassInputs,
    ClassReduction,
    ClassTerms,
    ScoreRule,
    class_terms,
    reduce_samples,
    sample_losses,
    straight_through,
)
from hypersphere.heads.schedules import Annealing, Ramp
from hypersphere.heads.target_score import normalized_gradient_term, product_score

__all__ = ["AngularHead", "NonFiniteScoresError"]


class NonFiniteScoresError(ValueError):
    """Finite features have scores that are not finite: class vectors diverged, or a score overflows."""


class AngularHead(StatefulHead, ChangingClasses):
    r"""A classifier whose scores are magnitudes times functions of angles (thesis, 2.4, 2.18, 2.20, 3.10 and 3.11).

        f_j = h(‖w_j‖, ‖x‖)·g(θ_j),   f_y = h(‖w_y‖, ‖x‖)·ψ(θ_y),   loss = mean cross entropy(f, y)

    Class vectors are the rows of `weight`; with K centres, rows jK to jK + K − 1 belong to class j. The loss is
    computed in blocks of classes (see `fused_loss`): the B×C products are saved for the backward pass up to 256 MB and
    computed again beyond that. This needs a g of the menu with fixed numbers, and unit class vectors if g is not the
    cosine. With a user's callable g, a learned k, a user's margin that changes other classes, or options for wrong
    classes (`hard_negatives`, `interclass_filter`, `curriculum`), all B×C scores are computed and differentiated by
    autograd, which saves several matrices of this size.

    A training step reads values on the host once, to check labels and features. A step is computed twice if squares of
    a class vector or feature leave the range of the dtype, if a class vector is zero and `weight_norm` is True, or if
    `energy_weight` > 0 and a class vector of the batch is closer than 7.8° (in float32) to another one. The second time
    it uses safe scaling and an exact energy.

    A zero feature has score 0 for every class. Where scores are linear in x (`radius="feature"`, cosine g), it gets the
    gradient of a linear layer, as if there were no margin; elsewhere it has no direction and its gradient is zero.

    Args:
        in_features: d, the length of a feature.
        num_classes: C ≥ 2.
        radius: "feature" to keep ‖x‖, a number s > 0 to rescale every feature to norm s, or "adaptive" for the s of
            AdaCos, which starts at √2·log(C−1) and follows each training batch in the buffer `scale`.
        weight_norm: whether class vectors are normalised to unit vectors; False keeps ‖w‖.
        angular: g, a name from `hypersphere.angular`, an instance or a callable of the cosine.
        margin: ψ, a name from `hypersphere.margin`, an instance, a callable of the target's cosine, or None for g.
        annealing: a schedule from the target score without margin to the one with the margin.
        ramp: a schedule of the strength of the margin. Schedules read the buffer `steps`, which counts training calls,
            or optimizer steps after `advance_with`.
        bias: whether to learn one bias per class.
        centers: K, the number of class vectors per class (sub-centres). The cosine of a class is the largest of its K;
            if norms are kept, the class vector with the largest score counts.
        hard_negatives: the number k of nearest wrong classes whose angle is reduced by `hard_margin` (inter-top-k).
        hard_margin: m′ in radians.
        interclass_filter: wrong classes with a larger cosine are left out of the loss; None for no filter.
        curriculum: the momentum of the running mean t of target cosines, in the buffer `t`: wrong classes with
            g(θ_j) > ψ(θ_y) get g·(t + g) (CurricularFace). None for no curriculum.
        class_margins: (C,) strengths in [0, 1] of the margin of each class; None for 1.
        class_sizes: (C,) numbers of samples n_j, from which the strengths are (min n/n_j)^¼ (LDAM).
        gradient: "true" for the derivative; "detached" to pass gradients through g and ψ as if both were the cosine;
            "normalized" for the gradient of the original SphereFace code, for A-Softmax only (see `docs/gradients.md`).
        energy_weight: λ_M, the weight of the data-dependent energy of the class vectors (thesis, 5.8). With several
            centres it counts the pairs of the nearest centre of the label with all other centres.
        energy_start: number of steps without this energy, after which it is added.
        norm_weight: the weight of mean |‖x‖ − norm_target|, a soft normalisation of features.
        norm_target: the norm to which `norm_weight` pulls features.
        class_weights: (C,) weights of the classes, as in `torch.nn.CrossEntropyLoss`.
        label_smoothing: as in `torch.nn.CrossEntropyLoss`, in [0, 1).
        ignore_index: a label whose samples do not count.
        reduction: "mean", "sum" or "none". The penalties above are means over a batch and need "mean".

    Example:
        >>> head = AngularHead(8, 3, margin="multiplicative")
        >>> head(torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])).shape
        torch.Size([])
    """

    weight: Tensor
    bias: Tensor | None
    steps: Tensor
    norm_mean: Tensor
    norm_std: Tensor
    t: Tensor
    scale: Tensor
    class_weights: Tensor | None
    class_margins: Tensor | None
    class_reduction: ClassReduction = LOG_SUM_EXP
    shares_bias: ClassVar[bool] = False
    """True if all classes share one bias."""

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
        centers: int = 1,
        hard_negatives: int = 0,
        hard_margin: float = 0.06,
        interclass_filter: float | None = None,
        curriculum: float | None = None,
        class_margins: Tensor | None = None,
        class_sizes: Tensor | None = None,
        gradient: str = "true",
        energy_weight: float = 0.0,
        energy_start: int = 0,
        norm_weight: float = 0.0,
        norm_target: float = 30.0,
        class_weights: Tensor | None = None,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        require(is_integer(in_features, 1), "in_features", "an integer >= 1", in_features)
        require(is_integer(num_classes, 2), "num_classes", "an integer >= 2", num_classes)
        require(isinstance(weight_norm, bool), "weight_norm", "True or False", weight_norm)
        require(isinstance(bias, bool), "bias", "True or False", bias)
        require(is_integer(centers, 1, 255), "centers", "an integer in [1, 255]", centers)
        check_loss_options(gradient, reduction, label_smoothing, ignore_index)
        check_schedules(margin, annealing, ramp)
        check_penalties(energy_weight, norm_weight, norm_target, reduction)
        check_negatives(hard_negatives, hard_margin, interclass_filter, curriculum, label_smoothing)
        require(is_integer(energy_start, 0), "energy_start", "an integer >= 0", energy_start)
        self.in_features = in_features
        self.num_classes = num_classes
        self.radius = radius
        self.weight_norm = weight_norm
        self.num_centers = centers
        self.hard_negatives = hard_negatives
        self.hard_margin = hard_margin
        self.interclass_filter = interclass_filter
        self.curriculum = curriculum
        self.magnitude = magnitude_of(radius, weight_norm)
        self._angular: Any = choose(ANGULARS, angular, "angular")
        self._margin: Any = None if margin is None else choose(MARGINS, margin, "margin")
        self.annealing = annealing
        self.ramp = ramp
        self.gradient = gradient
        self.energy_weight = energy_weight
        self.energy_start = energy_start
        self.norm_weight = norm_weight
        self.norm_target = norm_target
        self.label_smoothing = label_smoothing
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.decay_free_parameters = ("weight",) if weight_norm else ()
        self._margin_on_others = isinstance(self._margin, Margin) and self._margin.changes_other_classes
        self._check_combinations()
        # A g or ψ may hold tensors, such as a learned k. Parameters among them become parameters of the head.
        self._tensor_fields: dict[str, tuple[str, ...]] = {}
        self._initial_values: dict[str, Tensor] = {}
        for owner, entry in (("angular", self._angular), ("margin", self._margin)):
            self._tensor_fields[owner] = tensor_field_names(owner, entry)
            for name in self._tensor_fields[owner]:
                value = getattr(entry, name)
                if isinstance(value, nn.Parameter):
                    self.register_parameter(f"{owner}_{name}", value)
                    self._initial_values[f"{owner}_{name}"] = value.detach().clone()
        self.weight = nn.Parameter(torch.empty(num_classes * centers, in_features))
        self.bias = nn.Parameter(torch.empty(1 if self.shares_bias else num_classes)) if bias else None
        # Buffers exist only where they are used: without schedules the state dict contains nothing but parameters.
        if self._has_schedule:
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        if isinstance(self._margin, NormAdaptive):
            self.register_buffer("norm_mean", torch.empty(()))
            self.register_buffer("norm_std", torch.empty(()))
        if curriculum is not None:
            self.register_buffer("t", torch.empty(()))
        if radius == "adaptive":
            self.register_buffer("scale", torch.empty(()))
        # Numbers per class are settings, which the constructor provides, so they are not part of the state dict.
        strengths = checked_margin_strengths(class_margins, class_sizes, num_classes)
        if strengths is not None and (margin is None or self._margin_on_others):
            raise ValueError("class_margins and class_sizes need a margin that changes the target alone")
        self.register_buffer("class_weights", checked_class_weights(class_weights, num_classes), persistent=False)
        self.register_buffer("class_margins", strengths, persistent=False)
        self.reset_parameters()

    def _check_combinations(self) -> None:
        """Raise a `ValueError` that names options that exclude each other."""
        if self.gradient == "normalized":  # defined only for ‖x‖·ψ(θ)
            is_a_softmax = self._margin is not None and self.radius == "feature" and self.weight_norm
            if not (is_a_softmax and type(self._angular) is Cosine and not self._margin_on_others):
                raise ValueError(
                    "gradient='normalized' needs a margin on the target, radius='feature', weight_norm=True and "
                    "angular='cosine'"
                )
            is_plain = not self._changes_negatives
            require(is_plain, "gradient", "'true' or 'detached' with options for wrong classes", self.gradient)
        is_ranked = self.num_centers == 1 or self.weight_norm or not self._margin_on_others
        require(is_ranked, "centers", "1 if norms are kept and the margin changes other classes", self.num_centers)
        if self.curriculum is not None:
            require(self._margin is not None, "curriculum", "None without a margin", self.curriculum)
            # The threshold ψ(θ_y) is computed before the scores, so it must not depend on them.
            if isinstance(self._margin, NormAdaptive):
                raise ValueError("curriculum needs a margin that does not follow the feature norms of the batch")
            if self.num_centers > 1 and not self.weight_norm:
                raise ValueError("curriculum with several centres needs weight_norm=True")
        uses_norms = self.norm_weight > 0 or isinstance(self._margin, (NormAdaptive, NormLinear))
        if self.radius == "adaptive":
            require(self.num_classes >= 3, "num_classes", "at least 3 with radius='adaptive'", self.num_classes)
            require(self.weight_norm, "weight_norm", "True with radius='adaptive'", self.weight_norm)
            is_free = not uses_norms and self.class_reduction is LOG_SUM_EXP
            require(is_free, "radius", "a number if feature norms are used or classes are binary", self.radius)
        has_mean = self.reduction == "mean" or not isinstance(self._margin, NormLinear)
        require(has_mean, "reduction", "'mean' with the margin NormLinear, which has a penalty", self.reduction)

    @property
    def angular(self) -> Callable[[Tensor], Tensor]:
        """g, with the current values of its learned fields."""
        return self._with_learned_fields("angular", self._angular)

    @property
    def margin(self) -> Callable[..., Tensor] | None:
        """ψ, with the current values of its learned fields; None without a margin."""
        return self._with_learned_fields("margin", self._margin)

    @property
    def uses_weight_norm(self) -> bool:
        """True if scores depend on ‖w‖. `weight_norm=True` normalises class vectors, so their norms are not used."""
        return not self.weight_norm

    def reset_parameters(self) -> None:
        """Draw class vectors uniformly over the sphere, with norms near 1; reset learned numbers and all counters."""
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        with torch.no_grad():
            for name, value in self._initial_values.items():
                if not value.is_meta:  # a head that was created on the meta device does not know its initial values
                    self.get_parameter(name).copy_(value)
        for history in (self._loss_passes, self._logit_passes):
            history.clear()
        if hasattr(self, "steps"):
            nn.init.zeros_(self.steps)
        if hasattr(self, "norm_mean"):
            # AdaFace's initial values; the running average replaces them.
            nn.init.constant_(self.norm_mean, 20.0)
            nn.init.constant_(self.norm_std, 100.0)
        if hasattr(self, "t"):
            nn.init.zeros_(self.t)
        if hasattr(self, "scale"):
            nn.init.constant_(self.scale, math.sqrt(2) * math.log(self.num_classes - 1))

    def forward(self, x: Float[Tensor, "batch dim"], y: Integer[Tensor, " batch"]) -> Float[Tensor, "*samples"]:
        """Return the loss of features `x` with labels `y`. The mean over no samples is 0.

        Raises:
            ValueError: if shapes or dtypes are wrong, a label is not a class, or a feature is not finite; the message
                names the row. The state of the head is then unchanged.
            NonFiniteScoresError: a `ValueError` for a class vector that is not finite or a score that overflows.
        """
        check_features(x, self.in_features)
        y = check_labels(y, len(x))
        before = self._state_of_pass(x, y, self._loss_passes)
        noise = self._margin_noise(x)
        with _numerics.autocast_disabled(x):
            # Compute first and check afterwards: all checks are combined into `is_valid`, the only value that the host
            # has to wait for. A batch that fails is examined and, if it is legal, computed again with safe scaling.
            scale_safely = len(x) == 0 or not _numerics.values_readable(x, y, self.weight)
            loss, state, is_valid = self._loss(x, y, before, noise, scale_safely=scale_safely)
            if not scale_safely and not bool(is_valid):
                require_labels(y, self.num_classes, self.ignore_index)
                _numerics.require_finite_rows("x", self._without_ignored(x, y))
                loss, state, _ = self._loss(x, y, before, noise, scale_safely=True)
                self._require_finite(loss, self._without_ignored(x, y))
        if self.training and _numerics.can_update_state(x):
            self._record_pass(x, y, state, self._loss_passes)
            for name, value in state._asdict().items():
                if value is not None and name != "steps":  # steps are counted by `advance`
                    setattr(self, name, value)
            if not self._optimizer_hooks:
                self.advance()
        return self._narrow(loss, x)

    def scores(self, x: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch classes"]:
        """Return the scores without margin, from which predictions are made.

        Raises:
            ValueError: if `x` has the wrong shape or dtype, or a feature is not finite.
            NonFiniteScoresError: a `ValueError` for a class vector that is not finite or a score that overflows.
        """
        check_features(x, self.in_features)
        with _numerics.autocast_disabled(x):
            # ‖x‖·cos θ is computed without dividing by ‖x‖, so that a zero feature has the gradient of a linear layer.
            if self._is_linear_in_x:
                scores = self._products(x)
            else:
                magnitudes, cosines = self._polar_scores(x, self._current_state())[1:3]
                scores = magnitudes * self.angular(cosines)
            scores = scores if self.bias is None else scores + self.bias.to(scores.dtype)
        self._require_finite(scores, x)
        return self._narrow(scores, x)

    def logits(self, x: Float[Tensor, "batch dim"], y: Integer[Tensor, " batch"]) -> Float[Tensor, "batch classes"]:
        """Return the scores with the margin on each target, for use with another loss.

        Rows with an ignored label contain the scores of a zero feature. Schedules do not advance here: call `advance`
        once per step, or use `advance_with`. Statistics (of AdaFace, CurricularFace and AdaCos) are read but not
        updated; only the loss, the call of the head, updates them. Wrong classes that `interclass_filter` leaves out
        have the lowest finite number as their score.
        """
        check_features(x, self.in_features)
        y = check_labels(y, len(x))
        require_labels(y, self.num_classes, self.ignore_index)
        x = self._without_ignored(x, y)
        state = self._state_of_pass(x, y, self._logit_passes)
        column = y.clamp(0, self.num_classes - 1).unsqueeze(1)  # ignored labels get any class; their rows do not count
        labels, noise, is_left_out = column.squeeze(1), self._margin_noise(x), None
        with _numerics.autocast_disabled(x):
            x_norm, magnitudes, cosines, winners = self._polar_scores(x, state)
            if self._is_linear_in_x:
                scores = self._products(x)
            else:
                response = self._other_response(cosines, self._ramp_strength(state.steps, cosines))
                if self._changes_negatives:
                    negatives = self._negatives(x, cosines.gather(1, column).squeeze(1), labels, state, noise)
                    is_target = torch.zeros_like(cosines, dtype=torch.bool).scatter(1, column, True)
                    response, is_left_out = negatives(cosines, response, is_target)
                scores = magnitudes * self._apply_gradient_mode(cosines, response)
            # Replace the target's entry by the score with the margin.
            target = (scores if self._scores_are_products else cosines).gather(1, column).squeeze(1)
            rows = labels if winners is None else self.num_centers * labels + winners.gather(1, column).squeeze(1)
            w_norm, w_hat = (t.to(target.dtype) for t in sphere.polar(self.weight[rows]))
            score = self._target_score(target, x, labels, state, noise, x_norm, w_norm.squeeze(1), w_hat.detach())
            logits = scores.scatter(1, column, score.unsqueeze(1))
            logits = logits if self.bias is None else logits + self.bias.to(logits.dtype)
            if is_left_out is not None:
                lowest = torch.finfo(torch.promote_types(x.dtype, self.weight.dtype)).min
                logits = logits.masked_fill(is_left_out, lowest)
        self._require_finite(logits, x)
        if self.training and _numerics.can_update_state(x):
            self._record_pass(x, y, state, self._logit_passes)
        return self._narrow(logits, x)

    def extra_repr(self) -> str:
        """Show the sizes and all settings that differ from the defaults."""
        parameters = inspect.signature(AngularHead.__init__).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} | {"angular": Cosine()}
        tensors = {
            "bias=True": self.bias,
            "class_weights": self.class_weights,
            "class_margins": self.class_margins,
        }
        omitted = {"bias", "centers", "class_weights", "class_margins", "class_sizes"}
        settings = {name: getattr(self, name) for name in defaults if name not in omitted}
        settings["centers"] = self.num_centers
        changed = [f"{name}={value!r}" for name, value in settings.items() if value != defaults[name]]
        flags = [name for name, value in tensors.items() if value is not None]
        return ", ".join([str(self.in_features), str(self.num_classes), *changed, *flags])

    # The forward pass, step by step ----------------------------------------------------------------------------------

    def _loss(
        self, x: Tensor, y: Tensor, before: HeadState, noise: Tensor | None, *, scale_safely: bool
    ) -> tuple[Tensor, HeadState, Tensor]:
        """Return the loss, the state that it used, and whether all inputs and results are valid.

        Args:
            x: features.
            y: labels.
            before: the state before this batch.
            noise: (B,) standard normal numbers for a random margin.
            scale_safely: whether to scale features and class vectors if a square overflows, and to remove the features
                of ignored samples, which may be NaN.
        """
        counted = y != self.ignore_index
        labels = y.clamp(0, self.num_classes - 1)  # a bad label is reported after the computation
        labels_valid = (~counted | (labels == y)).all()
        x = self._without_ignored(x, y) if scale_safely else x
        x = x.to(self._wide_dtype(x))
        negatives, state = None, before
        if self._changes_negatives:
            state, negatives = self._negatives_of_batch(x, labels, counted, before, noise)
        if self.radius == "adaptive":
            state, x = self._adaptively_scaled(x, labels, counted, state, scale_safely=scale_safely)
        terms = self._terms_of_classes(x, labels, counted, state.steps, negatives, scale_safely=scale_safely)
        if state.norm_mean is not None:
            state = self._with_norm_statistics(state, terms.feature_norm, counted)
        score = self._target_score(
            terms.target, x, labels, state, noise, terms.feature_norm, terms.target_norm, terms.target_direction
        )
        if self.bias is not None:
            # `target_bias` is None if all classes share one bias.
            score = score + (self.bias.to(score.dtype) if terms.target_bias is None else terms.target_bias)
        losses = self._sample_losses(terms, score, labels)
        weights = None if self.class_weights is None else self.class_weights.to(losses.dtype)
        loss = reduce_samples(losses, labels, weights, counted, self.reduction)
        loss = self._with_penalties(loss, terms, counted, state.steps)
        is_finite = loss.detach().abs() < torch.inf
        return loss, state, labels_valid & terms.in_range & (is_finite if loss.ndim == 0 else is_finite.all())

    def _terms_of_classes(
        self,
        x: Tensor,
        labels: Tensor,
        counted: Tensor,
        step: Tensor | None,
        negatives: Negatives | None = None,
        *,
        scale_safely: bool,
        needs_energy: bool = True,
    ) -> ClassTerms:
        """Step 1: the reductions over all other classes, and the product with the target class vector."""
        as_products, unmargined = self._scores_are_products, self._scores_are_products and self._margin is None
        # Evaluated now: the closure below runs in backward, when `steps` has advanced.
        strength = self._ramp_strength(step, x)
        needs_norm = self.norm_weight > 0 or isinstance(self._margin, (NormAdaptive, NormLinear))
        rule = ScoreRule(
            unit_class_vectors=self.weight_norm,
            # Features are rescaled to an adaptive radius before this step.
            radius=None if isinstance(self.radius, str) else float(self.radius),
            response=None if as_products else lambda c: self._other_response(c, strength),
            derivative=self._other_derivative(),
            detached=self.gradient == "detached",
            # The fused energy needs unit class vectors.
            needs_autograd=self._needs_autograd() or (self.energy_weight > 0 and not self.weight_norm),
            reduction=self.class_reduction,
            shared_bias=self.shares_bias,
            needs_feature_norm=needs_norm or (self.radius == "feature" and not unmargined),
            needs_target_norm=not self.weight_norm and not unmargined,
            needs_target_direction=self.gradient == "normalized",
            needs_energy=needs_energy and self.energy_weight > 0 and self._energy_has_started(step),
            targets_present=True,
            centers=self.num_centers,
            negatives=negatives,
        )
        # Label smoothing needs Σ_j v_j·f_j, with v = 1 if there are no class weights.
        smoothing_weights = None
        if self.label_smoothing:
            weights = self.class_weights
            smoothing_weights = x.new_ones(self.num_classes) if weights is None else weights.to(x.dtype)
        inputs = ClassInputs(
            x=x,
            w=_numerics.widen_parameter(self.weight).to(x.dtype),
            labels=labels,
            bias=None if self.bias is None else self.bias.to(x.dtype),
            class_weights=smoothing_weights,
            counted=counted,
        )
        return self.compute_terms(inputs, rule, scale_safely=scale_safely)

    def compute_terms(self, inputs: ClassInputs, rule: ScoreRule, *, scale_safely: bool) -> ClassTerms:
        """Return the terms of all classes. A head whose classes are stored elsewhere overrides this method."""
        return class_terms(inputs, rule, scale_safely=scale_safely)

    def _target_score(
        self,
        target: Tensor,
        x: Tensor,
        labels: Tensor,
        state: HeadState,
        noise: Tensor | None,
        x_norm: Tensor | None,
        w_norm: Tensor | None,
        w_hat: Tensor | None,
    ) -> Tensor:
        """Step 2: the target score h·ψ(θ) with the chosen gradient, blended with h·g(θ) while annealing.

        Args:
            target: (B,) h·cos θ of each sample with its target class if scores are products, else cos θ.
            x: (B, d) features, for the normalized gradient.
            labels: (B,) classes.
            state: the step of the schedules, and the statistics that the margin or the radius depends on.
            noise: (B,) standard normal numbers for a random margin.
            x_norm: (B,) ‖x‖, or None if the score does not depend on it.
            w_norm: (B,) ‖w_y‖, or None if the score does not depend on it.
            w_hat: (B, d) ŵ_y without gradient, for the normalized gradient.
        """
        if self._margin is None and self._scores_are_products:
            return target
        magnitude = self._feature_magnitude(x_norm, state, target)  # h
        magnitude = magnitude if self.weight_norm else magnitude * w_norm
        unmargined = target
        if not self._scores_are_products:
            unmargined = magnitude * self._apply_gradient_mode(target, self.angular(target))
        if self._margin is None:
            return unmargined
        margin, angular = self._batch_margin(x_norm, state, noise), self.angular
        strength = self._target_strength(state.steps, labels, target)

        def psi(c: Tensor) -> Tensor:
            return self._apply_gradient_mode(c, margin(c, angular, strength))

        if self._scores_are_products:
            score = product_score(target, magnitude, psi, self._psi_and_derivative(margin, strength))
        else:
            score = magnitude * psi(target)
        if self.gradient == "normalized":
            assert x_norm is not None
            assert w_hat is not None
            score = straight_through(unmargined, score)
            # The correction changes only gradients, and an exported program has none.
            if torch.is_grad_enabled() and not torch.compiler.is_exporting():
                score = score + normalized_gradient_term(target, psi, x, x_norm, w_hat)
        # Annealing: (λ·unmargined + margin)/(1 + λ)
        if self.annealing is not None and state.steps is not None:
            weight = self.annealing(state.steps.to(target.dtype))  # λ
            score = (weight * unmargined + score) / (1 + weight)
        return score

    def _sample_losses(self, terms: ClassTerms, score: Tensor, labels: Tensor) -> Tensor:
        """Step 3: the loss of each sample."""
        weights = None if self.class_weights is None else self.class_weights.to(score.dtype)
        return sample_losses(terms, score, labels, self.num_classes, weights, self.label_smoothing)

    def _with_penalties(self, loss: Tensor, terms: ClassTerms, counted: Tensor, step: Tensor | None) -> Tensor:
        """Step 4: add the mean energy of the class vectors of the batch, and penalties on feature norms."""
        has_margin_penalty = isinstance(self._margin, NormLinear)
        if terms.energy is None and not self.norm_weight and not has_margin_penalty:
            return loss
        count = counted.sum().clamp_min(1)
        if terms.energy is not None:
            pairs = self.num_classes * self.num_centers - 1
            energy = terms.energy.to(loss.dtype) * (self.energy_weight / pairs) / count
            loss = loss + (energy if step is None else energy * (step >= self.energy_start))
        if self.norm_weight and terms.feature_norm is not None:
            deviations = (terms.feature_norm - self.norm_target).abs().masked_fill(~counted, 0)
            loss = loss + self.norm_weight * deviations.sum() / count
        if has_margin_penalty and terms.feature_norm is not None:
            penalties = self._margin.norm_penalty(terms.feature_norm).masked_fill(~counted, 0)
            loss = loss + penalties.sum() / count
        return loss

    def _energy_has_started(self, step: Tensor | None) -> bool:
        """Return False if the energy need not be computed yet. Where reading the step costs time, it is computed."""
        if step is None or self.energy_start == 0:
            return True
        readable = _numerics.values_readable(step) and _numerics.reading_is_free(step)
        return not readable or int(step) >= self.energy_start

    # Wrong classes and the adaptive radius, which depend on target cosines of the batch ------------------------------

    @property
    def _changes_negatives(self) -> bool:
        """Whether some wrong classes get another response than g."""
        return self.hard_negatives > 0 or self.interclass_filter is not None or self.curriculum is not None

    def _negatives_of_batch(
        self, x: Tensor, labels: Tensor, counted: Tensor, before: HeadState, noise: Tensor | None
    ) -> tuple[HeadState, Negatives]:
        """Return the state with t including this batch, and the changes of wrong classes."""
        if before.t is None:
            return before, self._negatives(x, None, labels, before, noise)
        with torch.no_grad():
            vectors = self.target_vectors(labels).to(x.dtype)
            cosines = sphere.cosines(x.detach().unsqueeze(1), vectors).squeeze(1).amax(1)
            state = before
            if self.training and _numerics.can_update_state(x):
                state = before._replace(t=update_hardness(before.t, cosines, counted, float(self.curriculum or 0)))
        return state, self._negatives(x, cosines, labels, state, noise)

    def _negatives(
        self, x: Tensor, cosines: Tensor | None, labels: Tensor, state: HeadState, noise: Tensor | None
    ) -> Negatives:
        """Return the changes of wrong classes, given the target cosines (B,) if there is a curriculum."""
        threshold, hardness = None, None
        if state.t is not None and cosines is not None:
            margin = self._batch_margin(sphere.norm(x.detach()), state, noise)
            strength = self._target_strength(state.steps, labels, cosines)
            threshold = margin(cosines.detach(), self.angular, strength).detach()
            hardness = state.t.to(cosines.dtype)
        return Negatives(
            self.angular, self.interclass_filter, self.hard_negatives, self.hard_margin, threshold, hardness
        )

    def target_vectors(self, labels: Int[Tensor, " batch"]) -> Float[Tensor, "batch centers dim"]:
        """Return the class vectors of labels. A head whose classes are stored elsewhere overrides this method."""
        return self.weight.unflatten(0, (len(self.weight) // self.num_centers, self.num_centers))[labels]

    def _adaptively_scaled(
        self, x: Tensor, labels: Tensor, counted: Tensor, before: HeadState, *, scale_safely: bool
    ) -> tuple[HeadState, Tensor]:
        """Return the state with the scale of AdaCos for this batch, and the features rescaled to it."""
        assert before.scale is not None
        state, directions = before, sphere.polar(x)[1]
        if self.training and _numerics.can_update_state(x):
            with torch.no_grad():
                scale = before.scale.to(x.dtype)
                terms = self._terms_of_classes(
                    scale * directions.detach(),
                    labels,
                    counted,
                    before.steps,
                    scale_safely=scale_safely,
                    needs_energy=False,
                )
                cosines = terms.target / scale if self._scores_are_products else terms.target
                state = before._replace(scale=update_scale(before.scale, terms.others, cosines, counted))
        assert state.scale is not None
        return state, state.scale.to(x.dtype) * directions

    def _feature_magnitude(self, x_norm: Tensor | None, state: HeadState, like: Tensor) -> Any:
        """Return ρ: ‖x‖ (B,), a number, or the scale of AdaCos."""
        if not isinstance(self.radius, str):
            return float(self.radius)
        return x_norm if state.scale is None else state.scale.to(like.dtype)

    # Responses -------------------------------------------------------------------------------------------------------

    @property
    def _scores_are_products(self) -> bool:
        """Whether the scores of all other classes are inner products, so that no cosine has to be computed."""
        return type(self._angular) is Cosine and not self._margin_on_others and not self._changes_negatives

    @property
    def _is_linear_in_x(self) -> bool:
        """Whether the scores of all other classes are linear functions of the feature."""
        return self._scores_are_products and self.radius == "feature"

    def _with_learned_fields(self, owner: str, entry: Any) -> Any:
        """Return g or ψ with its learned fields replaced by the parameters of the head."""
        names = self._tensor_fields[owner]
        learned = {name: getattr(self, f"{owner}_{name}") for name in names if hasattr(self, f"{owner}_{name}")}
        return replace(entry, **learned) if learned else entry

    def _needs_autograd(self) -> bool:
        """Return True if the response of the other classes must be differentiated automatically."""
        # A user's function, also one of a subclass, may have parameters that are not among its fields.
        is_custom_margin = self._margin_on_others and type(self._margin) not in MARGINS.values()
        if type(self._angular) not in ANGULARS.values() or is_custom_margin:
            return not self._scores_are_products
        entries = (("angular", self.angular), ("margin", self.margin))
        return any(
            getattr(entry, name).requires_grad for owner, entry in entries for name in self._tensor_fields[owner]
        )

    def _apply_gradient_mode(self, c: Tensor, response: Tensor) -> Tensor:
        """Return the response; with gradient="detached" it has the gradient of the cosine `c`."""
        return straight_through(c, response) if self.gradient == "detached" else response

    def _other_response(self, c: Tensor, strength: float | Tensor) -> Tensor:
        """Return the response of classes that are not the target: g, unless the margin changes it."""
        margin = self.margin
        if isinstance(margin, Margin) and margin.changes_other_classes:
            return margin.others(c, self.angular, strength)
        return self.angular(c)

    def _other_derivative(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Return g′, or None if the derivative of `_other_response` is not known in closed form."""
        angular = self.angular
        # A subclass that overrides `__call__` alone inherits a slope that does not match; `has_slope` is False then.
        if self._margin_on_others or not isinstance(angular, Angular) or not angular.has_slope:
            return None
        return angular.slope

    def _batch_margin(self, x_norm: Tensor | None, state: HeadState, noise: Tensor | None = None) -> Margin:
        """Return ψ for this batch: some margins depend on feature norms or on noise, and a callable is wrapped."""
        margin = self.margin
        if isinstance(margin, NormAdaptive):
            assert x_norm is not None
            assert state.norm_mean is not None
            assert state.norm_std is not None
            # The norm decides how large the margin is, but no gradient flows through this choice.
            mean, std = state.norm_mean.to(x_norm.dtype), state.norm_std.to(x_norm.dtype)
            margin = margin.for_quality(margin.quality(x_norm.detach(), mean, std))
        elif isinstance(margin, NormLinear):
            assert x_norm is not None
            margin = margin.for_norms(x_norm)
        elif isinstance(margin, RandomAngle) and noise is not None:
            margin = margin.for_noise(noise)
        assert margin is not None
        return margin if isinstance(margin, Margin) else CallableMargin(margin)

    def _margin_noise(self, x: Tensor) -> Tensor | None:
        """Return standard normal numbers (B,) for a random margin in training mode, else None."""
        if not self.training or not isinstance(self._margin, RandomAngle):
            return None
        return self.normal_noise(torch.empty(len(x), dtype=self._wide_dtype(x), device=x.device))

    def normal_noise(self, like: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        """Return standard normal numbers. A head in several processes overrides this method with common ones."""
        return torch.randn_like(like)

    def _psi_and_derivative(
        self, margin: Any, strength: float | Tensor
    ) -> Callable[[Tensor], tuple[Tensor, Tensor | float]] | None:
        """Return ψ and ψ′ as functions of the cosine, or None if ψ′ is not known in closed form."""
        if not self._has_closed_form:
            return None
        if self.gradient == "detached":
            angular = self.angular
            return lambda c: (margin(c, angular, strength), 1.0)
        return lambda c: margin.value_and_slope(c, strength)

    @property
    def _has_closed_form(self) -> bool:
        """Whether the derivative of the target score is known: that of ψ, or 1 if it is detached."""
        if not self._scores_are_products or self._tensor_fields["margin"]:
            return False
        if self.gradient == "true":
            # The closed form has no gradient through a margin that depends on the feature norm.
            is_affine = isinstance(self._margin, AffineAngleMargin) and self._margin.has_slope
            return is_affine and not isinstance(self._margin, NormLinear)
        return self.gradient == "detached" and isinstance(self._margin, Margin)

    # Schedules and statistics ----------------------------------------------------------------------------------------

    @property
    def _has_schedule(self) -> bool:
        return self.annealing is not None or self.ramp is not None or self.energy_start > 0

    def _ramp_strength(self, step: Tensor | None, like: Tensor) -> float | Tensor:
        """Return the strength of the margin, 1 without a ramp."""
        return 1.0 if self.ramp is None or step is None else self.ramp(step.to(like.dtype))

    def _target_strength(self, step: Tensor | None, labels: Tensor, like: Tensor) -> float | Tensor:
        """Return the strength of the margin of each label, (B,) if classes have different margins."""
        strength = self._ramp_strength(step, like)
        return strength if self.class_margins is None else strength * self.class_margins.to(like.dtype)[labels]

    def _with_norm_statistics(self, state: HeadState, norms: Tensor | None, counted: Tensor) -> HeadState:
        """Return the state with statistics of feature norms that include this batch, in training mode."""
        if state.norm_mean is None or state.norm_std is None or norms is None:
            return state
        if not self.training or not _numerics.can_update_state(norms):
            return state
        momentum = self._margin.momentum
        mean, std = update_norm_statistics(state.norm_mean, state.norm_std, norms.detach(), counted, momentum)
        return state._replace(norm_mean=mean, norm_std=std)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move and cast as torch does, and move the fixed tensors of g and ψ with the parameters."""
        super()._apply(fn, recurse)
        # Not the device of `weight`, which a parametrisation would compute.
        device = next(chain(self.parameters(), self.buffers())).device
        self._angular = fields_on_device(self._angular, device)
        self._margin = fields_on_device(self._margin, device)
        return self

    # Polar coordinates, checks and dtypes ----------------------------------------------------------------------------

    def _wide_dtype(self, x: Tensor) -> torch.dtype:
        """Return the dtype of computation: the wider one of features and weight, at least float32."""
        return torch.promote_types(_numerics.widen(x).dtype, _numerics.widen(self.weight).dtype)

    def _products(self, x: Tensor) -> Tensor:
        """Return the inner products (B, C) of features with class vectors, normalised if `weight_norm`."""
        class_vectors = self.weight if self.uses_weight_norm else sphere.polar(self.weight)[1]
        dtype = self._wide_dtype(x)
        products = x.to(dtype) @ class_vectors.to(dtype).mT
        return products if self.num_centers == 1 else largest_per_class(products, self.num_centers)[0]

    def _polar_scores(self, x: Tensor, state: HeadState) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return feature norms (B,), magnitudes, which broadcast to (B, C), and cosines (B, C) of all classes.

        The last result is the centre of each class with this cosine, (B, C), or None with one centre.
        """
        dtype = self._wide_dtype(x)
        norms, directions = (t.to(dtype) for t in sphere.row_polar(x))
        w_norm, w_hat = (t.to(dtype) for t in sphere.polar(self.weight))
        cosines, winners, w_norm = directions @ w_hat.mT, None, w_norm.mT
        if self.num_centers > 1:
            ranked = cosines if self.weight_norm else w_norm * self.angular(cosines)
            winners = largest_per_class(ranked, self.num_centers)[1]
            cosines, w_norm = rows_of_winners(cosines, winners), rows_of_winners(w_norm, winners)
        magnitudes = self.magnitude(w_norm, norms)
        if state.scale is not None:  # an adaptive radius, for which `magnitude` has the radius 1
            magnitudes = magnitudes * state.scale.to(dtype)
        return norms.squeeze(1), magnitudes, cosines, winners

    def _without_ignored(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the features with ignored rows set to zero, so that NaN in an ignored row has no effect."""
        return x.masked_fill((y == self.ignore_index).unsqueeze(1), 0)

    def _require_finite(self, result: Tensor, x: Tensor) -> None:
        """Raise an error that names a row if a result is not finite."""
        if not _numerics.values_readable(result) or bool(torch.isfinite(result.detach()).all()):
            return
        # Features first: if they are not finite, the input is wrong. Everything else means that training diverged.
        _numerics.require_finite_rows("x", x)
        try:
            _numerics.require_finite_rows("weight", self.weight)
        except ValueError as error:
            raise NonFiniteScoresError(str(error)) from None
        # All inputs are finite, so a product has overflowed, most likely in the row with the largest norm.
        norms = sphere.norm(x.detach().double())
        row = int(norms.argmax())
        largest = float(sphere.norm(self.weight.detach().double()).max())
        raise NonFiniteScoresError(
            f"x must give scores that {result.dtype} can represent, but row {row} overflows: ‖x‖ = {norms[row]:.3g}, "
            f"and class vectors have norms up to {largest:.3g}"
        )

    def _narrow(self, result: Tensor, x: Tensor) -> Tensor:
        return _numerics.narrow(result, torch.promote_types(x.dtype, self.weight.dtype))
