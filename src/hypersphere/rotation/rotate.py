"""Rotate the layers of a model in place, and fold the rotations back into plain weights.

`rotate_` selects layers and attaches one `Rotation` to each of them, as a parametrisation of torch. From then on, the
layer reads its weight through the rotation. Linear layers and embeddings get a forward pass that rotates less than the
whole weight where this gives the same output. `fold_` replaces the parametrisation by the weight that it computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.jit._trace import is_tracing
from torch.nn.utils import parametrize

from hypersphere import _numerics, sphere
from hypersphere._layer_selection import LayerSelection, NeuronLayer, WeightPart, layers_of
from hypersphere._modes import evaluation_mode
from hypersphere._validation import choose, guard_save_pretrained, is_integer, is_number, require, warn_user
from hypersphere.functions._rowmap import RowMap
from hypersphere.functions.orthogonal import ORTHOGONALS
from hypersphere.functions.transform import TRANSFORMS
from hypersphere.rotation._quantized import Int8Neurons
from hypersphere.rotation.input_rotation import InputRotation
from hypersphere.rotation.layout import BlockLayout
from hypersphere.rotation.parametrization import Rotation, Side, WeightState
from hypersphere.rotation.refine import refine_neurons, require_energy
from hypersphere.rotation.two_sided import TwoSidedRotation

__all__ = [
    "METHODS",
    "CustomTransform",
    "Plan",
    "Quantization",
    "attach_all",
    "fold_",
    "is_quantized",
    "original_weight",
    "prepared_rows",
    "reason_not_rotatable",
    "rotatable_layers",
    "rotate_",
    "rotated_layers",
    "rotation_parameters",
    "select",
    "unparametrized_rows",
    "use",
    "use_rotation_set",
]

METHODS: dict[str, type[RowMap]] = {**ORTHOGONALS, **TRANSFORMS}

Where = Callable[[str, nn.Module], bool]
Method = str | RowMap | Callable[[int], nn.Module]
Quantization = Literal["int8"]


def rotate_(
    model: nn.Module,
    method: Method = "cayley",
    *,
    where: Where | None = None,
    blocks: int = 1,
    block_size: int | None = None,
    shared: bool = False,
    factors: int = 1,
    side: Side = "auto",
    dropout: float = 0.0,
    learn_neurons: bool = False,
    normalize: bool = False,
    refine: str | Callable[[Tensor], Tensor] | None = None,
    refine_steps: int = 5000,
    refine_rate: float = 0.1,
    output: bool = False,
    output_layer: str | Sequence[str] | None = "auto",
    embeddings: bool = False,
    quantize: Quantization | None = None,
    spread: float | None = None,
    report: bool = False,
) -> nn.Module:
    r"""Train layers by rotating their neurons: W = V·Rᵀ with V fixed and R learned (OPT, equation 1).

    This is orthogonal over-parameterized training (OPT) of fixed random neurons, and orthogonal fine-tuning (OFT) of
    trained ones.

    Layers are found by `hypersphere.layers_of` and rotated in place: linear layers of any library, convolutions and
    transposed convolutions (a filter is one neuron of C·k·k entries), heads, the `Conv1D` of Hugging Face, the fused
    q, k and v of `nn.MultiheadAttention` and of GPT-2 (one rotation each), fused experts (one rotation per expert) and
    the gates of recurrent cells (one rotation each). The layers `nn.LSTM`, `nn.GRU` and `nn.RNN` are left unchanged
    with a warning, and so are weights that another library has quantised.

    A rotated weight is computed at every read, usually once per training step. Inside the context
    `torch.nn.utils.parametrize.cached()` it is computed once, however often it is read.

    Args:
        model: the model.
        method: a name or an object of `hypersphere.orthogonal` or `hypersphere.transform`, or a function that returns a
            module (n, d) → (n, d) for a given d.
        where: a function of name and module that selects layers. By default all but the output layer and embeddings.
        blocks: k, to make R block diagonal, along the channels of a convolution (parameter-efficient OPT, or OFT).
        block_size: b, the size of the blocks, instead of their number. It must divide the length of every neuron.
        shared: use one matrix for all blocks, and for all experts.
        factors: more than one makes R a butterfly product of block-diagonal matrices (butterfly OFT, BOFT), see
            `BlockLayout`.
        side: what the forward pass of a linear layer or a `Conv1D` rotates. "weight" rotates the neurons, "input"
            rotates the input instead, which gives the same output, and "auto" takes the cheaper of the two for every
            batch. Other layers rotate the weight.
        dropout: the probability with which each block is replaced by the identity in training (OFT).
        learn_neurons: train V, too.
        normalize: scale the neurons to norm 1 first. torch initialises Linear neurons with norm about 0.58. Rotations
            cannot change norms, so unnormalised layers learn slowly.
        refine: lower the energy of V first: "mhe", "half_space_mhe", "comhe", or a function from rows to an energy,
            such as `CompressiveEnergy`, see `refine_neurons`. Experts and the groups of a grouped convolution are
            refined separately.
        refine_steps: the number of descent steps of the refinement.
        refine_rate: the length of its first step in radians.
        output: rotate the output layer, the classifier, too (CLS-OPT).
        output_layer: the name of the output layer, or several names. "auto" recognises heads, classifiers with a usual
            name, and the last linear layer if the model ends with it. None if the model has no output layer.
        embeddings: rotate embeddings, too. The forward pass of `nn.Embedding` rotates the vectors that it looks up.
        quantize: "int8" stores V as 8-bit integers with one scale per neuron, in about a quarter of the memory of
            float32. V is rounded once: outputs change by about 1 % (the entries by at most max|v|/254 per neuron v).
            With side="input" no copy of V in floating point is kept for the backward pass.
        spread: standard deviation of the initial free parameters (the paper uses 1). None starts from R = I.
        report: print which layers are rotated, and which are skipped and why.

    Returns:
        The model. If an error is raised, the model is unchanged.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 2))
        >>> sum(p.numel() for p in rotate_(model, "cayley")[0].parametrizations.parameters() if p.requires_grad)
        28

    Reference:
        Liu et al., Orthogonal Over-Parameterized Training, CVPR 2021.
    """
    require(spread is None or is_number(spread, 0), "spread", "None or a number >= 0", spread)
    flags = {"shared": shared, "learn_neurons": learn_neurons, "normalize": normalize, "report": report}
    for name, flag in flags.items():
        require(isinstance(flag, bool), name, "a bool", flag)
    require(is_integer(blocks, 1), "blocks", "an integer >= 1", blocks)
    require(is_integer(factors, 1), "factors", "an integer >= 1", factors)
    require(block_size is None or is_integer(block_size, 1), "block_size", "None or an integer >= 1", block_size)
    require(
        block_size is None or blocks == 1,
        "block_size",
        f"None with {blocks=}, because the two exclude each other",
        block_size,
    )
    require(side in ("auto", "weight", "input"), "side", "'auto', 'weight' or 'input'", side)
    require(is_number(dropout, 0) and dropout < 1, "dropout", "a number in [0, 1)", dropout)
    require(is_integer(refine_steps, 1), "refine_steps", "an integer >= 1", refine_steps)
    require(is_number(refine_rate, 0) and refine_rate > 0, "refine_rate", "a positive number", refine_rate)
    if refine is not None:
        require_energy("refine", refine)
    require(quantize in (None, "int8"), "quantize", "None or 'int8'", quantize)
    require(quantize is None or not learn_neurons, "quantize", "None if learn_neurons=True", quantize)
    is_map = isinstance(method, (str, RowMap)) or (isinstance(method, type) and issubclass(method, RowMap))
    if is_map or not callable(method):
        method = choose(METHODS, cast(RowMap, method), "method")
    else:
        has_layout = blocks > 1 or block_size or factors > 1 or shared or dropout or spread is not None
        accepted = "a name or a RowMap if blocks, block_size, shared, factors, dropout or spread are used"
        require(not has_layout, "method", accepted, method)
    selection = rotatable_layers(model, where, output=output, output_layer=output_layer, embeddings=embeddings)
    # All parametrisations are made before the first one is attached, so that an error leaves the model unchanged.
    plans: list[Plan] = []
    for layer in selection:
        rows = unparametrized_rows(layer)
        parametrization: Rotation | CustomTransform
        if isinstance(method, RowMap):
            layout = _blocks_of_layer(layer, blocks, block_size, shared, factors)
            parametrization = Rotation(method, layout, side=side, dropout=dropout, like=rows)
            if spread:
                nn.init.normal_(parametrization.parameter, std=spread)
        else:
            parametrization = CustomTransform(method, rows)
        prepared = prepared_rows(
            layer, normalize=normalize, refine=refine, refine_steps=refine_steps, refine_rate=refine_rate
        )
        plans.append((layer, parametrization, prepared))
    quantized = () if quantize is None else [layer.name for layer in selection]
    attach_all(model, plans, learn_neurons=learn_neurons, quantized=quantized)
    if report:
        print(selection.report())
    return model


def prepared_rows(
    layer: NeuronLayer,
    *,
    normalize: bool,
    refine: str | Callable[[Tensor], Tensor] | None,
    refine_steps: int,
    refine_rate: float,
) -> Float[Tensor, "n d"] | None:
    """Return the neurons with which a rotation starts, see `rotate_`, or None if the layer keeps its neurons."""
    if refine is None and not normalize:
        return None
    rows = unparametrized_rows(layer)
    # Neurons of different groups are never compared. A group of one neuron, as in a depthwise convolution, stays.
    if refine is not None and (layer.groups == 1 or layer.shape[1] > 1):
        groups = rows.chunk(layer.groups)
        rows = torch.cat([refine_neurons(group, refine, steps=refine_steps, rate=refine_rate) for group in groups])
    return sphere.normalize(rows) if normalize else rows


def _blocks_of_layer(
    layer: NeuronLayer, blocks: int, block_size: int | None, shared: bool, factors: int
) -> BlockLayout:
    """Return the blocks of a layer. Errors name the layer."""
    name, length, channels = layer.name, layer.length, layer.shape[2]
    if block_size is not None:
        accepted = f"a divisor of {length}, the length of a neuron of {name!r} (or leave it out with `where`)"
        require(length % block_size == 0, "block_size", accepted, block_size)
        blocks = length // block_size
    elif hasattr(layer.module, "kernel_size"):
        accepted = f"a divisor of {channels}, the channels of {name!r} (or leave it out with `where`)"
        require(channels % blocks == 0, "blocks", accepted, blocks)
    try:
        layout = BlockLayout(length, blocks, shared, factors)
    except ValueError as error:
        raise ValueError(f"layer {name!r}: {error}") from None
    # The rotations of all experts are the blocks of one rotation, which `Rotation` applies to longer rows.
    experts = layer.groups if layer.part.stacked else 1
    return BlockLayout(length * experts, layout.blocks * experts, shared, factors) if experts > 1 else layout


# Attaching and folding -----------------------------------------------------------------------------------------------


class CustomTransform(nn.Module):
    """A user's module (n, d) → (n, d) as the parametrisation of a weight (G-OPT). It need not be linear."""

    original_state: WeightState
    part: WeightPart = WeightPart()

    def __init__(self, make_module: Callable[[int], nn.Module], rows: Float[Tensor, "n d"]) -> None:
        super().__init__()
        self.transform = make_module(rows.shape[1])
        is_module = isinstance(self.transform, nn.Module)
        require(is_module, "method", "a callable that makes a module for a given d", self.transform)
        with torch.no_grad(), evaluation_mode(self.transform):
            shape = tuple(self.transform.to(rows)(rows).shape)
        require(shape == tuple(rows.shape), "method", f"a module from and to rows {tuple(rows.shape)}", shape)

    def forward(self, neurons: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return the transformed neurons."""
        return self.part.with_rows(neurons, self.transform(self.part.rows(neurons)))


AnyRotation = Rotation | TwoSidedRotation | CustomTransform
Plan = tuple[NeuronLayer, AnyRotation, Tensor | None]
"""A layer, its parametrisation, and its neurons as rows, or None if it keeps its neurons."""


def attach_all(
    model: nn.Module, plans: Sequence[Plan], *, learn_neurons: bool = False, quantized: Container[str] = ()
) -> None:
    """Write the neurons of plain layers and register their parametrisations.

    The neurons of the layers named in `quantized` are stored as int8.
    """
    # All neurons are written first: a weight that holds several layers is parametrised with the first of them.
    for layer, _, rows in plans:
        if rows is not None:
            layer.write(rows)
    for layer, parametrization, _ in plans:
        _attach(layer, parametrization, learn_neurons=learn_neurons, quantize=layer.name in quantized)
    guard_save_pretrained(model, _save_obstacle)


def _attach(layer: NeuronLayer, parametrization: AnyRotation, *, learn_neurons: bool, quantize: bool) -> None:
    """Register the parametrisation of a layer's weight, or of a part of it."""
    module, parameter = cast(nn.Module, layer.module), layer.parameter
    parametrization.part = layer.part
    if not isinstance(parametrization, CustomTransform):
        parametrization.layer_name = layer.name
    others = [(rotation.part.parameter, rotation.original_state) for rotation in _rotations_of(module)]
    if parametrize.is_parametrized(module, parameter):  # the rotation of another part of the same weight
        parametrization.original_state = next(state for name, state in others if name == parameter)
    else:
        state = WeightState.of(module, parameter)
        # The first rotation of a module has seen all of its parameters.
        order = others[0][1].parameter_order if others else state.parameter_order
        parametrization.original_state = state._replace(parameter_order=order)
        cast(nn.Parameter, getattr(module, parameter)).requires_grad_(learn_neurons)
        if quantize:
            parametrize.register_parametrization(module, parameter, Int8Neurons(layer.part), unsafe=True)
    parametrization.train(module.training)
    # unsafe=True skips torch's trial evaluation, which costs one rotation. Shape and dtype are known to be preserved.
    parametrize.register_parametrization(module, parameter, parametrization, unsafe=True)
    _replace_forward(module)


def fold_(model: nn.Module, *, keep: bool = False) -> nn.Module:
    """Replace rotations by plain weights. Outputs do not change, and `weight` is the parameter object it was before.

    The plain weights are exactly what the rotated layers computed, in their dtype. Quantised layers get new
    parameter objects in floating point. `keep=True` folds in float64, because it is called repeatedly and float32
    errors would accumulate; outputs change by rounding.

    Only the active rotation set is folded (see `use_rotation_set`). The other sets are discarded.

    Args:
        model: its rotated layers are changed in place, and each `InputRotation` is replaced by its module. To fold a
            model that is itself an `InputRotation`, call its method `fold`.
        keep: fold R into V and continue to rotate from R = I with the same parameters (progressive training). This is
            not possible if the model contains an `InputRotation` or quantised neurons.

    Raises:
        ValueError: a rotated weight has another parametrisation, which folding would remove, a parameter is not finite,
            or `keep=True` is not possible.

    Example:
        >>> layer = rotate_(nn.Linear(8, 5))
        >>> type(fold_(layer)).__name__, [name for name, _ in layer.named_parameters()]
        ('Linear', ['weight', 'bias'])
    """
    require(isinstance(keep, bool), "keep", "a bool", keep)
    layers = list(rotated_layers(model))
    children = [(parent, name, child) for parent in model.modules() for name, child in parent._modules.items()]
    wrappers = [(parent, name, child) for parent, name, child in children if isinstance(child, InputRotation)]
    # All checks come first, so that an error leaves the model unchanged.
    require(not keep or not wrappers, "keep", "False where a model holds an InputRotation", keep)
    users = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    for _, name, child in wrappers:
        child.rotation.require_finite()
        if users[id(child.module._parameters.get("weight"))] > 1:
            raise ValueError(f"the rows of {name!r} cannot be folded, because another layer shares them")
    for name, module, rotation in layers:
        _require_foldable(name, module, rotation, keep)
    if keep:
        for _, module, rotation in layers:
            cast(Rotation | TwoSidedRotation, rotation).fold(original_weight(module, rotation.part.parameter))
    else:
        # A weight with several rotations is replaced once.
        states = {(module, rotation.part.parameter): rotation.original_state for _, module, rotation in layers}
        for (module, parameter), state in states.items():
            _detach(module, parameter, state)
    for parent, name, child in wrappers:
        # A wrapper that occurs in several places is folded at the first one and has R = I at the others.
        setattr(parent, name, child.fold())
    return model


def _require_foldable(name: str, module: nn.Module, rotation: AnyRotation, keep: bool) -> None:
    """Raise a `ValueError` if the rotation of a layer cannot be folded."""
    maps = _parametrizations_of(module, rotation.part.parameter)
    others = [type(one_map).__name__ for one_map in maps if not isinstance(one_map, Int8Neurons | AnyRotation)]
    if others:
        raise ValueError(
            f"layer {name!r} has another parametrisation after its rotation ({others[0]}), "
            "which folding would remove; remove it first"
        )
    if isinstance(rotation, CustomTransform):
        require(not keep, "keep", "False for a custom transform", keep)
        return
    rotation.require_foldable() if keep else rotation.require_finite()
    if keep and is_quantized(module, rotation.part.parameter):
        raise ValueError(f"keep=True needs neurons in floating point, but layer {name!r} has quantised neurons")


def _detach(module: nn.Module, parameter: str, state: WeightState) -> None:
    """Replace the parametrisations of a weight by its current value."""
    # `copy.deepcopy` of a parametrised module makes a second instance of the class that torch generated for it, and
    # `remove_parametrizations` deletes the property `weight` from this class, which would break the other instance.
    # Give the module a class that no copy shares. Not needed any more once torch removes the property only from a class
    # without other instances.
    shared_class = type(module)
    attributes = {name: value for name, value in vars(shared_class).items() if name not in ("__dict__", "__weakref__")}
    module.__class__ = type(shared_class.__name__, shared_class.__bases__, attributes)
    # Without the dropout of blocks.
    with evaluation_mode(_parametrizations_of(module, parameter)):
        parametrize.remove_parametrizations(module, parameter, leave_parametrized=True)
    weight = cast(Tensor, getattr(module, parameter))
    if not isinstance(weight, nn.Parameter):  # torch makes a buffer of a quantised weight that is not trained
        delattr(module, parameter)
        module.register_parameter(parameter, nn.Parameter(weight.detach()))
    state.restore(module, parameter)


# The forward pass of rotated layers ----------------------------------------------------------------------------------


def _replace_forward(module: nn.Module) -> None:
    """Give a rotated layer a forward pass that rotates less, if its kind has one.

    `register_parametrization` gave the module a generated class. The new forward pass is set on that class and
    disappears with it. A user's subclass that overrides `forward` keeps its own, which reads `weight` and so rotates
    all of it.
    """
    generated_class = type(module)
    plain = cast(type[nn.Module], generated_class.__mro__[1]).forward
    is_conv1d = (plain.__module__, plain.__qualname__) == ("transformers.pytorch_utils", "Conv1D.forward")
    if plain is nn.Linear.forward:
        generated_class.forward = _forward_linear(plain)
    elif is_conv1d:
        forward_linear = _forward_linear(plain)
        generated_class.forward = lambda self, x: forward_linear(self, x)  # the argument of `Conv1D` is called x
    elif plain is nn.Embedding.forward:
        generated_class.forward = _forward_embedding(plain)
    elif isinstance(module, nn.MultiheadAttention) or any(rotation.part.stacked for rotation in _rotations_of(module)):
        generated_class.forward = _forward_cached(plain)


def _forward_linear(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward pass of a linear layer that rotates its input where that is cheaper."""

    def forward(self: nn.Module, input: Tensor) -> Tensor:  # the name of torch, for calls by keyword
        maps, stored = _parametrizations_of(self, "weight"), _stored(self, "weight")
        rotations = [rotation for rotation in maps if isinstance(rotation, (Rotation, TwoSidedRotation))]
        # A user may have added a parametrisation. Quantised neurons are two tensors and one more parametrisation.
        has_other_maps = len(maps) != len(rotations) + len(stored) - 1
        # All parts of a fused weight must be rotated.
        rotates_all_parts = bool(rotations) and len(rotations) == rotations[0].part.count
        can_rotate_input = rotates_all_parts and not has_other_maps
        if not can_rotate_input or not all(rotation.rotates_input(input, stored[0]) for rotation in rotations):
            return cast(Tensor, plain(self, input))
        bias = cast(Tensor | None, self.bias)
        if len(rotations) == 1:
            return rotations[0].linear_output(input, stored, bias)
        biases = [None] * len(rotations) if bias is None else bias.chunk(len(rotations))
        parts = zip(rotations, biases, strict=True)
        return torch.cat([rotation.linear_output(input, stored, bias_part) for rotation, bias_part in parts], -1)

    return forward


def _forward_embedding(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward pass of an embedding that rotates the vectors it looks up, and not all vectors."""

    def forward(self: nn.Embedding, input: Tensor) -> Tensor:  # the name of torch, for calls by keyword
        tokens = input
        maps = _parametrizations_of(self, "weight")
        rotation, stored = maps[-1], _stored(self, "weight")
        has_one_rotation = isinstance(rotation, Rotation) and rotation.merged is None and len(maps) == len(stored)
        # `max_norm` changes the rotated weight, and `scale_grad_by_freq` the gradients of its vectors.
        needs_weight = self.max_norm is not None or self.scale_grad_by_freq
        if not has_one_rotation or needs_weight or tokens.numel() >= self.num_embeddings:
            return cast(Tensor, plain(self, tokens))
        if len(stored) == 1:
            vectors = F.embedding(tokens, stored[0], self.padding_idx, sparse=self.sparse)
        else:
            vectors = maps[0](*(tensor[tokens] for tensor in stored))
        rotated = cast(Tensor, rotation(vectors.reshape(-1, self.embedding_dim)).view(vectors.shape))
        if self.padding_idx is None:
            return rotated
        # As in torch, the vector of the padding has no gradient.
        return torch.where((tokens == self.padding_idx).unsqueeze(-1), rotated.detach(), rotated)

    return forward


def _forward_cached(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward pass of a module that reads its weight several times. The weight is rotated once."""

    def forward(self: nn.Module, *inputs: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or is_tracing():  # torch does not cache there
            return plain(self, *inputs, **options)
        with parametrize.cached():
            return plain(self, *inputs, **options)

    return forward


# Which layers --------------------------------------------------------------------------------------------------------


def rotatable_layers(
    model: nn.Module,
    where: Where | None = None,
    *,
    output: bool = False,
    output_layer: str | Sequence[str] | None = "auto",
    embeddings: bool = False,
) -> LayerSelection:
    """Return the layers that `rotate_` would rotate, and the others with the reason.

    Raises:
        ValueError: no layer is left, `where` selects the output layer without `output=True`, or a selected weight is
            shared by several layers or already parametrised.

    Example:
        >>> print(rotatable_layers(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))))
        1 layer:
          0  hidden     3 neurons of 3 numbers
        1 skipped:
          1: it is the output layer, which needs output=True
    """
    require(isinstance(model, nn.Module), "model", "a module", type(model).__name__)
    require(isinstance(output, bool), "output", "a bool (output_layer names the layer)", output)
    require(isinstance(embeddings, bool), "embeddings", "a bool", embeddings)
    layers = layers_of(model, output_layer=output_layer, where=where)
    if where is None and not output:
        layers.warn_if_output_is_unknown()
    # Prefixes of the names of layers inside an InputRotation.
    inputs_rotated = tuple(
        f"{name}." if name else "" for name, module in model.named_modules() if isinstance(module, InputRotation)
    )

    def reason_excluded(layer: NeuronLayer) -> str | None:
        if layer.name.startswith(inputs_rotated):
            return "its input is rotated instead"
        if layer.role == "embedding" and not embeddings:
            return "it is an embedding, which needs embeddings=True"
        if layer.role == "output" and not output:
            if where is not None:
                raise ValueError(f"where selects the output layer {layer.name!r}; pass output=True to rotate it")
            return "it is the output layer, which needs output=True"
        return None

    # Two steps, because only layers that the user did not exclude deserve a warning if they cannot be rotated.
    candidates = layers.without(reason_excluded)
    selection = candidates.without(reason_not_rotatable)
    for layer in selection:
        _require_not_parametrized(layer)
        if layer.aliases:
            name, other = layer.name, layer.aliases[0]
            raise ValueError(f"layer {name!r} must not share its weight, but it shares it with {other!r}")
    require_any_layer(selection)
    unsupported = [skip.name for skip in selection.skipped[len(candidates.skipped) :]]
    if unsupported:
        subject = "1 layer is" if len(unsupported) == 1 else f"{len(unsupported)} layers are"
        names = ", ".join([*unsupported[:3], *(["…"] if len(unsupported) > 3 else [])])
        warn_user(f"{subject} not rotated ({names}); rotate_(..., report=True) prints the reason")
    return selection


def require_any_layer(selection: LayerSelection) -> None:
    """Raise a `ValueError` with the reasons if no layer is left to rotate."""
    if not selection:
        reasons = "; ".join(f"{skip.name}: {skip.reason}" for skip in selection.skipped[:5])
        problem = f"none is left ({reasons})" if reasons else "the model has no layers"
        raise ValueError(f"where must select at least one layer that can be rotated, but {problem}")


def select(model: nn.Module, where: Where | None = None, *, output: bool = False) -> list[tuple[str, nn.Module]]:
    """Return names and modules of `rotatable_layers`. Deprecated."""
    warn_user("rotation.select is deprecated, use rotation.rotatable_layers", DeprecationWarning)
    layers = rotatable_layers(model, where, output=output)
    return [(layer.module_name, cast(nn.Module, layer.module)) for layer in layers]


def reason_not_rotatable(layer: NeuronLayer) -> str | None:
    """Return why the weight of a layer cannot be rotated, or None."""
    module = cast(nn.Module, layer.module)
    if isinstance(module, nn.RNNBase):
        return f"{type(module).__name__} passes its stored weights to torch, and not the parametrised ones"
    if parametrize.is_parametrized(module, layer.parameter):
        return None  # reported as an error by `_require_not_parametrized`
    return layer.reason_not_writable


def _require_not_parametrized(layer: NeuronLayer) -> None:
    module = cast(nn.Module, layer.module)
    if parametrize.is_parametrized(module, layer.parameter):
        by = type(_parametrizations_of(module, layer.parameter)[0]).__name__
        name = layer.name
        raise ValueError(f"layer {name!r} must have a plain weight, but it is parametrised already (by {by})")


def unparametrized_rows(layer: NeuronLayer) -> Float[Tensor, "n d"]:
    """Return the neurons in the dtype of the weight, or raise an error if it is parametrised or not finite."""
    _require_not_parametrized(layer)
    rows = layer.part.rows(layer.tensor.detach())
    _numerics.require_finite_rows(f"the weight of layer {layer.name!r}", rows)
    return rows


# Rotated models ------------------------------------------------------------------------------------------------------


def rotated_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, AnyRotation]]:
    """Yield name, module and parametrisation of every rotated layer.

    The name is the same as in `hypersphere.layers_of`. `Rotation.part` says which parameter of the module is rotated,
    and which part of it.
    """
    for path, module in model.named_modules():
        for rotation in _rotations_of(module):
            yield rotation.part.name_in(path), module, rotation


def _save_obstacle(model: nn.Module) -> str | None:
    """Return why a Hugging Face model with rotated layers must not be saved, or None if it has none."""
    rotated = [name for name, _, _ in rotated_layers(model)]
    if not rotated:
        return None
    return (
        f"model must be folded before save_pretrained, because from_pretrained would give its {len(rotated)} rotated "
        f"layers ({rotated[0]}, …) random weights: call save_adapter to save the rotations, or fold_ first"
    )


def _rotations_of(module: nn.Module) -> list[AnyRotation]:
    """Return the rotations of all weights of a module."""
    if not parametrize.is_parametrized(module):
        return []
    lists = cast(nn.ModuleDict, module.parametrizations).values()
    maps = [parametrization for maps in lists for parametrization in cast(nn.ModuleList, maps)]
    return [parametrization for parametrization in maps if isinstance(parametrization, AnyRotation)]


def _parametrizations_of(module: nn.Module, parameter: str) -> parametrize.ParametrizationList:
    """Return the parametrisations of a weight, in the order in which they are applied."""
    return cast(parametrize.ParametrizationList, cast(nn.ModuleDict, module.parametrizations)[parameter])


def _stored(module: nn.Module, parameter: str) -> tuple[Tensor, ...]:
    """Return the tensors that represent V: V itself, or integers and scales."""
    maps = _parametrizations_of(module, parameter)
    names = ("original",) if maps.is_tensor else ("original0", "original1")
    return tuple(cast(Tensor, getattr(maps, name)) for name in names)


def original_weight(module: nn.Module, parameter: str = "weight") -> Tensor:
    """Return V, the weight of a rotated layer before its rotation. Quantised neurons become floating-point numbers."""
    stored = _stored(module, parameter)
    return stored[0] if len(stored) == 1 else cast(Tensor, _parametrizations_of(module, parameter)[0](*stored))


def is_quantized(module: nn.Module, parameter: str = "weight") -> bool:
    """Return True if the fixed neurons of a rotated layer are stored as integers."""
    return isinstance(_parametrizations_of(module, parameter)[0], Int8Neurons)


def rotation_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the free parameters of all rotations, for example for the optimiser `hypersphere.optim.OGD`."""
    return [p for module in model.modules() if isinstance(module, Rotation) for p in module.free.values()]


def use_rotation_set(model: nn.Module, name: str, *, create: bool = False) -> None:
    """Make `name` the active rotation set of `model`: one set of free parameters per rotation.

    The state dict stores which set is active. Before loading it, create all sets of the saved model, in any order. All
    sets are trained unless they are frozen: give new parameters to the optimiser, and set `requires_grad_(False)` on
    the inactive ones, which get no gradient. With `DistributedDataParallel`, do this before wrapping the model. An
    `InputRotation` has a single set, which is used under every name.

    Args:
        model: a rotated model.
        name: the name of the rotation set.
        create: add the set, which starts at R = I, if there is none of this name.

    Example:
        >>> layer = rotate_(nn.Linear(4, 3))
        >>> use_rotation_set(layer, "second_task", create=True)
        >>> sorted(layer.parametrizations.weight[0].free)
        ['main', 'second_task']
    """
    require(isinstance(create, bool), "create", "a bool", create)
    rotations = [rotation for _, _, rotation in rotated_layers(model) if isinstance(rotation, Rotation)]
    require(bool(rotations), "model", "a rotated model", type(model).__name__)
    for rotation in rotations:  # all checks come first, so that an error leaves the model unchanged
        if name not in rotation.free:
            accepted = " or ".join(map(repr, rotation.free))
            require(create, "name", f"{accepted}, or a new name with create=True", name)
            rotation.require_new_name(name)
    for rotation in rotations:
        if name not in rotation.free:
            rotation.add(name)
        rotation.use(name)


def use(model: nn.Module, name: str) -> None:
    """Call `use_rotation_set` with `create=True`. Deprecated."""
    warn_user("rotation.use is deprecated, use rotation.use_rotation_set", DeprecationWarning)
    use_rotation_set(model, name, create=True)
