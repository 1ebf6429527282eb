"""SphereNorm: normalisation of a layer by its filters and the patches they see, independent of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hypersphere._validation import is_number, require
from hypersphere.layers._convert_layer import convert_layer_, reason_not_convertible
from hypersphere.layers.decoupled import DecoupledLayer, OperatorOptions

__all__ = ["SphereNorm"]


class SphereNorm(nn.Module):
    r"""The Sphere operator as a normalisation: β·g(θ(w, x)) + γ instead of ⟨w, x⟩ (thesis, section 3.2.5).

    It normalises a layer by the norms of its filters and of the patches they see. So it does not depend on the batch,
    has no running statistics, and can be used with or without BatchNorm.

    Args:
        layer: a Conv1d, Conv2d, Conv3d or Linear layer. It is converted in place and keeps its parameters. `revert_`
            leaves it unchanged.
        angular: g, as in `DecoupledConv2d`.
        rescale: None for f itself, (β, γ) for fixed numbers, or "learned" for β and γ per channel, starting at 1 and 0.
        storage: "full" or "half", as in `DecoupledConv2d`.

    Example:
        >>> layer = SphereNorm(nn.Conv2d(3, 8, 3, padding=1, bias=False), rescale="learned")
        >>> layer(torch.randn(2, 3, 5, 5)).shape
        torch.Size([2, 8, 5, 5])
    """

    layer: DecoupledLayer
    beta: nn.Parameter | None
    gamma: nn.Parameter | None

    def __init__(
        self,
        layer: nn.Module,
        *,
        angular: str | Callable[[Tensor], Tensor] = "cosine",
        rescale: str | tuple[float, float] | None = None,
        storage: str = "full",
    ) -> None:
        super().__init__()
        is_of_torch = isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear))
        is_accepted = is_of_torch and not isinstance(layer, DecoupledLayer)
        require(is_accepted, "layer", "a Conv1d, Conv2d, Conv3d or Linear layer of torch", type(layer).__name__)
        reason = reason_not_convertible(layer)
        if reason is not None:
            raise ValueError(f"layer must be a layer that can be converted, but {reason}")
        is_fixed = (
            isinstance(rescale, (tuple, list)) and len(rescale) == 2 and all(is_number(v, -math.inf) for v in rescale)
        )
        is_valid = rescale is None or is_fixed or rescale == "learned"
        require(is_valid, "rescale", "None, (beta, gamma) or 'learned'", rescale)
        # One entry per filter, with the dtype and device of the weight, for β and γ.
        per_channel = layer.weight.detach().flatten(1)[:, 0]  # type: ignore[operator]
        convert_layer_(layer, OperatorOptions(magnitude="sphere", angular=angular, storage=storage))
        self.layer = layer  # type: ignore[assignment]  # convert_layer_ has changed its class
        self._fixed: tuple[float, float] | None = tuple(rescale) if is_fixed else None  # type: ignore[arg-type, assignment]
        learned = rescale == "learned"
        self.beta = nn.Parameter(torch.ones_like(per_channel)) if learned else None
        self.gamma = nn.Parameter(torch.zeros_like(per_channel)) if learned else None
        self.decay_free_parameters = ("beta", "gamma") if learned else ()

    @property
    def rescale(self) -> str | tuple[float, float] | None:
        """The rescaling that the forward pass applies: None, (β, γ) or "learned"."""
        return "learned" if self.beta is not None else self._fixed

    def forward(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return β·f(x) + γ."""
        y: Tensor = self.layer(x)
        if self.beta is not None and self.gamma is not None:
            # Broadcast over the places of a convolution, which follow the channels. `addcmul` is a single pass.
            shape = (-1, *[1] * (self.layer.weight.ndim - 2))
            return torch.addcmul(self.gamma.to(y.dtype).view(shape), y, self.beta.to(y.dtype).view(shape))
        if self._fixed is not None:
            beta, gamma = self._fixed
            return y * beta + gamma
        return y

    def extra_repr(self) -> str:
        """Show the rescaling."""
        return f"rescale={self.rescale!r}"
