"""Settings that are chosen on held-out training data before the seeds of a row run."""

import json
import shutil
from dataclasses import replace

import pytest

from hypersphere.recipes import RECIPES, Claim, Metric, Row, Tuning, execute, read_records

RATES = {"optimizer.lr": [1e-9, 3e-2, 1e-9]}


def tuned(rows=None, **options):
    """Return a recipe of one row that chooses among three learning rates, of which two are far too small."""
    recipe = RECIPES["digits"]
    options.setdefault("tuning", Tuning(RATES, metric="accuracy", held_out=0.3))
    small = {
        **recipe.scales["smoke"],
        "data": {"name": "digits", "limit": 300},
        "model": {"widths": [8, 8]},
        "epochs": 4,
    }
    return replace(
        recipe, rows=rows or recipe.rows[:1], scales={"cpu": small, "smoke": small}, claims=(), seeds=(0, 1), **options
    )


def test_best_trial_on_held_out_training_data_is_used_for_all_seeds(tmp_path):
    messages = []
    records = execute(tuned(), tmp_path, on_message=messages.append)
    assert [one.seed for one in records] == [0, 1]
    for one in records:
        assert one.chosen == {"optimizer.lr": 3e-2}
        assert one.config["optimizer"]["lr"] == 3e-2
        assert one.config["selection"] == 0.0
        assert [trial["settings"]["optimizer.lr"] for trial in one.trials] == RATES["optimizer.lr"]
        values = [trial["values"][0] for trial in one.trials]
        assert values[1] == max(values)
    assert "optimizer.lr = 0.03, the best of 3 trials" in messages[0]
    assert read_records(tmp_path, "digits") == records  # trials are stored elsewhere


def test_trials_train_on_less_data_and_are_not_measured_on_test_data(tmp_path):
    execute(tuned(), tmp_path, seeds=[0])
    trials = sorted(tmp_path.rglob("trials/*.json"))
    assert len(trials) == 3
    for path in trials:
        config = json.loads(path.read_text())["config"]
        assert config["selection"] == 0.3


def test_finished_trials_and_rows_are_not_run_again(tmp_path):
    first = execute(tuned(), tmp_path)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    assert execute(tuned(), tmp_path) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")} == stamps


def test_seeds_are_added_to_published_records_without_repeating_the_trials(tmp_path):
    (first,) = execute(tuned(), tmp_path, seeds=[0])
    (folder,) = tmp_path.rglob("trials")
    shutil.rmtree(folder)
    records = execute(tuned(), tmp_path)
    assert [(one.seed, one.chosen, one.trials) for one in records] == [(s, first.chosen, first.trials) for s in (0, 1)]
    assert not folder.exists()


def test_record_is_not_current_if_the_grid_changes(tmp_path):
    (record,) = execute(tuned(), tmp_path, seeds=[0])
    assert record.is_current(tuned())
    wider = tuned(tuning=Tuning({"optimizer.lr": [1e-9, 3e-2]}, metric="accuracy"))
    assert not record.is_current(wider)


def test_other_scales_are_not_tuned(tmp_path):
    (record,) = execute(tuned(), tmp_path, seeds=[0], scale="smoke")
    assert record.trials == []
    assert record.chosen == {}


def test_stopping_during_a_trial_leaves_a_resumable_folder(tmp_path):
    assert execute(tuned(), tmp_path, stop=lambda: True) == []
    (record, _) = execute(tuned(), tmp_path)
    assert record.chosen == {"optimizer.lr": 3e-2}


def test_recipe_rejects_rows_with_unequal_budgets():
    rows = (Row("Softmax"), Row("more", grid={"optimizer.lr": [1e-3]}))
    with pytest.raises(ValueError, match="grids must be of the same number of combinations"):
        tuned(rows)


def test_recipe_rejects_unknown_metrics_and_rows():
    with pytest.raises(ValueError, match=r"tuning.metric must be one of"):
        tuned(tuning=Tuning(RATES, metric="eror"))
    with pytest.raises(ValueError, match="row must be one of Softmax, not 'Softmaxx'"):
        replace(tuned(), claims=(Claim("text", "Softmax", "Softmaxx"),))
    with pytest.raises(ValueError, match="row must be one of"):
        tuned(baseline="none")


def test_baseline_of_a_row_is_its_own_or_that_of_the_recipe():
    rows = (Row("plain"), Row("other"), Row("third", baseline="other"))
    recipe = tuned(rows, baseline="plain", metrics=(Metric("accuracy", "accuracy", ".2f", True),))
    assert [None if one is None else one.name for one in map(recipe.baseline_of, rows)] == [None, "plain", "other"]
