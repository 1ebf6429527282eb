"""Convert one layer to a decoupled layer, and back, by changing its class."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from hypersphere.layers.decoupled import (
    DecoupledConv1d,
    DecoupledConv2d,
    DecoupledConv3d,
    DecoupledLayer,
    DecoupledLinear,
    OperatorOptions,
)

__all__ = [
    "DECOUPLED_CLASSES",
    "convert_layer_",
    "reason_not_convertible",
    "revert_layer_",
    "torch_class",
]

DECOUPLED_CLASSES: dict[type[nn.Module], type[DecoupledLayer]] = {
    nn.Conv1d: DecoupledConv1d,
    nn.Conv2d: DecoupledConv2d,
    nn.Conv3d: DecoupledConv3d,
    nn.Linear: DecoupledLinear,
}


def torch_class(module: nn.Module) -> type[nn.Module]:
    """Return torch's class of a layer; another library's linear layer counts as `nn.Linear`."""
    return next((base for base in DECOUPLED_CLASSES if isinstance(module, base)), nn.Linear)


def reason_not_convertible(module: nn.Module, bypassed: Collection[nn.Module] = ()) -> str | None:
    """Return why a layer cannot be converted, or None.

    Args:
        module: a layer.
        bypassed: modules whose parent reads their weight without calling them.
    """
    weight = module._parameters.get("weight")
    if parametrize.is_parametrized(module):
        return "it is parametrised: remove the parametrisation first (torch.nn.utils.parametrize, hypersphere.rotation)"
    if isinstance(weight, UninitializedParameter):
        return "it has no weight yet: run a batch through the model first"
    if weight is None:
        return "it does not own its weight: a hook computes it (weight_norm, spectral_norm, pruning)"
    if _has_custom_forward(module):
        return f"{type(module).__name__} overrides forward, which would be lost"
    if module in bypassed:
        return "its parent reads its weight without calling it"
    return None


def _has_custom_forward(module: nn.Module) -> bool:
    """Return True if a subclass of torch's layer overrides the forward pass."""
    base = torch_class(module)
    methods = ("forward", "_conv_forward")
    overrides = any(getattr(type(module), name, None) is not getattr(base, name, None) for name in methods)
    return isinstance(module, base) and overrides


def convert_layer_(module: nn.Module, options: OperatorOptions) -> None:
    """Replace the class of a layer by that of the decoupled layer, and configure it. An error leaves it unchanged."""
    module._converted_from = type(module)  # type: ignore[assignment]
    if torch_class(module) is nn.Linear and not hasattr(module, "in_features"):
        module.in_features, module.out_features = module.in_channels, module.out_channels
        module._sizes_were_added = True  # type: ignore[assignment]
    module.__class__ = DECOUPLED_CLASSES[torch_class(module)]
    assert isinstance(module, DecoupledLayer)
    try:
        module._configure(options)
    except Exception:
        revert_layer_(module)
        raise


def revert_layer_(module: nn.Module) -> None:
    """Restore the class of a layer and remove all that a conversion added, also one that failed halfway."""
    original = torch_class(module)
    if isinstance(module, DecoupledLayer):
        module._remove_configuration()
    if module.__dict__.pop("_sizes_were_added", False):
        del module.in_features, module.out_features
    object.__setattr__(module, "__class__", module.__dict__.pop("_converted_from", original))
