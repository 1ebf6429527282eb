"""Attention of torch with decoupled q, k and v.

`nn.MultiheadAttention` passes its weights to one function of torch, so its forward pass is written here again: project
with the three decoupled layers, attend as torch does, and call `out_proj`. The attention module keeps its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hypersphere._layer_selection import WeightPart, layers_of
from hypersphere._validation import require
from hypersphere.layers.decoupled import OperatorOptions, RowLayer

__all__ = ["DecoupledMultiheadAttention", "DecoupledProjection"]


class _Projection(nn.Module):
    """One of q, k and v: rows of a weight, and a part of the bias, that the attention module owns."""

    def __init__(self, attention: nn.MultiheadAttention, part: WeightPart) -> None:
        super().__init__()
        self._attention = (attention,)  # in a tuple, so that it does not become a submodule of its own submodule
        self._part = part

    @property
    def weight(self) -> Tensor:
        stored = cast(Tensor, getattr(self._attention[0], self._part.parameter))
        return self._part.rows(stored)

    @property
    def bias(self) -> Tensor | None:
        # One vector holds the biases of q, k and v, also if their weights are separate parameters.
        stored = self._attention[0].in_proj_bias
        return None if stored is None else stored.chunk(3)["qkv".index(self._part.suffix)]

    def reset_parameters(self) -> None:
        """Do nothing: the attention module initialises the weight."""

    def extra_repr(self) -> str:
        out_features, in_features = self._part.shape_of(getattr(self._attention[0], self._part.parameter))[1:3]
        return f"in_features={in_features}, out_features={out_features}"


class DecoupledProjection(RowLayer, _Projection):
    """The decoupled q, k or v of an attention module. Learned k and ρ belong to it, the weight does not."""

    def __init__(self, attention: nn.MultiheadAttention, part: WeightPart, options: OperatorOptions) -> None:
        super().__init__(attention, part)
        self._configure(options)


class DecoupledMultiheadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` with decoupled q, k and v. `convert_` makes it by changing the class of a module.

    Attributes:
        q: the decoupled layer of the queries.
        k: the decoupled layer of the keys.
        v: the decoupled layer of the values.
    """

    q: DecoupledProjection
    k: DecoupledProjection
    v: DecoupledProjection
    _is_replica = False  # `nn.DataParallel` sets it in its replicas

    def add_projections(self, options: OperatorOptions) -> None:
        """Make the three decoupled layers. Nothing is added if one of them cannot be made."""
        parts = [layer.part for layer in layers_of(self, output_layer=None) if layer.module is self]
        projections = {part.suffix: DecoupledProjection(self, part, options) for part in parts}
        for name, projection in projections.items():
            self.add_module(name, projection.train(self.training))

    def remove_projections(self) -> None:
        """Undo `add_projections`."""
        for name in "qkv":
            self._modules.pop(name, None)

    @property
    def projections(self) -> dict[str, DecoupledProjection]:
        """The three decoupled layers by name."""
        return {"q": self.q, "k": self.k, "v": self.v}

    @property
    def uses_weight_norm(self) -> bool:
        """True if ‖w‖ changes the output."""
        return self.q.uses_weight_norm

    @property
    def decay_free_parameters(self) -> tuple[str, ...]:
        """Names of parameters that weight decay should not change."""
        if self.uses_weight_norm:
            return ()
        # A dictionary removes duplicates: q, k and v are usually rows of one parameter.
        return tuple(dict.fromkeys(projection._part.parameter for projection in self.projections.values()))

    def forward(
        self,
        query: Float[Tensor, "..."],
        key: Float[Tensor, "..."],
        value: Float[Tensor, "..."],
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs and, if they are needed, the attention weights. Arguments are as in torch's module."""
        if self._is_replica:
            # The replicas of the projections still refer to the module on the first device.
            for projection in self.projections.values():
                projection._attention = (self,)
        # torch needs the mask, too: `is_causal` only says which mask it is.
        require(not is_causal or attn_mask is not None, "attn_mask", "a causal mask if is_causal=True", attn_mask)
        # Bring all inputs to (N, length, embed_dim), the layout of `batch_first`.
        is_batched = query.ndim == 3
        if not is_batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = self.q(query), self.k(key), self.v(value)
        mask = self._additive_mask(attn_mask, key_padding_mask, q)
        k, v, mask = self._with_extra_positions(k, v, mask)
        # Split the features into heads: (N, heads, length, features per head).
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:  # torch's fused attention does not return them
            scores = q @ k.mT / math.sqrt(q.shape[-1])
            weights = F.dropout(F.softmax(scores if mask is None else scores + mask, -1), dropout)
            heads = weights @ v
        else:
            heads = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        y = self.out_proj(heads.transpose(1, 2).flatten(2))
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
        if not is_batched:
            return y.squeeze(0), None if weights is None else weights.squeeze(0)
        return y if self.batch_first else y.transpose(0, 1), weights

    def _additive_mask(self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """Return the sum of the masks, which broadcasts with the scores (N, heads, length, positions), or None."""
        total: Tensor | None = None
        for name, mask in (("attn_mask", attn_mask), ("key_padding_mask", padding)):
            if mask is None:
                continue
            is_known = mask.dtype == torch.bool or mask.is_floating_point()
            require(is_known, name, "a mask of bools or floating-point numbers", mask.dtype)
            if mask.dtype == torch.bool:  # True marks positions that are not attended to
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -math.inf)
            if name == "key_padding_mask":
                mask = mask.reshape(-1, 1, 1, mask.shape[-1])
            elif mask.ndim == 3:  # torch stacks the heads in the batch: (N·heads, length, positions)
                mask = mask.unflatten(0, (-1, self.num_heads))
            mask = mask.to(q.dtype)
            total = mask if total is None else total + mask
        return total

    def _with_extra_positions(self, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append the learned position of `add_bias_kv` and the zero position of `add_zero_attn`. Nothing masks them."""
        extra = []
        if self.bias_k is not None and self.bias_v is not None:
            extra.append((self.bias_k.to(k.dtype), self.bias_v.to(v.dtype)))
        if self.add_zero_attn:
            extra.append((k.new_zeros(1, 1, k.shape[-1]), v.new_zeros(1, 1, v.shape[-1])))
        for one_k, one_v in extra:
            k = torch.cat([k, one_k.expand(len(k), -1, -1)], 1)
            v = torch.cat([v, one_v.expand(len(v), -1, -1)], 1)
        return k, v, mask if mask is None or not extra else F.pad(mask, (0, len(extra)))

    def _reset_parameters(self) -> None:
        super()._reset_parameters()
        for projection in self.projections.values():
            projection.reset_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        # A projection without a learned k or ρ owns no parameter that would tell it the device.
        device = next(self.parameters()).device
        for projection in self.projections.values():
            projection._move_operator(device)
        return self
