"""Rotated models from plain ones, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hypersphere import sphere
from hypersphere._validation import choose, is_integer, is_number, require
from hypersphere.functions.orthogonal import ORTHOGONALS
from hypersphere.functions.rowmap import RowMap
from hypersphere.functions.transform import TRANSFORMS
from hypersphere.rotation.inputs import InputRotation
from hypersphere.rotation.layout import Layout
from hypersphere.rotation.parametrization import Rotation, require_finite
from hypersphere.rotation.refine import refined
from hypersphere.rotation.selection import Where, neurons_of, owners_of, select

__all__ = ["Transformed", "fold_", "rotate_", "rotated_layers", "rotation_parameters", "select", "use"]

METHODS: dict[str, type[RowMap]] = {**ORTHOGONALS, **TRANSFORMS}


class Transformed(nn.Module):
    """A user's transform of the rows V as a parametrisation, linear or not (G-OPT)."""

    plain: tuple[bool, tuple[str, ...]]

    def __init__(self, transform: nn.Module) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, neurons: Tensor) -> Tensor:
        """Return the transformed neurons."""
        return self.transform(neurons.flatten(1)).view_as(neurons)


def rotate_(
    model: nn.Module,
    method: str | RowMap | Callable[[int], nn.Module] = "cayley",
    *,
    where: Where | None = None,
    blocks: int = 1,
    shared: bool = False,
    factors: int = 1,
    learn_neurons: bool = False,
    normalize: bool = False,
    refine: str | Callable[[Tensor], Tensor] | None = None,
    refine_steps: int = 5000,
    output: bool = False,
    spread: float | None = None,
) -> nn.Module:
    r"""Train layers by rotating their neurons: W = V·Rᵀ, V fixed, R learned (OPT, equation 1).

    Args:
        model: its Linear and Conv layers and heads, and other linear layers with a weight (out_features, in_features),
            are changed in place; a filter is one neuron of C·k·k numbers.
        method: a name or object of `hypersphere.orthogonal` or `hypersphere.transform`, or a callable that makes a
            module (n, d) → (n, d) for a given d.
        where: which layers, by name and module; all but the output layer if None. Output is every head (a module with
            `num_classes`), what an `InputRotation` holds, and the layer that was registered last, whatever order
            `forward` has; a model that is one layer has no output layer.
        blocks: k, to make R block diagonal, along the channels of a convolution (PE-OPT; OFT on trained neurons).
        shared: whether the blocks are one matrix.
        factors: more than one makes R a butterfly product of block-diagonal matrices (BOFT).
        learn_neurons: whether V is trained too.
        normalize: whether neurons are put on the unit sphere first; torch's default initialisation is much shorter, and
            as rotations cannot lengthen neurons, such layers learn slowly without it.
        refine: lower the energy of V first: "mhe", "half_space_mhe", "comhe", or your own energy of rows.
        refine_steps: how many steps that takes; see `refined`.
        output: whether the output layer may be among the layers (CLS-OPT).
        spread: start from free parameters of this standard deviation instead of from R = I (the paper draws with 1).

    Returns:
        The model. On an error it is untouched.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 2))
        >>> sum(p.numel() for p in rotate_(model, "cayley")[0].parametrizations.parameters() if p.requires_grad)
        28

    Reference:
        Liu et al., Orthogonal Over-Parameterized Training, CVPR 2021.
    """
    require(spread is None or is_number(spread, 0), "spread", "None or a number >= 0", spread)
    require(is_integer(blocks, 1), "blocks", "a whole number >= 1", blocks)
    require(is_integer(factors, 1), "factors", "a whole number >= 1", factors)
    plain = blocks == 1 and factors == 1 and not shared and spread is None
    make = _maker(method, plain=plain)
    layers = select(model, where, output=output)
    plans: list[tuple[nn.Module, Rotation | Transformed, Tensor]] = []
    for name, layer in layers:
        weight = neurons_of(name, layer)
        rows = weight.detach().flatten(1)
        if weight.ndim > 2:
            accepted = f"a divisor of {weight.shape[1]}, the channels of {name!r}"
            require(weight.shape[1] % blocks == 0, "blocks", accepted, blocks)
        layout = Layout(rows.shape[1], blocks, shared, factors)
        turning = make(layout, rows)
        if spread and isinstance(turning, Rotation):
            nn.init.normal_(turning.parameter, std=spread)
        rows = rows if refine is None else refined(rows, refine, steps=refine_steps)
        plans.append((layer, turning, sphere.normalize(rows) if normalize else rows))
    for layer, turning, rows in plans:
        attach(layer, turning, rows, learn_neurons=learn_neurons)
    return model


def attach(
    layer: nn.Module, turning: Rotation | Transformed, rows: Tensor | None = None, *, learn_neurons: bool = False
) -> None:
    """Make `turning` the parametrisation of a layer's weight, with `rows` as its neurons if given."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    turning.plain = weight.requires_grad, tuple(layer._parameters)
    with torch.no_grad():
        if rows is not None and rows.data_ptr() != weight.data_ptr():
            weight.copy_(rows.view_as(weight))
    weight.requires_grad_(learn_neurons)
    turning.train(layer.training)
    parametrize.register_parametrization(layer, "weight", turning, unsafe=True)


def fold_(model: nn.Module, *, keep: bool = False) -> nn.Module:
    """Make the rotated weights plain ones: the same outputs, the same `weight` parameter object as before `rotate_`.

    Args:
        model: its rotated layers become plain ones, in place, and each `InputRotation` gives way to its module; a model
            that is itself one cannot, see its `fold`.
        keep: fold R into V and go on rotating from R = I, with the same parameters (progressive training); not where
            the model holds an `InputRotation`.

    Example:
        >>> layer = rotate_(nn.Linear(8, 5))
        >>> type(fold_(layer)).__name__, [name for name, _ in layer.named_parameters()]
        ('Linear', ['weight', 'bias'])
    """
    layers = list(rotated_layers(model))
    places = [(parent, name, child) for parent in model.modules() for name, child in parent._modules.items()]
    wrapped = [(parent, name, child) for parent, name, child in places if isinstance(child, InputRotation)]
    require(not keep or not wrapped, "keep", "False where a model holds an InputRotation", keep)
    owners = owners_of(model)
    for _, name, child in wrapped:
        require_finite(child.free)
        if owners[id(child.module._parameters.get("weight"))] > 1:
            raise ValueError(f"the rows of {name!r} must be its own to be folded, but another layer shares them")
    for _, _, turning in layers:
        if isinstance(turning, Rotation):
            require_finite(turning.parameter)
            require(not keep or len(turning.free) == 1, "keep", "False where there are several sets", keep)
        else:
            require(not keep, "keep", "False for a transform of your own", keep)
    for _, layer, turning in layers:
        if keep and isinstance(turning, Rotation):
            turning.fold(original_of(layer))
        else:
            _give_its_own_class(layer)
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
            trained, order = turning.plain
            layer._parameters["weight"].requires_grad_(trained)  # type: ignore[union-attr]
            for name in order:  # so that an optimiser's state finds the parameters in their places
                layer._parameters[name] = layer._parameters.pop(name)
    for parent, name, child in wrapped:  # one that stands in several places is at R = I after the first
        setattr(parent, name, child.fold())
    return model


def _give_its_own_class(layer: nn.Module) -> None:
    """Undo the sharing of a parametrised class by deep copies: removing a parametrisation takes the weight from all."""
    shared = type(layer)
    own = {name: value for name, value in vars(shared).items() if name not in ("__dict__", "__weakref__")}
    layer.__class__ = type(shared.__name__, shared.__bases__, own)


def original_of(layer: nn.Module) -> Tensor:
    """Return the neurons V of a rotated layer."""
    return cast(Tensor, layer.parametrizations.weight.original)  # type: ignore[union-attr]


def use(model: nn.Module, name: str) -> None:
    """Turn every rotated layer of `model` by the set of parameters `name`; a new name starts a set at R = I.

    The state dict says which set is in use. To load it, call `use` with every name first, in any order. Every set is
    trained unless you freeze it: give the new parameters to the optimiser, and set `requires_grad_(False)` on the
    others, which get no gradient; `DistributedDataParallel` wants that done before it wraps the model. An
    `InputRotation` has one set, which serves under every name.

    >>> layer = rotate_(nn.Linear(4, 3))
    >>> use(layer, "second_task")
    >>> sorted(layer.parametrizations.weight[0].free)
    ['main', 'second_task']
    """
    turnings = [turning for _, _, turning in rotated_layers(model) if isinstance(turning, Rotation)]
    require(bool(turnings), "model", "a rotated model", type(model).__name__)
    for turning in turnings:
        if name not in turning.free:
            turning.add(name)
        turning.use(name)


def rotated_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, Rotation | Transformed]]:
    """Yield name, layer and rotation of every rotated layer."""
    for name, layer in model.named_modules():
        if parametrize.is_parametrized(layer, "weight"):
            turning = cast(nn.ModuleDict, layer.parametrizations)["weight"][0]  # type: ignore[index]
            if isinstance(turning, (Rotation, Transformed)):
                yield name, layer, turning


def rotation_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the free parameters of all rotations, for an optimiser of their own such as `hypersphere.optim.OGD`."""
    found = [p for _, _, t in rotated_layers(model) if isinstance(t, Rotation) for p in t.free.values()]
    return found + [module.free for module in model.modules() if isinstance(module, InputRotation)]


def _maker(
    method: str | RowMap | Callable[[int], nn.Module], *, plain: bool
) -> Callable[[Layout, Tensor], Rotation | Transformed]:
    """How the parametrisation of one layer is made; a module of the user's own knows no blocks and no spread."""
    ours = isinstance(method, (str, RowMap)) or (isinstance(method, type) and issubclass(method, RowMap))
    if ours or not callable(method):
        chosen: RowMap = choose(METHODS, cast(RowMap, method), "method")
        return lambda layout, rows: Rotation(chosen, layout, like=rows)
    require(plain, "method", "a name or an object of ours for blocks, shared, factors or spread", method)
    make = cast(Callable[[int], nn.Module], method)

    def transformed(layout: Layout, rows: Tensor) -> Transformed:
        made = make(layout.size)
        require(isinstance(made, nn.Module), "method", "a callable that makes a module for a given d", made)
        mode = made.training
        with torch.no_grad():
            shape = tuple(made.to(rows).eval()(rows).shape)
        made.train(mode)
        require(shape == tuple(rows.shape), "method", f"a module from and to rows {tuple(rows.shape)}", shape)
        return Transformed(made)

    return transformed
