r"""What keeps the norm of a weight from slowing its learning, where the forward pass does not depend on it.

The gradient of a decoupled operator with respect to w is perpendicular to w and shrinks as 1/‖w‖ (thesis, 4.17), so
growing weights learn ever more slowly. Either put them back to a fixed norm, or multiply their gradient by it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import torch
from torch import Tensor, nn

from hypersphere import sphere
from hypersphere._validation import is_number, require

__all__ = ["WeightedGradients", "project_weights_"]


@torch.no_grad()
def project_weights_(model: nn.Module, norm: float = 1.0) -> None:
    r"""Rescale every filter and every unit class vector to norm s in place, w ← s·ŵ (thesis, section 4.4.1).

    Outputs do not change. Ordinary layers and heads that keep ‖w‖ (`weight_norm=False`) are left alone. Call it after
    `optimizer.step()`, every step or every few steps.

    Args:
        model: a model with decoupled operators (`hypersphere.layers`) or heads with unit class vectors
            (`hypersphere.heads`). A decoupled operator whose output depends on ‖w‖ is an error.
        norm: s > 0.

    Example:
        >>> from hypersphere.layers import DecoupledLinear
        >>> layer = DecoupledLinear(5, 3)
        >>> project_weights_(layer, norm=2.0)
        >>> layer.weight.detach().norm(dim=1).round(decimals=3)
        tensor([2., 2., 2.])
    """
    require(is_number(norm, 0) and norm > 0, "norm", "a positive number", norm)
    for weight in _unweighted(model, heads=True):
        rows = weight.flatten(1)
        weight.copy_((sphere.polar(rows)[1] * norm).to(weight.dtype).view_as(weight))


class WeightedGradients:
    r"""Multiply the gradient of every filter by its norm, ∂w ← ‖w‖·∂w, from now on (thesis, 4.18).

    Args:
        model: a model with decoupled operators (`hypersphere.layers`); a weighted one among them is an error, frozen
            ones are left out.

    Example:
        >>> from hypersphere.layers import DecoupledLinear
        >>> layer = DecoupledLinear(5, 3)
        >>> with WeightedGradients(layer):
        ...     layer(torch.randn(2, 5)).sum().backward()
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights = [weight for weight in _unweighted(model) if weight.requires_grad]
        twice = any(getattr(weight, "_times_its_norm", False) for weight in self._weights)
        require(not twice, "model", "one whose gradients are not weighted already", type(model).__name__)
        self._hooks = [weight.register_hook(_times_norm(weight)) for weight in self._weights]
        for weight in self._weights:
            weight._times_its_norm = True  # type: ignore[attr-defined]

    def remove(self) -> None:
        """Leave gradients as they are again."""
        for hook in self._hooks:
            hook.remove()
        for weight in self._weights:
            weight._times_its_norm = False  # type: ignore[attr-defined]
        self._hooks, self._weights = [], []

    def __enter__(self) -> WeightedGradients:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def _times_norm(weight: nn.Parameter) -> Callable[[Tensor], Tensor]:
    def hook(gradient: Tensor) -> Tensor:
        norm = sphere.polar(weight.detach().flatten(1))[0].view(-1, *[1] * (weight.ndim - 1))
        return (norm * gradient).to(gradient.dtype)

    return hook


def _unweighted(model: nn.Module, *, heads: bool = False) -> list[nn.Parameter]:
    """Return the weights whose norm does not change the output, each once, from decoupled operators and from heads.

    Both kinds of modules are recognised by their attribute `uses_weight_norm`, heads also by `num_classes`.
    """
    weights: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        uses_weight_norm = getattr(module, "uses_weight_norm", None)
        is_head = hasattr(module, "num_classes")
        # A head that keeps ‖w‖, such as softmax, counts as an ordinary layer.
        if uses_weight_norm is None or (is_head and (uses_weight_norm or not heads)):
            continue
        label = name or type(module).__name__
        if uses_weight_norm:
            raise ValueError(f"model must have unweighted operators only, but the output of {label!r} depends on ‖w‖")
        weight = module._parameters.get("weight")
        if weight is None:
            raise ValueError(f"model must own the weights of its operators, but that of {label!r} is parametrised")
        weights[id(weight)] = weight
    if not weights:
        kinds = "decoupled operators (hypersphere.layers)"
        kinds += " or heads with unit class vectors" if heads else ""
        raise ValueError(f"model must have {kinds}, but there is none")
    return list(weights.values())
