"""`rotate_` on models of other libraries, and on weights that are not matrices of rows."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hypersphere as hs
import oracle
from hypersphere.rotation import (
    BlockLayout,
    InputRotation,
    Rotation,
    Stochastic,
    fold_,
    orthogonality_error,
    refine_neurons,
    rotate_,
    rotated_layers,
    rotation_parameters,
    rotation_states,
    use_rotation_set,
)

from .samples import perturb_

SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
WORDS = {"vocab_size": 20, "max_position_embeddings": 8, "pad_token_id": None}


# Models: each function returns a model, its output as a function of the model, the names that are rotated in its first
# block, and layers that are left unchanged with a part of the reason. -------------------------------------------------


def tokens():
    return torch.arange(12).reshape(2, 6)


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=20, n_positions=8)
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    names = ["attn.c_attn.q", "attn.c_attn.k", "attn.c_attn.v", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    left = {"transformer.wte": "output layer", "transformer.wpe": "an embedding"}
    return (
        transformers.GPT2LMHeadModel(config),
        lambda m: m(tokens()).logits,
        [f"transformer.h.0.{n}" for n in names],
        left,
    )


def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(**SIZES, **WORDS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    names = [f"attention.self.{n}" for n in ("query", "key", "value")]
    names += ["attention.output.dense", "intermediate.dense", "output.dense"]
    names = [f"bert.encoder.layer.0.{n}" for n in names] + ["cls.predictions.transform.dense"]
    left = {"bert.embeddings.word_embeddings": "output layer", "bert.embeddings.position_embeddings": "an embedding"}
    return transformers.BertForMaskedLM(config), lambda m: m(tokens()).logits, names, left


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**SIZES, **WORDS, num_key_value_heads=1)
    names = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    left = {"model.embed_tokens": "an embedding", "lm_head": "output layer"}
    return (
        transformers.LlamaForCausalLM(config),
        lambda m: m(tokens()).logits,
        [f"model.layers.0.{n}" for n in names],
        left,
    )


def vit():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(**SIZES, image_size=8, patch_size=4, num_labels=3)
    x = torch.randn(4, 3, 8, 8)
    left = {"vit.embeddings.position_embeddings": "not a known kind", "classifier": "output layer"}
    return transformers.ViTForImageClassification(config), lambda m: m(x).logits, None, left


def mixtral():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(**SIZES, **WORDS, num_key_value_heads=2, num_local_experts=3)
    names = [*(f"self_attn.{n}_proj" for n in "qkvo"), "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    left = {"model.layers.0.mlp.gate.weight": "not a known kind", "lm_head": "output layer"}
    return (
        transformers.MixtralForCausalLM(config),
        lambda m: m(tokens()).logits,
        [f"model.layers.0.{n}" for n in names],
        left,
    )


class Encoder(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=dropout)
        self.body = nn.TransformerEncoder(layer, 2)
        self.classifier = nn.Linear(8, 3)

    def forward(self, x, **masks):
        return self.classifier(self.body(x, **masks))


def encoder():
    x = torch.randn(2, 5, 8)
    names = [
        f"body.layers.{i}.{n}"
        for i in range(2)
        for n in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.out_proj", "linear1", "linear2")
    ]
    return Encoder(), lambda m: m(x), names, {"classifier": "output layer"}


def graph():
    geometric = pytest.importorskip("torch_geometric.nn")

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = geometric.GCNConv(8, 12), geometric.GCNConv(12, 8)
            self.classifier = nn.Linear(8, 3)

        def forward(self, x, edges):
            return self.classifier(self.second(F.relu(self.first(x, edges)), edges))

    x, edges = torch.randn(6, 8), torch.tensor([[0, 1, 2, 3, 4, 5, 0], [1, 2, 3, 4, 5, 0, 3]])
    return Graph(), lambda m: m(x, edges), ["first.lin", "second.lin"], {"classifier": "output layer"}


class Block(nn.Module):
    """A block of a diffusion model: convolutions, self-attention over the pixels, and an upsampling convolution."""

    def __init__(self):
        super().__init__()
        self.into, self.norm = nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.time = nn.Linear(4, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2, groups=2)
        self.out = nn.Conv2d(8, 4, 1)

    def forward(self, x, time):
        h = F.silu(self.norm(self.into(x))) + self.time(time)[:, :, None, None]
        pixels = h.flatten(2).mT
        h = h + self.attention(pixels, pixels, pixels, need_weights=False)[0].mT.reshape(h.shape)
        return self.out(self.up(h))


def diffusion():
    x, time = torch.randn(2, 4, 4, 4), torch.randn(2, 4)
    names = ["into", "time", "attention.q", "attention.k", "attention.v", "attention.out_proj", "up", "out"]
    return Block(), lambda m: m(x, time), names, {}


MODELS = [gpt2, bert, llama, vit, mixtral, encoder, graph, diffusion]


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}], ids=["float", "int8"])
def test_rotate_starts_trains_and_folds_models_of_other_libraries(make, options, capsys):
    model, run, names, left = make()
    model.train()
    plain, before = copy.deepcopy(model), run(model).detach()
    rotate_(model, block_size=4, output_layer=None if make is diffusion else "auto", report=True, **options)
    report = capsys.readouterr().out
    rotated = {name: rotation for name, _, rotation in rotated_layers(model)}
    assert names is None or list(rotated) == names
    assert all(f"\n  {name} " in report for name in rotated)
    assert all(
        any(line.startswith(f"  {n}: ") and why in line for line in report.split("\n")) for n, why in left.items()
    )
    after = run(model).detach()
    if options:
        assert (after - before).norm() < 2e-2 * before.norm()
    else:
        torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-4)
    layers = [layer for layer in hs.layers_of(model) if layer.name in rotated]
    assert len(layers) == len(rotated)
    energies = [oracle.energy(rows, 2) for layer in layers for rows in layer.row_sets().detach().double().numpy()]

    target = torch.randn_like(before)
    trained = rotation_parameters(model)
    optimizer = torch.optim.Adam(trained, lr=0.02)
    losses = []
    for _ in range(6):
        loss = F.mse_loss(run(model), target)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in trained)
        optimizer.step()
    assert losses[-1] < losses[0]
    assert orthogonality_error(model) < 1e-5
    assert all(state.energy_drift < 1e-4 for state in rotation_states(model).values())
    moved = [oracle.energy(rows, 2) for layer in layers for rows in layer.row_sets().detach().double().numpy()]
    assert moved == pytest.approx(energies, rel=1e-4)

    y = run(model).detach()
    fold_(model)
    torch.testing.assert_close(run(model), y, atol=1e-5, rtol=1e-4)
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    for (name, p), (plain_name, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert (name, p.shape, p.dtype, p.requires_grad) == (plain_name, q.shape, q.dtype, q.requires_grad)
        assert p.stride() == q.stride()


# Each kind of weight against explicit products ------------------------------------------------------------------------


def block_matrix(rotation, expert=0, experts=1):
    """Return R of one layer or expert as a d×d matrix."""
    blocks = rotation.matrices().reshape(experts, -1, *rotation.matrices().shape[-2:])
    return torch.block_diag(*blocks[expert])


@pytest.mark.parametrize("side", ["weight", "input"])
def test_rotate_turns_conv1d_like_a_linear_layer_with_the_transposed_weight(side):
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D(6, 8)
    linear, x = nn.Linear(8, 6), torch.randn(2, 5, 8, requires_grad=True)
    with torch.no_grad():
        conv1d.bias.normal_()
        linear.weight.copy_(conv1d.weight.T)
        linear.bias.copy_(conv1d.bias)
    results = []
    for layer in (conv1d, linear):
        rotate_(layer, block_size=4, side=side, output=True)
        perturb_(layer)
        y = layer(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *rotation_parameters(layer), layer.bias])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    y = conv1d(x)
    assert fold_(conv1d).weight.is_contiguous()
    torch.testing.assert_close(conv1d(x), y, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("side", ["weight", "input", "auto"])
def test_rotate_gives_each_part_of_fused_attention_its_own_rotation(side):
    model = gpt2()[0]
    torch_attention = nn.MultiheadAttention(8, 2)
    fused = model.transformer.h[0].attn.c_attn
    weights = [fused.weight.detach().T.clone(), torch_attention.in_proj_weight.detach().clone()]
    for module in (model, torch_attention):
        rotate_(module, block_size=4, side=side, output_layer="transformer.wte" if module is model else None)
        perturb_(module)
    rotations = [
        [r for name, _, r in rotated_layers(model) if "c_attn" in name],
        [r for _, m, r in rotated_layers(torch_attention) if m is torch_attention],
    ]
    rotated = [fused.weight.T, torch_attention.in_proj_weight]
    for v, w, parts in zip(weights, rotated, rotations, strict=True):
        expected = [rows @ block_matrix(r).T for rows, r in zip(v.chunk(3), parts, strict=True)]
        torch.testing.assert_close(w, torch.cat(expected), atol=1e-5, rtol=0)
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(fused(x), x @ fused.weight + fused.bias, atol=1e-5, rtol=0)
    q = torch.autograd.grad(
        torch_attention.in_proj_weight[:8].sum(), [r.parameter for r in rotations[1]], allow_unused=True
    )
    assert q[0].abs().sum() > 0
    assert all(gradient is None or not gradient.any() for gradient in q[1:])


class Experts(nn.Module):
    """Fused experts, stored as (experts, in, out) and (experts, out, in)."""

    def __init__(self):
        super().__init__()
        self.num_experts, self.hidden_size = 3, 8
        self.up_proj, self.down_proj = nn.Parameter(torch.randn(3, 8, 12)), nn.Parameter(torch.randn(3, 8, 12))

    def forward(self, x):
        return sum(F.linear(F.relu(x @ self.up_proj[i]), self.down_proj[i]) for i in range(3))


@pytest.mark.parametrize(
    "options", [{}, {"block_size": 4}, {"block_size": 2, "factors": 2}, {"blocks": 2, "shared": True}], ids=repr
)
def test_rotate_gives_each_expert_its_own_rotation(options):
    model = Experts()
    up = model.up_proj.detach().clone()
    rotate_(model, output_layer=None, **options)
    perturb_(model)
    ((_, _, rotation), (_, _, other)) = rotated_layers(model)
    assert (rotation.part.orientation, other.part.orientation) == ("columns", "rows")
    layers = options.get("factors", 1)
    for expert in range(3):
        alone = nn.Linear(8, 12, bias=False)
        with torch.no_grad():
            alone.weight.copy_(up[expert].T)
        rotate_(alone, output=True, **options)
        free = rotation.parameter.detach()
        if not options.get("shared"):
            free = free.reshape(layers, 3, -1, *free.shape[-1:])[:, expert].reshape_as(rotation_parameters(alone)[0])
        with torch.no_grad():
            rotation_parameters(alone)[0].copy_(free)
        torch.testing.assert_close(model.up_proj[expert].T, alone.weight, atol=1e-5, rtol=1e-5)
    x = torch.randn(2, 8)
    y = model(x)
    for keep in (True, False):
        torch.testing.assert_close(fold_(model, keep=keep)(x), y, atol=1e-4, rtol=1e-5)
    assert list(model._parameters) == ["up_proj", "down_proj"]


def test_rotate_refines_and_normalizes_the_neurons_of_each_expert():
    model = rotate_(Experts(), output_layer=None, normalize=True, refine="mhe", refine_steps=3)
    for layer in hs.layers_of(model, output_layer=None):
        torch.testing.assert_close(layer.rows().norm(dim=1), torch.ones(len(layer.rows())))


@pytest.mark.parametrize("layer", [nn.Conv2d(6, 36, 3, groups=3), nn.ConvTranspose2d(6, 36, 3, groups=3)])
def test_rotate_refines_each_group_of_a_convolution_separately(layer):
    (groups,) = (one.row_sets().detach().clone() for one in hs.layers_of(layer))
    rotate_(layer, output_layer=None, refine="half_space_mhe", refine_steps=5)
    (refined,) = (one.row_sets() for one in hs.layers_of(layer))
    for one, other in zip(groups, refined, strict=True):
        assert (other - one).abs().max() > 1e-3
        torch.testing.assert_close(other, refine_neurons(one, "half_space_mhe", steps=5), atol=1e-6, rtol=1e-5)


def test_rotate_leaves_groups_of_one_neuron_as_they_are():
    layer = nn.Conv2d(6, 6, 3, groups=6)
    weight = layer.weight.detach().clone()
    rotate_(layer, output_layer=None, refine="mhe", refine_steps=3)
    torch.testing.assert_close(layer.weight, weight)


@pytest.mark.parametrize("groups", [1, 2])
def test_rotate_turns_the_filters_of_transposed_convolutions(groups):
    layer = nn.ConvTranspose2d(4, 6, (2, 3), groups=groups)
    v = layer.weight.detach().clone()
    rotate_(layer, blocks=2, output_layer=None)
    perturb_(layer)
    ((_, _, rotation),) = rotated_layers(layer)
    r, w, channels = block_matrix(rotation), layer.weight, 4 // groups
    for group in range(groups):
        rows = slice(group * channels, (group + 1) * channels)
        for out in range(6 // groups):
            torch.testing.assert_close(w[rows, out].flatten(), r @ v[rows, out].flatten(), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match=rf"blocks must be a divisor of {channels}, the channels of 'weight'"):
        rotate_(fold_(layer), blocks=8, output_layer=None)


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTMCell, 4), (nn.GRUCell, 3), (nn.RNNCell, 1)])
def test_rotate_turns_each_gate_of_recurrent_cells(kind, gates):
    cell, x = kind(4, 6), torch.randn(2, 4)
    v = cell.weight_ih.detach().clone()
    plain = copy.deepcopy(cell)
    rotate_(cell, output_layer=None)
    first = lambda result: result[0] if isinstance(result, tuple) else result  # noqa: E731
    torch.testing.assert_close(first(cell(x)), first(plain(x)), atol=1e-6, rtol=0)
    perturb_(cell)
    rotations = [r for _, _, r in rotated_layers(cell) if r.part.parameter == "weight_ih"]
    expected = [rows @ block_matrix(r).T for rows, r in zip(v.chunk(gates), rotations, strict=True)]
    torch.testing.assert_close(cell.weight_ih, torch.cat(expected), atol=1e-5, rtol=0)
    y = first(cell(x))
    torch.testing.assert_close(first(fold_(cell)(x)), y, atol=1e-6, rtol=0)
    assert list(cell._parameters) == list(plain._parameters)


@pytest.mark.parametrize("options", [{}, {"block_size": 2}, {"quantize": "int8"}], ids=repr)
def test_rotate_turns_embeddings_on_request(options):
    model = nn.Sequential(nn.Embedding(30, 6, padding_idx=0), nn.Linear(6, 4), nn.Linear(4, 2))
    rotate_(copy.deepcopy(model))
    rotate_(model, embeddings=True, **options)
    assert [name for name, _, _ in rotated_layers(model)] == ["0", "1"]
    perturb_(model)
    few, many = torch.tensor([[1, 2, 0], [2, 29, 5]]), torch.arange(60) % 30
    for index in (few, many, torch.tensor(3)):
        torch.testing.assert_close(model[0](index), model[0].weight[index], atol=1e-6, rtol=1e-5)
    free = rotation_parameters(model)[0]
    (ours,) = torch.autograd.grad(model[0](few).square().sum() + model[0](few)[0, 0, 0], free)
    (expected,) = torch.autograd.grad(model[0].weight[few].square().sum() + model[0].weight[1, 0], free)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)
    y = model(few)
    torch.testing.assert_close(fold_(model)(few), y, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{"padding_idx": 1}, {"scale_grad_by_freq": True}, {}], ids=repr)
def test_rotated_embedding_has_the_gradient_of_torch_for_any_number_of_tokens(options):
    """The few tokens are rotated after they are looked up; reading the weight first rotates all vectors."""
    layer, tokens = nn.Embedding(30, 6, **options), torch.tensor([[1, 2, 2], [7, 1, 5]])
    with torch.no_grad():
        layer.weight[1] = 1.0  # a padding vector that is not zero, as in loaded weights
    rotate_(layer, embeddings=True, output_layer=None)
    perturb_(layer)
    (free,) = rotation_parameters(layer)
    settings = (layer.padding_idx, None, 2.0, layer.scale_grad_by_freq)
    (expected,) = torch.autograd.grad(torch.nn.functional.embedding(tokens, layer.weight, *settings).pow(3).sum(), free)
    (gradient,) = torch.autograd.grad(layer(input=tokens).pow(3).sum(), free)
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-5)


# The forward pass ----------------------------------------------------------------------------------------------------


def test_rotated_layers_take_their_input_by_keyword():
    x = torch.randn(3, 8)
    linear, conv1d = nn.Linear(8, 6), pytest.importorskip("transformers.pytorch_utils").Conv1D(6, 8)
    for layer, name in ((linear, "input"), (conv1d, "x")):
        rotate_(layer, block_size=4, output_layer=None)
        perturb_(layer)
        assert torch.equal(layer(**{name: x}), layer(x))


@pytest.mark.parametrize("mask", [False, True])
def test_rotated_encoder_gives_the_same_output_on_the_fast_path_of_torch(mask, monkeypatch):
    calls, plain = [], torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *a: calls.append(1) or plain(*a))
    model, x = Encoder(dropout=0.1).eval(), torch.randn(3, 5, 8)
    rotate_(model, block_size=4)
    perturb_(model)
    masks = {"src_key_padding_mask": torch.arange(5) >= torch.tensor([[5], [3], [2]])} if mask else {}
    with torch.no_grad():
        fast = model(x, **masks)
        assert len(calls) == 2  # one per layer
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            slow = model(x, **masks)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        keep = ~masks["src_key_padding_mask"] if mask else torch.ones(3, 5, dtype=torch.bool)
        torch.testing.assert_close(fast[keep], slow[keep], atol=1e-5, rtol=1e-4)
        folded = fold_(copy.deepcopy(model))(x, **masks)
    torch.testing.assert_close(fast[keep], folded[keep], atol=1e-5, rtol=1e-4)


def test_modules_that_read_their_weight_several_times_rotate_it_once(monkeypatch):
    calls, forward = [], Rotation.forward
    monkeypatch.setattr(Rotation, "forward", lambda self, v: calls.append(self.layer_name) or forward(self, v))
    attention, x = rotate_(nn.MultiheadAttention(8, 2, batch_first=True), output_layer=None), torch.randn(2, 3, 8)
    attention(x, x, x)
    assert sorted(calls) == ["k", "out_proj", "q", "v"]
    calls.clear()
    rotate_(experts := Experts(), output_layer=None)
    experts(x)
    assert sorted(calls) == ["down_proj", "up_proj"]


def test_rotated_attention_can_be_copied_exported_and_traced():
    attention, x = rotate_(nn.MultiheadAttention(8, 2, batch_first=True), output_layer=None), torch.randn(2, 3, 8)
    perturb_(attention)
    y = attention(x, x, x)[0]
    other = copy.deepcopy(attention)
    traced = torch.jit.trace(attention, (x, x, x), check_trace=False)
    torch.testing.assert_close(traced(x, x, x)[0], y, atol=1e-5, rtol=1e-5)
    exported = torch.export.export(attention, (x, x, x)).module()
    torch.testing.assert_close(exported(x, x, x)[0], y, atol=1e-5, rtol=1e-5)
    fold_(attention)
    torch.testing.assert_close(other(x, x, x)[0], y, atol=0, rtol=0)


# Sets of rotations, state dicts, Stochastic, InputRotation -----------------------------------------------------------


def test_rotation_sets_and_state_dicts_of_fused_weights():
    model, run, _, _ = mixtral()
    rotate_(model, block_size=2)
    start = run(model).detach()
    use_rotation_set(model, "other", create=True)
    perturb_(model)
    changed = run(model).detach()
    use_rotation_set(model, "main")
    perturb_(model)
    use_rotation_set(model, "other", create=True)
    state = copy.deepcopy(model.state_dict())
    twin = mixtral()[0]
    rotate_(twin, block_size=2)
    use_rotation_set(twin, "other", create=True)
    twin.load_state_dict(state)
    assert torch.equal(run(twin), run(model))
    assert (changed - start).abs().max() > 1e-4


@pytest.mark.parametrize("make", [gpt2, mixtral, encoder, diffusion])
def test_stochastic_rotates_and_folds_parts_of_fused_weights(make):
    model, run, names, _ = make()
    before = run(model).detach()
    layers = [layer for layer in hs.layers_of(model) if layer.name in names]
    energies = [oracle.energy(rows, 2) for layer in layers for rows in layer.row_sets().detach().double().numpy()]
    options = {"output_layer": None} if make is diffusion else {}
    stochastic = Stochastic(model, 0.5, every=2, generator=torch.Generator().manual_seed(0), **options)
    torch.testing.assert_close(run(model), before, atol=1e-5, rtol=1e-4)
    for _ in range(4):
        perturb_(model, 0.1)
        y = run(model).detach()
        stochastic.step()
        torch.testing.assert_close(run(model), y, atol=1e-5, rtol=1e-4)
    assert (y - before).abs().max() > 1e-4
    fold_(model)
    moved = [oracle.energy(rows, 2) for layer in layers for rows in layer.row_sets().detach().double().numpy()]
    assert moved == pytest.approx(energies, rel=1e-4)


@pytest.mark.parametrize("options", [{"blocks": 2}, {"block_size": 3}], ids=repr)
def test_input_rotation_has_blocks(options):
    layer, x = nn.Linear(6, 9), torch.randn(2, 4, 6)
    v = layer.weight.detach().clone()
    wrapped = InputRotation(layer, "gram_schmidt", **options)
    assert wrapped.rotation.layout == BlockLayout(6, 2)
    perturb_(wrapped)
    y = wrapped(x)
    torch.testing.assert_close(y, x @ (v @ block_matrix(wrapped.rotation).T).T + layer.bias, atol=1e-5, rtol=0)
    assert rotation_states(wrapped)[""].energy_drift < 1e-5
    torch.testing.assert_close(wrapped.fold()(x), y, atol=1e-5, rtol=0)


def test_input_rotation_rejects_blocks_that_do_not_fit():
    with pytest.raises(ValueError, match="block_size must be None or a divisor of 6, the length of a row"):
        InputRotation(nn.Linear(6, 9), block_size=4)
    with pytest.raises(ValueError, match="blocks must be a divisor of 6"):
        InputRotation(nn.Linear(6, 9), blocks=4)
