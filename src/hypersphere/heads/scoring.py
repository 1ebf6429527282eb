r"""How a head makes scores of features: magnitudes, responses, margins, schedules and the gradient asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere import _numerics, sphere
from hypersphere.functions.angular import Angular, Cosine
from hypersphere.functions.magnitude import Magnitude
from hypersphere.functions.margin import Margin, NormAdaptive
from hypersphere.heads.annealing import Annealing, Ramp
from hypersphere.heads.classes import Classes
from hypersphere.heads.gradients import normalized_correction, straight_through
from hypersphere.heads.settings import tensor_fields
from hypersphere.heads.statistics import moving_statistics
from hypersphere.heads.terms import LOG_SUM_EXP, Reduction, Terms, Wanted

__all__ = ["Scoring"]


class Scoring(nn.Module):
    """The part of a head between features and scores; `AngularHead` sets it up and makes a loss of it."""

    num_classes: int
    radius: str | float
    weight_norm: bool
    magnitude: Magnitude
    annealing: Annealing | None
    ramp: Ramp | None
    gradient: str
    label_smoothing: float
    weight: Tensor
    bias: Tensor | None
    steps: Tensor
    norm_mean: Tensor
    norm_std: Tensor
    class_weights: Tensor | None
    reduction_over_classes: Reduction = LOG_SUM_EXP
    classes: Classes = Classes()

    @property
    def angular(self) -> Callable[[Tensor], Tensor]:
        """g, with what the head learns of it (k) as it is now."""
        return self._with_learned("angular", self._angular)

    @property
    def margin(self) -> Callable[..., Tensor] | None:
        """ψ, with what the head learns of it as it is now; None without a margin."""
        return self._with_learned("margin", self._margin)

    def _with_learned(self, owner: str, entry: Any) -> Any:
        learned = {name: getattr(self, f"{owner}_{name}", value) for name, value in tensor_fields(owner, entry).items()}
        return replace(entry, **learned) if learned else entry

    def _bias_size(self) -> int:
        return self.num_classes

    def _polar(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Norms (B, 1) and directions of the features, in the wider of the features' and the weight's type."""
        norm, direction = sphere.row_polar(x)
        wide = torch.promote_types(direction.dtype, _numerics.widen(self.weight).dtype)
        return norm.to(wide), direction.to(wide)

    def _narrowed(self, out: Tensor, x: Tensor) -> Tensor:
        return _numerics.narrow(out, torch.promote_types(x.dtype, self.weight.dtype))

    def _cosines(self, x_norm: Tensor, x_hat: Tensor) -> tuple[Tensor, Tensor]:
        """Magnitudes (broadcasting) and cosines (B, C) of all classes."""
        w_norm, w_hat = sphere.polar(self.weight)
        return self.magnitude(w_norm.mT.to(x_hat.dtype), x_norm), x_hat @ w_hat.mT.to(x_hat.dtype)

    def _terms(self, x_norm: Tensor, x_hat: Tensor, labels: Tensor) -> tuple[Terms, Tensor, Tensor]:
        """The terms of the loss, and the target's cosine and magnitude, (B,) each."""
        as_products = isinstance(self.angular, Cosine) and not self._margin_on_others()
        rho = (x_norm if self.radius == "feature" else torch.full_like(x_norm, float(self.radius))).squeeze(1)
        strength = self._strength(x_hat)  # of this step: backward comes after the step has been counted
        wanted = Wanted(
            unit_rows=self.weight_norm,
            response=None if as_products else lambda c: self._others_response(c, strength),
            slope=None if self._margin_on_others() else getattr(self.angular, "slope", None),
            detached=self.gradient == "detached",
            reduction=self.reduction_over_classes,
            total_weights=self._smoothing_weights(x_hat),
        )
        features = rho.unsqueeze(1) * x_hat if as_products else x_hat
        weight, bias = _numerics.widen(self.weight).to(x_hat.dtype), None
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
        norm = torch.ones_like(rho) if terms.target_norm is None else terms.target_norm
        if not as_products:
            return terms, terms.target, rho * norm
        return terms, _ratio(_ratio(terms.target, rho), norm), rho * norm

    def _known_response(self) -> bool:
        """Whether the other classes' response is ours and has nothing to learn, so that the fused pass may have it."""
        fields = [*tensor_fields("angular", self._angular).values(), *tensor_fields("margin", self._margin).values()]
        return isinstance(self._angular, Angular) and not any(value.requires_grad for value in fields)

    def _margin_on_others(self) -> bool:
        return isinstance(self._margin, Margin) and self._margin.touches_others

    def _others_response(self, c: Tensor, strength: float | Tensor) -> Tensor:
        margin = self.margin
        if isinstance(margin, Margin) and margin.touches_others:
            return margin.others(c, self.angular, strength)
        return self.angular(c)

    def _passed(self, c: Tensor, response: Tensor) -> Tensor:
        return straight_through(c, response) if self.gradient == "detached" else response

    def _strength(self, like: Tensor) -> float | Tensor:
        return 1.0 if self.ramp is None else self.ramp(self.steps.to(like.dtype))

    def _target_score(
        self,
        magnitude: Tensor,
        c: Tensor,
        x_norm: Tensor,
        x_hat: Tensor,
        labels: Tensor,
        product: Tensor | None = None,
        *,
        with_bias: bool = True,
    ) -> Tensor:
        """f_y: magnitude times ψ, with the chosen gradient, blended with the plain score while annealing.

        Without a margin and with cosine g it is the product itself, whatever the norms are.
        """
        if product is not None and self._margin is None and isinstance(self._angular, Cosine):
            return self._biased(product, labels)
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
        return self._biased(score, labels) if with_bias else score

    def _biased(self, score: Tensor, labels: Tensor) -> Tensor:
        if self.bias is None:
            return score
        return score + (self.bias if self._bias_size() == 1 else self.classes.rows(self.bias, labels)).to(score.dtype)

    def _target_directions(self, labels: Tensor) -> Tensor:
        """Unit class vectors of the labels, without gradient."""
        return sphere.polar(self.classes.rows(self.weight.detach(), labels))[1]

    def _psi(self, c: Tensor, x_norm: Tensor) -> Tensor:
        strength = self._strength(c)
        margin = self.margin
        if isinstance(margin, NormAdaptive):
            quality = margin.quality(x_norm.detach(), self.norm_mean.to(c.dtype), self.norm_std.to(c.dtype))
            return margin.for_quality(quality)(c, self.angular, strength)
        if isinstance(margin, Margin):
            return margin(c, self.angular, strength)
        assert margin is not None
        plain, own = self.angular(c), margin(c)
        return own if self.ramp is None else plain + strength * (own - plain)

    def _smoothing_weights(self, like: Tensor) -> Tensor | None:
        if not self.label_smoothing:
            return None
        return like.new_ones(self.num_classes) if self.class_weights is None else self.class_weights.to(like.dtype)

    def _observe_norms(self, x_norm: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Move the running statistics of the feature norm, for a margin that depends on them; return the old ones."""
        if not (isinstance(self._margin, NormAdaptive) and self.training and _numerics.can_update_state(x_norm)):
            return None
        before = self.norm_mean, self.norm_std
        moved = moving_statistics(*before, x_norm.detach().squeeze(1), counted, self._margin.momentum)
        self.norm_mean, self.norm_std = moved
        return before

    def _restore_norms(self, before: tuple[Tensor, Tensor] | None) -> None:
        if before is not None:
            self.norm_mean, self.norm_std = before


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient, 0 where there is nothing to divide by."""
    nothing = denominator <= 0
    return (numerator / denominator.masked_fill(nothing, 1)).masked_fill(nothing, 0)
