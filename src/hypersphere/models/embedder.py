"""Turn any backbone into an encoder by a pooling and a neck, and load backbones of timm, torchvision, Hugging Face."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere._modes import evaluation_mode
from hypersphere._numerics import widen
from hypersphere._validation import nearest_name, require

__all__ = ["POOLINGS", "Embedder", "GeM", "layer_depths", "load_encoder"]


class GeM(nn.Module):
    """Generalised mean over positions, (mean xᵖ)^(1/p), with a learned p (Radenović et al. 2018).

    p = 1 is the mean; the result approaches the maximum as p grows. Inputs are clamped at `floor`, because a power of a
    negative number is undefined.

    Args:
        p: initial exponent.
        floor: smallest input.

    Example:
        >>> x = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
        >>> torch.allclose(GeM(1.0)(x), x.mean(-1))
        True
    """

    def __init__(self, p: float = 3.0, floor: float = 1e-6) -> None:
        super().__init__()
        require(p > 0, "p", "a positive number", p)
        require(floor > 0, "floor", "a positive number", floor)
        self.p = nn.Parameter(torch.tensor([float(p)]))
        self.floor = floor

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, positions) to (batch, channels)."""
        # Powers overflow in half precision: 300³ exceeds the range of float16.
        wide = widen(x)
        p = self.p.to(wide.dtype)
        return wide.clamp(min=self.floor).pow(p).mean(-1).pow(1 / p).to(x.dtype)


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(-1)


class _Max(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.amax(-1)


class _First(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[..., 0]


class _Flatten(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


POOLINGS: dict[str, Callable[[], nn.Module]] = {
    "mean": _Mean,
    "max": _Max,
    "gem": GeM,
    "first": _First,  # the class token of a transformer
    "none": _Flatten,
}
NECKS = ("auto", "none", "linear", "batch_norm", "linear_batch_norm")


class Embedder(nn.Module):
    """Map inputs to embeddings (batch, feature_dim): a backbone, a pooling over positions, and a neck.

    The backbone may return a tensor of features (batch, channels), feature maps (batch, channels, height, width) or
    tokens (batch, tokens, channels), or an output of Hugging Face with `last_hidden_state`.

    Args:
        backbone: any module.
        example: a small batch of inputs. It is passed through the backbone once, to find the shape of the output.
        dim: dimension of the embedding; by default the number of channels of the backbone.
        pool: "mean", "max", "gem", "first" (the first token) or "none" (flatten); by default "mean" if there are
            positions. Features without positions are not pooled.
        neck: "none", "linear", "batch_norm" or "linear_batch_norm"; "auto" is "linear" if `dim` is given, else "none".
        dropout: dropout probability before the linear layer of the neck.

    Example:
        >>> backbone = nn.Conv2d(3, 8, 3)
        >>> encoder = Embedder(backbone, torch.zeros(2, 3, 16, 16), dim=4, pool="gem")
        >>> encoder(torch.zeros(5, 3, 16, 16)).shape, encoder.feature_dim
        (torch.Size([5, 4]), 4)
    """

    def __init__(
        self,
        backbone: nn.Module,
        example: Tensor,
        *,
        dim: int | None = None,
        pool: str | None = None,
        neck: str = "auto",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        require(dim is None or dim >= 1, "dim", "None or an integer >= 1", dim)
        require(pool is None or pool in POOLINGS, "pool", f"None or one of {', '.join(POOLINGS)}", pool)
        require(neck in NECKS, "neck", f"one of {', '.join(NECKS)}", neck)
        require(0 <= dropout < 1, "dropout", "a probability in [0, 1)", dropout)
        self.backbone = backbone
        with torch.no_grad(), evaluation_mode(backbone):
            output = _features_of(backbone(example))
        require(
            output.ndim in (2, 3, 4), "backbone", "a module with outputs of 2, 3 or 4 dimensions", tuple(output.shape)
        )
        has_positions = output.ndim > 2
        require(has_positions or pool in (None, "none"), "pool", "None, because the features have no positions", pool)
        self.pool = POOLINGS[pool or "mean"]() if has_positions else nn.Identity()
        with torch.no_grad():
            channels = self.pool(_channels_first(output)).shape[1]
        neck = ("linear" if dim is not None else "none") if neck == "auto" else neck
        needs_linear = dim is not None and dim != channels
        fits = "linear" in neck or not needs_linear
        require(fits, "neck", f"linear or linear_batch_norm to change the dimension from {channels} to {dim}", neck)
        self.feature_dim = channels if dim is None else dim
        layers: list[nn.Module] = []
        if "linear" in neck:
            layers += [nn.Dropout(dropout)] * (dropout > 0)
            # BatchNorm subtracts the mean, so a bias before it has no effect.
            layers.append(nn.Linear(channels, self.feature_dim, bias="batch_norm" not in neck))
        if "batch_norm" in neck:
            layers.append(nn.BatchNorm1d(self.feature_dim))
        self.neck = nn.Sequential(*layers)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs to embeddings."""
        return self.neck(self.pool(_channels_first(_features_of(self.backbone(inputs)))))


def load_encoder(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    in_channels: int | None = None,
    image_size: int | tuple[int, int] | None = None,
) -> nn.Module:
    """Return a backbone of another library without its classifier and with random weights.

    Nothing is downloaded. Weights of a Hugging Face model are read if `name` is a local folder.

    Args:
        name: `timm:NAME`, `torchvision:NAME`, or `hf:NAME` with a model type such as "vit" or a local folder.
        options: options of the model: arguments of `timm.create_model` or `torchvision.models.get_model`, or settings
            of the Hugging Face config.
        in_channels: channels of the images, passed on where the library has such an option.
        image_size: size of the images, passed on where the library has such an option.

    Raises:
        ValueError: if the library is not installed, or has no such model or option.
    """
    library, _, model = name.partition(":")
    require(library in _LIBRARIES and bool(model), "model", "timm:NAME, torchvision:NAME or hf:NAME", name)
    return _LIBRARIES[library](model, dict(options or {}), in_channels, image_size)


def _import(module: str) -> Any:
    """Import an optional library. These are not dependencies, because users choose the build for their device."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ValueError(f"the model needs {package}, which cannot be imported: {error}") from None


def _load_timm(name: str, options: dict[str, Any], in_channels: int | None, image_size: Any) -> nn.Module:
    timm = _import("timm")
    require(name in timm.list_models(), "model", "a model of timm" + nearest_name(name, timm.list_models()), name)
    sizes = {} if in_channels is None else {"in_chans": in_channels}
    try:
        return timm.create_model(name, **{"pretrained": False, "num_classes": 0, **sizes, **options})
    except TypeError as error:
        raise ValueError(f"timm:{name} does not accept {options}: {error}") from None


def _load_torchvision(name: str, options: dict[str, Any], in_channels: int | None, image_size: Any) -> nn.Module:
    models = _import("torchvision.models")
    require(
        name in models.list_models(), "model", "a model of torchvision" + nearest_name(name, models.list_models()), name
    )
    require(in_channels in (None, 3), "in_channels", "3 for a model of torchvision", in_channels)
    try:
        model: nn.Module = models.get_model(name, **{"weights": None, **options})
    except TypeError as error:
        raise ValueError(f"torchvision:{name} does not accept {options}: {error}") from None
    _remove_classifier_(model)
    return model


def _load_hugging_face(name: str, options: dict[str, Any], in_channels: int | None, image_size: Any) -> nn.Module:
    transformers = _import("transformers")
    if Path(name).expanduser().is_dir():
        require(not options, "options", "empty for a folder, whose config.json has them", options)
        # Read only safetensors and no code, so that loading a folder cannot run anything.
        return transformers.AutoModel.from_pretrained(
            Path(name).expanduser(), local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    try:
        config = transformers.AutoConfig.for_model(name)
    except ValueError:
        model_types = list(transformers.CONFIG_MAPPING)
        accepted = f"hf:TYPE with a model type of transformers, or hf:FOLDER, not 'hf:{name}'"
        raise ValueError(f"model must be {accepted}{nearest_name(name, model_types)}") from None
    for key in options:
        if not hasattr(config, key):
            raise ValueError(f"model.{key} is not an option of hf:{name}{nearest_name(key, config.to_dict())}")
    image_options = {"num_channels": in_channels, "image_size": image_size}
    sizes = {key: value for key, value in image_options.items() if value is not None and hasattr(config, key)}
    return transformers.AutoModel.from_config(type(config)(**{**sizes, **options}))


_LIBRARIES = {"timm": _load_timm, "torchvision": _load_torchvision, "hf": _load_hugging_face}


def layer_depths(model: nn.Module) -> dict[str, int]:
    """Return the depth of every parameter, 0 for the first layers; used for layer-wise learning rates.

    Parameters of one block, such as a layer of a transformer or a residual unit, have the same depth. Blocks are the
    items of lists of modules of one class; outside such lists, each layer is a block.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    >>> layer_depths(model)
    {'0.weight': 0, '0.bias': 0, '1.0.weight': 1, '1.0.bias': 1, '1.1.weight': 2, '1.1.bias': 2}
    """
    blocks: list[str] = []
    _collect_blocks(model, "", blocks)
    depth_of_block = {name: depth for depth, name in enumerate(blocks)}
    depths = {}
    for name, _ in model.named_parameters():
        parts = name.split(".")
        prefixes = [".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1)]
        # Parameters outside all blocks, such as class tokens and position embeddings, belong to the input.
        depths[name] = next((depth_of_block[prefix] for prefix in prefixes if prefix in depth_of_block), 0)
    return depths


def _collect_blocks(module: nn.Module, name: str, blocks: list[str]) -> None:
    """Append the paths of all blocks of a module, in order."""
    children = [(key, child) for key, child in module.named_children() if any(True for _ in child.parameters())]
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    is_repeated = is_list and len({type(child) for _, child in children}) == 1 and len(children) > 1
    for key, child in children:
        path = f"{name}.{key}" if name else key
        if not is_repeated and _has_list(child):
            _collect_blocks(child, path, blocks)
        else:
            blocks.append(path)


def _has_list(module: nn.Module) -> bool:
    """Return True if a module is or contains a list of at least two modules with parameters."""
    return any(
        isinstance(inner, (nn.ModuleList, nn.Sequential))
        and sum(any(True for _ in child.parameters()) for child in inner.children()) > 1
        for inner in module.modules()
    )


def _features_of(output: Any) -> Tensor:
    """Return the features in the output of a backbone."""
    if isinstance(output, Tensor):
        return output
    hidden = getattr(output, "last_hidden_state", None)
    if hidden is None and isinstance(output, Mapping):
        hidden = output.get("last_hidden_state")
    if hidden is None and isinstance(output, tuple) and output:
        hidden = output[0]
    accepted = "a module that returns a tensor, or an output of Hugging Face with last_hidden_state"
    require(isinstance(hidden, Tensor), "backbone", accepted, type(output).__name__)
    return hidden  # type: ignore[return-value]


def _channels_first(features: Tensor) -> Tensor:
    """Return feature maps or tokens as (batch, channels, positions); features without positions are unchanged."""
    if features.ndim == 4:
        return features.flatten(2)
    return features.mT if features.ndim == 3 else features


def _remove_classifier_(model: nn.Module) -> None:
    """Replace the last linear layer by the identity, so that the model returns its features."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    require(bool(names), "model", "a model whose last layer is linear", type(model).__name__)
    parent, _, attribute = names[-1].rpartition(".")
    setattr(model.get_submodule(parent), attribute, nn.Identity())
