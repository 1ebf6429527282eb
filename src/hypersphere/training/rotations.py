"""The menu of the setting `rotation`: which layers are rotated, by which map, and what this adds to training.

Each entry of `ROTATIONS` rotates the modules of an experiment and returns a `TrainedRotation` with the penalty, the
optimiser and the periodic fold that training needs. The options of an entry are its arguments, and the fields of
`RotationOptions` and `NeuronPreparation` where it passes them on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere import rotation
from hypersphere._layer_selection import NeuronLayer
from hypersphere._signatures import accept_options_of, named_parameters
from hypersphere.functions._rowmap import RowMap
from hypersphere.optim import OGD, OGDAdam
from hypersphere.rotation.rotate import METHODS, prepared_rows

__all__ = ["ROTATIONS", "NeuronPreparation", "RotationOptions", "TrainedRotation"]


@dataclass(frozen=True)
class TrainedRotation:
    """What a rotation adds to training.

    Attributes:
        penalty: term that is added to the loss, or None.
        orthogonal_parameters: matrices that are trained by descent on the orthogonal group.
        orthogonal_optimizer: makes the optimiser of these matrices.
        periodic_fold: folds the rotations into the weights and redraws them periodically, or None.
    """

    penalty: Callable[[], Tensor] | None = None
    orthogonal_parameters: list[nn.Parameter] = field(default_factory=list)
    orthogonal_optimizer: Callable[..., torch.optim.Optimizer] = OGD
    periodic_fold: rotation.Stochastic | rotation.Equivalence | None = None


@dataclass(frozen=True, kw_only=True)
class NeuronPreparation:
    """How neurons are normalised and refined before they are rotated or trained, by the options of `rotate_`."""

    normalize: bool = False
    refine: str | None = None
    refine_steps: int = 5000
    refine_rate: float = 0.1

    @property
    def changes_neurons(self) -> bool:
        """True if neurons are normalised or refined."""
        return self.normalize or self.refine is not None

    def prepare_(self, layers: Iterable[NeuronLayer]) -> None:
        """Refine the neurons and scale them to norm 1, as `rotate_` does with these options."""
        for layer in layers:
            rows = prepared_rows(layer, **asdict(self))
            if rows is not None:
                layer.write(rows)


@dataclass(frozen=True, kw_only=True)
class RotationOptions:
    """The options of a rotation by one map, for the layers of a network and its head.

    Options that are not listed below are those of `rotate_`.

    Attributes:
        output: rotate the head, too.
        hidden: rotate the layers of the network. False leaves only the head, which needs `output`.
        whole_first: rotate the first layer by a single matrix. The first layer of an image network has few channels,
            which are rarely divisible by the number of blocks.
    """

    blocks: int = 1
    block_size: int | None = None
    shared: bool = False
    factors: int = 1
    side: str = "auto"
    dropout: float = 0.0
    quantize: str | None = None
    learn_neurons: bool = False
    spread: float | None = None
    output: bool = False
    embeddings: bool = False
    hidden: bool = True
    whole_first: bool = False

    def rotate_(self, modules: nn.ModuleDict, method: str | RowMap, preparation: NeuronPreparation) -> None:
        """Prepare and rotate the layers that the options select."""
        where = None if self.hidden else _is_one_of(["head"])
        layers = rotation.rotatable_layers(modules, where, output=self.output, embeddings=self.embeddings)
        names = list(dict.fromkeys(layer.module_name for layer in layers))  # once per module
        options = asdict(self) | asdict(preparation)
        for choice in ("output", "hidden", "whole_first"):
            del options[choice]
        single_matrix = options | {"blocks": 1, "block_size": None, "shared": False, "factors": 1}
        first, others = (names[:1], names[1:]) if self.whole_first else ([], names)
        for group, group_options in ((first, single_matrix), (others, options)):
            if group:
                # `rotatable_layers` has already identified the output layer. Among the layers of this group alone,
                # `rotate_` could take the last linear layer of the network for it, and refuse it.
                rotation.rotate_(modules, method, where=_is_one_of(group), output_layer=None, **group_options)


def _is_one_of(names: list[str]) -> Callable[[str, nn.Module], bool]:
    return lambda name, _: name in names


# The menu ------------------------------------------------------------------------------------------------------------


@accept_options_of(NeuronPreparation)
def _none(modules: nn.ModuleDict, **options: Any) -> TrainedRotation:
    """Train the weights directly, without rotation; hidden neurons may be prepared as for a rotation."""
    preparation = NeuronPreparation(**options)
    if preparation.changes_neurons:  # `rotatable_layers` refuses a model without hidden layers
        preparation.prepare_(rotation.rotatable_layers(modules))
    return TrainedRotation()


def _rotation_by(map_type: type[RowMap]) -> Callable[..., TrainedRotation]:
    """Return the menu entry of a map. Its options are the fields of the map, such as `bound`, and of rotations."""

    @accept_options_of(map_type, RotationOptions, NeuronPreparation)
    def rotate(modules: nn.ModuleDict, **options: Any) -> TrainedRotation:
        map_options, preparation = _split_off(map_type, options), _split_off(NeuronPreparation, options)
        RotationOptions(**options).rotate_(modules, map_type(**map_options), NeuronPreparation(**preparation))
        return TrainedRotation()

    rotate.__doc__ = map_type.__doc__
    return rotate


def _split_off(factory: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of a factory from `options` and return them."""
    return {key: options.pop(key) for key in named_parameters(factory) if key in options}


@accept_options_of(NeuronPreparation)
def _penalized(modules: nn.ModuleDict, *, weight: float = 1.0, **options: Any) -> TrainedRotation:
    """Unconstrained matrices with a penalty that keeps them close to orthogonal (OR)."""
    RotationOptions().rotate_(modules, "free", NeuronPreparation(**options))
    return TrainedRotation(penalty=rotation.RotationPenalty(modules, weight))


@accept_options_of(NeuronPreparation)
def _descent(
    modules: nn.ModuleDict,
    *,
    momentum: float = 0.9,
    adam: bool = False,
    blocks: int = 1,
    shared: bool = False,
    whole_first: bool = False,
    **options: Any,
) -> TrainedRotation:
    """Orthogonal matrices trained by gradient descent on the orthogonal group (OGD, or with adaptive steps)."""
    layout = RotationOptions(blocks=blocks, shared=shared, whole_first=whole_first)
    layout.rotate_(modules, "free", NeuronPreparation(**options))
    optimizer = OGDAdam if adam else partial(OGD, momentum=momentum)
    matrices = rotation.rotation_parameters(modules)
    return TrainedRotation(orthogonal_parameters=matrices, orthogonal_optimizer=optimizer)


@accept_options_of(NeuronPreparation)
def _stochastic(
    modules: nn.ModuleDict,
    *,
    fraction: float | int = 0.25,
    every: int = 750,
    method: str = "cayley",
    whole_first: bool = True,
    **options: Any,
) -> TrainedRotation:
    """Rotations of a random subset of dimensions, folded and redrawn periodically (S-OPT); fraction 0 freezes."""
    # The seed is drawn from the global generator first, so that the dimensions do not depend on the refinement.
    generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    layers = rotation.rotatable_layers(modules)
    NeuronPreparation(**options).prepare_(layers)
    if fraction == 0:  # the baseline of the source: random neurons that are never trained
        for layer in layers:
            layer.tensor.requires_grad_(False)
        return TrainedRotation()
    fold = rotation.Stochastic(modules, fraction, every, method, whole_first=whole_first, generator=generator)
    return TrainedRotation(periodic_fold=fold)


def _equivalence(
    modules: nn.ModuleDict,
    *,
    block_size: int = 64,
    every: int = 200,
    sides: str = "both",
    start: str = "normalized",
    scale: float = 1.0,
    method: str = "cayley",
) -> TrainedRotation:
    """Rotations of outputs and inputs in blocks, folded into fixed random weights periodically (POET)."""
    # The weights are drawn, too. A separate generator keeps later random numbers independent of their number.
    generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    fold = rotation.Equivalence(modules, block_size, every, sides, start, method, scale=scale, generator=generator)
    return TrainedRotation(periodic_fold=fold)


ROTATIONS: dict[str, Callable[..., TrainedRotation]] = {
    "none": _none,
    **{name: _rotation_by(map_type) for name, map_type in METHODS.items()},
    "penalized": _penalized,
    "descent": _descent,
    "stochastic": _stochastic,
    "equivalence": _equivalence,
}
