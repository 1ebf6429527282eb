from dataclasses import replace

import pytest

from hypersphere.recipes import RECIPES, Claim, Metric, Record, Row
from hypersphere.recipes.evidence import decide_claims, difference_between, differences_to_baseline


def record(row, seed, error):
    return Record("digits", row, seed, "cpu", {}, {"error": error}, 1.0)


ROWS = (
    Row("plain", printed={"error": ("T5.3", "Baseline", "CNN-6")}),
    Row("better", printed={"error": ("T5.3", "MHE", "CNN-6")}),
    Row("same"),
)
RECORDS = [
    *(record("plain", seed, value) for seed, value in enumerate([5.0, 6.0, 7.0])),
    *(record("better", seed, value) for seed, value in enumerate([4.0, 5.1, 5.9])),
    *(record("same", seed, value) for seed, value in enumerate([5.2, 5.8, 7.0])),
]


def recipe(*claims):
    metrics = (Metric("error", "error %", ".2f", False),)
    return replace(RECIPES["digits"], rows=ROWS, baseline="plain", claims=claims, metrics=metrics)


def test_differences_are_paired_by_seed():
    found = differences_to_baseline(recipe(), RECORDS, "error")
    assert set(found) == {"better", "same"}
    assert found["better"].mean == pytest.approx(-1.0)
    assert found["better"].pairs == 3
    assert found["same"].mean == pytest.approx(0.0)


def test_difference_uses_only_seeds_of_both_rows():
    records = [one for one in RECORDS if (one.row, one.seed) != ("plain", 1)]
    assert difference_between(records, "better", "plain", "error").pairs == 2
    assert difference_between(records, "better", "absent", "error") is None
    lost = [replace(one, metrics={"error": None}) for one in RECORDS]
    assert difference_between(lost, "better", "plain", "error") is None


@pytest.mark.parametrize(
    ("claim", "verdict"),
    [
        (Claim("", "better", "plain"), "yes"),
        (Claim("", "plain", "better"), "no"),
        (Claim("", "same", "plain"), "not resolved"),
    ],
)
def test_claims_are_decided_by_the_interval(claim, verdict):
    (decision,) = decide_claims(recipe(claim), RECORDS)
    assert decision.verdict == verdict


def test_claims_without_records_are_not_run():
    (decision,) = decide_claims(recipe(Claim("", "better", "plain")), [])
    assert decision.verdict == "not run"
    assert decision.source == pytest.approx(28.16 - 32.08)
