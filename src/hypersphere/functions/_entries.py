"""What all menu entries share: attributes that a subclass inherits, and tensors in fields.

An entry often has attributes that describe one of its methods, such as a faster closed form of the value, its
derivative, or a flag. A user's subclass that overrides the method inherits the attribute, which then describes another
function. `attribute_matches` detects this. Closed forms that an engine writes out for one entry, such as g = cos, are
used only if the type of the entry is exactly that class.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

__all__ = ["attribute_matches", "fields_on_device", "reset_outdated_attributes"]

Entry = TypeVar("Entry")


def attribute_matches(cls: type, attribute: str, *, of: tuple[str, ...]) -> bool:
    """Return True if an attribute of `cls` describes the methods `of` that `cls` has.

    It does not if a class overrides one of the methods and inherits the attribute.

    >>> class Square:
    ...     def value(self, x): return x**2
    ...     def slope(self, x): return 2 * x
    >>> class Cube(Square):
    ...     def value(self, x): return x**3
    >>> attribute_matches(Square, "slope", of=("value",)), attribute_matches(Cube, "slope", of=("value",))
    (True, False)
    """
    for parent in cls.__mro__:
        if attribute in vars(parent):
            return True
        if any(method in vars(parent) for method in of):
            return False
    return False


def reset_outdated_attributes(cls: type, base: type, attributes: tuple[str, ...], *, of: tuple[str, ...]) -> None:
    """Replace attributes that do not match the methods of `cls` by the attributes of `base`, valid for any methods."""
    for name in attributes:
        if not attribute_matches(cls, name, of=of):
            setattr(cls, name, vars(base)[name])


def fields_on_device(entry: Entry, device: torch.device) -> Entry:
    """Return a menu entry whose tensors, including tensors of entries in its fields, are on `device`.

    Modules call this function when they are moved. Parameters are not moved, because the module that owns them does it.

    >>> from hypersphere.functions.angular import Sigmoid
    >>> fields_on_device(Sigmoid(torch.tensor(0.5)), torch.device("meta")).k.device
    device(type='meta')
    """
    if not is_dataclass(entry) or isinstance(entry, type):
        return entry
    moved_fields: dict[str, Any] = {}
    for field in fields(entry):
        value = getattr(entry, field.name)
        if not isinstance(value, Tensor):
            moved_value = fields_on_device(value, device)
        elif isinstance(value, nn.Parameter) or value.device == device or value.is_meta:
            moved_value = value  # a tensor on the meta device has no values that could be copied
        else:
            moved_value = value.to(device)
        if moved_value is not value:
            moved_fields[field.name] = moved_value
    return replace(entry, **moved_fields) if moved_fields else entry
