"""Signatures of functions that pass options on to other functions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from inspect import Parameter
from typing import Any, TypeVar, cast

from hypersphere._validation import nearest_name

__all__ = ["accept_options_of", "named_parameters"]

Function = Callable[..., Any]
Decorated = TypeVar("Decorated", bound=Function)


def named_parameters(function: Function) -> dict[str, Parameter]:
    """Return the parameters of a function except `*arguments` and `**options`."""
    parameters = inspect.signature(function).parameters
    return {
        key: parameter
        for key, parameter in parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def accept_options_of(*others: Function, only: Collection[str] | None = None) -> Callable[[Decorated], Decorated]:
    """Decorate a function that passes its `**options` on to `others`: their parameters appear in its signature.

    An unknown option raises a `TypeError` that names the decorated function and the nearest option, or all of them.

    Args:
        others: the functions that receive the options.
        only: the names of their parameters that are options; None for all.

    Example:
        >>> @accept_options_of(lambda a, *, b=2: None)
        ... def function(x, **options): ...
        >>> str(inspect.signature(function))
        '(x, *, a, b=2)'
    """

    def decorate(function: Decorated) -> Decorated:
        parameters = named_parameters(function)
        for other in others:
            for key, parameter in named_parameters(other).items():
                if only is None or key in only:
                    parameters.setdefault(key, parameter.replace(kind=parameter.KEYWORD_ONLY))

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            for name in (name for name in options if name not in parameters):
                owner = function.__qualname__.removesuffix(".__init__").rpartition("<locals>.")[2]
                accepted = ", ".join(one for one in parameters if one != "self")
                near = nearest_name(name, parameters) or f". Options: {accepted}"
                raise TypeError(f"{owner} has no option {name!r}{near}")
            return function(*arguments, **options)

        ordered = sorted(parameters.values(), key=lambda parameter: parameter.kind)
        call.__signature__ = inspect.signature(function).replace(parameters=ordered)  # type: ignore[attr-defined]
        return cast(Decorated, call)

    return decorate
