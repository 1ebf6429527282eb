"""Convert the layers of a trained model to decoupled layers, and back, or fold decoupled layers into layers of torch.

A conversion changes the class of a layer and adds the settings of the operator as attributes. The module object, its
parameters, hooks and name stay, so optimisers keep working, tied weights stay tied and references stay valid. `revert_`
restores the class and removes the attributes. `_convert_layer` does this for one layer and says why it does so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from hypersphere._layer_selection import NeuronLayer, SkippedLayer, layers_of
from hypersphere._modes import evaluation_mode, training_mode
from hypersphere._signatures import named_parameters
from hypersphere._validation import guard_save_pretrained, require
from hypersphere.layers._attention import DecoupledMultiheadAttention, DecoupledProjection
from hypersphere.layers._convert_layer import (
    TORCH_TO_DECOUPLED,
    convert_layer_,
    decoupled_parts,
    is_decoupled,
    linear_sizes,
    reason_not_convertible,
    revert_layer_,
    stores_inputs_first,
    torch_class,
    update_fast_paths_,
)
from hypersphere.layers._operator import inner_product_filters, is_inner_product
from hypersphere.layers.decoupled import DecoupledLayer, OperatorOptions, require_known_options
from hypersphere.layers.norm import SphereNorm

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ConversionPlan", "conversion_plan", "convert_", "equivalent_weight", "fold_operator_", "revert_"]

Model = TypeVar("Model", bound=nn.Module)
Predicate = Callable[[str, nn.Module], bool]


def convert_(
    model: Model,
    *,
    scale: str | None = None,
    calibration: Shaped[Tensor, "..."] | tuple[Any, ...] | None = None,
    where: Predicate | None = None,
    output_layer: str | Sequence[str] | None = "auto",
    report: bool = False,
    **options: Unpack[OperatorOptions],
) -> Model:
    r"""Convert convolutions, linear layers and attention of a model to decoupled layers, in place, keeping all weights.

    A decoupled layer without weighting ignores ‖w‖, so the outputs of a trained layer change in scale. With
    `scale="keep"`, the α of each layer (and β, if the magnitude has one) is multiplied by a factor that restores it:

    - with a `calibration` batch, the ratio of the root mean squares of the outputs before and after the conversion,
      without bias, on the inputs that the layer receives in the original model. A learned radius also starts from the
      mean patch norm of these inputs;
    - without one, the root mean square of the filter norms. This restores ‖w‖ but not ‖x‖, which is exact on average
      for `Linear` and insufficient for bounded magnitudes.

    The operator is not part of the state dict: convert a model with the same options before loading one. Hugging Face
    models refuse `save_pretrained` until they are reverted, because `from_pretrained` builds plain layers.

    Args:
        model: any module. Layers that can be converted are torch's Linear, Conv1d, Conv2d, Conv3d and their transposed
            convolutions, the q, k and v of `nn.MultiheadAttention`, the `Conv1D` of Hugging Face, and linear layers of
            other libraries with a weight, a bias and the sizes as attributes. A transposed convolution is converted as
            the convolution of the input with zeros between its entries; these are multiplied, too.
        scale: None to leave the scale of outputs to the magnitude, or "keep".
        calibration: with scale="keep", an input of the model, or a tuple of positional arguments.
        where: which of these layers, by name and module; an attention module is selected as a whole. None for all
            except the output layer and layers that cannot be converted; `conversion_plan` lists them with the reason.
        output_layer: the name of the output layer, or several names. "auto" recognises it as `layers_of` does; if it
            cannot, it warns and no layer counts as the output. None if the model has no output layer.
        report: whether to print the converted and the skipped layers.
        **options: `magnitude`, `angular`, `weighting`, `learn_k`, `learn_radius`, `radius_norm`, `momentum` and
            `storage`, with the meaning and the defaults that they have in `DecoupledConv2d`.

    Returns:
        The model.

    Raises:
        ValueError: no layer is chosen, or a layer that `where` chooses cannot be converted. The model is unchanged.
        TypeError: an option is unknown.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 10))
        >>> convert_(model, magnitude="ball", report=True)[0].magnitude
        1 converted:
          0
        1 skipped:
          3: it is the output layer
        Ball(alpha=1.0, radius=1.0)
    """
    require_known_options("convert_", options, named_parameters(convert_))
    require(scale in (None, "keep"), "scale", "None or 'keep'", scale)
    require(calibration is None or scale == "keep", "calibration", "None unless scale='keep'", type(calibration))
    plan = conversion_plan(model, where, output_layer=output_layer)
    modules = {name: model.get_submodule(name) for name in plan.converted}
    if not modules:
        raise ValueError(f"model must have a layer to convert, but {_why_nothing_is_chosen(model)}")
    converted: list[nn.Module] = []
    try:
        # Before the calibration, in which torch's fast path would not call the layers that are observed.
        update_fast_paths_(model, modules.values())
        observed = {} if calibration is None else _observe(model, modules, calibration)
        for name, module in modules.items():
            convert_layer_(module, options)  # after an error it has reverted the layer itself
            converted.append(module)
            if scale == "keep":
                for suffix, layer in decoupled_parts(module).items():
                    _keep_scale_(layer, observed.get((name, suffix)))
    except Exception:
        for module in converted:
            revert_layer_(module)
        update_fast_paths_(model)
        raise
    guard_save_pretrained(model, _save_obstacle)
    if report:
        print(plan)
    return model


def _save_obstacle(model: nn.Module) -> str | None:
    """Return why a Hugging Face model with decoupled layers must not be saved, or None if it has none."""
    count = sum(isinstance(module, DecoupledLayer) for module in model.modules())
    if not count:
        return None
    return (
        f"model must be reverted before save_pretrained, because from_pretrained would make its {count} decoupled "
        "layers plain: save state_dict() instead and call convert_ before loading it, or call revert_ first"
    )


def revert_(model: Model) -> Model:
    """Convert every decoupled layer of a model back to its original class, in place, keeping weights and biases.

    Layers inside a `SphereNorm` belong to it and are left unchanged.

    Raises:
        ValueError: a layer is parametrised. The model is unchanged.

    Example:
        >>> revert_(convert_(nn.Sequential(nn.Conv2d(3, 8, 3)), magnitude="ball"))
        Sequential(
          (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
        )
    """
    for module in _layers_to_revert(model):
        revert_layer_(module)
    update_fast_paths_(model)
    return model


def _layers_to_revert(model: nn.Module) -> list[nn.Module]:
    """Return the layers that `revert_` reverts, or raise its errors."""
    require(isinstance(model, nn.Module), "model", "a module", model)
    inside_norms = {module.layer for module in model.modules() if isinstance(module, SphereNorm)}
    decoupled = {
        name: module
        for name, module in model.named_modules()
        # q, k and v are part of an attention module, which is reverted as a whole.
        if is_decoupled(module) and not isinstance(module, DecoupledProjection) and module not in inside_norms
    }
    for name, module in decoupled.items():
        if parametrize.is_parametrized(module):
            advice = "fold it (hypersphere.rotation.fold_) or remove its parametrisation first"
            raise ValueError(
                f"model must have no parametrised decoupled layers, but {name!r} is parametrised: {advice}"
            )
    return list(decoupled.values())


# Which layers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConversionPlan:
    """Which layers `convert_` converts, and which it skips.

    Attributes:
        converted: qualified names of the layers to convert.
        skipped: other layers, with `name` and `reason`.
    """

    converted: tuple[str, ...]
    skipped: tuple[SkippedLayer, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.converted)} converted:", *(f"  {name}" for name in self.converted)]
        if self.skipped:
            lines += [f"{len(self.skipped)} skipped:", *(f"  {skip.name}: {skip.reason}" for skip in self.skipped)]
        return "\n".join(lines)


def conversion_plan(
    model: nn.Module, where: Predicate | None = None, *, output_layer: str | Sequence[str] | None = "auto"
) -> ConversionPlan:
    """Return which layers `convert_` would convert, and which it would skip and why. The model is not converted.

    A module of another library that looks like a linear layer is called to find out whether it computes W·x + b: its
    `forward` runs once on one row, without gradients and without hooks. If that has side effects, they remain.

    Args:
        model: any module.
        where: as in `convert_`.
        output_layer: as in `convert_`.

    Raises:
        ValueError: a layer that `where` chooses cannot be converted.

    Example:
        >>> print(conversion_plan(nn.Sequential(nn.Linear(4, 8), nn.LSTM(8, 8), nn.Linear(8, 2))).skipped[0])
        SkippedLayer(name='2', reason='it is the output layer')
    """
    require(where is None or callable(where), "where", "None or a function of a name and a module", where)
    selection = layers_of(model, output_layer=output_layer)
    if where is None:  # else it decides about the output layer, too
        selection.warn_if_output_is_unknown()
    candidates = {
        name: module
        for name, module in model.named_modules()
        if _looks_convertible(module) and (isinstance(module, tuple(TORCH_TO_DECOUPLED)) or _probe_linear(module))
    }
    outputs = {name for layer in selection.outputs for name in (layer.module_name, *layer.aliases)}
    bypassed: set[nn.Module] = set()  # the output layers of attention modules that are not converted

    def reason_to_skip(name: str, module: nn.Module) -> str | None:
        if where is not None and not where(name, module):
            return "excluded by `where`"
        if where is None and name in outputs:
            return "it is the output layer"
        reason = reason_not_convertible(module, bypassed)
        if where is not None and reason is not None:
            raise ValueError(f"where must exclude {name or type(module).__name__!r}: {reason}")
        return reason

    reasons: dict[str, str | None] = {}
    for name, module in candidates.items():  # an attention module comes before the layers inside it
        reasons[name] = reason_to_skip(name, module)
        if isinstance(module, nn.MultiheadAttention) and reasons[name] is not None:
            bypassed.update(module.children())
    skipped = [SkippedLayer(name, reason) for name, reason in reasons.items() if reason is not None]
    # Report the other layers with neurons, too. Parts of one candidate, such as q, k and v, are reported with it.
    for layer in selection:
        if layer.module_name in candidates or layer.module is None:
            continue
        skipped.append(SkippedLayer(layer.name, _reason_not_a_candidate(layer)))
    skipped += [skip for skip in selection.skipped if skip.name not in candidates]
    return ConversionPlan(tuple(name for name, reason in reasons.items() if reason is None), tuple(skipped))


def _reason_not_a_candidate(layer: NeuronLayer) -> str:
    """Return why a layer with neurons is of a kind that cannot be converted."""
    assert layer.module is not None
    kind = type(layer.module).__name__
    if is_decoupled(layer.module):
        return "it is decoupled already"
    if layer.role == "output":
        return "it is the output layer"
    if isinstance(layer.module, (nn.RNNBase, nn.RNNCellBase)):
        return f"{kind} computes its gates in one operation of torch"
    if layer.part.stacked:
        return f"{kind} multiplies its weights itself"
    return f"{kind} is not a convolution or linear layer"


def _looks_convertible(module: nn.Module) -> bool:
    """Return True for torch's layers, and for modules of other libraries that have the attributes of a linear layer."""
    if is_decoupled(module):
        return False
    if isinstance(module, tuple(TORCH_TO_DECOUPLED)):
        return True
    weight, sizes = module._parameters.get("weight"), linear_sizes(module)
    has_parameters = weight is not None and not isinstance(weight, UninitializedParameter)
    # A module with children may compute more than W·x + b.
    if weight is None or not has_parameters or sizes is None or "bias" not in module._parameters or module._modules:
        return False
    expected = sizes if stores_inputs_first(module) else sizes[::-1]
    return weight.is_floating_point() and tuple(weight.shape) == expected


@torch.no_grad()
def _probe_linear(module: nn.Module) -> bool:
    """Run another library's module on one row, without its hooks; return True if it computes W·x + b."""
    stored, bias = module._parameters["weight"], module._parameters["bias"]
    assert stored is not None
    weight = stored.mT if stores_inputs_first(module) else stored
    row = torch.linspace(-1, 1, weight.shape[1], dtype=weight.dtype, device=weight.device).unsqueeze(0)
    try:
        return bool(torch.allclose(module.forward(row), F.linear(row, weight, bias), rtol=1e-2, atol=1e-3))
    except Exception:  # whatever a foreign module raises on a row, it is not a linear layer
        return False


def _why_nothing_is_chosen(model: nn.Module) -> str:
    has_decoupled = any(is_decoupled(module) for module in model.modules())
    if has_decoupled and not any(_looks_convertible(module) for module in model.modules()):
        return "its layers are decoupled already: call revert_ first"
    if has_decoupled:
        return "none of its other layers is chosen; call revert_ first to convert decoupled layers again"
    return "none of its convolutions and linear layers is chosen; conversion_plan(model) gives the reasons"


@torch.no_grad()
def _observe(
    model: nn.Module, modules: dict[str, nn.Module], calibration: Tensor | tuple[Any, ...]
) -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
    """Run the model in evaluation mode; return the input and the root mean square output, without bias, per layer.

    The keys are the name of a module and "", or "q", "k" and "v" for an attention module.
    """
    observed: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}

    def remember(key: tuple[str, str]) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Tensor, ...], named: dict[str, Tensor], y: Tensor) -> None:
            x = arguments[0] if arguments else next(iter(named.values()))
            # A copy, because a later operation may overwrite the input in place.
            # Of several calls of one layer, the first counts.
            observed.setdefault(key, (x.detach().clone(), _root_mean_square(module, y)))

        return hook

    # torch's attention calls neither q, k and v nor its output layer. With the inner product as operator it gives the
    # same outputs and calls all four.
    attention = [module for module in modules.values() if isinstance(module, nn.MultiheadAttention)]
    layers: dict[tuple[str, str], nn.Module] = {}
    handles = []
    try:
        for attention_module in attention:
            convert_layer_(attention_module, OperatorOptions(magnitude="inner_product"))
        for name, module in modules.items():
            parts = decoupled_parts(module) if is_decoupled(module) else {"": module}
            layers |= {(name, suffix): part for suffix, part in parts.items()}
        handles = [layer.register_forward_hook(remember(key), with_kwargs=True) for key, layer in layers.items()]
        with evaluation_mode(model):
            model(*calibration if isinstance(calibration, tuple) else (calibration,))
    except (RuntimeError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"calibration must be an input of the model, which fails with it: {reason}") from error
    finally:
        for handle in handles:
            handle.remove()
        for attention_module in attention:
            if is_decoupled(attention_module):
                revert_layer_(attention_module)
    for key in layers:
        if key not in observed:
            raise ValueError(f"the calibration input does not reach layer {key[0]!r}")
    return observed


@torch.no_grad()
def _keep_scale_(layer: DecoupledLayer, observed: tuple[Tensor, Tensor] | None) -> None:
    """Multiply α and β of a converted layer so that its outputs keep their root mean square."""
    if observed is not None:
        x, expected = observed
        with training_mode(layer):  # sets the mean patch norm of a learned radius
            y = type(layer).forward(layer, x)  # without hooks: pre-hooks have been applied to `x`
        actual = _root_mean_square(layer, y)
        factor = float(expected / actual) if actual > 0 else 1.0  # a layer of zeros has no scale to restore
    elif layer.uses_weight_norm:
        factor = 1.0
    else:
        factor = float(layer._weight_as_filters.float().flatten(1).norm(dim=1).square().mean().sqrt())
    h = layer.magnitude
    names: list[str] = [f.name for f in fields(h) if f.name in ("alpha", "beta")] if is_dataclass(h) else []
    if not names:  # an inner product keeps its scale by itself; a user's function has no number to adjust
        require(factor == 1 and layer.uses_weight_norm, "scale", f"None for {h!r}, which has no alpha", "keep")
        return
    layer.magnitude = replace(h, **{name: factor * getattr(h, name) for name in names})  # type: ignore[type-var]


def _root_mean_square(module: nn.Module, y: Tensor) -> Tensor:
    """Return the root mean square of an output without its bias."""
    bias = cast(Tensor | None, module.bias)
    y = y.float()
    if bias is not None:
        channels_last = torch_class(module) is nn.Linear
        y = y - (bias.float() if channels_last else bias.float().reshape(-1, *[1] * (module.weight.ndim - 2)))  # type: ignore[operator]
    return y.square().mean().sqrt()


# Folding -------------------------------------------------------------------------------------------------------------


def fold_operator_(model: nn.Module) -> int:
    """Replace all decoupled layers by layers of torch in place if each is an inner product; return their number, or 0.

    The responses of `inner_product`, and of `linear` with or without weighting, with the cosine, are inner products.
    All others depend on the norm of each patch, which a layer of torch does not compute.

    Raises:
        ValueError: each layer is an inner product, but one is parametrised, or shares its weight with a layer that
            needs another one after folding. The model is unchanged.
    """
    weights = {module: equivalent_weight(module) for module in model.modules() if isinstance(module, DecoupledLayer)}
    if not weights or any(weight is None for weight in weights.values()):
        return 0
    folded = cast(dict[nn.Module, Tensor], weights)
    # Both raise their errors before the first weight changes.
    _layers_to_revert(model)
    _require_consistent_ties(model, folded)
    for module, weight in folded.items():
        with torch.no_grad():
            cast(Tensor, module.weight).copy_(weight)
    revert_(model)
    return len(weights)


def _require_consistent_ties(model: nn.Module, folded: dict[nn.Module, Tensor]) -> None:
    """Raise a `ValueError` if layers share a parameter of which they need different values after folding."""

    def value_after_folding(module: nn.Module, name: str, parameter: Tensor) -> Tensor:
        if isinstance(module, DecoupledMultiheadAttention):
            for projection in module.projections.values():
                part = projection._part
                if part.parameter == name:
                    parameter = part.with_rows(parameter, folded[projection])
            return parameter
        return folded[module] if name == "weight" and module in folded else parameter

    # Parameters are shared if they are the same object, or different objects with the same memory.
    users: dict[tuple[int, ...], list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                users.setdefault((parameter.data_ptr(), *parameter.shape), []).append((path, module, name))
    for first, *others in users.values():
        for other in others:
            values = [
                value_after_folding(module, name, cast(Tensor, module._parameters[name]).detach())
                for _, module, name in (first, other)
            ]
            if not torch.equal(*values):
                raise ValueError(
                    f"layer {first[0]!r} must not share its weight, but it shares it with {other[0]!r}, "
                    "and folding would change the output of one of them"
                )


def equivalent_weight(layer: DecoupledLayer) -> Float[Tensor, "..."] | None:
    """Return the weight of the layer of torch with the same response, or None if there is no such layer.

    >>> from hypersphere.layers import DecoupledLinear
    >>> layer = DecoupledLinear(2, 1, magnitude="linear")
    >>> _ = layer.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
    >>> equivalent_weight(layer), equivalent_weight(DecoupledLinear(2, 1, magnitude="tanh"))
    (tensor([[0.6000, 0.8000]]), None)
    """
    if not is_inner_product(layer.magnitude, layer.angular):
        return None
    filters = inner_product_filters(layer.magnitude, layer.weighting, layer._weight_as_filters)
    return layer._filters_as_weight(filters.detach()).to(layer.weight.dtype)
