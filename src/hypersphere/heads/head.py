r"""The angular head: scores h(‖w‖, ‖x‖)·g(θ) with a margin ψ on the target class, and their cross entropy.

The forward pass has four steps, in this order: the terms of all classes (`fused_loss`), the target score with margin
and schedules (`target_score`), the loss per sample, and penalties. `BinaryHead` replaces the third step; `ShardedHead`
replaces `compute_terms`, the method that computes the first.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hypersphere import _numerics, sphere
from hypersphere._validation import choose, is_integer, is_number, require
from hypersphere.functions._recomputation import PassHistory
from hypersphere.functions._tensor_fields import fields_on_device
from hypersphere.functions.angular import ANGULARS, Angular, Cosine
from hypersphere.functions.magnitude import InnerProduct, Linear, LinearlyWeighted, Magnitude, Sphere
from hypersphere.functions.margin import COSINE, MARGINS, AffineAngleMargin, Margin, NormAdaptive
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

__all__ = ["AngularHead", "NonFiniteScoresError", "check_features", "check_labels", "require_labels"]

_GRADIENTS = ("true", "detached", "normalized")
_REDUCTIONS = ("mean", "sum", "none")


class NonFiniteScoresError(ValueError):
    """Finite features have scores that are not finite: class vectors diverged, or a score overflows."""


class _State(NamedTuple):
    """What schedules and margins depend on, apart from the batch. A head has only the fields that it uses."""

    step: Tensor | None  # the number of steps before this one
    norm_mean: Tensor | None  # running mean of the feature norm, including this batch in training mode
    norm_std: Tensor | None  # running standard deviation of the feature norm, in the same form

    @property
    def is_empty(self) -> bool:
        """True if the head has neither a schedule nor statistics."""
        return all(value is None for value in self)


class _OptimizerHandle(RemovableHandle):
    """The handle of `AngularHead.advance_with`, which also lets the head count its training calls again."""

    def __init__(self, hook: RemovableHandle, head: AngularHead) -> None:
        super().__init__(OrderedDict())
        self.hook, self.head = hook, head
        head._optimizer_hooks |= {self.id}

    def remove(self) -> None:
        self.hook.remove()
        self.head._optimizer_hooks -= {self.id}


class AngularHead(nn.Module):
    r"""A classifier whose scores are magnitudes times functions of angles (thesis, 2.4, 2.18, 2.20, 3.10 and 3.11).

        f_j = h(‖w_j‖, ‖x‖)·g(θ_j),   f_y = h(‖w_y‖, ‖x‖)·ψ(θ_y),   loss = mean cross entropy(f, y)

    Class vectors are the rows of `weight`. The loss is computed in blocks of classes (see `fused_loss`): the B×C
    products are saved for the backward pass up to 256 MB and computed again beyond that. This needs a g of the
    menu with fixed numbers, and unit class vectors if g is not the cosine. With a user's callable g, a learned k, or a
    user's margin that changes other classes, all B×C scores are computed and differentiated by autograd, which saves
    several matrices of this size.

    A training step reads values on the host once, to check labels and features. A step is computed twice if squares of
    a class vector or feature leave the range of the dtype, if a class vector is zero and `weight_norm` is True, or if
    `energy_weight` > 0 and a class vector of the batch is closer than 7.8° (in float32) to another one. The second time
    it uses safe scaling and an exact energy.

    A zero feature has score 0 for every class. Where scores are linear in x (`radius="feature"`, cosine g), it gets the
    gradient of a linear layer, as if there were no margin; elsewhere it has no direction and its gradient is zero.

    Args:
        in_features: d, the length of a feature.
        num_classes: C ≥ 2.
        radius: "feature" to keep ‖x‖, or a number s > 0 to rescale every feature to norm s.
        weight_norm: whether class vectors are normalised to unit vectors; False keeps ‖w‖.
        angular: g, a name from `hypersphere.angular`, an instance or a callable of the cosine.
        margin: ψ, a name from `hypersphere.margin`, an instance, a callable of the target's cosine, or None for g.
        annealing: a schedule from the target score without margin to the one with the margin.
        ramp: a schedule of the strength of the margin. Schedules read the buffer `steps`, which counts training calls,
            or optimizer steps after `advance_with`.
        bias: whether to learn one bias per class.
        gradient: "true" for the derivative; "detached" to pass gradients through g and ψ as if both were the cosine;
            "normalized" for the gradient of the original SphereFace code, for A-Softmax only (see `docs/gradients.md`).
        energy_weight: λ_M, the weight of the data-dependent energy of the class vectors (thesis, 5.8).
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
    class_weights: Tensor | None
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
        _check_loss_options(gradient, reduction, label_smoothing, ignore_index)
        _check_schedules(margin, annealing, ramp)
        _check_penalties(energy_weight, norm_weight, norm_target, reduction)
        require(is_integer(energy_start, 0), "energy_start", "an integer >= 0", energy_start)
        self.in_features = in_features
        self.num_classes = num_classes
        self.radius = radius
        self.weight_norm = weight_norm
        self.magnitude = _magnitude(radius, weight_norm)
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
        self._optimizer_hooks: frozenset[int] = frozenset()  # of `advance_with`
        # The state that recent passes used, for activation checkpointing.
        fallback = "the step and the statistics of the last pass"
        self._loss_passes, self._logit_passes = PassHistory(fallback), PassHistory(fallback)
        self._margin_on_others = isinstance(self._margin, Margin) and self._margin.changes_other_classes
        # The normalized gradient is defined only for ‖x‖·ψ(θ).
        if gradient == "normalized":
            is_a_softmax = margin is not None and radius == "feature" and weight_norm
            if not (is_a_softmax and type(self._angular) is Cosine and not self._margin_on_others):
                raise ValueError(
                    "gradient='normalized' needs a margin on the target, radius='feature', weight_norm=True and "
                    "angular='cosine'"
                )
        # A g or ψ may hold tensors, such as a learned k. Parameters among them become parameters of the head.
        self._tensor_fields: dict[str, tuple[str, ...]] = {}
        self._initial_values: dict[str, Tensor] = {}
        for owner, entry in (("angular", self._angular), ("margin", self._margin)):
            self._tensor_fields[owner] = _tensor_fields(owner, entry)
            for name in self._tensor_fields[owner]:
                value = getattr(entry, name)
                if isinstance(value, nn.Parameter):
                    self.register_parameter(f"{owner}_{name}", value)
                    self._initial_values[f"{owner}_{name}"] = value.detach().clone()
        self.weight = nn.Parameter(torch.empty(num_classes, in_features))
        self.bias = nn.Parameter(torch.empty(1 if self.shares_bias else num_classes)) if bias else None
        # Buffers exist only where they are used: without schedules the state dict contains nothing but parameters.
        if self._has_schedule:
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        if isinstance(self._margin, NormAdaptive):
            self.register_buffer("norm_mean", torch.empty(()))
            self.register_buffer("norm_std", torch.empty(()))
        # Class weights are a setting, which the constructor provides, so they are not part of the state dict.
        self.register_buffer("class_weights", _checked_class_weights(class_weights, num_classes), persistent=False)
        self.reset_parameters()

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
        with _numerics.autocast_disabled(x):
            # Compute first and check afterwards: all checks are combined into `is_valid`, the only value that the host
            # has to wait for. A batch that fails is examined and, if it is legal, computed again with safe scaling.
            scale_safely = len(x) == 0 or not _numerics.values_readable(x, y, self.weight)
            loss, state, is_valid = self._loss(x, y, before, scale_safely=scale_safely)
            if not scale_safely and not bool(is_valid):
                require_labels(y, self.num_classes, self.ignore_index)
                _numerics.require_finite_rows("x", self._without_ignored(x, y))
                loss, state, _ = self._loss(x, y, before, scale_safely=True)
                self._require_finite(loss, self._without_ignored(x, y))
        if self.training and _numerics.can_update_state(x):
            self._record_pass(x, y, state, self._loss_passes)
            if state.norm_mean is not None and state.norm_std is not None:
                self.norm_mean, self.norm_std = state.norm_mean, state.norm_std
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
                magnitudes, cosines = self._polar_scores(x)[1:]
                scores = magnitudes * self.angular(cosines)
            scores = scores if self.bias is None else scores + self.bias.to(scores.dtype)
        self._require_finite(scores, x)
        return self._narrow(scores, x)

    def logits(self, x: Float[Tensor, "batch dim"], y: Integer[Tensor, " batch"]) -> Float[Tensor, "batch classes"]:
        """Return the scores with the margin on each target, for use with another loss.

        Rows with an ignored label contain the scores of a zero feature. Schedules do not advance here: call `advance`
        once per step, or use `advance_with`. The statistics of AdaFace are read but not updated; only the loss, the
        call of the head, updates them.
        """
        check_features(x, self.in_features)
        y = check_labels(y, len(x))
        require_labels(y, self.num_classes, self.ignore_index)
        x = self._without_ignored(x, y)
        state = self._state_of_pass(x, y, self._logit_passes)
        column = y.clamp(0, self.num_classes - 1).unsqueeze(1)  # ignored labels get any class; their rows do not count
        with _numerics.autocast_disabled(x):
            x_norm, magnitudes, cosines = self._polar_scores(x)
            if self._is_linear_in_x:
                scores = self._products(x)
            else:
                response = self._other_response(cosines, self._strength(state.step, cosines))
                scores = magnitudes * self._apply_gradient_mode(cosines, response)
            # Replace the target's entry by the score with the margin.
            target = (scores if self._scores_are_products else cosines).gather(1, column).squeeze(1)
            w_norm, w_hat = (t.to(target.dtype) for t in sphere.polar(self.weight[column.squeeze(1)]))
            score = self._target_score(target, x, state, x_norm, w_norm.squeeze(1), w_hat.detach())
            logits = scores.scatter(1, column, score.unsqueeze(1))
            logits = logits if self.bias is None else logits + self.bias.to(logits.dtype)
        self._require_finite(logits, x)
        if self.training and _numerics.can_update_state(x):
            self._record_pass(x, y, state, self._logit_passes)
        return self._narrow(logits, x)

    def advance(self) -> None:
        """Advance the schedules by one step. `forward` does this in training mode unless `advance_with` was called."""
        if hasattr(self, "steps"):
            self.steps = self.steps + 1  # a new tensor, because a compiled backward pass may still read the old one

    def advance_with(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Let the schedules count the steps of `optimizer` instead of training calls of the head.

        Use this with gradient accumulation, or if the head is called several times per step. A copy of the head does
        not follow the optimizer: it counts its training calls again.

        Returns:
            A handle; its `remove()` lets the schedules count training calls again.

        Example:
            >>> head = AngularHead(8, 3, margin="multiplicative", ramp=Ramp(steps=100))
            >>> optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
            >>> handle = head.advance_with(optimizer)
            >>> for _ in range(4):  # accumulate gradients of four batches
            ...     head(torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])).backward()
            >>> optimizer.step()
            >>> head.steps
            tensor(1)
        """
        return _OptimizerHandle(optimizer.register_step_post_hook(lambda *_: self.advance()), self)

    def extra_repr(self) -> str:
        """Show the sizes and all settings that differ from the defaults."""
        parameters = inspect.signature(AngularHead.__init__).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} | {"angular": Cosine()}
        settings = {name: getattr(self, name) for name in defaults if name not in ("bias", "class_weights")}
        changed = [f"{name}={value!r}" for name, value in settings.items() if value != defaults[name]]
        flags = ["bias=True"] * (self.bias is not None) + ["class_weights"] * (self.class_weights is not None)
        return ", ".join([str(self.in_features), str(self.num_classes), *changed, *flags])

    # The forward pass, step by step ----------------------------------------------------------------------------------

    def _loss(self, x: Tensor, y: Tensor, before: _State, *, scale_safely: bool) -> tuple[Tensor, _State, Tensor]:
        """Return the loss, the state that it used, and whether all inputs and results are valid.

        Args:
            x: features.
            y: labels.
            before: the state before this batch.
            scale_safely: whether to scale features and class vectors if a square overflows, and to remove the features
                of ignored samples, which may be NaN.
        """
        counted = y != self.ignore_index
        labels = y.clamp(0, self.num_classes - 1)  # a bad label is reported after the computation
        labels_valid = (~counted | (labels == y)).all()
        x = self._without_ignored(x, y) if scale_safely else x
        x = x.to(self._wide_dtype(x))
        terms = self._terms_of_classes(x, labels, counted, before.step, scale_safely=scale_safely)
        state = self._with_batch_statistics(before, terms.feature_norm, counted)
        score = self._target_score(
            terms.target, x, state, terms.feature_norm, terms.target_norm, terms.target_direction
        )
        if self.bias is not None:
            # `target_bias` is None if all classes share one bias.
            score = score + (self.bias.to(score.dtype) if terms.target_bias is None else terms.target_bias)
        losses = self._sample_losses(terms, score, labels)
        weights = None if self.class_weights is None else self.class_weights.to(losses.dtype)
        loss = reduce_samples(losses, labels, weights, counted, self.reduction)
        loss = self._with_penalties(loss, terms, counted, state.step)
        is_finite = loss.detach().abs() < torch.inf
        return loss, state, labels_valid & terms.in_range & (is_finite if loss.ndim == 0 else is_finite.all())

    def _terms_of_classes(
        self, x: Tensor, labels: Tensor, counted: Tensor, step: Tensor | None, *, scale_safely: bool
    ) -> ClassTerms:
        """Step 1: the reductions over all other classes, and the product with the target class vector."""
        as_products, unmargined = self._scores_are_products, self._scores_are_products and self._margin is None
        # Evaluated now: the closure below runs in backward, when `steps` has advanced.
        strength = self._strength(step, x)
        needs_norm = self.norm_weight > 0 or isinstance(self._margin, NormAdaptive)
        rule = ScoreRule(
            unit_class_vectors=self.weight_norm,
            radius=None if self.radius == "feature" else float(self.radius),
            response=None if as_products else lambda c: self._other_response(c, strength),
            derivative=self._other_derivative(),
            detached=self.gradient == "detached",
            needs_autograd=self._needs_autograd(),
            reduction=self.class_reduction,
            shared_bias=self.shares_bias,
            needs_feature_norm=needs_norm or (self.radius == "feature" and not unmargined),
            needs_target_norm=not self.weight_norm and not unmargined,
            needs_target_direction=self.gradient == "normalized",
            needs_energy=self.energy_weight > 0,
            targets_present=True,
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
        state: _State,
        x_norm: Tensor | None,
        w_norm: Tensor | None,
        w_hat: Tensor | None,
    ) -> Tensor:
        """Step 2: the target score h·ψ(θ) with the chosen gradient, blended with h·g(θ) while annealing.

        Args:
            target: (B,) h·cos θ of each sample with its target class if scores are products, else cos θ.
            x: (B, d) features, for the normalized gradient.
            state: the step of the schedules, and the statistics of feature norms for a margin that depends on them.
            x_norm: (B,) ‖x‖, or None if the score does not depend on it.
            w_norm: (B,) ‖w_y‖, or None if the score does not depend on it.
            w_hat: (B, d) ŵ_y without gradient, for the normalized gradient.
        """
        if self._margin is None and self._scores_are_products:
            return target
        magnitude: Any = x_norm if self.radius == "feature" else float(self.radius)  # h
        magnitude = magnitude if self.weight_norm else magnitude * w_norm
        unmargined = target
        if not self._scores_are_products:
            unmargined = magnitude * self._apply_gradient_mode(target, self.angular(target))
        if self._margin is None:
            return unmargined
        margin, angular, strength = self._batch_margin(x_norm, state), self.angular, self._strength(state.step, target)

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
        if self.annealing is not None and state.step is not None:
            weight = self.annealing(state.step.to(target.dtype))  # λ
            score = (weight * unmargined + score) / (1 + weight)
        return score

    def _sample_losses(self, terms: ClassTerms, score: Tensor, labels: Tensor) -> Tensor:
        """Step 3: the loss of each sample."""
        weights = None if self.class_weights is None else self.class_weights.to(score.dtype)
        return sample_losses(terms, score, labels, self.num_classes, weights, self.label_smoothing)

    def _with_penalties(self, loss: Tensor, terms: ClassTerms, counted: Tensor, step: Tensor | None) -> Tensor:
        """Step 4: add the mean energy of the class vectors of the batch, and the penalty on feature norms."""
        if terms.energy is None and not self.norm_weight:
            return loss
        count = counted.sum().clamp_min(1)
        if terms.energy is not None:
            energy = terms.energy.to(loss.dtype) * (self.energy_weight / (self.num_classes - 1)) / count
            loss = loss + (energy if step is None else energy * (step >= self.energy_start))
        if self.norm_weight and terms.feature_norm is not None:
            deviations = (terms.feature_norm - self.norm_target).abs().masked_fill(~counted, 0)
            loss = loss + self.norm_weight * deviations.sum() / count
        return loss

    # Responses -------------------------------------------------------------------------------------------------------

    @property
    def _scores_are_products(self) -> bool:
        """Whether the scores of all other classes are inner products, so that no cosine has to be computed."""
        return type(self._angular) is Cosine and not self._margin_on_others

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

    def _batch_margin(self, x_norm: Tensor | None, state: _State) -> Margin:
        """Return ψ for this batch: some margins depend on feature norms, and a callable is wrapped."""
        margin = self.margin
        if isinstance(margin, NormAdaptive):
            assert x_norm is not None
            assert state.norm_mean is not None
            assert state.norm_std is not None
            # The norm decides how large the margin is, but no gradient flows through this choice.
            mean, std = state.norm_mean.to(x_norm.dtype), state.norm_std.to(x_norm.dtype)
            margin = margin.for_quality(margin.quality(x_norm.detach(), mean, std))
        assert margin is not None
        return margin if isinstance(margin, Margin) else _CallableMargin(margin)

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
            return isinstance(self._margin, AffineAngleMargin) and self._margin.has_slope
        return self.gradient == "detached" and isinstance(self._margin, Margin)

    # Schedules and statistics ----------------------------------------------------------------------------------------

    @property
    def _has_schedule(self) -> bool:
        return self.annealing is not None or self.ramp is not None or self.energy_start > 0

    def _current_state(self) -> _State:
        is_adaptive = isinstance(self._margin, NormAdaptive)
        return _State(
            step=self.steps if self._has_schedule else None,
            norm_mean=self.norm_mean if is_adaptive else None,
            norm_std=self.norm_std if is_adaptive else None,
        )

    def _state_of_pass(self, x: Tensor, y: Tensor, passes: PassHistory) -> _State:
        """Return the current state, or the one that this pass used before if activation checkpointing repeats it."""
        state = self._current_state()
        if not self.training or not _numerics.in_backward() or state.is_empty:
            return state
        return _State(*passes.recall(self._fingerprint(x, y), passes.newest or state))

    def _record_pass(self, x: Tensor, y: Tensor, state: _State, passes: PassHistory) -> None:
        """Remember the state that this call used, in case activation checkpointing repeats it."""
        if not state.is_empty and _numerics.values_readable(x, y):
            passes.record(self._fingerprint(x, y), state)

    def _fingerprint(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return one number per sample, and the labels, which identify a call: mixup uses two labels per feature."""
        return x.detach().sum(1, dtype=self._wide_dtype(x)), y

    def _strength(self, step: Tensor | None, like: Tensor) -> float | Tensor:
        """Return the strength of the margin, 1 without a ramp."""
        return 1.0 if self.ramp is None or step is None else self.ramp(step.to(like.dtype))

    def _with_batch_statistics(self, state: _State, norms: Tensor | None, counted: Tensor) -> _State:
        """Return the state with statistics of feature norms that include this batch, in training mode."""
        if state.norm_mean is None or state.norm_std is None or norms is None:
            return state
        if not self.training or not _numerics.can_update_state(norms):
            return state
        mean, std = _update_statistics(state.norm_mean, state.norm_std, norms.detach(), counted, self._margin.momentum)
        return state._replace(norm_mean=mean, norm_std=std)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which counts its calls: the hooks of `advance_with` advance this head only."""
        return {**self.__dict__, "_optimizer_hooks": frozenset()}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move and cast as torch does, and move the fixed tensors of g and ψ with the parameters."""
        super()._apply(fn, recurse)
        device = next(self.parameters()).device  # not that of `weight`, which a parametrisation would compute
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
        return x.to(dtype) @ class_vectors.to(dtype).mT

    def _polar_scores(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return feature norms (B,), and magnitudes, which broadcast to (B, C), and cosines (B, C) of all classes."""
        dtype = self._wide_dtype(x)
        norms, directions = (t.to(dtype) for t in sphere.row_polar(x))
        w_norm, w_hat = (t.to(dtype) for t in sphere.polar(self.weight))
        return norms.squeeze(1), self.magnitude(w_norm.mT, norms), directions @ w_hat.mT

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


# Checks of batches ---------------------------------------------------------------------------------------------------


def check_features(x: Tensor, in_features: int) -> None:
    """Raise a `ValueError` unless `x` is a dense floating-point matrix with `in_features` columns."""
    require(isinstance(x, Tensor), "x", "a tensor of features", type(x).__name__)
    if x.ndim != 2 or x.shape[1] != in_features or not x.is_floating_point() or x.layout != torch.strided:
        raise ValueError(
            f"x must be dense floating-point features of shape (B, {in_features}), not {x.dtype} {tuple(x.shape)}"
        )


def check_labels(y: Tensor, batch: int) -> Tensor:
    """Return the labels in int64, or raise a `ValueError` unless `y` is a vector of `batch` integers.

    Values are not read. In a narrow dtype a label could equal an ignored one: -100 is 156 in uint8.
    """
    require(isinstance(y, Tensor), "y", "a tensor of labels", type(y).__name__)
    if y.shape != (batch,) or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"y must be {batch} integer labels, one per row of x, not {y.dtype} {tuple(y.shape)}")
    return y.long()


def require_labels(y: Tensor, num_classes: int, ignore_index: int) -> None:
    """Raise a `ValueError` that names the first label that is neither a class nor ignored."""
    if not _numerics.values_readable(y):
        return
    is_bad = (y != ignore_index) & ((y < 0) | (y >= num_classes))
    if bool(is_bad.any()):
        row = int(is_bad.nonzero()[0])
        raise ValueError(f"y must be in [0, {num_classes}), but row {row} is {int(y[row])}")


# Checks and meaning of settings --------------------------------------------------------------------------------------


def _check_loss_options(gradient: str, reduction: str, label_smoothing: float, ignore_index: int) -> None:
    require(gradient in _GRADIENTS, "gradient", f"one of {', '.join(map(repr, _GRADIENTS))}", gradient)
    require(reduction in _REDUCTIONS, "reduction", f"one of {', '.join(map(repr, _REDUCTIONS))}", reduction)
    is_fraction = is_number(label_smoothing, 0, 1) and label_smoothing < 1
    require(is_fraction, "label_smoothing", "a number in [0, 1)", label_smoothing)
    require(is_integer(ignore_index, -(2**63)), "ignore_index", "an integer", ignore_index)


def _check_schedules(margin: object, annealing: object, ramp: object) -> None:
    for name, schedule in (("annealing", annealing), ("ramp", ramp)):
        require(schedule is None or callable(schedule), name, "a schedule or None", schedule)
        require(schedule is None or margin is not None, name, "None when there is no margin", schedule)


def _check_penalties(energy_weight: float, norm_weight: float, norm_target: float, reduction: str) -> None:
    require(is_number(energy_weight, 0), "energy_weight", "a number >= 0", energy_weight)
    require(is_number(norm_weight, 0), "norm_weight", "a number >= 0", norm_weight)
    require(is_number(norm_target, 0) and norm_target > 0, "norm_target", "a positive number", norm_target)
    has_penalty = energy_weight > 0 or norm_weight > 0
    require(reduction == "mean" or not has_penalty, "reduction", "'mean' with an energy or norm weight", reduction)


def _magnitude(radius: str | float, weight_norm: bool) -> Magnitude:
    """Return h(‖w‖, ‖x‖) as one of the magnitudes that layers use."""
    if radius == "feature":
        return Linear() if weight_norm else InnerProduct()
    is_positive = is_number(radius, 0) and float(radius) > 0
    require(is_positive, "radius", "'feature' or a positive number", radius)
    fixed = Sphere(alpha=float(radius))
    return fixed if weight_norm else LinearlyWeighted(fixed)


def _checked_class_weights(weights: Tensor | None, num_classes: int) -> Tensor | None:
    """Return a float copy of C finite weights >= 0."""
    if weights is None:
        return None
    weights = torch.as_tensor(weights)
    accepted = f"{num_classes} finite numbers >= 0"
    require(weights.shape == (num_classes,), "class_weights", accepted, tuple(weights.shape))
    is_bad = (weights < 0) | ~weights.isfinite()
    require(not bool(is_bad.any()), "class_weights", accepted, weights[is_bad][:1].tolist())
    return weights.detach().clone().to(torch.float64 if weights.dtype == torch.float64 else torch.float32)


def _tensor_fields(owner: str, entry: object) -> tuple[str, ...]:
    """Return the names of the fields of a g or ψ that hold tensors. In a head each must hold one number."""
    if not isinstance(entry, (Angular, Margin)):
        return ()
    fields = {name: value for name, value in vars(entry).items() if isinstance(value, Tensor)}
    for name, value in fields.items():
        require(value.numel() == 1, f"{name} of {owner}", "one number in a head", tuple(value.shape))
    return tuple(fields)


# Margins and statistics ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _CallableMargin(Margin):
    """A user's function of the cosine as a margin. Strengths other than 1 interpolate: g + strength·(ψ − g)."""

    function: Callable[[Tensor], Tensor]

    def __call__(
        self, c: Tensor, angular: Callable[[Tensor], Tensor] = COSINE, strength: float | Tensor = 1.0
    ) -> Tensor:
        psi = self.function(c)
        if not isinstance(strength, Tensor) and strength == 1:
            return psi
        g = angular(c)
        return g + strength * (psi - g)


def _update_statistics(
    mean: Tensor, std: Tensor, norms: Tensor, counted: Tensor, momentum: float
) -> tuple[Tensor, Tensor]:
    """Return running statistics, updated with the mean and standard deviation of the counted norms.

    Fewer than two samples or norms that are not finite leave the statistics unchanged. No shape depends on the number
    of counted samples, so this can be compiled.
    """
    weights = counted.to(norms.dtype)  # 1 for samples that count, else 0
    count = weights.sum()
    batch_mean = torch.dot(norms, weights) / count.clamp_min(1)
    deviations = (norms - batch_mean) * weights
    batch_std = (torch.dot(deviations, deviations) / (count - 1).clamp_min(1)).sqrt()
    # A sample standard deviation needs two samples. It is not finite if the mean is not.
    is_usable = (count >= 2) & (batch_std < torch.inf)
    new_mean, new_std = (old.lerp(new.to(old.dtype), momentum) for old, new in ((mean, batch_mean), (std, batch_std)))
    return torch.where(is_usable, new_mean, mean), torch.where(is_usable, new_std, std)
