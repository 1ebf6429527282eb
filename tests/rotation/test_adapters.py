"""Adapters: files of this library and of PEFT, merging, and combination on the group of rotations."""

import copy
import json
import math
import pickle
import warnings

import numpy
import pytest
import torch
from torch import nn

import hypersphere as hs
from hypersphere.functions.orthogonal import Cayley
from hypersphere.rotation import (
    InputRotation,
    Stochastic,
    combine,
    fold_,
    load_adapter,
    merge,
    orthogonality_error,
    rotate_,
    rotated_layers,
    rotation_parameters,
    save_adapter,
    unmerge,
    use_rotation_set,
)
from hypersphere.rotation._adapter_files import Adapter, read_adapter, write_adapter

from .samples import left_unchanged, mlp, perturb_

X = torch.linspace(-1, 1, 70).view(7, 10)
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def trained(model, *args, size=0.2, **options):
    """Return a rotated copy of a model, frozen except for its rotations, which are not the identity."""
    model = rotate_(copy.deepcopy(model).requires_grad_(False), *args, **options)
    perturb_(model, size)
    return model.eval()


def bert():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=50, num_labels=3, initializer_range=0.3, **size)
    return transformers.BertForSequenceClassification(config).eval()


def attention(name, module):
    return name.endswith(("query", "value"))


TOKENS = torch.arange(24).view(2, 12)


# The format of this library ------------------------------------------------------------------------------------------

OPTIONS = {
    "cayley": ("cayley", {}),
    "bounded": (Cayley(bound=0.3), {"blocks": 2}),
    "blocks": ("cayley", {"blocks": 2, "side": "input"}),
    "shared": ("exponential", {"blocks": 2, "shared": True, "dropout": 0.25}),
    "butterfly": ("cayley", {"block_size": 2, "where": lambda name, m: name == "2", "factors": 2}),
    "gram_schmidt": ("gram_schmidt", {}),
    "free": ("free", {}),
}


@pytest.mark.parametrize(("method", "options"), OPTIONS.values(), ids=OPTIONS)
def test_load_adapter_restores_rotations_bit_by_bit(method, options, tmp_path):
    base = mlp()
    model = trained(base, method, **options)
    save_adapter(model, tmp_path)
    loaded = load_adapter(copy.deepcopy(base).eval(), tmp_path)
    assert loaded(X).equal(model(X))
    assert str(loaded) == str(model)
    for (name, _, ours), (other, _, theirs) in zip(rotated_layers(loaded), rotated_layers(model), strict=True):
        assert (name, ours.method, ours.layout) == (other, theirs.method, theirs.layout)
        assert (ours.side, ours.dropout) == (theirs.side, theirs.dropout)
    assert not base[0].weight.equal(loaded[0].weight) or "where" in options
    assert fold_(loaded).state_dict().keys() == base.state_dict().keys()


def test_load_adapter_restores_convolutions(tmp_path):
    torch.manual_seed(0)
    base, x = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Conv2d(6, 3, 1)), torch.randn(2, 4, 5, 5)
    model = trained(base, blocks=2)
    save_adapter(model, tmp_path)
    assert load_adapter(base.eval(), tmp_path)(x).equal(model(x))


def test_load_adapter_rotates_a_model_that_is_one_layer(tmp_path):
    base = nn.Linear(10, 4)
    model = trained(base)
    save_adapter(model, tmp_path)
    assert load_adapter(base, tmp_path)(X).equal(model(X))


def test_load_adapter_reads_the_empty_name_of_a_model_that_is_one_layer(tmp_path):
    base = nn.Linear(8, 5)
    model = trained(base)
    save_adapter(model, tmp_path)
    adapter = read_adapter(tmp_path)
    assert list(adapter.layers) == ["weight"]
    write_adapter(tmp_path, Adapter({"": adapter.layers["weight"]}))  # as files were written before
    assert torch.equal(load_adapter(base, tmp_path).weight, model.weight)


def test_save_adapter_writes_only_rotations_and_a_readable_card(tmp_path):
    model = trained(mlp(), "cayley", blocks=2)
    save_adapter(model, tmp_path / "new" / "folder")
    card = json.loads((tmp_path / "new" / "folder" / "adapter.json").read_text())
    (first, second) = card["rotations"]
    assert first["method"] == "cayley"
    assert (first["block_size"], first["layers"]) == (5, {"0": [16, 10]})
    assert (second["block_size"], second["layers"]) == (8, {"2": [8, 16]})
    assert card["library"].endswith(hs.__version__)
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "new" / "folder" / "adapter_model.safetensors")
    assert sorted(tensors) == ["0.base", "0.free", "2.base", "2.free"]
    assert max(tensor.numel() for tensor in tensors.values()) == 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_load_adapter_restores_other_dtypes(dtype, tmp_path):
    base = mlp().to(dtype)
    model = trained(base)
    save_adapter(model, tmp_path)
    loaded = load_adapter(base.eval(), tmp_path)
    assert loaded(X.to(dtype)).equal(model(X.to(dtype)))
    assert loaded[0].parametrizations.weight[0].parameter.dtype in (torch.float32, torch.float64)


def test_load_adapter_accepts_the_base_in_another_dtype(tmp_path):
    base = mlp()
    model = trained(base)
    save_adapter(model, tmp_path)
    half = load_adapter(copy.deepcopy(base).bfloat16().eval(), tmp_path)
    torch.testing.assert_close(half(X.bfloat16()).float(), model(X), rtol=0.05, atol=0.02)
    with pytest.raises(ValueError, match="2 of 2 weights differ"):
        load_adapter((copy.deepcopy(base)).requires_grad_(False).apply(shift).bfloat16(), tmp_path)


def shift(module):
    if isinstance(module, nn.Linear):
        with torch.no_grad():
            module.weight += 0.05


# Checks --------------------------------------------------------------------------------------------------------------


def test_load_adapter_refuses_another_base(tmp_path):
    base = mlp()
    save_adapter(trained(base), tmp_path)
    other = copy.deepcopy(base)
    with torch.no_grad():
        other[2].weight += 1e-6
    with left_unchanged(other), pytest.raises(ValueError, match=r"1 of 2 weights differ \('2'\)"):
        load_adapter(other, tmp_path)
    assert load_adapter(other, tmp_path, check=False) is other


def test_load_adapter_names_layers_that_do_not_fit(tmp_path):
    save_adapter(trained(mlp()), tmp_path)
    with pytest.raises(ValueError, match="has no '2'"):
        load_adapter(nn.Sequential(nn.Linear(10, 16)), tmp_path)
    wider = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 9), nn.Linear(9, 2))
    with left_unchanged(wider), pytest.raises(ValueError, match=r"layer '2' has a weight of shape \(9, 16\)"):
        load_adapter(wider, tmp_path)
    other = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.ReLU(), nn.Linear(16, 2))
    with left_unchanged(other), pytest.raises(ValueError, match="has no '2'"):
        load_adapter(other, tmp_path, check=False)
    tied = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    save_adapter(trained(tied), tmp_path / "tied")
    tied[2].weight = tied[0].weight
    with left_unchanged(tied), pytest.raises(ValueError, match="it shares its weight with '2'"):
        load_adapter(tied, tmp_path / "tied", check=False)


DAMAGES = {
    "no folder": lambda folder: [path.unlink() for path in folder.iterdir()],
    "no tensors": lambda folder: (folder / "adapter_model.safetensors").unlink(),
    "cut tensors": lambda folder: edit(folder / "adapter_model.safetensors", lambda data: data[:-5]),
    "changed tensors": lambda folder: edit(folder / "adapter_model.safetensors", lambda data: data[:-1] + b"?"),
    "cut card": lambda folder: edit(folder / "adapter.json", lambda data: data[:-20]),
    "no object": lambda folder: edit(folder / "adapter.json", lambda data: b"[]"),
    "other format": lambda folder: edit(folder / "adapter.json", lambda data: data.replace(b"rotation adapter", b"?")),
    "newer": lambda folder: edit(folder / "adapter.json", lambda data: data.replace(b'version": 1', b'version": 2')),
    "method": lambda folder: edit(folder / "adapter.json", lambda data: data.replace(b'"cayley"', b'"nonsense"')),
    "option": lambda folder: edit(folder / "adapter.json", lambda data: data.replace(b'"bound"', b'"bind"')),
    "blocks": lambda folder: edit(folder / "adapter.json", lambda data: data.replace(b'size": 10', b'size": 7')),
    "block size": lambda folder: edit(folder / "adapter.json", lambda data: data.replace(b'size": 10', b'size": "a"')),
    "factors": lambda folder: edit(folder / "adapter.json", lambda data: data.replace(b'factors": 1', b'factors": -1')),
    "smaller": lambda folder: edit(folder / "adapter.json", lambda data: data.replace(b'size": 10', b'size": 5')),
    "layers": lambda folder: edit(folder / "adapter.json", lambda data: data.replace(b'"layers"', b'"lairs"')),
    "shape": lambda folder: edit(folder / "adapter.json", lambda data: data.replace(b'"0": [', b'"0": 3, "1": [')),
}


def edit(path, change):
    data = path.read_bytes()
    assert change(data) != data
    path.write_bytes(change(data))


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_load_adapter_refuses_damaged_files(damage, tmp_path):
    base = mlp()
    save_adapter(trained(base), tmp_path)
    damage(tmp_path)
    with left_unchanged(base), pytest.raises(ValueError):
        load_adapter(base, tmp_path)


def test_load_adapter_unpickles_nothing(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    bomb = pickle.dumps(Bomb())
    (tmp_path / "adapter_model.safetensors").write_bytes(bomb)
    (tmp_path / "adapter_model.bin").write_bytes(bomb)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "OFT"}')
    with pytest.raises(ValueError, match="cannot be read"):
        load_adapter(mlp(), tmp_path)
    (tmp_path / "adapter.json").write_text("[" * 100_000)  # deeper than Python recurses
    with pytest.raises(ValueError, match=r"adapter\.json cannot be read"):
        load_adapter(mlp(), tmp_path)
    (tmp_path / "adapter.json").unlink()
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="pickled"):
        load_adapter(mlp(), tmp_path)


def test_save_adapter_replaces_only_its_own_files(tmp_path):
    base = mlp()
    first, second = trained(base), trained(base, size=0.5)
    save_adapter(first, tmp_path)
    save_adapter(second, tmp_path)
    assert load_adapter(copy.deepcopy(base).eval(), tmp_path)(X).equal(second(X))
    with pytest.raises(ValueError, match=r"adapter\.json"):
        save_adapter(first, tmp_path, format="peft")
    for name in ("adapter.json", "adapter_model.safetensors", "adapter_config.json"):
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        (folder / name).write_text("{}")
        with pytest.raises(ValueError, match=name):
            save_adapter(first, folder)
        assert [path.read_text() for path in folder.iterdir()] == ["{}"]


@pytest.mark.parametrize("format", ["hypersphere", "peft"])
def test_save_adapter_refuses_a_file_instead_of_a_folder(format, tmp_path):
    path = tmp_path / "script.py"
    path.write_text("print()")
    with pytest.raises(ValueError, match=r"^folder must be a new or an existing folder, not '.*script\.py'$"):
        save_adapter(trained(mlp()), path, format=format)
    assert path.read_text() == "print()"


def test_save_adapter_refuses_what_is_not_a_rotation_of_frozen_neurons(tmp_path):
    for model, message in (
        (mlp(), "a rotated model"),
        (rotate_(mlp(), learn_neurons=True), "trained neurons"),
        (rotate_(mlp(), lambda d: nn.Linear(d, d)), "custom transform"),
        (nn.Sequential(rotate_(nn.Linear(4, 4)), InputRotation(nn.Linear(4, 4))), "InputRotation"),
    ):
        with pytest.raises(ValueError, match=message):
            save_adapter(model, tmp_path)
    model = mlp()
    Stochastic(model)
    with pytest.raises(ValueError, match="S-OPT"):
        save_adapter(model, tmp_path)
    model = rotate_(mlp())
    with torch.no_grad():
        rotation_parameters(model)[0].fill_(math.nan)
    with pytest.raises(ValueError, match="finite"):
        save_adapter(model, tmp_path)
    with pytest.raises(ValueError, match="format"):
        save_adapter(rotate_(mlp()), tmp_path, format="lora")
    assert not list(tmp_path.iterdir())


def test_save_adapter_warns_about_other_parameters_that_may_be_trained(tmp_path):
    model = rotate_(mlp())
    with pytest.warns(UserWarning, match="the adapter does not store") as caught:
        save_adapter(model, tmp_path)
    assert [str(one.message) for one in caught] == [
        "the adapter does not store parameters that have requires_grad=True, 0.bias, 2.bias, 4.weight and 1 more: "
        "freeze them before training, or save the state of the model, too"
    ]
    assert caught[0].filename == __file__
    model[0].bias.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"requires_grad=True, 2\.bias, 4\.weight, 4\.bias: freeze"):
        save_adapter(model, tmp_path)
    model.requires_grad_(False)
    for parameter in rotation_parameters(model):
        parameter.requires_grad_()
    use_rotation_set(model, "second", create=True)  # the inactive set is another adapter
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_adapter(model, tmp_path)


# Several adapters ----------------------------------------------------------------------------------------------------


def test_load_adapter_adds_sets_that_use_rotation_set_switches(tmp_path):
    base = mlp().eval()
    a, b = trained(base), trained(base, size=0.4)
    save_adapter(a, tmp_path / "a")
    save_adapter(b, tmp_path / "b")
    model = load_adapter(copy.deepcopy(base), tmp_path / "a", name="a")
    load_adapter(model, tmp_path / "b", name="b")
    assert model(X).equal(b(X))
    use_rotation_set(model, "a")
    assert model(X).equal(a(X))
    use_rotation_set(model, "main")
    torch.testing.assert_close(model(X), base(X), **TOLERANCE)
    for name in ("a", "main", "no name", "half"):
        with left_unchanged(model), pytest.raises(ValueError, match="name must be"):
            load_adapter(model, tmp_path / "a", name=name)
    with left_unchanged(model), pytest.raises(ValueError, match="name must be a new name, such as 'second'"):
        load_adapter(model, tmp_path / "a")


def test_load_adapter_rotates_layers_that_no_other_set_rotates(tmp_path):
    base = mlp().eval()
    first = trained(base, where=lambda name, m: name == "0")
    second = trained(base, where=lambda name, m: name == "2")
    save_adapter(first, tmp_path / "first")
    save_adapter(second, tmp_path / "second")
    model = load_adapter(copy.deepcopy(base), tmp_path / "first")
    load_adapter(model, tmp_path / "second", name="second")
    torch.testing.assert_close(model(X), second(X), **TOLERANCE)
    use_rotation_set(model, "main")
    torch.testing.assert_close(model(X), first(X), **TOLERANCE)


@pytest.mark.parametrize("method", ["exponential", "lowdin", "neumann", "householder", "free"])
def test_load_adapter_converts_rotations_to_the_method_of_the_model(method, tmp_path):
    base = mlp().eval()
    saved = trained(base, "cayley", blocks=2)
    save_adapter(saved, tmp_path / "cayley")
    model = rotate_(copy.deepcopy(base).requires_grad_(False), method, blocks=2)
    load_adapter(model, tmp_path / "cayley", name="converted")
    torch.testing.assert_close(model(X), saved(X), **TOLERANCE)
    save_adapter(model, tmp_path / "converted")
    again = load_adapter(rotate_(copy.deepcopy(base), blocks=2), tmp_path / "converted", name="again")
    torch.testing.assert_close(again(X), saved(X), **TOLERANCE)


def test_load_adapter_refuses_sets_that_the_rotations_cannot_hold(tmp_path):
    base = mlp()
    save_adapter(trained(base, "free"), tmp_path)
    model = rotate_(copy.deepcopy(base), blocks=2)
    with left_unchanged(model), pytest.raises(ValueError, match="layer '0' is rotated with BlockLayout"):
        load_adapter(model, tmp_path, name="b")
    model = rotate_(copy.deepcopy(base))
    with left_unchanged(model), pytest.raises(ValueError, match="not orthogonal"):
        load_adapter(model, tmp_path, name="b")


# Merging -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge_and_unmerge_change_nothing(dtype):
    model = trained(mlp().to(dtype), blocks=2)
    x, state = X.to(dtype), copy.deepcopy(model.state_dict())
    weights = [module.weight.detach().clone() for _, module, _ in rotated_layers(model)]
    before = model(x)
    assert merge(model) is model
    for (_, module, _), weight in zip(rotated_layers(model), weights, strict=True):
        assert module.weight.equal(weight)
        assert module.weight is module.weight
    torch.testing.assert_close(model(x), before)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    copied = copy.deepcopy(model)
    assert unmerge(model) is model
    assert model(x).equal(before)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    torch.testing.assert_close(fold_(copied)(x), before)


def test_merge_ends_where_the_weight_would_be_outdated(tmp_path):
    base = mlp()
    model = trained(base)
    rotation = model[0].parametrizations.weight[0]
    other = copy.deepcopy(model)
    perturb_(other, 0.3)
    assert merge(model)[0].parametrizations.weight[0].merged is not None
    model.train()
    assert rotation.merged is None
    merge(model.eval()).load_state_dict(other.state_dict())
    assert model(X).equal(other(X))
    use_rotation_set(merge(model), "new", create=True)
    torch.testing.assert_close(model(X), base(X), **TOLERANCE)
    model(X).sum().backward()
    assert rotation.parameter.grad is not None
    use_rotation_set(model, "main")
    save_adapter(merge(model), tmp_path)
    assert load_adapter(base.eval(), tmp_path)(X).equal(other(X))


def test_merge_continues_after_a_fold():
    model = trained(mlp())
    before = merge(model)(X)
    torch.testing.assert_close(fold_(model, keep=True)(X), before, **TOLERANCE)


def test_merge_needs_a_model_in_evaluation_mode():
    with pytest.raises(ValueError, match="evaluation mode"):
        merge(rotate_(mlp()).train())


def test_merge_and_unmerge_leave_a_plain_model_unchanged():
    model = mlp()
    state = copy.deepcopy(model.state_dict())
    assert merge(model) is unmerge(model) is model
    torch.testing.assert_close(model.state_dict(), state, atol=0, rtol=0)


# Combination ---------------------------------------------------------------------------------------------------------

ORTHOGONAL = ["cayley", "exponential", "neumann", "gram_schmidt", "householder", "lowdin"]


def two_sets(method, blocks=2, size=0.2):
    """Return a rotated model with the sets "main" and "b", and a function that gives the dense R of its first layer.

    At this size all matrices are rotations. Larger parameters also give reflections, which have no logarithm.
    """
    model = rotate_(mlp().double(), method, blocks=blocks)
    use_rotation_set(model, "b", create=True)
    perturb_(model, size)
    with torch.no_grad():
        rotation_parameters(model)[1].mul_(0.7)

    def matrices(name):
        use_rotation_set(model, name)
        return model[0].parametrizations.weight[0].matrices().numpy()

    return model, matrices


def dense_log(r):
    """The principal logarithm of an orthogonal matrix by SciPy's inverse scaling and squaring."""
    linalg = pytest.importorskip("scipy.linalg")
    return numpy.stack([linalg.logm(block).real for block in r])


@pytest.mark.parametrize("method", ORTHOGONAL)
def test_combine_is_the_exponential_of_the_mean_logarithm(method):
    linalg = pytest.importorskip("scipy.linalg")
    model, matrices = two_sets(method)
    a, b = matrices("main"), matrices("b")
    combine(model, {"main": 0.7, "b": 0.4}, name="mixed")
    expected = numpy.stack([linalg.expm(block) for block in 0.7 * dense_log(a) + 0.4 * dense_log(b)])
    numpy.testing.assert_allclose(matrices("mixed"), expected, atol=1e-9)
    assert orthogonality_error(model) < 1e-10


@pytest.mark.parametrize("method", ORTHOGONAL)
def test_combine_of_one_set_is_a_point_on_its_geodesic(method):
    model, matrices = two_sets(method)
    r = matrices("b")
    combine(model, {"b": 1.0}, name="same")
    numpy.testing.assert_allclose(matrices("same"), r, atol=1e-9)
    combine(model, {"b": 0.0}, name="identity")
    numpy.testing.assert_allclose(matrices("identity"), numpy.broadcast_to(numpy.eye(5), r.shape), atol=1e-12)
    combine(model, {"b": 0.5}, name="middle")
    numpy.testing.assert_allclose(matrices("middle") @ matrices("middle"), r, atol=1e-9)
    combine(model, {"b": -1.0}, name="inverse")
    numpy.testing.assert_allclose(matrices("inverse"), r.transpose(0, 2, 1), atol=1e-9)


def test_combine_adds_the_angles_of_rotations_that_commute():
    layer = rotate_(nn.Linear(2, 3).double(), "exponential", output=True)
    rotation = layer.parametrizations.weight[0]
    for name, angle in (("main", 0.9), ("b", -0.4)):
        use_rotation_set(layer, name, create=True)
        with torch.no_grad():
            rotation.parameter.fill_(angle)
    combine(layer, {"main": 0.7, "b": 0.3}, name="mixed")
    assert rotation.parameter.item() == pytest.approx(0.7 * 0.9 - 0.3 * 0.4)
    combine(layer, {"main": 3.0}, name="mixed")  # 2.7 rad, below 180°
    assert rotation.parameter.item() == pytest.approx(2.7)


def test_combine_keeps_factors_and_shared_blocks():
    layer = rotate_(nn.Linear(8, 3).double(), block_size=2, factors=2, shared=True, output=True)
    perturb_(layer)
    before = layer.weight
    combine(layer, {"main": 1.0}, name="same")
    torch.testing.assert_close(layer.weight, before)


def test_combine_refuses_what_has_no_logarithm_and_unknown_sets():
    model, _ = two_sets("cayley")
    with left_unchanged(model):
        for weights, name, message in (
            ({"c": 1.0}, "new", "'main', 'b'"),
            ({}, "new", "mapping"),
            ({"b": math.nan}, "new", "numbers"),
            ({"b": 1.0}, "b", "other than the combined ones"),
            ({"b": 1.0}, "no name", "identifier"),
        ):
            with pytest.raises(ValueError, match=message):
                combine(model, weights, name=name)
    layer = trained(nn.Linear(4, 4), "free", output=True)
    with left_unchanged(layer), pytest.raises(ValueError, match="not orthogonal"):
        combine(layer, {"main": 1.0}, name="new")
    layer = rotate_(nn.Linear(2, 4), "gram_schmidt", output=True)
    with torch.no_grad():
        layer.parametrizations.weight[0].parameter.copy_(-torch.eye(2))
    with pytest.raises(ValueError, match="180°"):
        combine(layer, {"main": 0.5}, name="new")


# PEFT ----------------------------------------------------------------------------------------------------------------


def peft_model(base, config, std=0.3, seed=1):
    """Return a PEFT model whose adapter parameters are random."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(copy.deepcopy(base), config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "oft_R" in name:
                p.copy_(std * torch.randn(p.shape, generator=generator))
            elif "boft_s" in name or "modules_to_save" in name or (p.requires_grad and name.endswith("bias")):
                p += 0.3 * torch.randn(p.shape, generator=generator)
    return model


def oft_config(**options):
    peft = pytest.importorskip("peft")
    return peft.OFTConfig(**{"r": 0, "oft_block_size": 4, "target_modules": ["query", "value"], **options})


@pytest.fixture
def butterflies(monkeypatch):
    """Replace PEFT's CUDA extension, without which it computes only one butterfly factor."""
    pytest.importorskip("peft")
    from peft.tuners.boft import layer as boft

    class BlockDiagonal:
        @staticmethod
        def apply(blocks):
            return torch.stack([torch.block_diag(*factor) for factor in blocks])

    monkeypatch.setattr(boft, "get_fbd_cuda", lambda: True)
    monkeypatch.setattr(boft, "FastBlockDiag", BlockDiagonal)


OFT = {
    "exact": ({"use_cayley_neumann": False}, 0.3),
    "series": ({}, 0.005),
    "series of 8": ({"num_cayley_neumann_terms": 8}, 0.02),
    "shared": ({"use_cayley_neumann": False, "block_share": True}, 0.3),
    "one block": ({"use_cayley_neumann": False, "oft_block_size": 0, "r": 1}, 0.1),
    "constrained": ({"coft": True, "eps": 0.05}, 0.3),
    "constrained exact": ({"coft": True, "eps": 0.5, "use_cayley_neumann": False, "module_dropout": 0.1}, 0.3),
    "biases": ({"use_cayley_neumann": False, "bias": "oft_only", "modules_to_save": ["classifier"]}, 0.3),
}


@pytest.mark.parametrize(("options", "std"), OFT.values(), ids=OFT)
def test_load_adapter_reads_oft_of_peft(options, std, tmp_path):
    base = bert()
    theirs = peft_model(base, oft_config(**options), std)
    expected = theirs(TOKENS).logits
    theirs.save_pretrained(tmp_path)
    ours = load_adapter(copy.deepcopy(base), tmp_path)
    torch.testing.assert_close(ours(TOKENS).logits, expected, **TOLERANCE)
    assert (expected - base(TOKENS).logits).abs().max() > 1e-3
    methods = {type(rotation.method) for _, _, rotation in rotated_layers(ours)}
    assert methods == {Cayley}


@pytest.mark.parametrize("terms", [1, 2, 3, 4, 5, 7])
def test_load_adapter_reads_a_truncated_series_as_it_is(terms, tmp_path):
    base = bert()
    theirs = peft_model(base, oft_config(num_cayley_neumann_terms=terms), 0.2)
    theirs.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="away from a rotation"):
        ours = load_adapter(copy.deepcopy(base), tmp_path)
    torch.testing.assert_close(ours(TOKENS).logits, theirs(TOKENS).logits, **TOLERANCE)


@pytest.mark.filterwarnings("ignore:the Cayley")
def test_load_adapter_refuses_a_truncated_series_for_exact_rotations(tmp_path):
    base = bert()
    peft_model(base, oft_config(), 0.2).save_pretrained(tmp_path)
    model = rotate_(base, block_size=4, where=attention)
    with left_unchanged(model), pytest.raises(ValueError, match="not orthogonal"):
        load_adapter(model, tmp_path, name="b")


@pytest.mark.parametrize("factors", [1, 2])
def test_load_adapter_reads_boft_of_peft(factors, tmp_path, butterflies):
    peft = pytest.importorskip("peft")
    base = bert()
    config = peft.BOFTConfig(boft_block_size=4, boft_n_butterfly_factor=factors, target_modules=["query", "value"])
    theirs = peft_model(base, config)
    theirs.save_pretrained(tmp_path)
    ours = load_adapter(copy.deepcopy(base), tmp_path)
    torch.testing.assert_close(ours(TOKENS).logits, theirs(TOKENS).logits, **TOLERANCE)
    # The scale of the outputs would change the base of the other set.
    model = rotate_(copy.deepcopy(base), block_size=4, where=attention)
    with left_unchanged(model), pytest.raises(ValueError, match="scales outputs"):
        load_adapter(model, tmp_path, name="b")


def test_load_adapter_reads_boft_of_convolutions(tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base, x = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU()), torch.randn(2, 4, 5, 5)
    theirs = peft_model(base, peft.BOFTConfig(boft_block_size=6, target_modules=["0"]))
    theirs.save_pretrained(tmp_path / "boft")
    ours = load_adapter(copy.deepcopy(base), tmp_path / "boft")
    torch.testing.assert_close(ours(x), theirs(x), **TOLERANCE)
    peft_model(base, oft_config(target_modules=["0"], use_cayley_neumann=False)).save_pretrained(tmp_path / "oft")
    with pytest.raises(ValueError, match="layer '0' is a convolution"):
        load_adapter(copy.deepcopy(base), tmp_path / "oft")


def test_load_adapter_adds_a_set_of_peft(tmp_path):
    base = bert()
    theirs = peft_model(base, oft_config(use_cayley_neumann=False))
    theirs.save_pretrained(tmp_path)
    model = rotate_(copy.deepcopy(base), "exponential", block_size=4, where=attention).eval()
    load_adapter(model, tmp_path, name="theirs")
    torch.testing.assert_close(model(TOKENS).logits, theirs(TOKENS).logits, **TOLERANCE)
    use_rotation_set(model, "main")
    torch.testing.assert_close(model(TOKENS).logits, base(TOKENS).logits, **TOLERANCE)


def test_load_adapter_refuses_other_adapters_of_peft(tmp_path):
    peft = pytest.importorskip("peft")
    base = bert()
    config = peft.LoraConfig(target_modules=["query"])
    peft.get_peft_model(copy.deepcopy(base), config).save_pretrained(tmp_path / "lora")
    with left_unchanged(base), pytest.raises(ValueError, match="OFT or BOFT adapter, not 'LORA'"):
        load_adapter(base, tmp_path / "lora")
    config = oft_config(target_modules=["word_embeddings"])
    peft.get_peft_model(copy.deepcopy(base), config).save_pretrained(tmp_path / "embedding")
    with left_unchanged(base), pytest.raises(ValueError, match="oft_embedding_R"):
        load_adapter(base, tmp_path / "embedding")


WRITTEN = {
    "cayley": ("cayley", {"block_size": 4}),
    "neumann": ("neumann", {"block_size": 4}),
    "exponential": ("exponential", {"block_size": 4}),
    "lowdin": ("lowdin", {"block_size": 8}),
    "one block": ("cayley", {}),
    "shared": ("cayley", {"block_size": 4, "shared": True}),
    "constrained": (Cayley(bound=0.2), {"block_size": 4, "dropout": 0.1}),
    "blocks": ("cayley", {"blocks": 4, "where": lambda name, m: "layer.0" in name}),
    "butterfly": ("cayley", {"block_size": 4, "factors": 2}),
    "shared butterfly": ("exponential", {"block_size": 4, "factors": 2, "shared": True}),
}


@pytest.mark.parametrize(("method", "options"), WRITTEN.values(), ids=WRITTEN)
def test_save_adapter_writes_what_peft_opens(method, options, tmp_path, butterflies):
    peft = pytest.importorskip("peft")
    base = bert()
    ours = trained(base, method, **{"where": attention, **options})
    save_adapter(ours, tmp_path, format="peft")
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    torch.testing.assert_close(theirs(TOKENS).logits, ours(TOKENS).logits, **TOLERANCE)
    assert (ours(TOKENS).logits - base(TOKENS).logits).abs().max() > 1e-3
    again = load_adapter(copy.deepcopy(base), tmp_path)
    torch.testing.assert_close(again(TOKENS).logits, ours(TOKENS).logits, **TOLERANCE)
    save_adapter(ours, tmp_path, format="peft")


def test_adapters_of_half_precision_models_are_exchanged_with_peft(tmp_path):
    peft = pytest.importorskip("peft")
    base = bert().bfloat16()
    ours = trained(base, block_size=4, where=attention)
    save_adapter(ours, tmp_path, format="peft")
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    again = load_adapter(copy.deepcopy(base), tmp_path)
    assert again(TOKENS).logits.equal(ours(TOKENS).logits)
    torch.testing.assert_close(theirs(TOKENS).logits, ours(TOKENS).logits, rtol=0.05, atol=0.05)
    assert (ours(TOKENS).logits - base(TOKENS).logits).abs().max() > 0.2


def test_save_adapter_constrains_training_in_peft_alike(tmp_path):
    save_adapter(trained(bert(), Cayley(bound=0.2), block_size=4, where=attention), tmp_path, format="peft")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["coft"]
    assert config["eps"] == pytest.approx(0.4)  # 0.2·√4 blocks
    ((method, *_), *_) = [
        (rotation.method, rotation) for _, _, rotation in rotated_layers(load_adapter(bert(), tmp_path))
    ]
    assert method.bound == pytest.approx(0.2)


def test_save_adapter_for_peft_selects_only_the_rotated_layers(tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = nn.Sequential(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)), nn.Linear(10, 3)).eval()
    ours = trained(base, where=lambda name, m: name == "1", output=True)
    save_adapter(ours, tmp_path, format="peft")
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    torch.testing.assert_close(theirs(X), ours(X), **TOLERANCE)


def test_save_adapter_refuses_what_peft_cannot_express(tmp_path):
    reflection = rotate_(nn.Sequential(nn.Linear(2, 2)), "gram_schmidt", output=True)
    with torch.no_grad():
        reflection[0].parametrizations.weight[0].parameter.copy_(torch.diag(torch.tensor([1.0, -1.0])))
    mixed = rotate_(mlp(), where=lambda name, m: name == "0")
    rotate_(mixed, where=lambda name, m: name == "2", dropout=0.5)
    for model, message in (
        (trained(nn.Sequential(nn.Conv2d(3, 4, 3)), output=True), "linear layer"),
        (trained(nn.Linear(3, 4)), "linear layer"),
        (trained(mlp(), "free"), "layer '0' cannot be written in the format of PEFT: .*not orthogonal"),
        (reflection, "180° or reflects"),
        (mixed, "dropout must be the same"),
    ):
        with pytest.raises(ValueError, match=message):
            save_adapter(model, tmp_path, format="peft")
    assert not list(tmp_path.iterdir())


# save_pretrained -----------------------------------------------------------------------------------------------------


def test_save_pretrained_refuses_rotated_models_until_they_are_folded(tmp_path):
    model = trained(bert(), where=attention)
    copied = copy.deepcopy(model)
    for one in (model, copied, model.bert):
        with pytest.raises(ValueError, match=r"2 rotated layers .*save_adapter.*fold_"):
            one.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="rotated layers"):
        merge(model).save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    expected = model(TOKENS).logits
    fold_(model).save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(TOKENS).logits, expected, **TOLERANCE)
    with pytest.raises(ValueError, match="rotated layers"):  # the copy is still rotated
        copied.save_pretrained(tmp_path)


def test_save_pretrained_refuses_every_way_to_rotate(tmp_path):
    save_adapter(trained(bert(), where=attention), tmp_path)
    loaded, stochastic, wrapper = bert(), bert(), nn.Sequential(bert())
    load_adapter(loaded, tmp_path)
    Stochastic(stochastic, where=attention)
    rotate_(wrapper, where=lambda name, m: name.endswith("query"))
    for model in (loaded, stochastic, wrapper[0]):
        with pytest.raises(ValueError, match="rotated layers"):
            model.save_pretrained(tmp_path / "model")


def test_save_pretrained_refuses_decoupled_models_until_they_are_reverted(tmp_path):
    model = bert()
    hs.layers.convert_(model, where=attention)
    hs.layers.convert_(model, where=lambda name, m: name.endswith("key"))
    for one in (model, pickle.loads(pickle.dumps(model))):
        with pytest.raises(ValueError, match="3 decoupled layers plain"):
            one.save_pretrained(tmp_path)
    rotate_(hs.layers.revert_(model), where=attention)
    with pytest.raises(ValueError, match="2 rotated layers"):
        model.save_pretrained(tmp_path)
    fold_(model).save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(TOKENS).logits, model(TOKENS).logits, **TOLERANCE)


def gpt2():
    transformers = pytest.importorskip("transformers")
    size = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 30, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    return transformers.GPT2Model(transformers.GPT2Config(**size)).eval(), torch.randint(30, (2, 5))


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval(), torch.randn(2, 5, 16)


@pytest.mark.parametrize("make", [gpt2, encoder])
def test_adapter_of_fused_weights_loads_merges_and_unmerges(make, tmp_path):
    (model, inputs), (base, _) = make(), make()
    rotate_(model.requires_grad_(False), block_size=4, output_layer=None)
    perturb_(model, 0.2)
    names = [name for name, _, _ in rotated_layers(model)]
    assert [name.rpartition(".")[2] for name in names[:3]] == ["q", "k", "v"]
    save_adapter(model, tmp_path)
    load_adapter(base, tmp_path)
    assert [name for name, _, _ in rotated_layers(base)] == names

    def output(one):
        result = one(inputs)
        return getattr(result, "last_hidden_state", result).detach()

    torch.testing.assert_close(output(base), output(model), atol=0, rtol=0)
    assert (output(model) - output(make()[0])).abs().max() > 1e-2
    torch.testing.assert_close(output(merge(base)), output(model), atol=1e-5, rtol=0)
    torch.testing.assert_close(output(unmerge(base)), output(model), atol=0, rtol=0)


def test_load_adapter_names_fused_layers_that_peft_rotates_as_one(tmp_path):
    from safetensors.torch import save_file

    model, _ = gpt2()
    tensors = {"base_model.model.h.0.attn.c_attn.oft_R.weight": torch.zeros(4, 6)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "OFT", "use_cayley_neumann": false}')
    with left_unchanged(model), pytest.raises(ValueError, match=r"has no 'h\.0\.attn\.c_attn'"):
        load_adapter(model, tmp_path)


def test_merge_of_a_rotated_embedding_keeps_its_vectors():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 4))
    rotate_(model, block_size=4, embeddings=True, output_layer=None).eval()
    perturb_(model, 0.3)
    tokens = torch.tensor([[1, 5, 7]])
    before = model(tokens).detach()
    torch.testing.assert_close(merge(model)(tokens), before, atol=1e-5, rtol=0)
    torch.testing.assert_close(unmerge(model)(tokens), before, atol=0, rtol=0)


def test_save_adapter_refuses_layers_that_are_rotated_on_two_sides(tmp_path):
    model = mlp()
    hs.rotation.Equivalence(model, block_size=4)
    with pytest.raises(ValueError, match="must be rotated by `rotate_`, not 'rotated on two sides'"):
        save_adapter(model, tmp_path)
