"""Argument checks. A failed check raises a one-sentence `ValueError` that names the argument and its value.

`printable` makes names of files and classes safe to print. `warn_user` issues warnings that point to the user's line.
`guard_save_pretrained` refuses to save models that would not load again.
"""

from __future__ import annotations

import difflib
import importlib
import math
import numbers
import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

__all__ = [
    "choose",
    "guard_save_pretrained",
    "is_integer",
    "is_number",
    "nearest_name",
    "printable",
    "require",
    "require_betas",
    "require_package",
    "warn_user",
]

Entry = TypeVar("Entry", bound=Callable[..., Any])

LONGEST_VALUE = 200  # characters of a value in a message
LINE_BREAKS = "\r\n\v\f\x1c\x1d\x1e\x1f\x85\u2028\u2029"


def require(condition: bool, argument: str, accepted: str, value: object) -> None:
    """Raise a `ValueError` unless `condition` holds. The message shows the beginning and the end of a long value.

    >>> require(0 > 1, "m", "a number >= 1", 0.5)
    Traceback (most recent call last):
    ValueError: m must be a number >= 1, not 0.5
    """
    if not condition:
        raise ValueError(f"{argument} must be {accepted}, not {_shortened_repr(value)}")


def _shortened_repr(value: object) -> str:
    text = repr(value)
    half = LONGEST_VALUE // 2
    return text if len(text) <= LONGEST_VALUE else f"{text[:half]}…{text[1 - half :]}"


def choose(menu: Mapping[str, type[Entry]], choice: str | Entry, argument: str) -> Entry:
    """Create the menu entry named `choice`, or return `choice` unchanged if it is a callable.

    Args:
        menu: a dictionary from names to classes that can be created without arguments.
        choice: a name from the menu, an instance of one of its classes, or any callable.
        argument: the name of the caller's argument, for the error message.

    Example:
        >>> from hypersphere.functions.angular import ANGULARS
        >>> choose(ANGULARS, "cosine", "angular")
        Cosine()
    """
    if isinstance(choice, str) and choice in menu:
        return cast(Entry, cast(Callable[[], Any], menu[choice])())
    if callable(choice) and not isinstance(choice, type):  # a class is callable too, but an instance is expected
        return choice
    names = ", ".join(repr(name) for name in menu)
    near = nearest_name(choice, menu) if isinstance(choice, str) else ""
    accepted = f"one of {names}, an instance of those classes or a callable"
    raise ValueError(f"{argument} must be {accepted}, not {_shortened_repr(choice)}{near}")


def nearest_name(name: str, known: Iterable[str], synonyms: Mapping[str, str] | None = None) -> str:
    """Return the end of a message about an unknown name: "; did you mean …?" with the most similar known one, or "".

    Args:
        name: the unknown name.
        known: the accepted names.
        synonyms: accepted names by other names that users may know them by.

    Example:
        >>> nearest_name("epoch", ["epochs", "steps"]), nearest_name("wandb", ["head"])
        ('; did you mean epochs?', '')
        >>> nearest_name("CosFace", ["arcface", "am_softmax"], {"cosface": "am_softmax"})
        '; did you mean am_softmax?'
    """
    suggestions = {entry.lower(): entry for entry in known}
    suggestions |= {synonym: entry for synonym, entry in (synonyms or {}).items() if entry in suggestions}
    close = difflib.get_close_matches(name.lower(), list(suggestions), n=1, cutoff=0.7)
    return f"; did you mean {suggestions[close[0]]}?" if close else ""


def printable(text: str) -> str:
    r"""Return text with control characters written as escapes, so that a name cannot send commands to a terminal.

    The same holds for characters that change the direction of the text around them.

    >>> printable("run\x1b[31m"), printable("naïve – 1"), printable("txt.\u202efdp")
    ('run\\x1b[31m', 'naïve – 1', 'txt.\\u202efdp')
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or (letter.isspace() and letter not in LINE_BREAKS) else ascii(letter)[1:-1]
        for letter in text
    )


def is_number(value: object, low: float, high: float = math.inf) -> bool:
    """Return True if `value` is a real number in [low, high] that a float can represent. Booleans are not numbers.

    >>> is_number(3, 1), is_number(True, 0), is_number("3", 1), is_number(10**400, 1)
    (True, False, False, False)
    """
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return low <= value <= high and math.isfinite(value)  # type: ignore[operator]
    except OverflowError:  # an integer that no float can represent
        return False


def is_integer(value: object, low: float, high: float = math.inf) -> bool:
    """Return True if `value` is an integer of Python, NumPy or torch in [low, high]. Booleans are not integers.

    >>> is_integer(2, 1), is_integer(2.0, 1), is_integer(True, 1), is_integer([2], 1)
    (True, False, False, False)
    """
    if isinstance(value, bool) or getattr(value, "ndim", 0) != 0 or not hasattr(value, "__index__"):
        return False
    try:
        return low <= operator.index(value) <= high
    except (TypeError, RuntimeError):  # NumPy and torch scalars define __index__ but raise if they are not integers
        return False


def require_betas(betas: object) -> None:
    """Raise a `ValueError` unless the argument `betas` of an optimiser is two numbers in [0, 1)."""
    are_betas = isinstance(betas, (tuple, list)) and len(betas) == 2 and all(is_number(b, 0) and b < 1 for b in betas)
    require(are_betas, "betas", "two numbers in [0, 1)", betas)


def require_package(module: str, package: str, extra: str) -> Any:
    """Import and return an optional module.

    Args:
        module: the module to import.
        package: the name of the package that contains it, for the error message.
        extra: the extra of this library that installs the package.

    Raises:
        ImportError: if the module cannot be imported; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"this needs {package}: pip install 'torch-hypersphere[{extra}]'") from error


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points to the innermost line of the call stack outside of this library and of torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("hypersphere.", "torch.")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level + 1)


def guard_save_pretrained(model: Any, obstacle: Callable[[Any], str | None]) -> None:
    """Make `save_pretrained` of Hugging Face models raise a `ValueError` while `obstacle(model)` returns a message.

    The model itself and the Hugging Face models inside it get the check, as an attribute of the object. It asks again
    at every call, so saving works as before once the obstacle is removed.

    Args:
        model: any module. Modules without `save_pretrained` are left unchanged.
        obstacle: a function of a module that returns why it cannot be saved, or None. It must be importable, so that
            models that can be pickled still can.
    """
    for module in model.modules():
        save = getattr(module, "save_pretrained", None)
        if callable(save) and not (isinstance(save, _SaveGuard) and save.has(obstacle)):
            module.save_pretrained = _SaveGuard(module, save, obstacle)


class _SaveGuard:
    """The method `save_pretrained` of one model, behind a check. Copies of the model get a guard for the copy."""

    def __init__(self, model: Any, save: Callable[..., Any], obstacle: Callable[[Any], str | None]) -> None:
        self.model = model
        self.save = save  # the method of the model, or another guard
        self.obstacle = obstacle

    def has(self, obstacle: Callable[[Any], str | None]) -> bool:
        """Return True if this guard, or the one behind it, has this check."""
        return self.obstacle is obstacle or (isinstance(self.save, _SaveGuard) and self.save.has(obstacle))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise a `ValueError`, or save the model. The arguments are those of the guarded method."""
        message = self.obstacle(self.model)
        if message is not None:
            raise ValueError(message)
        return self.save(*args, **kwargs)
