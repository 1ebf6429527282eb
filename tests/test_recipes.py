import json

import pytest
import torch

from hypersphere.recipes import RECIPES, Metric, Outcome, Recipe, Record, Row, execute, read_records, read_tensors

RUNS = []


def run(settings, seed, tell):
    RUNS.append((settings["size"], seed))
    tell(0.5)
    if settings["size"] == 13:
        raise RuntimeError("unlucky")
    value = settings["size"] + float(torch.rand(()))
    return Outcome({"value": value}, {"curve": [1.0, 2.0]}, {"features": torch.ones(2, 3)})


def recipe(*sizes):
    rows = tuple(Row(f"size {size}", {"size": size}, {"value": 0.5}) for size in sizes)
    return Recipe("toy", "Toy", "nowhere", {"size": 0, "extra": 1}, rows, (0, 1), (Metric("value", "value"),), run)


def test_records_hold_everything_and_are_not_run_again(tmp_path):
    RUNS.clear()
    told = []
    records = execute(recipe(1, 2), tmp_path, on_progress=lambda row, seed, part: told.append((row.name, seed, part)))
    assert RUNS == [(1, 0), (1, 1), (2, 0), (2, 1)]
    first = records[0]
    assert first.settings == {"size": 1, "extra": 1}
    assert first.versions["torch"] == torch.__version__
    assert first.seconds >= 0
    assert told[:3] == [("size 1", 0, 0.0), ("size 1", 0, 0.5), ("size 1", 0, 1.0)]
    assert execute(recipe(1, 2), tmp_path) == records == read_records(tmp_path, "toy")
    assert len(RUNS) == 4
    assert torch.equal(read_tensors(tmp_path, first)["features"], torch.ones(2, 3))


def test_the_seed_is_set_and_settings_that_differ_run_again(tmp_path):
    RUNS.clear()
    a = execute(recipe(1), tmp_path / "a")
    b = execute(recipe(1), tmp_path / "b")
    assert [r.metrics for r in a] == [r.metrics for r in b]
    assert a[0].metrics != a[1].metrics
    execute(recipe(1), tmp_path / "a", overrides={"extra": 7})
    assert len(RUNS) == 6


def test_a_row_that_fails_leaves_the_finished_ones(tmp_path):
    with pytest.raises(RuntimeError, match="unlucky"):
        execute(recipe(1, 13), tmp_path)
    assert len(read_records(tmp_path, "toy")) == 2
    assert not list(tmp_path.rglob("*.tmp"))


def test_bad_choices_name_themselves(tmp_path):
    with pytest.raises(ValueError, match="rows must be names among size 1"):
        execute(recipe(1), tmp_path, rows=["size 9"])
    with pytest.raises(ValueError, match="overrides must be settings of toy: size, extra"):
        execute(recipe(1), tmp_path, overrides={"sise": 9})
    (tmp_path / "toy" / "size_1").mkdir(parents=True)
    (tmp_path / "toy" / "size_1" / "seed-0.json").write_text('{"recipe": "to')
    with pytest.raises(ValueError, match=r"seed-0.json is not a record"):
        execute(recipe(1), tmp_path)


def test_every_recipe_is_whole():
    for name, entry in RECIPES.items():
        assert entry.name == name
        assert entry.title
        assert entry.reference
        assert entry.seeds
        keys = {metric.key for metric in entry.metrics}
        assert len({row.name for row in entry.rows}) == len(entry.rows)
        for row in entry.rows:
            assert set(row.paper) <= keys
            assert set(row.settings) <= set(entry.settings)
            json.dumps({**entry.settings, **row.settings})


def test_the_main_job_in_small(tmp_path):
    records = execute(RECIPES["digits"], tmp_path, overrides={"epochs": 2, "widths": [8, 8]})
    assert [record.row for record in records] == ["Softmax", "A-Softmax (m=4)", "A-Softmax + energy"]
    for record in records:
        assert set(record.metrics) == {metric.key for metric in RECIPES["digits"].metrics}
        tensors = read_tensors(tmp_path, record)
        assert tensors["features"].shape == (500, 3)
        assert tensors["class_vectors"].shape == (10, 3)
        assert len(record.curves["loss"]) == 2
        assert isinstance(record, Record)
