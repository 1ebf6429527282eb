"""Old public names and arguments that keep working for one release, with a `DeprecationWarning`."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from hypersphere._validation import nearest_name

__all__ = ["accept_old_methods", "deprecated_argument", "deprecated_attribute", "deprecated_names"]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def deprecated_argument(old: str, new: str) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Decorate a function to accept the keyword argument `new` also under its old name, with a warning.

    The signature of the function does not change, so that documentation and configs show only the new name.

    Example:
        >>> @deprecated_argument("colour_count", "colors")
        ... def paint(colors: int = 1) -> int:
        ...     return colors
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     paint(colour_count=3)
        3
        >>> str(caught[0].message)
        'the argument colour_count is deprecated, use colors instead'
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(function)
        def accept_old_name(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            if old in kwargs:
                message = f"the argument {old} is deprecated, use {new} instead"
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                if new in kwargs:
                    raise TypeError(f"{new} was given twice, also under its old name {old}")
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return accept_old_name

    return decorate


def deprecated_names(module: str, renamed: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module-level `__getattr__` that forwards old names and warns, and suggests the nearest public name.

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
            near = nearest_name(name, getattr(sys.modules.get(module), "__all__", ()))
            raise AttributeError(f"module {module!r} has no attribute {name!r}{near}")
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


def accept_old_methods(cls: type, renamed: Mapping[str, str]) -> None:
    """Let a subclass of an abstract class define methods under their old names, with a warning.

    Args:
        cls: the new subclass. Call this function in `__init_subclass__`.
        renamed: for each old name, the new one.
    """
    for old, new in renamed.items():
        if old in vars(cls) and new not in vars(cls):
            message = f"{cls.__name__}.{old} is deprecated, define {new} instead"
            # The frames between this one and the class statement: `__init_subclass__` and `ABCMeta.__new__`.
            warnings.warn(message, DeprecationWarning, stacklevel=4)
            setattr(cls, new, vars(cls)[old])
