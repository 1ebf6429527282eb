"""Every table runs once at a small scale: all rows can be built, and selected ones return every metric."""

import math
from pathlib import Path

import pytest
import torch

from hypersphere.recipes import RECIPES, Trial, attacks, read_records
from hypersphere.recipes.classification import assemble, classify
from hypersphere.robustness import accuracy_under

JOB_RECIPES = [recipe for recipe in RECIPES.values() if "optimizer" in recipe.settings]
# One recipe per run function, and some whose last row has an unusual setting. The other recipes share these functions.
SMALL_RUNS = ["spherenet-convergence", "decoupled-norms", "learned-parameters", "attacks", "imbalance"]
SMALL_RUNS += ["imbalance-picture", "energy-gcn", "energy-mlp", "energy-spherenet"]
RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize("recipe", JOB_RECIPES, ids=lambda recipe: recipe.name)
def test_every_row_can_be_built_and_has_a_finite_loss(recipe):
    for row in recipe.rows:
        assembly = assemble(recipe.settings_of(row, {}), Trial(0))
        loss = assembly.objective(*next(iter(assembly.batches)))
        assert math.isfinite(float(loss.detach())), row.name
        assert set(row.paper) <= {metric.key for metric in recipe.metrics}, row.name
    assert len({row.name for row in recipe.rows}) == len(recipe.rows)


@pytest.mark.parametrize("name", SMALL_RUNS)
def test_last_row_returns_every_metric_at_a_small_scale(name):
    recipe = RECIPES[name]
    row = recipe.rows[-1]
    outcome = recipe.run({**recipe.settings_of(row, {}), "epochs": 2}, Trial(0))
    missing = {metric.key for metric in recipe.metrics if not math.isfinite(outcome.metrics.get(metric.key, math.nan))}
    if name == "learned-parameters":
        missing -= {"k_mean", "k_least", "k_most"}  # metrics of other rows
    assert not missing


def test_transferred_attacks_are_computed_on_another_network(monkeypatch):
    calls = []

    def recorded(*arguments, source=None):
        calls.append((arguments[0], source))
        return accuracy_under(*arguments, source=source)

    monkeypatch.setattr(attacks, "accuracy_under", recorded)
    recipe = attacks.RECIPE
    recipe.run(recipe.settings_of(recipe.rows[0], {"epochs": 1}), Trial(0))
    victim, source = calls[-1]
    assert not any(
        torch.equal(a, b) for a, b in zip(victim.parameters(), source.parameters(), strict=True) if a.dim() > 1
    )


def test_diverged_run_is_marked_and_has_no_error():
    recipe = RECIPES["energy-mlp"]
    settings = recipe.settings_of(recipe.rows[0], {"epochs": 2})
    settings["optimizer"] = {"name": "sgd", "lr": 1e30}
    outcome = classify(assemble(settings, Trial(0)), Trial(0))
    assert outcome.metrics["diverged"] == 1
    assert math.isnan(outcome.metrics["error"])


@pytest.mark.parametrize("name", sorted(path.name for path in RESULTS.iterdir() if path.is_dir()))
def test_stored_records_have_the_settings_of_the_rows(name):
    recipe = RECIPES[name.partition("@")[0]]
    rows = {row.name: row for row in recipe.rows}
    records = read_records(RESULTS, name)
    assert records
    for record in records:
        assert record.settings == recipe.settings_of(rows[record.row], record.overrides), record.row


@pytest.mark.parametrize("name", sorted(path.name for path in RESULTS.iterdir() if path.is_dir()))
def test_stored_tables_have_the_notes_and_references_of_the_recipes(name):
    recipe = RECIPES[name.partition("@")[0]]
    table = (RESULTS / name / "table.md").read_text(encoding="utf-8")
    assert f"{recipe.note} ({recipe.reference[:1].upper()}{recipe.reference[1:]}.)" in table


@pytest.mark.parametrize("name", sorted(path.name for path in RESULTS.iterdir() if path.is_dir()))
def test_stored_tables_have_the_printed_numbers_of_the_recipes(name):
    recipe = RECIPES[name.partition("@")[0]]
    rows = {row.name: row for row in recipe.rows}
    lines = (RESULTS / name / "table.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    for cell_row in cells:
        row = rows.get(cell_row[0])
        if row is None:  # the heading, or the table of settings
            continue
        printed = dict(zip(cells[0], cell_row, strict=True))
        for metric in recipe.metrics:
            value = row.paper.get(metric.key)
            cell = printed.get(f"{metric.heading}, source", "–")  # no row has a number if there is no such column
            assert cell == ("–" if value is None else format(value, metric.format)), row.name


def test_sphere_network_recipes_cite_the_figures_of_the_thesis():
    assert "figures 3.3 and 3.5" in RECIPES["spherenet-convergence"].reference
    assert "figure 3.4" in RECIPES["learned-parameters"].reference
    readme = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert "CNN-69" not in readme  # there is no record of CNN-69
