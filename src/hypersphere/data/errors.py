"""What can go wrong with data: it is missing, it is damaged, or an argument names no choice."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from hypersphere._validation import require


class MissingData(FileNotFoundError):
    """A file or folder is not there; the message says where it was looked for and how to get it."""


class DamagedData(ValueError):
    """A file is there but does not hold what it should."""


class ForbiddenGlobal(DamagedData):
    """A pickle asks for a name that no data file needs."""


def check_choice(argument: str, value: str, accepted: Iterable[str]) -> None:
    """Raise a ValueError unless the value is one of the accepted words."""
    words = tuple(accepted)
    require(value in words, argument, f"one of {', '.join(map(repr, words))}", value)


def require_package(module: str, package: str, extra: str) -> Any:
    """Import an optional module, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"this needs {package}: pip install 'torch-hypersphere[{extra}]'") from error
