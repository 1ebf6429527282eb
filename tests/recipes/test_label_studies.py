"""Studies of heads for wrong labels and for new classes."""

import json

import pytest
import torch
from torch import nn

from hypersphere.recipes.objectives import growing_head
from hypersphere.recipes.objectives.growing_head import GROWING_HEAD, grow_classes
from hypersphere.recipes.objectives.label_noise import FACE_LABEL_NOISE, LABEL_NOISE, measure_noisy
from hypersphere.training import build_experiment

OPTIONS = {"folds": 2, "per_fold": 10}


# Wrong labels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ["ArcFace, 20 %", "Sub-centres, 40 %"])
def test_wrong_auc_is_the_share_of_pairs_in_which_the_wrong_label_has_the_larger_angle(row):
    experiment = build_experiment(LABEL_NOISE.config(row, "smoke"))
    x, labels = experiment.embed(experiment.data.train)
    centers = experiment.head.num_centers
    vectors = nn.functional.normalize(experiment.head.weight.detach().double()).view(-1, centers, x.shape[1])
    cosines = (vectors[labels] @ nn.functional.normalize(x.double()).unsqueeze(2)).squeeze(2)
    dominant = [cosines[labels == label].argmax(1).bincount(minlength=centers).argmax() for label in range(30)]
    angles = cosines.gather(1, torch.stack(dominant)[labels].unsqueeze(1)).squeeze(1).acos()
    is_wrong = labels != experiment.data.true_labels
    wrong, right = angles[is_wrong][:, None], angles[~is_wrong]
    expected = 100 * float(((wrong > right).double() + (wrong == right).double() / 2).mean())
    metrics = measure_noisy(experiment, None, **OPTIONS).metrics
    assert metrics["wrong_auc"] == pytest.approx(expected, abs=0.05)
    nearest = (nn.functional.normalize(x.double()) @ vectors.flatten(0, 1).mT).argmax(1) // centers
    fitted = 100 * float((nearest == labels)[~is_wrong].double().mean())
    assert metrics["fitted"] == pytest.approx(fitted)


@pytest.mark.parametrize("recipe", [LABEL_NOISE, FACE_LABEL_NOISE], ids=lambda recipe: recipe.name)
def test_rows_of_a_level_of_noise_have_the_same_wrong_labels_and_seeds_have_others(recipe):
    def labels(row, seed):
        config = recipe.config(row, "smoke", seed=seed)
        return build_experiment(config).data.train.labels

    assert torch.equal(labels("ArcFace, 40 %", 1), labels("Sub-centres and filter, 40 %", 1))
    assert not torch.equal(labels("ArcFace, 40 %", 1), labels("ArcFace, 40 %", 2))


@pytest.mark.parametrize("recipe", [LABEL_NOISE, FACE_LABEL_NOISE], ids=lambda recipe: recipe.name)
def test_rows_are_compared_with_arcface_at_the_same_noise(recipe):
    for row in recipe.rows:
        method, noise = row.name.split(", ")
        baseline = recipe.baseline_of(row)
        expected = f"ArcFace, {noise}" if method != "ArcFace" else None if noise == "0 %" else "ArcFace, 0 %"
        assert (None if baseline is None else baseline.name) == expected
        config = recipe.config(row, "cpu")
        assert config.data.options["label_noise"] == float(noise.split()[0]) / 100
        assert config.head.options.get("centers", 1) == (3 if "Sub-centres" in method else 1)
        assert ("interclass_filter" in config.head.options) == ("ilter" in method)


# New classes ----------------------------------------------------------------------------------------------------------


def options_of(row, **changes):
    return {**GROWING_HEAD.settings(row, "smoke")["measure"], **changes, "data_root": None}


def test_new_classes_come_last_and_depend_on_the_seed():
    described = json.dumps([{"name": "generated", "classes": 8, "per_class": 12}, 2, 0.25])
    choices = set()
    for seed in range(6):
        parts = growing_head._divide(seed, described, None)
        assert parts.old == 6
        assert sorted(parts.train.classes) == [f"class {label}" for label in range(8)]
        assert parts.train.classes == parts.selection.classes == parts.test.classes
        assert [len(one) for one in (parts.train, parts.selection, parts.test)] == [56, 16, 24]
        choices.add(parts.train.classes[6:])
    assert len(choices) > 1


def trained_first(row="features, not trained", seed=0):
    """Return the parts of the data and the experiment that was trained on the old classes."""
    options = options_of(row)
    described = json.dumps([options["task"], options["new_classes"], options["held_out"]])
    training = json.dumps(options["training"])
    parts = growing_head._divide(seed, described, None)
    return parts, growing_head._trained(seed, described, training, False, None)


def test_grown_head_keeps_old_vectors_and_gets_the_mean_directions_of_new_classes():
    parts, first = trained_first()
    before = first.head.weight.detach().clone()
    head = growing_head._grown_head(first, parts, "features", 0)
    assert torch.equal(head.weight[:6], before)
    assert torch.equal(first.head.weight, before)
    features, labels = first.embed(parts.train)
    directions = nn.functional.normalize(features)
    means = torch.stack([directions[labels == label].mean(0) for label in (6, 7)])
    cosines = nn.functional.cosine_similarity(head.weight[6:], means)
    torch.testing.assert_close(cosines, torch.ones(2))


def test_accuracies_of_a_row_that_trains_nothing_are_those_of_the_nearest_class_vector():
    parts, first = trained_first()
    metrics = grow_classes(0, **options_of("features, not trained")).metrics
    x, labels = first.embed(parts.test)
    directions, labels_of_training = first.embed(parts.train)
    directions = nn.functional.normalize(directions)
    means = torch.stack([directions[labels_of_training == label].mean(0) for label in range(8)])
    means = nn.functional.normalize(means)
    vectors = torch.cat([nn.functional.normalize(first.head.weight.detach()), means[6:]])
    for rows, key in ((labels < 6, "old"), (labels >= 6, "new")):
        for prefix, classes in (("", vectors), ("rank1_", means)):
            right = (x[rows] @ classes.mT).argmax(1) == labels[rows]
            assert metrics[prefix + key] == pytest.approx(100 * float(right.double().mean()))
    assert metrics["mean"] == pytest.approx((metrics["old"] + metrics["new"]) / 2)


def test_training_the_head_does_not_change_the_embedding():
    before = grow_classes(0, **options_of("features, not trained")).metrics
    options = options_of("random, head trained", steps=40, rates=[0.5])
    after = grow_classes(0, **options).metrics
    assert after["further_rate"] == 0.5
    for key in ("rank1_old", "rank1_new"):
        assert after[key] == before[key]
    assert grow_classes(0, **options).metrics == after  # the first experiment is not changed


def test_training_everything_on_new_classes_changes_the_embedding_and_prefers_them():
    options = options_of("features, all trained on new classes", steps=60, rates=[0.1])
    metrics = grow_classes(0, **options).metrics
    assert metrics["new"] == 100
    assert metrics["old"] < 50


def test_rate_is_chosen_on_samples_that_are_not_tested(monkeypatch):
    seen = []
    accuracies = growing_head._accuracies

    def watch(experiment, head, source, old):
        seen.append(source)
        return accuracies(experiment, head, source, old)

    monkeypatch.setattr(growing_head, "_accuracies", watch)
    parts, _ = trained_first()
    grow_classes(0, **options_of("random, head trained", rates=[1e-6, 0.5]))
    assert [source is parts.test for source in seen] == [False, False, True]
    assert seen[0] is seen[1] is parts.selection
