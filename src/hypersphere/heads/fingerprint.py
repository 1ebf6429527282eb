"""What has to be the same in all processes that share a head, as words to compare."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

__all__ = ["differences", "fingerprint"]


def fingerprint(head: nn.Module, spread: Collection[str]) -> dict[str, str]:
    """Everything a head was made with and keeps in one piece, by name, in words that do not depend on the process.

    Of the parameters in `spread`, which may differ, it is the type alone; of a callable that is not ours its name.

    >>> fingerprint(nn.Linear(2, 3), ["weight", "bias"])["out_features"]
    '3'
    """
    kept = {name: value for name, value in vars(head).items() if not name.startswith("_") and name != "training"}
    kept |= {name: getattr(head, name) for name in ("angular", "margin") if hasattr(head, name)}
    kept |= dict(head.named_children()) | dict(head.named_buffers()) | dict(head.named_parameters())
    whole = {name: _words(value) for name, value in kept.items() if name not in spread}
    return {"head": _name(type(head)), **whole, **{name: str(getattr(kept[name], "dtype", None)) for name in spread}}


def differences(fingerprints: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """What is not the same in all, and how it is in each.

    >>> differences([{"m": "0.1", "s": "64"}, {"m": "0.5", "s": "64"}])
    {'m': ['0.1', '0.5']}
    """
    names = dict.fromkeys(name for words in fingerprints for name in words)
    said = {name: [words.get(name, "absent") for words in fingerprints] for name in names}
    return {name: each for name, each in said.items() if len(set(each)) > 1}


def _words(value: object) -> str:
    if isinstance(value, Tensor):
        return _of_tensor(value.detach())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (f"{field.name}={_words(getattr(value, field.name))}" for field in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(fields)})"
    if isinstance(value, functools.partial):
        return f"partial({_words(value.func)}, {value.args}, {value.keywords})"
    if hasattr(value, "__qualname__"):
        return _name(value)
    return _name(type(value)) if type(value).__repr__ is object.__repr__ else repr(value)


def _of_tensor(value: Tensor) -> str:
    kind = f"{value.dtype} {tuple(value.shape)}"
    if value.is_meta:
        return kind
    if value.numel() == 1:
        return f"{kind} {value.item()}"
    content = value.to(torch.default_generator.device).contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{kind} {hashlib.sha256(content).hexdigest()[:16]}"


def _name(value: object) -> str:
    return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', value)}"
