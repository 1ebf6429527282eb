"""Recipes of training by rotation: what they cover, the networks of the source at full size, data in their layouts."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hypersphere.data import DataSplit
from hypersphere.evaluation import Landscape
from hypersphere.recipes import RECIPES, execute, read_tensors, source_entries
from hypersphere.recipes.rotation import classes, economy, few_shot, graphs, landscape, networks, start
from hypersphere.rotation import degrees_of_freedom, rotated_layers
from hypersphere.training import build_experiment
from hypersphere.training.config import Component
from picture_files import encoded, pixels, write_tree

PART = [recipe for recipe in RECIPES.values() if recipe.part == "rotation"]
# Claims and theorems, with the tests that compute them.
COVERED_BY_TESTS = {
    "X-energy-invariance": "rotation/test_theory.py::test_one_rotation_of_all_neurons_keeps_the_energy",
    "X-gauss-uniform": "energy/test_theory.py::test_gaussian_rows_are_uniform_on_the_sphere",
    "X-sopt-invariance": "rotation/test_theory.py::test_rotating_any_p_dimensions_keeps_the_energy",
    "X-ls-nearest": "rotation/test_theory.py::test_lowdin_gives_the_nearest_orthogonal_matrix",
    "X-cp-so": "rotation/test_theory.py::test_cayley_reaches_rotations_without_reflection_only",
    "X-ogd-two-iterations": "rotation/test_theory.py::test_two_fixed_point_iterations_of_ogd_are_enough",
    "X-gs-mgs": "rotation/test_theory.py::test_classical_modified_and_iterative_gram_schmidt_agree_in_exact_arithmetic",
    "X-igs-steps": "rotation/test_theory.py::test_iterated_gram_schmidt_helps_in_low_precision_only",
    "X-neuron-norm-extreme": "rotation/test_theory.py::test_no_rotation_changes_the_norms_of_neurons",
    "X-param-count": "rotation/test_theory.py::"
    "test_a_rotated_layer_has_d_times_d_minus_one_over_two_degrees_of_freedom",
    "X-gopt": "rotation/test_theory.py::test_general_transforms_have_their_structure_and_do_not_keep_the_energy",
    "X-hole-radii": "energy/test_theory.py::test_facets_and_hole_radii_of_random_points_follow_the_asymptotics",
    "X-ch8": "recipes/test_rotation.py::test_the_conclusion_of_the_thesis_has_no_table_or_figure",
}


def outline(*shape, count=100):
    return {"shape": list(shape), "dtype": "uint8", "classes": [str(label) for label in range(count)]}


def built(recipe, row, *shape, count=100, **overrides):
    """Return the experiment of a row at full size, built for random data."""
    config = recipe.config(row, "paper", {"batch_size": 2, **overrides})
    return build_experiment(config, split=DataSplit.random_like(outline(*shape, count=count)))


# Coverage and printed numbers ----------------------------------------------------------------------------------------


def test_every_table_and_figure_is_covered_once_and_every_claim_by_a_test(request):
    entries = {name: entry for name, entry in source_entries().items() if entry.part == "rotation"}
    covered = [name for recipe in PART for name in recipe.covers]
    assert sorted(covered) == sorted(name for name, one in entries.items() if one.needs_recipe)
    assert set(COVERED_BY_TESTS) == {name for name in entries if name.startswith("X")}
    for place in COVERED_BY_TESTS.values():
        file, _, test = place.partition("::")
        assert f"def {test}(" in (request.config.rootpath / "tests" / file).read_text(encoding="utf-8")


def test_the_conclusion_of_the_thesis_has_no_table_or_figure():
    """Chapter 8 is listed so that the range of the sources is complete."""
    entries = source_entries()
    assert entries["X-ch8"].rows == {}
    assert [name for name in entries if name.startswith(("T8.", "F8."))] == []


def test_every_printed_number_has_a_row():
    """Apart from quoted rows, numbers that another table repeats, and counts of parameters, which are words."""
    places = {place for recipe in PART for row in recipe.rows for place in row.printed.values()}
    repeated = {
        ("T7.1", "Baseline | FN - | LR -"),  # table 7.4
        ("T7.1", "OPT | FN Y | LR GS"),
        ("O-T11", "p = d/4"),  # O-T10
        ("T-F.4", "c3/k = 64 (k = 1, original OPT)"),  # table F.5
        ("T-F.4", "Baseline"),
        ("T-F.4", "Baseline with fixed random neurons"),
        *(("O-T8", quoted) for quoted in ("MAML", "MatchingNet", "ProtoNet")),
    }
    for name in {name for recipe in PART for name in recipe.covers}:
        entry = source_entries()[name]
        for line, cells in entry.rows.items():
            if (name, line) in repeated:
                continue
            for column, cell in zip(entry.columns, cells, strict=True):
                place = (name, line, column) if len(entry.columns) > 1 else (name, line)
                # Columns of O-T6 are those of tables 7.3, 7.4 and 7.8, and baselines are printed once per method.
                is_repeated = (name == "O-T6" and line not in ("Orthogonal", "SRIP", "HS-MHE")) or (
                    line.startswith("Baseline") and name == "T-F.5"
                )
                is_repeated |= name == "O-T6" and line == "HS-MHE" and "CNN" in column
                if isinstance(cell, (int, float)) and not is_repeated:
                    assert place in places, place


@pytest.mark.parametrize("recipe", PART, ids=lambda recipe: recipe.name)
def test_rows_on_a_cpu_have_a_baseline_with_the_same_budget(recipe):
    rows = recipe.rows_at("cpu")
    names = {row.name for row in rows}
    assert recipe.rows_at("smoke")
    for row in rows:
        baseline = recipe.baseline_of(row)
        assert baseline is None or baseline.name in names
        assert len(recipe.trials(row)) == len(recipe.trials(rows[0]))
    assert recipe.claims
    for claim in recipe.claims:
        assert {claim.better, claim.than} <= names, claim.text
        assert claim.source in recipe.covers or not recipe.covers  # beyond the sources
        assert next(m for m in recipe.metrics if m.key == claim.metric).higher_is_better is not None
    assert len(recipe.seeds) >= 3


@pytest.mark.parametrize("recipe", PART, ids=lambda recipe: recipe.name)
def test_networks_on_a_cpu_are_small(recipe):
    """A row that names another network than its recipe must say how wide it is at each scale."""
    if recipe.compute is not None:
        pytest.skip("the recipe has no config of a network")
    for scale in ("cpu", "smoke"):
        for row in recipe.rows_at(scale):
            options = recipe.config(row, scale).model.options
            sizes = [*options.get("widths", ()), *options.get("per_point", ()), *options.get("hidden", ())]
            assert recipe.config(row, scale).model.name in ("gcn", "mlp") or 0 < max(sizes) <= 64, row.name


def test_the_fold_that_chooses_settings_is_not_tested():
    assert classes.FACES.tuning.seeds == (0,)
    assert set(classes.FACES.seeds) <= set(range(1, 10))
    trial = classes.FACES.config("Oracle, 512 dimensions", "cpu", seed=classes.FACES.tuning.seeds[0])
    assert trial.data.options["fold"] == 0


# The networks of the source ------------------------------------------------------------------------------------------

COUNTS = {  # tables 10 and 11 of the OPT paper, without biases and BatchNorm
    "Baseline, CNN-6": 257_984,
    "OPT (GS), CNN-6": 1_358_527,
    "S-OPT (GS), CNN-6": 90_871,
    "S-OPT (GS), Wide CNN-9": 1_035_799,
    "p = d/8": 277_979,
    "p = d/16": 88_741,
    "p = 16": 27_031,
    "p = 3": 25_978,
    "p = 0": 25_600,
}


@pytest.mark.parametrize("row", COUNTS)
def test_trained_numbers_at_full_size_are_those_that_the_source_prints(row):
    objective = built(economy.STOCHASTIC, row, 3, 32, 32).objective
    extra = sum(
        parameter.numel()
        for name, parameter in objective.named_parameters()
        if parameter.ndim == 1 and parameter.requires_grad and "parametrizations" not in name
    )
    assert degrees_of_freedom(objective) - extra == COUNTS[row]


@pytest.mark.parametrize(
    ("recipe", "row", "shape"),
    [
        (networks.CNN, "UPT, trained neurons, CNN-6", (3, 32, 32)),
        (networks.BARE, "OPT (OGD)", (3, 32, 32)),
        (networks.RESNET, "OPT (CP), ResNet-20", (3, 32, 32)),
        (economy.BLOCKS, "PE-OPT (GS), k = 64, shared", (3, 32, 32)),
        (economy.BLOCKS, "PE-OPT (OGD), k = 32", (3, 32, 32)),
        (few_shot.FEW_SHOT, "Baseline++ w/ OPT", (3, 84, 84)),
        (landscape.LANDSCAPE, "OPT (CP), CNN-9, uniform", (3, 32, 32)),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_rotated_networks_are_built_at_full_size(recipe, row, shape):
    experiment = built(recipe, row, *shape)
    inputs = torch.randint(256, (2, *shape), dtype=torch.uint8)
    assert experiment.network(inputs).isfinite().all()
    # The classifier is trained as usual.
    assert {name.partition(".")[0] for name, _, _ in rotated_layers(experiment.objective)} == {"network"}


def test_settings_of_the_source_at_full_size():
    config = networks.CNN.config("OPT (GS), CNN-9", "paper")
    assert (config.steps, config.batch_size, config.schedule.options["at"]) == (75_000, 128, [30_000, 50_000, 64_000])
    assert config.rotation.options == {"spread": 1.0}
    decays = {key: config.optimizer.options[key] for key in ("weight_decay", "rotation_decay", "decay_everything")}
    assert decays == {"weight_decay": 5e-4, "rotation_decay": 5e-4, "decay_everything": True}
    config = economy.STOCHASTIC.config("S-OPT (GS), CNN-6", "paper")
    assert config.steps == 300 * 750
    config = economy.STOCHASTIC.config("S-OPT (GS), ResNet-18", "paper")
    assert (config.steps, config.rotation.options["every"]) == (700_000, 1000)
    config = few_shot.FEW_SHOT.config("Baseline++", "paper")
    assert (config.epochs, config.optimizer.name, config.head.options) == (200, "adam", {"s": 2.0})


# Measurements --------------------------------------------------------------------------------------------------------


def test_source_energy_reproduces_the_printed_energies():
    # For random directions the mean of 1/(1 − cos²) is (d−2)/(d−3). There are 64 neurons and their 64 negatives.
    def expected(d):
        return (128 * 126 / 2 * (d - 2) / (d - 3) + 128 / 4) / (128 * 127)

    total = expected(27) + 5 * expected(576) + expected(1024)
    assert start.source_energy(Component("he"), 0) == pytest.approx(total, abs=1e-3)
    for row in start.INITIAL_ENERGY.rows:
        if "mean" in row.name and row.name.startswith("OPT"):
            computed = start.source_energy(start.INITIAL_ENERGY.config(row, "paper").init, 0)
            assert computed == pytest.approx(row.printed_numbers()["source_energy"], abs=7e-3)


def test_initial_energy_of_the_source_is_measured_with_the_mean_of_the_source(monkeypatch):
    row, seen = "OPT (CP), mean 5e-2", []
    monkeypatch.setattr(start, "source_energy", lambda init, *_: seen.append(init.options["mean"]) or 0.0)
    config = start.INITIAL_ENERGY.config(row, "cpu")
    assert config.init.options["mean"] == 0.1  # twice as large, for neurons of a quarter of the length
    lines = [{"kind": "validation", "step": 0, "epoch": 0, "accuracy": 0.1, "energy": {"hidden": 1.0}}]
    run, experiment = SimpleNamespace(metrics=lambda: lines), SimpleNamespace(config=config)
    start.measure_start(experiment, run, **start.INITIAL_ENERGY.settings(row, "cpu")["measure"])
    assert seen == [0.05]


def test_source_energy_falls_by_refinement():
    plain, refined = (start.source_energy(Component("he"), 0, one, 20) for one in (None, "half_space_mhe"))
    assert refined < plain - 1e-3


def test_neurons_of_plain_training_can_start_with_norm_one():
    config = networks.UNIT_NEURONS.config("Baseline, w/ Norm", "smoke")
    network = build_experiment(config).network
    layers = [module for module in network.modules() if isinstance(module, (torch.nn.Conv2d, torch.nn.Linear))]
    for layer in layers:
        norms = layer.weight.detach().flatten(1).norm(dim=1)
        torch.testing.assert_close(norms, torch.ones_like(norms))
        assert layer.weight.requires_grad


def test_rotated_class_vectors_have_the_degrees_of_freedom_of_a_rotation(smoke_folder):
    (record,) = execute(classes.FACES, smoke_folder, scale="smoke", rows=["CLS-OPT, 1024 dimensions"], seeds=[0])
    assert record.metrics["head_parameters"] == 8 * 7 / 2


def test_digits_are_stored_with_class_vectors_of_the_first_seed(tmp_path):
    record, other = execute(classes.DIGITS, tmp_path, scale="smoke", rows=["CLS-OPT"], seeds=[0, 1])
    tensors = read_tensors(tmp_path, record)
    assert tensors["features"].shape[1] == tensors["class_vectors"].shape[1] == 3
    torch.testing.assert_close(tensors["class_vectors"].norm(dim=1), torch.ones(10))
    assert read_tensors(tmp_path, other) == {}


def test_on_ring_is_the_mean_at_a_distance():
    axis = torch.linspace(-1.5, 1.5, 301, dtype=torch.float64)
    bowl = Landscape(axis, axis, {"loss": axis[:, None].square() + axis.square()}, {"loss": 0.0})
    assert landscape.on_ring(bowl, "loss", 0.5) == pytest.approx(0.25, abs=1e-3)
    assert math.isnan(landscape.on_ring(bowl, "loss", 9.0))


def test_landscape_has_the_training_loss_and_the_test_error(tmp_path):
    row = "Standard training, CNN-6, CIFAR-10, normal"
    overrides = {"measure.points": 3, "measure.images": 60, "epochs": 2}
    (record,) = execute(landscape.LANDSCAPE, tmp_path, scale="smoke", rows=[row], seeds=[0], overrides=overrides)
    tensors = read_tensors(tmp_path, record)
    assert tensors["landscape_loss"].shape == tensors["landscape_error"].shape == (3, 3)
    assert tensors["coordinates"].tolist() == [-1.5, 0, 1.5]
    assert float(tensors["landscape_loss"][1, 1]) == pytest.approx(record.metrics["loss_at_centre"], rel=1e-5)
    # All 60 training digits without augmentation, against the loss that training saw in its last epoch.
    assert record.metrics["loss_at_centre"] == pytest.approx(record.curves["loss"][-1], abs=0.7)


# Data that have to be brought along: a small tree in the layout of each ----------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "row", "tiny"),
    [
        (networks.IMAGENET, "OPT (CP)", {"model.image_size": 64, "model.widths": [4, 4, 4], "model.feature_dim": 8}),
        (classes.MANY_CLASSES, "CLS-OPT, ResNet-18A", {"model.depths": [1, 1], "model.widths": [4, 4]}),
        (economy.STOCHASTIC, "S-OPT (GS), ResNet-18", {"model.depths": [1, 1], "model.widths": [4, 4]}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_imagenet_rows_read_the_layout_of_imagenet(recipe, row, tiny, tmp_path):
    for part in ("train", "val"):
        write_tree(tmp_path / "imagenet" / part, {"n01": 2, "n02": 2}, size=(70, 80), kind="JPEG")
    overrides = {"data.size": 96, "steps": 1, "batch_size": 2, **tiny}
    options = {"scale": "paper", "seeds": [0], "overrides": overrides, "data_root": tmp_path}
    (record,) = execute(recipe, tmp_path / "out", rows=[row], **options)
    assert record.metrics["error"] is not None


def test_few_shot_rows_read_the_layout_of_mini_imagenet(tmp_path):
    for part in ("train", "test"):
        write_tree(tmp_path / "mini-imagenet" / part, {f"{part}{k}": 7 for k in range(5)}, size=(20, 20), kind="JPEG")
    overrides = {
        "data.size": 20,
        "epochs": 1,
        "model.widths": [4, 4, 4, 4],
        "measure.episodes": 2,
        "measure.queries": 2,
        "measure.epochs": 2,
    }
    options = {"scale": "paper", "seeds": [0], "overrides": overrides, "data_root": tmp_path}
    (record,) = execute(few_shot.FEW_SHOT, tmp_path / "out", rows=["Baseline++ w/ OPT"], **options)
    assert 0 <= record.metrics["5_shot"] <= 100


def test_point_cloud_rows_read_the_layout_of_modelnet40(tmp_path):
    base = tmp_path / "modelnet40_normal_resampled"
    base.mkdir()
    (base / "modelnet40_shape_names.txt").write_text("airplane\nnight_stand\n")
    for part, numbers in (("train", (1, 2)), ("test", (3,))):
        shapes = [f"{name}_{number:04d}" for name in ("airplane", "night_stand") for number in numbers]
        (base / f"modelnet40_{part}.txt").write_text("\n".join(shapes) + "\n")
        for shape in shapes:
            (base / shape.rpartition("_")[0]).mkdir(exist_ok=True)
            cloud = np.random.default_rng(len(shape)).normal(size=(40, 6))
            np.savetxt(base / shape.rpartition("_")[0] / f"{shape}.txt", cloud, delimiter=",", fmt="%.6f")
    overrides = {"data.points": 32, "epochs": 1, "model.per_point": [4, 4, 4, 8, 8], "model.hidden": [8, 8]}
    options = {"scale": "paper", "seeds": [0], "overrides": overrides, "data_root": tmp_path}
    (record,) = execute(graphs.GRAPHS_AND_POINTS, tmp_path / "out", rows=["OPT (GS), ModelNet"], **options)
    assert record.metrics["accuracy"] is not None


def test_face_rows_read_the_layouts_of_casia_webface_and_lfw(tmp_path, monkeypatch):
    from hypersphere.data.lfw import SHA256

    monkeypatch.setitem(SHA256, "pairs.txt", None)
    write_tree(tmp_path / "casia-webface", {"0000001": 2, "0000002": 2}, size=(16, 12))
    for person in ("A_A", "B_B"):
        (tmp_path / "lfw" / "lfw" / person).mkdir(parents=True)
        for number in (1, 2):
            (tmp_path / "lfw" / "lfw" / person / f"{person}_{number:04d}.jpg").write_bytes(encoded(pixels(number)))
    lines = ["2\t1", "A_A\t1\t2", "A_A\t1\tB_B\t2", "B_B\t1\t2", "B_B\t1\tA_A\t1"]
    (tmp_path / "lfw" / "pairs.txt").write_text("\n".join(lines) + "\n")
    overrides = {"data.size": [16, 16], "model.widths": [4, 4, 4, 4], "steps": 1, "batch_size": 4}
    options = {"scale": "paper", "seeds": [0], "overrides": overrides, "data_root": tmp_path}
    (record,) = execute(classes.FACES, tmp_path / "out", rows=["CLS-OPT, 512 dimensions"], **options)
    assert record.metrics["verification.accuracy"] is not None
    assert record.metrics["head_parameters"] == 512 * 511 / 2
