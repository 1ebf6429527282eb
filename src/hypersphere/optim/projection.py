r"""Keep the norms of weights from slowing down training where the output does not depend on them.

The gradient of such a weight w is perpendicular to w and proportional to 1/‖w‖ (thesis, 4.17), so norms grow and
updates shrink. `project_weights_` resets the norms, `WeightedGradients` multiplies the gradients by them.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hypersphere import sphere
from hypersphere._layer_selection import LayerSelection, NeuronLayer, layers_of
from hypersphere._validation import is_number, require

__all__ = ["WeightedGradients", "project_weights_"]


@torch.no_grad()
def project_weights_(model: nn.Module, norm: float = 1.0, *, report: bool = False) -> None:
    r"""Rescale every filter and every unit class vector to norm s in place, w ← s·ŵ (thesis, section 4.4.1).

    Outputs do not change. Ordinary layers and heads that keep ‖w‖ (`normalize_weight=False`) are not rescaled. Call it
    after `optimizer.step()`, every step or every few steps.

    Args:
        model: a model with decoupled operators (`hypersphere.layers`) or heads with unit class vectors
            (`hypersphere.heads`). A decoupled operator whose output depends on ‖w‖ is an error.
        norm: s > 0.
        report: print which weights are projected, and which layers are left unchanged and why.

    Example:
        >>> from hypersphere.layers import DecoupledLinear
        >>> layer = DecoupledLinear(5, 3)
        >>> project_weights_(layer, norm=2.0)
        >>> layer.weight.detach().norm(dim=1).round(decimals=3)
        tensor([2., 2., 2.])
    """
    require(is_number(norm, 0) and norm > 0, "norm", "a positive number", norm)
    # Each class vector is rescaled separately, so a distributed head needs no communication.
    layers = _layers_without_weight_norm(layers_of(model, local_classes=True), heads=True)
    for layer in layers:
        layer.write(norm * sphere.polar(layer.rows())[1])
    if report:
        print(layers.report())


class WeightedGradients:
    r"""Multiply the gradient of every filter by its norm, ∂w ← ‖w‖·∂w, until `remove` is called (thesis, 4.18).

    Deep copies of the model that are made in the meantime are weighted, too, from their first forward pass until
    `remove` is called.

    Args:
        model: a model with decoupled operators (`hypersphere.layers`). An operator whose output depends on ‖w‖ is an
            error. Frozen weights are left out.

    Example:
        >>> from hypersphere.layers import DecoupledLinear
        >>> layer = DecoupledLinear(5, 3)
        >>> with WeightedGradients(layer):
        ...     layer(torch.randn(2, 5)).sum().backward()
    """

    def __init__(self, model: nn.Module) -> None:
        layers = _layers_without_weight_norm(layers_of(model), heads=False)
        modules = [cast(nn.Module, layer.module) for layer in layers]
        for module in modules:
            hooks = module._forward_pre_hooks.values()
            is_weighted = any(isinstance(hook, _GradientWeighting) and hook.active for hook in hooks)
            require(not is_weighted, "model", "a model whose gradients are not weighted yet", type(model).__name__)
        self._weighting = _GradientWeighting()
        self._handles = [module.register_forward_pre_hook(self._weighting) for module in modules]
        for module in modules:  # gradients may arrive without a forward pass of the module
            self._weighting.watch(cast(nn.Parameter, module.weight))

    def remove(self) -> None:
        """Stop weighting gradients, of the model and of its copies."""
        self._weighting.active = False
        for handle in (*self._handles, *self._weighting.handles):
            handle.remove()
        self._handles, self._weighting.handles = [], []

    def __enter__(self) -> WeightedGradients:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class _GradientWeighting:
    """A forward pre-hook that makes sure that a module's weight has the gradient hook.

    Deep copies lose the hooks of parameters, but keep the hooks of modules. One object is shared by a model and its
    copies, so that `remove` ends the weighting of all of them.
    """

    def __init__(self) -> None:
        self.active = True
        self.handles: list[RemovableHandle] = []  # of the gradient hooks

    def __deepcopy__(self, memo: dict[int, Any]) -> _GradientWeighting:
        return self

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.active:
            self.watch(cast(nn.Parameter, module.weight))

    def watch(self, weight: nn.Parameter) -> None:
        """Register the gradient hook, unless the weight has it already or is frozen."""
        if not weight.requires_grad or getattr(weight, "_gradient_weighting", None) is self:
            return
        weight._gradient_weighting = self  # type: ignore[attr-defined]

        def multiply_by_norm(grad: Tensor) -> Tensor | None:
            if not self.active:
                return None
            norms = sphere.polar(weight.detach().flatten(1))[0].view(-1, *[1] * (weight.ndim - 1))
            return (norms * grad).to(grad.dtype)

        self.handles.append(weight.register_hook(multiply_by_norm))


def _layers_without_weight_norm(selection: LayerSelection, *, heads: bool) -> LayerSelection:
    """Return the decoupled operators, and with `heads` the heads, whose output does not depend on ‖w‖.

    Raises:
        ValueError: there is none, an operator depends on ‖w‖, or its weight is parametrised.
    """

    def reason_to_skip(layer: NeuronLayer) -> str | None:
        is_head = hasattr(layer.module, "num_classes")
        # A head that keeps ‖w‖, such as softmax, counts as an ordinary layer.
        if not hasattr(layer.module, "uses_weight_norm") or (is_head and layer.uses_weight_norm):
            return "its output depends on ‖w‖"
        if is_head and not heads:
            return "it is a head"
        name = layer.module_name or type(layer.module).__name__
        if layer.uses_weight_norm:
            raise ValueError(f"model must only have operators that do not depend on ‖w‖, but {name!r} does")
        if cast(nn.Module, layer.module)._parameters.get(layer.parameter) is None:
            raise ValueError(f"model must not have parametrised operators, but the weight of {name!r} is parametrised")
        return None

    layers = selection.without(reason_to_skip)
    if not layers:
        kinds = "decoupled operators (hypersphere.layers)" + (" or heads with unit class vectors" if heads else "")
        raise ValueError(f"model must have {kinds}, but there is none")
    return layers
