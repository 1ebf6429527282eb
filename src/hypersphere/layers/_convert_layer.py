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
    "conversion_obstacle",
    "convert_layer_",
    "has_custom_forward",
    "plain_class",
    "revert_layer_",
]

DECOUPLED_CLASSES: dict[type[nn.Module], type[DecoupledLayer]] = {
    nn.Conv1d: DecoupledConv1d,
    nn.Conv2d: DecoupledConv2d,
    nn.Conv3d: DecoupledConv3d,
    nn.Linear: DecoupledLinear,
}


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return torch's class of a layer; another library's linear layer counts as `nn.Linear`."""
    return next((plain for plain in DECOUPLED_CLASSES if isinstance(module, plain)), nn.Linear)


def has_custom_forward(module: nn.Module) -> bool:
    """Return True if a subclass overrides the forward pass, which a conversion would lose."""
    plain = plain_class(module)
    if not isinstance(module, plain) or parametrize.is_parametrized(module):
        return False
    methods = ("forward", "_conv_forward")
    return any(getattr(type(module), name, None) is not getattr(plain, name, None) for name in methods)


def conversion_obstacle(module: nn.Module, bypassed: Collection[nn.Module] = ()) -> str | None:
    """Return why a layer cannot be converted, or None.

    Args:
        module: a layer.
        bypassed: modules whose parent reads their weight without calling them.
    """
    weight = module._parameters.get("weight")
    if parametrize.is_parametrized(module):
        return "is parametrised: remove the parametrisation first (torch.nn.utils.parametrize, hypersphere.rotation)"
    if isinstance(weight, UninitializedParameter):
        return "has no weight yet: run a batch through the model first"
    if weight is None:
        return "does not own its weight: a hook computes it (weight_norm, spectral_norm, pruning)"
    if has_custom_forward(module):
        return f"is a {type(module).__name__} that overrides forward, which would be lost"
    if module in bypassed:
        return "is part of an attention or transformer layer of torch that reads its weight without calling it"
    return None


def convert_layer_(module: nn.Module, options: OperatorOptions) -> None:
    """Replace the class of a layer by that of the decoupled layer, and configure it."""
    module._converted_from = type(module)  # type: ignore[assignment]
    if plain_class(module) is nn.Linear and not hasattr(module, "in_features"):
        module.in_features, module.out_features = module.in_channels, module.out_channels
        module._sizes_were_added = True  # type: ignore[assignment]
    module.__class__ = DECOUPLED_CLASSES[plain_class(module)]
    assert isinstance(module, DecoupledLayer)
    module._configure(options)


def revert_layer_(module: nn.Module) -> None:
    """Restore the class of a layer and remove all that a conversion added, also one that failed halfway."""
    plain = plain_class(module)
    if isinstance(module, DecoupledLayer):
        module._remove_configuration()
    if module.__dict__.pop("_sizes_were_added", False):
        del module.in_features, module.out_features
    object.__setattr__(module, "__class__", module.__dict__.pop("_converted_from", plain))
