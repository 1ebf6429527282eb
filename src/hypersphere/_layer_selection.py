r"""Which layers does a model have, and which of their numbers are neurons?

`layers_of` is the single answer that energies, rotations, conversions, optimisers and reports use. A *neuron* is the
weight vector of one output: a row of a linear layer, a flattened filter of a convolution, a class vector of a head.
Kinds of modules store neurons differently, so recognition is one function per kind (`_RECOGNIZERS`). It returns
`_Slice` objects: which parameter, which part of it, and how to view that part as rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hypersphere import _numerics
from hypersphere._modes import evaluation_mode
from hypersphere._validation import require

__all__ = ["LayerSelection", "LayerSource", "NeuronLayer", "SkippedLayer", "layers_of"]

LayerSource = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
Role = Literal["hidden", "output", "embedding"]
Orientation = Literal["rows", "columns", "transposed"]

# Attribute names under which models of torchvision, timm and Hugging Face store their classifier.
_CLASSIFIER_NAMES = frozenset({"classifier", "fc", "head", "lm_head", "logits", "output", "score"})
# Attributes under which `DistributedDataParallel` and `torch.compile` keep the wrapped model.
_WRAPPERS = frozenset({"module", "_orig_mod"})
# These torch modules end in a linear layer that is not a classifier.
_NOT_A_CLASSIFIER: tuple[type[nn.Module], ...] = (
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.Transformer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
)
_NORMALIZATIONS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


# The result ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class NeuronLayer:
    """One weight, or one slice of a weight, whose rows are neurons.

    The weight is read again at every call, so optimiser steps, moves between devices and parametrisations are seen.

    Attributes:
        name: qualified and unique name, such as "encoder.0.linear1" or "encoder.0.self_attn.q".
        module: the module that owns the weight, or None if a tensor was passed instead of a module.
        parameter: the attribute of the module that holds the weight.
        role: "hidden", "output" or "embedding".
        group: qualified name of the whole weight. The layers q, k and v of a fused attention weight share one group.
        groups: number of sets of neurons that are never compared with each other: the groups of a grouped convolution,
            attention heads with `per_head=True`, or experts.
        shape: groups, neurons per group, channels per neuron, and kernel positions per channel.
        aliases: qualified names of other modules that use the same weight (tied weights).
    """

    name: str
    module: nn.Module | None
    parameter: str
    role: Role
    group: str
    groups: int
    shape: tuple[int, int, int, int]
    aliases: tuple[str, ...]
    _slice: _Slice
    _source: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """The current value of the whole weight. A parametrisation is evaluated, a quantised weight dequantised."""
        if self._source is not None:
            return self._source
        return _read_weight(cast(nn.Module, self.module), self.parameter)

    @property
    def anchor(self) -> Tensor:
        """A tensor with the device and dtype of the weight, obtained without evaluating a parametrisation."""
        if self._source is not None:
            return self._source
        module = cast(nn.Module, self.module)
        stored = module._parameters.get(self.parameter)
        stored = next(module.parameters(), None) if stored is None else stored
        return self.tensor if stored is None else stored

    @property
    def length(self) -> int:
        """The number of entries per neuron."""
        return self.shape[2] * self.shape[3]

    def row_sets(self) -> Float[Tensor, "groups neurons dim"]:
        """Return the current neurons per group, in float32 or wider. The result is differentiable."""
        return self._slice.read(_numerics.widen_parameter(self.tensor), self.shape)

    def rows(self) -> Float[Tensor, "neurons dim"]:
        """Return the current neurons of all groups as the rows of one matrix, in float32 or wider."""
        return self.row_sets().flatten(0, 1)

    @property
    def not_writable(self) -> str | None:
        """The reason why `write` would fail, or None if the weight can be written."""
        if self._source is not None:
            return None
        module = cast(nn.Module, self.module)
        if parametrize.is_parametrized(module, self.parameter):
            maps = module.parametrizations[self.parameter]  # type: ignore[index]
            return None if all(hasattr(m, "right_inverse") for m in maps) else "its parametrisation has no inverse"
        stored = module._parameters.get(self.parameter)
        if stored is None:
            return "its weight is computed from other parameters"
        return None if type(stored) in (nn.Parameter, Tensor) and stored.is_floating_point() else "it is quantised"

    @property
    def writable(self) -> bool:
        """True if `write` can change the weight."""
        return self.not_writable is None

    @torch.no_grad()
    def write(self, rows: Float[Tensor, "neurons dim"]) -> None:
        """Replace the neurons by `rows`, in place.

        Raises:
            ValueError: `rows` has the wrong shape, or the weight cannot be written.
        """
        require(self.writable, self.name, "a layer whose weight can be written", f"one where {self.not_writable}")
        size = (self.shape[0] * self.shape[1], self.length)
        require(tuple(rows.shape) == size, "rows", f"a tensor of shape {size}", tuple(rows.shape))
        whole = self.tensor.detach()
        if self.module is not None and parametrize.is_parametrized(self.module, self.parameter):
            whole = whole.clone()
            self._slice.write(whole, rows, self.shape)
            setattr(self.module, self.parameter, whole)  # torch calls right_inverse
        else:
            self._slice.write(whole, rows, self.shape)


@dataclass(frozen=True)
class SkippedLayer:
    """A weight that was left out, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True, eq=False)
class LayerSelection(Sequence[NeuronLayer]):
    """The layers of a model in the order of registration, and what was left out.

    Attributes:
        layers: all selected layers.
        skipped: weights with at least two dimensions that were left out, with the reason.
        note: a remark on the output layer if none was recognised, else None.
    """

    layers: tuple[NeuronLayer, ...]
    skipped: tuple[SkippedLayer, ...] = ()
    note: str | None = None

    @overload
    def __getitem__(self, index: int) -> NeuronLayer: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[NeuronLayer]: ...
    def __getitem__(self, index: int | slice) -> NeuronLayer | Sequence[NeuronLayer]:
        return self.layers[index]

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def hidden(self) -> tuple[NeuronLayer, ...]:
        """The layers with the role "hidden"."""
        return self._with_role("hidden")

    @property
    def outputs(self) -> tuple[NeuronLayer, ...]:
        """The layers with the role "output"."""
        return self._with_role("output")

    @property
    def embeddings(self) -> tuple[NeuronLayer, ...]:
        """The layers with the role "embedding"."""
        return self._with_role("embedding")

    def _with_role(self, role: Role) -> tuple[NeuronLayer, ...]:
        return tuple(layer for layer in self.layers if layer.role == role)

    def without(self, reject: Callable[[NeuronLayer], str | None]) -> LayerSelection:
        """Return the selection without the layers for which `reject` returns a reason; these are listed as skipped."""
        reasons = {layer.name: reject(layer) for layer in self.layers}
        skipped = tuple(SkippedLayer(name, reason) for name, reason in reasons.items() if reason)
        return replace(
            self,
            layers=tuple(layer for layer in self.layers if not reasons[layer.name]),
            skipped=(*self.skipped, *skipped),
        )

    def warn_if_output_is_unknown(self, stacklevel: int = 3) -> None:
        """Warn if the caller left the choice of the output layer to `layers_of` and none was recognised."""
        if self.note is not None:
            warnings.warn(self.note, stacklevel=stacklevel)

    def report(self) -> str:
        """Return a table of the selected layers, followed by the skipped ones with the reason."""
        rows = [(layer.name, layer.role, _describe_shape(layer)) for layer in self.layers]
        name_width = max((len(name) for name, _, _ in rows), default=0)
        lines = [f"{len(rows)} layers:"]
        lines += [f"  {name:<{name_width}}  {role:<9}  {shape}" for name, role, shape in rows]
        if self.skipped:
            lines += [f"{len(self.skipped)} skipped:"]
            lines += [f"  {skip.name}: {skip.reason}" for skip in self.skipped]
        return "\n".join([*lines, *([self.note] if self.note else [])])

    __str__ = report


def _describe_shape(layer: NeuronLayer) -> str:
    groups, neurons, _, _ = layer.shape
    text = f"{neurons} neurons of {layer.length} numbers"
    text = text if groups == 1 else f"{groups} groups of {text}"
    return f"{text}, tied to {', '.join(layer.aliases)}" if layer.aliases else text


# How a weight stores its neurons -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Slice:
    """Where the neurons of one layer are in a weight.

    Attributes:
        suffix: appended to the module's name, or "" for a module with a single weight.
        parameter: the attribute that holds the weight.
        part: index of this layer among `parts` equal slices of the first dimension.
        parts: number of these slices.
        groups: number of sets of neurons within the slice.
        orientation: "rows" for (out, in, ...), "columns" for (..., in, out), "transposed" for transposed convolutions.
        role: a role that follows from the kind of module.
    """

    suffix: str = ""
    parameter: str = "weight"
    part: int = 0
    parts: int = 1
    groups: int = 1
    orientation: Orientation = "rows"
    role: Role = "hidden"

    def _view(self, weight: Tensor) -> Tensor:
        size = weight.shape[0] // self.parts
        return weight if self.parts == 1 else weight.narrow(0, self.part * size, size)

    def shape_of(self, weight: Tensor) -> tuple[int, int, int, int]:
        """Return groups, neurons per group, channels and kernel positions."""
        if self.orientation == "columns":  # (in, out), or (groups, in, out)
            channels, neurons = weight.shape[-2:]
            return self.groups, neurons, channels, 1
        if weight.ndim == 3 and self.groups > 1 and len(weight) == self.groups and self.parts == 1:
            # Experts: (groups, out, in). A grouped Conv1d has groups·n filters in its first dimension, so its first
            # dimension equals `groups` only if n = 1, for which both readings agree.
            return self.groups, weight.shape[1], weight.shape[2], 1
        first, second, *kernel = self._view(weight).shape
        if self.orientation == "transposed":  # (in, out/groups, *kernel)
            return self.groups, second, first // self.groups, math.prod(kernel)
        return self.groups, first // self.groups, second, math.prod(kernel)

    def read(self, weight: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
        """Return the neurons as (groups, neurons, dim)."""
        groups, neurons, channels, taps = shape
        view = self._view(weight)
        if self.orientation == "columns":
            return view.reshape(groups, channels, neurons).mT
        if self.orientation == "transposed":
            view = view.reshape(groups, channels, neurons, taps).transpose(1, 2)
        return view.reshape(groups, neurons, channels * taps)

    def write(self, weight: Tensor, rows: Tensor, shape: tuple[int, int, int, int]) -> None:
        """Write neurons back into `weight`, in place."""
        groups, neurons, channels, taps = shape
        view = self._view(weight)
        if self.orientation == "columns":
            source = rows.reshape(groups, neurons, channels).mT
        elif self.orientation == "transposed":
            source = rows.reshape(groups, neurons, channels, taps).transpose(1, 2)
        else:
            source = rows
        view.copy_(source.reshape(view.shape))


# Recognition of modules ----------------------------------------------------------------------------------------------


def _attention_slices(module: nn.Module, per_head: bool) -> list[_Slice] | None:
    """`nn.MultiheadAttention`: q, k and v, fused in one weight or separate. Its `out_proj` is a linear layer."""
    if not isinstance(module, nn.MultiheadAttention):
        return None
    heads = module.num_heads if per_head else 1
    if module._qkv_same_embed_dim:
        return [_Slice(name, "in_proj_weight", part, 3, heads) for part, name in enumerate("qkv")]
    return [_Slice(name, f"{name}_proj_weight", groups=heads) for name in "qkv"]


def _recurrent_slices(module: nn.Module, per_head: bool) -> list[_Slice] | None:
    """LSTM, GRU and RNN layers and cells: one layer per gate of each input and recurrent weight."""
    if not isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return None
    kind = type(module).__name__
    gates = "ifgo" if "LSTM" in kind else "rzn" if "GRU" in kind else ""
    slices = []
    for parameter in _weight_names(module):
        if not gates or parameter.startswith("weight_hr"):  # the projection of an LSTM with proj_size has no gates
            slices.append(_Slice(parameter, parameter))
        else:
            slices += [_Slice(f"{parameter}.{gate}", parameter, part, len(gates)) for part, gate in enumerate(gates)]
    return slices


def _embedding_slices(module: nn.Module, per_head: bool) -> list[_Slice] | None:
    if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return None
    return [_Slice(role="embedding")]


def _convolution_slices(module: nn.Module, per_head: bool) -> list[_Slice] | None:
    if not hasattr(module, "kernel_size") or not hasattr(module, "weight"):
        return None
    orientation: Orientation = "transposed" if getattr(module, "transposed", False) else "rows"
    return [_Slice(groups=getattr(module, "groups", 1), orientation=orientation)]


def _linear_slices(module: nn.Module, per_head: bool) -> list[_Slice] | None:
    """Linear layers of torch and other libraries, Hugging Face's `Conv1D`, and heads (modules with `num_classes`)."""
    if _is_lazy(module, "weight"):
        return [_Slice()]  # reported as not initialised
    weight = _peek_weight(module, "weight")
    if weight is None or weight.ndim != 2:
        return None
    size = tuple(weight.shape)
    if size == (getattr(module, "nx", None), getattr(module, "nf", None)):  # Conv1D stores (in, out)
        return [_Slice(orientation="columns")]
    is_head = hasattr(module, "num_classes") and hasattr(module, "in_features")
    out_in = [
        (getattr(module, "out_features", None), getattr(module, "in_features", None)),
        (getattr(module, "out_channels", None), getattr(module, "in_channels", None)),
    ]
    if is_head or isinstance(module, nn.Linear) or size in out_in:
        return [_Slice(role="output" if is_head else "hidden")]
    return None


def _expert_slices(module: nn.Module, per_head: bool) -> list[_Slice] | None:
    """Fused experts: 3-D parameters (experts, out, in) or (experts, in, out) of one module."""
    count = getattr(module, "num_experts", None)
    is_expert_module = count is not None or "expert" in type(module).__name__.lower()
    names = [name for name, p in module._parameters.items() if p is not None and p.ndim == 3]
    if not is_expert_module or not names:
        return None
    width = next((int(w) for key in ("hidden_size", "hidden_dim") if (w := getattr(module, key, None))), None)
    slices = []
    for name in names:
        experts, first, second = cast(Tensor, module._parameters[name]).shape
        # The hidden width is the input of gate and up projections and the output of down projections. If it does not
        # decide the orientation, (experts, out, in) is assumed, the convention of `F.linear`.
        reads_hidden = "down" not in name and not name.endswith("w2")
        columns = first != second and width is not None and (first if reads_hidden else second) == width
        slices.append(_Slice(name, name, groups=experts, orientation="columns" if columns else "rows"))
    return slices


_RECOGNIZERS: tuple[Callable[[nn.Module, bool], list[_Slice] | None], ...] = (
    _attention_slices,
    _recurrent_slices,
    _embedding_slices,
    _convolution_slices,
    _linear_slices,
    _expert_slices,
)


def _weight_names(module: nn.Module) -> list[str]:
    """Return the names of a module's weight matrices, parametrised ones included."""
    names = [name for name, p in module._parameters.items() if p is not None and name.startswith("weight")]
    if parametrize.is_parametrized(module):
        names += [name for name in module.parametrizations if name.startswith("weight")]  # type: ignore[union-attr]
    return names


def _is_lazy(module: nn.Module, parameter: str) -> bool:
    stored = module._parameters.get(parameter)
    return stored is not None and nn.parameter.is_lazy(stored)


def _read_weight(module: nn.Module, parameter: str) -> Tensor:
    """Return the current weight. Quantised weights are dequantised."""
    weight = getattr(module, parameter)
    if type(weight) in (nn.Parameter, Tensor) and not weight.is_quantized:
        return cast(Tensor, weight)  # the usual case; torch.compile cannot trace the checks below
    if not isinstance(weight, Tensor) and callable(weight):  # quantised modules of torch have a method `weight()`
        weight = weight()
    # torch's own quantised tensors, and tensor subclasses of quantisation libraries that can be dequantised
    is_subclass = type(weight).__module__.startswith(("torchao", "torch.sparse")) and hasattr(weight, "dequantize")
    return cast(Tensor, weight.dequantize() if weight.is_quantized or is_subclass else weight)


def _peek_weight(module: nn.Module, parameter: str) -> Tensor | None:
    """Return the current weight for its shape, or None if it is missing, not initialised or not numeric.

    A parametrisation is evaluated in evaluation mode, which leaves its buffers (such as those of spectral norm) alone.
    """
    if not parametrize.is_parametrized(module, parameter):
        if _is_lazy(module, parameter):
            return None
        try:
            weight = _read_weight(module, parameter)
        except (AttributeError, RuntimeError, TypeError, NotImplementedError):
            return None
        return weight if isinstance(weight, Tensor) and weight.is_floating_point() else None
    with evaluation_mode(module.parametrizations[parameter]):  # type: ignore[index]
        return cast(Tensor, getattr(module, parameter))


# The search ----------------------------------------------------------------------------------------------------------


def layers_of(
    model: LayerSource,
    *,
    output: str | Sequence[str] | None = "auto",
    where: Callable[[str, nn.Module], bool] | None = None,
    per_head: bool = False,
) -> LayerSelection:
    """Return every weight of a model that holds neurons, with its role, and what was left out and why.

    Recognised are linear layers, convolutions and transposed convolutions, Hugging Face's `Conv1D`,
    `nn.MultiheadAttention` (q, k and v separately), LSTM, GRU and RNN (one layer per gate), embeddings, fused experts
    and the heads of this library. Weights may be parametrised, quantised or tied. A tied weight is listed once.

    Args:
        model: a module, a mapping from names to tensors, or pairs of both (such as `model.named_parameters()`). The
            first dimension of a tensor counts neurons.
        output: the output layer. "auto" takes all heads of the model, or the layer that Hugging Face models declare, or
            a last linear layer that is a direct child of the model, the end of a `Sequential`, or has a usual
            classifier name. If none of these applies, the output is not guessed: no layer has the role "output", and
            `LayerSelection.note` says so. Otherwise one or more names, or None for no output layer.
        where: a predicate of name and module; modules for which it is False are left out.
        per_head: split q, k and v of `nn.MultiheadAttention` into one group per attention head.

    Returns:
        A sequence of `NeuronLayer` with the attribute `skipped`.

    Example:
        >>> selection = layers_of(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 10)))
        >>> print(selection)
        2 layers:
          0  hidden     8 neurons of 27 numbers
          3  output     10 neurons of 32 numbers
        >>> selection[0].rows().shape
        torch.Size([8, 27])
    """
    require(where is None or callable(where), "where", "None or a function of a name and a module", where)
    if not isinstance(model, nn.Module):
        layers = _layers_of_tensors(model)
        skipped: list[SkippedLayer] = []
    else:
        layers, skipped = _layers_of_module(model, where, per_head)
    note = None
    if output != "auto":
        outputs = _named_outputs(output, layers)
    elif isinstance(model, nn.Module):
        outputs, note = _recognize_outputs(model, layers)
    else:
        outputs = set()  # nothing is known about the order or use of named tensors
    return LayerSelection(tuple(_with_role(layer, outputs, output) for layer in layers), tuple(skipped), note)


def _with_role(layer: NeuronLayer, outputs: set[str], output: object) -> NeuronLayer:
    if layer.name in outputs:
        return replace(layer, role="output")
    # Heads are outputs whatever is named as another output, but with output=None they count as hidden.
    return replace(layer, role="hidden") if layer.role == "output" and output is None else layer


def _named_outputs(output: str | Sequence[str] | None, layers: Sequence[NeuronLayer]) -> set[str]:
    names = set() if output is None else {output} if isinstance(output, str) else set(output)
    accepted = ", ".join(repr(layer.name) for layer in layers)
    for name in names:
        known = any(name in (layer.name, *layer.aliases) for layer in layers)
        require(known, "output", f"'auto', None or one of {accepted}", name)
    return {layer.name for layer in layers if names & {layer.name, *layer.aliases}}


def _layers_of_tensors(source: object) -> list[NeuronLayer]:
    accepted = "a module, a mapping from names to tensors, or pairs of both"
    is_listing = isinstance(source, Iterable) and not isinstance(source, (str, bytes, Tensor))
    require(is_listing, "model", accepted, source if isinstance(source, str) else type(source).__name__)
    pairs = list(source.items() if isinstance(source, Mapping) else cast(Iterable[object], source))
    layers: dict[str, NeuronLayer] = {}
    for pair in pairs:
        is_pair = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)
        require(is_pair, "model", accepted, f"an iterable with {type(pair).__name__}")
        name, tensor = cast(tuple[str, Tensor], pair)
        is_matrix = isinstance(tensor, Tensor) and tensor.ndim >= 2 and tensor.is_floating_point()
        require(is_matrix, name, "a floating-point tensor (N, ...) of neurons", type(tensor).__name__)
        require(name not in layers, "model", "pairs with different names", f"pairs with {name!r} twice")
        shape = _Slice().shape_of(tensor)
        layers[name] = NeuronLayer(name, None, name, "hidden", name, 1, shape, (), _Slice(), tensor)
    return list(layers.values())


def _layers_of_module(
    model: nn.Module, where: Callable[[str, nn.Module], bool] | None, per_head: bool
) -> tuple[list[NeuronLayer], list[SkippedLayer]]:
    layers: dict[tuple[int, int], NeuronLayer] = {}  # by identity of the weight and slice, so that tied weights merge
    skipped: list[SkippedLayer] = []
    handled: set[int] = set()  # weights that belong to a layer or were reported already
    alive: list[Tensor] = []  # computed weights, kept so that their identities are not reused during the search
    with parametrize.cached():
        for path, module in _modules_owners_first(model):
            slices = next((s for recognize in _RECOGNIZERS if (s := recognize(module, per_head)) is not None), [])
            reason = _reason_to_skip(path, module, where) if slices else None
            if reason is not None:
                skipped.append(SkippedLayer(path or type(module).__name__, reason))
                handled |= {id(getattr(module, s.parameter)) for s in slices}
                continue
            for part in slices:
                weight = _peek_weight(module, part.parameter)
                if weight is None or weight.ndim < 2:
                    skipped.append(SkippedLayer(_join(path, part.suffix), _reason_unreadable(module, part.parameter)))
                    continue
                is_copy = getattr(module, part.parameter) is not weight  # a dequantised weight
                key = (id(module if is_copy else weight), part.part)
                handled.add(id(weight))
                if not is_copy and not isinstance(weight, nn.Parameter):
                    alive.append(weight)
                if key in layers:
                    layers[key] = _merge_tied(layers[key], path, part.role)
                else:
                    layers[key] = NeuronLayer(
                        name=_join(path, part.suffix) or part.parameter,
                        module=module,
                        parameter=part.parameter,
                        role=part.role,
                        group=_join(path, part.parameter),
                        groups=part.groups,
                        shape=part.shape_of(weight),
                        aliases=(),
                        _slice=part,
                    )
        skipped += _unrecognized_weights(model, handled)
    order = {path: position for position, (path, _) in enumerate(model.named_modules())}
    return sorted(layers.values(), key=lambda layer: order.get(layer.group.rpartition(".")[0], 0)), skipped


def _modules_owners_first(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules that own their weight, then wrappers whose `weight` is a property, as in PEFT.

    In this order a weight that is visible through a wrapper is listed under its owner.
    """
    named = [(path, module) for path, module in model.named_modules() if ".parametrizations." not in f".{path}."]
    wrappers = [
        (path, module)
        for path, module in named
        if isinstance(getattr(type(module), "weight", None), property)
        and not parametrize.is_parametrized(module, "weight")
    ]
    wrapper_paths = {path for path, _ in wrappers}
    yield from ((path, module) for path, module in named if path not in wrapper_paths)
    yield from wrappers


def _reason_to_skip(path: str, module: nn.Module, where: Callable[[str, nn.Module], bool] | None) -> str | None:
    if {"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"} & set(path.split(".")):
        return "part of a LoRA adapter"
    processes = getattr(getattr(module, "processes", None), "size", 1)
    if processes != 1:
        return f"its class vectors are distributed over {processes} processes"
    if where is not None and not where(path, module):
        return "excluded by `where`"
    return None


def _reason_unreadable(module: nn.Module, parameter: str) -> str:
    if _is_lazy(module, parameter):
        return "its weight is not initialised: run a batch through the model first"
    return "its weight has no readable matrix of numbers"


def _unrecognized_weights(model: nn.Module, handled: set[int]) -> Iterator[SkippedLayer]:
    """Yield parameters with two or more dimensions that belong to no recognised layer."""
    for path, module in model.named_modules():
        if ".parametrizations." in f".{path}.":
            continue  # free parameters of a parametrisation; the evaluated weight is listed instead
        for name, parameter in module._parameters.items():
            if parameter is None or nn.parameter.is_lazy(parameter) or id(parameter) in handled or parameter.ndim < 2:
                continue
            handled.add(id(parameter))
            kind = type(module).__name__
            reason = "parameters of a normalisation" if isinstance(module, _NORMALIZATIONS) else None
            yield SkippedLayer(_join(path, name), reason or f"{kind} is not a known kind of layer")


def _merge_tied(layer: NeuronLayer, path: str, role: Role) -> NeuronLayer:
    """Add a second user of a tied weight. A linear layer tied to an embedding is an output layer."""
    roles = {layer.role, role}
    is_tied_head = "output" in roles or roles == {"embedding", "hidden"}
    return replace(layer, role="output" if is_tied_head else layer.role, aliases=(*layer.aliases, path))


def _join(path: str, suffix: str) -> str:
    return ".".join(part for part in (path, suffix) if part)


def _recognize_outputs(model: nn.Module, layers: Sequence[NeuronLayer]) -> tuple[set[str], str | None]:
    """Return the names of the output layers, and a note if none could be recognised safely."""
    declared = {layer.name for layer in layers if layer.role == "output"}  # heads and tied language-model heads
    if declared:
        return declared, None
    # Only a whole weight matrix of a linear layer can be a classifier: no attention slice, gate or convolution.
    linear = [
        layer for layer in layers if layer.role == "hidden" and layer.parameter == "weight" and layer.shape[3] == 1
    ]
    linear = [layer for layer in linear if not hasattr(layer.module, "kernel_size")]
    if len(layers) == 1 or not linear:
        return set(), None  # nothing says whether a single layer is hidden or an output
    get_output = getattr(model, "get_output_embeddings", None)
    declared_module = get_output() if callable(get_output) else None
    for layer in linear:
        if layer.module is declared_module:
            return {layer.name}, None
    named = [layer for layer in linear if _top_level_name(layer.name) in _CLASSIFIER_NAMES]
    if named:
        return {named[-1].name}, None
    if linear[-1] is layers[-1] and _ends_the_model(model, linear[-1].name):
        return {linear[-1].name}, None
    note = (
        f"no output layer was recognised in {type(model).__name__}, so all layers count as hidden; "
        f"name the output layer (the last linear layer is {linear[-1].name!r}) or pass None"
    )
    return set(), note


def _top_level_name(path: str) -> str:
    """Return the first part of a qualified name, ignoring `DistributedDataParallel` and `torch.compile` wrappers."""
    first, _, rest = path.partition(".")
    return _top_level_name(rest) if first in _WRAPPERS and rest else first


def _ends_the_model(model: nn.Module, path: str) -> bool:
    """Return True if the module at `path` is a direct child of the model or the end of a `Sequential` in it."""
    if isinstance(model, _NOT_A_CLASSIFIER):
        return False
    first, _, rest = path.partition(".")
    child = model.get_submodule(first)
    if not rest:
        return True
    return (first in _WRAPPERS or isinstance(child, nn.Sequential)) and _ends_the_model(child, rest)
