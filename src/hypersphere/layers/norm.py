"""SphereNorm: a layer normalised by what it looks at, not by what else is in the batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hypersphere._validation import require
from hypersphere.layers.convert import convert_
from hypersphere.layers.decoupled import DecoupledLayer

__all__ = ["SphereNorm"]


class SphereNorm(nn.Module):
    r"""The Sphere operator as a normalisation: β·g(θ(w, x)) + γ in place of ⟨w, x⟩ (thesis, section 3.2.5).

    It normalises a layer by the norms of its filters and of the patches they see, so it does not depend on the batch,
    and may stand with or without BatchNorm.

    Args:
        layer: a Conv1d, Conv2d, Conv3d or Linear layer; it is converted in place and keeps its parameters.
        angular: g, as in `DecoupledConv2d`.
        rescale: None for f itself, (β, γ) for fixed numbers, or "learned" for β and γ per channel, starting at 1 and 0.

    Example:
        >>> layer = SphereNorm(nn.Conv2d(3, 8, 3, padding=1, bias=False), rescale="learned")
        >>> layer(torch.randn(2, 3, 5, 5)).shape
        torch.Size([2, 8, 5, 5])
    """

    def __init__(
        self,
        layer: nn.Module,
        *,
        angular: str | Callable[[Tensor], Tensor] = "cosine",
        rescale: str | tuple[float, float] | None = None,
    ) -> None:
        super().__init__()
        known = isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)) and not isinstance(
            layer, DecoupledLayer
        )
        require(known, "layer", "a plain Conv1d, Conv2d, Conv3d or Linear layer", type(layer).__name__)
        fixed = isinstance(rescale, tuple) and len(rescale) == 2
        require(
            rescale is None or fixed or rescale == "learned", "rescale", "None, (beta, gamma) or 'learned'", rescale
        )
        self.layer = convert_(layer, magnitude="sphere", angular=angular, where=lambda name, module: module is layer)
        layer._of_norm = True  # type: ignore[assignment]  # so that revert_ leaves it
        self.rescale = rescale
        weight = layer.weight
        assert isinstance(weight, Tensor)
        learned = rescale == "learned"
        self.beta = nn.Parameter(torch.ones_like(weight.detach().flatten(1)[:, 0])) if learned else None
        self.gamma = nn.Parameter(torch.zeros_like(weight.detach().flatten(1)[:, 0])) if learned else None
        self.decay_free_parameters = ("beta", "gamma") if learned else ()

    def forward(self, x: Tensor) -> Tensor:
        """Return β·f(x) + γ."""
        y: Tensor = self.layer(x)
        if self.beta is not None and self.gamma is not None:
            weight = self.layer.weight
            assert isinstance(weight, Tensor)
            shape = (-1, *[1] * (weight.ndim - 2))
            return torch.addcmul(self.gamma.to(y.dtype).view(shape), y, self.beta.to(y.dtype).view(shape))
        if isinstance(self.rescale, tuple):
            beta, gamma = self.rescale
            return y * beta + gamma
        return y

    def extra_repr(self) -> str:
        """Show the rescaling."""
        return f"rescale={self.rescale!r}"
