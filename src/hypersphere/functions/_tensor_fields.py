"""Tensors in the fields of menu entries, such as a k or a radius that the user computes."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

__all__ = ["fields_on_device"]

Entry = TypeVar("Entry")


def fields_on_device(entry: Entry, device: torch.device) -> Entry:
    """Return a menu entry whose tensors, and those of entries in its fields, are on `device`.

    Modules call this function when they are moved. Parameters are not moved, because the module that owns them does it.

    >>> from hypersphere.functions.angular import Sigmoid
    >>> fields_on_device(Sigmoid(torch.tensor(0.5)), torch.device("meta")).k.device
    device(type='meta')
    """
    if not is_dataclass(entry) or isinstance(entry, type):
        return entry
    moved: dict[str, Any] = {}
    for field in fields(entry):
        value = getattr(entry, field.name)
        if not isinstance(value, Tensor):
            new = fields_on_device(value, device)
        elif isinstance(value, nn.Parameter) or value.device == device or value.is_meta:
            new = value  # a tensor on the meta device has no values that could be copied
        else:
            new = value.to(device)
        if new is not value:
            moved[field.name] = new
    return replace(entry, **moved) if moved else entry
