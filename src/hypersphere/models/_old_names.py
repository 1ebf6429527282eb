"""Load state dicts of version 0.1, in which some submodules had other names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

__all__ = ["accept_old_names", "rename_prefixes"]


def accept_old_names(module: nn.Module, renamed: Mapping[str, str]) -> None:
    """Let `module.load_state_dict` also accept keys that begin with the old names of its submodules.

    Args:
        module: the network, also as a submodule of another one.
        renamed: old and new names of its direct submodules.

    Example:
        >>> model = nn.Sequential()
        >>> model.add_module("encoder", nn.Linear(1, 1, bias=False))
        >>> accept_old_names(model, {"before": "encoder"})
        >>> model.load_state_dict({"before.weight": nn.Parameter(model.encoder.weight * 2)})
        <All keys matched successfully>
    """
    # A partial of a module-level function, unlike a closure, can be pickled with the network.
    module.register_load_state_dict_pre_hook(partial(_rename_hook, renamed=dict(renamed)))


def rename_prefixes(state_dict: dict[str, Any], prefix: str, renamed: Mapping[str, str]) -> None:
    """Rename the keys `prefix + old + ".…"` of a state dict to `prefix + new + ".…"`, in place.

    >>> state = {"net.before.0.weight": 1, "net.code.weight": 2}
    >>> rename_prefixes(state, "net.", {"before": "encoder"})
    >>> state
    {'net.code.weight': 2, 'net.encoder.0.weight': 1}
    """
    for key in list(state_dict):
        for old, new in renamed.items():
            start = f"{prefix}{old}."
            if key.startswith(start):
                state_dict[f"{prefix}{new}.{key.removeprefix(start)}"] = state_dict.pop(key)
                break  # names may be swapped, so a renamed key is not renamed again


def _rename_hook(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any, renamed: Mapping[str, str]
) -> None:
    # `load_state_dict` passes a copy of the caller's dict. It calls the hooks of a module before it selects the keys of
    # the submodules, so these see the new names.
    rename_prefixes(state_dict, prefix, renamed)
