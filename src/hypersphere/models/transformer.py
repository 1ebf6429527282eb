r"""A small transformer for text and images, whose normalised form keeps weights and hidden states on the unit sphere.

The normalised transformer (nGPT; Loshchilov et al. 2024, arXiv 2410.01131) replaces the residual connections and the
norms of a plain one. Each block moves the unit vector h towards the direction that attention or the MLP suggests,

    h ← norm(h + α_A(norm(attention(h)) − h))
    h ← norm(h + α_M(norm(MLP(h)) − h)),

and every row or column of a weight matrix that is a vector in the space of h has norm 1. Dot products are therefore
cosines, and learned scales take the place of the norms:

    attention   q ← s_qk·norm(q), k ← s_qk·norm(k), softmax(√d_k·qkᵀ)
    MLP         u ← s_u·u, v ← s_v·√d·v, down(u·silu(v))
    logits      z ← s_z·z

The plain transformer is h ← h + attention(RMSNorm(h)), h ← h + MLP(RMSNorm(h)), with softmax(qkᵀ/√d_k).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hypersphere import sphere
from hypersphere._numerics import compute_dtype, narrow, widen, zero_floor
from hypersphere._validation import is_integer, is_number, require
from hypersphere.models._blocks import LayerFactory, height_and_width, require_num_classes

__all__ = ["SphereTransformer"]

KINDS = ("plain", "normalized")


class SphereTransformer(nn.Module):
    r"""A transformer in plain form (pre-norm, RMSNorm) or normalised form (nGPT), for text or for images.

    With `vocabulary` it is a causal language model. It maps token ids (batch, length) to logits
    (batch, length, vocabulary), and encodes positions by rotations of queries and keys (RoPE; Su et al. 2021).

    With `image_size` it is a vision transformer. It maps images (batch, in_channels, height, width) to features
    (batch, dim) for a head of `hypersphere.heads`, or to logits if `num_classes` is set. Positions are learned vectors.
    The feature is the mean over the patches, normalised in the normalised form.

    The normalised form needs `normalize_weights_()` after each optimiser step. It is trained without weight decay
    (`hypersphere.optim.param_groups` applies none to it) and without warm-up. A learned scale with the initial
    value `init` is stored as a parameter p that starts at `scale`, and its value is p·init/scale. The number `scale`
    thus sets the learning rate of the scale relative to that of the weights: 1/√dim for α (init 0.05), s_qk and s_z
    (init 1), and 1 for s_u and s_v (init 1). The rates α are used as |α|, as in the authors' code.

    Args:
        dim: d, dimension of the hidden states.
        depth: number of blocks, each with attention and a SwiGLU MLP.
        heads: number of attention heads. d_k = dim/heads.
        kind: "normalized" or "plain".
        vocabulary: number of different tokens, for text.
        context: largest number of tokens that the model reads at once.
        tied: use the token embedding as the weight of the output layer.
        patch_size: side of a square patch of an image in pixels. It divides height and width.
        mlp_dim: neurons of the MLP; by default 4·dim.
        image_size, in_channels, num_classes, linear: see `hypersphere.models`. Give either `vocabulary` or
            `image_size`. The factory `linear` makes the layers of the blocks.

    Example:
        >>> model = SphereTransformer(vocabulary=50, context=16, dim=32, depth=2, heads=4)
        >>> model(torch.zeros(2, 16, dtype=torch.long)).shape
        torch.Size([2, 16, 50])
        >>> model.generate(torch.zeros(1, 4, dtype=torch.long), 3).shape
        torch.Size([1, 7])
        >>> vision = SphereTransformer(image_size=32, patch_size=8, dim=32, depth=2, kind="plain")
        >>> vision(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 32])
    """

    def __init__(
        self,
        dim: int = 128,
        depth: int = 4,
        heads: int = 4,
        *,
        kind: str = "normalized",
        vocabulary: int | None = None,
        context: int = 256,
        tied: bool = False,
        image_size: int | tuple[int, int] | None = None,
        patch_size: int = 4,
        in_channels: int = 3,
        num_classes: int | None = None,
        mlp_dim: int | None = None,
        linear: LayerFactory = nn.Linear,
    ) -> None:
        super().__init__()
        is_text, normalized = vocabulary is not None, kind == "normalized"
        sizes = {"dim": dim, "depth": depth, "heads": heads, "context": context, "patch_size": patch_size}
        for name, size in sizes.items():
            require(is_integer(size, 1), name, "an integer >= 1", size)
        require(mlp_dim is None or is_integer(mlp_dim, 1), "mlp_dim", "None or an integer >= 1", mlp_dim)
        require(kind in KINDS, "kind", f"one of {', '.join(KINDS)}", kind)
        # A rotation acts on pairs of coordinates, so text needs an even number per head.
        multiple = heads * (2 if is_text else 1)
        rule = f"a multiple of {multiple}" + (", twice the number of heads" if is_text else ", the number of heads")
        require(dim % multiple == 0, "dim", rule, dim)
        require_num_classes(num_classes)

        self.feature_dim, self.kind, self.context = dim, kind, context
        self.embedding: nn.Module
        self.positions: nn.Embedding | None = None
        self.classifier: nn.Linear | None = None
        if vocabulary is not None:
            require(is_integer(vocabulary, 2), "vocabulary", "None or an integer >= 2", vocabulary)
            require(image_size is None, "image_size", "None if vocabulary is set", image_size)
            require(num_classes is None, "num_classes", "None for text, whose logits are those of tokens", num_classes)
            self.embedding = nn.Embedding(vocabulary, dim)
        else:
            require(image_size is not None, "vocabulary", "an integer >= 2 if image_size is None", vocabulary)
            require(not tied, "tied", "False for images", tied)
            height, width = height_and_width(image_size, patch_size)  # type: ignore[arg-type]
            accepted = f"a multiple of patch_size {patch_size}, or (height, width) with two such multiples"
            require(height % patch_size == width % patch_size == 0, "image_size", accepted, image_size)
            self.embedding = nn.Conv2d(in_channels, dim, patch_size, stride=patch_size, bias=False)
            self.positions = nn.Embedding((height // patch_size) * (width // patch_size), dim)
        self.blocks = nn.ModuleList(
            _Block(dim, heads, 4 * dim if mlp_dim is None else mlp_dim, normalized, causal=is_text, linear=linear)
            for _ in range(depth)
        )
        self.norm = None if normalized else nn.RMSNorm(dim)
        outputs = vocabulary if is_text else num_classes
        if outputs is not None:
            self.classifier = nn.Linear(dim, outputs, bias=False)
        self.s_z = _LearnedScale(outputs, 1.0, dim**-0.5) if normalized and outputs is not None else None
        self._initialize_()
        if tied and self.classifier is not None:
            self.classifier.weight = cast(nn.Parameter, self.embedding.weight)
        self.normalize_weights_()

    @torch.no_grad()
    def _initialize_(self) -> None:
        """Draw weights from N(0, 1/dim), and those of the last layer of each branch from N(0, 1/(2·depth·dim))."""
        # The sum over the 2·depth branches of a plain transformer then has the variance of one branch (GPT-2). The
        # normalised form has the same directions. Layers of a factory with a parametrisation keep their weights.
        writers = {layer for block in self._blocks for layer in (block.attention.o, block.mlp.down)}
        for layer in self._matrices():
            if not parametrize.is_parametrized(layer):
                variance = 1 / self.feature_dim / (2 * len(self.blocks) if layer in writers else 1)
                nn.init.normal_(cast(Tensor, layer.weight), std=math.sqrt(variance))

    @property
    def _blocks(self) -> Sequence[_Block]:
        return cast("Sequence[_Block]", self.blocks)

    def _matrices(self) -> dict[nn.Module, int]:
        """Return the layers with a weight matrix, and the dimension of the weight that has the size `dim`.

        It is 1, the inputs, for layers that read hidden states, and 0, the outputs, for layers that write them. A table
        of embeddings has one row per token or position.
        """
        matrices: dict[nn.Module, int] = {self.embedding: 1 if isinstance(self.embedding, nn.Embedding) else 0}
        for table in (self.positions, self.classifier):
            if table is not None:
                matrices[table] = 1
        for block in self._blocks:
            attention, mlp = block.attention, block.mlp
            matrices |= dict.fromkeys((attention.q, attention.k, attention.v, mlp.up, mlp.gate), 1)
            matrices |= dict.fromkeys((attention.o, mlp.down), 0)
        return matrices

    @property
    def decay_free_parameters(self) -> tuple[str, ...]:
        """The parameters that get no weight decay from `hypersphere.optim.param_groups`: all of the normalised form."""
        return tuple(name for name, _ in self.named_parameters()) if self.kind == "normalized" else ()

    @torch.no_grad()
    def normalize_weights_(self) -> None:
        """Rescale the weights of the normalised form to norm 1 along the embedding dimension, in place.

        Call it after each optimiser step. The plain form is left unchanged. Weights are divided by the norms of

        - their rows, in layers that read hidden states: q, k, v, up, gate and the classifier; and in tables of
          embeddings: tokens and positions;
        - their columns, in layers that write hidden states: o, down and the embedding of patches, whose columns are the
          vectors of single pixels.

        Raises:
            ValueError: if a weight is parametrised, so that it cannot be written.

        Example:
            >>> model = SphereTransformer(vocabulary=5, dim=16, depth=1)
            >>> _ = nn.init.constant_(model.embedding.weight, 3.0)
            >>> model.normalize_weights_()
            >>> model.embedding.weight.detach()[0, :3]
            tensor([0.2500, 0.2500, 0.2500])
        """
        if self.kind == "plain":
            return
        dims: dict[Tensor, int] = {}  # by weight, so that a tied weight is rescaled once
        for layer, dim in self._matrices().items():
            weight = layer._parameters.get("weight")
            require(weight is not None, "model", "a transformer that owns its weights", "one with parametrised weights")
            dims[cast(Tensor, weight)] = dim
        weights = list(dims)
        # `_foreach_norm` has no dimension. The clamp keeps vectors of zeros at zero.
        norms = [
            torch.linalg.vector_norm(weight, dim=dim, keepdim=True, dtype=compute_dtype(weight.dtype))
            for weight, dim in dims.items()
        ]
        torch._foreach_clamp_min_(norms, zero_floor(norms[0].dtype))
        torch._foreach_div_(weights, norms)

    def features(
        self, inputs: Integer[Tensor, "batch length"] | Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch *length dim"]:
        """Map tokens to hidden states (batch, length, dim), or images to features (batch, dim).

        In the normalised form these are unit vectors.
        """
        if self.positions is None:
            length = inputs.shape[1]
            require(length <= self.context, "inputs", f"at most {self.context} tokens (context)", f"{length} tokens")
            h = self.embedding(inputs)
            angles = _rotary_angles(length, self._blocks[0].attention.head_dim, h)
        else:
            h, angles = self._embed_patches(inputs), None
        if self.norm is None:
            h = sphere.normalize(h)
        for block in self.blocks:
            h = block(h, angles)
        if self.norm is not None:
            h = self.norm(h)
        if self.positions is None:
            return h
        return h.mean(1) if self.norm is not None else sphere.normalize(h.mean(1))

    def _embed_patches(self, images: Tensor) -> Tensor:
        """Return the sum of patch and position embeddings, (batch, patches, dim)."""
        assert self.positions is not None
        embedded = self.embedding(images).flatten(2).mT
        if self.norm is None:
            # A patch of n pixels has the norm √n if their variance is 1. Divide by it, because positions have norm 1.
            embedded = embedded / math.sqrt(cast(Tensor, self.embedding.weight)[0].numel())
        return embedded + self.positions.weight

    def forward(
        self, inputs: Integer[Tensor, "batch length"] | Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch *length outputs"]:
        """Map tokens to logits of the next token, or images to logits, or to features if there is no classifier."""
        return self._logits(self.features(inputs))

    def _logits(self, features: Tensor) -> Tensor:
        if self.classifier is None:
            return features
        logits = self.classifier(features)
        return logits if self.s_z is None else (self.s_z() * logits).to(features.dtype)

    @torch.no_grad()
    def generate(
        self,
        tokens: Integer[Tensor, "batch length"],
        count: int,
        generator: torch.Generator | None = None,
        temperature: float = 1.0,
    ) -> Integer[Tensor, "batch longer"]:
        """Return the tokens followed by `count` tokens drawn from softmax(logits/temperature), one after another.

        Each token depends on the last `context` tokens before it.

        Args:
            tokens: ids of the first tokens, at least one per sequence.
            count: number of tokens to append.
            generator: source of random numbers; the global generator if None.
            temperature: 0 selects the most probable token.
        """
        require(self.positions is None, "model", "a transformer with a vocabulary", "one for images")
        shape = tuple(tokens.shape)
        require(len(shape) == 2 and shape[1] > 0, "tokens", "of shape (batch, length) with length >= 1", shape)
        require(is_integer(count, 0), "count", "an integer >= 0", count)
        require(is_number(temperature, 0), "temperature", "a number >= 0", temperature)
        for _ in range(count):
            logits = widen(self._logits(self.features(tokens[:, -self.context :])[:, -1]))
            if temperature == 0:
                drawn = logits.argmax(-1, keepdim=True)
            else:
                drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, drawn.to(tokens.dtype)], dim=1)
        return tokens


class _Block(nn.Module):
    """Attention and an MLP, each with a residual connection (plain) or a step on the sphere (normalised)."""

    def __init__(
        self, dim: int, heads: int, mlp_dim: int, normalized: bool, *, causal: bool, linear: LayerFactory
    ) -> None:
        super().__init__()
        self.normalized = normalized
        self.attention = _Attention(dim, heads, normalized, causal=causal, linear=linear)
        self.mlp = _SwiGLU(dim, mlp_dim, normalized, linear=linear)
        if normalized:
            self.alpha_attention = _LearnedScale(dim, 0.05, dim**-0.5)
            self.alpha_mlp = _LearnedScale(dim, 0.05, dim**-0.5)
        else:
            self.attention_norm = nn.RMSNorm(dim)
            self.mlp_norm = nn.RMSNorm(dim)

    def forward(self, h: Tensor, angles: Tensor | None) -> Tensor:
        if self.normalized:
            h = _step_towards(h, self.attention(h, angles), self.alpha_attention())
            return _step_towards(h, self.mlp(h), self.alpha_mlp())
        h = h + self.attention(self.attention_norm(h), angles)
        return h + self.mlp(self.mlp_norm(h))


def _step_towards(h: Tensor, target: Tensor, rates: Tensor) -> Tensor:
    """Return norm(h + |α|·(norm(target) − h)), for rates α."""
    # lerp(a, b, α) = a + α·(b − a). Under autocast the target has half precision, but the hidden states do not.
    moved = torch.lerp(widen(h), sphere.polar(target)[1], rates.abs())
    return narrow(sphere.polar(moved)[1], h.dtype)


class _Attention(nn.Module):
    """Attention with several heads. The normalised form compares unit queries and keys, scaled by s_qk."""

    def __init__(self, dim: int, heads: int, normalized: bool, *, causal: bool, linear: LayerFactory) -> None:
        super().__init__()
        self.heads, self.head_dim, self.causal = heads, dim // heads, causal
        self.q, self.k, self.v, self.o = (linear(dim, dim, bias=False) for _ in "qkvo")
        self.s_qk = _LearnedScale(dim, 1.0, dim**-0.5) if normalized else None

    def forward(self, h: Tensor, angles: Tensor | None) -> Tensor:
        q, k, v = (layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if angles is not None:
            q, k = _rotate(q, angles), _rotate(k, angles)
        scale = None  # the default, 1/√d_k
        if self.s_qk is not None:
            # Rotations keep norms, but not the axes that s_qk scales, so scaling comes last.
            s_qk = self.s_qk().view(self.heads, 1, self.head_dim)
            q, k = s_qk * sphere.polar(q)[1], s_qk * sphere.polar(k)[1]
            # Cosines of random unit vectors have the variance 1/d_k, so this factor makes it 1.
            scale = math.sqrt(self.head_dim)
        q, k = narrow(q, v.dtype), narrow(k, v.dtype)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=scale)
        return self.o(mixed.transpose(1, 2).flatten(2))


def _rotary_angles(length: int, head_dim: int, h: Tensor) -> Tensor:
    """Return the angles t·10000^(−2i/d_k) of positions t and pairs of coordinates i, (length, head_dim/2)."""
    # Compute the angles for each batch: stored angles would be rounded when the model is cast to half precision.
    dtype = compute_dtype(h.dtype)
    frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2, device=h.device, dtype=dtype) / head_dim)
    return torch.outer(torch.arange(length, device=h.device, dtype=dtype), frequencies)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the pairs of coordinates (x₀, x₁), (x₂, x₃), … of each position by its angles, in float32 or wider."""
    cosine, sine = angles.cos(), angles.sin()
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([first * cosine - second * sine, first * sine + second * cosine], dim=-1).flatten(-2)


class _SwiGLU(nn.Module):
    """The MLP down(u·silu(v)) with u = up(h) and v = gate(h). The normalised form scales u by s_u and v by s_v·√d."""

    def __init__(self, dim: int, mlp_dim: int, normalized: bool, *, linear: LayerFactory) -> None:
        super().__init__()
        self.up, self.gate = linear(dim, mlp_dim, bias=False), linear(dim, mlp_dim, bias=False)
        self.down = linear(mlp_dim, dim, bias=False)
        self.s_u = _LearnedScale(mlp_dim, 1.0, 1.0) if normalized else None
        # The cosines v have the variance 1/d. The factor √d makes it 1, where silu is not linear.
        self.s_v = _LearnedScale(mlp_dim, math.sqrt(dim), 1.0) if normalized else None

    def forward(self, h: Tensor) -> Tensor:
        u, v = self.up(h), self.gate(h)
        dtype = u.dtype
        if self.s_u is not None and self.s_v is not None:
            u, v = self.s_u() * u, self.s_v() * v
        return self.down((u * F.silu(v)).to(dtype))


class _LearnedScale(nn.Module):
    """Learned numbers with the initial value `init`, stored as `value`, which starts at `scale`.

    An optimiser step of a given size changes the numbers by init/scale times as much as `value`.
    """

    def __init__(self, size: int, init: float, scale: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((size,), scale))
        self.factor = init / scale

    def forward(self) -> Tensor:
        return widen(self.value) * self.factor
