import math

import pytest
import torch

from hypersphere.evaluation import Landscape
from hypersphere.recipes import Trial, opt_networks, opt_studies
from hypersphere.recipes.classification import assemble
from hypersphere.recipes.graphs import ROTATIONS
from hypersphere.recipes.open_set import compare_unseen
from hypersphere.rotation import degrees_of_freedom


def find_row(recipe, name):
    (row,) = (row for row in recipe.rows if row.name == name)
    return row


@pytest.mark.parametrize(
    ("recipe", "name", "overrides"),
    [
        (opt_networks.MLP, "xavier, OPT (CP)", {}),
        (opt_networks.MLP, "xavier, OPT (OGD)", {}),
        (opt_networks.CNN, "OPT (GS)", {}),
        (opt_networks.CNN, "no BatchNorm, OPT (CP)", {}),
        (opt_networks.POINTNET, "OPT (CP)", {}),
        (opt_studies.OMNIGLOT, "CLS-OPT (CP)", {}),
        (opt_studies.INITIAL_ENERGY, "OPT (CP), mean 0.02", {}),
        (opt_studies.LANDSCAPE, "OPT (CP)", {"points": 5}),
        (ROTATIONS, "Cora, OPT (CP)", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_small_run_returns_every_metric_and_keeps_the_energy(recipe, name, overrides):
    settings = recipe.settings_of(find_row(recipe, name), {"epochs": 1, **overrides})
    outcome = recipe.run(settings, Trial(0))
    for metric in recipe.metrics:
        assert math.isfinite(outcome.metrics[metric.key]), metric.key
    first, last = outcome.curves["energy"]
    if recipe is not opt_studies.OMNIGLOT:  # its hidden layers are trained plainly
        assert last == pytest.approx(first, rel=1e-4)


def test_source_energy_reproduces_the_printed_energies():
    # For random directions the mean of 1/(1 − cos²) is (d−2)/(d−3). There are 64 neurons and their 64 negatives.
    def expected(d):
        return (128 * 126 / 2 * (d - 2) / (d - 3) + 128 / 4) / (128 * 127)

    total = expected(27) + 5 * expected(576) + expected(1024)
    assert opt_studies.source_energy("he", 0.0, 0) == pytest.approx(total, abs=1e-3)
    for row in opt_studies.INITIAL_ENERGY.rows:
        if "source_energy" in row.paper:
            mean = row.settings["model"]["init_mean"]
            assert opt_studies.source_energy("he", mean, 0) == pytest.approx(row.paper["source_energy"], abs=3e-3)


def test_rotated_class_vectors_have_the_degrees_of_freedom_of_a_rotation():
    settings = opt_studies.OMNIGLOT.settings_of(find_row(opt_studies.OMNIGLOT, "CLS-OPT (CP)"), {})
    assert degrees_of_freedom(assemble(settings, Trial(0)).head) == 64 * 63 / 2


def test_compare_unseen_is_perfect_for_one_hot_features():
    labels = torch.arange(20).repeat_interleave(20)
    assert compare_unseen(torch.eye(20)[labels], labels) == {"accuracy": 100, "eer": 0, "tar": 100, "rank1": 100}


def test_on_ring_is_the_mean_at_a_distance():
    axis = torch.linspace(-1.5, 1.5, 301, dtype=torch.float64)
    bowl = Landscape(axis, axis, {"loss": axis[:, None].square() + axis.square()}, {"loss": 0.0})
    assert opt_studies.on_ring(bowl, "loss", 0.5) == pytest.approx(0.25, abs=1e-3)
    assert math.isnan(opt_studies.on_ring(bowl, "loss", 9.0))
