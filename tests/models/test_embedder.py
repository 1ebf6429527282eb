"""Pooling, necks, encoders of other libraries and the depth of layers."""

import sys
import types

import pytest
import torch
from torch import nn

from hypersphere.models import MODELS, Embedder, GeM, layer_depths, load_encoder

IMAGES = torch.rand(3, 3, 8, 8)


class Tokens(nn.Module):
    """Return tokens (batch, tokens, channels) in the form chosen by `wrap`."""

    def __init__(self, wrap=lambda tokens: tokens):
        super().__init__()
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(x.flatten(2).mT)


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        (None, IMAGES.mean((2, 3))),
        ("mean", IMAGES.mean((2, 3))),
        ("max", IMAGES.amax((2, 3))),
        ("first", IMAGES[..., 0, 0]),
        ("gem", IMAGES.double().pow(3).mean((2, 3)).pow(1 / 3).float()),
        ("none", IMAGES.flatten(1)),
    ],
)
@pytest.mark.parametrize("backbone", [nn.Identity(), Tokens()])
def test_embedder_pools_maps_and_tokens(backbone, pool, expected):
    encoder = Embedder(backbone, IMAGES, pool=pool)
    torch.testing.assert_close(encoder(IMAGES), expected)
    assert encoder.feature_dim == expected.shape[1]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tokens: (tokens, None),
        lambda tokens: {"last_hidden_state": tokens},
        lambda tokens: types.SimpleNamespace(last_hidden_state=tokens),
    ],
)
def test_embedder_reads_outputs_of_other_libraries(wrap):
    torch.testing.assert_close(Embedder(Tokens(wrap), IMAGES)(IMAGES), IMAGES.mean((2, 3)))


def test_embedder_refuses_outputs_without_features():
    with pytest.raises(ValueError, match="backbone must be a module that returns a tensor"):
        Embedder(Tokens(lambda tokens: {"logits": tokens}), IMAGES)


def test_embedder_refuses_pooling_without_positions():
    with pytest.raises(ValueError, match="pool must be None, because the features have no positions, not 'gem'"):
        Embedder(nn.Flatten(), IMAGES, pool="gem")


@pytest.mark.parametrize(
    ("neck", "kinds"),
    [
        ("auto", [nn.Linear]),
        ("linear", [nn.Linear]),
        ("linear_batch_norm", [nn.Linear, nn.BatchNorm1d]),
    ],
)
def test_embedder_neck_changes_the_dimension(neck, kinds):
    encoder = Embedder(nn.Identity(), IMAGES, dim=7, neck=neck)
    assert [type(layer) for layer in encoder.neck] == kinds
    assert encoder(IMAGES).shape == (3, 7)


def test_embedder_neck_batch_norm_keeps_the_dimension():
    assert Embedder(nn.Identity(), IMAGES, neck="batch_norm")(IMAGES).shape == (3, 3)
    with pytest.raises(
        ValueError, match="neck must be linear or linear_batch_norm to change the dimension from 3 to 7"
    ):
        Embedder(nn.Identity(), IMAGES, dim=7, neck="batch_norm")


def test_embedder_example_leaves_statistics_and_mode_alone():
    backbone = nn.Sequential(nn.BatchNorm2d(3))
    Embedder(backbone, IMAGES)
    assert backbone.training
    assert int(backbone[0].num_batches_tracked) == 0


def test_gem_gradient_is_exact():
    pool = GeM(2.5).double()
    x = (torch.rand(2, 3, 5, dtype=torch.float64) + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(lambda v, p: torch.func.functional_call(pool, {"p": p}, (v,)), (x, pool.p))


def test_gem_is_finite_in_half_precision():
    x = torch.full((2, 3, 4), 300.0, dtype=torch.float16, requires_grad=True)
    result = GeM()(x)
    result.sum().backward()
    torch.testing.assert_close(result.detach(), torch.full((2, 3), 300.0, dtype=torch.float16))
    assert torch.isfinite(x.grad).all()


def test_load_encoder_builds_a_hugging_face_model_from_its_type():
    pytest.importorskip("transformers")
    options = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    backbone = load_encoder("hf:vit", {**options, "patch_size": 4}, in_channels=1, image_size=8)
    encoder = Embedder(backbone, torch.zeros(2, 1, 8, 8), pool="first")
    assert encoder(torch.zeros(3, 1, 8, 8)).shape == (3, 8)


def test_load_encoder_reads_a_hugging_face_folder(tmp_path):
    pytest.importorskip("transformers")
    options = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    original = load_encoder("hf:vit", {**options, "patch_size": 4}, in_channels=1, image_size=8)
    original.save_pretrained(tmp_path)
    again = load_encoder(f"hf:{tmp_path}").eval()
    x = torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(again(x).last_hidden_state, original.eval()(x).last_hidden_state)


def test_load_encoder_names_the_nearest_model_and_option():
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="not 'hf:vitt'; did you mean vit"):
        load_encoder("hf:vitt")
    with pytest.raises(ValueError, match=r"model\.hiden_size is not an option of hf:vit; did you mean hidden_size"):
        load_encoder("hf:vit", {"hiden_size": 8})


def test_load_encoder_refuses_unknown_libraries():
    with pytest.raises(ValueError, match="model must be timm:NAME, torchvision:NAME or hf:NAME, not 'keras:vgg'"):
        load_encoder("keras:vgg")


def test_load_encoder_passes_sizes_to_timm(monkeypatch):
    fake = types.ModuleType("timm")
    fake.list_models = lambda: ["tiny"]
    fake.create_model = lambda name, **options: nn.Conv2d(options["in_chans"], options["width"], 1)
    monkeypatch.setitem(sys.modules, "timm", fake)
    assert load_encoder("timm:tiny", {"width": 4}, in_channels=2).weight.shape == (4, 2, 1, 1)
    with pytest.raises(ValueError, match="did you mean tiny"):
        load_encoder("timm:tinny")


def test_load_encoder_removes_the_classifier_of_torchvision(monkeypatch):
    fake, models = types.ModuleType("torchvision"), types.ModuleType("torchvision.models")
    models.list_models = lambda: ["tiny"]
    models.get_model = lambda name, weights=None: nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Linear(5, 1000))
    fake.models = models
    monkeypatch.setitem(sys.modules, "torchvision", fake)
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    assert load_encoder("torchvision:tiny", in_channels=3)(torch.zeros(2, 3, 2, 2)).shape == (2, 5)
    with pytest.raises(ValueError, match="in_channels must be 3 for a model of torchvision, not 1"):
        load_encoder("torchvision:tiny", in_channels=1)


def test_layer_depths_of_a_transformer_are_those_of_its_blocks():
    pytest.importorskip("transformers")
    options = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 8}
    depths = layer_depths(load_encoder("hf:vit", {**options, "patch_size": 4}, image_size=8))
    per_layer = {}
    for name, depth in depths.items():
        if "layer." in name or "layers." in name:
            number = next(part for part in name.split(".") if part.isdigit())
            per_layer.setdefault(number, set()).add(depth)
    assert [len(values) for values in per_layer.values()] == [1, 1, 1]
    first, second, third = (min(per_layer[number]) for number in "012")
    embeddings = max(depth for name, depth in depths.items() if name.startswith("embeddings"))
    assert embeddings < first < second < third


def test_layer_depths_of_a_resnet_increase_with_the_units():
    depths = layer_depths(MODELS["resnet20"]())
    by_unit = [depths[f"units.{unit}.residual.0.weight"] for unit in range(9)]
    assert by_unit == sorted(set(by_unit))
    assert depths["stem.0.weight"] == 0


def test_load_encoder_names_a_missing_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match="the model needs timm, which cannot be imported"):
        load_encoder("timm:resnet18")
