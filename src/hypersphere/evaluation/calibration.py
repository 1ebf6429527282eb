r"""Calibration: from scores to log-likelihood ratios, probabilities, and thresholds with confidence intervals.

The log-likelihood ratio of a pair is ℓ = log p(score | same) − log p(score | different). If a fraction π of the pairs
are same pairs, the probability of a same pair is σ(ℓ + log[π/(1 − π)]). ℓ does not depend on π, so one calibration is
valid for any prior.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from hypersphere._notebook import NotebookResult
from hypersphere._validation import require, warn_user
from hypersphere.evaluation._arrays import Array, as_flags, as_scores, as_tensor
from hypersphere.evaluation._isotonic import IsotonicMap
from hypersphere.evaluation._logistic import LogisticMap
from hypersphere.evaluation.costs import bayes_threshold, require_prior
from hypersphere.evaluation.intervals import Interval, as_groups, percentile_interval, resampled_weights
from hypersphere.evaluation.roc import RankedScores

__all__ = ["Calibration"]

ScoreMap: TypeAlias = LogisticMap | IsotonicMap
METHODS: dict[str, type[LogisticMap] | type[IsotonicMap]] = {"logistic": LogisticMap, "isotonic": IsotonicMap}
FORMAT = "hypersphere calibration 1"  # the first entry of a stored calibration
QUALITY_RULE = "given if and only if the calibration was fitted with qualities"


@dataclass(frozen=True, eq=False, repr=False)
class Calibration(NotebookResult):
    """A map from scores to log-likelihood ratios, with the pairs it was fitted to. Created by `fit`.

    Attributes:
        method: "logistic" or "isotonic".
        prior: the fraction of same pairs that `probability` assumes unless another one is given.
        map: the fitted map.
        scores, same, quality: the pairs of the fit.
        groups: labels that the bootstrap resamples, one row per side, or None.
    """

    method: str
    prior: float
    map: ScoreMap
    scores: Float[Tensor, " pairs"]
    same: Bool[Tensor, " pairs"]
    quality: Float[Tensor, " pairs"] | None = None
    groups: Int64[Tensor, "sides pairs"] | None = None

    @classmethod
    def fit(
        cls,
        scores: Array,
        same: Array,
        quality: Array | None = None,
        method: str = "logistic",
        *,
        prior: float | None = None,
        groups: tuple[Array, Array] | Array | None = None,
    ) -> Calibration:
        r"""Fit a calibration to scored pairs. Test it on other pairs.

        * "logistic": ℓ = a·score + b, or a·score + c·quality + b, by logistic regression in which same pairs have the
          total weight π and different pairs 1 − π. It needs few pairs. If scores of same and of different pairs do not
          overlap, the likelihood has no maximum at a finite slope; the labels 1 and 0 are then replaced by
          (n₁ + 1)/(n₁ + 2) and 1/(n₀ + 2) for n₁ same and n₀ different pairs (Platt scaling).
        * "isotonic": the non-decreasing step function with the highest likelihood (pool adjacent violators), with
          probabilities that are linear between the steps. It needs thousands of pairs. Probabilities of 0 and 1
          become 1/(M + 2) and (M + 1)/(M + 2) for M pairs, so that ratios are finite.

        Args:
            scores: (M,) higher means more similar.
            same: (M,) booleans, or zeros and ones; at least one of each.
            quality: (M,) the quality of each pair, for example of its worse image; only for "logistic".
            method: "logistic" or "isotonic".
            prior: π; None for the fraction of same pairs, which gives ordinary logistic regression.
            groups: what the confidence intervals resample: the identities (M,) of the first and of the second side of
                each pair, or one label (M,) per pair. None resamples pairs, as if they were independent.

        Example:
            >>> calibration = Calibration.fit([0.1, 0.2, 0.6, 0.4, 0.8, 0.9], [0, 0, 0, 1, 1, 1])
            >>> calibration
            Calibration(logistic, 3 same and 3 different pairs)
            >>> calibration.probability([0.1, 0.5, 0.9])
            tensor([0.0699, 0.5000, 0.9301], dtype=torch.float64)
        """
        require(method in METHODS, "method", f"one of {', '.join(map(repr, METHODS))}", method)
        if quality is not None and method != "logistic":
            raise ValueError(f"quality needs the method 'logistic', not {method!r}")
        values = as_scores("scores", scores)
        flags = as_flags("same", same, len(values), values.device)
        qualities = None if quality is None else _as_quality("quality", quality, values)
        prior = float(flags.double().mean()) if prior is None else require_prior(prior)
        labels = None if groups is None else as_groups("groups", groups, flags)
        fitted = METHODS[method].fit(values, flags, qualities, torch.ones_like(values), prior)  # type: ignore[arg-type]
        if isinstance(fitted, LogisticMap) and fitted.slope < 0:
            warn_user("same pairs score lower than different pairs: pass similarities, or distances with a minus sign")
        return cls(method, prior, fitted, values, flags, qualities, labels)

    def llr(self, score: Array | float, quality: Array | float | None = None) -> Float[Tensor, "..."]:
        """Return natural log-likelihood ratios in float64, in the shape of `score`.

        Args:
            score: a number, or an array of any shape.
            quality: the quality of each pair, if and only if the calibration was fitted with qualities.
        """
        require((quality is None) == (self.quality is None), "quality", QUALITY_RULE, quality)
        values = _as_finite("score", score)
        return self.map.llr(values, None if quality is None else _as_finite("quality", quality).to(values.device))

    def probability(
        self, score: Array | float, quality: Array | float | None = None, *, prior: float | None = None
    ) -> Float[Tensor, "..."]:
        """Return the probability of a same pair in float64, in the shape of `score`.

        Args:
            score, quality: as for `llr`.
            prior: the fraction of same pairs where the probabilities are used; by default that of the calibration.
        """
        return torch.sigmoid(self.llr(score, quality) - bayes_threshold(self.prior if prior is None else prior))

    def threshold(
        self,
        *,
        far: float | None = None,
        prior: float | None = None,
        cost: float | tuple[float, float] = (1.0, 1.0),
        quality: float | None = None,
        samples: int = 1000,
        level: float = 0.95,
        generator: torch.Generator | None = None,
    ) -> Interval:
        r"""Return the threshold of scores for a false accept rate, or for a prior and costs, with its interval.

        * `far`: the lowest score of the fitted pairs at which the FAR does not exceed the rate (the "step" rule of
          `Roc.at`). A warning is given if there are too few different pairs to measure the rate.
        * `prior`: the Bayes threshold, the lowest score with ℓ ≥ log[c_fa·(1 − π) / (c_miss·π)]. It minimises the
          expected cost. For "isotonic" it is halfway between two scores. It is −∞ to accept all pairs and ∞ to accept
          none.

        The interval is a percentile bootstrap, in which each sample is fitted again. With `far` and qualities, the
        fitted slopes are used for all samples.

        Args:
            far: a rate in (0, 1). Exactly one of `far` and `prior` must be given.
            prior: π, the prior probability of a same pair.
            cost: (c_miss, c_fa), the costs of rejecting a same pair and of accepting a different one; or c_fa alone, if
                c_miss is 1.
            quality: the quality for which the threshold is computed, if and only if the calibration has qualities.
            samples, level, generator: as for `bootstrap`.

        Example:
            >>> calibration = Calibration.fit([0.1, 0.2, 0.6, 0.4, 0.8, 0.9], [0, 0, 0, 1, 1, 1])
            >>> threshold = calibration.threshold(prior=0.5, samples=50, generator=torch.Generator().manual_seed(0))
            >>> round(threshold.value, 3), threshold.low <= threshold.value <= threshold.high
            (0.5, True)
        """
        if (far is None) == (prior is None):
            raise ValueError(f"exactly one of far and prior must be given, not {far!r} and {prior!r}")
        require((quality is None) == (self.quality is None), "quality", QUALITY_RULE, quality)
        at_quality = None if quality is None else float(_as_finite("quality", quality))
        if far is not None:
            # Without qualities ℓ rises with the score, so scores are compared with the threshold. With them, ℓ is.
            compared_values = self.scores if self.quality is None else self.llr(self.scores, self.quality)
            ranked = RankedScores(compared_values, self.same)
            if not ranked.roc().at(far).resolved:
                different = int((~self.same).sum())
                lowest = f"the lowest they resolve is 1/{different}"
                warn_user(f"{different} different pairs are too few for a FAR of {far:g}; {lowest}")

            def measure(weights: Tensor) -> float:
                value = ranked.roc(weights).at(far).threshold
                return value if self.quality is None else self.map.score_at(value, at_quality)

        else:
            costs = cost if isinstance(cost, (tuple, list)) else (1.0, cost)
            require(len(costs) == 2, "cost", "a positive number or two of them, (c_miss, c_fa)", cost)
            c_miss, c_fa = costs
            ratio = bayes_threshold(prior, c_miss, c_fa)  # type: ignore[arg-type]

            def measure(weights: Tensor) -> float:
                fitted = type(self.map).fit(self.scores, self.same, self.quality, weights.double(), self.prior)  # type: ignore[arg-type]
                return fitted.score_at(ratio, at_quality)

        draws = resampled_weights(self.same, self.groups, generator)
        return percentile_interval(measure(torch.ones_like(self.scores)), measure, draws, samples, level)

    def to_dict(self) -> dict[str, Any]:
        """Return the calibration as numbers, texts, lists and dictionaries, which JSON can store.

        It contains the pairs of the fit, from which `threshold` computes rates and intervals.

        >>> import json
        >>> calibration = Calibration.fit([0.1, 0.6, 0.4, 0.9], [0, 0, 1, 1])
        >>> stored = json.dumps(calibration.to_dict())
        >>> bool(Calibration.from_dict(json.loads(stored)).llr(0.7) == calibration.llr(0.7))
        True
        """
        pairs = {name: getattr(self, name) for name in ("scores", "same", "quality", "groups")}
        return {
            "format": FORMAT,
            "method": self.method,
            "prior": self.prior,
            "map": {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(self.map).items()},
            **{name: None if column is None else column.tolist() for name, column in pairs.items()},
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Calibration:
        """Return the calibration that `to_dict` has stored.

        Raises:
            ValueError: if the dictionary is not a calibration.
        """
        is_calibration = isinstance(stored, Mapping) and stored.get("format") == FORMAT
        require(is_calibration, "stored", f"a dictionary with the format {FORMAT!r}", stored)
        try:
            map_type = METHODS[stored["method"]]
            fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in stored["map"].items()}
            fitted = map_type(**fields)
            for name, value in asdict(fitted).items():
                _as_finite(f"{name} of the stored map", 0.0 if value is None else value)
            scores = as_scores("scores", stored["scores"])
            same = as_flags("same", stored["same"], len(scores), None)
            quality = None if stored["quality"] is None else _as_quality("quality", stored["quality"], scores)
            labels = stored["groups"]
            groups = None if labels is None else as_groups("groups", labels if len(labels) > 1 else labels[0], same)
            return cls(stored["method"], require_prior(stored["prior"]), fitted, scores, same, quality, groups)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"stored must be a complete calibration, but reading it failed: {error!r}") from error

    def __repr__(self) -> str:
        same = int(self.same.sum())
        quality = "" if self.quality is None else ", with quality"
        return f"Calibration({self.method}, {same} same and {len(self.same) - same} different pairs{quality})"


def _as_finite(name: str, value: Array | float) -> Float[Tensor, "..."]:
    """Return a finite float64 tensor of any shape."""
    x = as_tensor(name, value).double()  # type: ignore[arg-type]
    require(bool(torch.isfinite(x).all()), name, "finite", value)
    return x


def _as_quality(name: str, value: Array, scores: Tensor) -> Float[Tensor, " pairs"]:
    """Return one quality per score."""
    x = as_scores(name, value).to(scores.device)
    require(len(x) == len(scores), name, f"a vector of {len(scores)} numbers", tuple(x.shape))
    return x
