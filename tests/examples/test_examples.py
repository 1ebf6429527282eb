"""Every example runs as a script and ends with an accuracy above 90 %."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
REQUIRED_PACKAGE = {
    "experiment": "sklearn",
    "own_model": "sklearn",
    "ten_lines": "sklearn",
    "with_accelerate": "accelerate",
    "with_lightning": "lightning",
    "with_metric_learning": "pytorch_metric_learning",
}


def test_examples_are_all_tested():
    # `rotation_adapters` has tests of its own.
    assert {path.stem for path in FOLDER.glob("*.py")} == {*REQUIRED_PACKAGE, "rotation_adapters"}


@pytest.mark.slow
@pytest.mark.parametrize("name", REQUIRED_PACKAGE)
def test_example_learns(name, tmp_path):
    if importlib.util.find_spec(REQUIRED_PACKAGE[name]) is None:
        pytest.skip(f"{REQUIRED_PACKAGE[name]} is not installed")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, FOLDER / f"{name}.py"]
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    match = re.search(r"^accuracy (\d+\.\d) %$", process.stdout, re.M)
    assert match, process.stdout
    assert float(match[1]) > 90
