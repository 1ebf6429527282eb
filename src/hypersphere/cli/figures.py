"""Figures for the pages of recipes and of runs: learned parameters, landscapes on one scale, the table of settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hypersphere import report
from hypersphere.cli.words import words_of

__all__ = ["ABOUT_DIRECTIONS", "LEARNED", "landscape_maps", "learned_histogram", "settings_table"]

LEARNED = {"k": ("Learned k", "k"), "radius_factor": ("Learned factor of ρ", "factor of ρ")}
LANDSCAPES = {"loss": ("loss", ".3f"), "error": ("test error %", ".1f")}
ABOUT_DIRECTIONS = (
    "Along two random directions, scaled so that each filter of a direction has the norm of the filter it is added to."
)
STEEP = 10  # colours are logarithmic if the largest value is more than this times the smallest


def learned_histogram(key: str, values: Mapping[str, Tensor], start: float | None = None) -> report.Histogram:
    """Return a histogram of learned k or factors of ρ, one distribution per name, with their initial value."""
    title, name = LEARNED[key]
    drawn = [report.Distribution(of, numbers) for of, numbers in values.items()]
    return report.Histogram(title, drawn, x_name=name, marks={} if start is None else {"start": start})


def landscape_maps(key: str, grids: Mapping[str, Tensor], coordinates: Mapping[str, Tensor]) -> list[report.Landscape]:
    """Return landscapes of "loss" or "error" on a common colour scale.

    Args:
        key: "loss" or "error".
        grids: grids (P, P) by name; entry [i, j] belongs to the i-th coordinate of the first direction.
        coordinates: coordinates (P,) by name, the same for both directions.
    """
    name, form = LANDSCAPES[key]
    finite = torch.cat([grid[grid.isfinite()].double() for grid in grids.values()])
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    maps = []
    for of, grid in grids.items():
        ends = float(coordinates[of][0]), float(coordinates[of][-1])
        maps.append(
            report.Landscape(
                of,
                grid.T,  # the first direction is the horizontal axis
                x=ends,
                y=ends,
                value_name=name,
                format=form,
                log=key == "loss" and low > 0 and high / low > STEEP,
                limits=(low, high) if low < high else None,
                marks={"trained": (0.0, 0.0)},
            )
        )
    return maps


def settings_table(settings: Mapping[str, Any], caption: str = "") -> report.Table:
    """Return a table with one row per setting."""
    rows = [[key, words_of(value)] for key, value in settings.items()]
    return report.Table("Settings", [report.Column("setting"), report.Column("value")], rows, caption)
