"""Old public names that keep working for one release, with a `DeprecationWarning`."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["deprecated_attribute", "deprecated_names"]


def deprecated_names(module: str, renamed: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module-level `__getattr__` that forwards old names and warns.

    Args:
        module: the module that had the old names. Pass its `__name__`.
        renamed: for each old name, the object that replaces it, as "package.module:name".

    Example:
        >>> lookup = deprecated_names("math2", {"old_pi": "math:pi"})
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     lookup("old_pi")
        3.141592653589793
        >>> str(caught[0].message)
        'math2.old_pi is deprecated, use math.pi instead'
    """

    def __getattr__(name: str) -> Any:
        if name not in renamed:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        target_module, _, target_name = renamed[name].partition(":")
        warnings.warn(
            f"{module}.{name} is deprecated, use {target_module}.{target_name} instead",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(importlib.import_module(target_module), target_name)

    return __getattr__


def deprecated_attribute(old: str, new: str) -> Any:
    """Return a property that forwards the old name of an attribute to its new name and warns.

    Example:
        >>> class Circle:
        ...     radius = 2.0
        ...     half_width = deprecated_attribute("half_width", "radius")
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     Circle().half_width
        2.0
        >>> str(caught[0].message)
        'Circle.half_width is deprecated, use Circle.radius instead'
    """

    def read(instance: object) -> Any:
        owner = type(instance).__name__
        warnings.warn(f"{owner}.{old} is deprecated, use {owner}.{new} instead", DeprecationWarning, stacklevel=2)
        return getattr(instance, new)

    return property(read, doc=f"Deprecated name of `{new}`.")
