import json
import math
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from hypersphere.recipes import (
    RECIPES,
    Metric,
    Outcome,
    Recipe,
    Record,
    Row,
    Trial,
    execute,
    read_records,
    read_tensors,
    record,
    run_name,
)
from hypersphere.training.origin import commit_of, made_with

RUNS = []


def run(settings, trial):
    RUNS.append((settings["size"], trial.seed))
    trial.tell(0.5)
    trial.tell(1.0)
    if settings["size"] == 13:
        raise RuntimeError("unlucky")
    value = settings["size"] + float(torch.rand(()))
    return Outcome({"value": value}, {"curve": [1.0, 2.0]}, {"features": torch.ones(2, 3)})


def recipe(*sizes, run=run, settings=()):
    rows = tuple(Row(f"size {size}", {"size": size}, {"value": 0.5}) for size in sizes)
    settings = {"size": 0, "extra": 1, **dict(settings)}
    return Recipe("toy", "Toy", "nowhere", settings, rows, (0, 1), (Metric("value", "value"),), run)


def named(*names, **more):
    return Recipe(
        "toy", "Toy", "nowhere", {"size": 1}, tuple(Row(n, {}) for n in names), (0,), (), **{"run": run, **more}
    )


def only_record(folder):
    (path,) = folder.rglob("seed-*.json")
    return path


def test_execute_writes_complete_records_and_does_not_repeat_runs(tmp_path):
    RUNS.clear()
    progress = []
    records = execute(
        recipe(1, 2), tmp_path, on_progress=lambda row, seed, part: progress.append((row.name, seed, part))
    )
    assert RUNS == [(1, 0), (1, 1), (2, 0), (2, 1)]
    first = records[0]
    assert first.settings == {"size": 1, "extra": 1}
    assert first.versions["torch"] == torch.__version__
    assert first.seconds >= 0
    assert progress[:4] == [("size 1", 0, 0.0), ("size 1", 0, 0.5), ("size 1", 0, 1.0), ("size 1", 1, 0.0)]
    assert execute(recipe(1, 2), tmp_path) == records == read_records(tmp_path, "toy")
    assert len(RUNS) == 4
    assert torch.equal(read_tensors(tmp_path, first)["features"], torch.ones(2, 3))


def test_execute_sets_the_seed_and_repeats_runs_with_other_settings(tmp_path):
    RUNS.clear()
    a = execute(recipe(1), tmp_path / "a")
    b = execute(recipe(1), tmp_path / "b")
    assert [r.metrics for r in a] == [r.metrics for r in b]
    assert a[0].metrics != a[1].metrics
    execute(recipe(1, settings={"extra": 7}), tmp_path / "a")
    assert len(RUNS) == 6
    execute(recipe(1, settings={"extra": 7.0}), tmp_path / "a")  # equal to Python, another setting to JSON
    assert len(RUNS) == 8


def test_settings_of_rows_replace_those_of_the_recipe_and_cannot_be_overridden(tmp_path):
    (first, *_) = execute(recipe(5), tmp_path, overrides={"extra": 6})
    assert first.settings == {"size": 5, "extra": 6}
    assert first.overrides == {"extra": 6}
    with pytest.raises(
        ValueError, match="overrides must be settings that row 'size 5' does not set itself, not 'size'"
    ):
        execute(recipe(5), tmp_path, overrides={"size": 6})


def test_execute_stores_runs_with_overrides_separately(tmp_path):
    RUNS.clear()
    full = execute(recipe(1), tmp_path)
    small, other = (execute(recipe(1), tmp_path, overrides={"extra": n}) for n in (7, 8))
    assert read_records(tmp_path, "toy") == full
    assert read_records(tmp_path, run_name("toy", {"extra": 7})) == small
    assert read_records(tmp_path, run_name("toy", {"extra": 8})) == other
    for records in (full, small, other):
        assert read_tensors(tmp_path, records[0])
    assert execute(recipe(1), tmp_path, overrides={"extra": 7}) == small
    assert len(RUNS) == 6


def test_execute_keeps_finished_rows_if_another_row_fails(tmp_path):
    with pytest.raises(RuntimeError, match="unlucky"):
        execute(recipe(1, 13), tmp_path)
    assert len(read_records(tmp_path, "toy")) == 2
    assert not list(tmp_path.rglob("*.tmp"))


def test_interrupted_run_leaves_no_old_record(tmp_path):
    execute(recipe(1), tmp_path, seeds=[0])

    def die(settings, trial):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(recipe(1, run=die, settings={"extra": 2}), tmp_path, seeds=[0])
    assert not list(tmp_path.rglob("seed-*"))


def test_tensors_of_an_older_run_are_removed(tmp_path):
    execute(recipe(1), tmp_path, seeds=[0])
    bare = recipe(1, run=lambda settings, trial: Outcome({"value": 1.0}), settings={"extra": 2})
    (record,) = execute(bare, tmp_path, seeds=[0])
    assert read_tensors(tmp_path, record) == {}


def test_tensors_with_shared_storage_are_stored(tmp_path):
    base = torch.arange(6.0)
    tensors = {"a": base, "b": base[:3], "c": base.view(2, 3).T}
    shared = recipe(1, run=lambda settings, trial: Outcome({}, {}, tensors))
    (record,) = execute(shared, tmp_path, seeds=[0])
    for name, tensor in read_tensors(tmp_path, record).items():
        assert torch.equal(tensor, tensors[name])


def test_record_can_be_written_by_several_threads(tmp_path):
    result = Record("toy", "row", 0, {}, {}, 1.0)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: result.write(tmp_path / "seed-0.json"), range(200)))
        list(pool.map(lambda _: record._require_writable(tmp_path), range(200)))
    assert Record.read(tmp_path / "seed-0.json") == result
    assert [path.name for path in tmp_path.iterdir()] == ["seed-0.json"]


def test_different_row_names_have_different_files(tmp_path):
    names = ["a/b", "a b", "a_b", "é", "e", "x" * 300, "x" * 299, "../..", "..a"]
    execute(named(*names), tmp_path)
    paths = list(tmp_path.rglob("seed-0.json"))
    assert len(paths) == len(names)
    assert all(path.parent.parent == tmp_path / "toy" for path in paths)
    assert {one.row for one in read_records(tmp_path, "toy")} == set(names)
    for name in ("", ".", "..", " "):
        with pytest.raises(ValueError, match="name must be text other than dots and spaces"):
            Row(name, {})
    assert record.record_path(tmp_path, "toy", "..", 0).resolve().parent.parent == tmp_path / "toy"


@pytest.mark.parametrize("change", [{"row": "other"}, {"recipe": "other"}, {"seed": 3}])
def test_record_of_another_run_is_not_reused(tmp_path, change):
    RUNS.clear()
    execute(named("row"), tmp_path)
    path = only_record(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    execute(named("row"), tmp_path)
    assert len(RUNS) == 2


def test_execute_checks_all_settings_before_the_first_run(tmp_path):
    RUNS.clear()
    for value in ({1}, math.nan):
        with pytest.raises(ValueError, match="settings of 'size 1' must be JSON values"):
            execute(recipe(1, settings={"extra": value}), tmp_path)
    last = Row("last", {"extra": "words"})
    with pytest.raises(ValueError, match="extra must be a value like 1, not 'words'"):
        execute(Recipe("toy", "", "", {"size": 1, "extra": 1}, (Row("first", {}), last), (0,), (), run), tmp_path)
    assert RUNS == []
    (first,) = execute(recipe(1, settings={"extra": (1, 2)}), tmp_path, seeds=[0])
    assert first.settings["extra"] == [1, 2]
    assert read_records(tmp_path, "toy") == [first]


@pytest.mark.parametrize(
    ("default", "given", "expected"),
    [(1.5, 2, 2.0), (1.5, 2.5, 2.5), ([1, 2], [], []), ([1, 2], [3], [3]), ([0.5], [1], [1.0]), (None, "x", "x"), (
        True, False, False), ("a", "b", "b"), ([1, "a"], ["b", 2], ["b", 2]), ({"a": 1}, {"b": "c"}, {"b": "c"})],
)  # fmt: skip
def test_overrides_are_converted_to_the_type_of_the_default(default, given, expected):
    entry = recipe(1, settings={"extra": default})
    value = entry.settings_of(entry.rows[0], {"extra": given})["extra"]
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("default", "given"),
    [(1, 1.5), (1, True), (1, "1"), (1, None), (1.5, "x"), (1.5, True), (1.5, math.nan), (1.5, 10**400), (True, 1),
     ("a", 1), ([1], 1), ([1], "1"), ([1], ["a"]), ([[1]], [1]), ({"a": 1}, [1])],
)  # fmt: skip
def test_overrides_of_another_type_are_rejected(default, given):
    entry = recipe(1, settings={"extra": default})
    with pytest.raises(ValueError, match=r"^extra must be a value like "):
        entry.settings_of(entry.rows[0], {"extra": given})


def test_record_stores_non_finite_numbers_as_null(tmp_path):
    wild = Outcome({"value": math.nan, "other": math.inf, "good": 1.0}, {"curve": [1.0, math.nan, -math.inf]})
    (first,) = execute(recipe(1, run=lambda settings, trial: wild), tmp_path, seeds=[0])
    assert first.metrics == {"value": None, "other": None, "good": 1.0}
    assert first.curves == {"curve": [1.0, None, None]}
    text = only_record(tmp_path).read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert read_records(tmp_path, "toy") == [first]
    only_record(tmp_path).write_text(text.replace('"good": 1.0', '"good": NaN'))  # as older versions wrote it
    assert read_records(tmp_path, "toy")[0].metrics["good"] is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda good: '{"recipe": "to',
        lambda good: "[1, 2]",
        lambda good: "[" * 100_000,
        lambda good: json.dumps({**good, "metrics": None}),
        lambda good: json.dumps({**good, "metrics": {"value": "high"}}),
        lambda good: json.dumps({**good, "curves": {"loss": 1.0}}),
        lambda good: json.dumps({**good, "seed": "0"}),
        lambda good: json.dumps({**good, "seconds": None}),
        lambda good: json.dumps({**good, "settings": []}),
        lambda good: json.dumps({**good, "more": 1}),
        lambda good: json.dumps({key: good[key] for key in good if key != "row"}),
    ],
)
def test_damaged_record_is_named(tmp_path, damage):
    execute(named("row"), tmp_path)
    path = only_record(tmp_path)
    path.write_text(damage(json.loads(path.read_text())))
    with pytest.raises(ValueError, match=r"seed-0.json is not a record: ") as caught:
        execute(named("row"), tmp_path)
    assert "\n" not in str(caught.value)


def test_damaged_tensors_are_named(tmp_path):
    (first,) = execute(named("row"), tmp_path)
    path = only_record(tmp_path).with_suffix(".safetensors")
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ValueError, match=r"seed-0.safetensors is not a file of tensors: "):
        read_tensors(tmp_path, first)


def test_execute_rejects_invalid_arguments(tmp_path):
    with pytest.raises(ValueError, match="rows must be names among size 1"):
        execute(recipe(1), tmp_path, rows=["size 9"])
    with pytest.raises(ValueError, match="overrides must be settings of toy: size, extra, not 'sise'"):
        execute(recipe(1), tmp_path, overrides={"sise": 9})
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="out must be a writable folder"):
        execute(recipe(1), tmp_path / "file")


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def test_commit_is_that_of_the_library_or_none(tmp_path, monkeypatch):
    file = tmp_path / "package" / "recipes" / "record.py"
    file.parent.mkdir(parents=True)
    file.touch()
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "theirs")
    assert commit_of(file) is None  # the checkout is there, but it does not hold the package
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "ours")
    assert len(commit_of(file)) == 12
    (tmp_path / "package" / "other.py").touch()
    assert commit_of(file).endswith("+changes")
    asked = []
    monkeypatch.setattr(record, "made_with", lambda: asked.append(1) or made_with())
    execute(recipe(1, 2), tmp_path / "out")
    assert len(asked) == 1


def test_trial_receives_the_data_root(tmp_path):
    seen = []
    watch = recipe(1, run=lambda settings, trial: seen.append(trial.data_root) or Outcome({}))
    execute(watch, tmp_path, seeds=[0], data_root=Path("there"))
    assert seen == [Path("there")]


def test_every_recipe_is_complete():
    for name, entry in RECIPES.items():
        assert entry.name == name
        assert entry.title
        assert entry.reference
        assert entry.seeds
        keys = {metric.key for metric in entry.metrics}
        assert len({row.name for row in entry.rows}) == len(entry.rows)
        for row in entry.rows:
            assert set(row.paper) <= keys
            entry.settings_of(row, {})


SMALL = {"epochs": 2, "widths": [8, 8]}


def test_digits_recipe_runs_at_a_small_scale(tmp_path):
    records = execute(RECIPES["digits"], tmp_path, overrides=SMALL)
    assert [one.row for one in records] == ["Softmax", "A-Softmax (m=4)", "A-Softmax + energy"]
    for one in records:
        assert set(one.metrics) == {metric.key for metric in RECIPES["digits"].metrics}
        tensors = read_tensors(tmp_path, one)
        assert tensors["features"].shape == (500, 3)
        assert tensors["class_vectors"].shape == (10, 3)
        assert len(one.curves["loss"]) == 2


def test_digits_energy_row_is_trained_with_energy():
    entry = RECIPES["digits"]
    outcomes = []
    for weight in (0.0, 10.0):
        torch.manual_seed(0)
        settings = {**entry.settings_of(entry.rows[-1], {**SMALL, "epochs": 1}), "energy_weight": weight}
        outcomes.append(entry.run(settings, Trial(seed=0)))
    plain, repelled = outcomes
    assert repelled.metrics["energy"] < plain.metrics["energy"]
    assert repelled.curves["loss"][0] > plain.curves["loss"][0] + 1
    assert entry.settings_of(entry.rows[-1], {})["energy_weight"] > 0


def test_unknown_head_lists_the_choices():
    settings = {**RECIPES["digits"].settings, "head": "nonsense"}
    with pytest.raises(ValueError, match=r"head must be one of softmax, .*arcface.*, not 'nonsense'"):
        RECIPES["digits"].run(settings, Trial(seed=0))
