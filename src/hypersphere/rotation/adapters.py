r"""Adapters: save only the rotations of a model, load them into the base model, merge and combine them.

A rotated model is a frozen base model and a rotation set: one small tensor of free parameters per layer. An adapter is
a saved rotation set. `save_adapter` writes it in the format of this library or of PEFT, and `load_adapter` reads both:

    base model  →  rotate_, train  →  save_adapter  →  folder  →  load_adapter  →  base model with the rotations

A model can hold several rotation sets: `use_rotation_set` switches between them and `combine` makes a weighted mean.
`merge` computes the rotated weights once for inference, and `unmerge` undoes it exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hypersphere import _numerics
from hypersphere._layer_selection import NeuronLayer, WeightPart, layers_of
from hypersphere._validation import is_number, nearest_name, require, warn_user
from hypersphere.functions import _factorizations as factorizations
from hypersphere.functions._rowmap import RowMap
from hypersphere.functions.orthogonal import Cayley, Exponential, Neumann
from hypersphere.rotation._adapter_files import (
    CARD,
    PEFT_CONFIG,
    Adapter,
    LayerAdapter,
    base_sample,
    read_adapter,
    same_base,
    write_adapter,
)
from hypersphere.rotation._peft_format import read_peft_adapter, write_peft_adapter
from hypersphere.rotation._quantized import Int8Neurons
from hypersphere.rotation.input_rotation import InputRotation
from hypersphere.rotation.layout import BlockLayout
from hypersphere.rotation.parametrization import Rotation
from hypersphere.rotation.rotate import (
    Plan,
    attach_all,
    is_quantized,
    original_weight,
    reason_not_rotatable,
    rotated_layers,
    rotation_parameters,
    unparametrized_rows,
    use_rotation_set,
)
from hypersphere.rotation.two_sided import TwoSidedRotation

__all__ = ["combine", "load_adapter", "merge", "save_adapter", "unmerge"]

Format = Literal["hypersphere", "peft"]


# Saving --------------------------------------------------------------------------------------------------------------


def save_adapter(model: nn.Module, folder: str | PathLike[str], *, format: Format = "hypersphere") -> None:
    """Write the rotations of a model, without its weights.

    Other parameters that were trained, such as biases or an output layer, are not part of an adapter: save them next to
    it, or freeze them before training. There is a warning if other parameters have `requires_grad=True`.

    The format "hypersphere" keeps everything: `adapter_model.safetensors` has the free parameters of the active set and
    a sample of every frozen weight, by which `load_adapter` recognises another base model. `adapter.json` has the
    methods and layouts.

    The format "peft" is for linear layers. `PeftModel.from_pretrained(base, folder)` opens it and gives the same
    outputs. It is OFT with the exact Cayley transform, or BOFT if there are several factors (which PEFT computes only
    with CUDA). Rotations by another orthogonal map are converted to the Cayley transform.

    Args:
        model: a rotated model with frozen neurons.
        folder: where to write. It is created if it does not exist. An earlier adapter of the same format is replaced,
            other files are never overwritten.
        format: "hypersphere" or "peft".

    Raises:
        ValueError: the model is not rotated, it has changes that are not rotations of frozen neurons (trained neurons,
            S-OPT, custom transforms, `InputRotation`), or the folder is a file or contains files of another program.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from hypersphere.rotation import rotate_
        >>> with TemporaryDirectory() as folder:
        ...     save_adapter(rotate_(nn.Linear(8, 5, bias=False), block_size=4), folder)
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['adapter.json', 'adapter_model.safetensors']
    """
    require(format in ("hypersphere", "peft"), "format", "'hypersphere' or 'peft'", format)
    rotations = _rotations(model)
    require(bool(rotations), "model", "a rotated model", type(model).__name__)
    layers = {}
    for name, module, rotation in rotations:
        with_name = f"layer {name!r} of model"
        rotation.require_finite()
        require(rotation.dimensions is None, with_name, "rotated in all dimensions; S-OPT changes the neurons", "S-OPT")
        neurons = _weight_or_rows(rotation.part, original_weight(module, rotation.part.parameter))
        require(not neurons.requires_grad, with_name, "frozen except for its rotation", "trained neurons")
        if format == "peft":
            is_supported = module is not model and isinstance(module, nn.Linear) and not rotation.part.suffix
            require(is_supported, with_name, "a linear layer inside the model for PEFT", type(module).__name__)
        layout = rotation.layout
        layers[name] = LayerAdapter(
            method=rotation.method,
            block_size=layout.block_size,
            free=rotation.parameter.detach(),
            shared=layout.shared,
            factors=layout.factors,
            side=rotation.side,
            dropout=rotation.dropout,
            shape=tuple(neurons.shape),
            base=base_sample(neurons),
            quantize="int8" if is_quantized(module, rotation.part.parameter) else None,
        )
    holds_inputs = any(isinstance(module, InputRotation) for module in model.modules())
    require(not holds_inputs, "model", "without an InputRotation", type(model).__name__)
    if format == "peft":
        base_name = getattr(getattr(model, "config", None), "_name_or_path", None)
        write_peft_adapter(Path(folder), Adapter(layers), base_name or None)
    else:
        write_adapter(Path(folder), Adapter(layers))
    _warn_about_other_parameters(model)


def _warn_about_other_parameters(model: nn.Module) -> None:
    """Warn about parameters that may have been trained and are not part of an adapter."""
    # The outputs do not depend on inactive rotation sets.
    rotations = set(rotation_parameters(model))
    others = [name for name, p in model.named_parameters() if p.requires_grad and p not in rotations]
    if others:
        names = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        advice = "freeze them before training, or save the state of the model, too"
        warn_user(f"the adapter does not store parameters that have requires_grad=True, {names}: {advice}")


def _weight_or_rows(part: WeightPart, weight: Tensor) -> Tensor:
    """Return the tensor that an adapter is compared with: the weight, or the rows of a layer that is a part of it."""
    return weight if part.is_whole else part.rows(weight)


def _rotations(model: nn.Module) -> list[tuple[str, nn.Module, Rotation]]:
    """Return the rotated layers of a model, or raise a `ValueError` if one is not rotated by `rotate_`."""
    layers = list(rotated_layers(model))
    for name, _, rotation in layers:
        kind = "rotated on two sides" if isinstance(rotation, TwoSidedRotation) else "changed by a custom transform"
        require(isinstance(rotation, Rotation), f"layer {name!r} of model", "rotated by `rotate_`", kind)
    return cast(list[tuple[str, nn.Module, Rotation]], layers)


# Loading -------------------------------------------------------------------------------------------------------------


def load_adapter(model: nn.Module, folder: str | PathLike[str], *, name: str = "main", check: bool = True) -> nn.Module:
    """Rotate a model as a saved adapter says, and make the adapter the active rotation set.

    The layers of a plain model are rotated. A model that is rotated already gets one more rotation set. A layer that
    only the model or only the adapter rotates has R = I in the other's set. Rotations with the same blocks but another
    method are converted if both are orthogonal. In a plain model a `name` other than "main" leaves the set "main" at
    R = I: the base model.

    The folder may also contain an adapter of PEFT, OFT or BOFT, saved as safetensors. Outputs are the same as in PEFT.

    - OFT with the Cayley–Neumann series is loaded as an exact Cayley rotation if the series is accurate to 1e-6, and
      else with the method "free" and a warning, because PEFT's matrices are then not orthogonal.
    - BOFT's scale of the outputs is multiplied into the rows of the frozen weight, and biases and modules that PEFT
      trained, too, replace the ones of the model. This is only possible in a plain model, because it changes what other
      adapters would rotate.

    Args:
        model: the base model of the adapter, plain or rotated. It is changed in place.
        folder: the folder that `save_adapter` or PEFT wrote. Nothing is unpickled.
        name: the name of the rotation set. It must be new if the model is rotated already.
        check: whether to compare the frozen weights with the sample in the adapter. PEFT's files have none. Weights of
            another dtype are compared up to rounding.

    Returns:
        The model.

    Raises:
        ValueError: a file is missing or damaged, or the adapter does not fit the model: a layer is unknown or has
            another shape, or the weights are from another base model. The model is unchanged.

    Example:
        >>> import copy
        >>> from tempfile import TemporaryDirectory
        >>> from hypersphere.rotation import rotate_
        >>> base = nn.Linear(8, 5).requires_grad_(False)
        >>> trained = rotate_(copy.deepcopy(base), spread=0.1)
        >>> with TemporaryDirectory() as folder:
        ...     save_adapter(trained, folder)
        ...     torch.equal(load_adapter(base, folder).weight, trained.weight)
        True
    """
    require(isinstance(check, bool), "check", "a bool", check)
    selection = layers_of(model, output_layer=None)
    adapter = _with_current_names(_read(Path(folder)), selection)
    layers = {path: layer for layer in selection for path in (layer.name, *layer.aliases)}
    unknown = [layer for layer in adapter.layers if layer not in layers]
    if unknown:
        near = nearest_name(unknown[0], layers)
        raise ValueError(f"model must have the layers of the adapter, but has no {_names(unknown)}{near}")
    rotated = {path: (module, rotation) for path, module, rotation in _rotations(model)}
    if rotated:
        _require_only_rotations(adapter)
        # Without `name` it is "main", which a rotated model has.
        require(name != "main", "name", "a new name, such as 'second', in a model that is rotated already", name)
    # Everything is prepared and checked before the first change, so that an error leaves the model unchanged.
    plain = {path: layers[path] for path in adapter.layers if path not in rotated}
    plans = [_plan_of_layer(path, layer, adapter, name) for path, layer in plain.items()]
    quantized = [layer.name for path, layer in plain.items() if adapter.layers[path].quantize is not None]
    frozen: dict[str, Tensor] = {}  # the weights that the adapter rotates, as they will be after loading
    parameters: list[tuple[Rotation, Tensor]] = []
    for path, (module, rotation) in rotated.items():
        rotation.require_new_name(name)
        if path in adapter.layers:
            frozen[path] = _weight_or_rows(rotation.part, original_weight(module, rotation.part.parameter))
            _require_shape(path, adapter, frozen[path])
            parameters.append((rotation, _converted(path, adapter.layers[path], rotation)))
    weights = _replaced_weights(model, adapter)
    if check:
        for path, layer in plain.items():
            int8_neurons, weight = Int8Neurons(layer.part), layer.tensor.detach()
            if layer.name in quantized:
                weight = int8_neurons(*int8_neurons.right_inverse(weight))
            frozen[path] = _weight_or_rows(layer.part, weight)
        _require_same_base(adapter, frozen)

    with torch.no_grad():
        for stored, weight in weights:
            weight.copy_(stored)
    attach_all(model, plans, quantized=quantized)
    rotations = [rotation for _, _, rotation in _rotations(model)]
    names = {set_name for rotation in rotations for set_name in rotation.free} | {name}
    for rotation in rotations:  # every rotation has every set
        for set_name in sorted(names - set(rotation.free)):
            rotation.add(set_name)
        rotation.use(name)
    with torch.no_grad():
        for rotation, free in parameters:
            rotation.parameter.copy_(free)
    return model


def _read(folder: Path) -> Adapter:
    """Read an adapter of either format."""
    if (folder / CARD).exists():
        return read_adapter(folder)
    has_config = (folder / PEFT_CONFIG).exists()
    require(has_config, "folder", f"a folder with {CARD}, or {PEFT_CONFIG} of PEFT", str(folder))
    return read_peft_adapter(folder)


def _with_current_names(adapter: Adapter, layers: Iterable[NeuronLayer]) -> Adapter:
    """Return an adapter whose layers have their current names. A model that is one layer used to be saved without."""
    root_layer = next((layer.name for layer in layers if layer.module_name == "" and not layer.part.suffix), "")
    return replace(adapter, layers={name or root_layer: layer for name, layer in adapter.layers.items()})


def _names(names: list[str]) -> str:
    """Return up to three names for a message."""
    return ", ".join([*map(repr, names[:3]), *([f"… ({len(names)} layers)"] if len(names) > 3 else [])])


def _require_only_rotations(adapter: Adapter) -> None:
    """Raise a `ValueError` if the adapter changes more than a rotation set of a rotated model can hold."""
    scaled = [name for name, layer in adapter.layers.items() if layer.row_scale is not None]
    others = [*scaled, *adapter.weights]
    if others:
        what = "scales outputs" if scaled else "replaces other weights"
        raise ValueError(f"model must be plain to load this adapter, because it also {what}: {_names(others)}")


def _plan_of_layer(path: str, layer: NeuronLayer, adapter: Adapter, name: str) -> Plan:
    """Return a plain layer, its rotation with the parameters of the adapter, and its neurons if they change."""
    shares_weight = f"it shares its weight with {layer.aliases[0]!r}" if layer.aliases else None
    reason = shares_weight or reason_not_rotatable(layer)
    if reason is not None:
        raise ValueError(f"layer {path!r} of the adapter cannot be rotated in this model: {reason}")
    stored, rows = adapter.layers[path], unparametrized_rows(layer)
    _require_shape(path, adapter, _weight_or_rows(layer.part, layer.tensor))
    layout = _blocks_of_adapter(path, stored, layer.length * (layer.groups if layer.part.stacked else 1))
    rotation = Rotation(stored.method, layout, side=stored.side, dropout=stored.dropout, like=rows)
    if name not in rotation.free:
        rotation.add(name)
    with torch.no_grad():
        rotation.free[name].copy_(_fitting_parameters(path, stored, rotation))
    if stored.row_scale is None:
        return layer, rotation, None
    fits = stored.row_scale.numel() == len(rows)
    require(fits, f"the scale of layer {path!r}", f"of {len(rows)} numbers", stored.row_scale.numel())
    wide = _numerics.widen(rows)
    return layer, rotation, _numerics.narrow(wide * stored.row_scale.to(wide).unsqueeze(-1), rows.dtype)


def _require_shape(path: str, adapter: Adapter, weight: Tensor) -> None:
    """Raise a `ValueError` if the adapter was made for a weight of another shape."""
    stored, shape = adapter.layers[path].shape, tuple(weight.shape)
    if stored not in (None, shape):
        raise ValueError(f"layer {path!r} has a weight of shape {shape}, but the adapter is for {stored}")
    if adapter.linear_only and weight.ndim > 2:
        raise ValueError(f"layer {path!r} is a convolution, for which OFT of PEFT does not rotate the filters")


def _blocks_of_adapter(path: str, stored: LayerAdapter, length: int) -> BlockLayout:
    """Return the blocks of a layer. Errors name the layer."""
    try:
        return stored.layout(length)
    except ValueError as error:
        raise ValueError(f"layer {path!r}: {error}") from None


def _fitting_parameters(path: str, stored: LayerAdapter, rotation: Rotation) -> Tensor:
    """Return the stored parameters in the shape that the rotation has, or raise a `ValueError`."""
    fits = stored.free.numel() == rotation.parameter.numel()
    accepted = f"parameters of the shape {tuple(rotation.parameter.shape)}"
    require(fits, f"the adapter of layer {path!r}", accepted, tuple(stored.free.shape))
    return stored.free.reshape(rotation.parameter.shape)


def _converted(path: str, stored: LayerAdapter, rotation: Rotation) -> Tensor:
    """Return the parameters of an adapter for an existing rotation with the same blocks."""
    ours, theirs = rotation.layout, _blocks_of_adapter(path, stored, rotation.layout.size)
    if rotation.dimensions is not None or ours != theirs:
        raise ValueError(f"layer {path!r} is rotated with {ours!r}, but the adapter has {theirs!r}")
    if stored.method == rotation.method:
        return _fitting_parameters(path, stored, rotation)
    matrices = stored.method.matrix(_numerics.to_float64(stored.free))
    fits = matrices.numel() == rotation.matrices().numel()
    require(fits, f"the adapter of layer {path!r}", f"the matrices of {ours!r}", tuple(matrices.shape))
    try:
        return parameters_of(rotation.method, matrices.reshape(rotation.matrices().shape))
    except ValueError as error:
        raise ValueError(
            f"layer {path!r} is rotated by {rotation.method!r}, to which {stored.method!r} of the adapter cannot be "
            f"converted: {error}"
        ) from None


def _replaced_weights(model: nn.Module, adapter: Adapter) -> list[tuple[Tensor, Tensor]]:
    """Return the complete tensors of the adapter with the parameters or buffers of the model that they replace."""
    state = model.state_dict(keep_vars=True)
    pairs = []
    for name, stored in adapter.weights.items():
        fits = name in state and state[name].shape == stored.shape
        expected = tuple(state[name].shape) if name in state else "a parameter of the model"
        require(fits, f"{name!r} of the adapter", str(expected), tuple(stored.shape))
        pairs.append((stored, state[name]))
    return pairs


def _require_same_base(adapter: Adapter, frozen: Mapping[str, Tensor]) -> None:
    """Raise a `ValueError` that names the layers whose frozen weights differ from the samples in the adapter."""
    samples = {path: layer.base for path, layer in adapter.layers.items() if layer.base is not None}
    different = [path for path, base in samples.items() if not same_base(base, frozen[path])]
    if different:
        raise ValueError(
            f"model must be the base model of the adapter, but {len(different)} of {len(frozen)} weights differ "
            f"({_names(different)}): use the weights that were rotated in training, or check=False to load it anyway"
        )


# Merging -------------------------------------------------------------------------------------------------------------


def merge(model: nn.Module) -> nn.Module:
    """Compute the rotated weights once and use them for inference, until `unmerge` is called.

    Frozen weights and parameters of the rotations stay in the model and in its state dict, so `unmerge` restores the
    model exactly. This takes the memory of a second copy of the rotated weights. A weight that holds several rotated
    layers, such as the fused q, k and v of attention, takes one copy per layer. `fold_` needs none, but cannot be
    undone. The call `model.train()`, another rotation set and a loaded state dict unmerge, too.

    Args:
        model: a model in evaluation mode. Its rotations get no gradients while they are merged. A model without
            rotations is returned unchanged, as by `fold_`.

    Example:
        >>> from hypersphere.rotation import rotate_
        >>> layer = rotate_(nn.Linear(8, 5), spread=0.1).eval()
        >>> rotated = layer.weight
        >>> torch.equal(merge(layer).weight, rotated), layer.weight is layer.weight
        (True, True)
        >>> unmerge(layer).weight.requires_grad
        True
    """
    layers = _rotations(model)
    training = [name for name, _, rotation in layers if rotation.training]
    require(not training, "model", "in evaluation mode, see nn.Module.eval", "in training mode")
    for _, _, rotation in layers:  # all checks come first, so that an error leaves the model unchanged
        rotation.require_finite()
    weights: dict[tuple[nn.Module, str], Tensor] = {}
    for _, module, rotation in layers:
        # Rotations of several parts of a weight are applied one after the other. The i-th rotation stores the weight
        # with parts 1…i rotated; reading the weight returns the last one.
        key = (module, rotation.part.parameter)
        rotation.merge(weights.get(key, original_weight(*key)))
        weights[key] = cast(Tensor, rotation.merged)
    return model


def unmerge(model: nn.Module) -> nn.Module:
    """Undo `merge`: compute the rotated weights from the frozen weights and the parameters again.

    Nothing changes in a model that is not merged.
    """
    for _, _, rotation in _rotations(model):
        rotation.merged = None
    return model


# Combining -----------------------------------------------------------------------------------------------------------


def combine(model: nn.Module, weights: Mapping[str, float], *, name: str) -> nn.Module:
    r"""Make a weighted combination of rotation sets on the group of rotations: R = exp(Σ_i w_i·log R_i).

    The logarithm is the principal one, with angles below 180°. So R is always a rotation, one set with the weight w is
    the point w of the geodesic from I to R₁ (0 is I, 1 is R₁), and rotations that commute add their angles. With the
    weights 1−t and t this is the log-Euclidean mean of two rotations. It does not depend on their order. It is the
    point t of the geodesic from R₁ to R₂ only if they commute.

    Every block is combined separately, and so is every factor of a butterfly product.

    Args:
        model: a rotated model with the rotation sets.
        weights: the weights by name of the set. They may be any numbers, and need not add up to 1.
        name: the name of the result, which becomes the active set. A set of this name is replaced, unless it is one of
            the combined sets.

    Returns:
        The model.

    Raises:
        ValueError: a set does not exist, a matrix is not a rotation by less than 180°, or the method of a layer does
            not reach the result. The model is unchanged.

    Example:
        >>> from hypersphere.rotation import rotate_, use_rotation_set
        >>> layer = rotate_(nn.Linear(2, 2), "exponential", output=True, spread=0.5)
        >>> angle = layer.parametrizations.weight[0].free.main.item()
        >>> _ = combine(layer, {"main": 0.5}, name="mixed")
        >>> round(layer.parametrizations.weight[0].free.mixed.item() / angle, 5)
        0.5
    """
    layers = _rotations(model)
    require(bool(layers), "model", "a rotated model", type(model).__name__)
    require(isinstance(weights, Mapping) and len(weights) > 0, "weights", "a mapping from names to numbers", weights)
    for weight in weights.values():
        require(is_number(weight, -float("inf")), "weights", "a mapping from names to numbers", weights)
    require(name not in weights, "name", "a set other than the combined ones", name)
    results = []
    for path, _, rotation in layers:
        missing = [set_name for set_name in weights if set_name not in rotation.free]
        accepted = "names among " + ", ".join(map(repr, rotation.free))
        require(not missing, "weights", accepted, missing)
        if name not in rotation.free:
            rotation.require_new_name(name)
        try:
            terms = []
            for set_name, weight in weights.items():
                matrices = rotation.method.matrix(_numerics.to_float64(rotation.free[set_name].detach()))
                terms.append(weight * factorizations.logarithm(matrices))
            combined = torch.linalg.matrix_exp(torch.stack(terms).sum(0))
            results.append(parameters_of(rotation.method, combined))
        except ValueError as error:
            raise ValueError(f"layer {path!r}: {error}") from None
    use_rotation_set(model, name, create=True)
    with torch.no_grad():
        for (_, _, rotation), free in zip(layers, results, strict=True):
            rotation.parameter.copy_(free)
    return model


def parameters_of(method: RowMap, r: Float[Tensor, "*batch d d"]) -> Float[Tensor, "..."]:
    """Return free parameters for which the map gives the orthogonal matrices R.

    Raises:
        ValueError: the map does not reach R.

    Example:
        >>> parameters_of(Cayley(), torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
        tensor([1.], dtype=torch.float64)
    """
    r = _numerics.to_float64(r)
    if isinstance(method, (Cayley, Neumann)):
        free = factorizations.pack_generator(factorizations.cayley_generator(r))
    elif isinstance(method, Exponential):
        free = factorizations.pack_generator(factorizations.logarithm(r))
    else:  # a map of a matrix P to the nearest orthogonal matrix or to Q of P = QT, for which R is a fixed point
        free = r
    reached = (method(free) - r).abs() <= _numerics.rotation_tolerance(torch.float32)
    if not bool(reached.all()):
        raise ValueError(f"{method!r} does not reach a matrix of the rotation")
    return free
