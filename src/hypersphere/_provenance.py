"""Provenance of results: versions, machine, threads and the commit of the source."""

from __future__ import annotations

import importlib
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy
import torch

__all__ = ["commit_of", "made_with", "versions"]


def versions() -> dict[str, Any]:
    """Return the versions and the number of threads. Results are bit-identical only if these are the same."""
    return {
        "hypersphere": importlib.import_module("hypersphere").__version__,  # the package itself is in a higher layer
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "threads": torch.get_num_threads(),
    }


def made_with() -> dict[str, Any]:
    """Return what a result depends on apart from its settings.

    >>> sorted(made_with())
    ['commit', 'hypersphere', 'machine', 'numpy', 'python', 'threads', 'torch']
    """
    machine = f"{platform.system()} {platform.machine()}"
    return {**versions(), "machine": machine, "commit": commit_of(Path(__file__))}


def commit_of(file: Path) -> str | None:
    """Return the git commit of a file, with "+changes" if its folder has changes; None if it is not in a repository."""

    def git(*words: str) -> str | None:
        command = ["git", *words]
        try:
            done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    if git("ls-files", "--error-unmatch", file.name) is None:  # for example installed inside an unrelated repository
        return None
    commit = git("rev-parse", "--short=12", "HEAD")
    return commit and commit + ("+changes" if git("status", "--porcelain", "--", str(file.parent)) else "")
