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
from hypersphere.cli import commands, reproduce, summary
from hypersphere.data import DamagedData, ForbiddenGlobal, MissingData
from hypersphere.recipes import Metric, Outcome, Recipe, Record, Row, execute, read_records

COMMAND = [sys.executable, "-m", "hypersphere"]
ENVIRONMENT = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"}
SMALL = ["--set", "epochs=1", "--set", "widths=[4,4]"]


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


def test_reproduce_prints_a_table_and_the_path_of_its_report(tmp_path):
    done = hypersphere("reproduce", "digits", "--out", tmp_path, *SMALL)
    assert done.returncode == 0, done.stderr
    for word in ("accuracy", "Fisher", "angle", "energy", "seconds", "A-Softmax (m=4)", "A-Softmax + energy"):
        assert word in done.stdout
    assert "One seed." in done.stdout
    assert "\x1b" not in done.stdout + done.stderr  # no colours and no progress bars
    assert "…" not in done.stdout
    assert "[3/3]" in done.stderr
    (report,) = tmp_path.glob("digits@*/report.html")
    assert done.stdout.rstrip().endswith(str(report))
    page = report.read_text(encoding="utf-8")
    assert page.count("<canvas") == 3
    assert not re.search(r"""(src|href)=["']?https?:""", page)
    again = hypersphere(
        "reproduce", "digits", "--out", tmp_path, "--seeds", "2", *SMALL, environment={"PYTHONIOENCODING": "ascii"}
    )
    assert again.returncode == 0, again.stderr
    assert "+/-" in again.stdout
    assert "2 seeds, mean +/- s.d.\n" in again.stdout
    assert len(list(tmp_path.rglob("seed-*.json"))) == 6


def test_list_shows_all_menus():
    done = hypersphere("list")
    assert done.returncode == 0
    for word in ("a_softmax", "square_cosine", "inner_product", "additive_angle", "riesz", "cora", "digits"):
        assert re.search(rf"^  {word} +\S", done.stdout, re.M), word


def test_version(run_main):
    code, out, _ = run_main("--version")
    assert code == 0
    assert out == f"{hs.__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nonsense"], "hypersphere: name must be one of digits"),
        (["digits", "--set", "epochs"], "hypersphere: --set must be KEY=VALUE, not 'epochs'"),
        (["digits", "--set", "epoch=2"], "hypersphere: overrides must be settings of digits"),
        (["digits", "--set", "epochs=many"], "hypersphere: epochs must be a value like 30, not 'many'"),
        (["digits", "--set", "widths=[1.5]"], "hypersphere: widths must be a value like [32, 64], not [1.5]"),
        (["digits", "--set", "widths=[0]"], "hypersphere: widths must be a sequence of 1 or more integers >= 1"),
        (
            ["digits", "--set", "head=softmax"],
            "hypersphere: overrides must be settings that row 'A-Softmax (m=4)' does",
        ),
        (["digits", "--row", "x"], "hypersphere: rows must be names among"),
        (["digits", "--out", "/proc/nowhere"], "hypersphere: out must be a writable folder"),
    ],
)
def test_reproduce_rejects_invalid_input_with_code_2(words, message, tmp_path, run_main, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, errors = run_main("reproduce", *words)
    assert code == 2
    assert errors.startswith(message)
    assert errors.count("\n") == 1


def test_unknown_command_exits_with_code_2():
    done = hypersphere("nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stderr
    assert "Traceback" not in done.stderr


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

    monkeypatch.setattr(reproduce, "reproduce", fail)
    ended, out, errors = run_main("reproduce")
    assert ended == code
    assert out == ""
    assert errors.startswith("hypersphere: ")
    assert errors.count("\n") == 1


def test_reproduce_reports_diverged_rows_below_the_table(tmp_path, run_main):
    code, words, _ = run_main("reproduce", "--out", tmp_path, "--row", "Softmax", *SMALL, "--set", "learning_rate=1e30")
    assert code == 0
    assert "Diverged: Softmax (1 of 1)." in words


def test_reproduce_interrupt_says_that_rows_are_kept(tmp_path):
    words = ["reproduce", "--out", str(tmp_path), "--set", "epochs=100000"]
    process = subprocess.Popen(
        [*COMMAND, *words],
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # processes in the background ignore SIGINT
    )
    for _ in range(600):
        if list(tmp_path.glob("*/*")):
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert errors == "hypersphere: interrupted; finished rows are kept\n"
    assert process.returncode in (130, -signal.SIGINT)  # Python exits by the signal if it arrives within exec


def test_closed_output_pipe_is_silent():
    process = subprocess.Popen([*COMMAND, "list"], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 1


def test_reproduce_passes_the_data_root_without_changing_the_environment(tmp_path, monkeypatch, capsys):
    seen = []

    def run(settings, trial):
        seen.append((trial.data_root, os.environ.get("HYPERSPHERE_DATA")))
        return Outcome({})

    toy = Recipe("toy", "Toy", "nowhere", {}, (Row("[bold]row[/bold]", {}),), (0,), (), run)
    monkeypatch.setattr(reproduce, "RECIPES", {"toy": toy})
    monkeypatch.delenv("HYPERSPHERE_DATA", raising=False)
    out = tmp_path / "[red]"
    reproduce.reproduce("toy", out, seeds=None, rows=None, assignments=[], threads=None, data_root=tmp_path)
    assert seen == [(tmp_path, None)]
    assert str(out / "toy" / "report.html") in capsys.readouterr().out


def test_bar_does_not_interpret_markup_in_names():
    toy = Recipe("toy", "Toy", "nowhere", {}, (Row("[bold]row[/bold]", {}),), (0,), (), lambda settings, trial: None)
    out = io.StringIO()
    with reproduce._Bar(Console(file=out, force_terminal=True, width=100), toy, (0,), None) as bar:
        bar(toy.rows[0], 0, 0.5)
    assert "[bold]row[/bold], seed 0" in out.getvalue()


def test_reproduce_writes_the_page_before_printing(tmp_path, monkeypatch):
    toy = Recipe("toy", "Toy", "nowhere", {}, (Row("row", {}),), (0,), (), lambda settings, trial: Outcome({}))
    monkeypatch.setattr(reproduce, "RECIPES", {"toy": toy})

    def fail(*_):
        raise BrokenPipeError

    monkeypatch.setattr(reproduce.report, "print_table", fail)
    with pytest.raises(BrokenPipeError):
        reproduce.reproduce("toy", tmp_path, seeds=None, rows=None, assignments=[], threads=None, data_root=None)
    assert (tmp_path / "toy" / "report.html").exists()


def values(*numbers):
    return [Record("toy", "row", seed, {}, {"value": number}, 1.0) for seed, number in enumerate(numbers)]


@pytest.mark.parametrize(
    ("numbers", "cell", "caption"),
    [
        ((1.0,), 1.0, "One seed."),
        ((1.0, 3.0), (2.0, 2**0.5), "2 seeds, mean ± s.d."),
        ((1.0, None, 3.0), (2.0, 2**0.5), "3 seeds, mean ± s.d."),
        ((1.0, None), 1.0, "2 seeds, mean ± s.d."),
        ((None,), None, "One seed."),
    ],
)
def test_summary_table_averages_finite_values(numbers, cell, caption):
    metrics = (Metric("value", "value"), Metric("other", "other"))
    toy = Recipe("toy", "", "", {}, (Row("row", {}, {"value": 0.5}), Row("not run", {})), (0,), metrics, None)
    table = summary.summary_table(toy, values(*numbers))
    assert [column.name for column in table.columns] == ["method", "value", "value, source", "other"]
    assert table.rows == [["row", pytest.approx(cell) if cell else cell, 0.5, None]]
    assert table.caption == caption


def test_write_report_needs_only_records(tmp_path):
    import torch

    def run(settings, trial):
        shape = (4, settings["dim"])
        return Outcome({"value": float("nan")}, {}, {"features": torch.rand(shape), "labels": torch.arange(4)})

    rows = (Row("z", {}), Row("a", {}), Row("thin", {"dim": 1}), Row("deep", {"dim": 9}))
    toy = Recipe("toy", "Toy", "nowhere", {"dim": 3}, rows, (0, 1), (Metric("value", "value"),), run)
    execute(toy, tmp_path)
    page = summary.write_report(toy, read_records(tmp_path, "toy"), tmp_path).read_text(encoding="utf-8")
    assert re.findall("<h3>(.*?)</h3>", page) == ["z", "a"]
    with pytest.raises(ValueError, match="records must be at least one record"):
        summary.write_report(toy, [], tmp_path)
    assert json.loads(next(tmp_path.rglob("seed-0.json")).read_text())["metrics"] == {"value": None}
