"""Recipes of the energy part: what they cover, what they measure, and the settings of the source at full size."""

import math

import numpy as np
import pytest
import torch

from hypersphere.data import DATA, DataSplit
from hypersphere.recipes import RECIPES, SCALES, execute, read_tensors, source_entries
from hypersphere.recipes.energy.classes import largest_gap
from hypersphere.recipes.energy.dynamics import summed_energy
from hypersphere.recipes.energy.flows import descend, flow
from hypersphere.recipes.energy.networks import layer_names
from hypersphere.recipes.energy.residual import colour_share
from hypersphere.training import build_experiment
from picture_files import encoded, pixels, write_tree

ENERGY = [recipe for recipe in RECIPES.values() if recipe.part == "energy"]
# Face experiments of these chapters are part of the objectives.
FACES = {"T5.8", "T5.9", "T5.10", "T-D.7", "T-D.8", "F-D.5", "F-D.6"}


def test_every_table_figure_and_claim_of_the_chapters_is_covered_once():
    ids = {name for name, entry in source_entries().items() if entry.part == "energy"} - FACES
    covered = [one for recipe in ENERGY for one in recipe.covers]
    assert sorted(covered) == sorted(ids)


@pytest.mark.parametrize("recipe", ENERGY, ids=lambda recipe: recipe.name)
def test_every_printed_number_of_a_covered_table_has_a_row(recipe):
    """Numbers that the source quotes from other papers, or prints again in another table, have no row."""
    quoted = (
        "ResNet-110",
        "ResNet-1001",
        "Weight clipping",
        "GAN-gradient",
        "WGAN",
        "Batch Norm",
        "Layer Norm",
        "Weight N",
    )
    repeated = {"T5.2", "T5.3", "T5.5", "T5.6", "X-E.8a", "X-E.8b"}  # in tables 6.4 to 6.7, and 6.2
    places = [place for row in recipe.rows for place in row.printed.values()]
    for source in set(recipe.covers) - repeated:
        entry = source_entries()[source]
        for line in entry.rows:
            if line.startswith(quoted) or (source, line) == ("T-E.4", "RP-CoMHE"):
                continue
            assert any(isinstance(place, tuple) and place[:2] == (source, line) for place in places), (source, line)


@pytest.mark.parametrize("recipe", ENERGY, ids=lambda recipe: recipe.name)
def test_every_recipe_runs_at_every_scale_with_a_plan(recipe):
    for scale in SCALES:
        rows = recipe.rows_at(scale)
        assert rows
        for row in rows:
            recipe.settings(row, scale)
    run = {row.name for row in recipe.rows_at("cpu")}
    for claim in recipe.claims:
        assert {claim.better, claim.than} <= run, claim.text
        assert next(m for m in recipe.metrics if m.key == claim.metric).higher_is_better is not None
    for row in recipe.rows_at("cpu"):
        baseline = recipe.baseline_of(row)
        assert baseline is None or baseline.name in run
        assert len(recipe.trials(row)) == len(recipe.trials(recipe.rows_at("cpu")[0]))
        for trial in recipe.trials(row):
            # A misspelt path would add an option instead of changing one.
            before, after = (recipe.config(row, "cpu", overrides) for overrides in ({}, trial))
            assert len(before.regularizers) == len(after.regularizers)
            for one, other in zip(before.regularizers, after.regularizers, strict=True):
                assert set(one.options) == set(other.options)
            assert set(before.optimizer.options) == set(after.optimizer.options)


PAPER_MODELS = {
    "T6.1": ("Baseline", 2_967_232),  # 2.99M of the OPT paper without the 25,600 numbers of the classifier
    "T6.4": ("Baseline, t=1", None),
    "T6.5": ("HS-MHE, CNN-15", None),
    "T6.6": ("RP-CoMHE, CIFAR-10", None),
    "F-E.2": ("rotation, CNN-9", None),
}


@pytest.mark.parametrize("name", PAPER_MODELS)
@pytest.mark.filterwarnings("ignore:not projected")
def test_networks_of_the_source_are_built_at_full_size(name):
    recipe = next(recipe for recipe in ENERGY if name in recipe.covers)
    row, count = PAPER_MODELS[name]
    split = DataSplit.random_like(
        {"shape": [3, 32, 32], "dtype": "uint8", "classes": [str(label) for label in range(100)]}
    )
    network = build_experiment(recipe.config(row, "paper"), split=split).network
    if count is not None:
        weights = [p for p in network.parameters() if p.ndim > 1]
        assert sum(p.numel() for p in weights) == count
    features = network(torch.rand(2, 3, 32, 32))
    assert torch.isfinite(features).all()


def test_schedule_of_the_source_is_in_steps():
    config = RECIPES["energy-cnn"].config("HS-MHE", "paper")
    assert (config.steps, config.batch_size, config.data.name) == (42_500, 128, "cifar100")
    assert config.schedule.options == {"at": [20_000, 30_000, 37_500], "unit": "steps"}
    assert config.optimizer.options == {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
    config = RECIPES["energy-pointnet"].config("Original, PN++", "paper")
    assert config.schedule.options["at"][:2] == [12_500, 25_000]
    assert (config.batch_size, config.epochs) == (16, 251)


def test_weights_of_the_source_are_those_of_the_rows():
    rows = {row.name: row.patch for row in RECIPES["energy-cnn"].rows}
    assert rows["MHE"] == {"regularizers": [{"name": "mhe", "half_space": False, "hidden": 10.0}]}
    assert rows["HS-MHE"] == {"regularizers": [{"name": "mhe", "hidden": 1.0}]}
    assert rows["Orthogonal"]["regularizers"][0]["weight"] == 1e-5
    assert rows["RP-CoMHE"]["regularizers"][0]["projection"] == {"name": "random"}
    assert RECIPES["energy-projections"].row("RP-CoMHE, dimension 30").patch["regularizers"][0]["projection"] == {
        "name": "random",
        "dim": 30,
        "views": 20,
    }


def test_imbalanced_data_have_the_printed_sizes():
    for row, sizes in (("MHE, Single", [10, *[100] * 9]), ("MHE, Multiple", [10 * (i + 1) for i in range(10)])):
        options = RECIPES["imbalance"].config(row, "paper").data.options
        split = DATA["digits"](None, **options)
        whole = torch.bincount(DATA["digits"](None).train.labels)
        left = torch.bincount(split.train.labels)
        assert (100 * left / whole).round().tolist() == pytest.approx(sizes, abs=1)
    options = RECIPES["imbalance-hundred"].config("MHE, Single", "paper").data.options
    assert options == {"keep": {str(label): 0.1 for label in range(10)}}


# --- data that have to be brought along: a small tree in the layout of each


@pytest.mark.parametrize("row", ["RP-CoMHE, Res-18", "Baseline, Res-50"])
@pytest.mark.filterwarnings("ignore:not projected")
def test_imagenet_rows_read_the_layout_of_imagenet(row, tmp_path):
    for part in ("train", "val"):
        write_tree(tmp_path / "imagenet" / part, {"n01": 2, "n02": 2}, size=(70, 80), kind="JPEG")
    tiny = {"data.size": 64, "steps": 1, "batch_size": 2, "model.depths": [1, 1], "model.widths": [4, 4]}
    recipe = RECIPES["energy-imagenet"]
    (record,) = execute(
        recipe, tmp_path / "out", scale="paper", rows=[row], seeds=[0], overrides=tiny, data_root=tmp_path
    )
    assert record.metrics["error"] is not None
    assert read_tensors(tmp_path / "out", record)["filters"].shape == (4, 3, 7, 7)


@pytest.mark.filterwarnings("ignore:not projected")
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
    records = execute(RECIPES["energy-pointnet"], tmp_path / "out", rows=["HS-MHE, PN", "AP-CoMHE, PN (T)"], **options)
    assert all(record.metrics["accuracy"] is not None for record in records)


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
    (record,) = execute(RECIPES["energy-am-softmax"], tmp_path / "out", rows=["AM-Softmax + MHE"], **options)
    assert record.metrics["verification.accuracy"] is not None


# --- flows


def test_flow_of_two_vectors_ends_opposite_or_perpendicular():
    options = {"count": 2, "dim": 2, "power": 2.0, "betas": [], "steps": 300, "rate": 0.03}
    full, half = (flow(3, penalty=penalty, **options).metrics for penalty in ("mhe", "half_space"))
    assert full["smallest_angle"] == pytest.approx(180, abs=1)
    assert half["smallest_angle"] == pytest.approx(90, abs=0.5)


def test_flow_starts_from_the_same_vectors_and_descends():
    options = {"count": 6, "dim": 3, "power": 1.0, "steps": 60, "rate": 0.002}
    plain = flow(1, penalty="mhe", betas=[], **options)
    heavy = flow(1, penalty="mhe", betas=[10.0], **options)
    assert torch.equal(plain.tensors["start"], heavy.tensors["start"])
    assert plain.curves["penalty"][-1] < plain.curves["penalty"][0]
    assert heavy.metrics["path"] < plain.metrics["path"]
    assert plain.tensors["frames"].shape == (51, 6, 3)
    torch.testing.assert_close(plain.tensors["points"].norm(dim=1), torch.ones(6, dtype=torch.float64))


def test_descend_measures_the_length_of_the_path_along_the_sphere():
    start = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    # The gradient of −y pulls the vector along a quarter of the circle.
    frames, values, path = descend(start, lambda w: -w[:, 1].sum(), steps=400, rate=0.1)
    torch.testing.assert_close(frames[-1], torch.tensor([[0.0, 1.0]], dtype=torch.float64), atol=1e-6, rtol=0)
    assert float(path[0]) == pytest.approx(math.pi / 2, abs=1e-6)
    assert values[-1] == pytest.approx(-1)


def test_descend_limits_the_steps_of_steep_penalties():
    start = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    frames, _, path = descend(start, lambda w: -1e6 * w[:, 1].sum(), steps=1, rate=0.01)
    assert float(path[0]) == pytest.approx(math.atan(0.1))  # a step of 10 · 0.01 along the tangent
    assert len(frames) == 2


# --- measurements


def test_largest_gap_of_even_directions_is_the_circle_divided_by_their_number():
    angles = 2 * math.pi * torch.arange(10) / 10 + 0.3
    vectors = torch.stack([angles.cos(), angles.sin()], 1) * torch.linspace(0.5, 3, 10)[:, None]
    assert largest_gap(vectors) == pytest.approx(36, abs=1e-3)
    assert largest_gap(vectors[:1]) == pytest.approx(360)


def test_colour_share_is_zero_for_grey_and_large_for_opposite_channels():
    grey = torch.randn(4, 1, 5, 5).expand(4, 3, 5, 5)
    assert colour_share(grey) == pytest.approx(0, abs=1e-6)
    opposite = torch.stack([grey[:, 0], -grey[:, 0]], 1)
    assert colour_share(opposite) == pytest.approx(1)


def test_layer_names_are_those_of_the_figure():
    energies = {f"stages.{3 * place}": 0.0 for place in range(9)} | {"feature": 0.0, "head": 0.0}
    assert list(layer_names(energies).values()) == [
        *(f"Conv{stage}.{number}" for stage in (1, 2, 3) for number in (1, 2, 3)),
        "fc1",
    ]


def test_summed_energy_of_right_angles_is_known():
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.eye(2))
    # Each of the four vectors ±e₁, ±e₂ has two others at the distance √2 and one at 2.
    assert summed_energy(layers) == pytest.approx(2 * (2 / math.sqrt(2) + 1 / 2) / 3, rel=1e-5)


@pytest.mark.filterwarnings("ignore:not projected")
def test_rotation_keeps_the_energy_through_training(tmp_path):
    """Figure E.1: orthogonal matrices keep all angles between neurons."""
    options = {"scale": "smoke", "rows": ["rotation, CNN-9, CIFAR-10", "baseline, CNN-9, CIFAR-10"], "seeds": [0]}
    rotated, plain = execute(RECIPES["energy-dynamics"], tmp_path, overrides={"optimizer.lr": 1.0}, **options)
    first, last = rotated.curves["energy"][0], rotated.curves["energy"][-1]
    assert last == pytest.approx(first, rel=1e-4)
    assert plain.curves["energy"][-1] != pytest.approx(plain.curves["energy"][0], rel=1e-3)


def test_layer_energies_are_curves(smoke_folder):
    (record,) = execute(RECIPES["energy-cnn"], smoke_folder, scale="smoke", rows=["HS-MHE"], seeds=[0])
    curves = [record.curves[f"energy of {name}"] for name in ("Conv1.1", "Conv3.3", "fc1")]
    assert [len(curve) for curve in curves] == [2, 2, 2]
    layers = [values for name, values in record.curves.items() if name.startswith("energy of")]
    assert len(layers) == 10
    assert sum(values[-1] for values in layers) / 10 == pytest.approx(record.metrics["energy"], rel=1e-5)


def test_times_of_the_source_are_ratios_to_its_baseline():
    printed = RECIPES["energy-times"].printed
    assert printed["Baseline"]["ratio"] == 1
    assert printed["Group CoMHE"]["ratio"] == pytest.approx(1.98, abs=0.01)


# --- generation


def probabilities(images):
    """An imported classifier: certain of class 0 for dark images and of class 1 for bright ones."""
    bright = (images.flatten(1).mean(1) > 0.5).float()
    return torch.stack([1 - bright, bright], 1)


def test_classifier_of_the_inception_score_can_be_imported(tmp_path):
    overrides = {"measure.classifier": f"{__name__}:probabilities"}
    options = {"scale": "smoke", "rows": ["Real data", "MHE + SN"], "seeds": [0], "overrides": overrides}
    real, generated = execute(RECIPES["energy-gan"], tmp_path, **options)
    assert 1 <= real.metrics["score"] <= 2
    assert 1 <= generated.metrics["score"] <= 2
    assert generated.metrics["energy"] > 0
    assert len(generated.curves["generator_loss"]) == 2
