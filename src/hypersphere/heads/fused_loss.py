r"""The loss of a head from a few numbers per sample, computed in blocks of classes.

A margin changes only the score of the target class. So a loss needs one reduction over all other classes per sample,
and the product of the feature with its target class vector. `class_terms` computes these numbers, and
`AngularHead.sample_losses` turns them into a cross entropy. `class_terms` has two implementations of the same formulas:
`reference_terms`, through a B×C matrix and automatic differentiation, and a fused one with the derivatives below, which
is faster and needs less memory.

**Forward.** Write z_bj = x_b·ŵ_j (x_b·w_j if class vectors keep their norms), g for the angular function of the other
classes, f_bj = ρ_b·g(z_bj) + β_j for the scores and y for the label of sample b. If g is the cosine, g(z) = z, ρ = 1,
and features may be rescaled to a radius s, x ← s·x̂. With any other g, x ← x̂, so that z is a cosine, and ρ_b is s or
‖x_b‖. Then

    others_b = log Σ_{j≠y} exp f_bj,     weighted_sum_b = Σ_{j≠y} v_j·f_bj,     target_b = z_by.

**Backward.** Let G, S and H be the gradients of the loss with respect to these three. With

    P_bj = G_b·exp(f_bj − others_b) + S_b·v_j  (j ≠ y),   D_bj = P_bj·ρ_b·g′(z_bj)  (j ≠ y),   D_by = H_b

the gradients are

    ∂β_j = Σ_b P_bj,     ∂ρ_b = Σ_j P_bj·g(z_bj),     ∂x_b = Σ_j (D_bj/‖w_j‖)·w_j,
    ∂w_j = (Σ_b D_bj·x_b − a_j·ŵ_j)/‖w_j‖,            a_j = Σ_b D_bj·z_bj.

The last line is the projection to the tangent space of the sphere. The radial part a_j is a sum over the batch, not
over the d entries of w_j, and class vectors are never normalised as a tensor: products are divided by norms. The
gradient of rescaled features is projected in the same way, and the gradient of ‖x‖ is added along x̂.

**Energy** (SphereFace+). The energy of the class vectors of the batch, E = Σ_b Σ_{j≠y} φ(c_bj) with c_bj = ŵ_y·ŵ_j and
φ(c) = 1/(2 − 2c), needs the products of the vectors ŵ_y with the same class vectors. These vectors are stacked below
the features, so one matrix product per block gives both, and φ′(c) = 1/(2(1−c)²) are further rows of D.

**Centres.** A class may have K vectors, the rows jK to jK + K − 1 of w. Its product z_bj is the largest of theirs, and
D_bj belongs to the row that has it; the other K − 1 rows get zero. Everything else is unchanged.

**Memory.** Many classes are cut into blocks. A block of class vectors fits into the cache, where its norms, products,
exponentials and gradient are computed. All products are saved for the backward pass if there are at most 2²⁶ of them
(256 MB in float32). If there are more, backward computes them again, and memory beyond the weight and its gradient does
not grow with the number of classes. If there is only one block, the exponentials exp(f − others) and 1/(1−c) are saved
as well.

**Small problems.** With 1,000 classes, the overhead of each PyTorch operation is as important as its arithmetic. That
is why steps that do nothing for a single block (slices, masks, sums over blocks) are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere.functions._autograd import differentiable_gradients
from hypersphere.functions._pairwise import PairSum, pair_energy
from hypersphere.functions.kernel import PairPotential, Riesz
from hypersphere.heads._centers import gather_winners, largest_per_class, scatter_winners
from hypersphere.heads._score_functions import Negatives, straight_through

__all__ = [
    "LOG_SUM_EXP",
    "SOFTPLUS_SUM",
    "ClassInputs",
    "ClassReduction",
    "ClassTerms",
    "ScoreMatrix",
    "ScoreRule",
    "class_terms",
    "classes_per_block",
    "reference_terms",
    "safe_divisor",
    "score_matrix",
]

_WEIGHT_ENTRIES_PER_BLOCK = 2**20  # 4 MB of class vectors in float32, which stay in the cache
_PRODUCTS_PER_BLOCK = 2**22  # 16 MB of products in float32, for large batches of short features
# Up to 32 MB of class vectors and of products are one block: there, larger matrix products and fewer operations save
# more time than reading class vectors from the cache.
_WEIGHT_ENTRIES_OF_ONE_BLOCK = 2**23
_PRODUCTS_OF_ONE_BLOCK = 2**23
_SAVED_PRODUCTS = 2**26  # 256 MB in float32
_ENERGY = PairPotential(Riesz(2))


@dataclass(frozen=True)
class ClassReduction:
    """How the scores of the other classes are reduced to one number per sample.

    Attributes:
        within: reduces the scores of a block of classes, (B, n) → (B,). A score of −∞ contributes nothing.
        within_and_derivatives: also returns d(result)/d(scores), (B, n), for passes without automatic differentiation.
        across: reduces the results of several blocks, (B, blocks) → (B,).
        part_derivative: d(across)/d(result of one block), given that result and the final one; None if it is 1.
    """

    within: Callable[[Tensor], Tensor]
    within_and_derivatives: Callable[[Tensor], tuple[Tensor, Tensor]]
    across: Callable[[Tensor], Tensor]
    part_derivative: Callable[[Tensor, Tensor], Tensor] | None = None


def _log_sum_exp_and_derivatives(scores: Tensor) -> tuple[Tensor, Tensor]:
    # A single class may be the excluded target, whose score of −∞ has no softmax.
    if scores.shape[1] == 1:
        return scores.squeeze(1).clone(), torch.ones_like(scores)
    # The fused softmax kernel is faster than `logsumexp` followed by `exp`, which is slow where its results underflow.
    # Its largest entry is exp(peak − result), which is between 1/n and 1, so the logarithm is well conditioned.
    derivatives = torch.softmax(scores, 1)
    return scores.amax(1).sub_(derivatives.amax(1).log_()), derivatives


LOG_SUM_EXP = ClassReduction(
    within=lambda scores: torch.logsumexp(scores, 1),
    within_and_derivatives=_log_sum_exp_and_derivatives,
    across=lambda parts: torch.logsumexp(parts, 1),
    part_derivative=lambda part, total: (part - total).exp_(),
)
SOFTPLUS_SUM = ClassReduction(
    within=lambda scores: F.softplus(scores, threshold=50).sum(1),
    within_and_derivatives=lambda scores: (F.softplus(scores, threshold=50).sum(1), scores.sigmoid()),
    across=lambda parts: parts.sum(1),
)


class ScoreRule(NamedTuple):
    """How products become scores of the other classes, and which terms the loss needs.

    Attributes:
        normalize_weight: whether products are divided by ‖w‖.
        radius: s, the norm to which features are rescaled; None to keep ‖x‖.
        angular: g, a function of the cosine; None if scores are the products themselves.
        angular_derivative: dg/dc as a function of the cosine and of g; None to differentiate g automatically.
        detached: straight-through: g in the forward pass, the identity in the backward pass.
        reduction: the reduction over the other classes.
        shared_bias: whether all classes share one bias.
        centers: K, the number of class vectors per class.
        negatives: changes the responses of some of the other classes; None for none. Needs `angular`.
        needs_feature_norm: whether ‖x‖ is needed.
        needs_target_norm: whether ‖w_y‖ is needed.
        needs_target_direction: whether ŵ_y is needed, without gradient.
        needs_energy: whether the energy of the class vectors of the batch is needed. The fused pass computes it only if
            `targets_present`, because it takes the class vectors of the labels from `w`.
        targets_present: whether every label is one of the classes. False if some labels may be −1.
        needs_matrix: whether the terms must be computed through a B×C matrix of scores; see `class_terms`.
        exact: whether to compute the terms again by `reference_terms`, which scales vectors safely, if `in_range` is
            False. This reads `in_range` on the host.
    """

    # The formula of the scores
    normalize_weight: bool
    radius: float | Tensor | None = None
    angular: Callable[[Tensor], Tensor] | None = None
    angular_derivative: Callable[[Tensor, Tensor], Tensor] | None = None
    detached: bool = False
    reduction: ClassReduction = LOG_SUM_EXP
    shared_bias: bool = False
    centers: int = 1
    negatives: Negatives | None = None
    # The terms that are needed in addition
    needs_feature_norm: bool = False
    needs_target_norm: bool = False
    needs_target_direction: bool = False
    needs_energy: bool = False
    # How the terms are computed
    targets_present: bool = False
    needs_matrix: bool = False
    exact: bool = False

    @property
    def rescaled_norm(self) -> float | Tensor | None:
        """The norm to which features are rescaled before they are multiplied with class vectors; None to keep them."""
        return self.radius if self.angular is None else 1.0

    def scores(self, z: Tensor, feature_norm: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return f = ρ·g(z) + β. The result is `z` itself if there is neither a g nor a bias."""
        scores = z if self.angular is None else self.scaled(z, self.angular(z), feature_norm)
        return scores if bias is None else scores + bias

    def scaled(self, z: Tensor, response: Tensor, feature_norm: Tensor | None) -> Tensor:
        """Return ρ·g(z), given the response g(z)."""
        return self.rho(feature_norm) * (straight_through(z, response) if self.detached else response)

    def rho(self, feature_norm: Tensor | None) -> Tensor | float:
        """Return ρ, the factor of g: s, or ‖x‖ as a column (B, 1)."""
        if self.radius is not None:
            return self.radius
        assert feature_norm is not None
        return feature_norm.unsqueeze(1)


class ClassInputs(NamedTuple):
    """What the terms of a loss are computed from.

    Attributes:
        x: (B, d) features.
        w: (C, d) class vectors, with the dtype of `x`; (C·K, d) with K centres per class.
        labels: (B,) int64 in [0, C), or −1 for a sample whose target is not among these classes.
        bias: (C,) or, if shared, (1,).
        class_weights: (C,) factors v of the weighted sum of scores; None if it is not needed.
        counted: (B,) booleans, the samples whose energy counts; None for all.
        target_vectors: (B, d) class vectors of the labels; None to take them from `w`.
    """

    x: Tensor
    w: Tensor
    labels: Tensor
    bias: Tensor | None = None
    class_weights: Tensor | None = None
    counted: Tensor | None = None
    target_vectors: Tensor | None = None

    def energy(self, target_row: Tensor | None) -> Tensor:
        """Return the energy of the class vectors of the batch, exact for class vectors that nearly coincide."""
        rows = self.labels if target_row is None else target_row
        return pair_energy(PairSum(self.w, _ENERGY, labels=rows, rows=self.target_vectors, counted=self.counted))


class ClassTerms(NamedTuple):
    """What a loss needs from all classes; one number per sample unless noted otherwise. Unneeded terms are None.

    Attributes:
        others: the reduction over the scores of the other classes.
        weighted_sum: Σ_{j≠y} v_j·f_j, for label smoothing.
        target: the product of the rescaled feature with the class vector of the label, 0 if the label is −1.
        feature_norm: ‖x‖.
        target_norm: ‖w_y‖.
        energy: a scalar, the energy summed over counted samples and over the other classes.
        in_range: a boolean scalar, False if a feature is not finite or the fused pass lost precision: a class vector is
            zero, squares of a class vector or feature overflow or underflow, or two class vectors nearly coincide while
            an energy is needed.
        target_row: the row of `w` that `target` belongs to, −1 if the label is; None with one vector per class, where
            it is the label.
        target_bias: β_y, unless all classes share one bias.
        target_direction: (B, d) ŵ_y, without gradient.
    """

    others: Tensor
    weighted_sum: Tensor | None
    target: Tensor
    feature_norm: Tensor | None
    target_norm: Tensor | None
    energy: Tensor | None
    in_range: Tensor
    target_row: Tensor | None = None
    target_bias: Tensor | None = None
    target_direction: Tensor | None = None


def class_terms(inputs: ClassInputs, rule: ScoreRule) -> ClassTerms:
    """Return the terms that `rule` asks for, by the fused pass where possible.

    `reference_terms` computes them through a B×C matrix of scores in these cases:

    * the rule needs it (`needs_matrix`): g may have learned parameters, or an energy is needed and class vectors keep
      their norms;
    * `negatives` changes the responses of some of the other classes;
    * scores are ‖w‖·g(cos θ), of which the fused pass has no closed-form derivative;
    * the batch is empty;
    * in a transform of `torch.func`, in forward mode or in a traced or compiled graph;
    * the rule is `exact` and `in_range` is False.

    Autocast must be disabled, as `AngularHead.forward` does.
    """
    has_product_form = rule.angular is None or rule.normalize_weight
    is_fusable = has_product_form and not rule.needs_matrix and rule.negatives is None and inputs.x.shape[0] > 0
    if not is_fusable or not _numerics.custom_backward_allowed(inputs.x, inputs.w, inputs.labels):
        return reference_terms(inputs, rule)
    # The fused energy is inaccurate for class vectors that nearly coincide. It needs the target class vectors before
    # the products, so it is not used with several centres.
    fuse_energy = rule.needs_energy and rule.targets_present and not rule.exact and rule.centers == 1
    fused_rule = rule if fuse_energy == rule.needs_energy else rule._replace(needs_energy=fuse_energy)
    terms = ClassTerms(*_FusedTerms.apply(fused_rule, *inputs[:-1]))  # `target_vectors` is for the exact energy
    if rule.exact and not bool(terms.in_range):
        return reference_terms(inputs, rule)
    if rule.needs_energy and not fuse_energy:
        terms = terms._replace(energy=inputs.energy(terms.target_row))
    return _with_target_terms(terms, inputs, rule)


class ScoreMatrix(NamedTuple):
    """The scores of all classes without margin and bias, and the numbers that they were computed from."""

    scores: Tensor  # (B, C)
    z: Tensor  # (B, C) products or cosines, with several centres the ones that won
    x_norm: Tensor | None  # (B,) ‖x‖, if the rule needs it or features are rescaled
    w_norm: Tensor | None  # (C·K, 1) ‖w‖, if class vectors are normalised or the rule needs it
    winners: Tensor | None  # (B, C) the winning centre of each class; None with one centre
    is_left_out: Tensor | None  # (B, C) the classes that are left out of the loss, or None

    def target_rows(self, labels: Tensor, centers: int) -> Tensor:
        """Return the row of `w` that the product with the target belongs to, (B,), for labels in [0, C)."""
        if self.winners is None:
            return labels
        return centers * labels + self.winners.gather(1, labels.unsqueeze(1)).squeeze(1)


def score_matrix(
    x: Tensor,
    w: Tensor,
    rule: ScoreRule,
    is_target: Tensor | None = None,
    *,
    polar: Callable[[Tensor], tuple[Tensor, Tensor]] = sphere.polar,
) -> ScoreMatrix:
    """Return the scores of all classes in ordinary, differentiable operations.

    Args:
        x: (B, d) features.
        w: (C·K, d) class vectors.
        rule: the formula of the scores.
        is_target: (B, C) booleans, needed for `rule.negatives`.
        polar: the function that splits features into norms and directions.
    """
    x_norm, w_norm, winners, is_left_out = None, None, None, None
    # The rescaled features: x̂ for a function of the cosine, s·x̂ for products.
    if rule.rescaled_norm is not None or rule.needs_feature_norm:
        norms, directions = polar(x)
        x_norm = norms.squeeze(1)
        if rule.angular is not None:
            x = directions
        elif rule.radius is not None:
            x = rule.radius * directions
    # Cosines and products with unit class vectors need ŵ.
    needs_direction = rule.normalize_weight or rule.angular is not None
    if needs_direction or rule.needs_target_norm:
        w_norm, w_hat = sphere.polar(w)
        w = w_hat if needs_direction else w
    z = x @ w.mT
    # A function of the cosine with kept norms: f = ρ·g(z)·‖w‖.
    keeps_norms = rule.angular is not None and not rule.normalize_weight
    w_norm_of_class = w_norm.mT if keeps_norms and w_norm is not None else None
    if rule.centers > 1:
        # If norms are kept, the centre with the largest score wins, else the nearest one.
        ranked = z if w_norm_of_class is None else rule.scores(z, x_norm, None) * w_norm_of_class
        winners = largest_per_class(ranked, rule.centers)[1]
        z = gather_winners(z, winners)
        w_norm_of_class = None if w_norm_of_class is None else gather_winners(w_norm_of_class, winners)
    if rule.negatives is None or rule.angular is None:
        scores = rule.scores(z, x_norm, None)
    else:
        assert is_target is not None
        response, is_left_out = rule.negatives(z, rule.angular(z), is_target)
        scores = rule.scaled(z, response, x_norm)
    scores = scores if w_norm_of_class is None else scores * w_norm_of_class
    return ScoreMatrix(scores, z, x_norm, w_norm, winners, is_left_out)


def reference_terms(inputs: ClassInputs, rule: ScoreRule) -> ClassTerms:
    """Return the terms through a B×C matrix of scores and automatic differentiation."""
    labels = inputs.labels.clamp_min(0)
    column, is_absent = labels.unsqueeze(1), (inputs.labels < 0).unsqueeze(1)
    shape = (inputs.x.shape[0], inputs.w.shape[0] // rule.centers)
    is_target = torch.zeros(shape, dtype=torch.bool, device=inputs.x.device).scatter(1, column, ~is_absent)
    matrix = score_matrix(inputs.x, inputs.w, rule, is_target)
    # target = z_y, 0 if the target is not among these classes. It is a sum and not a `gather`: inductor on CPUs with
    # several threads computes a wrong gradient for a gather whose backward pass it fuses with the sum over the batch of
    # a bias.
    target = matrix.z.masked_fill(~is_target, 0).sum(1)
    scores = matrix.scores if inputs.bias is None else matrix.scores + inputs.bias
    weighted_sum = None
    if inputs.class_weights is not None:  # Σ_{j≠y} v_j·f_j
        weighted_sum = (scores * inputs.class_weights).masked_fill(is_target, 0).sum(1)
    if matrix.is_left_out is not None:
        # Not −∞: if all other classes are left out, the derivative of logsumexp would be undefined.
        scores = scores.masked_fill(matrix.is_left_out, torch.finfo(scores.dtype).min)
    rows = matrix.target_rows(labels, rule.centers)
    target_row = None if rule.centers == 1 else rows.masked_fill(is_absent.squeeze(1), -1)
    target_norm = None
    if rule.needs_target_norm:
        assert matrix.w_norm is not None
        target_norm = matrix.w_norm[rows].masked_fill(is_absent, 0).squeeze(1)
    terms = ClassTerms(
        others=rule.reduction.within(scores.masked_fill(is_target, float("-inf"))),
        weighted_sum=weighted_sum,
        target=target,
        feature_norm=matrix.x_norm if rule.needs_feature_norm else None,
        target_norm=target_norm,
        energy=inputs.energy(target_row) if rule.needs_energy else None,
        in_range=torch.isfinite(inputs.x.detach()).all(),
        target_row=target_row,
    )
    return _with_target_terms(terms, inputs, rule)


def _with_target_terms(terms: ClassTerms, inputs: ClassInputs, rule: ScoreRule) -> ClassTerms:
    """Add the bias and the direction of the target class, which need no pass over all classes."""
    labels = inputs.labels
    if inputs.bias is not None and not rule.shared_bias:
        terms = terms._replace(target_bias=inputs.bias[labels.clamp_min(0)].masked_fill(labels < 0, 0))
    if rule.needs_target_direction:
        rows = labels if terms.target_row is None else terms.target_row
        direction = sphere.polar(inputs.w.detach()[rows.clamp_min(0)])[1]
        terms = terms._replace(target_direction=direction.masked_fill((labels < 0).unsqueeze(1), 0))
    return terms


# The fused pass ------------------------------------------------------------------------------------------------------


class _Block(NamedTuple):
    """A range of classes, and the samples whose target is among them."""

    classes: slice | None  # None for all classes
    column: Tensor  # (B, 1) the column of the target in the block; any column for samples whose target is elsewhere
    is_inside: Tensor | None  # (B, 1) whether the target of a sample is in the block; None if all are
    rows: slice | None  # the rows of `w` of these classes; None for all

    def select(self, values: Tensor) -> Tensor:
        """Return a view of the entries of `values` that belong to the classes of this block."""
        return values if self.classes is None else values[self.classes]

    def select_rows(self, values: Tensor) -> Tensor:
        """Return a view of the entries of `values`, one per row of `w`, that belong to this block."""
        return values if self.rows is None else values[self.rows]

    def at_targets(self, scores: Tensor) -> Tensor:
        """Return the entries of `scores` at the targets, (B, 1); arbitrary for samples whose target is elsewhere."""
        return scores.gather(1, self.column)

    def where_inside(self, values: Tensor, otherwise: Tensor | float) -> Tensor:
        """Return `values` (B, 1) for samples whose target is in the block, and `otherwise` for the others."""
        return values if self.is_inside is None else torch.where(self.is_inside, values, otherwise)

    def fill_targets_(self, scores: Tensor, values: Tensor | float) -> None:
        """Overwrite the entries at the targets of this block with `values`, a number or (B, 1)."""
        source: Any = values  # `scatter_` has an overload for tensors and one for numbers, but none for both
        if self.is_inside is not None:
            # Samples whose target is elsewhere get back the entry that they have.
            source = torch.where(self.is_inside, values, self.at_targets(scores))
        scores.scatter_(1, self.column, source)

    def reduce_others(self, scores: Tensor, targets: Tensor, reduction: ClassReduction) -> tuple[Tensor, Tensor]:
        """Return the reduction over all classes of the block except the targets, and its derivatives, 0 at the targets.

        If the only class of a block is the target, the result is −∞ and the derivative is 1. This derivative has no
        effect, because the factor that multiplies it is 0: `part_derivative` of −∞, over blocks or over processes.
        """
        # Scores may be the saved products themselves, so the targets are excluded in place and restored.
        self.fill_targets_(scores, float("-inf"))
        result, derivatives = reduction.within_and_derivatives(scores)
        scores.scatter_(1, self.column, targets)
        return result, derivatives


def classes_per_block(num_classes: int, dim: int, left_rows: int, centers: int = 1) -> int:
    """Return how many classes are computed together, all of them if they are few.

    Args:
        num_classes: C.
        dim: d, the dimension of the features.
        left_rows: rows of the left factor of the products: the batch size, or twice that with an energy.
        centers: K, the number of class vectors per class.
    """
    rows = num_classes * centers
    if rows * dim <= _WEIGHT_ENTRIES_OF_ONE_BLOCK and left_rows * rows <= _PRODUCTS_OF_ONE_BLOCK:
        return num_classes
    return max(1, min(_WEIGHT_ENTRIES_PER_BLOCK // dim, _PRODUCTS_PER_BLOCK // left_rows) // centers)


def _blocks(labels: Tensor, w: Tensor, left_rows: int, rule: ScoreRule) -> list[_Block]:
    """Cut the classes into blocks whose class vectors and products fit into the cache."""
    num_classes = w.shape[0] // rule.centers
    size = classes_per_block(num_classes, w.shape[1], left_rows, rule.centers)
    column = labels.unsqueeze(1)
    if size >= num_classes:
        if rule.targets_present:
            return [_Block(None, column, None, None)]
        return [_Block(None, column.clamp_min(0), column >= 0, None)]
    blocks = []
    for start in range(0, num_classes, size):
        stop = min(start + size, num_classes)
        local = column - start  # outside of [0, stop − start) if the target is in another block
        inside = local.clamp(0, stop - start - 1)
        rows = slice(start * rule.centers, stop * rule.centers)
        blocks.append(_Block(slice(start, stop), inside, inside == local, rows))
    return blocks


class _LeftFactor(NamedTuple):
    """The left factor of all products, and the norms that were used to compute it."""

    matrix: Tensor  # features, rescaled if the rule says so, and below them the vectors ŵ_y of the energy
    feature_norm: Tensor | None  # (B,) ‖x‖
    inverse_norm: Tensor | None  # (B, 1) 1/‖x‖, and 0 for a zero feature, which has no direction
    rescaling: Tensor | None  # (B, 1) s/‖x‖, the factor of rescaled features; None if they are not rescaled
    target_vector_norms: Tensor | None  # (B, 1) ‖w_y‖ of the energy's vectors


def _left_factor(x: Tensor, w: Tensor, labels: Tensor, rule: ScoreRule) -> _LeftFactor:
    """Return the matrix that is multiplied with class vectors, and the norms of its rows."""
    feature_norm, inverse_norm, rescaling, target_vector_norms = None, None, None, None
    if rule.needs_feature_norm or rule.rescaled_norm is not None:
        norms = torch.linalg.vector_norm(x, dim=1, keepdim=True)
        feature_norm, inverse_norm = norms.squeeze(1), safe_divisor(norms).reciprocal_()
        if rule.rescaled_norm is not None:
            rescaling = inverse_norm if rule.rescaled_norm == 1 else inverse_norm * rule.rescaled_norm
            x = x * rescaling
    if rule.needs_energy:
        assert rule.targets_present  # a label of −1 has no class vector
        w_target = w.index_select(0, labels)  # faster than indexing, because it copies contiguous rows
        target_vector_norms = torch.linalg.vector_norm(w_target, dim=1, keepdim=True)
        x = torch.cat([x, w_target.div_(target_vector_norms)])
    return _LeftFactor(
        matrix=x,
        feature_norm=feature_norm,
        inverse_norm=inverse_norm,
        rescaling=rescaling,
        target_vector_norms=target_vector_norms,
    )


def safe_divisor(norms: Tensor) -> Tensor:
    """Return the norms with ∞ in place of 0, so that a quotient by a zero norm is 0."""
    return torch.threshold(norms, 0.0, torch.inf)  # one operation, and it leaves a NaN unchanged


def _products(left: Tensor, w: Tensor, norms: Tensor | None, centers: int) -> tuple[Tensor, Tensor | None]:
    """Return the products of the left factor with class vectors, divided by ‖w‖ if norms are given.

    With several centres these are the largest products of each class, and the second result says which centre has it.
    """
    z = left @ w.mT
    z = z if norms is None else z.div_(norms)
    return (z, None) if centers == 1 else largest_per_class(z, centers)


def _block_bias(bias: Tensor | None, rule: ScoreRule, block: _Block) -> Tensor | None:
    return bias if bias is None or rule.shared_bias else block.select(bias)


def _half_squared_distances(cosines: Tensor, block: _Block) -> Tensor:
    """Return 1 − c for the energy. The entry of a class with itself is set to ∞, so its energy is 0."""
    half_squares = 1 - cosines
    block.fill_targets_(half_squares, float("inf"))
    return half_squares


def _in_range(x: Tensor, norms: Tensor | None, w_target: Tensor | None, half_squares: list[Tensor]) -> Tensor:
    """Return a boolean scalar: False if squares left the range of the dtype or two class vectors nearly coincide.

    Args:
        x: features.
        norms: norms of all class vectors, if products are divided by them.
        w_target: the class vectors of the labels, if their norms are needed.
        half_squares: the smallest 1 − c of each block, half the squared distance of two class vectors.
    """
    # A zero vector is handled exactly, a vector whose squares underflow is not, and both have norm 0. Largest entries
    # distinguish them. (`vector_norm` of order ∞ computes the same, but is not vectorised on CPUs.)
    peaks = x.abs().amax(1)
    if w_target is not None:
        peaks = torch.cat([peaks, w_target.abs().amax(1)])
    peaks = torch.threshold_(peaks, 0.0, 1.0)  # a zero vector is in range
    lengths = peaks if norms is None else torch.cat([peaks, norms])
    in_range = (lengths.clamp(*_numerics.safe_norm_bounds(x.dtype)) == lengths).all()  # False for NaN
    if half_squares:
        closest = half_squares[0] if len(half_squares) == 1 else torch.stack(half_squares).amin()
        in_range = in_range & (closest > _numerics.close_pair_threshold(x.dtype, 2.0) / 2)
    return in_range


class _Saved(NamedTuple):
    """The tensors saved for the backward pass."""

    inputs: ClassInputs
    left: _LeftFactor
    others: Tensor
    norms: Tensor | None  # (C,) ‖w_j‖
    w_target: Tensor | None
    target_norm: Tensor | None
    target_row: Tensor | None  # (B,) with several centres
    derivatives: Tensor | None  # ∂others/∂f, if there is one block
    repulsion: Tensor | None  # 1/(1 − c), if there is one block
    products: tuple[Tensor, ...]  # one matrix per block, or none; with several centres followed by the winners

    def flattened(self) -> tuple[Tensor | None, ...]:
        """Return all tensors, in the form that `save_for_backward` accepts."""
        inputs, left, *single, products = self
        return (*inputs, *left, *single, *products)

    @classmethod
    def unflatten(cls, tensors: tuple[Any, ...]) -> _Saved:
        """Invert `flattened`."""
        remaining = iter(tensors)
        inputs = ClassInputs._make(islice(remaining, len(ClassInputs._fields)))
        left = _LeftFactor._make(islice(remaining, len(_LeftFactor._fields)))
        single = islice(remaining, len(cls._fields) - 3)  # the fields between `left` and `products`
        return cls._make((inputs, left, *single, tuple(remaining)))

    def products_of(self, block_index: int, block: _Block, centers: int) -> tuple[Tensor, Tensor | None]:
        """Return the products of a block and the winning centres, saved or computed again; see `_products`."""
        if not self.products:
            norms = None if self.norms is None else block.select_rows(self.norms)
            return _products(self.left.matrix, block.select_rows(self.inputs.w), norms, centers)
        if centers == 1:
            return self.products[block_index], None
        return self.products[2 * block_index], self.products[2 * block_index + 1].long()


class _FusedTerms(torch.autograd.Function):
    """The terms and their gradients, block by block; see the derivation at the top of this file."""

    @staticmethod
    def forward(ctx: Any, rule: ScoreRule, *tensors: Any) -> Any:
        inputs = ClassInputs(*tensors)
        x, w, labels, bias, class_weights, counted, _ = inputs
        # The left factor of all products, the blocks of classes, and what is collected from them.
        batch, left = x.shape[0], _left_factor(x, w, labels, rule)
        blocks = _blocks(labels, w, left.matrix.shape[0], rule)
        save_products = left.matrix.shape[0] * w.shape[0] // rule.centers <= _SAVED_PRODUCTS
        target: Any = 0.0
        target_center: Any = 0  # the winning centre of the target class
        weighted_sum: Any = None if class_weights is None else 0.0
        sample_energies, smallest_half_squares = [], []
        block_results, norms_of_blocks, products, derivatives, repulsion = [], [], [], None, None
        for block in blocks:
            # z = x·ŵ of this block, and below it c = ŵ_y·ŵ for the energy.
            w_block, block_norms = block.select_rows(w), None
            if rule.normalize_weight:
                block_norms = torch.linalg.vector_norm(w_block, dim=1)
                norms_of_blocks.append(block_norms)
            block_products, winners = _products(left.matrix, w_block, block_norms, rule.centers)
            z = block_products[:batch] if rule.needs_energy else block_products
            # target = z_y, from the one block that contains it.
            target_products = block.at_targets(z)
            target = block.where_inside(target_products, target)
            if winners is not None:
                target_center = block.where_inside(block.at_targets(winners), target_center)
            # The reduction over the scores f = ρ·g(z) + β of the other classes of this block.
            scores = rule.scores(z, left.feature_norm, _block_bias(bias, rule, block))
            target_scores = target_products if scores is z else block.at_targets(scores)
            result, derivatives = block.reduce_others(scores, target_scores, rule.reduction)
            block_results.append(result)
            # weighted_sum += Σ_{j≠y} v_j·f_j
            if class_weights is not None:
                weights = block.select(class_weights)
                target_terms = target_scores * weights[block.column.squeeze(1)].unsqueeze(1)
                weighted_sum = weighted_sum + scores @ weights - block.where_inside(target_terms, 0.0).squeeze(1)
            # Σ_{j≠y} 1/(1 − c), twice the energy of each row
            if rule.needs_energy:
                half_squares = _half_squared_distances(block_products[batch:], block)
                smallest_half_squares.append(half_squares.amin())
                repulsion = half_squares.reciprocal_()
                sample_energies.append(repulsion.sum(1))
            if save_products:
                products += [block_products] if winners is None else [block_products, winners.to(torch.uint8)]
        # Combine the blocks: others = log Σ_blocks exp(result).
        norms = None
        if norms_of_blocks:
            norms = norms_of_blocks[0] if len(blocks) == 1 else torch.cat(norms_of_blocks)
        others = block_results[0] if len(blocks) == 1 else rule.reduction.across(torch.stack(block_results, 1))
        target_row = None
        if rule.centers > 1:
            target_row = (rule.centers * labels + target_center.squeeze(1)).masked_fill_(labels < 0, -1)
        rows = labels if target_row is None else target_row
        # Terms of the target's class vector, and the check that no square has left the range of the dtype.
        w_target, target_norm = _target_norm(w, rows, rule) if rule.needs_target_norm else (None, None)
        energy = None
        if rule.needs_energy:
            energies = sample_energies[0] if len(blocks) == 1 else torch.stack(sample_energies).sum(0)
            energy = (energies if counted is None else energies.masked_fill(~counted, 0)).sum() / 2
        in_range = _in_range(x, norms, w_target, smallest_half_squares)
        # The derivatives of the reduction and of the energy are saved only if they are as small as one block.
        # For more classes it is cheaper to compute them again than to write them to memory and read them back.
        if not save_products or len(blocks) > 1:
            derivatives, repulsion = None, None
        saved = _Saved(
            inputs=inputs,
            left=left,
            others=others,
            norms=norms,
            w_target=w_target,
            target_norm=target_norm,
            target_row=target_row,
            derivatives=derivatives,
            repulsion=repulsion,
            products=tuple(products),
        )
        ctx.rule = rule
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in (in_range, target_row) if t is not None))
        ctx.save_for_backward(*saved.flattened())
        target = target.squeeze(1)
        feature_norm = left.feature_norm if rule.needs_feature_norm else None
        return others, weighted_sum, target, feature_norm, target_norm, energy, in_range, target_row

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # Read the saved tensors once: checkpointing computes them again, and does not permit a second access.
        saved = _Saved.unflatten(ctx.saved_tensors)
        with _numerics.autocast_disabled(saved.inputs.x):
            backward = _differentiable_backward if torch.is_grad_enabled() else _blocked_backward
            _, needs_x, needs_w, _, needs_bias, *_ = ctx.needs_input_grad
            grad_x, grad_w, grad_bias = backward(ctx.rule, saved, (needs_x, needs_w, needs_bias), ClassTerms(*grads))
        return None, grad_x, grad_w, None, grad_bias, None, None


def _target_norm(w: Tensor, rows: Tensor, rule: ScoreRule) -> tuple[Tensor, Tensor]:
    """Return the class vectors of the targets and their norms, 0 if a row is −1."""
    if rule.targets_present:
        w_target = w.index_select(0, rows)
        return w_target, torch.linalg.vector_norm(w_target, dim=1)
    w_target = w.index_select(0, rows.clamp_min(0))
    return w_target, torch.linalg.vector_norm(w_target, dim=1).masked_fill_(rows < 0, 0)


def _differentiable_backward(
    rule: ScoreRule, saved: _Saved, needs_grad: tuple[bool, ...], grads: ClassTerms
) -> list[Tensor | None]:
    """Return the gradients as a differentiable graph, for `create_graph=True`."""

    def terms(x: Tensor, w: Tensor, bias: Tensor | None) -> ClassTerms:
        return reference_terms(saved.inputs._replace(x=x, w=w, bias=bias), rule)

    x, w, _, bias, *_ = saved.inputs
    return differentiable_gradients(terms, (x, w, bias), needs_grad, *grads)


# The backward pass in blocks: one function per term of the derivation ------------------------------------------------


def _blocked_backward(
    rule: ScoreRule, saved: _Saved, needs_grad: tuple[bool, ...], grads: Any
) -> tuple[Tensor | None, ...]:
    """Return the gradients with respect to x, w and β, given those of the terms; see the top of this file."""
    needs_x, needs_w, needs_bias = needs_grad
    x, w, labels, bias, *_ = saved.inputs
    left, batch, grad_norm = saved.left.matrix, x.shape[0], grads.feature_norm
    grad_w = torch.empty_like(w) if needs_w else None
    grad_bias = torch.zeros_like(bias) if needs_bias and bias is not None else None
    grad_left: Tensor | None = None  # Σ_j (D/‖w‖)·w for the left factor
    energy_factor = _energy_factor(saved.inputs, grads.energy) if rule.needs_energy else None
    energy_radial: Any = 0.0  # Σ_j D·c of the energy's vectors
    for block_index, block in enumerate(_blocks(labels, w, left.shape[0], rule)):
        # One buffer per block holds, one after the other: P = ∂scores, D = ∂products, D/‖w‖.
        block_products, winners = saved.products_of(block_index, block, rule.centers)
        grad_products = torch.empty_like(block_products)
        z, grad_z = (
            (block_products[:batch], grad_products[:batch]) if rule.needs_energy else (block_products, grad_products)
        )
        response, leaf = _response(rule, z)
        _write_score_gradients(grad_z, z, response, block, rule, saved, grads)
        if grad_bias is not None:  # ∂β = Σ_b P
            if rule.shared_bias:
                grad_bias += grad_z.sum()
            else:
                torch.sum(grad_z, 0, out=block.select(grad_bias))
        if response is not None and rule.radius is None and needs_x:  # ∂ρ = Σ_j P·g, with ρ = ‖x‖
            grad_rho = torch.linalg.vecdot(grad_z, response.detach(), dim=1)
            grad_norm = grad_rho if grad_norm is None else grad_norm + grad_rho
        if response is not None:
            _multiply_by_derivative_(grad_z, z, response, leaf, rule, saved.left.feature_norm)
        if grads.target is not None:  # D_y = H
            block.fill_targets_(grad_z, grads.target.unsqueeze(1))
        if energy_factor is not None:
            # The energy's rows of D, φ′(c) = 1/(2(1−c)²), and zero for the pair of a class with itself.
            repulsion = saved.repulsion
            if repulsion is None:
                repulsion = _half_squared_distances(block_products[batch:], block).reciprocal_()
            torch.mul(repulsion, repulsion, out=grad_products[batch:]).mul_(energy_factor)
        # ∂w of this block.
        w_block = block.select_rows(w)
        if saved.norms is None:
            if winners is not None:
                grad_products = scatter_winners(grad_products, winners, rule.centers)
            if grad_w is not None:  # Σ_b D·x
                torch.mm(grad_products.mT, left, out=block.select_rows(grad_w))
        else:
            radial = grad_products * block_products  # D·z, whose sum over the batch is a
            if winners is not None:
                grad_products, radial = (scatter_winners(t, winners, rule.centers) for t in (grad_products, radial))
            if rule.needs_energy:
                energy_radial = energy_radial + radial[batch:].sum(1, keepdim=True)
            inverse = block.select_rows(saved.norms).reciprocal()
            grad_products.mul_(inverse)
            if grad_w is not None:
                # (Σ_b D·x − a·ŵ)/‖w‖ = Σ_b (D/‖w‖)·x − a/‖w‖²·w
                radial_coefficient = radial.sum(0).mul_(inverse).mul_(inverse).unsqueeze(1)
                grad_w_block = torch.mm(grad_products.mT, left, out=block.select_rows(grad_w))
                grad_w_block.addcmul_(w_block, radial_coefficient, value=-1)
            del radial  # free its memory before the next block needs as much
        # Σ_j (D/‖w‖)·w, the gradient of the left factor.
        if needs_x or rule.needs_energy:
            grad_left = grad_products @ w_block if grad_left is None else grad_left.addmm_(grad_products, w_block)
    # What is left does not depend on the blocks: gradients through ‖w_y‖, through the vectors ŵ_y of the energy, and
    # through the normalisation of features.
    if grad_w is not None and grads.target_norm is not None:
        _add_target_norm_gradient_(grad_w, grads.target_norm, saved, rule)
    if grad_w is not None and grad_left is not None and rule.needs_energy:
        # ∂w_y += (Σ_j D·ŵ_j − (Σ_j D·c)·ŵ_y)/‖w_y‖, the projected gradient of the vectors ŵ_y.
        grad_target = grad_left[batch:].addcmul_(energy_radial, left[batch:], value=-1)
        assert saved.left.target_vector_norms is not None
        grad_w.index_add_(0, labels, grad_target.div_(saved.left.target_vector_norms))
    if not needs_x or grad_left is None:
        return None, grad_w, grad_bias
    grad_features = grad_left[:batch] if rule.needs_energy else grad_left
    return _feature_gradient_(grad_features, grad_norm, saved, rule), grad_w, grad_bias


def _response(rule: ScoreRule, z: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return g(z), and the leaf of its graph if its derivative has to be found automatically."""
    if rule.angular is None:
        return None, None
    if rule.angular_derivative is not None or rule.detached:
        return rule.angular(z), None
    with torch.enable_grad():
        leaf = z.detach().requires_grad_()
        return rule.angular(leaf), leaf


def _write_score_gradients(
    grad_z: Tensor, z: Tensor, response: Tensor | None, block: _Block, rule: ScoreRule, saved: _Saved, grads: Any
) -> None:
    """Write P = G·∂others/∂f + S·v, and zero at the target, to `grad_z`."""
    if grads.others is None:
        grad_z.zero_()
    else:
        factor, derivatives = grads.others, saved.derivatives
        if derivatives is None:
            # `grad_z` holds a copy of the products, because saved tensors must not be written to.
            scores = grad_z.copy_(z) if response is None else rule.rho(saved.left.feature_norm) * response.detach()
            bias = _block_bias(saved.inputs.bias, rule, block)
            scores = scores if bias is None else scores + bias
            result, derivatives = block.reduce_others(scores, block.at_targets(scores), rule.reduction)
            # ∂others/∂f is the derivative within the block, times the derivative with respect to the block's result.
            part_derivative = rule.reduction.part_derivative
            factor = factor if part_derivative is None else factor * part_derivative(result, saved.others)
        torch.mul(derivatives, factor.unsqueeze(1), out=grad_z)
    if grads.weighted_sum is not None and saved.inputs.class_weights is not None:
        grad_z.addcmul_(grads.weighted_sum.unsqueeze(1), block.select(saved.inputs.class_weights))
        block.fill_targets_(grad_z, 0.0)


def _multiply_by_derivative_(
    grad_z: Tensor, z: Tensor, response: Tensor, leaf: Tensor | None, rule: ScoreRule, feature_norm: Tensor | None
) -> None:
    """Turn P in `grad_z` into D = P·ρ·g′(z)."""
    grad_z.mul_(rule.rho(feature_norm))
    if leaf is not None:
        grad_z.copy_(torch.autograd.grad(response, leaf, grad_z)[0])
    elif rule.angular_derivative is not None and not rule.detached:  # detached: as if g′ were 1
        grad_z.mul_(rule.angular_derivative(z, response))


def _energy_factor(inputs: ClassInputs, grad_energy: Tensor | None) -> Tensor:
    """Return the factor of 1/(1−c)² in each energy row, (B, 1): half the incoming gradient, 0 if not counted."""
    x, counted = inputs.x, inputs.counted
    factor = x.new_zeros(()) if grad_energy is None else grad_energy / 2
    return factor * (x.new_ones(len(x), 1) if counted is None else counted.to(x.dtype).unsqueeze(1))


def _add_target_norm_gradient_(grad_w: Tensor, grad_norm: Tensor, saved: _Saved, rule: ScoreRule) -> None:
    """Add the gradient through ‖w_y‖: ∂‖w_y‖/∂w_y = ŵ_y, and zero for a zero class vector."""
    assert saved.target_norm is not None
    assert saved.w_target is not None
    factor = grad_norm / safe_divisor(saved.target_norm)
    rows = saved.inputs.labels if saved.target_row is None else saved.target_row
    # A sample whose target is elsewhere has the norm 0, and adds 0 to the first row.
    rows = rows if rule.targets_present else rows.clamp_min(0)
    grad_w.index_add_(0, rows, saved.w_target * factor.unsqueeze(1))


def _feature_gradient_(grad_x: Tensor, grad_norm: Tensor | None, saved: _Saved, rule: ScoreRule) -> Tensor:
    """Return ∂x from the gradient u with respect to the rescaled features, and from the gradient of ‖x‖."""
    left = saved.left
    if left.rescaling is not None:
        # Features of length s: ∂x = (s/‖x‖)·(u − (u·x̂)x̂). They are s·x̂, hence the factor 1/s².
        features = left.matrix[: grad_x.shape[0]] if rule.needs_energy else left.matrix
        length = float(rule.rescaled_norm or 1)
        radial_coefficient = torch.linalg.vecdot(grad_x, features, dim=1).unsqueeze(1)
        grad_x = grad_x.addcmul_(radial_coefficient, features, value=-1 / length**2).mul_(left.rescaling)
    if grad_norm is not None and left.inverse_norm is not None:
        # ∂‖x‖/∂x = x̂
        grad_x = grad_x.addcmul_(grad_norm.unsqueeze(1) * left.inverse_norm, saved.inputs.x)
    return grad_x
