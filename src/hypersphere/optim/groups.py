"""Parameter groups: which parameters get weight decay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from torch import nn

from hypersphere._layer_selection import NORMALIZATIONS, NeuronLayer, layers_of
from hypersphere._validation import is_number, require

__all__ = ["param_groups"]


def param_groups(
    model: nn.Module | Sequence[nn.Module],
    weight_decay: float,
    *,
    bias: bool = False,
    normalization: bool = False,
    report: bool = False,
) -> list[dict[str, Any]]:
    """Split the trained parameters into two groups for an optimiser: with weight decay, and without.

    Weights of which only the directions matter get no decay; `hypersphere.layers_of` finds them. Other modules list
    parameters that decay would harm in an attribute `decay_free_parameters`, a tuple of names. An example is a
    rotation, where decay pulls R to the identity or makes it non-orthogonal.

    Args:
        model: a module, or several, such as a network and its head. Frozen parameters are left out, and shared ones are
            listed once.
        weight_decay: the weight decay of the first group. That of the second is 0.
        bias: apply decay to biases, too.
        normalization: apply decay to the parameters of batch, layer, group and instance normalisation, too.
        report: print the group of every parameter, with the neurons it holds or the reason why it gets no decay.

    Returns:
        The group with weight decay, then the group without.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        >>> [len(group["params"]) for group in param_groups(model, 5e-4)]
        [2, 4]
    """
    require(is_number(weight_decay, 0), "weight_decay", "a number >= 0", weight_decay)
    if not isinstance(model, nn.Module):
        modules = list(model) if isinstance(model, Iterable) else []
        all_modules = bool(modules) and all(isinstance(module, nn.Module) for module in modules)
        require(all_modules, "model", "a module or a list of modules", model)
        model = nn.ModuleList(modules)
    # Layers by identity of their weight; the slices q, k and v of a fused weight share one. Distributed heads are
    # included, because decay acts on each class vector separately. Parametrised weights are not parameters.
    layers: dict[int, list[NeuronLayer]] = {}
    for layer in layers_of(model, output_layer=None, local_classes=True):
        weight = cast(nn.Module, layer.module)._parameters.get(layer.parameter)
        if weight is not None:
            layers.setdefault(id(weight), []).append(layer)
    # Why a parameter gets no decay, by the identity of the parameter.
    reasons = {key: "only directions matter" for key, slices in layers.items() if not slices[0].uses_weight_norm}
    for module in model.modules():
        declared = set(getattr(module, "decay_free_parameters", ()))
        # Names may refer to children, such as "free.main" in the ParameterDict of a rotation.
        for name, parameter in module.named_parameters():
            if name in declared:
                reasons.setdefault(id(parameter), f"{type(module).__name__} excludes it")
        direct_parameters = dict(module.named_parameters(recurse=False))
        if not normalization and isinstance(module, NORMALIZATIONS):
            for parameter in direct_parameters.values():
                reasons.setdefault(id(parameter), "parameter of a normalisation")
        for name, parameter in direct_parameters.items():
            if not bias and "bias" in name.split("_"):  # also in_proj_bias and bias_ih_l0 of torch
                reasons.setdefault(id(parameter), "bias")
    trained = [p for p in model.parameters() if p.requires_grad]
    if report:
        neurons = {key: _describe(slices) for key, slices in layers.items()}
        _print_report(model, weight_decay, reasons, neurons)
    return [
        {"params": [p for p in trained if id(p) not in reasons], "weight_decay": weight_decay},
        {"params": [p for p in trained if id(p) in reasons], "weight_decay": 0.0},
    ]


def _describe(slices: list[NeuronLayer]) -> str:
    """Describe the neurons of one weight. Slices of a fused weight have equal shapes."""
    return slices[0].describe() if len(slices) == 1 else f"{len(slices)} times {slices[0].describe()}"


def _print_report(model: nn.Module, weight_decay: float, reasons: dict[int, str], neurons: dict[int, str]) -> None:
    decayed, not_decayed, frozen = [], [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            frozen.append(f"  {name}")
        elif id(parameter) in reasons:
            not_decayed.append(f"  {name}: {reasons[id(parameter)]}")
        else:
            decayed.append(f"  {name}: {neurons[id(parameter)]}" if id(parameter) in neurons else f"  {name}")
    for title, names in (
        (f"weight decay {weight_decay:g}", decayed),
        ("no weight decay", not_decayed),
        ("frozen, in no group", frozen),
    ):
        if names:
            print("\n".join([f"{title}:", *names]))
