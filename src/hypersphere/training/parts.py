"""Parts by name: a mapping with a name and options, as JSON and YAML write it, becomes the object it describes."""

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

__all__ = ["Spec", "accepted_options", "make", "nearest", "split_spec", "truth"]

Spec = Mapping[str, Any]

# options that are objects themselves: a name, or a mapping with a name and the object's own options
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
    beside: Iterable[str] = (),
) -> Any:
    """Return `menu[name](*arguments, **options)`, with what is `given` for arguments that it has and the options lack.

    Args:
        section: what the part is called, for messages.
        menu: names and factories.
        spec: a name, or a mapping with "name" and options; an unknown name or option names the nearest known one.
        given: what the surroundings know, such as the shape of the data.
        arguments: the first ones of every factory of this menu.
        more: names of options behind a factory's `**`.
        beside: names of options that the caller has seen to, for the message about a wrong one.

    Example:
        >>> make("angular", ANGULARS, {"name": "sigmoid", "k": 0.3})
        Sigmoid(k=0.3)
        >>> make("angular", ANGULARS, {"name": "sigmoid", "K": 0.3})
        Traceback (most recent call last):
        ValueError: angular.K is no option of sigmoid; did you mean k? It has k
    """
    name, options = split_spec(section, menu, spec)
    factory = menu[name]
    known = accepted_options(factory, len(arguments), more)
    for option in options:
        if option not in known:
            all_known = [*known, *beside]
            has = f"It has {', '.join(all_known)}" if all_known else "It has none"
            raise ValueError(f"{section}.{option} is no option of {name}{nearest(option, all_known)} {has}")
    filled = {key: value for key, value in (given or {}).items() if key in known}
    filled |= {key: _as_object(f"{section}.{key}", key, value) for key, value in options.items()}
    needed = list(inspect.signature(factory).parameters.values())[len(arguments) :]
    for one in needed:
        if one.default is one.empty and one.name in known and one.name not in filled:
            raise ValueError(f"{section}.{one.name} has to be given for {name}")
    try:
        return factory(*arguments, **filled)
    except TypeError as error:
        raise ValueError(f"{section} {name!r} cannot be made of {filled}: {error}") from None


def split_spec(section: str, menu: Mapping[str, Any], spec: Spec | str) -> tuple[str, dict[str, Any]]:
    """Return the name, which is in the menu, and the options of a part."""
    options = {"name": spec} if isinstance(spec, str) else dict(spec) if isinstance(spec, Mapping) else {}
    require("name" in options, section, "a name, or a mapping with a name and options", spec)
    name = options.pop("name")
    if not isinstance(name, str) or name not in menu:
        known = f"one of {', '.join(menu)}"
        raise ValueError(f"{section}.name must be {known}, not {name!r}{nearest(str(name), menu)}".removesuffix("."))
    return name, options


def accepted_options(factory: Callable[..., Any], skipped: int = 0, more: Iterable[str] = ()) -> list[str]:
    """Names of what a factory takes, after its first `skipped` arguments.

    >>> from hypersphere.functions.margin import Combined
    >>> accepted_options(Combined)
    ['m1', 'm2', 'm3']
    """
    parameters = list(inspect.signature(factory).parameters.values())[skipped:]
    named = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return [*named, *(name for name in more if name not in named)]


def nearest(word: str, known: Iterable[str]) -> str:
    """What to say after a wrong word: the one that was meant, if any is near."""
    by_small = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), list(by_small), n=1, cutoff=0.6)
    return f"; did you mean {by_small[close[0]]}?" if close else "."


def truth(name: str, value: Any) -> bool:
    """Return a value that has to be true or false.

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
