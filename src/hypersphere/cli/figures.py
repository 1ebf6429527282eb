"""What the pages of recipes and of runs share: learned numbers, landscapes on one scale, the table of settings."""

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
ABOUT_DIRECTIONS = "Along two random directions, each of whose filters is as long as the filter that it moves."
STEEP = 10  # highest value by the lowest, from which on colours are logarithmic


def learned_histogram(key: str, values: Mapping[str, Tensor], start: float | None = None) -> report.Histogram:
    """All learned k, or factors of ρ, by the name of what learned them, and where they started."""
    title, name = LEARNED[key]
    drawn = [report.Distribution(of, numbers) for of, numbers in values.items()]
    return report.Histogram(title, drawn, x_name=name, marks={} if start is None else {"start": start})


def landscape_maps(key: str, grids: Mapping[str, Tensor], coordinates: Mapping[str, Tensor]) -> list[report.Landscape]:
    """Landscapes of "loss" or "error", all in the same colours.

    Args:
        key: which.
        grids: by name, (P, P); entry [i, j] belongs to the i-th coordinate of the first direction.
        coordinates: by name, (P,), those of both directions.
    """
    name, form = LANDSCAPES[key]
    known = torch.cat([grid[grid.isfinite()].double() for grid in grids.values()])
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
    maps = []
    for of, grid in grids.items():
        ends = float(coordinates[of][0]), float(coordinates[of][-1])
        maps.append(
            report.Landscape(
                of,
                grid.T,  # the first direction goes to the right
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
    """One line a setting, in words."""
    rows = [[key, words_of(value)] for key, value in settings.items()]
    return report.Table("Settings", [report.Column("setting"), report.Column("value")], rows, caption)
