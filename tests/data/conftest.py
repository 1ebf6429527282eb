"""Fixtures: small synthetic files for every format, and real data where there is some."""

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def real() -> Callable[[str], Path]:
    """Give the data root if HYPERSPHERE_DATA names one that holds the folder, or skip the test."""
    given = os.environ.get("HYPERSPHERE_DATA")

    def root_with(folder: str) -> Path:
        root = Path(given or "")
        if not given or not (root / folder).exists():
            pytest.skip(f"no real data: set HYPERSPHERE_DATA to a folder that holds {folder}")
        return root

    return root_with


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, bytes], Path]:
    """Write bytes under tmp_path, gzipped when the name ends in .gz."""

    def write_file(name: str, content: bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return path

    return write_file
