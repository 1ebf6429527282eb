import math

import pytest
import torch

from hypersphere.evaluation import Landscape
from hypersphere.recipes import Trial, opt_networks, opt_studies
from hypersphere.recipes.classification import assemble
from hypersphere.recipes.graphs import ROTATIONS
from hypersphere.recipes.open_set import compare_unseen
from hypersphere.rotation import degrees_of_freedom


def the_row(recipe, name):
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
def test_a_small_run_gives_every_number_and_keeps_the_energy(recipe, name, overrides):
    settings = recipe.settings_of(the_row(recipe, name), {"epochs": 1, **overrides})
    outcome = recipe.run(settings, Trial(0))
    for metric in recipe.metrics:
        assert math.isfinite(outcome.metrics[metric.key]), metric.key
    first, last = outcome.curves["energy"]
    if recipe is not opt_studies.OMNIGLOT:  # whose hidden layers are trained plainly
        assert last == pytest.approx(first, rel=1e-4)


def test_the_printed_energies_are_those_of_the_half_space_summed_over_seven_layers():
    # for random directions the mean of 1/(1 − cos²) is (d−2)/(d−3); 64 neurons and their 64 mirror images
    def expected(d):
        return (128 * 126 / 2 * (d - 2) / (d - 3) + 128 / 4) / (128 * 127)

    by_hand = expected(27) + 5 * expected(576) + expected(1024)
    assert opt_studies.source_energy("he", 0.0, 0) == pytest.approx(by_hand, abs=1e-3)
    for row in opt_studies.INITIAL_ENERGY.rows:
        if "source_energy" in row.paper:
            mean = row.settings["model"]["init_mean"]
            assert opt_studies.source_energy("he", mean, 0) == pytest.approx(row.paper["source_energy"], abs=3e-3)


def test_class_vectors_that_only_turn_have_few_numbers():
    settings = opt_studies.OMNIGLOT.settings_of(the_row(opt_studies.OMNIGLOT, "CLS-OPT (CP)"), {})
    assert degrees_of_freedom(assemble(settings, Trial(0)).head) == 64 * 63 / 2


def test_features_that_are_their_classes_are_verified_and_identified():
    labels = torch.arange(20).repeat_interleave(20)
    found = compare_unseen(torch.eye(20)[labels], labels)
    assert found == {"accuracy": 100, "eer": 0, "tar": 100, "rank1": 100}


def test_a_ring_is_the_mean_at_its_distance():
    axis = torch.linspace(-1.5, 1.5, 301, dtype=torch.float64)
    bowl = Landscape(axis, axis, {"loss": axis[:, None].square() + axis.square()}, {"loss": 0.0})
    assert opt_studies.on_ring(bowl, "loss", 0.5) == pytest.approx(0.25, abs=1e-3)
    assert math.isnan(opt_studies.on_ring(bowl, "loss", 9.0))
