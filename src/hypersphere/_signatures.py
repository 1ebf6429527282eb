"""Signatures of functions that pass options on to other functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any, TypeVar

__all__ = ["accept_options_of", "named_parameters"]

Function = Callable[..., Any]
Decorated = TypeVar("Decorated", bound=Function)


def named_parameters(function: Function) -> dict[str, Parameter]:
    """Return the parameters of a function except `*arguments` and `**options`."""
    parameters = inspect.signature(function).parameters
    return {key: one for key, one in parameters.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}


def accept_options_of(*others: Function) -> Callable[[Decorated], Decorated]:
    """Decorate a function with `**options` that it passes on to `others`: their parameters appear in its signature.

    >>> @accept_options_of(lambda a, *, b=2: None)
    ... def function(x, **options): ...
    >>> str(inspect.signature(function))
    '(x, *, a, b=2)'
    """

    def decorate(function: Decorated) -> Decorated:
        parameters = named_parameters(function)
        for other in others:
            for key, one in named_parameters(other).items():
                parameters.setdefault(key, one.replace(kind=one.KEYWORD_ONLY))
        ordered = sorted(parameters.values(), key=lambda one: one.kind)
        function.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        return function

    return decorate
