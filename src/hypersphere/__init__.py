"""Deep learning on the hypersphere.

Subpackages are imported at their first use, so that `import hypersphere` is fast and `hypersphere --help` does not load
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0.dev0"

if TYPE_CHECKING:
    from hypersphere import (
        data,
        energy,
        evaluation,
        functions,
        gallery,
        heads,
        layers,
        models,
        optim,
        recipes,
        report,
        robustness,
        rotation,
        sphere,
        training,
    )
    from hypersphere._layer_selection import LayerSelection, NeuronLayer, layers_of
    from hypersphere.functions import angular, kernel, magnitude, margin, orthogonal, projection, transform

_LAYER_SELECTION = ("LayerSelection", "NeuronLayer", "layers_of")
_MENUS = ("angular", "kernel", "magnitude", "margin", "orthogonal", "projection", "transform")

__all__ = [
    "LayerSelection",
    "NeuronLayer",
    "__version__",
    "angular",
    "data",
    "energy",
    "evaluation",
    "functions",
    "gallery",
    "heads",
    "kernel",
    "layers",
    "layers_of",
    "magnitude",
    "margin",
    "models",
    "optim",
    "orthogonal",
    "projection",
    "recipes",
    "report",
    "robustness",
    "rotation",
    "sphere",
    "training",
    "transform",
]


def __getattr__(name: str) -> Any:
    """Import a subpackage or a menu at its first use."""
    if name in _LAYER_SELECTION:
        return getattr(importlib.import_module("hypersphere._layer_selection"), name)
    if name in _MENUS:
        return importlib.import_module(f"hypersphere.functions.{name}")
    if name in __all__:
        return importlib.import_module(f"hypersphere.{name}")
    raise AttributeError(f"module 'hypersphere' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
