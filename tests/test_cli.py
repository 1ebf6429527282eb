import os
import re
import subprocess
import sys

import pytest


def hypersphere(*words, **more):
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "hypersphere", *map(str, words)],
        capture_output=True, text=True, timeout=300, env=environment, **more,
    )  # fmt: skip


def test_reproduce_prints_a_table_and_names_its_report(tmp_path):
    small = ["--set", "epochs=1", "--set", "widths=[4,4]"]
    done = hypersphere("reproduce", "digits", "--out", tmp_path, *small)
    assert done.returncode == 0, done.stderr
    for word in ("accuracy", "Fisher", "angle", "energy", "seconds", "A-Softmax (m=4)", "A-Softmax + energy"):
        assert word in done.stdout
    assert "\x1b" not in done.stdout + done.stderr  # no colours, no bars
    assert "…" not in done.stdout
    assert "[3/3]" in done.stderr
    report = tmp_path / "digits" / "report.html"
    assert done.stdout.rstrip().endswith(str(report))
    page = report.read_text(encoding="utf-8")
    assert page.count("<canvas") == 3
    assert not re.search(r"""(src|href)=["']?https?:""", page)
    again = hypersphere("reproduce", "digits", "--out", tmp_path, "--seeds", "2", *small)
    assert "±" in again.stdout
    assert len(list(tmp_path.rglob("seed-*.json"))) == 6


def test_list_names_everything():
    done = hypersphere("list")
    assert done.returncode == 0
    for word in ("a_softmax", "square_cosine", "inner_product", "additive_angle", "riesz", "cora", "digits"):
        assert re.search(rf"^  {word} +\S", done.stdout, re.M), word


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", hypersphere("--version").stdout)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["reproduce", "nonsense"], "hypersphere: name must be one of digits"),
        (["reproduce", "digits", "--set", "epochs"], "hypersphere: --set must be KEY=VALUE, not 'epochs'"),
        (["reproduce", "digits", "--set", "epoch=2"], "hypersphere: overrides must be settings of digits"),
        (["reproduce", "digits", "--row", "x"], "hypersphere: rows must be names among"),
        (["reproduce", "digits", "--out", "/proc/nowhere"], "hypersphere: out must be a folder that can be written"),
    ],
)
def test_misuse_is_one_line_and_code_2(words, message, tmp_path):
    done = hypersphere(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_unknown_command_is_code_2():
    done = hypersphere("nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stderr
