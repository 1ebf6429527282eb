"""What `hypersphere list` shows: the menus, straight from their dictionaries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from hypersphere.data import DATASETS
from hypersphere.functions.angular import ANGULARS
from hypersphere.functions.kernel import KERNELS
from hypersphere.functions.magnitude import MAGNITUDES, WEIGHTINGS
from hypersphere.functions.margin import MARGINS
from hypersphere.functions.orthogonal import ORTHOGONALS
from hypersphere.functions.projection import PROJECTIONS
from hypersphere.functions.transform import TRANSFORMS
from hypersphere.heads import PRESETS
from hypersphere.models import MODELS
from hypersphere.recipes import RECIPES
from hypersphere.robustness import ATTACKS

__all__ = ["MENUS", "print_catalogue"]

MENUS: dict[str, Mapping[str, Any]] = {
    "heads": PRESETS,
    "margins": MARGINS,
    "angular activations": ANGULARS,
    "magnitudes": MAGNITUDES,
    "weightings": WEIGHTINGS,
    "energy kernels": KERNELS,
    "projections": PROJECTIONS,
    "orthogonal maps": ORTHOGONALS,
    "other transforms": TRANSFORMS,
    "networks": MODELS,
    "attacks": ATTACKS,
    "data sets": DATASETS,
    "recipes": RECIPES,
}


def print_catalogue() -> None:
    """Print every menu with one line an entry."""
    console = Console(highlight=False, soft_wrap=True)
    for title, menu in MENUS.items():
        console.print(title, style="bold")
        width = max(len(name) for name in menu)
        for name, entry in menu.items():
            console.print(f"  {name:<{width}}  {summary(entry)}", markup=False)


def summary(entry: Any) -> str:
    """The one line that an entry says of itself."""
    text = getattr(entry, "title", None) or (getattr(entry, "func", entry).__doc__ or "").strip()
    return str(text).splitlines()[0]
