r"""The angular head: scores h(‖w‖, ‖x‖)·g(θ) with a margin ψ on the target class, and their cross entropy.

This file has the options, parameters and public methods of a head. The loss is computed in four steps in `_loss`: the
terms of all classes (`fused_loss`), the target score with margin and schedules (`target_score`), the loss per sample,
and penalties. `BinaryHead` replaces the third step; `ShardedHead` replaces the storage of the classes, from which the
first step gets its terms. Options and their combinations are checked in `_options`, g and ψ are in `_responses`, and
what a head remembers between calls is in `_state`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hypersphere import _numerics, sphere
from hypersphere._deprecation import deprecated_argument, deprecated_attribute
from hypersphere._validation import choose, is_number, require
from hypersphere.functions._entries import fields_on_device
from hypersphere.functions.angular import ANGULARS, Cosine
from hypersphere.functions.margin import MARGINS, Margin, NormAdaptive, RandomAngle
from hypersphere.heads import _class_changes
from hypersphere.heads._centers import LabelAngles, label_angles, largest_per_class, rows_of_winners
from hypersphere.heads._checks import (
    check_features,
    check_labels,
    require_finite_scores,
    require_labels,
    without_ignored,
)
from hypersphere.heads._class_storage import ClassStorage, LocalClasses
from hypersphere.heads._loss import Batch, TargetTerms, batch_loss, batch_negatives, ramp_strength, target_scores
from hypersphere.heads._options import (
    check_combinations,
    check_values,
    checked_class_weights,
    checked_margin_strengths,
    magnitude_of,
)
from hypersphere.heads._responses import Responses, single_number_fields
from hypersphere.heads._state import HeadState, StateHistory, StepSource
from hypersphere.heads.fused_loss import (
    LOG_SUM_EXP,
    ClassReduction,
    ClassTerms,
    sample_losses,
)
from hypersphere.heads.schedules import Annealing, Ramp

__all__ = ["AngularHead"]


class AngularHead(nn.Module):
    r"""A classifier whose scores are magnitudes times functions of angles (thesis, 2.4, 2.18, 2.20, 3.10 and 3.11).

        f_j = h(‖w_j‖, ‖x‖)·g(θ_j),   f_y = h(‖w_y‖, ‖x‖)·ψ(θ_y),   loss = mean cross entropy(f, y)

    Class vectors are the rows of `weight`; with K centres, rows jK to jK + K − 1 belong to class j. The loss is
    computed in blocks of classes (see `fused_loss`): the B×C products are saved for the backward pass up to 256 MB and
    computed again beyond that. This needs a g of the menu with fixed numbers, and unit class vectors if g is not the
    cosine. With a user's callable g, a learned k, a user's margin that changes other classes, or options for other
    classes (`hard_negatives`, `interclass_filter`, `curriculum`), all B×C scores are computed and differentiated by
    autograd, which saves several matrices of this size.

    A training step reads values on the host once, to check labels and features; an energy with several centres or kept
    norms also reads values once per block of classes. A step is computed twice if squares of a class vector or feature
    leave the range of the dtype, if a class vector is zero and `normalize_weight` is True, or if `energy_weight` > 0
    and a class vector of the batch is closer than 7.8° (in float32) to another one. The second time it uses safe
    scaling and an exact energy.

    A zero feature has score 0 for every class. Where scores are linear in x (`radius="feature"`, cosine g), it gets the
    gradient of a linear layer, as if there were no margin; elsewhere it has no direction and its gradient is zero.

    Args:
        in_features: d, the length of a feature.
        num_classes: C ≥ 2.
        radius: "feature" to keep ‖x‖, a number s > 0 to rescale every feature to norm s, or "adaptive" for the s of
            AdaCos, which starts at √2·log(C−1) and follows each training batch in the buffer `scale`.
        normalize_weight: whether class vectors are normalised to unit vectors; False keeps ‖w‖.
        angular: g, a name from `hypersphere.angular`, an instance or a callable of the cosine.
        margin: ψ, a name from `hypersphere.margin`, an instance, a callable of the target's cosine, or None for g.
        annealing: a schedule from the target score without margin to the one with the margin.
        ramp: a schedule of the strength of the margin. Schedules read the buffer `steps`, which counts training calls,
            or optimizer steps after `advance_with`.
        bias: whether to learn one bias per class.
        centers: K, the number of class vectors per class (sub-centres). The cosine of a class is the largest of its K;
            if norms are kept, the class vector with the largest score counts.
        hard_negatives: the number k of nearest other classes whose angle is reduced by `hard_margin` (inter-top-k).
        hard_margin: m′ in radians.
        interclass_filter: other classes with a larger cosine are left out of the loss; None for no filter.
        curriculum: the momentum of the running mean t of target cosines, in the buffer `t`: other classes with
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
    class_buffers: ClassVar[dict[str, float]] = {"class_weights": 1.0, "class_margins": 1.0}
    """Buffers with one entry or row per class, with the value of new classes."""
    class_storage: ClassStorage = LocalClasses()
    """Where the class vectors are: all in this process, unless the head is part of a `ShardedHead`."""
    weight_norm = deprecated_attribute("weight_norm", "normalize_weight")

    @deprecated_argument("weight_norm", "normalize_weight")
    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        radius: str | float = "feature",
        normalize_weight: bool = True,
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
        self.in_features = in_features
        self.num_classes = num_classes
        self.radius = radius
        self.normalize_weight = normalize_weight
        self.annealing = annealing
        self.ramp = ramp
        self.num_centers = centers
        self.hard_negatives = hard_negatives
        self.hard_margin = hard_margin
        self.interclass_filter = interclass_filter
        self.curriculum = curriculum
        self.gradient = gradient
        self.energy_weight = energy_weight
        self.energy_start = energy_start
        self.norm_weight = norm_weight
        self.norm_target = norm_target
        self.label_smoothing = label_smoothing
        self.ignore_index = ignore_index
        self.reduction = reduction
        check_values(self, bias=bias, centers=centers)
        self.magnitude = magnitude_of(radius, normalize_weight)
        self.decay_free_parameters = ("weight",) if normalize_weight else ()
        self._angular: Any = choose(ANGULARS, angular, "angular")
        self._margin: Any = None if margin is None else choose(MARGINS, margin, "margin")
        self._step_source = StepSource()
        self._loss_history, self._logit_history = StateHistory(), StateHistory()
        # A g or ψ may hold tensors, such as a learned k. Parameters among them become parameters of the head.
        self._learned_fields: dict[str, list[str]] = {"angular": [], "margin": []}
        self._initial_values: dict[str, Tensor] = {}
        for owner, entry in (("angular", self._angular), ("margin", self._margin)):
            for name, value in single_number_fields(owner, entry).items():
                if isinstance(value, nn.Parameter):
                    self._learned_fields[owner].append(name)
                    self._initial_values[f"{owner}_{name}"] = value.detach().clone()
                    self.register_parameter(f"{owner}_{name}", value)
        self.weight = nn.Parameter(torch.empty(num_classes * centers, in_features))
        self.bias = nn.Parameter(torch.empty(1 if self.shares_bias else num_classes)) if bias else None
        # Buffers exist only where they are used: without schedules the state dict contains nothing but parameters.
        if annealing is not None or ramp is not None or energy_start > 0:
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
        self.register_buffer("class_weights", checked_class_weights(class_weights, num_classes), persistent=False)
        self.register_buffer("class_margins", strengths, persistent=False)
        check_combinations(self, self.responses)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw class vectors uniformly over the sphere, with norms near 1; reset learned numbers and all counters."""
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        with torch.no_grad():
            for name, value in self._initial_values.items():
                if not value.is_meta:  # a head that was created on the meta device does not know its initial values
                    self.get_parameter(name).copy_(value)
        for history in (self._loss_history, self._logit_history):
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
        """True if scores depend on ‖w‖, which `normalize_weight` removes."""
        return not self.normalize_weight

    # Loss, scores and logits -----------------------------------------------------------------------------------------

    def forward(self, x: Float[Tensor, "batch dim"], y: Integer[Tensor, " batch"]) -> Float[Tensor, "*samples"]:
        """Return the loss of features `x` with labels `y`. The mean over no samples is 0.

        Raises:
            ValueError: if shapes or dtypes are wrong, a label is not a class, or a feature is not finite; the message
                names the row. The state of the head is then unchanged.
            NonFiniteScoresError: a `ValueError` for a class vector that is not finite or a score that overflows.
        """
        check_features(x, self.in_features)
        y = check_labels(y, x.shape[0])
        before = self._state_for_call(x, y, self._loss_history)
        noise = self._margin_noise(x)
        with _numerics.autocast_disabled(x):
            # Compute first and check afterwards: all checks are combined into `is_valid`, the only value that the host
            # has to wait for. A batch that fails is examined and, if it is legal, computed again exactly.
            exact = x.shape[0] == 0 or not _numerics.values_readable(x, y, self.weight)
            loss, state, is_valid = batch_loss(self, x, y, before, noise, exact=exact)
            if not exact and not bool(is_valid):
                require_labels(y, self.num_classes, self.ignore_index)
                counted_features = without_ignored(x, y, self.ignore_index)
                _numerics.require_finite_rows("x", counted_features)
                loss, state, _ = batch_loss(self, x, y, before, noise, exact=True)
                require_finite_scores(loss, counted_features, self.weight)
        if self.training and not state.is_empty and _numerics.can_update_state(x):
            self._loss_history.record(x, y, state)
            for name, value in zip(state._fields, state, strict=True):
                if value is not None and name != "steps":  # steps are counted by `advance`
                    setattr(self, name, value)
            if self._step_source.counts_calls:
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
        require_finite_scores(scores, x, self.weight)
        return self._narrow(scores, x)

    def logits(self, x: Float[Tensor, "batch dim"], y: Integer[Tensor, " batch"]) -> Float[Tensor, "batch classes"]:
        """Return the scores with the margin on each target, for use with another loss.

        Rows with an ignored label contain the scores of a zero feature. Schedules do not advance here: call `advance`
        once per step, or use `advance_with`. Statistics (of AdaFace, CurricularFace and AdaCos) are read but not
        updated; only the loss, the call of the head, updates them. Other classes that `interclass_filter` leaves out
        have the lowest finite number as their score.
        """
        check_features(x, self.in_features)
        y = check_labels(y, x.shape[0])
        require_labels(y, self.num_classes, self.ignore_index)
        x = without_ignored(x, y, self.ignore_index)
        state, responses = self._state_for_call(x, y, self._logit_history), self.responses
        column = y.clamp(0, self.num_classes - 1).unsqueeze(1)  # ignored labels get any class; their rows do not count
        batch = Batch(x, column.squeeze(1), y != self.ignore_index, self._margin_noise(x))
        is_left_out = None
        with _numerics.autocast_disabled(x):
            x_norm, magnitudes, cosines, winners = self._polar_scores(x, state)
            if self._is_linear_in_x:
                scores = self._products(x)
            else:
                response = responses.others(cosines, ramp_strength(self, state.steps, cosines))
                if responses.changes_negatives:
                    negatives = batch_negatives(self, responses, batch, state, cosines.gather(1, column).squeeze(1))
                    is_target = torch.zeros_like(cosines, dtype=torch.bool).scatter(1, column, True)
                    response, is_left_out = negatives(cosines, response, is_target)
                scores = magnitudes * responses.with_gradient_mode(cosines, response)
            # Replace the target's entry by the score with the margin.
            z = (scores if responses.are_products else cosines).gather(1, column).squeeze(1)
            rows = column if winners is None else self.num_centers * column + winners.gather(1, column)
            w_norm, w_hat = (t.to(z.dtype) for t in sphere.polar(self.weight[rows.squeeze(1)]))
            target = TargetTerms(z, x_norm, w_norm.squeeze(1), w_hat.detach())
            score = target_scores(self, responses, batch, state, target)
            logits = scores.scatter(1, column, score.unsqueeze(1))
            logits = logits if self.bias is None else logits + self.bias.to(logits.dtype)
            if is_left_out is not None:
                lowest = torch.finfo(torch.promote_types(x.dtype, self.weight.dtype)).min
                logits = logits.masked_fill(is_left_out, lowest)
        require_finite_scores(logits, x, self.weight)
        if self.training and _numerics.can_update_state(x):
            self._logit_history.record(x, y, state)
        return self._narrow(logits, x)

    # Schedules -------------------------------------------------------------------------------------------------------

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
            >>> from hypersphere.heads import AngularHead, Ramp
            >>> head = AngularHead(8, 3, margin="multiplicative", ramp=Ramp(steps=100))
            >>> optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
            >>> handle = head.advance_with(optimizer)
            >>> for _ in range(4):  # accumulate gradients of four batches
            ...     head(torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])).backward()
            >>> optimizer.step()
            >>> head.steps
            tensor(1)
        """
        return self._step_source.follow(optimizer, self.advance)

    # Changes of the classes ------------------------------------------------------------------------------------------

    def grow(
        self,
        n: int,
        *,
        init: Float[Tensor, "n dim"] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Int[Tensor, " classes"]:
        r"""Add `n` classes, with the indices C to C + n − 1. The other classes keep their indices.

        New class vectors have the mean norm of the others. New biases are their mean; new classes have class weight 1
        and the full margin.

        Args:
            n: the number of new classes, at least 1.
            init: (n, d) directions of the new class vectors, such as mean features of the new classes; None for random
                ones. With several centres it is the first centre of each class; the others are random.
            optimizer: an optimiser that has the parameters of the head, of torch or of this library. Its state follows
                the rows of the weight; new rows start as those of a new parameter. Without it, create a new optimiser
                afterwards: the head has new parameters.

        Returns:
            The new index of each old class.

        Example:
            >>> head = AngularHead(8, 3)
            >>> head.grow(2, init=torch.randn(2, 8))
            tensor([0, 1, 2])
            >>> head.num_classes, head.weight.shape
            (5, torch.Size([5, 8]))
        """
        return _class_changes.grow(self, n, init, optimizer)

    def drop(
        self, classes: Sequence[int] | Int[Tensor, " dropped"], *, optimizer: torch.optim.Optimizer | None = None
    ) -> Int[Tensor, " classes"]:
        """Remove classes. The other classes keep their order, and their indices have no gaps.

        Args:
            classes: the indices of the classes to remove. At least two classes must remain.
            optimizer: as in `grow`.

        Returns:
            The new index of each old class, −1 for a removed class: ``y = head.drop([3])[y]`` relabels samples.

        Example:
            >>> AngularHead(8, 4).drop([1])
            tensor([ 0, -1,  1,  2])
        """
        return _class_changes.drop(self, classes, optimizer)

    def merge(self, a: int, b: int, *, optimizer: torch.optim.Optimizer | None = None) -> Int[Tensor, " classes"]:
        r"""Merge class `b` into class `a`, for example two labels of one person, and remove `b` as `drop` does.

        The new class vector has the mean direction of both (ŵ_a + ŵ_b, normalised) and their mean norm. With several
        centres, each centre of `a` is merged with the nearest free centre of `b`. The bias and the state of the
        optimiser are means. Class weight and margin are those of `a`.

        Args:
            a: a class.
            b: another class.
            optimizer: as in `grow`.

        Returns:
            The new index of each old class. `a` and `b` have the same.

        Example:
            >>> AngularHead(8, 4).merge(0, 2)
            tensor([0, 1, 0, 2])
        """
        return _class_changes.merge(self, a, b, optimizer)

    def label_angles(
        self,
        x: Float[Tensor, "samples dim"],
        y: Integer[Tensor, " samples"],
        *,
        max_angle: float = math.radians(75),
    ) -> LabelAngles:
        r"""Find the dominant centre of each class, and the samples that are far from it (Sub-center ArcFace).

        The dominant centre of a class is the one that is nearest to most of its samples. Samples at a larger angle than
        `max_angle` to it probably have a wrong label; Deng et al. (ECCV 2020) train a head with K = 3, remove them and
        train again with the dominant centres (`keep_dominant_centers`).

        Args:
            x: features.
            y: labels. Samples with the label `ignore_index` do not count.
            max_angle: the threshold in radians.

        Example:
            >>> head = AngularHead(2, 2, centers=2)
            >>> with torch.no_grad():
            ...     _ = head.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]))
            >>> x = torch.tensor([[3.0, 0.2], [2.0, 0.1], [-1.0, 0.1], [0.1, 2.0]])
            >>> result = head.label_angles(x, torch.tensor([0, 0, 0, 1]))
            >>> result.dominant, result.exceeds
            (tensor([0, 0]), tensor([False, False,  True, False]))
        """
        check_features(x, self.in_features)
        y = check_labels(y, x.shape[0])
        require_labels(y, self.num_classes, self.ignore_index)
        require(is_number(max_angle, 0, math.pi), "max_angle", "an angle in [0, pi]", max_angle)
        x = without_ignored(x, y, self.ignore_index)
        _numerics.require_finite_rows("x", x)
        return label_angles(self.weight, self.num_centers, x, y.masked_fill(y == self.ignore_index, -1), max_angle)

    def keep_dominant_centers(
        self, dominant: Integer[Tensor, " classes"], *, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Keep one centre per class, such as `label_angles(x, y).dominant`; the head then has `centers=1`.

        Args:
            dominant: (C,) the centre of each class to keep, in [0, K).
            optimizer: as in `grow`.
        """
        _class_changes.keep_centers(self, dominant, optimizer)

    # One call: loss per sample, state and noise ----------------------------------------------------------------------

    def sample_losses(
        self, terms: ClassTerms, score: Float[Tensor, " batch"], labels: Int[Tensor, " batch"]
    ) -> Float[Tensor, " batch"]:
        """Return the loss of each sample from the terms of all classes and the target scores."""
        weights = None if self.class_weights is None else self.class_weights.to(score.dtype)
        return sample_losses(terms, score, labels, self.num_classes, weights, self.label_smoothing)

    def _current_state(self) -> HeadState:
        return HeadState(*map(self._buffers.get, HeadState._fields))

    def _state_for_call(self, x: Tensor, y: Tensor, history: StateHistory) -> HeadState:
        """Return the current state, or the one that a call used before if activation checkpointing repeats it."""
        state = self._current_state()
        return history.state_for(x, y, state) if self.training else state

    def _margin_noise(self, x: Tensor) -> Tensor | None:
        """Return standard normal numbers (B,) for a random margin in training mode, else None."""
        if not self.training or not isinstance(self._margin, RandomAngle):
            return None
        dtype = _numerics.compute_dtype(x.dtype, self.weight.dtype)
        return self.class_storage.normal_noise(torch.empty(len(x), dtype=dtype, device=x.device))

    # g and ψ -------------------------------------------------------------------------------------------------------

    @property
    def responses(self) -> Responses:
        """g and ψ with the current values of their learned fields."""
        return Responses(self.angular, self.margin, self.gradient, self._changes_negatives)

    @property
    def _changes_negatives(self) -> bool:
        """Whether some of the other classes have a response that is not g."""
        return self.hard_negatives > 0 or self.interclass_filter is not None or self.curriculum is not None

    @property
    def _is_linear_in_x(self) -> bool:
        """Whether the scores of all other classes are linear functions of the feature."""
        return self.responses.are_products and self.radius == "feature"

    def _with_learned_fields(self, owner: str, entry: Any) -> Any:
        """Return g or ψ with its learned fields replaced by the parameters of the head."""
        names = self._learned_fields[owner]
        return replace(entry, **{name: getattr(self, f"{owner}_{name}") for name in names}) if names else entry

    # Scores of all classes as a matrix -------------------------------------------------------------------------------

    def _products(self, x: Tensor) -> Tensor:
        """Return the inner products (B, C) of features with class vectors, normalised if `normalize_weight`."""
        class_vectors = self.weight if self.uses_weight_norm else sphere.polar(self.weight)[1]
        dtype = _numerics.compute_dtype(x.dtype, self.weight.dtype)
        products = x.to(dtype) @ class_vectors.to(dtype).mT
        return products if self.num_centers == 1 else largest_per_class(products, self.num_centers)[0]

    def _polar_scores(self, x: Tensor, state: HeadState) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return feature norms (B,), magnitudes, which broadcast to (B, C), and cosines (B, C) of all classes.

        The last result is the centre of each class with this cosine, (B, C), or None with one centre.
        """
        dtype = _numerics.compute_dtype(x.dtype, self.weight.dtype)
        norms, directions = (t.to(dtype) for t in sphere.row_polar(x))
        w_norm, w_hat = (t.to(dtype) for t in sphere.polar(self.weight))
        cosines, winners, w_norm = directions @ w_hat.mT, None, w_norm.mT
        if self.num_centers > 1:
            ranked = cosines if self.normalize_weight else w_norm * self.angular(cosines)
            winners = largest_per_class(ranked, self.num_centers)[1]
            cosines, w_norm = rows_of_winners(cosines, winners), rows_of_winners(w_norm, winners)
        magnitudes = self.magnitude(w_norm, norms)
        if state.scale is not None:  # an adaptive radius, for which `magnitude` has the radius 1
            magnitudes = magnitudes * state.scale.to(dtype)
        return norms.squeeze(1), magnitudes, cosines, winners

    # Dtypes, devices and display -------------------------------------------------------------------------------------

    def _narrow(self, result: Tensor, x: Tensor) -> Tensor:
        return _numerics.narrow(result, torch.promote_types(x.dtype, self.weight.dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move and cast as torch does, and move the fixed tensors of g and ψ with the parameters."""
        super()._apply(fn, recurse)
        # Not the device of `weight`, which a parametrisation would compute.
        device = next(chain(self.parameters(), self.buffers())).device
        self._angular = fields_on_device(self._angular, device)
        self._margin = fields_on_device(self._margin, device)
        return self

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
