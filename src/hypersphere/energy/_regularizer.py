"""What all regularisers of neurons share: which layers they take, their factors, and the counter of steps."""

from __future__ import annotations

import abc
import difflib
import fnmatch
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, NoReturn, ParamSpec, TypedDict, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hypersphere import _numerics
from hypersphere._deprecation import deprecated_attribute
from hypersphere._layer_selection import LayerSelection, LayerSource, NeuronLayer, SkippedLayer, layers_of
from hypersphere._validation import is_integer, is_number, require, warn_user
from hypersphere.functions.orthogonal import ORTHOGONALS

__all__ = [
    "CallKind",
    "NeuronRegularizer",
    "RegularizerOptions",
    "StepResult",
    "Warmup",
    "add_terms",
    "check_factor",
    "check_seed",
    "resolve_patterns",
    "run_uncompiled",
    "seeded_generator",
    "stack_equal_shapes",
]

P = ParamSpec("P")
T = TypeVar("T")


CallKind = Literal["new", "repeat", "read"]
"""What a call is for: it starts a step, repeats the last one with gradients, or only reads the value."""


class StepResult(NamedTuple):
    """What `NeuronRegularizer.compute` returns.

    Attributes:
        total: the regulariser.
        updates: new values of buffers, which are stored if the call starts a step.
        is_finite: True if the total is known to be finite, so that it need not be read to find out.
    """

    total: Tensor
    updates: Mapping[str, Tensor] = MappingProxyType({})
    is_finite: bool = False


def run_uncompiled(method: Callable[P, T]) -> Callable[P, T]:
    """Run a method in Python inside a compiled caller. Unlike `torch.compiler.disable`, do not import the compiler."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            # Resolved here and not by a decorator: using `disable` at import time would import the compiler.
            return torch.compiler.disable(method)(*args, **kwargs)
        return method(*args, **kwargs)

    return call


@dataclass(frozen=True)
class Warmup:
    """A schedule that rises linearly from `start` to 1 over the first `steps` steps, then stays at 1.

    >>> schedule = Warmup(steps=4)
    >>> [schedule(step) for step in (0, 2, 4, 9)]
    [0.0, 0.5, 1.0, 1.0]
    """

    steps: int
    start: float = 0.0

    def __post_init__(self) -> None:
        """Check the number of steps and the start."""
        require(is_integer(self.steps, 1), "steps", "an integer >= 1", self.steps)
        require(is_number(self.start, 0), "start", "a number >= 0", self.start)

    def __call__(self, step: int) -> float:
        """Return the factor at a step, counted from 0."""
        return self.start + (1 - self.start) * min(step / self.steps, 1.0)


class RegularizerOptions(TypedDict, total=False):
    """The options that all regularisers accept. `NeuronRegularizer` documents them."""

    layer_weights: Mapping[str, float] | None
    schedule: Callable[[int], float] | None
    every: int
    output_layer: str | Sequence[str] | None
    where: Callable[[str, nn.Module], bool] | None
    auto_advance: bool
    report: bool


class NeuronRegularizer(nn.Module, abc.ABC):
    """A sum over layers, to be added to a loss: Σ_layers λ_layer·term(layer), times a scheduled factor.

    A subclass implements `factor` and `compute`, which returns the sum for one step. This class selects the layers,
    counts steps, applies the schedule and checks that the result is finite. It stores references to layers, not their
    parameters: the state dict contains only counters, seeds and learned bases.

    **Steps.** Random draws, schedules and learned bases depend on a step counter. A call in training mode with
    gradients enabled counts as one step, so the contract is one call per optimiser step. Calls without gradients, in
    eval mode, or repeated by activation checkpointing do not count, and see the draw of the last step. With gradient
    accumulation, pass `auto_advance=False` and call `advance` once per optimiser step.

    Args:
        model: a module or named tensors, as for `hypersphere.layers_of`.
        roles: the roles of the layers that are regularised: "hidden", "output", "embedding". Decided by the subclass.
        shortest: the smallest length of a neuron. Decided by the subclass.
        needs_counter: whether the subclass uses the step for more than the schedule.
        layer_weights: a mapping from names or patterns of layers to λ, which replace the default there. The first
            match counts.
        schedule: a callable of the step that returns a factor for the whole regulariser, such as `Warmup`.
        every: compute the regulariser only at every k-th step; it is 0 at the others.
        output_layer: "auto" (see `hypersphere.layers_of`), one or more names, or None.
        where: a predicate of name and module that selects layers.
        auto_advance: False if steps are counted by calling `advance`.
        report: print which layers are regularised, and which are skipped and why.
    """

    steps: Tensor
    population = deprecated_attribute("population", "selection")

    def __init__(
        self,
        model: LayerSource,
        *,
        roles: Sequence[str],
        shortest: int,
        needs_counter: bool,
        layer_weights: Mapping[str, float] | None = None,
        schedule: Callable[[int], float] | None = None,
        every: int = 1,
        output_layer: str | Sequence[str] | None = "auto",
        where: Callable[[str, nn.Module], bool] | None = None,
        auto_advance: bool = True,
        report: bool = False,
        **unknown: object,
    ) -> None:
        super().__init__()
        if unknown:
            _raise_unknown_argument(type(self), next(iter(unknown)))
        require(schedule is None or callable(schedule), "schedule", "None or a callable of the step", schedule)
        require(is_integer(every, 1), "every", "an integer >= 1", every)
        for name, flag in (("auto_advance", auto_advance), ("report", report)):
            require(isinstance(flag, bool), name, "a bool", flag)
        self.selection = _select_layers(model, output_layer, where, roles, shortest)
        self.schedule, self.every, self.auto_advance = schedule, every, auto_advance
        self.layer_weights = resolve_patterns("layer_weights", layer_weights, self.selection)
        for factor in self.layer_weights.values():
            check_factor("layer_weights", factor)
        # Without a counter there is nothing to save, and `forward` does not read a buffer from the device.
        if needs_counter or schedule is not None or every > 1:
            self.register_buffer("steps", torch.tensor(0))
        self._last_step: int | None = None
        self._replaced: dict[str, Tensor] = {}  # buffers before the last update, for a call that repeats it
        self.register_load_state_dict_post_hook(_forget_last_call)
        _warn_about_rotated_layers(self.selection)
        if report:
            print(self.selection.report())

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Show the inherited options in the signature of a subclass that declares them as `**options`."""
        super().__init_subclass__(**keywords)
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]  # without self
        if parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
            declared = {parameter.name for parameter in parameters}
            inherited = inspect.signature(cls.__mro__[1]).parameters.values()
            # Inherited arguments without a default are decided by the subclass.
            options = [p for p in inherited if p.kind is p.KEYWORD_ONLY and p.default is not p.empty]
            parameters[-1:] = [p for p in options if p.name not in declared]
        cls.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]

    @property
    def skipped(self) -> tuple[SkippedLayer, ...]:
        """The weights that were left out, with the reason."""
        return self.selection.skipped

    @abc.abstractmethod
    def factor(self, layer: NeuronLayer) -> float:
        """Return λ of a layer: that of `layer_weights`, or the default."""

    @abc.abstractmethod
    def compute(self, labels: Tensor | None, step: int, call: CallKind) -> StepResult:
        """Return the regulariser, and new values of buffers that are stored if this call starts a step.

        Args:
            labels: the labels of a batch, or None.
            step: the index of the step, from 0.
            call: what the call is for. Both "new" and "repeat" start from `initial_value` of a buffer and update it;
                "read" uses buffers as they are.
        """

    def forward(self, *positional: Tensor, labels: Int[Tensor, "..."] | None = None) -> Float[Tensor, ""]:
        """Return the scalar to add to the loss.

        Args:
            positional: the labels, deprecated because they are easily confused with the inputs of the model.
            labels: the labels of a batch, if the regulariser uses them.
        """
        if positional:
            kind = type(self).__name__
            require(len(positional) == 1 and labels is None, "labels", "the only argument", f"{len(positional)} more")
            message = f"{kind} takes no inputs of the model, only labels: pass {kind}(...)(labels=labels)"
            warn_user(message, DeprecationWarning)
            (labels,) = positional
        call = self._kind_of_call()
        step = self._step_index(call) if self._counts else 0
        anchor = self.selection[0].anchor
        factor = 1.0 if self.schedule is None else self._scheduled_factor(step)
        updates: Mapping[str, Tensor] = {}
        if factor and step % self.every == 0:
            # Energies of 16-bit products would be noise for close neurons.
            with _numerics.autocast_disabled(anchor):
                total, updates, is_finite = self.compute(labels, step, call)
                total = total if self.schedule is None else factor * total
            # Reading the total makes the host wait for the device. A factor above 1 could make it overflow.
            if not is_finite or factor > 1:
                self._require_finite(total)
        else:
            total = torch.zeros((), device=anchor.device)  # constant: this step has no gradient
        # State changes last, so a call that raised an error can be repeated.
        if call == "new" and (updates or self._counts):
            self._store(updates, step)
        return total

    def advance(self) -> None:
        """Count one optimiser step. Needed only with `auto_advance=False`."""
        require(not self.auto_advance, "auto_advance", "False if steps are counted by calling advance()", True)
        if self._counts:
            self.steps += 1

    def initial_value(self, name: str, call: CallKind) -> Tensor:
        """Return a buffer as it was at the start of the step: before the last update if the call repeats it."""
        value = self._replaced.get(name) if call == "repeat" else None
        return self.get_buffer(name) if value is None else value

    @property
    def _counts(self) -> bool:
        return "steps" in self._buffers

    def _kind_of_call(self) -> CallKind:
        """Return what this call is for, from the mode of the module and what autograd is doing."""
        if not self.training or not torch.is_grad_enabled():
            return "read"
        # Activation checkpointing repeats forward passes during backward; torch.func transforms must not change state.
        is_transformed = not torch.compiler.is_compiling() and not _numerics.values_readable()
        if is_transformed or _numerics.in_backward():
            return "repeat"
        # Accumulation: until `advance` is called, further calls belong to the same step.
        is_counted = not self.auto_advance and self._counts and self._last_step == int(self.steps)
        return "repeat" if is_counted else "new"

    @run_uncompiled
    def _step_index(self, call: CallKind) -> int:
        """Return the index of the current step, or of the last one if the call does not start a step."""
        steps = int(self.steps)
        # The counter is already one ahead after a counted call, so reads and repeats go back to that call.
        return steps if call == "new" or not self.auto_advance else max(steps - 1, 0)

    @run_uncompiled
    def _store(self, updates: Mapping[str, Tensor], step: int) -> None:
        """Store new buffers and count the step. The replaced buffers are kept, in case the call is repeated."""
        self._replaced = {name: self.get_buffer(name) for name in updates}
        for name, value in updates.items():
            setattr(self, name, value.detach())
        if self._counts and self.auto_advance:
            self.steps += 1
        self._last_step = step

    def _scheduled_factor(self, step: int) -> float:
        assert self.schedule is not None
        factor = self.schedule(step)
        require(is_number(factor, 0), "schedule", "a callable that returns numbers >= 0", factor)
        return float(factor)

    def _require_finite(self, total: Tensor) -> None:
        """Raise an error that names the first layer with a NaN or infinity, or the layer with the largest entries."""
        if not _numerics.values_readable(total) or math.isfinite(total.detach().item()):
            return
        # The total is known to be invalid here, so the cost of reading all layers does not matter.
        for layer in self.selection:
            _numerics.require_finite_rows(f"weight of {layer.name}", layer.rows().detach())
        largest = max(self.selection, key=lambda layer: float(layer.rows().detach().abs().amax()))
        reason = f"although all weights are finite: those of {largest.name} are too large"
        raise ValueError(f"the regulariser must be finite, but is {total.item()} {reason}")


def _raise_unknown_argument(kind: type[NeuronRegularizer], name: str) -> NoReturn:
    """Raise a `TypeError` that names the regulariser and its argument with the most similar name."""
    similar = difflib.get_close_matches(name, inspect.signature(kind).parameters, n=1)
    hint = f"; did you mean {similar[0]!r}?" if similar else ""
    raise TypeError(f"{kind.__name__} got an unexpected keyword argument {name!r}{hint}")


def _forget_last_call(regularizer: NeuronRegularizer, incompatible_keys: object) -> None:
    """Forget the last call after a state dict was loaded, so that the next call starts a step of the loaded state."""
    regularizer._last_step, regularizer._replaced = None, {}


# Selection of layers -------------------------------------------------------------------------------------------------

_LEFT_OUT = {
    "output": "the output layer, which is left out by default",
    "embedding": "an embedding, which is only regularised on request",
}


def _select_layers(
    model: LayerSource,
    output_layer: str | Sequence[str] | None,
    where: Callable[[str, nn.Module], bool] | None,
    roles: Sequence[str],
    shortest: int,
) -> LayerSelection:
    """Return the layers of some roles whose neurons can be compared: two per set, of at least `shortest` numbers."""

    def reject(layer: NeuronLayer) -> str | None:
        if layer.role not in roles:
            return _LEFT_OUT[layer.role]
        if layer.shape[1] < 2:
            return "one neuron per set"
        return f"neurons of {layer.length} number" if layer.length < shortest else None

    if output_layer == "last":
        warn_user("output_layer='last' is deprecated, use 'auto' instead", DeprecationWarning)
        output_layer = "auto"
    candidates = layers_of(model, output=output_layer, where=where, output_argument="output_layer")
    candidates.warn_if_output_is_unknown()
    selection = candidates.without(reject)
    if len(selection) == 0:
        reasons = "; ".join(f"{skip.name}: {skip.reason}" for skip in selection.skipped)
        reason = f"every layer is skipped ({reasons})" if reasons else "it has no layers"
        raise ValueError(f"model must have a layer of two or more neurons, but {reason}")
    return selection


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


def _warn_about_rotated_layers(selection: LayerSelection) -> None:
    """Warn about layers W = V·Rᵀ with fixed V and orthogonal R, whose angles between neurons cannot change."""
    rotations = tuple(entry for name, entry in ORTHOGONALS.items() if name != "free")
    fixed = []
    for layer in selection:
        if layer.module is None or not parametrize.is_parametrized(layer.module, layer.parameter):
            continue
        # Angles are fixed if all parametrisations are rotations and the weight that they rotate is frozen.
        steps = layer.module.parametrizations[layer.parameter]  # type: ignore[index]
        is_rotation = all(isinstance(getattr(step, "method", None), rotations) for step in steps)
        original = getattr(steps, "original", None)
        if is_rotation and isinstance(original, Tensor) and not original.requires_grad:
            fixed.append(layer.name)
    if fixed:
        names = ", ".join(fixed)
        warn_user(f"rotations do not change the angles between neurons, so the regulariser is constant in {names}")


def stack_equal_shapes(sets: Iterable[tuple[Tensor, float]]) -> list[tuple[Tensor, Tensor]]:
    """Stack tensors of equal shape, so that one batched product computes all of them.

    Args:
        sets: tensors with a factor each.

    Returns:
        Stacks (L, …) with the factors (L,) of their members.

    Example:
        >>> [tuple(s.shape) for s, _ in stack_equal_shapes([(torch.ones(2, 3), 1), (torch.ones(4, 3), 1)])]
        [(1, 2, 3), (1, 4, 3)]
    """
    by_shape: dict[tuple[object, ...], list[tuple[Tensor, float]]] = {}
    for tensor, factor in sets:
        # `torch.stack` needs equal dtypes and devices too.
        by_shape.setdefault((tensor.shape, tensor.dtype, tensor.device), []).append((tensor, factor))
    stacks = []
    for members in by_shape.values():
        tensors, factors = zip(*members, strict=True)
        stack = torch.stack(tensors) if len(tensors) > 1 else tensors[0].unsqueeze(0)
        stacks.append((stack, torch.tensor(factors, dtype=stack.dtype, device=stack.device)))
    return stacks


def add_terms(terms: Sequence[Tensor], anchor: Tensor) -> Tensor:
    """Return the sum of scalars on the device of `anchor`."""
    if not terms:
        return torch.zeros((), device=anchor.device)
    # Layers of a pipeline may be on several devices. The dtype is that of the first term.
    return torch.stack([term.to(terms[0].dtype).to(anchor.device) for term in terms]).sum()


# Random draws --------------------------------------------------------------------------------------------------------


def seeded_generator(seed: int, draw: int) -> torch.Generator:
    """Return a generator that depends only on a seed and the number of a draw, so it is the same on every rank.

    Both are mixed by the rounds of splitmix64. Small seeds therefore do not give the stream of `torch.manual_seed`.

    >>> torch.equal(torch.rand(3, generator=seeded_generator(0, 7)), torch.rand(3, generator=seeded_generator(0, 7)))
    True
    """
    # Mixing after each word makes (1, 0) and (0, 1) differ. The shift keeps the result within signed 64-bit integers.
    state = 0
    for word in (seed, draw):
        state = _splitmix64((state ^ word) + 0x9E3779B97F4A7C15)
    return torch.Generator().manual_seed(state >> 1)


def _splitmix64(z: int) -> int:
    """Return one output of the splitmix64 generator (Steele et al., 2014)."""
    z %= 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def check_seed(seed: object) -> None:
    """Raise a `ValueError` unless the seed is an integer of 64 bits."""
    require(is_integer(seed, -(2**63), 2**63 - 1), "seed", "an integer of 64 bits", seed)


def check_factor(argument: str, value: object) -> None:
    """Raise a `ValueError` unless the value is a number >= 0."""
    require(is_number(value, 0), argument, "a number >= 0", value)
