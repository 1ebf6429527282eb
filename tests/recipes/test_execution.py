"""Training the rows of recipes: every recipe at the smallest scale, resuming, divergence, measurements."""

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hypersphere.recipes import (
    RECIPES,
    SCALES,
    Outcome,
    execute,
    plan,
    read_records,
    read_tensors,
    run_name,
)
from hypersphere.recipes.execution import outcome_of_lines
from hypersphere.recipes.protocols import compare_unseen
from hypersphere.training import Run
from hypersphere.training.components import MENUS
from hypersphere.training.config import menus_of
from processes import run_processes

IDS = (Path(__file__).parent / "ids.txt").read_text().split()
# Metrics of other rows of the recipe.
SOMETIMES = {"ytf", "k_mean", "k_least", "k_most", "radius_factor_mean", "radius_factor_least", "radius_factor_most"}
SOMETIMES |= {"k_conv1.1_mean", "k_conv2.1_mean", "k_conv3.1_mean"}
SOMETIMES |= {"at_one", "at_three", "at_zero", "at_right_angle", "at_pi"}
SOMETIMES |= {"wrong_auc", "further_rate"}  # without wrong labels, and without further training
ROTATED = ("OPT (CP)", "OPT (OGD)", "OPT (GS)", "PE-OPT", "S-OPT")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:not projected")
@pytest.mark.parametrize("name", RECIPES)
def test_every_row_runs_at_the_smallest_scale(name, smoke_folder):
    recipe = RECIPES[name]
    records = execute(recipe, smoke_folder, scale="smoke", seeds=[0])
    assert [one.row for one in records] == [row.name for row in recipe.rows_at("smoke")]
    for one in records:
        missing = {metric.key for metric in recipe.metrics if one.metrics.get(metric.key) is None}
        assert missing <= SOMETIMES, one.row
        if one.row.startswith(ROTATED) and "trained neurons" not in one.row:
            first, *_, last = one.curves["energy"]
            assert last == pytest.approx(first, rel=1e-3), one.row
    assert set(recipe.figures) <= {key for one in records for key in one.curves}
    written = list((smoke_folder / run_name(name, scale="smoke")).rglob("seed-*"))
    assert written
    assert not [path for path in written if path.is_dir()]  # no run folder is left


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_complete(name):
    recipe = RECIPES[name]
    assert recipe.name == name
    assert recipe.title
    assert recipe.reference
    assert recipe.note
    assert list(recipe.scales) == list(recipe.cost) == list(SCALES)
    assert set(recipe.covers) <= set(IDS)
    keys = {metric.key for metric in recipe.metrics}
    for row in recipe.rows:
        assert set(row.printed) <= keys
        assert set(row.at) <= set(SCALES)
        for scale in SCALES:
            config = recipe.config(row, scale)
            assert recipe.compute is not None or (config.epochs is None) != (config.steps is None)


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", RECIPES)
def test_components_and_options_of_every_row_exist(name, scale):
    for row in RECIPES[name].rows:
        for trial in RECIPES[name].trials(row, scale) or [{}]:
            RECIPES[name].checked_settings(row, scale, trial)
        config = RECIPES[name].config(row, scale)
        for setting, menu in menus_of(type(config)).items():
            value = getattr(config, setting)
            for one in value if isinstance(value, tuple) else (value,):
                known = MENUS[menu].options(one.name)
                assert set(one.options) <= set(known), (row.name, setting)


def tiny(**options):
    """Return a recipe of one row that trains for two epochs."""
    recipe = RECIPES["digits"]
    return replace(recipe, rows=recipe.rows[:1], scales={"cpu": recipe.scales["smoke"]}, **options)


def test_interrupted_row_resumes_from_its_checkpoint(tmp_path):
    seen = []

    def watch(row, seed, fraction):
        seen.append(fraction)

    recipe, overrides = tiny(), {"epochs": 3, "save_every": 0.0}
    assert execute(recipe, tmp_path / "a", overrides=overrides, stop=lambda: len(seen) > 2, on_progress=watch) == []
    assert seen[-1] < 1
    (folder,) = (path for path in (tmp_path / "a").rglob("seed-0") if path.is_dir())
    saved = Run.open(folder).checkpoint().step
    assert saved > 0
    seen.clear()
    (resumed,) = execute(recipe, tmp_path / "a", overrides=overrides, on_progress=watch)
    assert seen[1] >= saved / 6  # the first steps are not repeated
    (straight,) = execute(recipe, tmp_path / "b", overrides=overrides)
    drop = {"seconds"}
    assert {k: v for k, v in resumed.metrics.items() if k not in drop} == {
        k: v for k, v in straight.metrics.items() if k not in drop
    }
    assert resumed.curves == straight.curves
    assert len(straight.curves["error"]) == 4  # before training and after each epoch
    assert len(straight.curves["loss"]) == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"head.bias": True}, r"^row '[^']+': head.bias is not an option of"),
        ({"head.q": 3}, "^row 'Softmax': head.q is not an option of softmax"),
    ],
)
def test_options_of_all_rows_are_checked_before_the_first_run(overrides, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        execute(RECIPES["digits"], tmp_path, scale="smoke", overrides=overrides)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=message):
        plan(RECIPES["digits"], scale="smoke", overrides=overrides)


def test_failed_row_leaves_no_empty_folders(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=r"model\.name must be 'gcn' on a graph"):
        execute(tiny(), tmp_path / "out", overrides={"model": "gcn"})
    assert not list((tmp_path / "out").iterdir())


def test_run_of_other_settings_is_not_resumed(tmp_path):
    recipe = tiny()
    execute(recipe, tmp_path, stop=lambda: True)
    changed = replace(recipe, base={**recipe.base, "batch_size": 50})
    (record,) = execute(changed, tmp_path)
    assert record.config["batch_size"] == 50
    assert record.metrics["diverged"] == 0


def work(rank, out):
    records = execute(tiny(), out, overrides={"epochs": 2})
    assert execute(tiny(), out, overrides={"epochs": 2}) == records


def test_two_processes_write_one_record_that_agrees_with_one_process(tmp_path):
    run_processes(work, 2, tmp_path, tmp_path / "two")
    (one,) = execute(tiny(), tmp_path / "one", overrides={"epochs": 2})
    (two,) = read_records(tmp_path / "two", run_name("digits", {"epochs": 2}))
    assert two.machine == f"{one.machine}, 2 processes"
    assert two.curves["loss"] == pytest.approx(one.curves["loss"], rel=1e-3)
    assert two.metrics["energy"] == pytest.approx(one.metrics["energy"], rel=1e-3)
    assert read_tensors(tmp_path / "two", two)["features"].shape == (500, 3)


def test_diverged_row_is_marked_and_has_no_error(tmp_path):
    with pytest.warns(UserWarning, match="^Softmax, seed 0: "):
        (record,) = execute(tiny(), tmp_path, overrides={"optimizer": {"name": "sgd", "lr": 1e30}})
    assert record.metrics["diverged"] == 1
    assert "error" not in record.metrics


def test_measure_gets_the_trained_experiment_its_options_and_the_data_root(tmp_path):
    seen = []

    def measure(experiment, run, *, size, data_root):
        time.sleep(0.5)
        seen.append((size, data_root, experiment.objective.training, run.metrics()[-1]["epoch"]))
        return Outcome({"value": 1.0}, {"c": [math.nan]}, {"t": experiment.head.weight})

    recipe = tiny(measure=measure)
    recipe = replace(recipe, base={**recipe.base, "measure": {"size": 2}})
    (record,) = execute(recipe, tmp_path, overrides={"measure.size": 3}, data_root=tmp_path)
    assert seen == [(3, tmp_path, False, 1)]
    assert record.metrics["value"] == 1.0
    assert record.seconds > record.metrics["seconds"] + 0.4  # the record includes the measurement
    assert record.curves["c"] == [None]
    assert record.config["measure"] == {"size": 3}
    assert read_tensors(tmp_path, record)["t"].shape == (10, 3)


def test_outcome_of_lines_converts_to_per_cent_and_skips_epochs_without_validation():
    lines = [
        {"kind": "validation", "epoch": 0, "step": 0, "accuracy": 0.1, "energy": {"a": 2.0, "head": 5.0}},
        {"kind": "step", "step": 1, "loss": 9.0},
        {"kind": "epoch", "epoch": 1, "step": 1, "loss": 3.0, "seconds": 1.0},
        {"kind": "epoch", "epoch": 2, "step": 2, "loss": 1.0, "accuracy": None, "energy": {"a": 1.0, "head": None}},
    ]
    outcome = outcome_of_lines(lines)
    assert outcome.curves["loss"] == [1.0]
    assert outcome.curves["error"] == [90.0, pytest.approx(math.nan, nan_ok=True)]
    assert outcome.curves["energy"] == [2.0, pytest.approx(math.nan, nan_ok=True)]
    assert outcome_of_lines([{"kind": "epoch", "epoch": 1, "loss": 1, "verification.eer": 0.25}]).metrics == {
        "verification.eer": 25.0
    }
    assert outcome_of_lines([]).metrics == {}
    foreign = {"kind": "epoch", "epoch": 1, "loss": 1, "spread.mean_angle": 0.25}
    assert outcome_of_lines([foreign]).metrics == {"spread.mean_angle": 0.25}  # need not be a fraction


def test_compare_unseen_is_perfect_for_one_hot_features():
    labels = torch.arange(20).repeat_interleave(20)
    assert compare_unseen(torch.eye(20)[labels], labels) == {"accuracy": 100, "eer": 0, "tar": 100, "rank1": 100}


def test_digits_energy_row_is_trained_with_energy(tmp_path):
    weights = {"regularizers.0.output": 0.0}, {"regularizers.0.output": 10.0}
    options = {"scale": "smoke", "rows": ["A-Softmax + energy"]}
    (plain,), (repelled,) = (execute(RECIPES["digits"], tmp_path, overrides=one, **options) for one in weights)
    assert repelled.metrics["energy"] < plain.metrics["energy"]
    assert repelled.curves["loss"][0] > plain.curves["loss"][0] + 1
