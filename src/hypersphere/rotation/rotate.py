"""Rotate the layers of a model in place, and fold the rotations back into plain weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hypersphere import _numerics, sphere
from hypersphere._layer_selection import LayerSelection, NeuronLayer, layers_of
from hypersphere._modes import evaluation_mode
from hypersphere._validation import choose, is_integer, is_number, require, warn_user
from hypersphere.functions._rowmap import RowMap
from hypersphere.functions.orthogonal import ORTHOGONALS
from hypersphere.functions.transform import TRANSFORMS
from hypersphere.rotation.activations import InputRotation
from hypersphere.rotation.layout import BlockLayout
from hypersphere.rotation.parametrization import Rotation, Side, WeightState
from hypersphere.rotation.refine import refine_neurons, require_energy
from hypersphere.rotation.two_sided import TwoSidedRotation

__all__ = [
    "CustomTransform",
    "fold_",
    "rotatable_layers",
    "rotate_",
    "rotated_layers",
    "rotation_parameters",
    "select",
    "use_rotation_set",
]

METHODS: dict[str, type[RowMap]] = {**ORTHOGONALS, **TRANSFORMS}

Where = Callable[[str, nn.Module], bool]
Method = str | RowMap | Callable[[int], nn.Module]


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
    spread: float | None = None,
    report: bool = False,
) -> nn.Module:
    r"""Train layers by rotating their neurons: W = V·Rᵀ with V fixed and R learned (OPT, equation 1).

    Layers are found by `hypersphere.layers_of`. Linear layers, convolutions and heads with a plain weight of shape
    (neurons, …) are rotated in place; a filter of a convolution is one neuron of C·k·k entries. Other layers are left
    unchanged with a warning: fused attention weights, recurrent layers, experts, and layers that store neurons as
    columns. Embeddings are left unchanged.

    A rotated weight is computed at every read, usually once per training step. Inside the context
    `torch.nn.utils.parametrize.cached()` it is computed once, however often it is read.

    Args:
        model: the model.
        method: a name or an object of `hypersphere.orthogonal` or `hypersphere.transform`, or a function that returns a
            module (n, d) → (n, d) for a given d.
        where: a function of name and module that selects layers. By default all but the output layer.
        blocks: k, to make R block diagonal, along the channels of a convolution (PE-OPT; OFT for trained neurons).
        block_size: b, the size of the blocks, instead of their number. It must divide the length of every neuron.
        shared: use one matrix for all blocks.
        factors: more than one makes R a butterfly product of block-diagonal matrices (BOFT), see `BlockLayout`.
        side: what the forward pass of a linear layer rotates. "weight" rotates the neurons, "input" rotates the input
            instead, which gives the same output, and "auto" takes the cheaper of the two for every batch.
        dropout: the probability with which each block is replaced by the identity in training (OFT).
        learn_neurons: train V, too.
        normalize: scale the neurons to norm 1 first. Rotations cannot change norms, and torch initialises layers with
            much shorter neurons, so without it such layers learn slowly.
        refine: lower the energy of V first: "mhe", "half_space_mhe", "comhe", or a function from rows to an energy,
            such as `CompressiveEnergy`, see `refine_neurons`.
        refine_steps: the number of descent steps of the refinement.
        refine_rate: the length of its first step in radians.
        output: rotate the output layer, too (CLS-OPT).
        output_layer: the name of the output layer, or several names. "auto" recognises heads, classifiers with a usual
            name, and the last linear layer if the model ends with it. None if the model has no output layer.
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
    is_size = block_size is None or (is_integer(block_size, 1) and blocks == 1)
    require(is_size, "block_size", "None or an integer >= 1, without `blocks`", block_size)
    require(side in ("auto", "weight", "input"), "side", "'auto', 'weight' or 'input'", side)
    require(is_number(dropout, 0) and dropout < 1, "dropout", "a number in [0, 1)", dropout)
    require(is_integer(refine_steps, 1), "refine_steps", "an integer >= 1", refine_steps)
    require(is_number(refine_rate, 0) and refine_rate > 0, "refine_rate", "a positive number", refine_rate)
    if refine is not None:
        require_energy("refine", refine)
    is_map = isinstance(method, (str, RowMap)) or (isinstance(method, type) and issubclass(method, RowMap))
    if is_map or not callable(method):
        method = choose(METHODS, cast(RowMap, method), "method")
    else:
        has_layout = blocks > 1 or block_size or factors > 1 or shared or dropout or spread is not None
        accepted = "a name or a RowMap if blocks, block_size, shared, factors, dropout or spread are used"
        require(not has_layout, "method", accepted, method)
    selection = rotatable_layers(model, where, output=output, output_layer=output_layer)
    # All parametrisations are made before the first one is attached, so that an error leaves the model unchanged.
    plans: list[tuple[NeuronLayer, Rotation | CustomTransform, Tensor]] = []
    for layer in selection:
        weight = plain_weight(layer)
        rows = weight.detach().flatten(1)
        if weight.ndim > 2:
            channels = weight.shape[1]
            accepted = f"a divisor of {channels}, the channels of {layer.module_name!r} (or leave it out with `where`)"
            require(channels % blocks == 0, "blocks", accepted, blocks)
        parametrization: Rotation | CustomTransform
        if isinstance(method, RowMap):
            layout = _layout_of(layer, rows.shape[1], blocks, block_size, shared, factors)
            parametrization = Rotation(method, layout, side=side, dropout=dropout, like=rows)
            if spread:
                nn.init.normal_(parametrization.parameter, std=spread)
        else:
            parametrization = CustomTransform(method, rows)
        if refine is not None:
            rows = refine_neurons(rows, refine, steps=refine_steps, rate=refine_rate)
        plans.append((layer, parametrization, sphere.normalize(rows) if normalize else rows))
    for layer, parametrization, rows in plans:
        attach(layer, parametrization, rows, learn_neurons=learn_neurons)
    if report:
        print(selection.report())
    return model


def _layout_of(
    layer: NeuronLayer, length: int, blocks: int, block_size: int | None, shared: bool, factors: int
) -> BlockLayout:
    """Return the blocks of a layer. Errors name the layer."""
    if block_size is not None:
        accepted = f"a divisor of {length}, the length of a neuron of {layer.name!r} (or leave it out with `where`)"
        require(length % block_size == 0, "block_size", accepted, block_size)
        blocks = length // block_size
    try:
        return BlockLayout(length, blocks, shared, factors)
    except ValueError as error:
        raise ValueError(f"layer {layer.name!r}: {error}") from None


# Attaching and folding -----------------------------------------------------------------------------------------------


class CustomTransform(nn.Module):
    """A user's module (n, d) → (n, d) as the parametrisation of a weight (G-OPT). It need not be linear."""

    original_state: WeightState

    def __init__(self, make_module: Callable[[int], nn.Module], rows: Float[Tensor, "n d"]) -> None:
        super().__init__()
        self.transform = make_module(rows.shape[1])
        is_module = isinstance(self.transform, nn.Module)
        require(is_module, "method", "a callable that makes a module for a given d", self.transform)
        with torch.no_grad(), evaluation_mode(self.transform):
            shape = tuple(self.transform.to(rows)(rows).shape)
        require(shape == tuple(rows.shape), "method", f"a module from and to rows {tuple(rows.shape)}", shape)

    def forward(self, neurons: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """Return the transformed neurons."""
        return self.transform(neurons.flatten(1)).view_as(neurons)


def attach(
    layer: NeuronLayer,
    parametrization: Rotation | TwoSidedRotation | CustomTransform,
    rows: Tensor | None = None,
    *,
    learn_neurons: bool = False,
) -> None:
    """Register the parametrisation of a layer's weight. `rows` replace its neurons if given."""
    module = cast(nn.Module, layer.module)
    weight = cast(nn.Parameter, module.weight)
    parametrization.original_state = WeightState.of(module)
    if not isinstance(parametrization, CustomTransform):
        parametrization.layer_name = layer.module_name
    with torch.no_grad():
        if rows is not None and rows.data_ptr() != weight.data_ptr():  # `rows` may be a view of the weight itself
            weight.copy_(rows.view_as(weight))
    weight.requires_grad_(learn_neurons)
    parametrization.train(module.training)
    # unsafe=True skips torch's trial evaluation, which costs one rotation. Shape and dtype are known to be preserved.
    parametrize.register_parametrization(module, "weight", parametrization, unsafe=True)
    # torch has given the module a class of its own, which it removes with the parametrisation. A subclass with another
    # forward pass reads `weight`, and so rotates its weight.
    if not isinstance(parametrization, CustomTransform) and type(module).forward is nn.Linear.forward:
        type(module).forward = _forward_linear


def _forward_linear(self: nn.Linear, x: Tensor) -> Tensor:
    """The forward pass of a rotated linear layer."""
    rotation: Rotation | TwoSidedRotation = self.parametrizations.weight[0]  # type: ignore[union-attr,index,assignment]
    output = rotation.forward_linear(x, neurons_of(self), self.bias)
    return F.linear(x, self.weight, self.bias) if output is None else output


def fold_(model: nn.Module, *, keep: bool = False) -> nn.Module:
    """Replace rotations by plain weights. Outputs do not change, and `weight` is the parameter object it was before.

    The plain weights are exactly those that the rotated layers computed, in their dtype. With `keep=True`, which is
    called many times during training, they are computed in float64, so that rounding errors do not accumulate. Outputs
    then change by rounding errors.

    Args:
        model: its rotated layers are changed in place, and each `InputRotation` is replaced by its module. To fold a
            model that is itself an `InputRotation`, call its method `fold`.
        keep: fold R into V and continue to rotate from R = I with the same parameters (progressive training). This is
            not possible if the model contains an `InputRotation`.

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
    for _, _, rotation in layers:
        if isinstance(rotation, CustomTransform):
            require(not keep, "keep", "False for a custom transform", keep)
        else:
            rotation.require_finite()
            several = isinstance(rotation, Rotation) and len(rotation.free) > 1
            require(not keep or not several, "keep", "False where there are several sets", keep)
    for _, module, rotation in layers:
        if keep and not isinstance(rotation, CustomTransform):
            rotation.fold(neurons_of(module))
        else:
            _detach(module, rotation)
    for parent, name, child in wrappers:
        # A wrapper that occurs in several places is folded at the first one and has R = I at the others.
        setattr(parent, name, child.fold())
    return model


def _detach(module: nn.Module, rotation: Rotation | TwoSidedRotation | CustomTransform) -> None:
    """Replace the parametrisation of a layer by its current weight."""
    # `copy.deepcopy` of a parametrised module makes a second instance of the class that torch generated for it, and
    # `remove_parametrizations` deletes the property `weight` from this class, which would break the other instance.
    # Give the module a class that no copy shares. Not needed any more once torch removes the property only from a class
    # without other instances.
    shared_class = type(module)
    attributes = {name: value for name, value in vars(shared_class).items() if name not in ("__dict__", "__weakref__")}
    module.__class__ = type(shared_class.__name__, shared_class.__bases__, attributes)
    parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
    rotation.original_state.restore(module)


# Which layers --------------------------------------------------------------------------------------------------------


def rotatable_layers(
    model: nn.Module,
    where: Where | None = None,
    *,
    output: bool = False,
    output_layer: str | Sequence[str] | None = "auto",
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
    layers = layers_of(model, output=output_layer, where=where, output_argument="output_layer")
    if where is None and not output:
        layers.warn_if_output_is_unknown()
    # Prefixes of the names of layers inside an InputRotation.
    inputs_rotated = tuple(
        f"{name}." if name else "" for name, module in model.named_modules() if isinstance(module, InputRotation)
    )

    def reason_excluded(layer: NeuronLayer) -> str | None:
        if layer.name.startswith(inputs_rotated):
            return "its input is rotated instead"
        if layer.role == "embedding":
            return "embeddings are not rotated"
        if layer.role == "output" and not output:
            if where is not None:
                raise ValueError(f"where selects the output layer {layer.name!r}; pass output=True to rotate it")
            return "it is the output layer, which needs output=True"
        return None

    # Two steps, because only layers that the user did not exclude deserve a warning if they cannot be rotated.
    candidates = layers.without(reason_excluded)
    selection = candidates.without(_reason_not_rotatable)
    for layer in selection:
        if layer.aliases:
            other = layer.aliases[0]
            raise ValueError(f"layer {layer.module_name!r} must not share its weight, but it shares it with {other!r}")
    if not selection:
        reasons = "; ".join(f"{skip.name}: {skip.reason}" for skip in selection.skipped[:5])
        raise ValueError(f"where must select at least one layer that can be rotated, but none is left ({reasons})")
    unsupported = [skip.name for skip in selection.skipped[len(candidates.skipped) :]]
    if unsupported:
        subject = "1 layer is" if len(unsupported) == 1 else f"{len(unsupported)} layers are"
        names = ", ".join([*unsupported[:3], *(["…"] if len(unsupported) > 3 else [])])
        warn_user(f"{subject} not rotated ({names}); rotate_(..., report=True) prints the reason")
    return selection


def select(model: nn.Module, where: Where | None = None, *, output: bool = False) -> list[tuple[str, nn.Module]]:
    """Return names and modules of `rotatable_layers`. Deprecated."""
    warn_user("rotation.select is deprecated, use rotation.rotatable_layers", DeprecationWarning)
    layers = rotatable_layers(model, where, output=output)
    return [(layer.module_name, cast(nn.Module, layer.module)) for layer in layers]


def _reason_not_rotatable(layer: NeuronLayer) -> str | None:
    """Return why the weight of a layer cannot be rotated, or None."""
    if layer.parameter != "weight":
        return f"its weight is part of {layer.parameter}, which is not rotated"
    if layer.orientation != "rows":
        return f"{type(layer.module).__name__} stores its neurons as columns"
    if layer.groups > 1 and not hasattr(layer.module, "kernel_size"):
        return "it holds the weights of several experts in one tensor"
    module = cast(nn.Module, layer.module)
    if parametrize.is_parametrized(module, "weight"):
        return None  # reported as an error by `plain_weight`
    return layer.not_writable


def plain_weight(layer: NeuronLayer) -> Tensor:
    """Return the weight of a layer, or raise an error if it is parametrised or not finite."""
    path, module = layer.module_name, cast(nn.Module, layer.module)
    if parametrize.is_parametrized(module, "weight"):
        by = type(module.parametrizations.weight[0]).__name__  # type: ignore[union-attr,index]
        raise ValueError(f"layer {path!r} must have a plain weight, but it is parametrised already (by {by})")
    weight = cast(Tensor, module.weight)
    _numerics.require_finite_rows(f"the weight of layer {path!r}", weight)
    return weight


# Rotated models ------------------------------------------------------------------------------------------------------


def rotated_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, Rotation | TwoSidedRotation | CustomTransform]]:
    """Yield name, module and parametrisation of every rotated layer."""
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module, "weight"):
            parametrization = cast(nn.ModuleDict, module.parametrizations)["weight"][0]  # type: ignore[index]
            if isinstance(parametrization, (Rotation, TwoSidedRotation, CustomTransform)):
                yield name, module, parametrization


def neurons_of(module: nn.Module) -> Tensor:
    """Return the neurons V of a rotated layer."""
    return cast(Tensor, module.parametrizations.weight.original)  # type: ignore[union-attr]


def rotation_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the free parameters of all rotations, for example for the optimiser `hypersphere.optim.OGD`."""
    return [p for module in model.modules() if isinstance(module, Rotation) for p in module.free.values()]


def use_rotation_set(model: nn.Module, name: str) -> None:
    """Make `name` the active parameter set of every rotation of `model`. A new name adds a set that starts at R = I.

    The state dict stores which set is active. Before loading it, call this function once with every name, in any order.
    All sets are trained unless they are frozen: give new parameters to the optimiser, and set `requires_grad_(False)`
    on the inactive ones, which get no gradient. With `DistributedDataParallel`, do this before wrapping the model. An
    `InputRotation` has a single set, which is used under every name.

    >>> layer = rotate_(nn.Linear(4, 3))
    >>> use_rotation_set(layer, "second_task")
    >>> sorted(layer.parametrizations.weight[0].free)
    ['main', 'second_task']
    """
    rotations = [rotation for _, _, rotation in rotated_layers(model) if isinstance(rotation, Rotation)]
    require(bool(rotations), "model", "a rotated model", type(model).__name__)
    for rotation in rotations:
        if name not in rotation.free:
            rotation.add(name)
        rotation.use(name)
