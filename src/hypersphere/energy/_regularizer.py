"""The abstract regularisers: a sum over the layers of a model, to be added to a loss.

`NeuronRegularizer.forward` is the path of every call: it finds the step, calls `compute` of the subclass, adds its
terms and stores its buffers. Below it are `LayerPenalty`, the functions that select the layers of a model, and those
that arrange their neurons.
"""

from __future__ import annotations

import abc
import fnmatch
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import dropwhile
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypedDict, TypeVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hypersphere import _numerics
from hypersphere._deprecation import deprecated_argument, deprecated_attribute
from hypersphere._layer_selection import LayerSelection, LayerSource, NeuronLayer, SkippedLayer, layers_of
from hypersphere._signatures import accept_options_of
from hypersphere._validation import is_integer, is_number, require, warn_user
from hypersphere.energy._steps import Step, StepCounter

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "LayerPenalty",
    "NeuronRegularizer",
    "PenaltyOptions",
    "RegularizerOptions",
    "StepResult",
    "accept_regularizer_options",
    "place_on_layer",
    "require_bools",
    "require_complete_output",
    "resolve_patterns",
    "stack_equal_shapes",
    "warn_if_constant",
]

T = TypeVar("T")


class StepResult(NamedTuple):
    """What `NeuronRegularizer.compute` returns.

    Attributes:
        terms: scalars whose sum is the regulariser.
        updates: new values of buffers, which are stored if the call starts a step.
        is_finite: True if the sum is known to be finite, so that it need not be read to find out.
    """

    terms: Sequence[Tensor]
    updates: Mapping[str, Tensor] = MappingProxyType({})
    is_finite: bool = False


class NeuronRegularizer(nn.Module, abc.ABC):
    """A sum over layers, to be added to a loss: Σ_layers λ_layer·term(layer), times a scheduled factor.

    A subclass implements `factor` and `compute`. This class selects the layers, counts steps, applies the schedule and
    checks that the result is finite. It stores references to layers, not their parameters: the state dict contains only
    counters, seeds and learned tensors. If the term is a function of the weight alone, derive from `LayerPenalty`
    instead, which needs one method.

    **Steps.** Random draws, schedules and learned tensors depend on a step counter. Like the running statistics of a
    batch norm, it changes in training mode only: each call with gradients enabled counts as one step, so call the
    regulariser once per optimiser step. Calls in eval mode, without gradients, or repeated by activation checkpointing
    do not count. To count steps explicitly, for example with gradient accumulation, pass `auto_advance=False` and call
    `advance` once per optimiser step.

    Args:
        model: a module or named tensors, as for `hypersphere.layers_of`.
        roles: the roles of the layers that are regularised: "hidden", "output", "embedding". Decided by the subclass.
        min_length: the smallest length of a neuron. Decided by the subclass.
        needs_counter: True if `compute` uses the number of the step. Decided by the subclass.
        layer_weights: λ of layers by name or pattern, which replaces their default. The first match counts.
        schedule: a function of the step that returns a factor for the whole regulariser, such as `Warmup`.
        every: compute the regulariser only at every k-th step; it is 0 at the others. A call that does not count as a
            step returns the value of the last step that was not skipped.
        output_layer: "auto" (see `hypersphere.layers_of`), one or more names, or None.
        where: a function of name and module that returns True for the layers to regularise.
        auto_advance: False if steps are counted by calling `advance`.
        report: print which layers are regularised, and which are skipped and why.
    """

    steps: Tensor

    is_rotation_invariant: ClassVar[bool] = False
    """True if the term of every layer is the same for W and W·Rᵀ with any orthogonal R, as a function of WWᵀ is.

    Such a regulariser cannot train a layer whose neurons are only rotated. `MHE` and `LayerPenalty` warn about those
    with λ > 0.
    """

    population = deprecated_attribute("population", "selection")

    @deprecated_argument("shortest", "min_length")
    def __init__(
        self,
        model: LayerSource,
        *,
        roles: Sequence[str],
        min_length: int,
        needs_counter: bool,
        layer_weights: Mapping[str, float] | None = None,
        schedule: Callable[[int], float] | None = None,
        every: int = 1,
        output_layer: str | Sequence[str] | None = "auto",
        where: Callable[[str, nn.Module], bool] | None = None,
        auto_advance: bool = True,
        report: bool = False,
    ) -> None:
        super().__init__()
        require(schedule is None or callable(schedule), "schedule", "None or a callable of the step", schedule)
        require(is_integer(every, 1), "every", "an integer >= 1", every)
        require_bools(auto_advance=auto_advance, report=report)
        self.selection = _select_layers(model, output_layer, where, roles, min_length)
        self.layer_weights = resolve_patterns("layer_weights", layer_weights, self.selection)
        for factor in self.layer_weights.values():
            require(is_number(factor, 0), "layer_weights", "finite numbers >= 0", factor)
        self.schedule, self.every = schedule, every
        self.counter = StepCounter(auto_advance)
        # Without a counter there is nothing to save, and `forward` does not read a buffer from the device.
        if needs_counter or schedule is not None or every > 1:
            self.register_buffer("steps", torch.tensor(0))
        self.register_load_state_dict_post_hook(_forget_step_after_load)
        if report:
            print(self.selection.report())

    @property
    def skipped(self) -> tuple[SkippedLayer, ...]:
        """The weights that were left out, with the reason."""
        return self.selection.skipped

    @abc.abstractmethod
    def factor(self, layer: NeuronLayer) -> float:
        """Return λ of a layer: its entry of `layer_weights`, or the default."""

    def weighted_layers(self) -> list[NeuronLayer]:
        """Return the layers with λ > 0. Layers with λ = 0 are not computed, which also avoids 0·∞ = NaN."""
        return [layer for layer in self.selection if self.factor(layer)]

    @abc.abstractmethod
    def compute(self, labels: Tensor | None, step: Step) -> StepResult:
        """Return the terms of the sum, and new values of buffers that are stored if this call starts a step.

        Args:
            labels: the labels of a batch, or None.
            step: the number of the step, and the buffers to start from.
        """

    def forward(self, *positional: Tensor, labels: Int[Tensor, "..."] | None = None) -> Float[Tensor, ""]:
        """Return the scalar to add to the loss.

        Args:
            positional: the labels, deprecated because they are easily confused with the inputs of the model.
            labels: the labels of a batch or of its tokens, of any shape, if the regulariser uses them.
        """
        if positional:
            labels = self._positional_labels(positional, labels)
        step = self._begin_step()
        factor = self._scheduled_factor(step.number)
        anchor = self.selection[0].device_reference  # says on which device the result is
        if factor:
            # Energies of 16-bit products would be noise for close neurons.
            with _numerics.autocast_disabled(anchor):
                terms, updates, is_finite = self.compute(labels, step)
                total = _add(terms, anchor)
                total = total if self.schedule is None else factor * total
            # Reading the total makes the host wait for the device, so it is skipped if `compute` reports that its
            # terms are finite. A factor above 1 could still make them overflow.
            if not is_finite or factor > 1:
                self._require_finite(total, factor)
        else:
            total, updates = _add([], anchor), {}  # a skipped step contributes a constant 0
        # State changes last, so a call that raised an error can be repeated.
        if self._buffers:
            self.counter.finish(self, step, updates)
        return total

    def advance(self) -> None:
        """Count one optimiser step. Needed only with `auto_advance=False`."""
        self.counter.advance(self)

    def _begin_step(self) -> Step:
        """Return the step that this call belongs to."""
        # Without buffers nothing depends on the step. A plain `MHE(model)` has none and never asks the counter.
        return self.counter.begin(self, self.every) if self._buffers else Step()

    def _step_settings(self) -> list[str]:
        """Return the settings of steps that are not the defaults, for `extra_repr`."""
        settings = [f"every={self.every}"] if self.every > 1 else []
        settings += [] if self.schedule is None else [f"schedule={self.schedule}"]
        return settings + ([] if self.counter.auto_advance else ["auto_advance=False"])

    def _positional_labels(self, positional: tuple[Tensor, ...], labels: Tensor | None) -> Tensor:
        """Return labels that were not passed by keyword, with a warning."""
        kind = type(self).__name__
        if len(positional) > 1 or labels is not None:
            raise ValueError("pass one positional argument at most, the labels")
        message = f"{kind} takes no inputs of the model, only labels: pass {kind}(...)(labels=labels)"
        warn_user(message, DeprecationWarning)
        return positional[0]

    def _scheduled_factor(self, number: int) -> float:
        """Return the factor of a step: the schedule's, or 0 if `every` skips the step."""
        if number % self.every:
            return 0.0
        if self.schedule is None:
            return 1.0
        factor = self.schedule(number)
        require(is_number(factor, 0), "schedule", "a callable that returns finite numbers >= 0", factor)
        return float(factor)

    def _require_finite(self, total: Tensor, scheduled_factor: float) -> None:
        """Raise an error that names the first layer with a NaN or infinity, or else the largest entry and factor."""
        if not _numerics.values_readable(total) or math.isfinite(total.detach().item()):
            return
        # The total is known to be invalid here, so the cost of reading all layers does not matter.
        for layer in self.selection:
            _numerics.require_finite_rows(f"weight of {layer.name}", layer.rows().detach())
        entries = {layer.name: float(layer.rows().detach().abs().amax()) for layer in self.selection}
        largest = max(entries, key=entries.__getitem__)
        factor = scheduled_factor * max(map(self.factor, self.selection))
        reason = f"the largest entry is {entries[largest]:.3g}, in {largest}, and the largest factor {factor:.3g}"
        raise ValueError(f"the regulariser must be finite, but is {total.item()} although all weights are: {reason}")


class RegularizerOptions(TypedDict, total=False):
    """The options that every regulariser passes on to `NeuronRegularizer`, which describes them."""

    layer_weights: Mapping[str, float] | None
    schedule: Callable[[int], float] | None
    every: int
    output_layer: str | Sequence[str] | None
    where: Callable[[str, nn.Module], bool] | None
    auto_advance: bool
    report: bool


accept_regularizer_options = accept_options_of(NeuronRegularizer.__init__, only=RegularizerOptions.__annotations__)


def _forget_step_after_load(regularizer: NeuronRegularizer, incompatible_keys: object) -> None:
    """Let the next call start a step, after a state dict was loaded.

    A module-level function, because bound methods in hooks cannot be pickled with the module.
    """
    regularizer.counter.forget_step()


def _add(terms: Sequence[Tensor], anchor: Tensor) -> Tensor:
    """Return the sum of scalars on the device of `anchor`."""
    if not terms:
        return torch.zeros((), device=anchor.device)
    # Layers of a pipeline may be on several devices. The result has the dtype of the first term.
    return torch.stack([term.to(terms[0].dtype).to(anchor.device) for term in terms]).sum()


class PenaltyOptions(RegularizerOptions, total=False):
    """The options that every penalty passes on to `LayerPenalty`."""

    output: bool


class LayerPenalty(NeuronRegularizer):
    r"""A penalty on the weight of each layer: λ·Σ_layers penalty(W), where the rows of W are neurons.

    A subclass implements `penalty`. The penalties of the groups of a grouped convolution are added.

    Args:
        model: a module or named tensors, as for `hypersphere.layers_of`.
        weight: λ; 1 by default, also in subclasses that do not define `__init__`.
        output: True to regularise the output layer too.
        **options: `layer_weights`, `schedule`, `every`, `output_layer`, `where`, `auto_advance` and `report`, as in
            `NeuronRegularizer`.

    Example:
        >>> class RowNorms(LayerPenalty):
        ...     def penalty(self, w):
        ...         return (w.norm(dim=-1) - 1).square().sum(-1)
        >>> RowNorms({"w": 3 * torch.eye(2)}, weight=0.5)()
        tensor(4.)
    """

    @accept_regularizer_options
    def __init__(
        self, model: LayerSource, weight: float = 1.0, *, output: bool = False, **options: Unpack[RegularizerOptions]
    ) -> None:
        require(is_number(weight, 0), "weight", "a finite number >= 0", weight)
        require_bools(output=output)
        super().__init__(
            model,
            roles=("hidden", "output") if output else ("hidden",),
            min_length=1,
            needs_counter=False,  # a penalty depends on the weights alone
            **options,
        )
        require_complete_output(self.selection, output)
        self.weight = weight
        if self.is_rotation_invariant:
            # Not `self.factor`, which a subclass may override with attributes that it sets later.
            warn_if_constant(layer for layer in self.selection if LayerPenalty.factor(self, layer))

    @abc.abstractmethod
    def penalty(self, w: Float[Tensor, "*sets neurons dim"]) -> Float[Tensor, "*sets"]:
        """Return one number per set of neurons. Equal layers are passed together, as a stack of sets."""

    def factor(self, layer: NeuronLayer) -> float:
        """Return λ of a layer."""
        return self.layer_weights.get(layer.name, self.weight)

    def compute(self, labels: Tensor | None, step: Step) -> StepResult:
        """Return λ·penalty, one term per shape of layers."""
        layers = self.weighted_layers()
        terms = []
        # Layers of equal shape are computed together: many small products cost more than one batched product.
        for index, stack in stack_equal_shapes([layer.row_sets() for layer in layers]):
            factors = torch.tensor([self.factor(layers[i]) for i in index], dtype=stack.dtype, device=stack.device)
            # Penalties (layers, groups): the groups of a layer are added, then the layers with their λ.
            terms.append((factors * self._checked_penalty(stack).sum(-1)).sum())
        return StepResult(terms)

    def _checked_penalty(self, stack: Tensor) -> Tensor:
        """Return `penalty` of a stack of sets. A result of another shape would be added with wrong factors."""
        penalties, expected = self.penalty(stack), tuple(stack.shape[:-2])
        shape = tuple(penalties.shape) if isinstance(penalties, Tensor) else type(penalties).__name__
        accepted = f"one number per set of neurons, of shape {expected} for w of shape {tuple(stack.shape)}"
        require(shape == expected, f"the result of {type(self).__name__}.penalty", accepted, shape)
        return penalties

    def extra_repr(self) -> str:
        """Show the factor, the layers and the steps."""
        names = ", ".join(layer.name for layer in self.selection)
        return ", ".join([f"weight={self.weight} of [{names}]", *self._step_settings()])


def require_bools(**flags: object) -> None:
    """Raise a `ValueError` that names the first argument that is not a bool."""
    for name, flag in flags.items():
        require(isinstance(flag, bool), name, "a bool", flag)


# Selecting the layers ------------------------------------------------------------------------------------------------

_LEFT_OUT = {
    "output": "the output layer, which is left out by default",
    "embedding": "an embedding, which is only regularised on request",
}


def _select_layers(
    model: LayerSource,
    output_layer: str | Sequence[str] | None,
    where: Callable[[str, nn.Module], bool] | None,
    roles: Sequence[str],
    min_length: int,
) -> LayerSelection:
    """Return the layers of some roles whose neurons can be compared: two per set, of at least `min_length` numbers.

    Raises:
        ValueError: there is no such layer.
    """

    def reason_to_skip(layer: NeuronLayer) -> str | None:
        if layer.role not in roles:
            return _LEFT_OUT[layer.role]
        if layer.shape[1] < 2:
            return "one neuron per set"
        return f"neurons of {layer.length} number" if layer.length < min_length else None

    if output_layer == "last":
        warn_user("output_layer='last' is deprecated, use 'auto' instead", DeprecationWarning)
        output_layer = "auto"
    candidates = layers_of(model, output_layer=output_layer, where=where)
    candidates.warn_if_output_is_unknown()
    selection = candidates.without(reason_to_skip)
    if len(selection) == 0:
        reasons = "; ".join(f"{skip.name}: {skip.reason}" for skip in selection.skipped)
        reason = f"every layer is skipped ({reasons})" if reasons else "it has no layers"
        raise ValueError(f"model must have a layer of two or more neurons, but {reason}")
    return selection


def warn_if_constant(layers: Iterable[NeuronLayer]) -> None:
    """Warn about layers whose neurons are only rotated, given that the regulariser is invariant under rotations.

    Call it with the layers with λ > 0, as soon as λ is known.
    """
    rotated = [layer.name for layer in layers if _is_only_rotated(layer)]
    if rotated:
        reason = "rotations do not change the angles between neurons"
        warn_user(f"{reason}, so the regulariser is constant in {', '.join(rotated)}")


def require_complete_output(selection: LayerSelection, output: float) -> None:
    """Raise a `ValueError` if the output layer is regularised but no process holds all of its class vectors."""
    distributed = [repr(skip.name) for skip in selection.skipped if skip.is_distributed]
    zero = False if isinstance(output, bool) else 0
    accepted = f"{zero} with {', '.join(distributed)}, whose class vectors are distributed over processes"
    require(not output or not distributed, "output", accepted, output)


def _is_only_rotated(layer: NeuronLayer) -> bool:
    """Return True if the weight is W = V·Rᵀ with a frozen V and orthogonal R, so that WWᵀ = VVᵀ is constant."""
    if layer.module is None or not parametrize.is_parametrized(layer.module, layer.parameter):
        return False
    parametrizations = cast(nn.ModuleList, layer.module.parametrizations[layer.parameter])  # type: ignore[index]
    # A quantised V is stored as integers and scales, which a first parametrisation without parameters multiplies.
    originals = [p for name, p in parametrizations.named_parameters(recurse=False) if name.startswith("original")]
    maps = list(dropwhile(lambda parametrization: next(parametrization.parameters(), None) is None, parametrizations))
    is_frozen = not any(original.requires_grad for original in originals)
    return is_frozen and bool(maps) and all(getattr(rotation, "keeps_angles", False) for rotation in maps)


def resolve_patterns(argument: str, patterns: Mapping[str, T] | None, layers: Iterable[NeuronLayer]) -> dict[str, T]:
    """Return the values of a mapping from names or patterns (as in `fnmatch`) per layer; the first match counts.

    Raises:
        ValueError: a pattern matches no layer.
    """
    resolved: dict[str, T] = {}
    names = [layer.name for layer in layers]
    require(patterns is None or isinstance(patterns, Mapping), argument, "None or a mapping from names", patterns)
    for pattern, value in (patterns or {}).items():
        matches = [name for name in names if name == pattern or fnmatch.fnmatchcase(name, pattern)]
        accepted = f"a mapping whose names or patterns match some of {', '.join(map(repr, names))}"
        require(bool(matches), argument, accepted, pattern)
        for name in matches:
            resolved.setdefault(name, value)  # the first match counts
    return resolved


# Arranging their neurons ---------------------------------------------------------------------------------------------


def stack_equal_shapes(
    tensors: Sequence[Tensor], keys: Sequence[Hashable] | None = None
) -> list[tuple[list[int], Tensor]]:
    """Stack tensors of equal shape, so that one batched operation computes all of them.

    Args:
        tensors: to be stacked.
        keys: one per tensor; only tensors with equal keys are stacked. None if all may be.

    Returns:
        Stacks (L, …), each with the positions of its L members in `tensors`.

    Example:
        >>> stacks = stack_equal_shapes([torch.ones(2, 3), torch.ones(4, 3), torch.ones(2, 3)])
        >>> [(index, tuple(stack.shape)) for index, stack in stacks]
        [([0, 2], (2, 2, 3)), ([1], (1, 4, 3))]
    """
    members: dict[Hashable, list[int]] = {}
    for i, tensor in enumerate(tensors):
        # `torch.stack` needs equal dtypes and devices too.
        kind = (tensor.shape, tensor.dtype, tensor.device, None if keys is None else keys[i])
        members.setdefault(kind, []).append(i)
    # A single tensor becomes a stack without a copy.
    return [
        (index, torch.stack([tensors[i] for i in index]) if len(index) > 1 else tensors[index[0]].unsqueeze(0))
        for index in members.values()
    ]


def place_on_layer(x: Tensor, layer: NeuronLayer) -> Tensor:
    """Return `x` on the device of a layer and in the dtype of its rows; on the meta device it stays as it is."""
    anchor = layer.device_reference.detach()
    return x if anchor.is_meta else x.to(anchor.device, _numerics.compute_dtype(anchor.dtype))
