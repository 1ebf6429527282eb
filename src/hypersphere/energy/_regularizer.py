"""The abstract regularisers: a sum over the layers of a model, to be added to a loss."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hypersphere import _numerics
from hypersphere._deprecation import deprecated_attribute
from hypersphere._layer_selection import LayerSource, NeuronLayer, SkippedLayer
from hypersphere._signatures import accept_options_of
from hypersphere._validation import is_integer, is_number, require, warn_user
from hypersphere.energy._layer_sets import (
    require_complete_output,
    resolve_patterns,
    select_layers,
    stack_equal_shapes,
)
from hypersphere.energy._steps import Step, StepCounter

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "LayerPenalty",
    "NeuronRegularizer",
    "RegularizerKeywords",
    "RegularizerOptions",
    "StepResult",
    "options_of",
]


@dataclass(frozen=True)
class RegularizerOptions:
    """The options that all regularisers share: the weights of layers, the schedule, and the choice of layers.

    The regularisers accept them as keyword arguments of the same names.

    Args:
        layer_weights: a mapping from names or patterns of layers to λ, which replace the default there. The first
            match counts.
        schedule: a callable of the step that returns a factor for the whole regulariser, such as `Warmup`.
        every: compute the regulariser only at every k-th step; it is 0 at the others.
        output_layer: "auto" (see `hypersphere.layers_of`), one or more names, or None.
        where: a predicate of name and module that selects layers.
        auto_advance: False if steps are counted by calling `advance`.
        report: print which layers are regularised, and which are skipped and why.

    Example:
        >>> RegularizerOptions(every=10).every
        10
    """

    layer_weights: Mapping[str, float] | None = None
    schedule: Callable[[int], float] | None = None
    every: int = 1
    output_layer: str | Sequence[str] | None = "auto"
    where: Callable[[str, nn.Module], bool] | None = None
    auto_advance: bool = True
    report: bool = False

    def __post_init__(self) -> None:
        """Check the options that do not depend on the layers."""
        is_schedule = self.schedule is None or callable(self.schedule)
        require(is_schedule, "schedule", "None or a callable of the step", self.schedule)
        require(is_integer(self.every, 1), "every", "an integer >= 1", self.every)
        for name, flag in (("auto_advance", self.auto_advance), ("report", self.report)):
            require(isinstance(flag, bool), name, "a bool", flag)


class RegularizerKeywords(TypedDict, total=False):
    """The options of `RegularizerOptions` as keyword arguments, for `**options: Unpack[RegularizerKeywords]`."""

    layer_weights: Mapping[str, float] | None
    schedule: Callable[[int], float] | None
    every: int
    output_layer: str | Sequence[str] | None
    where: Callable[[str, nn.Module], bool] | None
    auto_advance: bool
    report: bool


def options_of(regularizer: NeuronRegularizer, keywords: RegularizerKeywords) -> RegularizerOptions:
    """Return the options that the constructor of a regulariser received as keyword arguments.

    Raises:
        TypeError: an argument is unknown. The message names the regulariser, as for a declared signature.
    """
    known = {field.name for field in fields(RegularizerOptions)}
    unknown = next((name for name in keywords if name not in known), None)
    if unknown is not None:
        kind = type(regularizer).__name__
        raise TypeError(f"{kind}.__init__() got an unexpected keyword argument {unknown!r}")
    return RegularizerOptions(**keywords)


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

    **Steps.** Random draws, schedules and learned tensors depend on a step counter. A call in training mode with
    gradients enabled counts as one step, so the contract is one call per optimiser step. Calls without gradients, in
    eval mode, or repeated by activation checkpointing do not count, and see the draw of the last step. With gradient
    accumulation, pass `auto_advance=False` and call `advance` once per optimiser step. `StepCounter` in
    `energy/_steps.py` has the complete table.

    Args:
        model: a module or named tensors, as for `hypersphere.layers_of`.
        options: layer weights, schedule and choice of layers; None for the defaults.
        roles: the roles of the layers that are regularised: "hidden", "output", "embedding". Decided by the subclass.
        shortest: the smallest length of a neuron. Decided by the subclass.
        needs_counter: whether the subclass uses the step for more than the schedule.
    """

    steps: Tensor
    population = deprecated_attribute("population", "selection")

    def __init__(
        self,
        model: LayerSource,
        options: RegularizerOptions | None = None,
        *,
        roles: Sequence[str],
        shortest: int,
        needs_counter: bool,
    ) -> None:
        super().__init__()
        options = RegularizerOptions() if options is None else options
        self.selection = select_layers(model, options.output_layer, options.where, roles, shortest)
        self.schedule, self.every = options.schedule, options.every
        self.layer_weights = resolve_patterns("layer_weights", options.layer_weights, self.selection)
        for factor in self.layer_weights.values():
            require(is_number(factor, 0), "layer_weights", "finite numbers >= 0", factor)
        self.counter = StepCounter(options.auto_advance)
        # Without a counter there is nothing to save, and `forward` does not read a buffer from the device.
        if needs_counter or self.schedule is not None or self.every > 1:
            self.register_buffer("steps", torch.tensor(0))
        self.register_load_state_dict_post_hook(_reset_step_after_load)
        if options.report:
            print(self.selection.report())

    @property
    def skipped(self) -> tuple[SkippedLayer, ...]:
        """The weights that were left out, with the reason."""
        return self.selection.skipped

    @abc.abstractmethod
    def factor(self, layer: NeuronLayer) -> float:
        """Return λ of a layer: that of `layer_weights`, or the default."""

    def weighted_layers(self) -> list[NeuronLayer]:
        """Return the layers with λ > 0. Layers with λ = 0 are not computed, which also avoids 0·∞ = NaN."""
        return [layer for layer in self.selection if self.factor(layer)]

    @abc.abstractmethod
    def compute(self, labels: Tensor | None, step: Step) -> StepResult:
        """Return the terms of the sum, and new values of buffers that are stored if this call starts a step.

        Args:
            labels: the labels of a batch, or None.
            step: the number of the step, and the buffers to start from. A "peek" does not update learned buffers.
        """

    def forward(self, *positional: Tensor, labels: Int[Tensor, "..."] | None = None) -> Float[Tensor, ""]:
        """Return the scalar to add to the loss.

        Args:
            positional: the labels, deprecated because they are easily confused with the inputs of the model.
            labels: the labels of a batch or of its tokens, of any shape, if the regulariser uses them.
        """
        if positional:
            labels = self._positional_labels(positional, labels)
        # Without buffers there is no state, and all calls are alike.
        step = self.counter.begin(self) if self._buffers else Step()
        factor = self._scheduled_factor(step.number)
        anchor = self.selection[0].anchor
        if factor:
            # Energies of 16-bit products would be noise for close neurons.
            with _numerics.autocast_disabled(anchor):
                terms, updates, is_finite = self.compute(labels, step)
                total = _add(terms, anchor)
                total = total if self.schedule is None else factor * total
            # Reading the total makes the host wait for the device. A factor above 1 could make it overflow.
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

    def _positional_labels(self, positional: tuple[Tensor, ...], labels: Tensor | None) -> Tensor:
        """Return labels that were not passed by keyword, with a warning."""
        kind = type(self).__name__
        if len(positional) > 1 or labels is not None:
            raise ValueError("pass one positional argument at most, the labels")
        message = f"{kind} takes no inputs of the model, only labels: pass {kind}(...)(labels=labels)"
        warn_user(message, DeprecationWarning)
        return positional[0]

    def _scheduled_factor(self, number: int) -> float:
        """Return the factor of a step: that of the schedule, or 0 if `every` skips the step."""
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


def _reset_step_after_load(regularizer: NeuronRegularizer, incompatible_keys: object) -> None:
    """Let the next call start a step, after a state dict was loaded.

    A module-level function, because bound methods in hooks cannot be pickled with the module.
    """
    regularizer.counter.reset_step()


def _add(terms: Sequence[Tensor], anchor: Tensor) -> Tensor:
    """Return the sum of scalars on the device of `anchor`."""
    if not terms:
        return torch.zeros((), device=anchor.device)
    # Layers of a pipeline may be on several devices. The dtype is that of the first term.
    return torch.stack([term.to(terms[0].dtype).to(anchor.device) for term in terms]).sum()


class LayerPenalty(NeuronRegularizer):
    r"""A penalty on the weight of each layer: λ·Σ_layers penalty(W), where the rows of W are neurons.

    A subclass implements `penalty`. The groups of a layer, such as those of a grouped convolution, are added.

    The arguments from `layer_weights` to `report` are those of `RegularizerOptions`, which all regularisers share.

    Args:
        model: a module or named tensors, as for `hypersphere.layers_of`.
        weight: λ; 1 by default, also in subclasses that do not define `__init__`.
        output: True to regularise the output layer too.

    Example:
        >>> class RowNorms(LayerPenalty):
        ...     def penalty(self, w):
        ...         return (w.norm(dim=-1) - 1).square().sum(-1)
        >>> RowNorms({"w": 3 * torch.eye(2)}, weight=0.5)()
        tensor(4.)
    """

    @accept_options_of(RegularizerOptions)
    def __init__(
        self,
        model: LayerSource,
        weight: float = 1.0,
        *,
        output: bool = False,
        **options: Unpack[RegularizerKeywords],
    ) -> None:
        require(is_number(weight, 0), "weight", "a finite number >= 0", weight)
        require(isinstance(output, bool), "output", "a bool", output)
        roles = ("hidden", "output") if output else ("hidden",)
        super().__init__(model, options_of(self, options), roles=roles, shortest=1, needs_counter=False)
        require_complete_output(self.selection, output)
        self.weight = weight

    @abc.abstractmethod
    def penalty(self, w: Float[Tensor, "*sets neurons dim"]) -> Float[Tensor, "*sets"]:
        """Return one number per set of neurons. Equal layers are passed together, as a stack of sets."""

    def factor(self, layer: NeuronLayer) -> float:
        """Return λ of a layer."""
        return self.layer_weights.get(layer.name, self.weight)

    def compute(self, labels: Tensor | None, step: Step) -> StepResult:
        """Return λ·penalty, one term per shape of layers."""
        stacks = stack_equal_shapes((layer.row_sets(), self.factor(layer)) for layer in self.weighted_layers())
        return StepResult([(factors * self._checked_penalty(stack).sum(-1)).sum() for stack, factors in stacks])

    def _checked_penalty(self, stack: Tensor) -> Tensor:
        """Return `penalty` of a stack of sets. A result of another shape would be added with wrong factors."""
        penalties, expected = self.penalty(stack), tuple(stack.shape[:-2])
        shape = tuple(penalties.shape) if isinstance(penalties, Tensor) else type(penalties).__name__
        accepted = f"one number per set of neurons, of shape {expected} for w of shape {tuple(stack.shape)}"
        require(shape == expected, f"the result of {type(self).__name__}.penalty", accepted, shape)
        return penalties

    def extra_repr(self) -> str:
        """Show the factor and the layers."""
        return f"weight={self.weight} of [{', '.join(layer.name for layer in self.selection)}]"
