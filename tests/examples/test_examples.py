"""Every example runs by itself and ends with an accuracy."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
PEERS = {
    "own_model": "sklearn",
    "ten_lines": "sklearn",
    "with_accelerate": "accelerate",
    "with_lightning": "lightning",
    "with_metric_learning": "pytorch_metric_learning",
}


def test_every_example_is_known():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(PEERS)


@pytest.mark.parametrize("name", PEERS)
def test_it_learns(name, tmp_path):
    if importlib.util.find_spec(PEERS[name]) is None:
        pytest.skip(f"{PEERS[name]} is not installed")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, FOLDER / f"{name}.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = re.search(r"^accuracy (\d+\.\d) %$", done.stdout, re.M)
    assert found, done.stdout
    assert float(found[1]) > 90
