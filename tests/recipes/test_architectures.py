"""Recipes of sphere and decoupled networks: function plots, networks of the tables, measurements, ImageNet's layout."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from hypersphere.data import DataSplit
from hypersphere.layers import DecoupledConv2d, DecoupledLayer, SphereNorm
from hypersphere.models import MODELS, Embedder
from hypersphere.recipes import RECIPES, Outcome, execute, find_recipe, read_tensors, source_entries
from hypersphere.recipes.architectures import attacks, cifar, functions, imagenet, spherenet
from hypersphere.recipes.recipe import Row
from hypersphere.robustness import accuracy_under
from hypersphere.training import build_experiment
from hypersphere.training.components import MENUS, create
from hypersphere.training.network import build_body
from picture_files import write_tree

PART = [recipe for recipe in RECIPES.values() if recipe.part == "architectures"]
# Claims and theorems, with the tests that compute them.
COVERED_BY_TESTS = {
    "X3.1": "layers/test_theory.py::test_linear_layer_condition_number_grows_at_least_as_the_squared_scale",
    "X3.2": "layers/test_theory.py::"
    "test_cosine_layer_condition_number_grows_with_the_scale_unless_rows_are_renormalised",
    "X3.3": "heads/test_theory.py::test_sphere_normalised_softmax_needs_a_scale",
    "X3.4": "evaluation/test_theory.py::test_images_are_recognised_by_fourier_phases_and_not_by_magnitudes",
    "X-C.7": "optim/test_projection.py::test_angle_of_an_update_depends_on_the_norm_unless_weights_are_projected",
}
CIFAR_OUTLINE = {"shape": [3, 32, 32], "dtype": "uint8", "classes": [str(label) for label in range(10)]}


def built(recipe, row, scale="paper", outline=None, **overrides):
    """Return the network of a row, built for random data."""
    config = recipe.config(row, scale, overrides)
    outline = outline or CIFAR_OUTLINE
    return build_experiment(config, split=DataSplit.random_like(outline)).network


def decoupled_layers(network):
    return [module for module in network.modules() if isinstance(module, DecoupledLayer)]


# Coverage and printed numbers ----------------------------------------------------------------------------------------


def test_every_table_and_figure_is_covered_once_and_every_claim_by_a_test(request):
    entries = {name: entry for name, entry in source_entries().items() if entry.part == "architectures"}
    covered = [name for recipe in PART for name in recipe.covers]
    # F4.1 is figure 1.3, which a recipe of the objectives covers.
    assert sorted(covered) == sorted({name for name, one in entries.items() if one.needs_recipe} - {"F4.1"})
    assert set(COVERED_BY_TESTS) == {name for name in entries if name.startswith("X")}
    for place in COVERED_BY_TESTS.values():
        file, _, test = place.partition("::")
        assert f"def {test}(" in (request.config.rootpath / "tests" / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("recipe", PART, ids=lambda recipe: recipe.name)
def test_every_printed_number_is_that_of_its_row_and_column(recipe):
    for row in recipe.rows:
        for place in row.printed.values():
            assert isinstance(place, tuple)
            if recipe.name not in ("learned-parameters", "decoupled-norms", "attacks"):  # rows with other names
                line = place[1].removesuffix(" Baseline") if "ResNet Baseline" in place[1] else place[1]
                assert line in row.name
                assert len(place) < 3 or place[2] in row.name or "Baseline" in row.name
        row.printed_numbers()


@pytest.mark.parametrize(
    "name", ["T3.1", "T3.2", "T3.3", "T4.1", "T4.2", "T4.3", "T4.4", "T-C.2", "T4.6", "T4.7", "T4.8"]
)
def test_every_number_of_a_table_belongs_to_one_row(name):
    recipe, entry = find_recipe(name), source_entries()[name]
    printed = [place for row in recipe.rows for place in row.printed.values() if place[0] == name]
    assert len(set(printed)) == len(printed)
    numbers = sum(isinstance(cell, (int, float)) for cells in entry.rows.values() for cell in cells)
    if name == "T4.8":  # its accuracies without attack are those of table 4.7
        numbers -= 8
    assert sum(row.printed_numbers() != {} for row in recipe.rows) > 0
    assert len([place for place in printed if cell_of(entry, place) is not None]) == numbers


def cell_of(entry, place):
    cells = entry.rows[place[1]]
    return cells[0] if len(place) == 2 else cells[list(entry.columns).index(place[2])]


@pytest.mark.parametrize("recipe", [one for one in PART if one.compute is None], ids=lambda recipe: recipe.name)
def test_rows_on_a_cpu_have_a_baseline_with_the_same_budget(recipe):
    rows = recipe.rows_at("cpu")
    assert rows
    assert recipe.rows_at("smoke")
    assert len(recipe.rows_at("paper")) == len(recipe.rows)
    names = {row.name for row in rows}
    for row in rows:
        baseline = recipe.baseline_of(row)
        assert baseline is None or baseline.name in names
    for claim in recipe.claims:
        assert {claim.better, claim.than} <= names
        assert claim.source in recipe.covers
    assert len(recipe.seeds) >= 3


# Function plots ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0.1, 0.3, 0.7])
def test_sigmoid_curve_is_the_formula_of_the_source(k):
    curve = functions.draw_angular(181, "sigmoid", k=k).curves["response"]
    theta = np.linspace(0, np.pi, 181)
    height = (1 + np.exp(-np.pi / (2 * k))) / (1 - np.exp(-np.pi / (2 * k)))
    exponential = np.exp(theta / k - np.pi / (2 * k))
    assert np.allclose(curve, height * (1 - exponential) / (1 + exponential))


@pytest.mark.parametrize("row", functions.SPHERE_FUNCTIONS.rows, ids=lambda row: row.name)
def test_angular_functions_fall_from_one_to_minus_one(row, tmp_path):
    (record,) = execute(functions.SPHERE_FUNCTIONS, tmp_path, rows=[row.name])
    curve = record.curves["response"]
    assert [record.metrics[key] for key in ("at_zero", "at_right_angle", "at_pi")] == pytest.approx(
        [1, 0, -1], abs=1e-9
    )
    assert all(after <= before for before, after in pairwise(curve))
    assert len(curve) == 181


@pytest.mark.parametrize(
    ("name", "at_one", "at_three"),
    [
        ("SphereConv", 1.0, 1.0),
        ("BallConv", 1.0, 1.0),
        ("TanhConv", math.tanh(1), math.tanh(3)),
        ("LinearConv", 1.0, 3.0),
        ("SegConv", 1.0, 2.0),
        ("LogConv", math.log(2), math.log(4)),
        ("MixConv", 1 + math.log(2), 3 + math.log(4)),
    ],
)
def test_magnitudes_have_the_constants_of_the_source(name, at_one, at_three):
    metrics = functions.draw_magnitude(181, cifar.MAGNITUDES[name]).metrics
    assert (metrics["at_one"], metrics["at_three"]) == pytest.approx((at_one, at_three))


# Networks of the tables ----------------------------------------------------------------------------------------------


def test_spherenet_of_the_source_has_operators_in_all_layers_and_a_normalised_feature():
    network = built(spherenet.LOSSES, "Cosine, Original Softmax", **{"model.widths": [4, 4, 4]})
    layers = decoupled_layers(network)
    assert [layer.weight.ndim for layer in layers] == [4] * 9 + [2]
    assert isinstance(network.body, Embedder)
    assert isinstance(network.body.neck[-1], nn.BatchNorm1d)
    baseline = built(spherenet.LOSSES, "Original Conv, Original Softmax", **{"model.widths": [4, 4, 4]})
    assert not decoupled_layers(baseline)
    assert isinstance(baseline.body.neck[-1], nn.BatchNorm1d)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("T3.2", "Cosine, ResNet-32"),
        ("T3.4", "SphereResNet-32 (C-CW), CIFAR-10+"),
        ("T4.1", "weight projection"),
        ("T4.4", "SegConv, Cosine, Adam"),
    ],
)
def test_shortcuts_of_residual_networks_are_ordinary(name, row):
    overrides = {"model.widths": [4, 8, 16], "model.depths": [1, 1, 1]}
    network = built(find_recipe(name), row, **overrides)
    plain = [m for m in network.modules() if isinstance(m, nn.Conv2d) and not isinstance(m, DecoupledConv2d)]
    assert [layer.kernel_size for layer in plain] == [(1, 1), (1, 1)]
    assert len(decoupled_layers(network)) == 7


def test_first_version_of_sphereresnet_has_operators_in_its_shortcuts():
    # The recipe cuts windows of images that are larger than those of CIFAR.
    overrides, outline = {"model.widths": [4, 8, 12, 16]}, {**CIFAR_OUTLINE, "shape": [3, 64, 64]}
    first, second = (
        decoupled_layers(built(imagenet.SPHERE, f"SphereResNet-18-v{version}", outline=outline, **overrides))
        for version in (1, 2)
    )
    assert len(first) - len(second) == 3
    assert all(layer.kernel_size != (1, 1) for layer in second)


@pytest.mark.parametrize("name", ["SphereNorm", "Rescaled SphereNorm", "SphereNorm w/ Orth.", "SphereNorm+BatchNorm"])
def test_sphere_norm_replaces_or_precedes_batch_norm(name):
    network = built(spherenet.SMALL_BATCHES, f"{name}, batch 4", **{"model.widths": [4, 4, 4]})
    norms = [module for module in network.modules() if isinstance(module, SphereNorm)]
    assert len(norms) == 9
    assert {norm.rescale for norm in norms} == {"learned" if name.startswith("Rescaled") else None}
    batch_norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(batch_norms) == (9 if "BatchNorm" in name else 0)


def test_attacked_networks_have_no_normalisation_and_learned_radii():
    for row in attacks.ATTACKS.rows:
        network = built(attacks.ATTACKS, row, **{"model.widths": [4, 4, 4]})
        assert not [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
        radii = {layer.log_radius is not None for layer in decoupled_layers(network)}
        has_radius = row.name.startswith(("Ball", "Tanh"))
        assert radii == (set() if row.name.startswith("Baseline") else {has_radius})


# Rows at scales ------------------------------------------------------------------------------------------------------


def test_with_settings_at_merges_settings_of_a_scale():
    row = Row("a", at={"cpu": {"model": {"name": "mlp", "norm": "none"}}})
    changed = cifar.with_settings_at(row, cpu={"model": {"widths": [4]}}, paper={"epochs": 3})
    assert changed.at == {"cpu": {"model": {"name": "mlp", "norm": "none", "widths": [4]}}, "paper": {"epochs": 3}}
    assert row.at["cpu"]["model"] == {"name": "mlp", "norm": "none"}


# Measurements --------------------------------------------------------------------------------------------------------


def test_transferred_attacks_use_another_network_and_deepfool_stores_perturbations(tmp_path, monkeypatch):
    calls = []

    def recorded(*arguments, source=None):
        calls.append((arguments[0], source))
        return accuracy_under(*arguments, source=source)

    monkeypatch.setattr(attacks, "accuracy_under", recorded)
    (record,) = execute(attacks.ATTACKS, tmp_path, scale="smoke", rows=["Baseline"], seeds=[0])
    victim, source = calls[-1]
    pairs = zip(victim.parameters(), source.parameters(), strict=True)
    assert not any(torch.equal(a, b) for a, b in pairs if a.dim() > 1)
    tensors = read_tensors(tmp_path, record)
    assert {name: len(values) for name, values in tensors.items()} == {"deepfool_l2": 5, "deepfool_linf": 5}
    assert tensors["deepfool_linf"].max() <= 1


def test_trials_are_not_attacked():
    config = attacks.ATTACKS.config("Baseline", "smoke", {"selection": 0.2})
    experiment = build_experiment(config)
    assert attacks.measure(experiment, None, **attacks.ATTACKS.settings("Baseline", "smoke")["measure"]) == Outcome()


def test_filter_statistics_of_equal_entries_and_of_parallel_filters():
    spread = imagenet.filter_statistics(torch.ones(4, 3, 2, 2))
    assert spread == {"sparsity": pytest.approx(0, abs=1e-12), "correlation": pytest.approx(1)}
    random = imagenet.filter_statistics(torch.randn(64, 3, 7, 7, generator=torch.Generator().manual_seed(0)))
    dim = 147
    assert random["correlation"] == pytest.approx(math.sqrt(2 / (math.pi * dim)), rel=0.05)
    # ‖w‖₁/‖w‖₂ of a random vector is about √(2d/π).
    expected = (math.sqrt(dim) - math.sqrt(2 * dim / math.pi)) / (math.sqrt(dim) - 1)
    assert random["sparsity"] == pytest.approx(expected, rel=0.05)


def test_first_layers_of_stages_are_those_of_the_figure(smoke_folder):
    (record,) = execute(spherenet.LEARNED, smoke_folder, scale="smoke", rows=["a learned k per filter"], seeds=[0])
    tensors = read_tensors(smoke_folder, record)
    assert {name for name in tensors if name.startswith("k_")} == {"k_conv1.1", "k_conv2.1", "k_conv3.1"}
    assert len(tensors["k"]) == 9 * 4
    assert torch.equal(tensors["k_conv2.1"], tensors["k"][12:16])
    assert record.metrics["k_conv3.1_mean"] == pytest.approx(float(tensors["k"][24:28].mean()))


# ImageNet ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [imagenet.SPHERE, imagenet.DECOUPLED, imagenet.FILTERS], ids=lambda one: one.name)
def test_imagenet_recipes_read_the_layout_of_imagenet(recipe, tmp_path):
    write_tree(tmp_path / "imagenet" / "train", {"n01": 3, "n02": 3}, size=(40, 60), kind="JPEG")
    write_tree(tmp_path / "imagenet" / "val", {"n01": 2, "n02": 1}, size=(60, 40), kind="JPEG")
    # The settings of the source, apart from the size of images and network and from the number of steps.
    small = {"data.size": 40, "data.margin": 8, "augment.window.margin": 8, "model.widths": [4, 4, 4, 4]}
    small |= {"steps": 2, "batch_size": 3}
    row = recipe.rows[1].name
    (record,) = execute(recipe, tmp_path, scale="paper", rows=[row], seeds=[0], overrides=small, data_root=tmp_path)
    assert record.metrics["diverged"] == 0
    assert record.config["data"]["fit"] == "stretch"
    assert len(record.curves["error"]) == 2
    if recipe is not imagenet.FILTERS:
        assert record.metrics["top5_error"] == 0  # there are two classes
        assert record.curves["top5_error"] == [0, 0]


def test_top5_curve_is_measured_at_each_validation(tmp_path):
    options = {"scale": "smoke", "rows": ["ResNet-18"], "seeds": [0]}
    (record,) = execute(imagenet.SPHERE, tmp_path, **options, overrides={"epochs": 2})
    assert len(record.curves["top5_error"]) == len(record.curves["error"]) == 3
    assert all(top <= one for top, one in zip(record.curves["top5_error"], record.curves["error"], strict=True))


# Networks at the size of the source ----------------------------------------------------------------------------------

SHAPES = {"cifar10": (3, 32, 32), "cifar100": (3, 32, 32), "imagenet": (3, 256, 256), "mnist": (1, 28, 28)}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [one for one in PART if one.compute is None], ids=lambda recipe: recipe.name)
def test_networks_of_the_source_can_be_built(recipe):
    different = {}  # networks whose operators differ only in their functions are built once
    for row in recipe.rows:
        config = recipe.config(row, "paper")
        kind = config.operator.name if config.operator.name in ("none", "sphere_norm") else "decoupled"
        key = (config.model, kind, config.operator.options.get("layers"), config.embedding, config.data.name)
        different.setdefault(str(key), config)
    for config in different.values():
        shape = SHAPES[config.data.name]
        with torch.device("meta"):  # no memory is allocated
            operator, _ = MENUS["operator"].split(config.operator)
            body = build_body(config, create(operator, "operator"), shape, None)
        assert body.feature_dim >= 2
        assert bool(decoupled_layers(body)) == (config.operator.name != "none")


def test_networks_of_the_source_have_its_widths():
    def widths(name, row):
        model = find_recipe(name).config(row, "paper").model
        network = MODELS[model.name]
        return network.keywords["widths"]

    assert widths("T3.1", "Cosine, Original Softmax") == (64, 96, 128)
    assert widths("T3.2", "Cosine, ResNet-32") == (64, 96, 128)
    assert widths("T3.4", "SphereResNet-32 (S-G), CIFAR-100") == (96, 192, 384)
    assert widths("F3.6", "SphereResNet-18-v1") == (256, 512, 768, 1024)
    assert widths("T4.2", "CNN Baseline") == (64, 128, 256)
    assert widths("T4.4", "SegConv, Linear, Adam") == (96, 192, 384)
    assert widths("T4.7", "Baseline") == (32, 64, 128)
    assert widths("F-C.2", "CNN") == (32, 64, 128)
