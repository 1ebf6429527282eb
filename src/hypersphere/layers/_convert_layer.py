"""Convert one layer to a decoupled layer, and back, by changing its class.

Why not build a new layer? It would have to replace the old one in every parent, list and closure that refers to it, and
hooks, tied weights and attributes of the user would have to be copied. Changing `__class__` keeps the object, and with
it all of these. `torch.nn.utils.parametrize` does the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from hypersphere.layers._attention import DecoupledMultiheadAttention
from hypersphere.layers._transposed import (
    DecoupledConvTranspose1d,
    DecoupledConvTranspose2d,
    DecoupledConvTranspose3d,
    DecoupledTransposedLinear,
)
from hypersphere.layers.decoupled import (
    DecoupledConv1d,
    DecoupledConv2d,
    DecoupledConv3d,
    DecoupledLayer,
    DecoupledLinear,
    OperatorOptions,
)

__all__ = [
    "TORCH_TO_DECOUPLED",
    "convert_layer_",
    "decoupled_parts",
    "is_decoupled",
    "linear_sizes",
    "reason_not_convertible",
    "revert_layer_",
    "stores_inputs_first",
    "torch_class",
    "update_fast_paths_",
]

TORCH_TO_DECOUPLED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: DecoupledConv1d,
    nn.Conv2d: DecoupledConv2d,
    nn.Conv3d: DecoupledConv3d,
    nn.Linear: DecoupledLinear,
    nn.ConvTranspose1d: DecoupledConvTranspose1d,
    nn.ConvTranspose2d: DecoupledConvTranspose2d,
    nn.ConvTranspose3d: DecoupledConvTranspose3d,
    nn.MultiheadAttention: DecoupledMultiheadAttention,
}
"""For each class of torch, the class that a conversion gives its modules. Other libraries' classes are not listed."""


def torch_class(module: nn.Module) -> type[nn.Module]:
    """Return torch's class of a layer; another library's linear layer counts as `nn.Linear`."""
    return next((base for base in TORCH_TO_DECOUPLED if isinstance(module, base)), nn.Linear)


def linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """Return (in, out) of another library's linear layer, from its attributes, or None if it has none."""
    # The names of torch, of PyTorch Geometric and of Hugging Face's `Conv1D`.
    for names in (("in_features", "out_features"), ("in_channels", "out_channels"), ("nx", "nf")):
        sizes = tuple(getattr(module, name, None) for name in names)
        if all(isinstance(size, int) for size in sizes):
            return sizes  # type: ignore[return-value]
    return None


def stores_inputs_first(module: nn.Module) -> bool:
    """Return True if a linear layer stores its weight as (in, out), as `Conv1D` of Hugging Face does."""
    return hasattr(module, "nx") and hasattr(module, "nf")


def is_decoupled(module: nn.Module) -> bool:
    """Return True if a module is decoupled, or an attention module with decoupled q, k and v."""
    return isinstance(module, (DecoupledLayer, DecoupledMultiheadAttention))


def decoupled_parts(module: nn.Module) -> dict[str, DecoupledLayer]:
    """Return the decoupled layers of a converted module: q, k and v of attention, or the module itself under ""."""
    if isinstance(module, DecoupledMultiheadAttention):
        return {**module.projections}
    assert isinstance(module, DecoupledLayer)
    return {"": module}


def reason_not_convertible(module: nn.Module, bypassed: Collection[nn.Module] = ()) -> str | None:
    """Return why a layer cannot be converted, or None.

    Args:
        module: a layer.
        bypassed: modules whose parent reads their weight without calling them.
    """
    if isinstance(module, nn.MultiheadAttention):
        weight = module._parameters.get("in_proj_weight" if module._qkv_same_embed_dim else "q_proj_weight")
    else:
        weight = module._parameters.get("weight")
    # Checked first, because a parametrised layer has no parameter `weight` either.
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
    # Linear layers of other libraries have a forward pass of their own by definition; `conversion_plan` tests it.
    base = torch_class(module)
    methods = ("forward", "_conv_forward")
    overrides = any(getattr(type(module), name, None) is not getattr(base, name, None) for name in methods)
    return isinstance(module, base) and overrides


def convert_layer_(module: nn.Module, options: OperatorOptions) -> None:
    """Replace the class of a layer by the decoupled class, and configure it. An error leaves it unchanged."""
    kind = TORCH_TO_DECOUPLED[torch_class(module)]
    module._converted_from = type(module)  # type: ignore[assignment]  # it may be a subclass of torch's layer
    if kind is DecoupledLinear and not isinstance(module, nn.Linear):
        sizes = linear_sizes(module)
        assert sizes is not None
        kind = DecoupledTransposedLinear if stores_inputs_first(module) else DecoupledLinear
        if not hasattr(module, "in_features"):  # which `nn.Linear.extra_repr` shows
            module.in_features, module.out_features = sizes  # type: ignore[assignment]
            module._sizes_were_added = True  # type: ignore[assignment]
    module.__class__ = kind
    try:
        if isinstance(module, DecoupledMultiheadAttention):
            module.add_projections(options)
        else:
            assert isinstance(module, DecoupledLayer)
            module._configure(options)
    except Exception:
        revert_layer_(module)
        raise


def revert_layer_(module: nn.Module) -> None:
    """Restore the class of a layer and remove all that a conversion added, also one that failed halfway."""
    original = torch_class(module)  # of a layer that was made decoupled and not converted
    if isinstance(module, DecoupledMultiheadAttention):
        module.remove_projections()
    elif isinstance(module, DecoupledLayer):
        module._remove_configuration()
    if module.__dict__.pop("_sizes_were_added", False):
        del module.in_features, module.out_features
    object.__setattr__(module, "__class__", module.__dict__.pop("_converted_from", original))


# In evaluation mode torch computes a whole encoder layer in one operation, which reads weights without calling the
# layers that own them, and passes nested tensors between encoder layers. Each has an attribute that enables it.
_FAST_PATHS: dict[type[nn.Module], str] = {
    nn.TransformerEncoderLayer: "activation_relu_or_gelu",
    nn.TransformerEncoder: "use_nested_tensor",
}


def update_fast_paths_(model: nn.Module, converted: Iterable[nn.Module] = ()) -> None:
    """Disable torch's fast path in encoders that contain decoupled layers, and enable it again in the others.

    Args:
        model: any module.
        converted: modules that will be converted.
    """
    to_convert = set(converted)
    for module in model.modules():
        attribute = next((name for kind, name in _FAST_PATHS.items() if isinstance(module, kind)), None)
        if attribute is None:
            continue
        if any(is_decoupled(part) or part in to_convert for part in module.modules()):
            # `setdefault` keeps the original value if a model is converted in several steps.
            module.__dict__.setdefault("_fast_path", getattr(module, attribute))
            setattr(module, attribute, 0)
        elif "_fast_path" in module.__dict__:
            setattr(module, attribute, module.__dict__.pop("_fast_path"))
