r"""The angular head: scores h(‖w‖, ‖x‖)·g(θ) with a margin ψ on the target class, and their cross entropy.

`AngularHead.forward` computes the loss in four steps, in the order of `_batch_loss`:

1. `_class_terms`: one reduction over all other classes per sample, and the product with the target class vector. The
   arithmetic is in `fused_loss`.
2. `_target_scores`: the target score with its margin and schedules. The arithmetic is in `target_score`.
3. `sample_losses`: the loss of each sample, a cross entropy. `BinaryHead` replaces this step.
4. `_with_penalties`: an energy of class vectors and penalties on feature norms.

`ShardedHead` replaces the storage of the classes, from which the first step gets its terms. Options and inputs are
checked in `_checks`, g and ψ are in `_score_functions`, and what a head remembers between calls is in `_state`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hypersphere import _numerics, sphere
from hypersphere._deprecation import deprecated_argument, deprecated_attribute
from hypersphere._validation import choose, is_number, require
from hypersphere.functions._entries import fields_on_device
from hypersphere.functions.angular import ANGULARS, Cosine
from hypersphere.functions.margin import MARGINS, Margin
from hypersphere.heads import _class_changes
from hypersphere.heads._centers import LabelAngles, label_angles
from hypersphere.heads._checks import (
    check_combinations,
    check_values,
    checked_class_weights,
    checked_margin_strengths,
    int64_labels,
    magnitude_of,
    require_features,
    require_finite_scores,
    require_labels,
    without_ignored,
)
from hypersphere.heads._class_storage import LocalClasses
from hypersphere.heads._score_functions import (
    CallableMargin,
    Negatives,
    ScoreFunctions,
    single_number_fields,
    straight_through,
)
from hypersphere.heads._state import (
    HeadState,
    StateHistory,
    StepSource,
    update_hardness,
    update_norm_statistics,
    update_scale,
)
from hypersphere.heads.fused_loss import LOG_SUM_EXP, ClassInputs, ClassReduction, ClassTerms, ScoreRule, score_matrix
from hypersphere.heads.schedules import Annealing, Ramp
from hypersphere.heads.target_score import TargetMargin, scaled_psi, with_normalized_gradient

__all__ = ["AngularHead"]


class Batch(NamedTuple):
    """The samples of one call."""

    x: Tensor  # (B, d) features in the dtype of computation
    labels: Tensor  # (B,) classes in [0, C); any class for samples that do not count
    counted: Tensor  # (B,) whether a sample counts: its label is not `ignore_index`
    noise: Tensor | None  # (B,) standard normal numbers for a random margin


class AngularHead(nn.Module):
    r"""A classifier whose scores are magnitudes times functions of angles (thesis, 2.4, 2.18, 2.20, 3.10 and 3.11).

        f_j = h(‖w_j‖, ‖x‖)·g(θ_j),   f_y = h(‖w_y‖, ‖x‖)·ψ(θ_y),   loss = mean cross entropy(f, y)

    Class vectors are the rows of `weight`; with K centres, rows jK to jK + K − 1 belong to class j. The loss is
    computed in blocks of classes (see `fused_loss`): the B×C products are saved for the backward pass up to 256 MB and
    computed again beyond that. This needs a g of the menu with fixed numbers, and unit class vectors if g is not the
    cosine. With a user's callable g, a learned k, a user's margin that changes other classes, or options for other
    classes (`hard_negatives`, `interclass_filter`, `curriculum`), all B×C scores are computed and differentiated by
    autograd, which saves several matrices of this size.

    A training step reads values on the host once, to check labels and features. With `energy_weight` > 0 and several
    centres or `normalize_weight=False`, each block of classes adds one host read. A step is computed twice if squares
    of a class vector or feature leave the range of the dtype, if a class vector is zero and `normalize_weight` is True,
    or if `energy_weight` > 0 and a class vector of the batch is closer than 7.8° (in float32) to another one. The
    second time it uses safe scaling and an exact energy.

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
    class_storage: LocalClasses = LocalClasses()
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
        if isinstance(self._margin, Margin) and self._margin.uses_norm_statistics:
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
        check_combinations(self, self.score_functions)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw class vectors uniformly over the sphere, with norms near 1; reset learned numbers and all counters."""
        self._reset_weight()
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

    def _reset_weight(self) -> None:
        nn.init.normal_(self.weight, std=self.in_features**-0.5)

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
        require_features(x, self.in_features)
        y = int64_labels(y, x.shape[0])
        before = self._state_for_call(x, y, self._loss_history)
        noise = self._margin_noise(x)
        with _numerics.autocast_disabled(x):
            # Compute first and check afterwards: all checks are combined into `is_valid`, the only value that the host
            # has to wait for. A batch that fails is examined and, if it is legal, computed again exactly. If values
            # cannot be read, no second pass is possible, so request the exact terms at once.
            exact = x.shape[0] == 0 or not _numerics.values_readable(x, y, self.weight)
            loss, state, is_valid = self._batch_loss(x, y, before, noise, exact=exact)
            if not exact and not bool(is_valid):
                require_labels(y, self.num_classes, self.ignore_index)
                counted_features = without_ignored(x, y, self.ignore_index)
                _numerics.require_finite_rows("x", counted_features)
                loss, state, _ = self._batch_loss(x, y, before, noise, exact=True)
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
        require_features(x, self.in_features)
        functions, state = self.score_functions, self._current_state()
        with _numerics.autocast_disabled(x):
            wide_x = self._widen(x)
            rule = ScoreRule(self.normalize_weight, centers=self.num_centers)
            # ‖x‖·cos θ is computed without dividing by ‖x‖, so that a zero feature has the gradient of a linear layer.
            if not self._is_linear(functions):
                rule = rule._replace(angular=functions.angular, radius=self._radius(state, wide_x))
            scores = score_matrix(wide_x, self._class_vectors(wide_x), rule, polar=sphere.row_polar).scores
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
        require_features(x, self.in_features)
        y = int64_labels(y, x.shape[0])
        require_labels(y, self.num_classes, self.ignore_index)
        x = without_ignored(x, y, self.ignore_index)
        functions, state = self.score_functions, self._state_for_call(x, y, self._logit_history)
        labels = y.clamp(0, self.num_classes - 1)  # ignored labels get any class; their rows do not count
        column, noise = labels.unsqueeze(1), self._margin_noise(x)
        with _numerics.autocast_disabled(x):
            batch = Batch(self._widen(x), labels, y != self.ignore_index, noise)
            negatives = None
            if functions.changes_negatives:
                negatives = self._negatives(functions, batch, state, self._target_cosines(batch, state))
            rule = self._score_rule(functions, batch.x, state.steps, negatives, exact=False)
            if not self._is_linear(functions):
                others = partial(functions.others, strength=self._strength(state.steps, batch.x))
                rule = rule._replace(angular=others, radius=self._radius(state, batch.x))
            w = self._class_vectors(batch.x)
            is_target = torch.zeros(len(x), self.num_classes, dtype=torch.bool, device=x.device)
            matrix = score_matrix(batch.x, w, rule, is_target.scatter(1, column, True), polar=sphere.row_polar)
            # Replace the target's entry by the score with the margin.
            z = (matrix.scores if functions.are_products else matrix.z).gather(1, column).squeeze(1)
            w_norm, w_hat = sphere.polar(w[matrix.target_rows(labels, self.num_centers)])
            score = self._target_scores(functions, batch, state, z, matrix.x_norm, w_norm.squeeze(1), w_hat.detach())
            logits = matrix.scores.scatter(1, column, score.unsqueeze(1))
            logits = logits if self.bias is None else logits + self.bias.to(logits.dtype)
            if matrix.is_left_out is not None:
                lowest = torch.finfo(torch.promote_types(x.dtype, self.weight.dtype)).min
                logits = logits.masked_fill(matrix.is_left_out, lowest)
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
        require_features(x, self.in_features)
        y = int64_labels(y, x.shape[0])
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

    # The loss, step by step ------------------------------------------------------------------------------------------

    def _batch_loss(
        self, x: Tensor, y: Tensor, before: HeadState, noise: Tensor | None, *, exact: bool
    ) -> tuple[Tensor, HeadState, Tensor]:
        """Return the loss of features `x` with labels `y`.

        Args:
            x: (B, d) features.
            y: (B,) labels.
            before: the state before this batch.
            noise: (B,) standard normal numbers for a random margin.
            exact: whether the terms are exact, as `ScoreRule` says, and features of ignored samples, which may be NaN,
                are removed.

        Returns:
            The loss, a scalar or (B,) with reduction "none"; the state that it used, with statistics that include the
            batch in training mode; and a boolean scalar: whether all labels are classes, and all intermediate numbers
            and results are in range.
        """
        counted = y != self.ignore_index
        labels = y.clamp(0, self.num_classes - 1)  # a bad label is reported after the computation
        labels_valid = (counted <= (labels == y)).all()  # counted implies a class: `<=` is one operation, `~a | b` two
        x = without_ignored(x, y, self.ignore_index) if exact else x
        batch, state = Batch(self._widen(x), labels, counted, noise), before
        functions, negatives = self.score_functions, None
        # Two objectives need the target cosines before the first step: CurricularFace changes the responses of other
        # classes, and AdaCos adapts the radius.
        if functions.changes_negatives:
            cosines = self._target_cosines(batch, state)
            state = self._with_hardness(batch, state, cosines)
            negatives = self._negatives(functions, batch, state, cosines)
        if self.radius == "adaptive":
            state, batch = self._adaptively_scaled(functions, batch, state, exact=exact)
        # Step 1: the terms of all classes.
        terms = self._class_terms(batch, self._score_rule(functions, batch.x, state.steps, negatives, exact=exact))
        sample_weights = counted.to(batch.x.dtype)
        count = sample_weights.sum().clamp_min(1)
        if state.norm_statistics is not None:
            state = self._with_norm_statistics(state, terms.feature_norm, sample_weights, count)
        # Step 2: the target scores.
        score = self._target_scores(
            functions,
            batch,
            state,
            z=terms.target,
            x_norm=terms.feature_norm,
            w_norm=terms.target_norm,
            w_hat=terms.target_direction,
        )
        if self.bias is not None:
            # `target_bias` is None if all classes share one bias.
            score = score + (self.bias.to(score.dtype) if terms.target_bias is None else terms.target_bias)
        # Step 3: the loss of each sample, and their mean or sum. Samples that do not count have loss 0.
        losses = self.sample_losses(terms, score, labels)
        loss = losses.masked_fill(~counted, 0) if self.reduction == "none" else torch.dot(losses, sample_weights)
        if self.reduction == "mean":
            total_weight = count
            if self.class_weights is not None:
                total_weight = torch.dot(self.class_weights.to(losses.dtype)[labels], sample_weights)
                total_weight = total_weight.masked_fill(total_weight == 0, 1)  # a mean over no samples is 0
            loss = loss / total_weight
        # Step 4: penalties.
        loss = self._with_penalties(loss, functions, terms, counted, count, state.steps)
        is_finite = loss.detach().abs() < torch.inf
        is_valid = labels_valid & terms.in_range & (is_finite if loss.ndim == 0 else is_finite.all())
        return loss, state, is_valid

    def _score_rule(
        self,
        functions: ScoreFunctions,
        x: Tensor,
        step: Tensor | None,
        negatives: Negatives | None,
        *,
        exact: bool,
        needs_energy: bool = True,
    ) -> ScoreRule:
        """Return how scores are computed in this call, and which terms of the classes the loss needs."""
        angular, derivative, needs_matrix = None, None, False
        if not functions.are_products:
            # Evaluated now: `angular` also runs in backward, when `steps` has advanced.
            strength = self._strength(step, x)
            angular, derivative = partial(functions.others, strength=strength), functions.others_derivative()
            needs_matrix = functions.needs_autograd()
        is_plain = angular is None and functions.margin is None
        return ScoreRule(
            normalize_weight=self.normalize_weight,
            # Features are rescaled to an adaptive radius before the terms are computed.
            radius=None if isinstance(self.radius, str) else float(self.radius),
            angular=angular,
            angular_derivative=derivative,
            detached=self.gradient == "detached",
            reduction=self.class_reduction,
            shared_bias=self.shares_bias,
            centers=self.num_centers,
            negatives=negatives,
            needs_feature_norm=self._uses_feature_norm or (self.radius == "feature" and not is_plain),
            needs_target_norm=not self.normalize_weight and not is_plain,
            needs_target_direction=self.gradient == "normalized",
            needs_energy=needs_energy and self.energy_weight > 0 and self._energy_has_started(step),
            targets_present=True,
            # The fused energy needs unit class vectors.
            needs_matrix=needs_matrix or (self.energy_weight > 0 and not self.normalize_weight),
            exact=exact,
        )

    @property
    def _uses_feature_norm(self) -> bool:
        """Whether the margin or a penalty depends on feature norms."""
        return self.norm_weight > 0 or (isinstance(self._margin, Margin) and self._margin.uses_feature_norm)

    def _energy_has_started(self, step: Tensor | None) -> bool:
        """Return False if the energy need not be computed yet.

        If reading the step would synchronise with the device, return True; the energy is then multiplied by 0.
        """
        if step is None or self.energy_start == 0:
            return True
        readable = _numerics.values_readable(step) and _numerics.all_on_cpu(step)
        return not readable or int(step) >= self.energy_start

    def _class_terms(self, batch: Batch, rule: ScoreRule) -> ClassTerms:
        """Return the reductions over all other classes, and the products with the target class vectors."""
        # Label smoothing needs Σ_j v_j·f_j, with v = 1 if there are no class weights.
        smoothing_weights, weights, x = None, self.class_weights, batch.x
        if self.label_smoothing:
            smoothing_weights = x.new_ones(self.num_classes) if weights is None else weights.to(x.dtype)
        inputs = ClassInputs(
            x=x,
            w=self._class_vectors(x),
            labels=batch.labels,
            bias=None if self.bias is None else self.bias.to(x.dtype),
            class_weights=smoothing_weights,
            counted=batch.counted,
        )
        return self.class_storage.terms(inputs, rule)

    def _class_vectors(self, x: Tensor) -> Tensor:
        """Return the weight in the dtype of `x`."""
        return _numerics.widen_parameter(self.weight).to(x.dtype)

    def _target_scores(
        self,
        functions: ScoreFunctions,
        batch: Batch,
        state: HeadState,
        z: Tensor,
        x_norm: Tensor | None,
        w_norm: Tensor | None,
        w_hat: Tensor | None,
    ) -> Tensor:
        """Return the target scores h·ψ(θ), (B,), or h·g(θ) without a margin.

        Args:
            functions: g and ψ.
            batch: the samples.
            state: the step of the schedules, and the statistics that the margin or the radius depends on.
            z: (B,) z_y of `fused_loss`: the products h·cos θ if all scores are products, else the cosines.
            x_norm: (B,) ‖x‖, or None if the score does not depend on it.
            w_norm: (B,) ‖w_y‖, or None if the score does not depend on it.
            w_hat: (B, d) ŵ_y without gradient, for the normalized gradient.
        """
        if functions.are_products and functions.margin is None:
            return z
        radius = self._radius(state, z)
        magnitude: Any = x_norm if radius is None else radius
        magnitude = magnitude if self.normalize_weight else magnitude * w_norm
        unmargined = z
        if not functions.are_products:
            response = functions.angular(z)
            unmargined = magnitude * (straight_through(z, response) if self.gradient == "detached" else response)
        if functions.margin is None:
            return unmargined
        psi = self._target_margin(functions, batch, state, x_norm)
        score = scaled_psi(z, magnitude, psi) if functions.are_products else magnitude * psi(z)
        if self.gradient == "normalized":
            assert x_norm is not None
            assert w_hat is not None
            score = with_normalized_gradient(score, z, psi, batch.x, x_norm, w_hat)
        if self.annealing is None or state.steps is None:
            return score
        # The mean of the scores without and with margin, of weights λ and 1.
        weight = self.annealing(state.steps.to(z.dtype))
        return (weight * unmargined + score) / (1 + weight)

    def _target_margin(
        self, functions: ScoreFunctions, batch: Batch, state: HeadState, x_norm: Tensor | None
    ) -> TargetMargin:
        """Return ψ for the targets of a batch."""
        assert functions.margin is not None
        margin = functions.margin.for_batch(x_norm, state.norm_statistics, batch.noise)
        strength = self._strength(state.steps, batch.x)
        if self.class_margins is not None:
            strength = strength * self.class_margins.to(batch.x.dtype)[batch.labels]
        return TargetMargin(margin, functions.angular, strength, self.gradient)

    def _strength(self, step: Tensor | None, like: Tensor) -> float | Tensor:
        """Return the strength of the margin at a step, 1 without a ramp."""
        return 1.0 if self.ramp is None or step is None else self.ramp(step.to(like.dtype))

    def sample_losses(
        self, terms: ClassTerms, score: Float[Tensor, " batch"], labels: Int[Tensor, " batch"]
    ) -> Float[Tensor, " batch"]:
        r"""Return the cross entropy of each sample, as `torch.nn.CrossEntropyLoss(reduction="none")` defines it.

        Without label smoothing this is ℓ = log(1 + exp(others − f_y)), times v_y for class weights v. With label
        smoothing ε it is (1−ε)·ℓ + ε/C·Σ_j v_j·(log Σ_i exp f_i − f_j).

        Args:
            terms: the reductions over the other classes.
            score: (B,) target scores f_y.
            labels: (B,) classes.
        """
        # ℓ = −log p_y. With a threshold of 50 `softplus` is exact to rounding: log(1 + e^50) − 50 is below 2e-22.
        losses = F.softplus(terms.others - score, threshold=50)
        weights = None if self.class_weights is None else self.class_weights.to(score.dtype)
        if weights is not None:
            losses = losses * weights[labels]
        if terms.weighted_sum is None:
            return losses
        target_weight, total_weight = (1.0, self.num_classes) if weights is None else (weights[labels], weights.sum())
        # Σ_j v_j·(log Σ_i exp f_i − f_j), with the target's summand taken apart.
        log_sum = torch.logaddexp(terms.others, score)
        spread = total_weight * log_sum - terms.weighted_sum - target_weight * score
        return (1 - self.label_smoothing) * losses + self.label_smoothing / self.num_classes * spread

    def _with_penalties(
        self,
        loss: Tensor,
        functions: ScoreFunctions,
        terms: ClassTerms,
        counted: Tensor,
        count: Tensor,
        step: Tensor | None,
    ) -> Tensor:
        """Add the mean energy of the class vectors of the batch, and penalties on feature norms."""
        if terms.energy is not None:
            pairs = self.num_classes * self.num_centers - 1
            energy = terms.energy.to(loss.dtype) * (self.energy_weight / pairs) / count
            loss = loss + (energy if step is None else energy * (step >= self.energy_start))
        if terms.feature_norm is None:
            return loss
        if self.norm_weight:
            deviations = (terms.feature_norm - self.norm_target).abs().masked_fill(~counted, 0)
            loss = loss + self.norm_weight * deviations.sum() / count
        penalties = None if functions.margin is None else functions.margin.norm_penalty(terms.feature_norm)
        return loss if penalties is None else loss + penalties.masked_fill(~counted, 0).sum() / count

    # What a call depends on apart from the batch ---------------------------------------------------------------------

    def _current_state(self) -> HeadState:
        return HeadState(*map(self._buffers.get, HeadState._fields))

    def _state_for_call(self, x: Tensor, y: Tensor, history: StateHistory) -> HeadState:
        """Return the current state, or the one that a call used before if activation checkpointing repeats it."""
        state = self._current_state()
        return history.state_for(x, y, state) if self.training else state

    def _margin_noise(self, x: Tensor) -> Tensor | None:
        """Return standard normal numbers (B,) for a random margin in training mode, else None."""
        if not self.training or not isinstance(self._margin, Margin) or not self._margin.uses_noise:
            return None
        dtype = _numerics.compute_dtype(x.dtype, self.weight.dtype)
        return self.class_storage.normal_noise(torch.empty(len(x), dtype=dtype, device=x.device))

    def _with_norm_statistics(
        self, state: HeadState, norms: Tensor | None, sample_weights: Tensor, count: Tensor
    ) -> HeadState:
        """Return the state with statistics of feature norms that include this batch, in training mode."""
        if state.norm_statistics is None or norms is None:
            return state
        if not self.training or not _numerics.can_update_state(norms):
            return state
        statistics = (*state.norm_statistics, norms.detach(), sample_weights, count)
        mean, std = update_norm_statistics(*statistics, self._margin.momentum)
        return state._replace(norm_mean=mean, norm_std=std)

    def _with_hardness(self, batch: Batch, state: HeadState, cosines: Tensor | None) -> HeadState:
        """Return the state with the t of a curriculum that includes this batch, in training mode."""
        if state.t is None or cosines is None or not self.training or not _numerics.can_update_state(batch.x):
            return state
        return state._replace(t=update_hardness(state.t, cosines, batch.counted, float(self.curriculum or 0)))

    def _negatives(
        self, functions: ScoreFunctions, batch: Batch, state: HeadState, cosines: Tensor | None
    ) -> Negatives:
        """Return the changes of other classes, given the target cosines (B,) if there is a curriculum."""
        threshold, hardness = None, None
        if state.t is not None and cosines is not None:
            psi = self._target_margin(functions, batch, state, sphere.norm(batch.x.detach()))
            threshold = psi.margin(cosines, psi.angular, psi.strength).detach()
            hardness = state.t.to(cosines.dtype)
        return Negatives(
            angular=functions.angular,
            filter_cosine=self.interclass_filter,
            hard_count=self.hard_negatives,
            hard_margin=self.hard_margin,
            threshold=threshold,
            hardness=hardness,
        )

    @torch.no_grad()
    def _target_cosines(self, batch: Batch, state: HeadState) -> Tensor | None:
        """Return the cosines (B,) with the nearest vector of each label, without gradient; None without curriculum."""
        if state.t is None:
            return None
        vectors = self.class_storage.target_vectors(self.weight, batch.labels, self.num_centers).to(batch.x.dtype)
        return sphere.cosines(batch.x.detach().unsqueeze(1), vectors).squeeze(1).amax(1)

    def _adaptively_scaled(
        self, functions: ScoreFunctions, batch: Batch, before: HeadState, *, exact: bool
    ) -> tuple[HeadState, Batch]:
        """Return the state with the scale of AdaCos for this batch, and the batch with features rescaled to it."""
        assert before.scale is not None
        x, scale, directions = batch.x, before.scale, sphere.polar(batch.x)[1]
        if self.training and _numerics.can_update_state(x):
            with torch.no_grad():
                s = scale.to(x.dtype)
                rule = self._score_rule(functions, x, before.steps, None, exact=exact, needs_energy=False)
                terms = self._class_terms(batch._replace(x=s * directions.detach()), rule)
                cosines = terms.target / s if functions.are_products else terms.target
                scale = update_scale(scale, terms.others, cosines, batch.counted)
        return before._replace(scale=scale), batch._replace(x=scale.to(x.dtype) * directions)

    # g, ψ and h ------------------------------------------------------------------------------------------------------

    @property
    def score_functions(self) -> ScoreFunctions:
        """g and ψ with the current values of their learned fields."""
        margin = self.margin
        if margin is not None and not isinstance(margin, Margin):
            margin = CallableMargin(margin)
        changes_negatives = self.hard_negatives > 0 or self.interclass_filter is not None or self.curriculum is not None
        return ScoreFunctions(self.angular, margin, changes_negatives)

    def _is_linear(self, functions: ScoreFunctions) -> bool:
        """Return True if the scores of all other classes are linear functions of the feature."""
        return functions.are_products and self.radius == "feature"

    def _radius(self, state: HeadState, like: Tensor) -> float | Tensor | None:
        """Return the norm to which features are rescaled, a number or the scale of AdaCos; None to keep ‖x‖."""
        if not isinstance(self.radius, str):
            return float(self.radius)
        return None if state.scale is None else state.scale.to(like.dtype)

    def _with_learned_fields(self, owner: str, entry: Any) -> Any:
        """Return g or ψ with its learned fields replaced by the parameters of the head."""
        names = self._learned_fields[owner]
        return replace(entry, **{name: getattr(self, f"{owner}_{name}") for name in names}) if names else entry

    # Dtypes, devices and display -------------------------------------------------------------------------------------

    def _widen(self, x: Tensor) -> Tensor:
        return x.to(_numerics.compute_dtype(x.dtype, self.weight.dtype))

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
