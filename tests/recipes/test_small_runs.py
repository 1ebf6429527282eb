"""Every table is run once in small: all rows build, and chosen ones give every number."""

import math
from pathlib import Path

import pytest
import torch

from hypersphere.recipes import RECIPES, Trial, attacks, read_records
from hypersphere.recipes.classification import assemble, classify
from hypersphere.robustness import accuracy_under

BY_JOBS = [recipe for recipe in RECIPES.values() if "optimizer" in recipe.settings]
FIRST_ROWS = ["attacks", "imbalance", "imbalance-picture", "energy-gcn", "energy-mlp", "energy-spherenet"]
RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize("recipe", BY_JOBS, ids=lambda recipe: recipe.name)
def test_every_row_builds_its_job_and_has_a_loss(recipe):
    for row in recipe.rows:
        assembly = assemble(recipe.settings_of(row, {}), Trial(0))
        loss = assembly.objective(*next(iter(assembly.batches)))
        assert math.isfinite(float(loss.detach())), row.name
        assert set(row.paper) <= {metric.key for metric in recipe.metrics}, row.name
    assert len({row.name for row in recipe.rows}) == len(recipe.rows)


@pytest.mark.parametrize("name", ["spherenet-convergence", "decoupled-norms", "learned-parameters", *FIRST_ROWS])
def test_the_last_row_in_small_gives_every_number(name):
    recipe = RECIPES[name]
    row = recipe.rows[-1]
    outcome = recipe.run({**recipe.settings_of(row, {}), "epochs": 2}, Trial(0))
    missing = {metric.key for metric in recipe.metrics if not math.isfinite(outcome.metrics.get(metric.key, math.nan))}
    if name == "learned-parameters":
        missing -= {"k_mean", "k_least", "k_most"}  # of other rows
    assert not missing


def test_transferred_attacks_come_from_another_network(monkeypatch):
    seen = []

    def watched(*arguments, source=None):
        seen.append((arguments[0], source))
        return accuracy_under(*arguments, source=source)

    monkeypatch.setattr(attacks, "accuracy_under", watched)
    recipe = attacks.RECIPE
    recipe.run(recipe.settings_of(recipe.rows[0], {"epochs": 1}), Trial(0))
    victim, source = seen[-1]
    assert not any(
        torch.equal(a, b) for a, b in zip(victim.parameters(), source.parameters(), strict=True) if a.dim() > 1
    )


def test_a_row_that_diverges_is_told_and_has_no_error():
    recipe = RECIPES["energy-mlp"]
    settings = recipe.settings_of(recipe.rows[0], {"epochs": 2})
    settings["optimizer"] = {"name": "sgd", "lr": 1e30}
    outcome = classify(assemble(settings, Trial(0)), Trial(0))
    assert outcome.metrics["diverged"] == 1
    assert math.isnan(outcome.metrics["error"])


@pytest.mark.parametrize("name", sorted(path.name for path in RESULTS.iterdir() if path.is_dir()))
def test_kept_records_are_of_the_rows_as_they_are(name):
    recipe = RECIPES[name.partition("@")[0]]
    rows = {row.name: row for row in recipe.rows}
    records = read_records(RESULTS, name)
    assert records
    for record in records:
        assert record.settings == recipe.settings_of(rows[record.row], record.overrides), record.row
