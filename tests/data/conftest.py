"""Fixtures: small files in every format, and real data if HYPERSPHERE_DATA is set."""

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def real() -> Callable[[str], Path]:
    """Return the data root if HYPERSPHERE_DATA names one that contains the folder; otherwise skip the test."""
    given = os.environ.get("HYPERSPHERE_DATA")

    def root_with(folder: str) -> Path:
        root = Path(given or "")
        if not given or not (root / folder).exists():
            pytest.skip(f"no real data: set HYPERSPHERE_DATA to a folder that contains {folder}")
        return root

    return root_with


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, bytes], Path]:
    """Return a function that writes bytes below tmp_path, gzipped if the name ends in .gz."""

    def write_file(name: str, content: bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return path

    return write_file


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes arrays to an npz file below tmp_path."""

    def save_arrays(name: str, arrays: dict) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        np.savez_compressed(path, **arrays)
        return path

    return save_arrays
