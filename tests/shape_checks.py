"""Check the jaxtyping annotations of the public functions while the tests run.

`enforce()` wraps every public function and method that has a jaxtyping annotation. After each call, the wrapper
compares the arguments and the result with the annotations and raises a `ShapeError` if one of them is wrong. Only the
annotations of arrays are checked; mypy checks the other types.

The check follows the call rather than preceding it, so that invalid input still raises the error of the library. Code
that is being traced (`torch.compile`, `torch.export`, `torch.jit.trace`) is not checked, because its sizes may be
symbolic.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator

import jaxtyping
import torch
from beartype.door import is_bearable
from jaxtyping import AbstractArray, AbstractDtype, jaxtyped

import hypersphere

# All array annotations of jaxtyping, such as Float, Integer and Shaped.
ARRAY_KINDS = [
    kind.__name__ for kind in vars(jaxtyping).values() if isinstance(kind, type) and issubclass(kind, AbstractDtype)
]


class ShapeError(AssertionError):
    """An argument or a result does not have the annotated shape or dtype."""


def enforce() -> list[str]:
    """Wrap the annotated public functions of the library in place; return their qualified names."""
    wrapped = []
    for owner, name, member in list(_public_members()):
        if _is_annotated(member):
            checked = _checked_member(member)
            wrapped.append(f"{owner.__name__}.{name}")
            if isinstance(owner, type):
                setattr(owner, name, checked)
            else:
                _rebind(member, checked)
    return sorted(wrapped)


def check_shapes(function: Callable) -> Callable:
    """Return the function with a check of its array annotations after each call."""
    hints = _array_hints(function)
    signature = inspect.signature(function)
    is_compiling, is_tracing = torch.compiler.is_compiling, torch.jit.is_tracing
    verify = functools.partial(_verify, function.__qualname__, hints)

    def call(*args, **kwargs):
        result = function(*args, **kwargs)
        if not (is_compiling() or is_tracing()):
            verify(signature.bind(*args, **kwargs).arguments, result)
        return result

    # doctest only collects functions whose globals are those of the module under test, so the wrapper borrows them.
    # Everything that `call` uses is therefore a local of this function.
    borrowed = types.FunctionType(call.__code__, function.__globals__, function.__name__, None, call.__closure__)
    return functools.wraps(function)(borrowed)


def _verify(function: str, hints: dict[str, object], arguments: dict[str, object], result: object) -> None:
    values = {**arguments, "return": result}
    sizes: dict[str, object] = {}
    # Within one context, an axis name stands for one size.
    with jaxtyped("context"):
        for name, hint in hints.items():
            if name not in values:
                continue  # an optional argument that was left out
            value = values[name]
            sizes[name] = tuple(value.shape) if hasattr(value, "shape") else type(value).__name__
            if not is_bearable(value, hint):
                dtype = getattr(value, "dtype", "")
                raise ShapeError(f"{function}: {name} is {dtype} {sizes[name]}, annotated {hint}; compared: {sizes}")


def _array_hints(function: Callable) -> dict[str, object]:
    """Return the evaluated annotations that mention a jaxtyping type."""
    # A decorator such as torch.no_grad() has other globals, so those of the decorated function are used. Names that
    # are only imported for type checkers count as Any.
    names = _Names(inspect.unwrap(function).__globals__)
    hints = {}
    for name, annotation in getattr(function, "__annotations__", {}).items():
        if isinstance(annotation, str):
            if not any(f"{kind}[" in annotation for kind in ARRAY_KINDS):
                continue
            annotation = eval(annotation, {}, names)
        if _mentions_array(annotation):
            hints[name] = annotation
    return hints


class _Names(dict):
    def __missing__(self, name: str) -> object:
        return getattr(builtins, name, typing.Any)


def _mentions_array(annotation: object) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, AbstractArray):
        return True
    return any(_mentions_array(part) for part in typing.get_args(annotation))


def _functions_of(member: object) -> list[Callable]:
    if isinstance(member, property):
        return [member.fget] if isinstance(member.fget, types.FunctionType) else []
    function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
    is_plain = isinstance(function, types.FunctionType) and not inspect.isgeneratorfunction(inspect.unwrap(function))
    return [function] if is_plain else []


def _is_annotated(member: object) -> bool:
    return any(_array_hints(function) for function in _functions_of(member))


def _checked_member(member: object) -> object:
    (checked,) = map(check_shapes, _functions_of(member))
    if isinstance(member, property):
        return property(checked, member.fset, member.fdel, member.__doc__)
    return type(member)(checked) if isinstance(member, (staticmethod, classmethod)) else checked


def _public_objects() -> Iterator[object]:
    for name in hypersphere.__all__:
        entry = getattr(hypersphere, name)
        # An object at the top level, such as `layers_of`, comes from a private module with related public classes.
        module = entry if isinstance(entry, types.ModuleType) else sys.modules.get(getattr(entry, "__module__", ""))
        for public in getattr(module, "__all__", ()):
            yield getattr(module, public)


def _public_members() -> Iterator[tuple[object, str, object]]:
    """Yield (owner, name, member) for the public functions and for the methods of the public classes."""
    seen: set[int] = set()
    for target in _public_objects():
        if id(target) in seen or not str(getattr(target, "__module__", "")).startswith("hypersphere"):
            continue
        if isinstance(target, types.FunctionType):
            seen.add(id(target))
            yield importlib.import_module(target.__module__), target.__name__, target
        elif isinstance(target, type):
            for base in target.__mro__:
                if base.__module__.startswith("hypersphere") and id(base) not in seen:
                    seen.add(id(base))
                    yield from ((base, name, member) for name, member in list(vars(base).items()))


def _rebind(function: Callable, checked: Callable) -> None:
    """Replace a function in every loaded module of the library that holds it."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "hypersphere":
            for attribute, value in list(vars(module).items()):
                if value is function:
                    setattr(module, attribute, checked)
