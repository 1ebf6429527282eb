"""Conversion of transformers and U-Nets: attention, `Conv1D` and transposed convolutions."""

import copy
import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hypersphere import layers_of
from hypersphere.functions.magnitude import Ball
from hypersphere.layers import DecoupledLayer, DecoupledLinear, conversion_plan, convert_, fold_operator_, revert_
from hypersphere.rotation import fold_, rotate_

from .reference import respond


class UNetBlock(nn.Module):
    """A block of a diffusion model: downsampling, attention over positions, upsampling, and a skip connection."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.time = nn.Linear(4, 8)
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.up = nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1)
        self.out = nn.Conv2d(16, 3, 1)

    def forward(self, x, time=None):
        time = torch.linspace(-1, 1, 4, dtype=x.dtype).expand(len(x), -1) if time is None else time
        skip = self.stem(x) + self.time(time)[:, :, None, None]
        y = self.norm(self.down(skip))
        rows = y.flatten(2).mT
        y = y + self.attention(rows, rows, rows, need_weights=False)[0].mT.reshape(y.shape)
        return self.out(torch.cat([skip, self.up(y)], 1))


def gpt2(transformers):
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config), torch.randint(50, (2, 7))


def bert(transformers):
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, num_labels=3
    )
    return transformers.BertForSequenceClassification(config), torch.randint(50, (2, 7))


def llama(transformers):
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
    )
    return transformers.LlamaForCausalLM(config), torch.randint(50, (2, 7))


def vit(transformers):
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4
    )
    return transformers.ViTForImageClassification(config), torch.randn(2, 3, 8, 8)


def encoder(_):
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2), torch.randn(2, 5, 16)


def unet(_):
    return UNetBlock(), torch.randn(2, 3, 6, 6)


# The model, and the number of layers that are converted. Attention counts as four: q, k, v and the output.
MODELS = {gpt2: 8, bert: 7, llama: 7, vit: 7, encoder: 12, unet: 9}


def build(make):
    transformers = pytest.importorskip("transformers") if make not in (encoder, unet) else None
    torch.manual_seed(0)
    model, x = make(transformers)
    model = model.double().eval()
    return model, x.double() if x.is_floating_point() else x


def output(model, x):
    y = model(x)
    return getattr(y, "logits", y)


def rows_of_patches(layer, x, original):
    """The rows that a layer multiplies: patches in the order of `NeuronLayer.rows` per output position."""
    if isinstance(original, nn.ConvTranspose2d):
        # By definition: the patch of an output is what a transposed convolution with each single weight would read.
        channels, (height, width) = x.shape[1], original.kernel_size
        size = F.conv_transpose2d(x, original.weight, None, original.stride, original.padding).shape[-2:]
        patches = []
        for channel in range(channels):
            for tap in range(height * width):
                one = torch.zeros(1, 1, height, width, dtype=x.dtype)
                one.view(-1)[tap] = 1
                source = x[:, channel : channel + 1]
                patches.append(F.conv_transpose2d(source, one, None, original.stride, original.padding))
        return torch.cat(patches, 1).flatten(2).mT, size
    if isinstance(original, nn.Conv2d):
        shape = (original.kernel_size, original.dilation, original.padding, original.stride)
        return F.unfold(x, *shape).mT, original(x).shape[-2:]
    return x, None


@pytest.mark.parametrize("make", MODELS)
def test_convert_computes_the_operator_on_the_rows_of_layers_of(make):
    model, x = build(make)
    original = copy.deepcopy(model)
    rows = {layer.weight_name + str(layer.part.index): layer.rows() for layer in layers_of(original)}
    plan = conversion_plan(model)
    convert_(model, magnitude="tanh", angular="linear")
    seen = {}
    for name, module in model.named_modules():
        if isinstance(module, DecoupledLayer):
            module.register_forward_hook(lambda m, inputs, y, name=name: seen.update({name: (inputs[0], y)}))
    with torch.no_grad():
        output(model, x)
    assert len(seen) == MODELS[make], plan
    for name, (inputs, y) in seen.items():
        parent, _, suffix = name.rpartition(".")
        is_part = isinstance(original.get_submodule(parent), nn.MultiheadAttention) and suffix in "qkv"
        if is_part:
            weight = rows[f"{parent}.in_proj_weight{'qkv'.index(suffix)}"]
            bias, plain = original.get_submodule(parent).in_proj_bias.chunk(3)["qkv".index(suffix)], None
        else:
            plain = original.get_submodule(name)
            parts = [key for key in rows if key.rpartition(".")[0] == name]
            weight, bias = torch.cat([rows[key] for key in parts]), plain.bias
        patches, size = rows_of_patches(model.get_submodule(name), inputs, plain)
        expected = respond(patches, weight, "tanh", "linear")
        expected = expected if bias is None else expected + bias
        expected = expected if size is None else expected.mT.reshape(len(inputs), -1, *size)
        torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", MODELS)
def test_convert_to_the_inner_product_and_back_keeps_outputs_of_transformers(make):
    model, x = build(make)
    names, before = list(model.state_dict()), output(model, x)
    kinds = [type(module) for module in model.modules()]
    with torch.no_grad():
        fast = output(model, x)  # torch's fast path
    convert_(model, magnitude="inner_product")
    assert list(model.state_dict()) == names
    torch.testing.assert_close(output(model, x), before, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(output(model, x), fast, rtol=1e-10, atol=1e-10)
    assert fold_operator_(copy.deepcopy(model)) == MODELS[make]
    revert_(model)
    assert [type(module) for module in model.modules()] == kinds
    assert torch.equal(output(model, x), before)
    with torch.no_grad():
        assert torch.equal(output(model, x), fast)


@pytest.mark.parametrize("make", MODELS)
def test_convert_trains_and_copies_transformers(make):
    model, x = build(make)
    options = {"magnitude": "tanh", "learn_radius": "layer", "angular": "sigmoid", "learn_k": "filter"}
    convert_(model.train(), scale="keep", calibration=x, **options)
    output(model, x).square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    # A table that is not looked up, and k's gradients behind saturated activations, may be zero.
    assert all(grad is None or torch.isfinite(grad).all() for grad in gradients.values())
    learned = [name for name in gradients if name.endswith(("log_k", "log_radius"))]
    assert len(learned) == 2 * MODELS[make]
    assert all(gradients[name] is not None for name in learned)
    other = copy.deepcopy(model.eval())
    expected = output(model, x)
    assert torch.equal(output(other, x), expected)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(output(other, x), expected), "a copy must not read the weights of the original"
    fresh, _ = build(make)
    convert_(fresh, **options)
    fresh.load_state_dict(other.state_dict())


def test_fold_operator_writes_linear_responses_into_weights_of_every_order():
    for make in (gpt2, encoder, unet):
        model, x = build(make)
        convert_(model, magnitude="linear")
        before = output(model, x)
        fold_operator_(model)
        assert not any(isinstance(module, DecoupledLayer) for module in model.modules())
        torch.testing.assert_close(output(model, x), before, rtol=1e-9, atol=1e-9)


ATTENTION_SETTINGS = [
    {},
    {"batch_first": True, "bias": False},
    {"kdim": 6, "vdim": 10},
    {"add_bias_kv": True, "add_zero_attn": True},
]


@pytest.mark.parametrize("settings", ATTENTION_SETTINGS, ids=["fused", "no bias", "separate", "extra positions"])
@pytest.mark.parametrize("is_batched", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_converted_attention_accepts_the_arguments_of_torch(settings, is_batched, need_weights):
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(8, 2, dtype=torch.float64, **settings)
    if plain.in_proj_bias is not None:
        nn.init.normal_(plain.in_proj_bias)
    lead = (3,) if is_batched else ()
    sizes = (8, plain.kdim, plain.vdim)
    query, key, value = (torch.randn(*lead, n, d, dtype=torch.float64) for n, d in zip((4, 5, 5), sizes, strict=True))
    if is_batched and not plain.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    heads = 6 if is_batched else 2
    padding = torch.zeros(*lead, 5, dtype=torch.bool)
    padding[..., -1] = True
    masks = [
        {},
        {"attn_mask": torch.ones(4, 5, dtype=torch.bool).triu(2)},
        {"attn_mask": torch.randn(heads, 4, 5, dtype=torch.float64), "average_attn_weights": False},
        {"key_padding_mask": padding, "attn_mask": torch.ones(4, 5, dtype=torch.bool).triu(2), "is_causal": True},
        {"key_padding_mask": torch.randn(*lead, 5, dtype=torch.float64)},
    ]
    converted = convert_(copy.deepcopy(plain), magnitude="inner_product", where=lambda *_: True)
    for options in masks:
        expected, weights = plain(query, key, value, need_weights=need_weights, **options)
        y, ours = converted(query, key, value, need_weights=need_weights, **options)
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
        assert (ours is None) == (weights is None)
        if weights is not None:
            torch.testing.assert_close(ours, weights, rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match=r"^attn_mask must be a causal mask if is_causal=True, not None$"):
        converted(query, key, value, is_causal=True)
    with pytest.raises(ValueError, match=r"^attn_mask must be a mask of bools or floating-point numbers, not"):
        converted(query, key, value, attn_mask=torch.zeros(4, 5, dtype=torch.long))


def test_converted_attention_drops_out_weights_in_training():
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    x = torch.randn(2, 5, 8)
    converted = convert_(copy.deepcopy(plain), magnitude="inner_product", where=lambda *_: True)
    torch.manual_seed(1)
    expected = plain(x, x, x)
    torch.manual_seed(1)
    for ours, theirs in zip(converted(x, x, x), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    converted.eval()
    assert torch.equal(converted(x, x, x)[0], converted(x, x, x)[0])


def test_converted_encoder_ignores_padding_in_the_fast_path_of_torch():
    model, x = build(encoder)
    padding = torch.tensor([[False, False, False, True, True], [False] * 5])
    convert_(model, magnitude="tanh")
    with torch.no_grad():
        y = model(x, src_key_padding_mask=padding)
        changed = x.clone()
        changed[0, 3:] = 7
        assert torch.equal(y[0, :3], model(changed, src_key_padding_mask=padding)[0, :3])
    expected = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    model.load_state_dict(revert_(model).state_dict())
    assert all(layer.activation_relu_or_gelu and "_fast_path" not in vars(layer) for layer in model.layers)
    assert model.use_nested_tensor is True


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"stride": 2, "padding": 1, "output_padding": 1}, {"dilation": 2}])
def test_converted_transposed_convolutions_equal_those_of_torch_for_the_inner_product(dims, groups, settings):
    torch.manual_seed(0)
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    plain = kind(4, 6, 3, groups=groups, dtype=torch.float64, **settings)
    x = torch.randn(2, 4, *[4, 3, 2][:dims], dtype=torch.float64)
    converted = convert_(copy.deepcopy(plain), magnitude="inner_product", where=lambda *_: True)
    torch.testing.assert_close(converted(x), plain(x), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(converted(x[0]), plain(x[0]), rtol=1e-10, atol=1e-12)
    if "stride" in settings:
        size = [n - 1 for n in plain(x).shape[2:]]  # without output_padding
        torch.testing.assert_close(converted(x, output_size=size), plain(x, output_size=size), rtol=1e-10, atol=1e-12)
    decoupled = convert_(copy.deepcopy(plain), magnitude="tanh", angular="linear", where=lambda *_: True)
    if dims == 1:
        assert torch.autograd.gradcheck(decoupled, (x[:1].requires_grad_(),))
    with pytest.raises(ValueError, match=r"^input must be a tensor with"):
        decoupled(x[:, :3])


def test_transposed_convolutions_crop_if_the_padding_is_larger_than_the_kernel():
    plain = nn.ConvTranspose1d(2, 3, 1, padding=1, dtype=torch.float64)
    x = torch.randn(1, 2, 6, dtype=torch.float64)
    converted = convert_(copy.deepcopy(plain), magnitude="inner_product", where=lambda *_: True)
    torch.testing.assert_close(converted(x), plain(x))


def test_converted_attention_and_conv1d_can_be_rotated_and_folded():
    for make in (gpt2, encoder):
        model, x = build(make)
        convert_(model, magnitude="tanh")
        before = output(model, x)
        rotate_(model, output_layer=None if make is encoder else "auto", spread=0.1)
        rotated = output(model, x)
        assert not torch.allclose(rotated, before)
        with pytest.raises(ValueError, match=r"^model must have no parametrised decoupled layers"):
            revert_(model)
        torch.testing.assert_close(output(fold_(model), x), rotated, rtol=1e-9, atol=1e-9)
        revert_(model)


def test_convert_moves_fixed_tensors_of_attention_with_the_module():
    attention = nn.MultiheadAttention(4, 2)
    convert_(attention, magnitude=Ball(radius=torch.tensor(0.5)), where=lambda *_: True)
    assert attention.to("meta").q.magnitude.radius.is_meta
    assert attention.decay_free_parameters == ("in_proj_weight",)
    assert [layer.uses_weight_norm for layer in layers_of(attention, output_layer=None)] == [False] * 4


class Unused(nn.Module):
    """A model that does not call one of its layers."""

    def __init__(self, body):
        super().__init__()
        self.body, self.unused, self.last = body, nn.Linear(16, 2).double(), nn.Linear(16, 2).double()

    def forward(self, x):
        return self.last(self.body(x))


def test_convert_failure_leaves_attention_unchanged():
    model, x = build(encoder)
    before = output(model, x)
    names = list(vars(model.layers[0].self_attn))
    with pytest.raises(ValueError, match="learn_radius must be None for Sphere"):
        convert_(model, learn_radius="layer")
    with pytest.raises(ValueError, match="does not reach layer"):
        convert_(Unused(model), scale="keep", calibration=x)
    assert list(vars(model.layers[0].self_attn)) == names
    assert not any(isinstance(module, DecoupledLinear) for module in model.modules())
    assert torch.equal(output(model, x), before)
    assert model.layers[0].activation_relu_or_gelu


def test_converted_attention_replicas_use_their_own_weights(monkeypatch):
    # `nn.DataParallel` copies the parameters to other devices. Here it "copies" them to the CPU, multiplied by 1 and 2.
    module = importlib.import_module("torch.nn.parallel.replicate")
    monkeypatch.setattr(module, "_get_device_index", lambda device, _: device)
    monkeypatch.setattr(
        module,
        "_broadcast_coalesced_reshape",
        lambda tensors, devices, detach=False: [[(1 + device) * t for t in tensors] for device in devices],
    )
    attention, x = nn.MultiheadAttention(4, 2, batch_first=True), torch.randn(2, 3, 4)
    nn.init.normal_(attention.in_proj_bias)
    # An unweighted h depends on the direction of w only, so use one that depends on the norm of w, too.
    convert_(attention, magnitude="tanh", weighting="linear", learn_k="layer", angular="sigmoid", where=lambda *_: True)
    for device, replica in enumerate(module.replicate(attention, [0, 1])):
        expected = copy.deepcopy(attention)
        with torch.no_grad():
            for parameter in expected.parameters():
                parameter *= 1 + device
        torch.testing.assert_close(replica(x, x, x)[0], expected(x, x, x)[0])
    assert attention.q._attention[0] is attention


def test_converted_attention_compiles():
    attention, x = nn.MultiheadAttention(4, 2, batch_first=True), torch.randn(2, 3, 4)
    convert_(attention, magnitude="tanh", where=lambda *_: True)
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, x, x)[0], attention(x, x, x)[0])


def test_save_pretrained_refuses_a_decoupled_vit_whose_state_dict_restores_it(tmp_path):
    model, x = build(vit)
    plain = copy.deepcopy(model)
    expected = output(convert_(model, magnitude="tanh"), x)
    with pytest.raises(
        ValueError, match=r"^model must be reverted before save_pretrained.*its 7 decoupled layers plain"
    ):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    # The two ways that the message names.
    other = convert_(copy.deepcopy(plain), magnitude="tanh")
    other.load_state_dict(model.state_dict())
    assert torch.equal(output(other, x), expected)
    revert_(model).save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert torch.equal(output(again, x), output(plain, x))
