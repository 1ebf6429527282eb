r"""The loss of a head, in four steps: the terms of all classes, the target score, the loss per sample, penalties.

`batch_loss` has the steps in this order. They are functions of a head, whose options select what they compute:

1. `_class_terms`: one reduction over all other classes per sample, and the product with the target class vector. The
   arithmetic is in `fused_loss`.
2. `target_scores`: the target score with its margin and schedules. The arithmetic is in `target_score`.
3. `AngularHead.sample_losses`: the loss of each sample, a cross entropy unless a head overrides it.
4. `_with_penalties`: an energy of class vectors and penalties on feature norms.

Two objectives need the target cosines of the batch before the first step: CurricularFace changes the responses of
other classes (`batch_negatives`), and AdaCos adapts the radius (`_adaptively_scaled`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere.functions.margin import NormAdaptive, NormLinear
from hypersphere.heads._checks import without_ignored
from hypersphere.heads._negatives import Negatives
from hypersphere.heads._responses import Responses
from hypersphere.heads._state import HeadState, update_hardness, update_norm_statistics, update_scale
from hypersphere.heads.fused_loss import ClassInputs, ClassTerms, SampleWeights, ScoreRule, reduce_samples
from hypersphere.heads.target_score import NormalizedGradient, TargetMargin, score_of_cosine, score_of_product

if TYPE_CHECKING:
    from hypersphere.heads.head import AngularHead

__all__ = ["Batch", "BatchLoss", "TargetTerms", "batch_loss", "batch_negatives", "ramp_strength", "target_scores"]


class Batch(NamedTuple):
    """The samples of one call."""

    x: Tensor  # (B, d) features in the dtype of computation
    labels: Tensor  # (B,) classes in [0, C); any class for samples that do not count
    counted: Tensor  # (B,) whether a sample counts: its label is not `ignore_index`
    noise: Tensor | None  # (B,) standard normal numbers for a random margin


class BatchLoss(NamedTuple):
    """The loss of a batch."""

    loss: Tensor  # a scalar, or (B,) with reduction "none"
    state: HeadState  # the state that the loss used, with statistics that include the batch in training mode
    is_valid: Tensor  # a boolean scalar: all labels are classes, and all intermediate numbers and results are in range


def batch_loss(
    head: AngularHead, x: Tensor, y: Tensor, before: HeadState, noise: Tensor | None, *, exact: bool
) -> BatchLoss:
    """Return the loss of features `x` with labels `y`.

    Args:
        head: a head.
        x: (B, d) features.
        y: (B,) labels.
        before: the state before this batch.
        noise: (B,) standard normal numbers for a random margin.
        exact: whether the terms are exact, as `ScoreRule` says, and features of ignored samples, which may be NaN, are
            removed.
    """
    counted = y != head.ignore_index
    labels = y.clamp(0, head.num_classes - 1)  # a bad label is reported after the computation
    labels_valid = (counted <= (labels == y)).all()  # counted implies a class: `<=` is one operation, `~a | b` two
    x = without_ignored(x, y, head.ignore_index) if exact else x
    batch = Batch(x.to(_numerics.compute_dtype(x.dtype, head.weight.dtype)), labels, counted, noise)
    state, negatives, responses = before, None, head.responses
    if responses.changes_negatives:
        state, negatives = _negatives_and_state(head, responses, batch, before)
    if head.radius == "adaptive":
        state, batch = _adaptively_scaled(head, responses, batch, state, exact=exact)
    # Step 1: the terms of all classes.
    rule = _score_rule(head, responses, batch.x, state.steps, negatives, exact=exact)
    terms = _class_terms(head, batch, rule)
    samples = SampleWeights.of(counted, batch.x.dtype)
    state = _with_norm_statistics(head, responses, state, terms.feature_norm, samples)
    # Step 2: the target scores.
    target = TargetTerms(terms.target, terms.feature_norm, terms.target_norm, terms.target_direction)
    score = target_scores(head, responses, batch, state, target)
    if head.bias is not None:
        # `target_bias` is None if all classes share one bias.
        score = score + (head.bias.to(score.dtype) if terms.target_bias is None else terms.target_bias)
    # Step 3: the loss of each sample, and their mean or sum.
    losses = head.sample_losses(terms, score, labels)
    weights = None if head.class_weights is None else head.class_weights.to(losses.dtype)
    loss = reduce_samples(losses, labels, weights, samples, head.reduction)
    # Step 4: penalties.
    loss = _with_penalties(head, responses, loss, terms, samples, state.steps)
    is_finite = loss.detach().abs() < torch.inf
    is_valid = labels_valid & terms.in_range & (is_finite if loss.ndim == 0 else is_finite.all())
    return BatchLoss(loss, state, is_valid)


# Step 1: the terms of all classes ------------------------------------------------------------------------------------


def _score_rule(
    head: AngularHead,
    responses: Responses,
    x: Tensor,
    step: Tensor | None,
    negatives: Negatives | None,
    *,
    exact: bool,
    needs_energy: bool = True,
) -> ScoreRule:
    """Return how scores are computed in this call, and which terms of the classes the loss needs."""
    response, derivative, needs_matrix = None, None, False
    if not responses.are_products:
        # Evaluated now: `response` also runs in backward, when `steps` has advanced.
        strength = ramp_strength(head, step, x)
        response, derivative = partial(responses.others, strength=strength), responses.others_derivative()
        needs_matrix = responses.needs_autograd()
    is_plain = response is None and responses.margin is None
    needs_norm = head.norm_weight > 0 or isinstance(responses.margin, (NormAdaptive, NormLinear))
    return ScoreRule(
        unit_class_vectors=head.normalize_weight,
        # Features are rescaled to an adaptive radius before the terms are computed.
        radius=None if isinstance(head.radius, str) else float(head.radius),
        response=response,
        derivative=derivative,
        detached=head.gradient == "detached",
        # The fused energy needs unit class vectors.
        needs_matrix=needs_matrix or (head.energy_weight > 0 and not head.normalize_weight),
        exact=exact,
        reduction=head.class_reduction,
        shared_bias=head.shares_bias,
        needs_feature_norm=needs_norm or (head.radius == "feature" and not is_plain),
        needs_target_norm=not head.normalize_weight and not is_plain,
        needs_target_direction=head.gradient == "normalized",
        needs_energy=needs_energy and head.energy_weight > 0 and _energy_has_started(head, step),
        targets_present=True,
        centers=head.num_centers,
        negatives=negatives,
    )


def _class_terms(head: AngularHead, batch: Batch, rule: ScoreRule) -> ClassTerms:
    """Return the reductions over all other classes, and the products with the target class vectors."""
    x = batch.x
    # Label smoothing needs Σ_j v_j·f_j, with v = 1 if there are no class weights.
    smoothing_weights = None
    if head.label_smoothing:
        weights = head.class_weights
        smoothing_weights = x.new_ones(head.num_classes) if weights is None else weights.to(x.dtype)
    inputs = ClassInputs(
        x=x,
        w=_numerics.widen_parameter(head.weight).to(x.dtype),
        labels=batch.labels,
        bias=None if head.bias is None else head.bias.to(x.dtype),
        class_weights=smoothing_weights,
        counted=batch.counted,
    )
    return head.class_storage.terms(inputs, rule)


def _energy_has_started(head: AngularHead, step: Tensor | None) -> bool:
    """Return False if the energy need not be computed yet. Where reading the step costs time, it is computed."""
    if step is None or head.energy_start == 0:
        return True
    readable = _numerics.values_readable(step) and _numerics.all_on_cpu(step)
    return not readable or int(step) >= head.energy_start


def _with_norm_statistics(
    head: AngularHead, responses: Responses, state: HeadState, norms: Tensor | None, samples: SampleWeights
) -> HeadState:
    """Return the state with statistics of feature norms that include this batch, in training mode."""
    if state.norm_mean is None or state.norm_std is None or norms is None:
        return state
    if not head.training or not _numerics.can_update_state(norms):
        return state
    assert isinstance(responses.margin, NormAdaptive)
    momentum = responses.margin.momentum
    mean, std = update_norm_statistics(state.norm_mean, state.norm_std, norms.detach(), samples, momentum)
    return state._replace(norm_mean=mean, norm_std=std)


# Step 2: the target scores -------------------------------------------------------------------------------------------


class TargetTerms(NamedTuple):
    """What the target scores are computed from."""

    z: Tensor  # (B,) z_y of `fused_loss`: the products h·cos θ if all scores are products, else the cosines
    x_norm: Tensor | None  # (B,) ‖x‖, or None if the score does not depend on it
    w_norm: Tensor | None  # (B,) ‖w_y‖, or None if the score does not depend on it
    w_hat: Tensor | None  # (B, d) ŵ_y without gradient, for the normalized gradient


def target_scores(
    head: AngularHead, responses: Responses, batch: Batch, state: HeadState, target: TargetTerms
) -> Tensor:
    """Return the target scores h·ψ(θ), (B,).

    Args:
        head: a head.
        responses: its g and ψ.
        batch: the samples.
        state: the step of the schedules, and the statistics that the margin or the radius depends on.
        target: the products with the target class vectors, and the norms and directions that are needed.
    """
    z, x_norm, w_norm, w_hat = target
    are_products = responses.are_products
    if are_products and responses.margin is None:
        return z  # the scores without margin
    magnitude = _feature_magnitude(head, x_norm, state, z)
    magnitude = magnitude if head.normalize_weight else magnitude * w_norm
    margin = None
    if responses.margin is not None:
        margin = TargetMargin(
            psi=responses.margin_of_batch(x_norm, state, batch.noise),
            strength=_target_strength(head, state.steps, batch.labels, z),
            annealing_weight=_annealing_weight(head, state.steps, z),
        )
    if not are_products:
        return score_of_cosine(z, magnitude, responses, margin)
    assert margin is not None
    normalized = None
    if responses.gradient == "normalized":
        assert x_norm is not None
        assert w_hat is not None
        normalized = NormalizedGradient(batch.x, x_norm, w_hat)
    return score_of_product(z, magnitude, responses, margin, normalized)


def _feature_magnitude(head: AngularHead, x_norm: Tensor | None, state: HeadState, like: Tensor) -> Any:
    """Return the feature's part of h: ‖x‖ (B,), a number, or the scale of AdaCos."""
    if not isinstance(head.radius, str):
        return float(head.radius)
    return x_norm if state.scale is None else state.scale.to(like.dtype)


def ramp_strength(head: AngularHead, step: Tensor | None, like: Tensor) -> float | Tensor:
    """Return the strength of the margin, 1 without a ramp."""
    return 1.0 if head.ramp is None or step is None else head.ramp(step.to(like.dtype))


def _target_strength(head: AngularHead, step: Tensor | None, labels: Tensor, like: Tensor) -> float | Tensor:
    """Return the strength of the margin of each label, (B,) if classes have different margins."""
    strength = ramp_strength(head, step, like)
    return strength if head.class_margins is None else strength * head.class_margins.to(like.dtype)[labels]


def _annealing_weight(head: AngularHead, step: Tensor | None, like: Tensor) -> Tensor | None:
    """Return λ, the weight of the score without margin, None without annealing."""
    return None if head.annealing is None or step is None else head.annealing(step.to(like.dtype))


# Step 4: penalties ---------------------------------------------------------------------------------------------------


def _with_penalties(
    head: AngularHead,
    responses: Responses,
    loss: Tensor,
    terms: ClassTerms,
    samples: SampleWeights,
    step: Tensor | None,
) -> Tensor:
    """Add the mean energy of the class vectors of the batch, and penalties on feature norms."""
    if terms.energy is not None:
        pairs = head.num_classes * head.num_centers - 1
        energy = terms.energy.to(loss.dtype) * (head.energy_weight / pairs) / samples.number
        loss = loss + (energy if step is None else energy * (step >= head.energy_start))
    if terms.feature_norm is None:
        return loss
    if head.norm_weight:
        deviations = (terms.feature_norm - head.norm_target).abs().masked_fill(samples.weights == 0, 0)
        loss = loss + head.norm_weight * deviations.sum() / samples.number
    if isinstance(responses.margin, NormLinear):
        penalties = responses.margin.norm_penalty(terms.feature_norm).masked_fill(samples.weights == 0, 0)
        loss = loss + penalties.sum() / samples.number
    return loss


# What needs the target cosines of the batch before the first step ----------------------------------------------------


def _negatives_and_state(
    head: AngularHead, responses: Responses, batch: Batch, before: HeadState
) -> tuple[HeadState, Negatives]:
    """Return the state with t including this batch, and the changes of other classes."""
    if before.t is None:
        return before, batch_negatives(head, responses, batch, before, None)
    with torch.no_grad():
        vectors = head.class_storage.target_vectors(head.weight, batch.labels, head.num_centers).to(batch.x.dtype)
        cosines = sphere.cosines(batch.x.detach().unsqueeze(1), vectors).squeeze(1).amax(1)
        state = before
        if head.training and _numerics.can_update_state(batch.x):
            t = update_hardness(before.t, cosines, batch.counted, float(head.curriculum or 0))
            state = before._replace(t=t)
    return state, batch_negatives(head, responses, batch, state, cosines)


def batch_negatives(
    head: AngularHead, responses: Responses, batch: Batch, state: HeadState, cosines: Tensor | None
) -> Negatives:
    """Return the changes of other classes, given the target cosines (B,) if there is a curriculum."""
    threshold, hardness = None, None
    if state.t is not None and cosines is not None:
        margin = responses.margin_of_batch(sphere.norm(batch.x.detach()), state, batch.noise)
        strength = _target_strength(head, state.steps, batch.labels, cosines)
        threshold = margin(cosines.detach(), responses.angular, strength).detach()
        hardness = state.t.to(cosines.dtype)
    return Negatives(
        angular=responses.angular,
        filter_cosine=head.interclass_filter,
        hard_count=head.hard_negatives,
        hard_margin=head.hard_margin,
        threshold=threshold,
        hardness=hardness,
    )


def _adaptively_scaled(
    head: AngularHead, responses: Responses, batch: Batch, before: HeadState, *, exact: bool
) -> tuple[HeadState, Batch]:
    """Return the state with the scale of AdaCos for this batch, and the batch with features rescaled to it."""
    assert before.scale is not None
    x, state, directions = batch.x, before, sphere.polar(batch.x)[1]
    if head.training and _numerics.can_update_state(x):
        with torch.no_grad():
            scale = before.scale.to(x.dtype)
            rule = _score_rule(head, responses, x, before.steps, None, exact=exact, needs_energy=False)
            terms = _class_terms(head, batch._replace(x=scale * directions.detach()), rule)
            cosines = terms.target / scale if responses.are_products else terms.target
            state = before._replace(scale=update_scale(before.scale, terms.others, cosines, batch.counted))
    assert state.scale is not None
    return state, batch._replace(x=state.scale.to(x.dtype) * directions)
