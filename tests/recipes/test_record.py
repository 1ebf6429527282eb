import json
import math
import subprocess
from concurrent.futures import ThreadPoolExecutor
from itertools import dropwhile, takewhile
from pathlib import Path

import pytest
import torch

from hypersphere._provenance import commit_of, made_with
from hypersphere.recipes import (
    RECIPES,
    Metric,
    Outcome,
    Recipe,
    Record,
    Row,
    execute,
    execution,
    read_records,
    read_tensors,
    record,
    run_name,
)

RUNS = []
RESULTS = Path(__file__).parents[2] / "results"
# The records of version 0.1 belong to recipes that have changed.
STORED = sorted(path.name for path in RESULTS.iterdir() if path.is_dir() and path.name != "0.1")


def compute(seed, size=1, extra=1):
    RUNS.append((size, seed))
    if size == 13:
        raise RuntimeError("unlucky")
    value = size + float(torch.rand(()))
    return Outcome({"value": value}, {"curve": [1.0, 2.0]}, {"features": torch.ones(2, 3)})


def recipe(*sizes, compute=compute, **options):
    rows = tuple(Row(f"size {size}", {"measure": {"size": size}}, {"value": 0.5}) for size in sizes)
    base = {"measure": {"size": 0, "extra": 1, **options}}
    return Recipe(
        "toy", "Toy", "nowhere", base, {"cpu": {}}, rows, (0, 1), (Metric("value", "value"),), compute=compute
    )


def named(*names):
    rows = tuple(Row(name) for name in names)
    return Recipe("toy", "Toy", "nowhere", {"measure": {"size": 1}}, {"cpu": {}}, rows, compute=compute)


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
    assert first.config == {"seed": 0, "measure": {"size": 1, "extra": 1}}
    assert first.versions["torch"] == torch.__version__
    assert first.seconds >= 0
    assert progress[:3] == [("size 1", 0, 0.0), ("size 1", 0, 1.0), ("size 1", 1, 0.0)]
    assert execute(recipe(1, 2), tmp_path) == records == read_records(tmp_path, "toy")
    assert len(RUNS) == 4
    assert torch.equal(read_tensors(tmp_path, first)["features"], torch.ones(2, 3))


def test_execute_sets_the_seed_and_repeats_runs_with_other_settings(tmp_path):
    RUNS.clear()
    a = execute(recipe(1), tmp_path / "a")
    b = execute(recipe(1), tmp_path / "b")
    assert [r.metrics for r in a] == [r.metrics for r in b]
    assert a[0].metrics != a[1].metrics
    execute(recipe(1, extra=7), tmp_path / "a")
    assert len(RUNS) == 6
    execute(recipe(1, extra=7.0), tmp_path / "a")  # equal to Python, another setting to JSON
    assert len(RUNS) == 8


def test_execute_stores_runs_with_overrides_separately(tmp_path):
    RUNS.clear()
    full = execute(recipe(1), tmp_path)
    small, other = (execute(recipe(1), tmp_path, overrides={"measure.extra": n}) for n in (7, 8))
    assert read_records(tmp_path, "toy") == full
    assert read_records(tmp_path, run_name("toy", {"measure.extra": 7})) == small
    assert read_records(tmp_path, run_name("toy", {"measure.extra": 8})) == other
    for records in (full, small, other):
        assert read_tensors(tmp_path, records[0])
    assert execute(recipe(1), tmp_path, overrides={"measure.extra": 7}) == small
    assert len(RUNS) == 6


def test_execute_keeps_finished_rows_if_another_row_fails(tmp_path):
    with pytest.raises(RuntimeError, match="unlucky"):
        execute(recipe(1, 13), tmp_path)
    assert len(read_records(tmp_path, "toy")) == 2
    assert not list(tmp_path.rglob("*.tmp"))


def test_interrupted_run_leaves_no_old_record(tmp_path):
    execute(recipe(1), tmp_path, seeds=[0])

    def die(seed, **options):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(recipe(1, compute=die, extra=2), tmp_path, seeds=[0])
    assert not list(tmp_path.rglob("seed-*"))


def test_tensors_of_an_older_run_are_removed(tmp_path):
    execute(recipe(1), tmp_path, seeds=[0])
    bare = recipe(1, compute=lambda seed, **options: Outcome({"value": 1.0}), extra=2)
    (record,) = execute(bare, tmp_path, seeds=[0])
    assert read_tensors(tmp_path, record) == {}


def test_tensors_with_shared_storage_are_stored(tmp_path):
    base = torch.arange(6.0)
    tensors = {"a": base, "b": base[:3], "c": base.view(2, 3).T}
    shared = recipe(1, compute=lambda seed, **options: Outcome({}, {}, tensors))
    (record,) = execute(shared, tmp_path, seeds=[0])
    for name, tensor in read_tensors(tmp_path, record).items():
        assert torch.equal(tensor, tensors[name])


def test_record_can_be_written_by_several_threads(tmp_path):
    result = Record("toy", "row", 0, "cpu", {}, {}, 1.0)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: result.write(tmp_path / "seed-0.json"), range(200)))
        list(pool.map(lambda _: execution._require_writable(tmp_path), range(200)))
    assert Record.read(tmp_path / "seed-0.json") == result
    assert [path.name for path in tmp_path.iterdir()] == ["seed-0.json"]


def test_different_row_names_have_different_files(tmp_path):
    names = ["a/b", "a b", "a_b", "é", "e", "x" * 300, "x" * 299, "../..", "..a"]
    execute(named(*names), tmp_path)
    paths = list(tmp_path.rglob("seed-0.json"))
    assert len(paths) == len(names)
    assert all(path.parent.parent == tmp_path / "toy" for path in paths)
    assert {one.row for one in read_records(tmp_path, "toy")} == set(names)
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
    entry = Recipe("toy", "", "", {"epochs": 1}, {"cpu": {}}, (Row("first"), Row("last", {"epochs": "words"})))
    with pytest.raises(ValueError, match="epochs must be an integer"):
        execute(entry, tmp_path)
    with pytest.raises(ValueError, match="settings must consist of numbers, text, lists and mappings"):
        execute(recipe(1, extra={1}), tmp_path)
    with pytest.raises(ValueError, match="settings must be among seed and measure"):
        execute(recipe(1), tmp_path, overrides={"epochs": 2})
    assert RUNS == []
    assert not list(tmp_path.iterdir())
    (first,) = execute(recipe(1, extra=(1, 2)), tmp_path, seeds=[0])
    assert first.config["measure"]["extra"] == [1, 2]
    assert read_records(tmp_path, "toy") == [first]


def test_record_stores_non_finite_numbers_as_null(tmp_path):
    wild = Outcome({"value": math.nan, "other": math.inf, "good": 1.0}, {"curve": [1.0, math.nan, -math.inf]})
    (first,) = execute(recipe(1, compute=lambda seed, **options: wild), tmp_path, seeds=[0])
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
        lambda good: json.dumps({**good, "config": []}),
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
    with pytest.raises(ValueError, match="row must be one of size 1"):
        execute(recipe(1), tmp_path, rows=["size 9"])
    with pytest.raises(ValueError, match=r"measure.sise is not a setting of toy; did you mean size"):
        execute(recipe(1), tmp_path, overrides={"measure.sise": 9})
    with pytest.raises(ValueError, match="scale must be one of cpu"):
        execute(recipe(1), tmp_path, scale="paper")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="out must be a writable folder"):
        execute(recipe(1), tmp_path / "file")


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def test_commit_is_that_of_the_library_or_none(tmp_path, monkeypatch):
    file = tmp_path / "package" / "record.py"
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
    monkeypatch.setattr(execution, "made_with", lambda: asked.append(1) or made_with())
    execute(recipe(1, 2), tmp_path / "out")
    assert len(asked) == 1


def test_records_of_version_0_1_are_readable_and_not_run_again(tmp_path):
    RUNS.clear()
    entry = recipe(1)
    (first,) = execute(entry, tmp_path, seeds=[0])
    path = only_record(tmp_path)
    content = json.loads(path.read_text())
    old = {key: value for key, value in content.items() if key not in ("config", "scale")}
    path.write_text(json.dumps({**old, "settings": {"size": 1, "extra": 5}}))
    (read,) = execute(entry, tmp_path, seeds=[0])
    assert (read.scale, read.config, read.metrics) == ("cpu", None, first.metrics)
    assert len(RUNS) == 1
    assert read.is_current(entry)
    assert not read.is_current(recipe(2))


def test_record_without_a_setting_that_was_added_later_has_its_default(tmp_path):
    entry = Recipe("toy", "Toy", "nowhere", {"data": "digits"}, {"cpu": {}}, (Row("a"),))
    settings = entry.settings("a")
    older = {key: value for key, value in settings.items() if key != "channels_last"}
    stored = Record("toy", "a", 0, "cpu", older, {}, 1.0)
    assert stored.has_settings(settings)
    assert not stored.has_settings(entry.settings("a", overrides={"channels_last": True}))
    assert not stored.has_settings(entry.settings("a", overrides={"clip": 1.0}))


def test_scales_have_separate_folders(tmp_path):
    assert record.record_path(tmp_path, "toy", "a", 0, {}, "paper").parts[-3] == "toy@paper"
    assert record.record_path(tmp_path, "toy", "a", 0, {"epochs": 1}, "smoke").parts[-3] == "toy@smoke-f75a221d"


def test_rows_of_other_scales_run_only_by_name(tmp_path):
    base, rows = {"measure": {"size": 1}}, (Row("always"), Row("at full size"))
    chosen = {"cpu": ["always"]}
    toy = Recipe("toy", "Toy", "nowhere", base, {"cpu": {}, "paper": {}}, rows, compute=compute, default_rows=chosen)
    assert [one.row for one in execute(toy, tmp_path)] == ["always"]
    assert [one.row for one in execute(toy, tmp_path, scale="paper")] == ["always", "at full size"]
    assert [one.row for one in execute(toy, tmp_path, rows=["at full size"])] == ["at full size"]


def test_compute_gets_the_data_root(tmp_path):
    roots = []

    def read(seed, data_root):
        roots.append(data_root)
        return Outcome({"value": 1.0})

    toy = Recipe("toy", "Toy", "nowhere", {}, {"cpu": {}}, (Row("row"),), compute=read)
    execute(toy, tmp_path, data_root=tmp_path / "data")
    assert roots == [tmp_path / "data"]


@pytest.mark.parametrize("name", STORED)
def test_stored_records_belong_to_rows_and_metrics_of_the_recipes(name):
    recipe = RECIPES[name.partition("@")[0]]
    records = read_records(RESULTS, name)
    assert records
    keys = {metric.key for metric in recipe.metrics}
    for one in records:
        assert one.is_current(recipe), one.row
        assert keys & set(one.metrics), one.row


@pytest.mark.parametrize("name", STORED)
def test_stored_tables_have_the_notes_and_references_of_the_recipes(name):
    recipe = RECIPES[name.partition("@")[0]]
    table = (RESULTS / name / "table.md").read_text(encoding="utf-8")
    assert f"{recipe.note} ({recipe.reference[:1].upper()}{recipe.reference[1:]}.)" in table


@pytest.mark.parametrize("name", STORED)
def test_stored_tables_have_the_printed_numbers_of_the_recipes(name):
    recipe = RECIPES[name.partition("@")[0]]
    lines = (RESULTS / name / "table.md").read_text(encoding="utf-8").splitlines()
    table = takewhile(bool, dropwhile(lambda line: not line.startswith("|"), lines))  # the first one
    cells = [[cell.strip() for cell in line.strip("|").replace("\\|", "/").split("|")] for line in table]
    for cell_row in cells:
        if cell_row[0] not in recipe.printed:  # the heading
            continue
        in_table = dict(zip(cells[0], cell_row, strict=True))
        for metric in recipe.metrics:
            value = recipe.printed[cell_row[0]].get(metric.key)
            cell = in_table.get(f"{metric.heading}, source", "–")  # no row has a number if there is no such column
            assert cell == ("–" if value is None else format(value, metric.format)), cell_row[0]


def test_references_name_the_figures_of_the_thesis():
    assert "figure 3.3b" in RECIPES["spherenet-convergence"].reference
    assert "figure 3.4" in RECIPES["learned-parameters"].reference
    readme = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert "CNN-69" not in readme  # there is no record of CNN-69
