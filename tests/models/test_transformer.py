"""The transformer equals a second implementation in NumPy, and its normalised form stays on the sphere."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import spectral_norm

import hypersphere as hs
from hypersphere.layers import DecoupledLinear
from hypersphere.models import MODELS, SphereTransformer, checkpoint_activations_

KINDS = ["plain", "normalized"]
every_kind = pytest.mark.parametrize("kind", KINDS)
SMALL = {"dim": 12, "depth": 2, "heads": 3, "mlp_dim": 10}


def text_model(kind="normalized", **options):
    return SphereTransformer(**{**SMALL, "vocabulary": 7, "context": 9, "kind": kind, **options})


def image_model(kind="normalized", **options):
    return SphereTransformer(
        **{**SMALL, "image_size": (4, 6), "patch_size": 2, "in_channels": 2, "kind": kind, **options}
    )


@torch.no_grad()
def with_random_parameters(model):
    """Return the model in float64 with parameters unlike the initial ones: unequal scales, weights of any norm."""
    for parameter in model.double().parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    return model


# --- the second implementation: loops over tokens and heads, and complex numbers for rotations


class Reference:
    """The equations of the specification, for one sequence at a time."""

    def __init__(self, model, kind, dim, heads):
        self.weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
        self.kind, self.dim, self.heads = kind, dim, heads
        self.depth = 1 + max(int(name.split(".")[1]) for name in self.weights if name.startswith("blocks"))

    def scale(self, name, init, stored_at):
        return self.weights[f"{name}.value"] * (init / stored_at)

    def norm(self, x):
        return x / np.sqrt(np.sum(x * x))

    def rms_norm(self, x, name):
        return x / np.sqrt(np.mean(x * x) + np.finfo(np.float64).eps) * self.weights[f"{name}.weight"]

    def rotated(self, x, position):
        half = len(x) // 2
        pairs = np.array([complex(x[2 * i], x[2 * i + 1]) for i in range(half)])
        turned = [z * np.exp(1j * position * 10000 ** (-2 * i / len(x))) for i, z in enumerate(pairs)]
        return np.array([part for z in turned for part in (z.real, z.imag)])

    def attention(self, name, states, *, causal, rotary):
        w, size = self.weights, self.dim // self.heads
        mixed = np.zeros((len(states), self.dim))
        for head in range(self.heads):
            rows = slice(head * size, (head + 1) * size)
            q, k, v = ([w[f"{name}.{one}.weight"][rows] @ h for h in states] for one in "qkv")
            if rotary:
                q, k = ([self.rotated(x, t) for t, x in enumerate(vectors)] for vectors in (q, k))
            factor = 1 / np.sqrt(size)
            if self.kind == "normalized":
                s_qk = self.scale(f"{name}.s_qk", 1, 1 / np.sqrt(self.dim))[rows]
                q, k = ([s_qk * self.norm(x) for x in vectors] for vectors in (q, k))
                factor = np.sqrt(size)
            for t in range(len(states)):
                seen = range(t + 1 if causal else len(states))
                weights = np.exp([factor * (q[t] @ k[other]) for other in seen])
                mixed[t, rows] = sum(weight * v[other] for weight, other in zip(weights, seen, strict=True))
                mixed[t, rows] /= weights.sum()
        return [w[f"{name}.o.weight"] @ m for m in mixed]

    def mlp(self, name, h):
        u, v = self.weights[f"{name}.up.weight"] @ h, self.weights[f"{name}.gate.weight"] @ h
        if self.kind == "normalized":
            u = self.scale(f"{name}.s_u", 1, 1) * u
            v = self.scale(f"{name}.s_v", 1, 1) * np.sqrt(self.dim) * v
        return self.weights[f"{name}.down.weight"] @ (u * v / (1 + np.exp(-v)))

    def blocks(self, states, **options):
        for index in range(self.depth):
            name = f"blocks.{index}"
            if self.kind == "plain":
                inputs = [self.rms_norm(h, f"{name}.attention_norm") for h in states]
                updates = self.attention(f"{name}.attention", inputs, **options)
                states = [h + update for h, update in zip(states, updates, strict=True)]
                states = [h + self.mlp(f"{name}.mlp", self.rms_norm(h, f"{name}.mlp_norm")) for h in states]
                continue
            alpha_a = abs(self.scale(f"{name}.alpha_attention", 0.05, 1 / np.sqrt(self.dim)))
            alpha_m = abs(self.scale(f"{name}.alpha_mlp", 0.05, 1 / np.sqrt(self.dim)))
            updates = self.attention(f"{name}.attention", states, **options)
            states = [self.norm(h + alpha_a * (self.norm(up) - h)) for h, up in zip(states, updates, strict=True)]
            states = [self.norm(h + alpha_m * (self.norm(self.mlp(f"{name}.mlp", h)) - h)) for h in states]
        return [self.rms_norm(h, "norm") for h in states] if self.kind == "plain" else states

    def logits(self, feature):
        scale = self.scale("s_z", 1, 1 / np.sqrt(self.dim)) if self.kind == "normalized" else 1
        return scale * (self.weights["classifier.weight"] @ feature)

    def text(self, tokens):
        states = [self.weights["embedding.weight"][token] for token in tokens]
        if self.kind == "normalized":
            states = [self.norm(h) for h in states]
        return np.stack([self.logits(h) for h in self.blocks(states, causal=True, rotary=True)])

    def image(self, image, patch):
        w, (_, height, width) = self.weights, image.shape
        corners = [(y, x) for y in range(0, height, patch) for x in range(0, width, patch)]
        kernel = w["embedding.weight"].reshape(self.dim, -1)
        pixels = [image[:, y : y + patch, x : x + patch].reshape(-1) for y, x in corners]
        shrink = np.sqrt(kernel.shape[1]) if self.kind == "normalized" else 1
        states = [kernel @ p / shrink + e for p, e in zip(pixels, w["positions.weight"], strict=True)]
        if self.kind == "normalized":
            states = [self.norm(h) for h in states]
        feature = np.mean(self.blocks(states, causal=False, rotary=False), axis=0)
        return self.logits(self.norm(feature) if self.kind == "normalized" else feature)


@every_kind
def test_transformer_equals_the_second_implementation_on_text(kind):
    model = with_random_parameters(text_model(kind))
    tokens = torch.randint(7, (3, 8))
    reference = Reference(model, kind, 12, 3)
    expected = np.stack([reference.text(row) for row in tokens.tolist()])
    np.testing.assert_allclose(model(tokens).detach().numpy(), expected, rtol=0, atol=1e-10)


@every_kind
def test_transformer_equals_the_second_implementation_on_images(kind):
    model = with_random_parameters(image_model(kind, num_classes=5))
    images = torch.randn(3, 2, 4, 6, dtype=torch.float64)
    reference = Reference(model, kind, 12, 3)
    expected = np.stack([reference.image(image, 2) for image in images.numpy()])
    np.testing.assert_allclose(model(images).detach().numpy(), expected, rtol=0, atol=1e-10)


def test_transformer_does_not_depend_on_the_scale_of_u_because_the_mlp_output_is_normalised():
    model = with_random_parameters(text_model())
    tokens = torch.randint(7, (2, 8))
    before = model(tokens)
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.s_u.value.mul_(3.5)
    torch.testing.assert_close(model(tokens), before)


# --- the sphere

# Weights along the last dimension, and weights along the first dimension.
READERS = ["attention.q", "attention.k", "attention.v", "mlp.up", "mlp.gate"]
WRITERS = ["attention.o", "mlp.down"]


def assert_unit_weights(model, rows, columns):
    for block in model.blocks:
        rows = [*rows, *(block.get_submodule(name) for name in READERS)]
        columns = [*columns, *(block.get_submodule(name) for name in WRITERS)]
    norms = [layer.weight.detach().norm(dim=1) for layer in rows]
    norms += [layer.weight.detach().flatten(1).norm(dim=0) for layer in columns]
    # Every matrix has been compared, so that none is left out.
    assert {id(p) for p in model.parameters() if p.ndim > 1} == {id(layer.weight) for layer in (*rows, *columns)}
    norms = torch.cat(norms)
    torch.testing.assert_close(norms, torch.ones_like(norms))


def recorded_states(model, inputs):
    """Return the inputs of attention and MLP of every block, and the output of the last block."""
    states = []
    layers = [layer for block in model.blocks for layer in (block.attention, block.mlp)]
    hooks = [layer.register_forward_pre_hook(lambda _, args: states.append(args[0])) for layer in layers]
    hooks.append(model.blocks[-1].register_forward_hook(lambda _, args, output: states.append(output)))
    model(inputs)
    for hook in hooks:
        hook.remove()
    return states


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("images", [False, True])
def test_normalized_transformer_has_unit_hidden_states_in_every_layer(dtype, images):
    model = with_random_parameters(image_model() if images else text_model()).to(dtype)
    inputs = torch.randn(3, 2, 4, 6, dtype=dtype) if images else torch.randint(7, (3, 8))
    states = [*recorded_states(model, inputs), model.features(inputs)]
    assert len(states) == 2 * 2 + 2
    for h in states:
        norms = h.detach().norm(dim=-1)
        torch.testing.assert_close(norms, torch.ones_like(norms), rtol=0, atol=8 * torch.finfo(dtype).eps)


def copy_task(model, steps, lr):
    """Train to repeat three tokens after a separator; return the loss of each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        word = torch.randint(1, 7, (32, 3))
        tokens = torch.cat([word, torch.zeros(32, 1, dtype=torch.long), word], dim=1)
        logits = model(tokens[:, :-1])[:, 3:]  # the separator predicts the first repeated token
        loss = F.cross_entropy(logits.flatten(0, 1), word.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.normalize_weights_()
        losses.append(loss.item())
    return losses


@every_kind
def test_transformer_learns_a_copy_task(kind):
    losses = copy_task(text_model(kind, dim=24, mlp_dim=24), 60, 0.02)
    assert np.mean(losses[-5:]) < 0.5 * losses[0]


@pytest.mark.parametrize("tied", [False, True])
def test_normalize_weights_keeps_every_vector_of_a_text_model_at_norm_one(tied):
    model = text_model(tied=tied)
    assert_unit_weights(model, [model.embedding, model.classifier], [])
    copy_task(model, 3, 0.1)
    assert_unit_weights(model, [model.embedding, model.classifier], [])


def test_normalize_weights_keeps_every_vector_of_an_image_model_at_norm_one():
    model = image_model(num_classes=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    model.normalize_weights_()
    assert_unit_weights(model, [model.positions, model.classifier], [model.embedding])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_normalize_weights_computes_half_precision_in_float32(dtype):
    model = text_model().to(dtype)
    with torch.no_grad():
        model.classifier.weight.fill_(3e4)  # squares and norms overflow in float16
        model.embedding.weight[0] = 0.0
    model.normalize_weights_()
    torch.testing.assert_close(model.classifier.weight.float(), torch.full((7, 12), 12**-0.5), rtol=2**-8, atol=0)
    assert not model.embedding.weight[0].any()


def test_normalize_weights_leaves_the_plain_transformer_unchanged():
    model = text_model("plain")
    before = [p.clone() for p in model.parameters()]
    model.normalize_weights_()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_transformer_scales_start_at_the_values_of_the_paper():
    model = text_model()
    block = model.blocks[0]
    scales = {block.alpha_attention: 0.05, block.alpha_mlp: 0.05, block.attention.s_qk: 1, model.s_z: 1}
    scales |= {block.mlp.s_u: 1, block.mlp.s_v: 12**0.5}
    for scale, value in scales.items():
        torch.testing.assert_close(scale(), torch.full_like(scale.value, value))
        stored = 1.0 if scale in (block.mlp.s_u, block.mlp.s_v) else 12**-0.5
        torch.testing.assert_close(scale.value.detach(), torch.full_like(scale.value, stored))


def test_param_groups_decay_only_the_plain_transformer():
    assert hs.optim.param_groups(text_model(), 0.1)[0]["params"] == []
    plain = text_model("plain")
    without = {id(p) for p in hs.optim.param_groups(plain, 0.1)[1]["params"]}
    assert without == {id(m.weight) for m in plain.modules() if isinstance(m, nn.RMSNorm)}


# --- gradients and precision


@every_kind
def test_transformer_passes_gradcheck_for_text(kind):
    model = with_random_parameters(text_model(kind, dim=4, depth=1, heads=2, mlp_dim=3, vocabulary=3))
    names, parameters = zip(*model.named_parameters(), strict=True)
    tokens = torch.tensor([[0, 2, 1]])
    assert torch.autograd.gradcheck(
        lambda *values: functional_call(model, dict(zip(names, values, strict=True)), tokens),
        tuple(p.detach().requires_grad_() for p in parameters),
        fast_mode=True,  # random directions instead of single parameters
    )


@every_kind
def test_transformer_passes_gradcheck_for_images(kind):
    model = with_random_parameters(image_model(kind, dim=4, depth=1, heads=2, mlp_dim=3))
    assert torch.autograd.gradcheck(model, (torch.randn(1, 2, 4, 6, dtype=torch.float64, requires_grad=True),))


def losses_and_gradients(model, inputs, **autocast):
    with torch.autocast("cpu", **autocast):
        outputs = model(inputs)
    outputs.float().logsumexp(-1).sum().backward()
    return [outputs, *(p.grad for p in model.parameters())]


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("images", [False, True])
def test_transformer_is_finite_and_accurate_in_half_precision(kind, dtype, images):
    model = image_model(kind, num_classes=7) if images else text_model(kind)
    inputs = torch.randn(3, 2, 4, 6) if images else torch.randint(7, (3, 8))
    exact = model(inputs).detach()
    under_autocast = losses_and_gradients(model, inputs, dtype=dtype)
    assert all(torch.isfinite(t).all() for t in under_autocast)
    torch.testing.assert_close(under_autocast[0].float(), exact, rtol=0.05, atol=0.05)
    model.zero_grad()
    converted = losses_and_gradients(model.to(dtype), inputs.to(dtype) if images else inputs, enabled=False)
    assert all(torch.isfinite(t).all() and t.dtype == dtype for t in converted)
    torch.testing.assert_close(converted[0].float(), exact, rtol=0.05, atol=0.05)


@torch.no_grad()
def test_normalized_transformer_keeps_hidden_states_in_float32_under_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states = recorded_states(text_model(), torch.randint(7, (3, 8)))
    assert {h.dtype for h in states} == {torch.float32}


@every_kind
def test_transformer_has_finite_gradients_at_zero_vectors(kind):
    model = text_model(kind)
    with torch.no_grad():
        model.embedding.weight[0] = 0.0
    outputs = losses_and_gradients(model, torch.tensor([[0, 0, 1]]), enabled=False)
    assert all(torch.isfinite(t).all() for t in outputs)


# --- text


@every_kind
def test_transformer_logits_do_not_depend_on_later_tokens(kind):
    model = with_random_parameters(text_model(kind))
    tokens = torch.randint(7, (2, 8))
    before = model(tokens)
    for position in range(8):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % 7
        after = model(changed)
        torch.testing.assert_close(after[:, :position], before[:, :position], rtol=0, atol=1e-14)
        assert not torch.isclose(after[:, position], before[:, position]).all()


def test_generate_with_temperature_zero_appends_the_most_probable_tokens():
    model = with_random_parameters(text_model(context=4))
    tokens = torch.randint(7, (3, 2))
    generated = model.generate(tokens, 5, temperature=0)
    assert generated.shape == (3, 7)
    assert torch.equal(generated[:, :2], tokens)
    for end in range(2, 7):
        window = generated[:, max(0, end - 4) : end]
        assert torch.equal(model(window)[:, -1].argmax(-1), generated[:, end])


def test_generate_draws_tokens_with_their_probabilities():
    model = with_random_parameters(text_model(vocabulary=3))
    prompt = torch.tensor([[1, 2]])
    drawn = model.generate(prompt.expand(5_000, -1), 1, torch.Generator().manual_seed(1), temperature=0.5)[:, -1]
    frequencies = torch.bincount(drawn, minlength=3) / 5_000
    expected = (model(prompt)[0, -1] / 0.5).softmax(-1).float()
    torch.testing.assert_close(frequencies, expected, rtol=0, atol=0.03)  # more than four standard deviations


def test_generate_follows_the_generator():
    model, prompt = text_model(), torch.zeros(4, 1, dtype=torch.int32)
    first, second = (model.generate(prompt, 12, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, second)
    assert first.dtype == torch.int32
    assert not torch.equal(first, model.generate(prompt, 12, torch.Generator().manual_seed(6)))
    assert torch.equal(model.generate(prompt, 0), prompt)


# --- the library


@every_kind
def test_layers_of_lists_every_matrix_of_a_text_model(kind):
    layers = hs.layers_of(text_model(kind))
    names = ["attention.q", "attention.k", "attention.v", "attention.o", "mlp.up", "mlp.gate", "mlp.down"]
    assert [layer.name for layer in layers.hidden] == [f"blocks.{i}.{name}" for i in range(2) for name in names]
    assert [layer.name for layer in layers.embeddings] == ["embedding"]
    assert [layer.name for layer in layers.outputs] == ["classifier"]
    assert {skip.name for skip in layers.skipped} == set()


def test_layers_of_lists_a_tied_embedding_as_the_output():
    (output,) = hs.layers_of(text_model(tied=True)).outputs
    assert (output.name, output.aliases) == ("embedding", ("classifier",))


def test_layers_of_lists_patches_and_positions_of_an_image_model():
    layers = hs.layers_of(image_model(num_classes=5))
    assert layers.hidden[0].name == "embedding"
    assert layers.hidden[0].shape == (1, 12, 2, 4)
    assert [layer.name for layer in layers.embeddings] == ["positions"]
    assert [layer.name for layer in layers.outputs] == ["classifier"]


@every_kind
@pytest.mark.parametrize("tied", [False, True])
def test_transformer_state_dict_round_trip(kind, tied, tmp_path):
    model, other = text_model(kind, tied=tied), text_model(kind, tied=tied)
    tokens = torch.randint(7, (2, 8))
    assert not torch.equal(model(tokens), other(tokens))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert torch.equal(model(tokens), other(tokens))
    assert (other.classifier.weight is other.embedding.weight) == tied


@every_kind
def test_checkpointed_blocks_give_the_same_gradients(kind):
    model, tokens = text_model(kind), torch.randint(7, (2, 8))
    expected = losses_and_gradients(model, tokens, enabled=False)
    expected = [t.detach().clone() for t in expected]
    model.zero_grad()
    assert checkpoint_activations_(model) == ["blocks.0", "blocks.1"]
    for value, other in zip(losses_and_gradients(model, tokens, enabled=False), expected, strict=True):
        torch.testing.assert_close(value, other)


def test_plain_transformer_takes_other_linear_layers():
    model = image_model("plain", linear=partial(DecoupledLinear, magnitude="linear"))
    assert isinstance(model.blocks[0].mlp.down, DecoupledLinear)
    assert model(torch.randn(2, 2, 4, 6)).shape == (2, 12)


def test_normalized_transformer_rejects_parametrised_layers():
    def linear(*arguments, **options):
        return spectral_norm(nn.Linear(*arguments, **options))

    assert text_model("plain", linear=linear)(torch.zeros(1, 2, dtype=torch.long)).shape == (1, 2, 7)
    with pytest.raises(ValueError, match="model must be a transformer that owns its weights"):
        text_model(linear=linear)


@pytest.mark.parametrize(("name", "kind"), [("vit", "plain"), ("normalized_vit", "normalized")])
def test_registered_vision_transformers_map_images_to_features(name, kind):
    model = MODELS[name](image_size=(8, 12), in_channels=1, dim=16, depth=1)
    assert model.kind == kind
    assert model(torch.randn(2, 1, 8, 12)).shape == (2, model.feature_dim)


INVALID = [
    ({"kind": "normalised", "vocabulary": 5}, "kind must be one of plain, normalized, not 'normalised'"),
    ({}, "vocabulary must be an integer >= 2 if image_size is None, not None"),
    ({"vocabulary": 5, "image_size": 8}, "image_size must be None if vocabulary is set, not 8"),
    ({"vocabulary": 1}, "vocabulary must be None or an integer >= 2, not 1"),
    ({"vocabulary": 5, "num_classes": 3}, "num_classes must be None for text"),
    ({"vocabulary": 5, "dim": 12, "heads": 4}, "dim must be a multiple of 8, twice the number of heads, not 12"),
    ({"image_size": 8, "dim": 10, "heads": 4}, "dim must be a multiple of 4, the number of heads, not 10"),
    ({"image_size": 8, "tied": True}, "tied must be False for images, not True"),
    ({"image_size": (8, 9)}, "image_size must be a multiple of patch_size 4"),
    ({"vocabulary": 5, "depth": 0}, "depth must be an integer >= 1, not 0"),
    ({"vocabulary": 5, "mlp_dim": 2.5}, "mlp_dim must be None or an integer >= 1, not 2.5"),
]


@pytest.mark.parametrize(("options", "message"), INVALID)
def test_transformer_rejects_invalid_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        SphereTransformer(**options)


def test_transformer_rejects_invalid_inputs():
    with pytest.raises(ValueError, match=r"inputs must be at most 9 tokens \(context\), not '10 tokens'"):
        text_model()(torch.zeros(1, 10, dtype=torch.long))
    with pytest.raises(ValueError, match=r"tokens must be of shape \(batch, length\) with length >= 1, not \(1, 0\)"):
        text_model().generate(torch.zeros(1, 0, dtype=torch.long), 1)
    with pytest.raises(ValueError, match="temperature must be a number >= 0, not -1"):
        text_model().generate(torch.zeros(1, 1, dtype=torch.long), 1, temperature=-1)
    with pytest.raises(ValueError, match="model must be a transformer with a vocabulary"):
        image_model().generate(torch.zeros(1, 1, dtype=torch.long), 1)
