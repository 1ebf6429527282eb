"""Compare the rows of a recipe: differences to the baseline with intervals, and decisions about the claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypersphere.evaluation import PairedDifference, paired_difference
from hypersphere.recipes.recipe import Claim, Metric, Recipe, Row
from hypersphere.recipes.record import Record

__all__ = ["Decision", "decide_claims", "difference_between", "differences_to_baseline", "format_difference"]


@dataclass(frozen=True)
class Decision:
    """A claim of the source and the evidence of the records.

    Attributes:
        claim: the claim.
        metric: the metric that is compared.
        difference: value of the row that is said to be better minus that of the other row, by seed; None if there are
            no records of both rows.
        source: the difference of the numbers that the source prints, or None if it does not print both.
    """

    claim: Claim
    metric: Metric
    difference: PairedDifference | None
    source: float | None

    @property
    def verdict(self) -> str:
        """ "yes", "no", "not resolved", or "not run"."""
        if self.difference is None:
            return "not run"
        return self.difference.verdict(bool(self.metric.higher_is_better))


def difference_between(records: Sequence[Record], first: str, second: str, metric: str) -> PairedDifference | None:
    """Return the difference of two rows over the seeds that both have; None if there is no such seed."""
    values = {
        row: {
            record.seed: value
            for record in records
            if record.row == row and (value := record.metrics.get(metric)) is not None
        }
        for row in (first, second)
    }
    seeds = sorted(values[first].keys() & values[second].keys())
    if not seeds:
        return None
    return paired_difference([values[first][s] for s in seeds], [values[second][s] for s in seeds])


def format_difference(difference: PairedDifference, metric: Metric) -> str:
    """Return a difference with its interval as text.

    >>> format_difference(paired_difference([2.0, 3.0], [1.0, 2.5]), Metric("error", "error", ".1f"))
    '+0.8 (-2.4 to +3.9)'
    """
    form = f"+{metric.format}"
    if difference.pairs == 1:
        return f"{difference.mean:{form}} (one seed)"
    return f"{difference.mean:{form}} ({difference.low:{form}} to {difference.high:{form}})"


def differences_to_baseline(recipe: Recipe, records: Sequence[Record], metric: str) -> dict[str, PairedDifference]:
    """Return the difference of each row to its baseline, for the rows that have one."""
    differences: dict[str, PairedDifference] = {}
    for row in recipe.rows:
        baseline = recipe.baseline_of(row)
        if baseline is not None:
            difference = difference_between(records, row.name, baseline.name, metric)
            if difference is not None:
                differences[row.name] = difference
    return differences


def decide_claims(recipe: Recipe, records: Sequence[Record]) -> list[Decision]:
    """Return a decision for every claim of a recipe.

    A claim is decided by the 95 % interval of the paired difference: "yes" if the whole interval is on the side of the
    claim, "no" if it is on the other side, "not resolved" if it contains zero.
    """
    metrics = {metric.key: metric for metric in recipe.metrics}
    return [
        Decision(
            claim,
            metrics[claim.metric],
            difference_between(records, claim.better, claim.than, claim.metric),
            _printed_difference(recipe.row(claim.better), recipe.row(claim.than), claim.metric),
        )
        for claim in recipe.claims
    ]


def _printed_difference(better: Row, than: Row, metric: str) -> float | None:
    first, second = (row.printed_numbers().get(metric) for row in (better, than))
    return None if first is None or second is None else first - second
