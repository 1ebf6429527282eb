"""What `hypersphere list` shows: the menus, straight from their dictionaries."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from rich.console import Console

from hypersphere.data import DATASETS
from hypersphere.functions.angular import ANGULARS
from hypersphere.functions.kernel import KERNELS
from hypersphere.functions.magnitude import WEIGHTINGS
from hypersphere.functions.margin import MARGINS
from hypersphere.functions.menu import require
from hypersphere.functions.projection import PROJECTIONS
from hypersphere.heads import PRESETS
from hypersphere.models import MODELS
from hypersphere.recipes import RECIPES
from hypersphere.robustness import ATTACKS
from hypersphere.training.job import REGULARIZERS
from hypersphere.training.network import OPERATORS
from hypersphere.training.rotating import ROTATIONS

__all__ = ["MENUS", "print_catalogue"]

MENUS: dict[str, Mapping[str, Any]] = {
    "heads": PRESETS,
    "margins": MARGINS,
    "operators": OPERATORS,
    "angular activations": ANGULARS,
    "weightings": WEIGHTINGS,
    "regularisers": REGULARIZERS,
    "energy kernels": KERNELS,
    "projections": PROJECTIONS,
    "rotations": ROTATIONS,
    "networks": MODELS,
    "attacks": ATTACKS,
    "data sets": DATASETS,
    "recipes": RECIPES,
}


def print_catalogue(only: str | None = None) -> None:
    """Print every menu, or only one, with one line an entry; "none", the default of some, is left out."""
    require(only is None or only in MENUS, "menu", f"one of {', '.join(MENUS)}", only)
    console = Console(highlight=False, soft_wrap=True)
    for title, menu in MENUS.items():
        if only not in (None, title):
            continue
        console.print(title, style="bold")
        names = [name for name in menu if name != "none"]
        width = max(map(len, names))
        for name in names:
            console.print(f"  {name:<{width}}  {summary(menu[name])}", markup=False)


def summary(entry: Any) -> str:
    """The one line that an entry says of itself; for a network, what its name stands for.

    >>> summary(MODELS["sphereface4"])
    'SphereFaceNet with units=(0, 0, 0, 0)'
    """
    if isinstance(entry, partial):
        sizes = (f"{key}={getattr(value, '__name__', value)}" for key, value in entry.keywords.items())
        return f"{entry.func.__name__} with {', '.join(sizes)}"
    return str(getattr(entry, "title", None) or (entry.__doc__ or "").strip()).splitlines()[0]
