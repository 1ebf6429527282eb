"""One section of every kind, with realistic numbers."""

from __future__ import annotations

import numpy as np

from hypersphere.report import (
    Chart,
    Column,
    Images,
    Section,
    Series,
    SideBySide,
    Sphere,
    Spheres,
    Table,
    Tabs,
    Text,
    project,
)
from hypersphere.report.charts import bars, heat_map, histogram, landscape, lines, scatter

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
METHODS = ("Softmax", "A-Softmax (m=4)", "A-Softmax + energy")


def every_section() -> list[Section]:
    random = np.random.default_rng(1)
    epochs = np.arange(1, 31)
    losses = [
        Series(name, height * np.exp(-epochs / 4) + floor + random.normal(0, 0.02, (5, 30)))
        for name, height, floor in zip(METHODS, (2.2, 5.5, 5.6), (0.15, 0.62, 0.55), strict=True)
    ]
    layers = [f"conv{block}_{layer}" for block in (1, 2, 3) for layer in (1, 2, 3)]
    energies = [Series(name, 1.05 + 0.2 / epochs + 0.02 * place) for place, name in enumerate(layers)]
    rates = np.geomspace(1e-5, 1, 3000)
    rocs = [Series(name, rates**power, x=rates) for name, power in zip(METHODS, (0.3, 0.15, 0.1), strict=True)]
    vectors = random.normal(size=(10, 32))
    labels = random.integers(0, 10, 300)
    seen = project(vectors[labels] + random.normal(0, 0.5, (300, 32)), vectors)
    angles = 90 + random.normal(0, 12, (10, 10))
    np.fill_diagonal(angles, np.nan)
    line = np.linspace(-1, 1, 25)
    samples = {"same": random.normal(35, 9, 900), "different": random.normal(88, 9, 9000)}
    loss = lines(losses, y_name="training loss", format=".3f", log_y=True, higher_is_better=False)
    names = {"x_name": "false accept rate", "y_name": "true accept rate"}
    redundancy = [Series("trained", random.uniform(0.7, 1, (3, 9))), Series("random", [1] * 9)]
    flat = random.normal(size=(300, 2)) * (1 + labels[:, None])
    return [
        Table("Summary", [Column("method"), Column("accuracy", True, ".2%")], [("a", 0.9), ("b", (0.95, 0.01))]),
        SideBySide(
            "Training",
            [
                Chart("Loss", loss),
                Chart("Energy", lines(energies, y_name="energy", format=".3f", ordered=True)),
            ],
        ),
        Chart("Verification", lines(rocs, **names, format=".1%", log_x=True)),
        Tabs(
            "Geometry",
            [
                Chart(
                    "Angles",
                    histogram(samples, x_name="angle in degrees", format=".1f", marks={"threshold": 58.3}),
                ),
                Spheres("Features", [Sphere("projected", seen.points, labels, seen.vectors, classes=CLASSES)]),
                Chart("Class vectors", heat_map(angles, CLASSES, value_name="angle in degrees", format=".0f")),
                Chart("Redundancy", bars(layers, redundancy)),
            ],
        ),
        Tabs(
            "Learned",
            [
                Images("Filters", random.normal(size=(32, 3, 7, 7))),
                Chart("Landscape", landscape(line[:, None] ** 2 + 2 * line**2, marks={"trained": (0, 0)})),
                Chart("Norms", scatter(flat, labels, classes=CLASSES)),
            ],
        ),
        Text("Notes", "All of it is made up."),
    ]
