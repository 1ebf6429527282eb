"""Convert states to types that load without unrestricted pickles: tensors, numbers, text, and containers of them."""

from __future__ import annotations

import numbers
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["plain"]

ACCEPTED = "tensors, numbers, text, None, or lists, tuples and dictionaries of them"
_AS_IT_IS = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size)
_ORDERED = (OrderedDict, Counter)


def plain(value: Any, name: str) -> Any:
    """Return a copy of `value` in plain types; raise a `ValueError` for an object that would have to be pickled.

    Parameters become tensors, mappings become dictionaries, and NumPy scalars become Python numbers, all without loss.
    A view is copied without the rest of its storage.

    Args:
        value: any state, for example the result of `state_dict`.
        name: its name in error messages.

    Example:
        >>> import numpy
        >>> plain({"rates": [0.1, numpy.float64(0.2)]}, "scheduler")
        {'rates': [0.1, 0.2]}
        >>> plain({"rates": [0.1, max]}, "scheduler")
        Traceback (most recent call last):
        ValueError: scheduler['rates'][1] must be tensors, numbers, ..., not builtin_function_or_method
    """
    kind = type(value)
    if isinstance(value, Tensor):
        return _own(value, name)
    if kind in _AS_IT_IS:
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if kind in (list, tuple):
        return kind(plain(item, f"{name}[{at}]") for at, item in enumerate(value))
    if isinstance(value, Mapping):
        items = {plain(key, f"a key of {name}"): plain(item, f"{name}[{key!r}]") for key, item in value.items()}
        return kind(items) if kind in _ORDERED else items
    raise ValueError(f"{name} must be {ACCEPTED}, not {kind.__name__}")


def _own(tensor: Tensor, name: str) -> Tensor:
    tensor = tensor.detach()
    if type(tensor) is not Tensor or tensor.is_meta:
        raise ValueError(f"{name} must be a plain tensor with data, not {type(tensor).__name__} on {tensor.device}")
    owns_storage = tensor.layout != torch.strided or tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if owns_storage else tensor.clone()
