"""Run a function in several processes that form a process group."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Far more than any test needs on a busy machine. A test that waits longer fails instead of stopping all others.
SECONDS = 240
# Imported once, by the server from which all processes are forked: that costs more than most tests.
PRELOADED = ["torch.distributed.fsdp", "hypersphere.recipes", "hypersphere.training.trainer", "sklearn.datasets"]


def run_processes(function: Callable[..., Any], size: int, folder: Path, *arguments: Any) -> None:
    """Call `function(rank, *arguments)` in `size` processes with one thread each, and wait for all of them.

    The processes meet in a file in `folder`, so that no other test can take their port.
    """
    folder.mkdir(parents=True, exist_ok=True)
    meeting_point = folder / f"rendezvous-{time.monotonic_ns()}"
    mp.set_forkserver_preload(PRELOADED)
    context = mp.start_processes(
        _in_group, (size, str(meeting_point), function, arguments), size, join=False, start_method="forkserver"
    )
    deadline = time.monotonic() + SECONDS
    while not context.join(timeout=5):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"{size} processes did not finish within {SECONDS} seconds")
    meeting_point.unlink(missing_ok=True)


def _in_group(
    rank: int, size: int, meeting_point: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(SECONDS - 20, file=sys.__stderr__)  # says where a process waits
    timeout = timedelta(seconds=SECONDS / 2)
    dist.init_process_group("gloo", f"file://{meeting_point}", timeout, size, rank)
    function(rank, *arguments)
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    # The end of a group waits for the threads of gloo while it holds Python's global lock, which these threads may be
    # waiting for. So end the process without destroying anything.
    os._exit(0)
