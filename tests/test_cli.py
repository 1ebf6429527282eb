import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

import hypersphere as hs
from hypersphere import recipes, report
from hypersphere.cli import commands, progress, reproduce
from hypersphere.cli.recipe_results import write_report
from hypersphere.data import DamagedData, ForbiddenGlobal, MissingData
from hypersphere.recipes import Metric, Outcome, Recipe, Row, execute, planning, read_records
from hypersphere.training.config import merge
from processes import Command, command_group

COMMAND = [sys.executable, "-m", "hypersphere"]
ENVIRONMENT = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"}
SMALL = ["--set", "epochs=1", "--set", "model.widths=[4,4]"]


def hypersphere(*words, environment=(), **more):
    return subprocess.run(
        [*COMMAND, *map(str, words)],
        capture_output=True, text=True, timeout=300, env=ENVIRONMENT | dict(environment), **more,
    )  # fmt: skip


@pytest.fixture
def run_main(monkeypatch, capsys):
    """Run the command in this process; return its code, its output and its errors."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["hypersphere", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            commands.main()
        return ended.value.code or 0, *capsys.readouterr()

    return run


def toy(row):
    """Return a recipe with one row that computes nothing."""
    rows = (Row(row),)
    return Recipe("toy", "Toy", "nowhere", {}, {"cpu": {}}, rows, compute=lambda seed: Outcome({}))


@pytest.mark.slow
def test_reproduce_prints_a_table_and_the_path_of_its_report(tmp_path, run_main, monkeypatch):
    monkeypatch.setenv("COLUMNS", ENVIRONMENT["COLUMNS"])
    monkeypatch.setenv("NO_COLOR", ENVIRONMENT["NO_COLOR"])
    code, out, errors = run_main("reproduce", "digits", "--out", tmp_path, *SMALL)
    assert code == 0, errors
    for word in ("accuracy", "Fisher", "angle", "energy", "seconds", "A-Softmax (m=4)", "A-Softmax + energy"):
        assert word in out
    assert "One seed, so the noise is not known" in out
    assert "\x1b" not in out + errors  # no colours and no progress bars
    assert "…" not in out
    assert "[3/3]" in errors
    (report,) = tmp_path.glob("digits@*/report.html")
    assert out.rstrip().endswith(str(report))
    page = report.read_text(encoding="utf-8")
    assert page.count("<canvas") == 3
    assert not re.search(r"""(src|href)=["']?https?:""", page)
    again = hypersphere(
        "reproduce", "digits", "--out", tmp_path, "--seeds", "2", *SMALL, environment={"PYTHONIOENCODING": "ascii"}
    )
    assert again.returncode == 0, again.stderr
    assert "+/-" in again.stdout
    assert "2 seeds" in again.stdout
    assert len(list(tmp_path.rglob("seed-*.json"))) == 6


def test_list_shows_all_menus(run_main):
    code, out, _ = run_main("list")
    assert code == 0
    for word in ("a_softmax", "square_cosine", "inner_product", "additive_angle", "riesz", "cora", "digits"):
        assert re.search(rf"^  {word} +\S", out, re.M), word


def test_version(run_main):
    code, out, _ = run_main("--version")
    assert code == 0
    assert out == f"{hs.__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nonsense"], "hypersphere: name must be a recipe of `hypersphere list recipes`, or a table"),
        (["digits", "--set", "epochs"], "hypersphere: --set must be KEY=VALUE, not 'epochs'"),
        (["digits", "--set", "epoch=2"], "hypersphere: epoch is not a setting; did you mean epochs?"),
        (["digits", "--set", "epochs=many"], "hypersphere: epochs must be an integer >= 1, or null, not 'many'"),
        (["digits", "--set", "measure.nothing=1"], "hypersphere: measure.nothing is not a setting of digits"),
        (["digits", "--scale", "huge"], "hypersphere: scale must be one of paper, cpu, smoke, not 'huge'"),
        (["digits", "--row", "x"], "hypersphere: row must be one of Softmax, "),
        (["digits", "--device", "toaster"], "hypersphere: device 'toaster' cannot be used"),
        (["digits", "--out", "/proc/nowhere"], "hypersphere: out must be a writable folder"),
    ],
)
def test_reproduce_rejects_invalid_input_with_code_2(words, message, tmp_path, run_main, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, errors = run_main("reproduce", *words)
    assert code == 2
    assert errors.startswith(message)
    assert errors.count("\n") == 1


def test_unknown_command_exits_with_code_2(run_main):
    code, _, errors = run_main("nonsense")
    assert code == 2
    assert "nonsense" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("two\nlines"), 2),
        (MissingData("no data folder"), 2),
        (ImportError("this needs scikit-learn"), 2),
        (DamagedData("half a file"), 3),
        (ForbiddenGlobal("os.system"), 3),
        (OSError(28, "No space left on device"), 1),
        (FloatingPointError("the loss became nan"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_are_one_line_with_their_exit_code(error, code, run_main, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(recipes, "execute", fail)
    ended, out, errors = run_main("reproduce")
    assert ended == code
    assert out == ""
    assert errors.startswith("hypersphere: ")
    assert errors.count("\n") == 1


def test_reproduce_reports_diverged_rows_below_the_table(tmp_path, run_main):
    code, words, _ = run_main("reproduce", "--out", tmp_path, "--row", "Softmax", *SMALL, "--set", "optimizer.lr=1e30")
    assert code == 0
    assert "Diverged: Softmax (1 of 1)." in words


@pytest.mark.slow
def test_reproduce_prints_in_the_first_process_only(tmp_path):
    """The diverged row gives a message, a line of progress and a table."""
    words = ["reproduce", "--out", tmp_path / "out", "--row", "Softmax", *SMALL, "--set", "optimizer.lr=1e30"]
    group = command_group(words, 2, tmp_path / "output")
    try:
        (code, out, errors), others = (process.wait() for process in group)
    finally:
        for process in group:
            process.kill()
    assert code == 0, errors
    assert others == (0, "", "")
    assert "Diverged: Softmax (1 of 1)." in out
    assert "hypersphere: Softmax, seed 0: training diverged" in errors
    assert "[1/1] Softmax, seed 0" in errors


def test_reproduce_dry_run_prints_the_settings_and_runs_nothing(tmp_path, run_main, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, errors = run_main(
        "reproduce", "T2.8", "--scale", "paper", "--dry-run", "--set", "batch_size=3", "--seeds", "2"
    )
    assert (code, errors) == (0, "")
    plan = json.loads(out)
    assert (plan["recipe"], plan["scale"], plan["seeds"]) == ("lfw", "paper", [0, 1])
    assert list(plan["rows"]) == [row.name for row in recipes.RECIPES["lfw"].rows]
    assert all(merge(plan["shared"], row)["batch_size"] == 3 for row in plan["rows"].values())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scale", recipes.SCALES)
@pytest.mark.parametrize("name", recipes.RECIPES)
def test_dry_run_shows_each_setting_once_and_all_of_them(name, scale, run_main, monkeypatch):
    recipe = recipes.RECIPES[name]
    if scale != "smoke":  # larger networks take longer to build; tests/recipes/test_planning.py builds them
        monkeypatch.setattr(planning, "_parameters", lambda *_: {})
    code, out, _ = run_main("reproduce", name, "--scale", scale, "--dry-run")
    assert code == 0
    plan = json.loads(out)
    assert list(plan["rows"]) == [row.name for row in recipe.rows_at(scale)]
    for row, rest in plan["rows"].items():
        assert merge(plan["shared"], rest) == recipe.settings(row, scale, {}, plan["seeds"][0])
        assert len(plan["rows"]) == 1 or not [key for key in rest if rest[key] == plan["shared"].get(key, rest)]
    if scale == "smoke":
        assert plan == recipes.plan(recipe, scale=scale)


def test_dry_run_of_one_row_shows_all_its_settings(run_main):
    _, out, _ = run_main("reproduce", "digits", "--row", "Softmax", "--dry-run")
    plan = json.loads(out)
    assert plan["rows"] == {"Softmax": recipes.RECIPES["digits"].settings("Softmax", "cpu", {}, plan["seeds"][0])}
    assert plan["shared"] == {}


def test_dry_run_prints_changed_settings_one_per_line_before_the_others(run_main):
    _, out, _ = run_main("reproduce", "T6.1", "--scale", "smoke", "--dry-run")
    lines = [line.strip() for line in out.splitlines()]
    shared = lines[lines.index('"shared": {') + 1 :]
    assert shared[0].startswith('"data": {')
    defaults = next(place for place, line in enumerate(shared) if '"selection": 0.0, "sampler": ' in line)
    assert not any('"clip": null' in line or '"seed": 0' in line for line in shared[:defaults])
    assert any('"clip": null' in line for line in shared[defaults:])
    assert len(lines) < 80


def test_list_recipes_prints_json(run_main, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results" / "digits" / "Softmax").mkdir(parents=True)
    (tmp_path / "results" / "digits" / "Softmax" / "seed-0.json").write_text("{}")
    listed = json.loads(run_main("list", "recipes", "--json")[1])
    assert [one["name"] for one in listed] == list(recipes.RECIPES)
    assert all({"name", "covers", "scales", "cost", "records"} <= one.keys() for one in listed)
    assert listed[0]["records"] == ["results/digits/Softmax/seed-0.json"]


def test_reproduce_interrupt_says_that_rows_are_kept(tmp_path):
    out = tmp_path / "out"
    process = Command(["reproduce", "--out", out, "--set", "epochs=100000"], tmp_path / "output")
    for _ in range(600):
        if list(out.glob("*/*")):
            break
        time.sleep(0.1)
    process.kill(signal.SIGINT)
    code, _, errors = process.wait()
    assert errors == "hypersphere: interrupted; finished rows are kept\n"
    assert code == 130


def test_closed_output_pipe_is_silent():
    process = subprocess.Popen([*COMMAND, "list"], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 1


def test_reproduce_passes_the_data_root_without_changing_the_environment(tmp_path, monkeypatch, capsys):
    seen = []

    def execute(recipe, out, *, data_root, **more):
        seen.append((data_root, os.environ.get("HYPERSPHERE_DATA")))
        return run_rows(recipe, out, data_root=data_root, **more)

    run_rows = recipes.execute
    monkeypatch.setattr(recipes, "execute", execute)
    monkeypatch.setitem(recipes.RECIPES, "toy", toy("[bold]row[/bold]"))
    monkeypatch.delenv("HYPERSPHERE_DATA", raising=False)
    out = tmp_path / "[red]"
    reproduce.reproduce("toy", out=out, data_root=tmp_path)
    assert seen == [(tmp_path, None)]
    assert str(out / "toy" / "report.html") in capsys.readouterr().out


def test_reproduce_shows_progress_in_the_first_process_only(tmp_path, monkeypatch):
    monkeypatch.setitem(recipes.RECIPES, "toy", toy("row"))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(progress, "recipe_progress", lambda *_: pytest.fail("a bar was made"))
    reproduce.reproduce("toy", out=tmp_path)
    assert list((tmp_path / "toy").rglob("seed-0.json"))


def test_bar_does_not_interpret_markup_in_names():
    recipe = toy("[bold]row[/bold]")
    out = io.StringIO()
    with progress.recipe_progress(Console(file=out, force_terminal=True, width=100), 1) as show:
        show(recipe.rows[0], 0, 0.5)
    assert "[bold]row[/bold], seed 0" in out.getvalue()


def test_progress_says_which_rows_were_recorded_before(capsys):
    row = toy("row").rows[0]
    with progress.recipe_progress(Console(file=io.StringIO()), 2) as show:
        show(row, 0, 1.0)
        show(row, 1, 0.0)
        show(row, 1, 1.0)
    assert capsys.readouterr().err == "[1/2] row, seed 0: recorded\n[2/2] row, seed 1\n"


def test_reproduce_writes_the_page_before_printing(tmp_path, monkeypatch):
    monkeypatch.setitem(recipes.RECIPES, "toy", toy("row"))

    def fail(*_):
        raise BrokenPipeError

    monkeypatch.setattr(report, "print_table", fail)
    with pytest.raises(BrokenPipeError):
        reproduce.reproduce("toy", out=tmp_path)
    assert (tmp_path / "toy" / "report.html").exists()


def test_write_report_needs_only_records(tmp_path):
    import torch

    def compute(seed, dim):
        return Outcome({"value": float("nan")}, {}, {"features": torch.rand(4, dim), "labels": torch.arange(4)})

    dims = {"z": 3, "a": 3, "thin": 1, "deep": 9}
    rows = tuple(Row(name, {"measure": {"dim": dim}}) for name, dim in dims.items())
    base, metrics = {"measure": {"dim": 3}}, (Metric("value", "value"),)
    recipe = Recipe("toy", "Toy", "nowhere", base, {"cpu": {}}, rows, (0, 1), metrics, compute=compute)
    execute(recipe, tmp_path)
    page = write_report(recipe, read_records(tmp_path, "toy"), tmp_path).read_text(encoding="utf-8")
    assert re.findall("<h3>(.*?)</h3>", page)[:2] == ["z", "a"]
    with pytest.raises(ValueError, match="records must be at least one record"):
        write_report(recipe, [], tmp_path)
    assert json.loads(next(tmp_path.rglob("seed-0.json")).read_text())["metrics"] == {"value": None}
