"""Helpers of the `hypersphere train` tests: small jobs, commands, and readers of their results."""

import os
import sys
import time

import pytest

from hypersphere.training import Config, Run

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = os.environ | {"COLUMNS": "120", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
SMALL = ["--data.limit=70", "--model=mlp", "--model.widths=[8]", "--batch-size=16", "--epochs=2"]
SMALL_CONFIG = Config.of(
    {
        "data": {"name": "digits", "limit": 70},
        "model": {"name": "mlp", "widths": [8]},
        "batch_size": 16,
        "epochs": 2,
    }
)


def wait_for(holds, process, seconds=300):
    for _ in range(seconds * 50):
        if holds() or process.poll() is not None:
            return
        time.sleep(0.02)
    raise AssertionError("nothing happened")


def steps_in(folder):
    """Return the steps of the checkpoints in increasing order."""
    return sorted(int(path.name[5:13]) for path in (folder / "checkpoints").glob("step-*"))


def weights(folder):
    return Run.open(folder).checkpoints(on_damage=pytest.fail).latest().weights()["objective"]


def numbers(folder, *keys):
    return [[line[key] for key in keys] for line in Run.open(folder).metrics() if line["kind"] == "epoch"]
