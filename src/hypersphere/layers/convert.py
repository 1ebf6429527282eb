"""Turn the layers of a trained model into decoupled ones, and back.

A conversion changes the class of a layer, as torch's parametrisations do, and nothing else: the module object, its
parameters, hooks and name stay, so optimisers keep working, tied weights stay tied and references stay valid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from hypersphere._validation import require
from hypersphere.layers.decoupled import (
    DecoupledConv1d,
    DecoupledConv2d,
    DecoupledConv3d,
    DecoupledLayer,
    DecoupledLinear,
)

__all__ = ["convert_", "revert_"]

Model = TypeVar("Model", bound=nn.Module)
Predicate = Callable[[str, nn.Module], bool]

DECOUPLED: dict[type[nn.Module], type[DecoupledLayer]] = {
    nn.Conv1d: DecoupledConv1d,
    nn.Conv2d: DecoupledConv2d,
    nn.Conv3d: DecoupledConv3d,
    nn.Linear: DecoupledLinear,
}


def convert_(
    model: Model,
    *,
    magnitude: str | Callable[[Tensor, Tensor], Tensor] = "sphere",
    angular: str | Callable[[Tensor], Tensor] = "cosine",
    weighting: str | None = None,
    learn_k: str | nn.Parameter | None = None,
    learn_radius: str | None = None,
    radius_norm: str = "running",
    momentum: float = 0.1,
    storage: str = "full",
    where: Predicate | None = None,
) -> Model:
    """Make convolutions and linear layers of a model decoupled, in place; trained weights and biases are kept.

    Args:
        model: any module; layers that count are torch's Conv1d, Conv2d, Conv3d and Linear, and linear layers of other
            libraries that keep a weight (out, in), a bias and `in_channels`, `out_channels`.
        magnitude: h; this and the arguments down to `momentum` are those of `DecoupledConv2d`.
        angular: g.
        weighting: how ‖w‖ enters.
        learn_k: whose k is learned.
        learn_radius: whose radius is learned.
        momentum: of the running mean of the patch norm.
        where: which of these layers, by name and module. None for all but the last linear one, which is taken for the
            classifier, and those whose parent uses their weight without calling them.

    Returns:
        The model. If none is chosen or a chosen one cannot be converted, a `ValueError` says so; nothing is changed.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 10))
        >>> convert_(model, magnitude="ball")[0].magnitude
        Ball(alpha=1.0, radius=1.0)
        >>> type(model[3]).__name__
        'Linear'
    """
    require(where is None or callable(where), "where", "None or a function of a name and a module", where)
    bypassed = _bypassed(model)
    candidates = [(name, module) for name, module in model.named_modules() if _is_layer(module)]
    if where is None:
        linear = [module for _, module in candidates if _plain_class(module) is nn.Linear and module not in bypassed]
        last = linear[-1] if linear else None
        chosen = [(n, m) for n, m in candidates if m is not last and m not in bypassed and not _own_forward(m)]
    else:
        chosen = [(name, module) for name, module in candidates if where(name, module)]
    for name, module in chosen:
        _require_convertible(name or type(module).__name__, module, bypassed)
    if not chosen:
        decoupled = any(isinstance(module, DecoupledLayer) for module in model.modules())
        reason = "its layers are decoupled already: revert_ them first" if decoupled and not candidates else None
        reason = reason or "none of its convolutions and linear layers is chosen"
        raise ValueError(f"model must have a layer to convert, but {reason}")
    settings = (magnitude, angular, weighting, learn_k, learn_radius, radius_norm, momentum, storage)
    converted: list[nn.Module] = []
    try:
        for _, module in chosen:
            module._converted_from = type(module)
            if _plain_class(module) is nn.Linear and not hasattr(module, "in_features"):
                module.in_features, module.out_features = module.in_channels, module.out_channels
            module.__class__ = DECOUPLED[_plain_class(module)]
            converted.append(module)
            module._configure(*settings)
    except Exception:
        for module in converted:
            _revert(module)
        raise
    return model


def revert_(model: Model) -> Model:
    """Make every decoupled layer of a model the ordinary layer it was again, in place; weights and biases are kept.

    Layers inside a `SphereNorm` are its own, and stay. A parametrised layer is a `ValueError`, and nothing is changed.

    >>> revert_(convert_(nn.Sequential(nn.Conv2d(3, 8, 3)), magnitude="ball"))
    Sequential(
      (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
    )
    """
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, DecoupledLayer) and not hasattr(m, "_of_norm")]
    for name, module in found:
        if parametrize.is_parametrized(module):
            advice = "fold it (hypersphere.rotation.fold_) or remove its parametrisation first"
            raise ValueError(f"model must have plain decoupled layers, but {name!r} is parametrised: {advice}")
    for _, module in found:
        _revert(module)
    return model


def _revert(module: nn.Module) -> None:
    plain = _plain_class(module)
    if isinstance(module, DecoupledLayer):
        module._remove_configuration()
    object.__setattr__(module, "__class__", module.__dict__.pop("_converted_from", plain))


def _is_layer(module: nn.Module) -> bool:
    return not isinstance(module, DecoupledLayer) and (
        isinstance(module, tuple(DECOUPLED)) or _linear_elsewhere(module)
    )


def _linear_elsewhere(module: nn.Module) -> bool:
    """Whether another library's module is a linear layer by what it holds, as torch_geometric's `Linear` is."""
    weight = module._parameters.get("weight")
    if weight is None or isinstance(weight, UninitializedParameter) or "bias" not in module._parameters:
        return False
    sizes = (getattr(module, "out_channels", None), getattr(module, "in_channels", None))
    return weight.ndim == 2 and tuple(weight.shape) == sizes and not module._modules and _computes_linear(module)


@torch.no_grad()
def _computes_linear(module: nn.Module) -> bool:
    """Whether a module gives what a linear layer of its weight and bias gives, tried on one row."""
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    assert weight is not None
    row = torch.linspace(-1, 1, weight.shape[1], dtype=weight.dtype, device=weight.device).unsqueeze(0)
    try:
        found = module(row)
        return bool(torch.allclose(found, F.linear(row, weight, bias), rtol=1e-2, atol=1e-3))
    except Exception:
        return False


def _plain_class(module: nn.Module) -> type[nn.Module]:
    return next((plain for plain in DECOUPLED if isinstance(module, plain)), nn.Linear)


def _own_forward(module: nn.Module) -> bool:
    """Whether a class of somebody else's computes something that a conversion would lose."""
    plain = _plain_class(module)
    if not isinstance(module, plain) or parametrize.is_parametrized(module):
        return False
    inherited = all(getattr(type(module), n, None) is getattr(plain, n, None) for n in ("forward", "_conv_forward"))
    return not inherited


def _bypassed(model: nn.Module) -> set[nn.Module]:
    """Layers whose parent reads their weight and never calls them, so that a conversion would do nothing."""
    parents = [m for m in model.modules() if isinstance(m, (nn.MultiheadAttention, nn.TransformerEncoderLayer))]
    return {child for parent in parents for child in parent.modules()}


def _require_convertible(name: str, module: nn.Module, bypassed: set[nn.Module]) -> None:
    weight = module._parameters.get("weight")
    reason = None
    if parametrize.is_parametrized(module):
        reason = "is parametrised: remove the parametrisation first (torch.nn.utils.parametrize, hypersphere.rotation)"
    elif isinstance(weight, UninitializedParameter):
        reason = "has no weight yet: run a batch through the model first"
    elif weight is None:
        reason = "does not own its weight: it is reparametrised by a hook (weight_norm, spectral_norm, pruning)"
    elif module in bypassed:
        reason = "lies inside an attention or transformer layer of torch that reads its weight without calling it"
    elif _own_forward(module):
        reason = f"is a {type(module).__name__} with a forward of its own, which would be lost"
    if reason is not None:
        raise ValueError(f"where must leave {name!r} out, which {reason}")
