r"""Normalisation of scores by their distribution over a cohort of other people.

A trial compares an enrolment with a test. Its score is standardised with the mean and the deviation of the scores of
the enrolment with all members of the cohort (z-norm), or of the test with them (t-norm); s-norm is the mean of both.
Adaptive s-norm uses only the highest cohort scores of each side, those of the most similar people (Matějka et al.,
Analysis of score normalization in multilingual speaker recognition, Interspeech 2017).
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor

from hypersphere._validation import is_integer, require
from hypersphere.evaluation._arrays import Array, as_features, as_tensor

__all__ = ["score_norm"]

# The sides whose cohort scores are used, by kind.
KINDS: Mapping[str, tuple[str, ...]] = {
    "z": ("enrol",),
    "t": ("test",),
    "s": ("enrol", "test"),
    "adaptive_s": ("enrol", "test"),
}


def score_norm(
    scores: Array,
    enrol_cohort: Array | None,
    test_cohort: Array | None = None,
    kind: str = "adaptive_s",
    top: int = 300,
) -> Float[Tensor, "..."]:
    r"""Normalise scores of trials: s-norm is ½[(s − μ_e)/σ_e + (s − μ_t)/σ_t]; z- and t-norm are its two terms.

    Standard deviations are those of the population (divided by the number of cohort scores).

    Args:
        scores: (M,) one score per trial, or (E, T) the scores of all enrolments with all tests.
        enrol_cohort: scores of the enrolment side with the C members of the cohort: (M, C) for each trial, or (E, C).
            Not used by t-norm.
        test_cohort: the same for the test side: (M, C), or (T, C). Not used by z-norm.
        kind: "z", "t", "s" or "adaptive_s".
        top: with "adaptive_s", the number of highest cohort scores of each side; all of them if there are fewer.

    Returns:
        Normalised scores in float64.

    Example:
        >>> score_norm([2.0], [[-1.0, 1.0, -9.0]], [[-3.0, 1.0, -9.0]], kind="adaptive_s", top=2)
        tensor([1.7500], dtype=torch.float64)
    """
    require(kind in KINDS, "kind", f"one of {', '.join(map(repr, KINDS))}", kind)
    require(is_integer(top, 2), "top", "an integer >= 2", top)
    values = as_tensor("scores", scores)
    accepted = "a non-empty vector or matrix of real numbers"
    require(values.ndim in (1, 2) and values.numel() > 0 and not values.is_complex(), "scores", accepted, values.shape)
    values = values.double()
    as_features("scores", values.reshape(len(values), -1))  # raises an error if a score is not finite
    normalised = []
    for side, cohort in (("enrol", enrol_cohort), ("test", test_cohort)):
        if side not in KINDS[kind]:
            continue
        name, dim = f"{side}_cohort", 1 if side == "test" and values.ndim == 2 else 0
        require(cohort is not None, name, f"given for {kind!r}", None)
        cohort_scores = as_features(name, cohort).to(values)  # type: ignore[arg-type]
        accepted = f"a matrix with {values.shape[dim]} rows, one per {'trial' if values.ndim == 1 else side}"
        require(len(cohort_scores) == values.shape[dim], name, accepted, tuple(cohort_scores.shape))
        if kind == "adaptive_s":
            cohort_scores = cohort_scores.topk(min(top, cohort_scores.shape[1])).values
        mean, deviation = cohort_scores.mean(1), cohort_scores.std(1, correction=0)
        constant = (deviation == 0).nonzero().flatten().tolist()
        if constant:
            raise ValueError(f"{name} must have different scores in each row, but those of row {constant[0]} are equal")
        if values.ndim == 2 and side == "enrol":
            mean, deviation = mean[:, None], deviation[:, None]
        normalised.append((values - mean) / deviation)
    return sum(normalised) / len(normalised)  # type: ignore[return-value]
