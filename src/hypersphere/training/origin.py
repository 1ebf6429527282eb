"""Provenance of results: versions, machine, threads and the commit of the source."""

from __future__ import annotations

import importlib
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy
import torch

__all__ = ["commit_of", "made_with"]


def made_with() -> dict[str, Any]:
    """Return what a result depends on apart from its settings.

    >>> sorted(made_with())
    ['commit', 'hypersphere', 'machine', 'numpy', 'python', 'threads', 'torch']
    """
    return {
        "hypersphere": importlib.import_module("hypersphere").__version__,  # the package itself is in a higher layer
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "commit": commit_of(Path(__file__)),
    }


def commit_of(file: Path) -> str | None:
    """Return the commit of the checkout of a file, marked if the package has changes; None without a checkout."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *words], cwd=file.parent, capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    if git("ls-files", "--error-unmatch", file.name) is None:  # for example installed inside an unrelated checkout
        return None
    commit = git("rev-parse", "--short=12", "HEAD")
    return commit and commit + ("+changes" if git("status", "--porcelain", "--", str(file.parent.parent)) else "")
