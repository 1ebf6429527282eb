"""Recipes of margins and faces: what they cover, networks at full size, face data in their layouts, measurements."""

import json
import math
from functools import reduce
from operator import getitem

import pytest
import torch
from torch import nn

from hypersphere.data import DataSplit, TensorSource
from hypersphere.recipes import RECIPES, SCALES, execute, read_tensors, source_entries
from hypersphere.recipes.face_protocol import measure_faces
from hypersphere.recipes.objectives import (
    angles,
    classification,
    faces,
    features,
    open_set,
    sphereface_plus,
)
from hypersphere.training import build_experiment
from picture_files import encoded, pixels, write_tree

PART = [recipe for recipe in RECIPES.values() if recipe.part == "objectives"]
# Face experiments of the chapters on energy.
FACES_OF_ENERGY = {"T5.8", "T5.9", "T5.10", "T-D.7", "T-D.8", "F-D.5", "F-D.6"}
# Claims and theorems, with the tests that compute them.
COVERED_BY_TESTS = {
    "X1.1": "evaluation/test_theory.py::test_random_vectors_become_orthogonal_and_distances_depend_on_norms",
    "X-PartI": "heads/test_theory.py::test_target_score_is_at_most_the_cosine",
    "X2.1": "evaluation/test_theory.py::test_smallest_margin_of_two_classes_is_two_plus_root_three",
    "X-A.7": "heads/test_theory.py::test_annealed_loss_mixes_plain_and_margin_scores",
}
FACE_RECIPES = [
    faces.LFW,
    faces.DEPTH,
    faces.LOSSES,
    faces.ABLATION,
    sphereface_plus.PLUS,
    sphereface_plus.TRAINING_SETS,
]


def outline(*shape, classes=10):
    return {"shape": list(shape), "dtype": "uint8", "classes": [str(label) for label in range(classes)]}


# Coverage and printed numbers ----------------------------------------------------------------------------------------


def test_every_table_and_figure_is_covered_once_and_every_claim_by_a_test(request):
    entries = {name: entry for name, entry in source_entries().items() if entry.part == "objectives"}
    covered = [name for recipe in PART for name in recipe.covers]
    # F4.1 is figure 1.3 again.
    expected = {name for name, one in entries.items() if one.needs_recipe} | FACES_OF_ENERGY | {"F4.1"}
    assert sorted(covered) == sorted(expected)
    claims = {name for name, one in entries.items() if not one.needs_recipe}
    assert set(COVERED_BY_TESTS) == {name for name in claims if name.startswith("X")}
    for place in COVERED_BY_TESTS.values():
        file, _, test = place.partition("::")
        assert f"def {test}(" in (request.config.rootpath / "tests" / file).read_text()


@pytest.mark.parametrize("recipe", PART, ids=lambda recipe: recipe.name)
def test_every_printed_number_of_a_covered_table_has_a_row(recipe):
    """Rows that cite other papers, and one ensemble whose patches are not printed, are not run."""
    places = [place for row in recipe.rows for place in row.printed.values()]
    cited = (
        "[4",
        "[5",
        "[67]",
        "[74]",
        "FaceNet",
        "Center Face",
        "Liu et al.",
        "NTech",
        "Vocord",
        "Deepsense",
        "ResNet",
    )
    cited += ("Shanghai", "Google", "Beijing", "SIAT", "Barebones", "3DiVi", "3-patch", "outside")
    for source in set(recipe.covers) - {"T5.10"}:  # repeats tables 2.9 and 2.10, except for two rows
        for line in source_entries()[source].rows:
            if not any(word in line for word in cited):
                assert any(place[:2] == (source, line) for place in places), (source, line)


def test_printed_numbers_of_rows_are_those_of_the_tables():
    assert faces.LFW.printed["m=4"] == {"accuracy": 99.42, "ytf": 95.0}
    assert faces.LOSSES.printed["SphereFace"] == {"accuracy": 99.42, "ytf": 95.0, "rank1": 72.729, "tar": 85.561}
    assert faces.LOSSES.printed["SphereFace+"] == {"accuracy": 99.47, "rank1": 73.03}
    assert faces.ABLATION.printed["G"] == {"accuracy": 98.20, "fisher": 0.1709}
    assert faces.DEPTH.printed["Softmax, 10 layers"] == {}
    assert faces.DEPTH.printed["Softmax, 64 layers"]["tar"] == 65.925
    assert classification.CIFAR10.printed["Hinge Loss, CIFAR10+"] == {"error": 6.96}
    assert sphereface_plus.PLUS.printed["SphereFace+, m=1, 20 layers"] == {
        "accuracy": 97.15,
        "rank1": 45.9,
        "tar": 52.02,
    }
    assert sphereface_plus.TRAINING_SETS.printed["MS-Celeb SphereFace+"] == {"accuracy": 99.5, "rank1": 74.16}


@pytest.mark.parametrize("recipe", PART, ids=lambda recipe: recipe.name)
def test_trials_are_settings_of_their_rows(recipe):
    for scale in SCALES:
        for row in recipe.rows:
            for trial in recipe.trials(row, scale):
                settings = recipe.settings(row, scale, trial)
                for path, value in trial.items():
                    assert reduce(getitem, path.split("."), settings) == value, (row.name, path)


# Networks and schedules of the sources -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "row", "shape", "convolutions", "feature_dim"),
    [
        (classification.MNIST, "Softmax", (1, 28, 28), 10, 256),
        (classification.CIFAR10, "Softmax, CIFAR10+", (3, 32, 32), 13, 256),
        (classification.CIFAR100, "Hinge Loss", (3, 32, 32), 13, 512),
        (features.MNIST, "L-Softmax (m=4)", (1, 28, 28), 6, 2),
        (features.FACES, "six people, m=4", (3, 112, 96), 20, 3),
        (faces.L_SOFTMAX, "Softmax + Contrastive", (3, 112, 96), 17, 512),
        (faces.LFW, "m=3", (3, 112, 96), 64, 512),
        (faces.DEPTH, "A-Softmax (m=4), 36 layers", (3, 112, 96), 36, 512),
        (faces.ABLATION, "A", (3, 112, 96), 4, 512),
        (sphereface_plus.PLUS, "SphereFace+, m=4, 20 layers", (3, 112, 96), 20, 512),
        (sphereface_plus.PLUS, "SphereFace, m=2, 64 layers", (3, 112, 96), 64, 512),
    ],
)
def test_networks_at_full_size_are_those_of_the_tables(recipe, row, shape, convolutions, feature_dim):
    experiment = build_experiment(recipe.config(row, "paper"), split=DataSplit.random_like(outline(*shape)))
    layers = [module for module in experiment.network.modules() if isinstance(module, nn.Conv2d)]
    assert (len(layers), experiment.network.feature_dim) == (convolutions, feature_dim)


def test_classification_follows_the_schedule_of_section_2_2_7():
    config = classification.CIFAR10.config("L-Softmax (m=4), CIFAR10+", "paper")
    assert (config.steps, config.batch_size) == (18_000, 256)
    assert config.schedule.options["at"] == [12_000, 15_000]
    assert config.head.options["annealing"]["end"] == 0
    assert [one.name for one in config.augment] == ["shift", "mirror"]
    assert not classification.CIFAR10.config("Softmax, CIFAR10", "paper").augment


def test_annealing_of_small_experiments_has_the_shape_of_the_source():
    experiment = build_experiment(
        classification.MNIST.config("L-Softmax (m=4)", "cpu", {"steps": 1580}),
        split=DataSplit.random_like(outline(1, 14, 14)),
    )
    source = build_experiment(
        classification.MNIST.config("L-Softmax (m=4)", "paper"), split=DataSplit.random_like(outline(1, 28, 28))
    )
    for part in (0.1, 0.5, 0.9):
        small, large = (one.head.annealing(torch.tensor(part * one.steps)) for one in (experiment, source))
        torch.testing.assert_close(small, large)


def test_sphereface_plus_has_two_stages_with_the_same_schedule():
    plain, plus = (
        build_experiment(
            sphereface_plus.PLUS.config(f"{name}, m=4, 20 layers", "paper", {"model.widths": [4, 4, 4, 4]}),
            split=DataSplit.random_like(outline(3, 112, 96)),
        )
        for name in ("SphereFace", "SphereFace+")
    )
    assert plain.config.schedule == plus.config.schedule
    rates = [plus.scheduler.schedule(step / plus.steps) for step in (0, 20_000, 26_000, 30_000, 33_000, 35_000)]
    assert rates == pytest.approx([1, 0.1, 0.01, 0.1, 0.01, 0.001])
    assert (plus.head.energy_start, plus.head.energy_weight) == (28_000, 10.0)
    assert sphereface_plus.PLUS.config("SphereFace+, m=1, 64 layers", "paper").head.options["energy_weight"] == 5.3


def test_faces_of_seed_k_are_those_of_fold_k():
    config = faces.LFW.config("Original softmax", "cpu", seed=2)
    assert config.data.options["fold"] == 2
    assert config.optimizer.options["decay_everything"]
    for recipe in (*FACE_RECIPES, faces.L_SOFTMAX):
        folds = {*recipe.seeds, *(recipe.tuning.seeds if recipe.tuning else ())}
        assert folds <= set(range(10))
        assert 0 not in recipe.seeds  # the settings were chosen with it


def test_open_set_heads_accept_ramps_and_annealing_as_settings():
    overrides = {"head.ramp": {"steps": 400}}
    experiment = build_experiment(open_set.OMNIGLOT.config("ArcFace (s=30, m=0.5)", "smoke", overrides))
    assert experiment.head.ramp.steps == 400
    experiment = build_experiment(open_set.OMNIGLOT.config("A-Softmax (m=4)", "smoke", {"head.annealing.gamma": 0.3}))
    assert (experiment.head.annealing.gamma, experiment.head.annealing.start) == (0.3, 1000)


# Face data in their layouts ------------------------------------------------------------------------------------------


@pytest.fixture
def face_root(tmp_path, monkeypatch):
    """Return a folder with small trees of CASIA-WebFace, IMDb-Face, MS-Celeb, LFW, YTF and MegaFace."""
    from hypersphere.data import face_benchmarks
    from hypersphere.data.lfw import SHA256

    for name in ("casia-webface", "imdb-face", "ms-celeb"):
        write_tree(tmp_path / name, {f"{number:03d}": 4 for number in range(6)})
    people = ["A_A", "B_B", "C_C", "D_D"]
    for at, person in enumerate(people):
        (tmp_path / "lfw" / "lfw" / person).mkdir(parents=True)
        for number in (1, 2):
            file = tmp_path / "lfw" / "lfw" / person / f"{person}_{number:04d}.jpg"
            file.write_bytes(encoded(pixels(10 * at + number)))
    same = [f"{person}\t1\t2" for person in people]
    different = [f"{first}\t1\t{second}\t2" for first, second in zip(people, people[1:] + people[:1], strict=True)]
    lines = ["2\t2", *same[:2], *different[:2], *same[2:], *different[2:]]
    (tmp_path / "lfw" / "pairs.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.setitem(SHA256, "pairs.txt", None)
    for person in people:
        write_tree(tmp_path / "ytf" / "aligned_images_DB" / person, {"0": 2, "1": 1})
    videos = [
        f"{fold}, {at}, {a}/0, {b}/1, {int(a == b)}"
        for fold, at, a, b in [(1, 1, "A_A", "A_A"), (1, 2, "A_A", "B_B"), (2, 1, "C_C", "C_C"), (2, 2, "C_C", "D_D")]
    ]
    (tmp_path / "ytf" / "splits.txt").write_text("\n".join(videos))
    probes = [f"{person}/{number:03d}.png" for person in ("Ann", "Bob") for number in range(3)]
    write_tree(tmp_path / "megaface" / "facescrub_images", {"Ann": 3, "Bob": 3})
    written = write_tree(tmp_path / "megaface" / "megaface_images", {"1": 120})
    lists = tmp_path / "megaface" / "templatelists"
    lists.mkdir()
    (lists / "facescrub_features_list.json").write_text(json.dumps({"path": probes}))
    (lists / "megaface_features_list.json_1000000_1").write_text(json.dumps({"path": list(written)}))
    assert face_benchmarks.FACE_SIZE == (112, 96)
    return tmp_path


SMALL = {"data.size": [16, 16], "batch_size": 12, "epochs": 1, "model.widths": [4, 4, 4, 4], "model.feature_dim": 6}


@pytest.mark.parametrize("recipe", FACE_RECIPES, ids=lambda recipe: recipe.name)
def test_face_recipes_run_on_the_layouts_of_the_paper_scale(recipe, face_root, tmp_path):
    """Two rows per recipe: the first one, and the last one, with the measurements of the source."""
    overrides = {**SMALL, "model.units": [0, 0, 0, 0], "measure.far": 0.01, "schedule": "constant"}
    names = [recipe.rows[0].name, recipe.rows[-1].name]
    records = execute(
        recipe, tmp_path / "out", scale="paper", rows=names, seeds=[0], overrides=overrides, data_root=face_root
    )
    for record in records:
        assert record.metrics["diverged"] == 0
        for key in ("accuracy", "ytf", "rank1", "tar", "fisher"):
            assert record.metrics[key] is not None, key
        assert len(record.curves["cmc"]) == 100
        by_distractors = record.curves["rank1_by_distractors"]
        assert None not in by_distractors[:2]  # 10 and 100 of the 120 distractors
        assert by_distractors[2:] == [None] * 4


def test_lsoftmax_faces_run_on_the_layouts_of_the_paper_scale(face_root, tmp_path):
    overrides = {
        "data.size": [16, 16],
        "model.depth": [1, 1, 1, 1],
        "model.widths": [4, 4, 4, 4],
        "model.feature_dim": 6,
    }
    overrides |= {"batch_size": 12, "epochs": 1, "measure.distractors": "megaface", "measure.ytf": False}
    rows = ["Softmax + Contrastive", "L-Softmax (m=4)"]
    records = execute(
        faces.L_SOFTMAX, tmp_path / "out", scale="paper", rows=rows, seeds=[0], overrides=overrides, data_root=face_root
    )
    assert [record.row for record in records] == rows
    assert all(record.metrics["accuracy"] is not None for record in records)


def test_measure_faces_is_perfect_for_features_that_show_the_class(tmp_path):
    config = faces.LFW.config("Original softmax", "smoke")
    experiment = build_experiment(config)
    # The mean colour of an image is its class, on both sides of the mirror.
    classes = len(experiment.data.validation.classes)
    labels = experiment.data.validation.labels
    images = (labels[:, None, None, None] * (255 // classes)).to(torch.uint8).expand(-1, 1, 16, 16).contiguous()
    source = TensorSource(images, labels, experiment.data.validation.classes)
    experiment.data = DataSplit(experiment.data.train, source, open_set=True)

    class Angle(nn.Module):
        def forward(self, x):
            angle = x.flatten(1).mean(1) * math.pi
            return torch.stack([angle.cos(), angle.sin()], 1)

    experiment.network = Angle()
    options = {"threshold_pairs": 20, "pca": None, "distractors": "noise", "far": 0.1, "ytf": False}
    outcome = measure_faces(experiment, None, **options)
    assert outcome.metrics["eer"] == 0
    assert outcome.metrics["best"] == 100
    assert outcome.metrics["fisher"] == pytest.approx(0, abs=1e-6)


# Measurements --------------------------------------------------------------------------------------------------------


def test_target_function_falls_from_one_to_one_minus_two_m():
    for m in (2, 3, 4):
        outcome = classification.target_function(0, m=m, points=361)
        theta = torch.linspace(0, math.pi, 361, dtype=torch.float64)
        k = (m * theta / math.pi).floor().clamp(max=m - 1)
        expected = (-1) ** k * (m * theta).cos() - 2 * k
        torch.testing.assert_close(torch.tensor(outcome.curves["psi"], dtype=torch.float64), expected)
        assert outcome.metrics["at_pi"] == pytest.approx(1 - 2 * m)
        assert outcome.metrics["excess"] <= 1e-12


def test_similarity_equals_the_mean_of_all_pairs():
    experiment = build_experiment(classification.MNIST.config("Softmax", "smoke"))
    outcome = classification.measure_similarity(experiment, None)
    x, labels = experiment.embed()
    cosines = nn.functional.normalize(x.double()) @ nn.functional.normalize(x.double()).mT
    same = labels[:, None] == labels
    others = ~torch.eye(len(x), dtype=torch.bool)
    assert outcome.metrics["within"] == pytest.approx(float(cosines[same & others].mean()), abs=1e-5)
    assert outcome.metrics["between"] == pytest.approx(float(cosines[~same].mean()), abs=1e-5)
    counts = labels.bincount().clamp(max=10)
    assert outcome.tensors["similarity"].shape == (int(counts.sum()),) * 2
    assert outcome.tensors["similarity_labels"].tolist() == sorted(outcome.tensors["similarity_labels"].tolist())


def test_last_relu_confines_features_to_the_first_quadrant(smoke_folder):
    rows = ["Softmax", "Softmax with a last ReLU"]
    plain, confined = execute(features.MNIST, smoke_folder, scale="smoke", rows=rows, seeds=[0])
    assert confined.metrics["first_quadrant"] == 100
    assert plain.metrics["first_quadrant"] < 100
    assert {"train_features", "train_labels"} <= set(read_tensors(smoke_folder, plain))


def test_class_vectors_store_norms_sizes_and_biases(smoke_folder):
    rows = ["MNIST, rising class sizes"]
    (record,) = execute(features.CLASS_VECTORS, smoke_folder, scale="smoke", rows=rows, seeds=[0])
    tensors = read_tensors(smoke_folder, record)
    assert tensors["weight_norms"].shape == tensors["biases"].shape == tensors["class_sizes"].shape == (10,)
    assert tensors["class_sizes"][9] > tensors["class_sizes"][0]


def test_visual_hardness_reads_frequencies_from_a_list(tmp_path):
    write_tree(tmp_path / "imagenet" / "train", {"n01": 8, "n02": 8}, kind="JPEG")
    written = write_tree(tmp_path / "imagenet" / "val", {"n01": 4, "n02": 4}, kind="JPEG")
    rows = ["image,frequency", *(f"{name},{at / 10}" for at, name in enumerate(list(written)[:6]))]
    (tmp_path / "human-frequency.csv").write_text("\n".join(rows))
    overrides = {"data.size": 8, "model": {"name": "embedding_cnn", "widths": [4, 4]}, "augment": [], "epochs": 1}
    (record,) = execute(
        angles.HARDNESS, tmp_path / "out", scale="paper", seeds=[0], overrides=overrides, data_root=tmp_path
    )
    assert -1 <= record.metrics["hardness_correlation"] <= 1
    tensors = read_tensors(tmp_path / "out", record)
    assert tensors["frequency"].tolist() == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])


def test_neighbour_frequency_is_the_share_of_the_nearest_images():
    train = TensorSource(torch.tensor([0, 10, 20, 200]).byte().view(4, 1, 1, 1), torch.tensor([0, 1, 0, 1]), ("a", "b"))
    test = TensorSource(torch.tensor([5, 250]).byte().view(2, 1, 1, 1), torch.tensor([0, 1]), ("a", "b"))
    shares = angles._neighbour_frequency(train, test)
    assert shares.tolist() == [0.5, 0.5]  # all four images are among the nearest twenty


def test_reconstructions_from_angles_and_norms_use_the_same_network(smoke_folder):
    records = execute(angles.RECONSTRUCTION, smoke_folder, scale="smoke", seeds=[0])
    assert len({tuple(record.curves["loss"]) for record in records}) == 1
    assert len({record.metrics["error"] for record in records}) == 3
    tensors = read_tensors(smoke_folder, records[0])
    assert tensors["images"].shape == tensors["reconstructions"].shape == (16, 1, 8, 8)
