"""A table and a page with realistic figures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hypersphere.report import Column, Page, Sphere, Spheres, Table, Text, write_page


def clusters(spread: float, dimension: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ten noisy classes around random directions: points, labels, class vectors."""
    random = np.random.default_rng(0)
    vectors = random.normal(size=(10, dimension))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    labels = random.integers(0, 10, 400)
    return vectors[labels] + random.normal(0, spread, (400, dimension)), labels, vectors


@pytest.fixture(scope="session")
def table() -> Table:
    columns = (
        Column("Objective"),
        Column("Test accuracy", True, ".2%"),
        Column("Energy", False, ".3f"),
        Column("Seconds", None, ".1f", " s"),
    )
    rows = (
        ("softmax", (0.9612, 0.002), 1.41, 11.2),
        ("A-Softmax", (0.9794, 0.001), 1.2, 12.9),
        ("A-Softmax + energy", (0.9781, 0.001), 1.17, None),
    )
    return Table("Summary", columns, rows, caption="Three seeds.")


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory, table: Table) -> Path:
    wide, narrow, flat = clusters(0.3), clusters(0.05), clusters(0.1, dimension=2)
    sections = [
        table,
        Spheres("Features", [Sphere("softmax", *wide), Sphere("A-Softmax", *narrow)]),
        Spheres("Circle", [Sphere("flat", *flat, classes=tuple("abcdefghij"))]),
        Text("Notes", "One.\n\nTwo."),
    ]
    made = Page("Three objectives", "The same network.", sections, {"Device": "cpu"})
    return write_page(tmp_path_factory.mktemp("report") / "page.html", made)
