r"""CoMHE: the energy of projected neurons as a regulariser, and its low-rank form."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hypersphere import _numerics
from hypersphere._layer_selection import LayerSource, NeuronLayer, layers_of
from hypersphere._validation import is_integer, require, warn_user
from hypersphere.energy._regularizer import CallKind, check_factor, run_uncompiled, seeded_generator, stack_equal_shapes
from hypersphere.energy.mhe import EnergyOptions, EnergyRegularizer, WeightedSums
from hypersphere.functions._pairwise import PairSum
from hypersphere.functions.kernel import PairPotential, kernel_of
from hypersphere.functions.projection import PROJECTIONS, Bilateral, Learned, Projection

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["CoMHE", "LowRank", "factors", "low_rank_"]


class CoMHE(EnergyRegularizer):
    r"""Compressive MHE: λ_h·Σ_hidden Ē(g(ŵ₁), …, g(ŵ_N)) + λ_o·Ē_output with g(ŵ) = Pŵ/‖Pŵ‖   (thesis, 6.3).

    Random bases are functions of the seed and the step; learned bases are buffers. Both are in the state dict and the
    same on every rank. The output layer is not projected. A layer whose neurons are shorter than the projection's `dim`
    is not projected either and contributes its plain energy. Call the regulariser once per optimiser step; see
    `NeuronRegularizer` for the counting of steps.

    Args:
        model: a module or named tensors, as for `hypersphere.layers_of`.
        projection: a name of `hypersphere.projection` or an object of its classes.
        hidden: λ_h.
        half_space: True if hidden neurons are also repelled by the opposites of the others.
        shared: True if layers whose neurons have equal length share a basis.
        power: s ≥ 0, a kernel or a callable of the distance.
        min_distance: below this distance the energy continues linearly, which bounds the gradient; None for the value
            of the projection, 0.1 for "adversarial" and no bound for the others.
        options: `output`, `embedding`, `distance`, `neuron_weights` (not with "bilateral"), `average` and `seed`, see
            `MHE`; and the options of `NeuronRegularizer`.

    Example:
        >>> from hypersphere.functions.projection import Random
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> regularizer = CoMHE(net, projection=Random(dim=3, views=2))
        >>> loss = net(torch.randn(5, 8)).square().mean() + regularizer()

    Reference:
        Lin et al., Regularizing Neural Networks via Minimizing Hyperspherical Energy, CVPR 2020.
    """

    def __init__(
        self,
        model: LayerSource,
        *,
        projection: str | Projection = "random",
        hidden: float = 1.0,
        half_space: bool = True,
        shared: bool = True,
        power: float | str | Callable[[Tensor], Tensor] = 2,
        min_distance: float | None = None,
        **options: Unpack[EnergyOptions],
    ) -> None:
        check_factor("hidden", hidden)
        for name, flag in (("half_space", half_space), ("shared", shared)):
            require(isinstance(flag, bool), name, "a bool", flag)
        if isinstance(projection, str) and projection in PROJECTIONS:
            projection = PROJECTIONS[projection]()
        accepted = f"one of {', '.join(map(repr, PROJECTIONS))} or an object of those classes"
        require(isinstance(projection, Projection), "projection", accepted, projection)
        assert isinstance(projection, Projection)
        super().__init__(model, hidden=hidden, draws=True, power=power, min_distance=min_distance, **options)
        self.projection, self.shared = projection, shared
        # The projection's cap applies to kernels given by power or name. Other kernels and callables stay as they are.
        # The output layer is not projected, so it needs no cap unless one is requested.
        is_named_power = isinstance(power, (int, float, str))
        cap = projection.min_distance if min_distance is None and is_named_power else min_distance
        self.projected_potential = PairPotential(kernel_of(power, cap), self.potential.distance, half_space)
        is_mixing = isinstance(projection, Bilateral) and bool(self.neuron_weights)
        require(not is_mixing, "neuron_weights", "None with a bilateral projection, which mixes neurons", "a mapping")
        self.projected, self.unprojected = self._split()
        draw = int(self.seed), 0
        self._drawn: tuple[tuple[int, int], dict[str, Tensor]] = draw, self._draw_bases(*draw)
        if isinstance(projection, Learned):
            # In reverse, so that the first layer of each key remains: it determines device and dtype.
            first = {self._basis_key(layer): layer for layer in reversed(self.projected)}
            for key, basis in self._drawn[1].items():
                self.register_buffer(f"basis_{key}", _place(basis, first[key]))

    def _split(self) -> tuple[tuple[NeuronLayer, ...], tuple[NeuronLayer, ...]]:
        """Return the layers that are projected, and those that are too small for the projection."""
        layers = [layer for layer in self.selection if layer.role != "output"]
        accepted = "one with a hidden layer (output_layer=None makes the output layer a hidden one)"
        require(bool(layers), "model", accepted, "one with an output layer only")
        fits = {layer.name: self.projection.fits(layer.shape[1], layer.length) for layer in layers}
        small = tuple(layer for layer in layers if not fits[layer.name])
        if small:
            names = ", ".join(layer.name for layer in small)
            warn_user(f"not projected, because the layers are smaller than the projection: {names}")
        return tuple(layer for layer in layers if fits[layer.name]), small

    def weighted_sums(self, layers: list[NeuronLayer], step: int, call: CallKind) -> WeightedSums:
        """Return the output layers as they are and views (views, sets, N, r) of the others."""
        # Read the rows once: the bases are learned from them, and a parametrised weight is computed at every access.
        rows = {layer.name: layer.row_sets() for layer in self.projected}
        bases = self._bases(rows, step, call)
        sums = WeightedSums()
        if isinstance(self.projection, Learned):
            sums.updates = {f"basis_{key}": basis for key, basis in bases.items()}
        # Equal shapes are stacked, unless neurons have weights.
        stackable: list[tuple[Tensor, float]] = []
        for layer in layers:
            betas = self.neuron_weights.get(layer.name)
            if layer.role == "output":
                output = layer.row_sets().unsqueeze(0)
                output_betas = None if betas is None else betas.to(output)
                sums.add(PairSum(output, self.potential, output_betas, mean=True), self.factor(layer))
                continue
            views: tuple[Tensor, ...]
            if layer.name in rows:
                # Group projections have integer indices as a basis, whose dtype must not change.
                basis, w = bases[self._basis_key(layer)], rows[layer.name]
                views = self.projection(w, basis.to(w if basis.is_floating_point() else w.device))
            else:  # one view: the layer itself, which is too small for the projection
                views = (layer.row_sets().unsqueeze(0),)
            for view in views:
                if betas is None:
                    stackable.append((view, self.factor(layer)))
                else:
                    sums.add(PairSum(view, self.projected_potential, betas.to(view), mean=True), self.factor(layer))
        for stack, layer_factors in stack_equal_shapes(stackable):
            sums.add(PairSum(stack, self.projected_potential, mean=True), layer_factors)
        return sums

    def reduce(self, energies: Tensor) -> Tensor:
        """Reduce energies (…, views, sets): the mean or maximum over views, then the mean over sets."""
        views = energies.amax(-2) if self.projection.aggregate == "max" else energies.mean(-2)
        return views.mean(-1)

    # Bases ---------------------------------------------------------------------------------------------------------

    def _basis_key(self, layer: NeuronLayer) -> str:
        """Return what layers that share a basis have in common, as part of a buffer's name."""
        _, _, channels, taps = layer.shape
        if not self.shared or self.projection.scope == "layer":
            return layer.name.replace("~", "~0").replace(".", "~1")  # names of buffers contain no dot
        return f"{channels}x{taps}" if self.projection.scope == "channels" else str(channels * taps)

    def _draw_bases(self, seed: int, number: int) -> dict[str, Tensor]:
        """Draw the bases of all keys; the same seed and number give the same bases."""
        generator = seeded_generator(seed, number)
        bases: dict[str, Tensor] = {}
        for layer in self.projected:
            key = self._basis_key(layer)
            if key not in bases:
                bases[key] = self.projection.basis(*layer.shape[1:], generator)
        return bases

    @run_uncompiled
    def _bases(self, rows: dict[str, Tensor], step: int, call: CallKind) -> dict[str, Tensor]:
        """Return the basis of every key at a step: drawn, or learned."""
        if isinstance(self.projection, Learned):
            return self._learn_bases(self.projection, rows, step, call)
        # Bases are functions of seed and step. Cache the last ones for projections that draw less than once per step,
        # and for calls that read or repeat a step.
        draw = (int(self.seed), step // self.projection.every)
        if self._drawn[0] != draw:
            self._drawn = draw, self._draw_bases(*draw)
        return self._drawn[1]

    def _learn_bases(
        self, projection: Learned, rows: dict[str, Tensor], step: int, call: CallKind
    ) -> dict[str, Tensor]:
        """Return learned bases, after gradient steps on their objective if this step has any."""
        moves = call != "read" and (projection.unrolled or step % projection.every == 0)
        redraws = (
            call != "read" and projection.redraw_every is not None and step and step % projection.redraw_every == 0
        )
        redrawn = self._draw_bases(int(self.seed), step // (projection.redraw_every or 1)) if redraws else {}
        bases: dict[str, Tensor] = {}
        for key in {self._basis_key(layer): None for layer in self.projected}:
            # A shared basis descends the sum of the objectives of its layers.
            sharing = [rows[layer.name] for layer in self.projected if self._basis_key(layer) == key]
            basis = redrawn.get(key, self.initial_value(f"basis_{key}", call)).to(sharing[0])
            # Unrolled steps are part of the energy and need a graph. In all others the basis is a constant.
            with torch.set_grad_enabled(torch.is_grad_enabled() and projection.unrolled):
                for _ in range(projection.updates if moves else 0):
                    gradients = [projection.gradient(w, basis, self.projected_potential) for w in sharing]
                    basis = projection.update(basis, torch.stack(gradients).sum(0))
            bases[key] = basis
        return bases

    def extra_repr(self) -> str:
        """Show the layers and their settings."""
        hidden = ", ".join(layer.name for layer in self.projected)
        layers = f"hidden={self.hidden} of [{hidden}], shared={self.shared}"
        return f"{self.projection!r}, {layers}, {self.projected_potential!r}"


def _place(x: Tensor, layer: NeuronLayer) -> Tensor:
    """Return `x` on the device of a layer and in the dtype of its rows; on the meta device it stays as it is."""
    anchor = layer.anchor.detach()
    return x if anchor.is_meta else x.to(anchor.device, _numerics.widen(anchor[:0]).dtype)


# The low-rank form ---------------------------------------------------------------------------------------------------


class LowRank(nn.Module):
    r"""A parametrisation W̃ = Y₂(P₁Y₂)⁻¹Y₁ of rank r   (thesis, E.23). With neurons as rows it is Y₁(Y₂P₁ᵀ)⁻¹Y₂.

    Y₁ (N, r) and Y₂ (r, d) are learned; P₁ (r, d) is fixed. They start at the layer's best approximation of
    rank r, W·VVᵀ with its leading right singular vectors V: Y₂ = Vᵀ and Y₁ = W·VVᵀ·P₁ᵀ.

    Args:
        weight: the tensor of the layer, (N, …).
        rank: r, at most N and the length of a neuron.
        basis: P₁, "svd" for Vᵀ, which makes P₁Y₂ well conditioned, or "random" for the Gaussian matrix of the source.
        generator: the generator of a random P₁; the global one if None.
    """

    left: Tensor

    def __init__(
        self,
        weight: Float[Tensor, "neurons ..."],
        rank: int,
        *,
        basis: str = "svd",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        rows = _numerics.widen(weight.detach()).flatten(1)
        smaller = min(rows.shape)
        accepted = f"an integer from 1 to {smaller}, of {rows.shape[0]} x {rows.shape[1]} neurons"
        require(is_integer(rank, 1, smaller), "rank", accepted, rank)
        require(basis in ("svd", "random"), "basis", "'svd' or 'random'", basis)
        self.shape = tuple(weight.shape)
        if basis == "random":
            left = torch.randn(rank, rows.shape[1], generator=generator).to(rows)
        else:
            left = _right_singular_vectors(rows, rank)
        self.register_buffer("left", left)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the tensor of the layer from Y₁ (N, r) and Y₂ (r, d)."""
        with _numerics.autocast_disabled(first):
            y1, y2, p1 = _numerics.widen(first), _numerics.widen(second), self.left.to(_numerics.widen(first).dtype)
            w = y1 @ torch.linalg.solve(y2 @ p1.mT, y2)
        return w.reshape(self.shape).to(first.dtype)

    def right_inverse(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return Y₁ = W·VVᵀ·P₁ᵀ and Y₂ = Vᵀ for the best approximation W·VVᵀ of a tensor."""
        rows = _numerics.widen(w).flatten(1)
        right = _right_singular_vectors(rows, len(self.left))
        return (rows @ right.mT @ (right @ self.left.to(rows).mT)).to(w.dtype), right.to(w.dtype)


def _right_singular_vectors(rows: Tensor, rank: int) -> Tensor:
    """Return the `rank` leading right singular vectors of a matrix as rows."""
    return torch.linalg.svd(rows, full_matrices=False).Vh[:rank].contiguous()


def low_rank_(
    model: nn.Module,
    rank: int,
    *,
    basis: str = "svd",
    where: Callable[[str, nn.Module], bool] | None = None,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Turn the hidden layers of `model` into products of two learned factors of rank `rank`, in place, and return it.

    `MHE(factors(model))` is the regulariser of low-rank BP-CoMHE. `parametrize.remove_parametrizations` folds a layer.
    If one layer cannot be changed, none is.

    Args:
        model: the model.
        rank: the rank of every hidden layer.
        basis: the fixed matrix P₁, "svd" or "random" (see `LowRank`).
        where: a predicate of name and module that selects layers.
        generator: the generator of random matrices P₁; the global one if None.

    Example:
        >>> net = low_rank_(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)), rank=3)
        >>> torch.linalg.matrix_rank(net[0].weight).item()
        3
    """
    hidden = [layer for layer in layers_of(model, where=where).hidden if layer.shape[1] > 1]
    require(bool(hidden), "model", "one with a hidden layer", "one without")
    parametrizations: list[tuple[NeuronLayer, LowRank]] = []
    # Check and factorise all layers before the first one is changed.
    for layer in hidden:
        module, kind = layer.module, type(layer.module).__name__
        assert module is not None
        is_plain = layer.groups == 1 and tuple(layer.tensor.shape[:1]) == (layer.shape[1],)
        is_plain = is_plain and not getattr(module, "transposed", False)
        require(is_plain, layer.name, "a layer without groups that stores its neurons in the first dimension", kind)
        is_free = not parametrize.is_parametrized(module, layer.parameter)
        require(is_free, layer.name, "a layer whose weight has no parametrisation yet", "parametrised")
        try:
            parametrizations.append((layer, LowRank(layer.tensor, rank, basis=basis, generator=generator)))
        except ValueError as error:
            raise ValueError(f"{error} in {layer.name}") from None
    for layer, parametrization in parametrizations:
        assert layer.module is not None
        # `unsafe` skips one more evaluation of the product, which would only compare dtype and shape.
        parametrize.register_parametrization(layer.module, layer.parameter, parametrization, unsafe=True)
    return model


def factors(model: nn.Module) -> dict[str, Tensor]:
    """Return Y₁ and Y₂ of every low-rank layer as named rows: N vectors of r numbers and r vectors of d numbers.

    >>> net = low_rank_(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)), rank=3)
    >>> {name: tuple(rows.shape) for name, rows in factors(net).items()}
    {'0.first': (6, 3), '0.second': (3, 8)}
    """
    named: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, parametrize.ParametrizationList) and isinstance(module[0], LowRank):
            layer = name.removesuffix(".parametrizations.weight")
            named[f"{layer}.first"] = module.get_parameter("original0")
            named[f"{layer}.second"] = module.get_parameter("original1")
    return named
