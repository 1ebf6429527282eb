"""Run functions and commands in other processes, which are forked from a server that has imported the library."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Far more than any test needs on a busy machine. A test that waits longer fails instead of stopping all others.
SECONDS = 240
# Imported once, by the server from which all processes are forked: that costs more than most tests. The first optimizer
# of a process would import torch._dynamo.
PRELOADED = [
    "torch.distributed.fsdp",
    "torch._dynamo",
    "hypersphere.recipes",
    "hypersphere.training.trainer",
    "hypersphere.cli.train",
    "hypersphere.cli.training",
    "pytest",
]


def run_processes(function: Callable[..., Any], size: int, folder: Path, *arguments: Any) -> None:
    """Call `function(rank, *arguments)` in `size` processes with one thread each, and wait for all of them.

    The processes meet in a file in `folder`, so that no other test can take their port.
    """
    folder.mkdir(parents=True, exist_ok=True)
    meeting_point = folder / f"rendezvous-{time.monotonic_ns()}"
    multiprocessing.set_forkserver_preload(PRELOADED)
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


class Command:
    """The command `hypersphere` in a forked process, which saves the seconds that a new interpreter needs for imports.

    Args:
        words: arguments of the command.
        folder: where its output is stored.
        environment: variables that are added to the environment of the process.
    """

    def __init__(self, words: Sequence[str], folder: Path, environment: dict[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = [folder / f"{stream}-{time.monotonic_ns()}" for stream in ("stdout", "stderr")]
        multiprocessing.set_forkserver_preload(PRELOADED)
        arguments = ([*map(str, words)], [*map(str, self._files)], environment or {})
        self._process = multiprocessing.get_context("forkserver").Process(target=_run_command, args=arguments)
        self._process.start()

    def poll(self) -> int | None:
        """Return the exit code, or None if the process is running."""
        return self._process.exitcode

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process unless it has ended."""
        if self._process.is_alive():
            os.kill(self._process.pid, number)

    def wait(self) -> tuple[int, str, str]:
        """Wait for the end of the process; return its exit code, its output and its errors."""
        self._process.join(SECONDS)
        code = self._process.exitcode
        if code is None:
            self.kill()
            raise TimeoutError(f"the command did not finish within {SECONDS} seconds")
        out, errors = (path.read_text(encoding="utf-8") if path.exists() else "" for path in self._files)
        return code, out, errors


def command_group(words: Sequence[str], size: int, folder: Path) -> list[Command]:
    """Start a command in `size` processes, with the variables that torchrun sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [Command(words, folder, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(size)]


def _run_command(words: list[str], files: list[str], environment: dict[str, str]) -> None:
    for descriptor, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update({"COLUMNS": "120", "NO_COLOR": "1", **environment})
    torch.set_num_threads(1)
    sys.argv = ["hypersphere", *words]
    from hypersphere.cli import main

    main()
