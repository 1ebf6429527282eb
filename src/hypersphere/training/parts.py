"""Build components from specs: a mapping with a name and options, as in JSON or YAML, becomes an object."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hypersphere._validation import require
from hypersphere.functions.angular import ANGULARS
from hypersphere.functions.magnitude import MAGNITUDES
from hypersphere.functions.orthogonal import ORTHOGONALS
from hypersphere.functions.projection import PROJECTIONS
from hypersphere.functions.transform import TRANSFORMS
from hypersphere.heads import Annealing, Ramp
from hypersphere.heads.presets import LITERATURE_NAMES

__all__ = ["Spec", "accepted_options", "make", "nearest", "split_spec", "truth", "unknown_option"]

Spec = Mapping[str, Any]

# Options that are themselves objects, given by a name or by a mapping with a name and options.
OBJECTS: dict[str, Mapping[str, Callable[..., Any]]] = {
    "angular": ANGULARS,
    "magnitude": MAGNITUDES,
    "projection": PROJECTIONS,
    "method": {**ORTHOGONALS, **TRANSFORMS},
    "annealing": {"annealing": Annealing},
    "ramp": {"ramp": Ramp},
}


def make(
    section: str,
    menu: Mapping[str, Callable[..., Any]],
    spec: Spec | str,
    given: Mapping[str, Any] | None = None,
    *arguments: Any,
    more: Iterable[str] = (),
    handled: Iterable[str] = (),
) -> Any:
    """Return `menu[name](*arguments, **options)`; options that are missing are filled in from `given`.

    Args:
        section: name of the component, for messages.
        menu: factories by name.
        spec: a name, or a mapping with "name" and options. The error for an unknown name or option suggests the
            closest known one.
        given: values for options that follow from the context, such as the shape of the data.
        arguments: the leading arguments of every factory of this menu.
        more: names of options that a factory accepts through `**`.
        handled: names of options that the caller has processed, listed in the error for an unknown option.

    Example:
        >>> make("angular", ANGULARS, {"name": "sigmoid", "k": 0.3})
        Sigmoid(k=0.3)
        >>> make("angular", ANGULARS, {"name": "sigmoid", "K": 0.3})
        Traceback (most recent call last):
        ValueError: angular.K is not an option of sigmoid; did you mean k? Options: k
    """
    name, options = split_spec(section, menu, spec)
    factory = menu[name]
    accepted = accepted_options(factory, len(arguments), more)
    for option in options:
        if option not in accepted:
            raise ValueError(unknown_option(section, option, name, [*accepted, *handled]))
    filled = {key: value for key, value in (given or {}).items() if key in accepted}
    filled |= {key: _as_object(f"{section}.{key}", key, value) for key, value in options.items()}
    needed = list(inspect.signature(factory).parameters.values())[len(arguments) :]
    for one in needed:
        if one.default is one.empty and one.name in accepted and one.name not in filled:
            raise ValueError(f"{section}.{one.name} is required for {name}")
    try:
        return factory(*arguments, **filled)
    except TypeError as error:
        raise ValueError(f"{section} {name!r} does not accept {filled}: {error}") from None


def split_spec(section: str, menu: Mapping[str, Any], spec: Spec | str) -> tuple[str, dict[str, Any]]:
    """Return the name of a component, checked against the menu, and its options."""
    options = {"name": spec} if isinstance(spec, str) else dict(spec) if isinstance(spec, Mapping) else {}
    require("name" in options, section, "a name, or a mapping with a name and options", spec)
    name = options.pop("name")
    if not isinstance(name, str) or name not in menu:
        accepted = f"one of {', '.join(menu)}"
        raise ValueError(f"{section}.name must be {accepted}, not {name!r}{nearest(str(name), menu)}".removesuffix("."))
    return name, options


def accepted_options(factory: Callable[..., Any], skipped: int = 0, more: Iterable[str] = ()) -> list[str]:
    """Return the names of the parameters of a factory after its first `skipped` ones.

    >>> from hypersphere.functions.margin import Combined
    >>> accepted_options(Combined)
    ['m1', 'm2', 'm3']
    """
    parameters = list(inspect.signature(factory).parameters.values())[skipped:]
    named = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return [*named, *(name for name in more if name not in named)]


def nearest(word: str, names: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: a suggestion if there is a similar one, else a full stop."""
    by_small = {name.lower(): name for name in names}
    by_small |= {other: preset for other, preset in LITERATURE_NAMES.items() if preset in by_small}
    close = difflib.get_close_matches(word.lower(), list(by_small), n=1, cutoff=0.6)
    return f"; did you mean {by_small[close[0]]}?" if close else "."


def unknown_option(section: str, option: str, name: str, accepted: Iterable[str]) -> str:
    """Return the message about an option that a component does not have.

    >>> unknown_option("operator", "k", "none", [])
    'operator.k is not an option of none, which takes no options'
    """
    names = list(accepted)
    if not names:
        return f"{section}.{option} is not an option of {name}, which takes no options"
    return f"{section}.{option} is not an option of {name}{nearest(option, names)} Options: {', '.join(names)}"


def truth(name: str, value: Any) -> bool:
    """Return a value that must be true or false.

    >>> truth("model.standardize", "false")
    Traceback (most recent call last):
    ValueError: model.standardize must be true or false, not 'false'
    """
    require(type(value) is bool, name, "true or false", value)
    return bool(value)


def _as_object(section: str, option: str, value: Any) -> Any:
    if option in OBJECTS and isinstance(value, Mapping):
        menu = OBJECTS[option]
        named = {"name": next(iter(menu)), **value} if len(menu) == 1 else value
        return make(section, menu, named)
    return tuple(value) if isinstance(value, list) else value
