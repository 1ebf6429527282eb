"""Conversion of models, ours and others', to decoupled layers and back."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from hypersphere.layers import PRESETS, DecoupledConv2d, DecoupledLinear, convert_, revert_, shared_k


def small():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(72, 16), nn.Linear(16, 5)
    )


def images():
    return torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(1))


def test_convert_keeps_parameters_and_leaves_the_classifier():
    model = small().eval()
    parameters, before = dict(model.named_parameters()), model(images())
    assert convert_(model, magnitude="ball", angular="linear") is model
    assert [type(m).__name__ for m in model] == [
        "DecoupledConv2d",
        "BatchNorm2d",
        "ReLU",
        "Flatten",
        "DecoupledLinear",
        "Linear",
    ]
    assert all(parameters[name] is p for name, p in model.named_parameters())
    fresh = DecoupledConv2d(3, 8, 3, magnitude="ball", angular="linear")
    fresh.load_state_dict(model[0].state_dict())
    assert torch.equal(fresh(images()), model[0](images()))
    revert_(model)
    assert type(model[0]) is nn.Conv2d
    assert type(model[4]) is nn.Linear
    assert "magnitude" not in vars(model[0])
    assert all(parameters[name] is p for name, p in model.named_parameters())
    assert torch.equal(model(images()), before)


def test_inner_product_changes_nothing():
    model = small().eval()
    before = model(images())
    convert_(model, magnitude="inner_product", angular="cosine", where=lambda name, module: True)
    assert torch.equal(model(images()), before)


def test_predicate_root_and_learned_numbers():
    model = convert_(small(), where=lambda name, module: name == "5")
    assert isinstance(model[5], DecoupledLinear)
    assert type(model[0]) is nn.Conv2d
    alone = convert_(nn.Conv1d(2, 3, 3), magnitude="tanh", learn_radius="filter")
    assert alone.log_radius.shape == (3,)
    assert set(revert_(alone).state_dict()) == {"weight", "bias"}
    k = shared_k()
    model = convert_(small(), angular="sigmoid", learn_k=k)
    assert model[0].log_k is model[4].log_k is k
    model(images()).sum().backward()
    assert k.grad is not None


def test_an_optimiser_hooks_and_copies_survive():
    model = small()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    convert_(model)
    before = model[0].weight.detach().clone()
    model(images()).sum().backward()
    optimiser.step()
    assert calls == [1]
    assert not torch.equal(before, model[0].weight)
    other = copy.deepcopy(model)
    assert torch.equal(other.eval()(images()), model.eval()(images()))
    assert type(revert_(other)[0]) is nn.Conv2d


def test_tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.encode, self.decode = nn.Linear(4, 7, bias=False), nn.Linear(4, 7, bias=False)
            self.encode.weight = self.decode.weight = self.embed.weight

    model = convert_(Tied(), where=lambda name, module: True)
    assert model.encode.weight is model.decode.weight is model.embed.weight
    assert len(list(model.parameters())) == 1
    assert len(list(revert_(model).parameters())) == 1


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda m: parametrizations.weight_norm(m[4]), "where must leave '4' out, which is parametrised"),
        (lambda m: nn.utils.spectral_norm(m[4]), "'4' out, which does not own its weight"),
        (lambda m: m.__setitem__(4, nn.LazyLinear(16)), "'4' out, which has no weight yet"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_converted_is_refused_and_nothing_changed(spoil, words):
    model = small()
    spoil(model)
    with pytest.raises(ValueError, match=words):
        convert_(model)
    assert type(model[0]) is nn.Conv2d
    convert_(model, where=lambda name, module: isinstance(module, nn.Conv2d))
    assert isinstance(model[0], DecoupledConv2d)


def test_bad_settings_leave_the_model_as_it_was():
    for settings in ({"magnitude": "cube"}, {"learn_radius": "layer"}, {"angular": "sigmoid", "learn_k": "net"}):
        model = small()
        with pytest.raises(ValueError):
            convert_(model, **settings)
        assert type(model[0]) is nn.Conv2d
        assert type(model[4]) is nn.Linear
        assert not hasattr(model[0], "magnitude")
    model = small()
    with pytest.raises(ValueError, match="learn_k must be"):  # fits the first layer, not the second
        convert_(model, angular="sigmoid", learn_k=nn.Parameter(torch.zeros(8)))
    assert type(model[0]) is nn.Conv2d


def test_a_forward_of_ones_own_and_attention():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    layers = {"in": nn.Linear(4, 4), "own": Own(4, 4), "attention": nn.MultiheadAttention(4, 2), "out": nn.Linear(4, 2)}
    model = nn.ModuleDict(layers)
    convert_(model)
    assert isinstance(model["in"], DecoupledLinear)
    with pytest.raises(ValueError, match="is chosen"):
        convert_(model)
    assert type(model["own"]) is Own
    assert not isinstance(model["attention"].out_proj, DecoupledLinear)
    with pytest.raises(ValueError, match="'own' out, which is a Own with a forward of its own"):
        convert_(model, where=lambda name, module: name == "own")
    with pytest.raises(ValueError, match="reads its weight without calling it"):
        convert_(model, where=lambda name, module: name == "attention.out_proj")


def test_a_vision_model_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    )
    torch.manual_seed(0)
    model = transformers.ResNetForImageClassification(config).eval()
    x = torch.randn(2, 3, 32, 32)
    before = model(x).logits
    convert_(model, magnitude="tanh", learn_radius="layer")
    converted = [name for name, module in model.named_modules() if isinstance(module, DecoupledConv2d)]
    assert len(converted) == sum(isinstance(m, nn.Conv2d) for m in model.modules()) > 3
    assert type(model.classifier[-1]) is nn.Linear
    assert not torch.allclose(model(x).logits, before)
    model.train()(x).logits.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    model.load_state_dict(model.state_dict())
    revert_(model)
    assert not any(isinstance(m, DecoupledConv2d) for m in model.modules())
    convert_(model, magnitude="inner_product")
    vit = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            image_size=16,
            patch_size=8,
        )
    )
    convert_(vit, magnitude="linear")
    assert sum(isinstance(m, DecoupledLinear) for m in vit.modules()) >= 6
    assert torch.isfinite(vit(torch.randn(1, 3, 16, 16)).logits).all()


def test_a_graph_network_of_torch_geometric():
    geometric = pytest.importorskip("torch_geometric.nn")

    class GCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = geometric.GCNConv(6, 8), geometric.GCNConv(8, 3)

        def forward(self, x, edges):
            return self.second(self.first(x, edges).relu(), edges)

    torch.manual_seed(0)
    model, x = GCN(), torch.randn(5, 6)
    edges = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]])
    before, weight, kind = model(x, edges), model.first.lin.weight, type(model.first.lin)
    convert_(model)
    assert isinstance(model.first.lin, DecoupledLinear)
    assert model.first.lin.weight is weight
    assert not isinstance(model.second.lin, DecoupledLinear)
    torch.testing.assert_close(
        model.first.lin(x), nn.functional.cosine_similarity(x[:, None], weight[None], dim=2), atol=1e-6, rtol=1e-5
    )
    model(x, edges).sum().backward()
    assert weight.grad.abs().sum() > 0
    revert_(model)
    assert type(model.first.lin) is kind
    assert torch.equal(model(x, edges), before)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_named_after_their_magnitude(name):
    layer = PRESETS[name](3, 8, 3, padding=1, angular="linear")
    assert type(layer.magnitude).__name__.lower() == name.removesuffix("_conv2d")
    assert layer(images()).shape == (2, 8, 5, 5)
