"""How a choice is made from a menu: by name, by one of our objects, or by any callable."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

__all__ = ["choose", "is_number", "is_whole", "require"]

Entry = TypeVar("Entry", bound=Callable[..., Any])


def choose(menu: Mapping[str, type[Entry]], choice: str | Entry, argument: str) -> Entry:
    """Return the object that `choice` stands for; a wrong name or type raises an error that lists the menu.

    Args:
        menu: snake-case names and the classes they stand for.
        choice: a name of the menu, an object of ours, or any callable.
        argument: how the caller names this argument, for the message.

    Example:
        >>> from hypersphere.functions.angular import ANGULARS
        >>> choose(ANGULARS, "cosine", "angular")
        Cosine()
    """
    if isinstance(choice, str) and choice in menu:
        return cast(Entry, cast(Callable[[], Any], menu[choice])())
    if callable(choice) and not isinstance(choice, type):
        return choice
    names = ", ".join(repr(name) for name in menu)
    raise ValueError(f"{argument} must be one of {names}, an object of those classes or a callable, not {choice!r}")


def is_number(value: object, low: float, high: float = math.inf) -> bool:
    """Whether `value` is a number (no bool) in [low, high], and finite.

    >>> is_number(3, 1), is_number(True, 0), is_number("3", 1)
    (True, False, False)
    """
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return real and low <= value <= high and abs(value) < math.inf  # type: ignore[operator, arg-type]


def is_whole(value: object, low: float, high: float = math.inf) -> bool:
    """Whether `value` is one whole number (of Python, NumPy or torch, no truth value) in [low, high].

    >>> is_whole(2, 1), is_whole(2.0, 1), is_whole(True, 1), is_whole([2], 1)
    (True, False, False, False)
    """
    if isinstance(value, bool) or getattr(value, "ndim", 0) != 0 or not hasattr(value, "__index__"):
        return False
    try:
        return low <= operator.index(value) <= high
    except (TypeError, RuntimeError):  # a number of NumPy's or torch's that is not whole
        return False


def require(holds: bool, argument: str, accepted: str, value: object) -> None:
    """Raise a one-line `ValueError` unless `holds`.

    >>> require(0 > 1, "m", "a number >= 1", 0.5)
    Traceback (most recent call last):
    ValueError: m must be a number >= 1, not 0.5
    """
    if not holds:
        raise ValueError(f"{argument} must be {accepted}, not {value!r}")
