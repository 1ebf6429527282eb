r"""Find the layers of a model and read their weights as rows of neurons.

Energies, rotations, conversions, optimisers and reports all select layers with `layers_of`. A *neuron* is the weight
vector of one output: a row of a linear layer, a flattened filter of a convolution, a class vector of a head.

Different modules store neurons differently. Each kind of module has one recogniser (`_RECOGNIZERS`), a function that
returns `WeightPart` objects: which parameter holds neurons, which part of it, and how to view that part as rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hypersphere import _numerics
from hypersphere._deprecation import deprecated_argument, deprecated_attribute
from hypersphere._modes import evaluation_mode
from hypersphere._validation import require, warn_user

__all__ = ["LayerSelection", "LayerSource", "NeuronLayer", "SkippedLayer", "WeightPart", "layers_of"]

LayerSource = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
Role = Literal["hidden", "output", "embedding"]
Orientation = Literal["rows", "columns", "transposed"]

# Attribute names under which models of torchvision, timm and Hugging Face store their classifier.
_CLASSIFIER_NAMES = frozenset({"classifier", "fc", "head", "lm_head", "logits", "output", "score"})
# Attributes under which `DistributedDataParallel` and `torch.compile` store the wrapped model.
_WRAPPER_ATTRIBUTES = frozenset({"module", "_orig_mod"})
# torch modules whose last layer is linear but not a classifier.
_NOT_A_CLASSIFIER: tuple[type[nn.Module], ...] = (
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.Transformer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
)
# torch modules whose parameters are not neurons and usually get no weight decay.
NORMALIZATIONS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


# The result ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class NeuronLayer:
    """One weight, or one slice of a weight, whose rows are neurons.

    Every access reads the current weight, so the rows follow optimiser steps, device moves and parametrisations.

    Attributes:
        name: unique qualified name, such as "encoder.0.linear1" or "encoder.0.self_attn.q".
        module: the module that owns the weight, or None if a tensor was passed instead of a module.
        role: "hidden", "output" or "embedding".
        weight_name: qualified name of the complete weight. The layers q, k and v of a fused attention weight have the
            same one.
        shape: (groups, neurons per group, channels per neuron, kernel positions per channel).
        aliases: qualified names of other modules that use the same weight (tied weights).
        part: where the weight stores the neurons.
    """

    name: str
    module: nn.Module | None
    role: Role
    weight_name: str
    shape: tuple[int, int, int, int]
    aliases: tuple[str, ...]
    part: WeightPart
    _source: Tensor | None = None

    group = deprecated_attribute("group", "weight_name")

    @property
    def parameter(self) -> str:
        """The attribute of the module that holds the weight."""
        return self.part.parameter

    @property
    def groups(self) -> int:
        """The number of sets of neurons that are never compared with each other.

        These are the groups of a grouped convolution, attention heads with `per_head=True`, or experts.
        """
        return self.part.groups

    @property
    def tensor(self) -> Tensor:
        """The current value of the complete weight. Parametrisations are evaluated, quantised weights dequantised."""
        if self._source is not None:
            return self._source
        return _read_weight(cast(nn.Module, self.module), self.parameter)

    @property
    def device_reference(self) -> Tensor:
        """A tensor with the device and dtype of the weight, obtained without evaluating a parametrisation."""
        if self._source is not None:
            return self._source
        module = cast(nn.Module, self.module)
        stored = module._parameters.get(self.parameter)
        if stored is None:
            # Parametrised. Bias and original weight come first and have the device and dtype of the weight. The free
            # parameters of a rotation, which come last, may be wider.
            stored = next((p for p in module.parameters() if p.is_floating_point()), None)
        return self.tensor if stored is None else stored  # a quantised module may have no parameters

    @property
    def module_name(self) -> str:
        """The qualified name of the module that owns the weight. It is empty if that is the model itself."""
        return self.weight_name.rpartition(".")[0]

    @property
    def length(self) -> int:
        """The number of entries per neuron."""
        return self.shape[2] * self.shape[3]

    @property
    def orientation(self) -> Orientation:
        """How the weight stores neurons: "rows" (out, in, …), "columns" (…, in, out) or "transposed" (in, out, …)."""
        return self.part.orientation

    @property
    def uses_weight_norm(self) -> bool:
        """False if only the directions of the neurons matter: decoupled operators without ‖w‖, and unit class vectors.

        The modules of this library declare it in an attribute of the same name. Other layers depend on ‖w‖.
        """
        return bool(getattr(self.module, "uses_weight_norm", True))

    def describe(self) -> str:
        """Return number and size of the neurons in words, such as "8 neurons of 27 numbers"."""
        groups, neurons, _, _ = self.shape
        text = f"{neurons} neurons of {self.length} numbers"
        text = text if groups == 1 else f"{groups} groups of {text}"
        return f"{text}, tied to {', '.join(self.aliases)}" if self.aliases else text

    def row_sets(self) -> Float[Tensor, "groups neurons dim"]:
        """Return the current neurons per group, in float32 or wider. The result is differentiable."""
        return self.part.row_sets(_numerics.widen_parameter(self.tensor))

    def rows(self) -> Float[Tensor, "neurons dim"]:
        """Return the current neurons of all groups as the rows of one matrix, in float32 or wider."""
        return self.row_sets().flatten(0, 1)

    @property
    def reason_not_writable(self) -> str | None:
        """The reason why `write` would fail, as part of a sentence, or None if the weight can be written."""
        if self._source is not None:
            return None
        module = cast(nn.Module, self.module)
        if parametrize.is_parametrized(module, self.parameter):
            maps = module.parametrizations[self.parameter]  # type: ignore[index]
            return None if all(hasattr(m, "right_inverse") for m in maps) else "its parametrisation has no inverse"
        stored = module._parameters.get(self.parameter)
        if stored is None:
            return "its weight is computed from other parameters"
        # Quantisation libraries store integers or a subclass of Tensor.
        return None if type(stored) in (nn.Parameter, Tensor) and stored.is_floating_point() else "it is quantised"

    @property
    def writable(self) -> bool:
        """True if `write` can change the weight."""
        return self.reason_not_writable is None

    @torch.no_grad()
    def write(self, rows: Float[Tensor, "neurons dim"]) -> None:
        """Replace the neurons by `rows`, in place.

        Raises:
            ValueError: `rows` has the wrong shape, or the weight cannot be written.
        """
        if not self.writable:
            raise ValueError(f"{self.name} must be a layer whose weight can be written, but {self.reason_not_writable}")
        size = (self.shape[0] * self.shape[1], self.length)
        received = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        require(received == size, "rows", f"a tensor of shape {size}", received)
        weight = self.tensor.detach()
        if self.module is not None and parametrize.is_parametrized(self.module, self.parameter):
            # The evaluated weight is a temporary. Assigning it to the attribute makes torch call `right_inverse`.
            weight = weight.clone()
            self.part.write(weight, rows)
            setattr(self.module, self.parameter, weight)
        else:
            self.part.write(weight, rows)


@dataclass(frozen=True)
class SkippedLayer:
    """A weight that was not selected, and the reason."""

    name: str
    reason: str
    is_distributed: bool = field(default=False, repr=False)  # True for class vectors distributed over processes


@dataclass(frozen=True, eq=False)
class LayerSelection(Sequence[NeuronLayer]):
    """The selected layers of a model, in the order of registration, and the skipped weights.

    Attributes:
        layers: all selected layers.
        skipped: weights with at least two dimensions that were not selected, with the reason.
        note: a warning that no output layer was recognised, or None.
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
        """Return the selection without the layers for which `reject` returns a reason. They are added to `skipped`."""
        reasons = {layer.name: reject(layer) for layer in self.layers}
        skipped = tuple(SkippedLayer(name, reason) for name, reason in reasons.items() if reason)
        return replace(
            self,
            layers=tuple(layer for layer in self.layers if not reasons[layer.name]),
            skipped=(*self.skipped, *skipped),
        )

    def warn_if_output_is_unknown(self) -> None:
        """Warn if the output layer was to be recognised (`output_layer="auto"`) and could not be."""
        if self.note is not None:
            warn_user(self.note)

    def report(self) -> str:
        """Return a table of the selected layers, followed by the skipped weights with the reason."""
        rows = [(layer.name, layer.role, layer.describe()) for layer in self.layers]
        name_width = max((len(name) for name, _, _ in rows), default=0)
        lines = [f"{len(rows)} {'layer' if len(rows) == 1 else 'layers'}:"]
        lines += [f"  {name:<{name_width}}  {role:<9}  {shape}" for name, role, shape in rows]
        if self.skipped:
            lines += [f"{len(self.skipped)} skipped:"]
            lines += [f"  {skip.name}: {skip.reason}" for skip in self.skipped]
        return "\n".join([*lines, *([self.note] if self.note else [])])

    __str__ = report

    def __repr__(self) -> str:
        return f"LayerSelection({len(self.layers)} layers, {len(self.skipped)} skipped)"


# How a weight stores its neurons -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightPart:
    """Where a weight stores the neurons of one layer.

    Attributes:
        suffix: appended to the module's name, or "" for a module with a single weight.
        parameter: the attribute that holds the weight.
        index: this layer is slice number `index` of `count` equal slices along the dimension that counts neurons.
        count: the number of these slices; 3 for the fused q, k and v of attention.
        groups: number of sets of neurons within the slice.
        stacked: True if the first dimension counts groups, as for experts: (groups, out, in) or (groups, in, out).
        orientation: "rows" for (out, in, ...), "columns" for (..., in, out), "transposed" for transposed convolutions.
        role: the role that the kind of module implies.
    """

    suffix: str = ""
    parameter: str = "weight"
    index: int = 0
    count: int = 1
    groups: int = 1
    stacked: bool = False
    orientation: Orientation = "rows"
    role: Role = "hidden"

    @property
    def is_whole(self) -> bool:
        """True if the layer is the whole weight and its first dimension counts neurons."""
        return self.count == 1 and self.orientation == "rows" and not self.stacked

    def name_in(self, path: str) -> str:
        """Return the name of the layer, given the qualified name of its module, which is empty for the model itself."""
        return _join(path, self.suffix) or self.parameter

    def _slice_in(self, weight: Tensor) -> tuple[int, int, int]:
        """Return the dimension that counts neurons, and where the slice starts and ends."""
        dim = weight.ndim - 1 if self.orientation == "columns" else 0
        size = weight.shape[dim] // self.count
        return dim, self.index * size, (self.index + 1) * size

    def _slice_of(self, weight: Tensor) -> Tensor:
        if self.count == 1:
            return weight
        dim, start, end = self._slice_in(weight)
        return weight.narrow(dim, start, end - start)

    def _slice_shape(self, weight: Tensor) -> list[int]:
        dim, start, end = self._slice_in(weight)
        return [*weight.shape[:dim], end - start, *weight.shape[dim + 1 :]]

    def shape_of(self, weight: Tensor) -> tuple[int, int, int, int]:
        """Return `NeuronLayer.shape`: groups, neurons per group, channels and kernel positions."""
        if self.orientation == "columns":  # (in, out), or (groups, in, out) if stacked
            channels, neurons = self._slice_shape(weight)[-2:]
            return self.groups, neurons, channels, 1
        if self.stacked:  # (groups, out, in)
            _, neurons, channels = weight.shape
            return self.groups, neurons, channels, 1
        first, second, *kernel = self._slice_shape(weight)
        if self.orientation == "transposed":  # (in, out/groups, *kernel)
            return self.groups, second, first // self.groups, math.prod(kernel)
        return self.groups, first // self.groups, second, math.prod(kernel)  # (out, in/groups, *kernel)

    def row_sets(self, weight: Tensor) -> Tensor:
        """Return the neurons of each group as (groups, neurons, dim), in the dtype of the weight."""
        groups, neurons, channels, taps = self.shape_of(weight)
        view = self._slice_of(weight)
        if self.orientation == "columns":
            return view.reshape(groups, channels, neurons).mT
        if self.orientation == "transposed":
            # All weights of one output channel become one row, although the input channel is the outer dimension.
            view = view.reshape(groups, channels, neurons, taps).transpose(1, 2)
        return view.reshape(groups, neurons, channels * taps)

    def rows(self, weight: Tensor) -> Tensor:
        """Return the neurons of all groups as the rows of one matrix, in the dtype of the weight."""
        if weight.ndim == 2 and self.is_whole:  # saves two views in the forward pass of a linear layer
            return weight
        return self.row_sets(weight).flatten(0, 1)

    def write(self, weight: Tensor, rows: Tensor) -> None:
        """Replace the neurons in `weight`, in place."""
        self._slice_of(weight).copy_(self._slice_from(rows, weight))

    def with_rows(self, weight: Tensor, rows: Tensor) -> Tensor:
        """Return a weight with other neurons, in the memory format of `weight`. It is differentiable in both."""
        result = self._slice_from(rows, weight)
        if self.count > 1:
            result = weight.slice_scatter(result, *self._slice_in(weight))
        # Compilers choose memory formats themselves, and transforms cannot ask for them.
        if not _numerics.values_readable(weight) or result.stride() == weight.stride():
            return result
        return torch.empty_like(weight).copy_(result)

    def _slice_from(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Return rows of neurons in the shape of their slice of the weight, the inverse of `rows`."""
        groups, neurons, channels, taps = self.shape_of(weight)
        if self.orientation == "columns":
            rows = rows.reshape(groups, neurons, channels).mT
        elif self.orientation == "transposed":
            rows = rows.reshape(groups, neurons, channels, taps).transpose(1, 2)
        return rows.reshape(self._slice_shape(weight))


# Recognition of modules ----------------------------------------------------------------------------------------------
#
# A recogniser returns None for a module of another kind. The first one that returns parts decides.


def _recognize_attention(module: nn.Module, per_head: bool) -> list[WeightPart] | None:
    """Recognise q, k and v of `nn.MultiheadAttention`, fused in one weight or separate.

    Its `out_proj` is a submodule and is recognised as a linear layer.
    """
    if not isinstance(module, nn.MultiheadAttention):
        return None
    heads = module.num_heads if per_head else 1
    if module._qkv_same_embed_dim:
        return [WeightPart(name, "in_proj_weight", index, count=3, groups=heads) for index, name in enumerate("qkv")]
    return [WeightPart(name, f"{name}_proj_weight", groups=heads) for name in "qkv"]


def _recognize_recurrent_layer(module: nn.Module, per_head: bool) -> list[WeightPart] | None:
    """Recognise LSTM, GRU and RNN layers and cells: one layer per gate of each input and recurrent weight."""
    if not isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return None
    # The gates in the order in which torch stacks them along the first dimension.
    is_lstm, is_gru = isinstance(module, (nn.LSTM, nn.LSTMCell)), isinstance(module, (nn.GRU, nn.GRUCell))
    gates = "ifgo" if is_lstm else "rzn" if is_gru else ""
    parts = []
    for parameter in (name for name in _parameter_names(module) if name.startswith("weight")):
        if not gates or parameter.startswith("weight_hr"):  # the projection of an LSTM with proj_size has no gates
            parts.append(WeightPart(parameter, parameter))
        else:
            parts += [
                WeightPart(f"{parameter}.{gate}", parameter, index, len(gates)) for index, gate in enumerate(gates)
            ]
    return parts


def _recognize_embedding(module: nn.Module, per_head: bool) -> list[WeightPart] | None:
    if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return None
    return [WeightPart(role="embedding")]


def _recognize_convolution(module: nn.Module, per_head: bool) -> list[WeightPart] | None:
    # Decided by attributes, because convolutions of other libraries need not subclass torch's. Pooling layers
    # have a kernel size too, but no weight.
    if not hasattr(module, "kernel_size") or not _has_weight(module):
        return None
    orientation: Orientation = "transposed" if getattr(module, "transposed", False) else "rows"
    return [WeightPart(groups=getattr(module, "groups", 1), orientation=orientation)]


def _split_attention(path: str, parts: list[WeightPart], module: nn.Module) -> list[WeightPart]:
    """Split the `Conv1D` that GPT-2 calls `c_attn` into q, k and v, or into k and v in cross-attention.

    The name decides: a feed-forward layer may be three times as wide as its input, too.
    """
    is_fused = path.rpartition(".")[2] == "c_attn" and [part.orientation for part in parts] == ["columns"]
    width, fused_width = getattr(module, "nx", 0), getattr(module, "nf", 0)
    names = {2 * width: "kv", 3 * width: "qkv"}.get(fused_width) if is_fused else None
    if names is None:
        return parts
    return [replace(parts[0], suffix=name, index=i, count=len(names)) for i, name in enumerate(names)]


def _recognize_linear_layer(module: nn.Module, per_head: bool) -> list[WeightPart] | None:
    """Recognise linear layers of any library, Hugging Face's `Conv1D`, and heads (modules with `num_classes`)."""
    if _is_lazy(module, "weight"):
        return [WeightPart()]  # `_layers_of_module` reports it as not initialised
    weight = _peek_weight(module, "weight")
    if weight is None or weight.ndim != 2:
        return None
    size = tuple(weight.shape)
    if size == (getattr(module, "nx", None), getattr(module, "nf", None)):  # Conv1D stores (in, out)
        return [WeightPart(orientation="columns")]
    is_head = hasattr(module, "num_classes") and hasattr(module, "in_features")
    # Other libraries do not subclass nn.Linear, but their attributes agree with the shape of the weight.
    out_in = [
        (getattr(module, "out_features", None), getattr(module, "in_features", None)),
        (getattr(module, "out_channels", None), getattr(module, "in_channels", None)),
    ]
    if is_head or isinstance(module, nn.Linear) or size in out_in:
        return [WeightPart(role="output" if is_head else "hidden")]
    return None


def _recognize_experts(module: nn.Module, per_head: bool) -> list[WeightPart] | None:
    """Recognise fused experts: parameters (experts, out, in) or (experts, in, out) of one module."""
    has_experts = getattr(module, "num_experts", None) is not None or "expert" in type(module).__name__.lower()
    if not has_experts:
        return None
    weights = {name: weight for name in _parameter_names(module) if (weight := _peek_weight(module, name)) is not None}
    weights = {name: weight for name, weight in weights.items() if weight.ndim == 3}
    if not weights:
        return None
    width = next((int(w) for key in ("hidden_size", "hidden_dim") if (w := getattr(module, key, None))), None)
    parts = []
    for name, weight in weights.items():
        experts, first, second = weight.shape
        # The hidden width is the input of gate and up projections and the output of down projections (w2), so its
        # position shows the orientation. Where it does not, assume (experts, out, in), the convention of `F.linear`.
        reads_hidden = "down" not in name and not name.endswith("w2")
        is_columns = first != second and width is not None and (first if reads_hidden else second) == width
        orientation: Orientation = "columns" if is_columns else "rows"
        parts.append(WeightPart(name, name, groups=experts, stacked=True, orientation=orientation))
    return parts


_RECOGNIZERS: tuple[Callable[[nn.Module, bool], list[WeightPart] | None], ...] = (
    _recognize_attention,
    _recognize_recurrent_layer,
    _recognize_embedding,
    _recognize_convolution,
    _recognize_linear_layer,
    _recognize_experts,
)


def _parameter_names(module: nn.Module) -> list[str]:
    """Return the names of a module's own parameters, parametrised ones included."""
    names = [name for name, p in module._parameters.items() if p is not None]
    return [*names, *module.parametrizations] if parametrize.is_parametrized(module) else names  # type: ignore[misc]


def _has_weight(module: nn.Module) -> bool:
    """Return `hasattr(module, "weight")` without evaluating a parametrisation, which may update its buffers."""
    return parametrize.is_parametrized(module, "weight") or hasattr(module, "weight")


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
    # Quantisation libraries represent weights by subclasses of Tensor for which `is_quantized` is False.
    is_subclass = type(weight).__module__.startswith(("torchao", "torch.sparse")) and hasattr(weight, "dequantize")
    return cast(Tensor, weight.dequantize() if weight.is_quantized or is_subclass else weight)


def _peek_weight(module: nn.Module, parameter: str) -> Tensor | None:
    """Return the current weight without side effects, or None if it is missing, not initialised or not floating-point.

    A parametrisation is evaluated in evaluation mode, so that its buffers, such as the vectors of spectral norm, stay
    as they are.
    """
    if parametrize.is_parametrized(module, parameter):
        with evaluation_mode(module.parametrizations[parameter]):  # type: ignore[index]
            return cast(Tensor, getattr(module, parameter))
    if _is_lazy(module, parameter):
        return None
    try:
        weight = _read_weight(module, parameter)
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        # In modules of other libraries `weight` may be anything: absent, a packed tensor, a property that fails.
        return None
    return weight if isinstance(weight, Tensor) and weight.is_floating_point() else None


# The search ----------------------------------------------------------------------------------------------------------


@deprecated_argument("output", "output_layer")
def layers_of(
    model: LayerSource,
    *,
    output_layer: str | Sequence[str] | None = "auto",
    where: Callable[[str, nn.Module], bool] | None = None,
    per_head: bool = False,
    local_classes: bool = False,
) -> LayerSelection:
    """List the weights of a model that hold neurons, with the role of each, and the weights that were skipped.

    The function recognises linear layers, convolutions and transposed convolutions, Hugging Face's `Conv1D`,
    `nn.MultiheadAttention`, LSTM, GRU and RNN (one layer per gate), embeddings, fused experts and the heads of this
    library. The fused q, k and v of `nn.MultiheadAttention` and of GPT-2's `c_attn` are separate layers. Weights may be
    parametrised, quantised or tied. A tied weight is listed once.

    Args:
        model: a module, a mapping from names to tensors, or (name, tensor) pairs, such as `model.named_parameters()`.
            The first dimension of a tensor counts neurons.
        output_layer: one or more names of output layers, None for no output layer, or "auto". "auto" selects the first
            of the following that exists: all heads of the model; the output layer that a Hugging Face model declares;
            the last linear layer under a usual classifier name; the last layer, if it is linear and a direct child of
            the model or the end of a `Sequential`. If none exists, all layers are hidden and `LayerSelection.note` says
            so.
        where: a function of name and module; modules for which it returns False are skipped.
        per_head: split q, k and v of `nn.MultiheadAttention` into one group per attention head.
        local_classes: include heads whose class vectors are distributed over processes, with the class vectors of this
            process. By default they are skipped, because the energy or rotation of only some class vectors would be
            wrong. Operations on single neurons, such as a projection to norm 1, can include them.

    Returns:
        A sequence of `NeuronLayer` with the attributes `skipped` and `note`.

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
        layers, skipped = _layers_of_module(model, where, per_head, local_classes)
    note = None
    if output_layer != "auto":
        outputs = _named_outputs(output_layer, layers)
    elif isinstance(model, nn.Module):
        outputs, note = _recognize_outputs(model, layers)
    else:
        outputs = set()  # named tensors have neither a known order nor a known use
    return LayerSelection(tuple(_with_role(layer, outputs, output_layer) for layer in layers), tuple(skipped), note)


def _with_role(layer: NeuronLayer, outputs: set[str], output_layer: object) -> NeuronLayer:
    if layer.name in outputs:
        return replace(layer, role="output")
    # A recogniser gives heads the role "output". They keep it if other layers are named, but not with None.
    return replace(layer, role="hidden") if layer.role == "output" and output_layer is None else layer


def _named_outputs(output_layer: str | Sequence[str] | None, layers: Sequence[NeuronLayer]) -> set[str]:
    is_accepted = output_layer is None or isinstance(output_layer, (str, Iterable))
    require(is_accepted, "output_layer", "'auto', None, a name or several names", output_layer)
    names = set() if output_layer is None else {output_layer} if isinstance(output_layer, str) else set(output_layer)
    accepted = ", ".join(repr(layer.name) for layer in layers)
    for name in names:
        is_listed = any(name in (layer.name, *layer.aliases) for layer in layers)
        require(is_listed, "output_layer", f"'auto', None or one of {accepted}", name)
    return {layer.name for layer in layers if names & {layer.name, *layer.aliases}}


def _layers_of_tensors(source: object) -> list[NeuronLayer]:
    accepted = "a module, a mapping from names to tensors, or (name, tensor) pairs"
    is_listing = isinstance(source, Iterable) and not isinstance(source, (str, bytes, Tensor))
    require(is_listing, "model", accepted, source if isinstance(source, str) else type(source).__name__)
    pairs = list(source.items() if isinstance(source, Mapping) else cast(Iterable[object], source))
    layers: dict[str, NeuronLayer] = {}
    for pair in pairs:
        is_pair = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)
        require(is_pair, "model", accepted, f"an iterable with {type(pair).__name__}")
        name, tensor = cast(tuple[str, Tensor], pair)
        is_matrix = isinstance(tensor, Tensor) and tensor.ndim >= 2 and tensor.is_floating_point()
        received = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
        require(is_matrix, name, "a floating-point tensor (N, ...) of neurons", received)
        require(name not in layers, "model", "pairs with different names", f"pairs with {name!r} twice")
        part = WeightPart(parameter=name)
        layers[name] = NeuronLayer(name, None, part.role, name, part.shape_of(tensor), (), part, tensor)
    return list(layers.values())


def _layers_of_module(
    model: nn.Module, where: Callable[[str, nn.Module], bool] | None, per_head: bool, local_classes: bool
) -> tuple[list[NeuronLayer], list[SkippedLayer]]:
    layers: dict[tuple[int, int], NeuronLayer] = {}  # by `_identity`, so that tied weights become one layer
    skipped: list[SkippedLayer] = []
    handled: set[int] = set()  # identities of weights that are selected or already reported as skipped
    distributed = {} if local_classes else _distributed_heads(model)
    # `cached` evaluates each parametrisation once, so that its weight is one object with one identity.
    with parametrize.cached():
        for path, module in _modules_owners_first(model):
            recognized = (recognize(module, per_head) for recognize in _RECOGNIZERS)
            parts = _split_attention(path, next((parts for parts in recognized if parts is not None), []), module)
            reason = _reason_to_skip(path, module, where, distributed) if parts else None
            if reason is not None:
                # A distributed head contains a plain head with the same weight: report it once, under its outer name.
                if not any(path != outer and _is_within(path, outer) for outer in distributed):
                    skipped.append(SkippedLayer(path or type(module).__name__, reason, path in distributed))
                handled |= {id(module._parameters.get(part.parameter)) for part in parts}
                continue
            for part in parts:
                weight = _peek_weight(module, part.parameter)
                if weight is None or weight.ndim < 2:
                    reason = "its weight is not a floating-point matrix that can be read"
                    if _is_lazy(module, part.parameter):
                        reason = "its weight is not initialised: run a batch through the model first"
                    skipped.append(SkippedLayer(_join(path, part.suffix), reason))
                    continue
                key = _identity(module, part, weight)
                handled.add(id(weight))
                if key in layers:
                    layers[key] = _merge_tied(layers[key], path, part.role)
                else:
                    layers[key] = NeuronLayer(
                        name=part.name_in(path),
                        module=module,
                        role=part.role,
                        weight_name=_join(path, part.parameter),
                        shape=part.shape_of(weight),
                        aliases=(),
                        part=part,
                    )
        skipped += _unrecognized_weights(model, handled)
    # The search visits wrappers last. Return the layers in the order of registration.
    order = {path: position for position, (path, _) in enumerate(model.named_modules())}
    return sorted(layers.values(), key=lambda layer: order.get(layer.module_name, 0)), skipped


def _identity(module: nn.Module, part: WeightPart, weight: Tensor) -> tuple[int, int]:
    """Return a key that tied layers share: the identity of their weight, and the index of their slice of it."""
    # A weight that is dequantised or computed by a property is a new tensor at every access, so the module identifies
    # it instead.
    is_new_tensor = getattr(module, part.parameter) is not weight
    return id(module if is_new_tensor else weight), part.index


def _modules_owners_first(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that own their weight, then wrappers whose `weight` is a property, as in PEFT.

    A wrapper and the module inside it show the same weight. The first one visited names the layer, so owners are first.
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


def _reason_to_skip(
    path: str,
    module: nn.Module,
    where: Callable[[str, nn.Module], bool] | None,
    distributed: Mapping[str, int],
) -> str | None:
    if {"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"} & set(path.split(".")):
        return "part of a LoRA adapter"
    for outer, processes in distributed.items():
        if _is_within(path, outer):
            return f"its class vectors are distributed over {processes} processes"
    if where is not None and not where(path, module):
        return "excluded by `where`"
    return None


def _distributed_heads(model: nn.Module) -> dict[str, int]:
    """Return the number of processes of every head whose class vectors are distributed over more than one, by path."""
    sizes = {
        path: getattr(getattr(module, "processes", None), "size", 1)
        for path, module in model.named_modules()
        if hasattr(module, "num_classes")
    }
    return {path: size for path, size in sizes.items() if size != 1}


def _is_within(path: str, outer: str) -> bool:
    """Return True if `path` is the module `outer` or one of its descendants."""
    return not outer or f"{path}.".startswith(f"{outer}.")


def _unrecognized_weights(model: nn.Module, handled: set[int]) -> Iterator[SkippedLayer]:
    """Yield parameters with two or more dimensions that belong to no recognised layer."""
    for path, module in model.named_modules():
        if ".parametrizations." in f".{path}.":
            continue  # these are free parameters of a parametrisation; the evaluated weight is listed instead
        for name, parameter in module._parameters.items():
            if parameter is None or nn.parameter.is_lazy(parameter) or id(parameter) in handled or parameter.ndim < 2:
                continue
            handled.add(id(parameter))
            kind = type(module).__name__
            reason = "parameters of a normalisation" if isinstance(module, NORMALIZATIONS) else None
            yield SkippedLayer(_join(path, name), reason or f"{kind} is not a known kind of layer")


def _merge_tied(layer: NeuronLayer, path: str, role: Role) -> NeuronLayer:
    """Add another module that uses a tied weight. A linear layer tied to an embedding is an output layer."""
    roles = {layer.role, role}
    is_tied_head = "output" in roles or roles == {"embedding", "hidden"}
    return replace(layer, role="output" if is_tied_head else layer.role, aliases=(*layer.aliases, path))


def _join(path: str, suffix: str) -> str:
    return ".".join(part for part in (path, suffix) if part)


def _recognize_outputs(model: nn.Module, layers: Sequence[NeuronLayer]) -> tuple[set[str], str | None]:
    """Return the names of the output layers, and a note if none could be recognised safely."""
    heads = {layer.name for layer in layers if layer.role == "output"}  # also tied heads of language models
    if heads:
        return heads, None
    # Only the complete weight of a linear layer can be a classifier: no slice of a fused weight, no gate, and no 1×1
    # convolution, which has one kernel position but is not a linear layer.
    linear = [
        layer
        for layer in layers
        if layer.role == "hidden"
        and layer.parameter == "weight"
        and layer.part.count == 1
        and not hasattr(layer.module, "kernel_size")
    ]
    if len(layers) == 1 or not linear:
        return set(), None  # a single layer may be hidden or an output, so there is nothing to warn about
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
    return _top_level_name(rest) if first in _WRAPPER_ATTRIBUTES and rest else first


def _ends_the_model(model: nn.Module, path: str) -> bool:
    """Return True if only wrappers and `Sequential`s enclose the module at `path`.

    The caller has checked that it is the last layer. It is then a direct child of the model or the end of a
    `Sequential`, but not part of a block whose output other layers process.
    """
    if isinstance(model, _NOT_A_CLASSIFIER):
        return False
    first, _, rest = path.partition(".")
    child = model.get_submodule(first)
    if not rest:
        return True
    return (first in _WRAPPER_ATTRIBUTES or isinstance(child, nn.Sequential)) and _ends_the_model(child, rest)
