"""MHE and CoMHE on transformers: fused attention weights, Conv1D, experts, tied heads, and labels of tokens."""

import numpy as np
import pytest
import torch
from torch import nn

import oracle
from hypersphere.energy import MHE, CoMHE
from hypersphere.functions.projection import Random

from . import reference

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
WORDS = {"vocab_size": 40, "max_position_embeddings": 8}


def gpt2():
    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=40, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **WORDS, pad_token_id=None))


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **WORDS, num_key_value_heads=1))


def vit():
    config = transformers.ViTConfig(**SIZES, image_size=8, patch_size=4, num_labels=3)
    return transformers.ViTForImageClassification(config)


def mixtral():
    config = transformers.MixtralConfig(**SIZES, **WORDS, num_key_value_heads=2, num_local_experts=3)
    return transformers.MixtralForCausalLM(config)


def torch_encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    return nn.ModuleDict({"body": nn.TransformerEncoder(layer, 1), "classifier": nn.Linear(16, 5)})


# For each model: its output weight, the weights that are left out with a part of the reason, and all other weights that
# are no matrices of neurons (N, d) as they are, with the sets of neurons that they hold.
MODELS = {
    gpt2: (
        "transformer.wte.weight",
        {"transformer.wpe": "an embedding"},
        {"c_attn.weight": lambda w: np.split(w.T, 3), ".weight": lambda w: [w.T]},  # Conv1D stores (in, out)
    ),
    bert: (
        "bert.embeddings.word_embeddings.weight",
        {
            "bert.embeddings.position_embeddings": "an embedding",
            "bert.embeddings.token_type_embeddings": "an embedding",
        },
        {},
    ),
    llama: ("lm_head.weight", {"model.embed_tokens": "an embedding"}, {}),
    vit: (
        "classifier.weight",
        {
            "vit.embeddings.cls_token": "not a known kind of layer",
            "vit.embeddings.position_embeddings": "not a known kind of layer",
        },
        {"projection.weight": lambda w: [w.reshape(len(w), -1)]},
    ),
    mixtral: (
        "lm_head.weight",
        {"model.embed_tokens": "an embedding", "model.layers.0.mlp.gate.weight": "not a known kind of layer"},
        {"gate_up_proj": list, "down_proj": list},  # one set of rows per expert
    ),
    torch_encoder: ("classifier.weight", {}, {"in_proj_weight": lambda w: np.split(w, 3)}),
}
every_model = pytest.mark.parametrize("make", MODELS)


def weights(make, model):
    """Return the sets of neurons of every hidden weight, and the class vectors, read from the parameters by name."""
    output, left_out, sets = MODELS[make]
    hidden = []
    for name, parameter in model.named_parameters():  # a tied weight is listed once
        if parameter.ndim < 2 or name == output or any(name.startswith(skipped) for skipped in left_out):
            continue
        w = parameter.detach().double().numpy()
        hidden.append(next((read(w) for ending, read in sets.items() if name.endswith(ending)), [w]))
    return hidden, model.get_parameter(output).detach().double().numpy()


def expected_energy(make, model):
    """Return Σ_hidden Ē in half space + Ē of the output. q, k and v of a fused weight count as three layers."""
    hidden, output = weights(make, model)
    total = oracle.energy(output, 2)
    for sets in hidden:
        energies = [oracle.energy(rows, 2, half_space=True) for rows in sets]
        total += sum(energies) if make in (torch_encoder, gpt2) else np.mean(energies)
    return total


@every_model
def test_mhe_of_a_transformer_is_the_sum_over_its_weights(make, capsys):
    model = make()
    regularizer = MHE(model, report=True)
    assert regularizer().item() == pytest.approx(expected_energy(make, model), rel=1e-5)
    _, left_out, _ = MODELS[make]
    assert {skip.name for skip in regularizer.skipped} == set(left_out)
    report = capsys.readouterr().out
    for skip in regularizer.skipped:
        assert left_out[skip.name] in skip.reason
        assert f"{skip.name}: {skip.reason}" in report
    for layer in regularizer.selection:
        assert layer.name in report


@every_model
def test_regularizers_lower_the_energy_of_a_transformer_in_a_gradient_step(make):
    for kind in (MHE, lambda model: CoMHE(model, projection=Random(dim=8, every=10**6))):
        model = make()
        regularizer = kind(model)
        before = regularizer()
        before.backward()
        moved = {name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
        assert moved == {layer.weight_name for layer in regularizer.selection}
        torch.optim.SGD(model.parameters(), lr=1e-3).step()
        assert regularizer().item() < before.item()


def test_mhe_takes_the_fused_attention_of_torch_apart():
    model = torch_encoder()
    names = [layer.name for layer in MHE(model).selection.hidden]
    assert names[:4] == [f"body.layers.0.self_attn.{name}" for name in ("q", "k", "v", "out_proj")]


def test_mhe_never_compares_the_neurons_of_different_experts():
    model = mixtral()
    with torch.no_grad():
        for parameter in (model.model.layers[0].mlp.experts.gate_up_proj, model.model.layers[0].mlp.experts.down_proj):
            parameter.copy_(parameter[:1].expand_as(parameter))  # equal experts would have an enormous energy
    assert MHE(model)().item() == pytest.approx(expected_energy(mixtral, model), rel=1e-5)
    assert MHE(model)().item() < 10


def test_mhe_weights_a_tied_head_once_as_the_output():
    model = gpt2()
    regularizer = MHE(model, hidden=0, output=2.0)
    (output,) = regularizer.selection.outputs
    assert output.aliases == ("lm_head",)
    expected = 2 * oracle.energy(model.lm_head.weight.detach().numpy(), 2)
    assert regularizer().item() == pytest.approx(expected, rel=1e-5)
    only_words = MHE(llama(), hidden=0, output=0, embedding=1.0)  # a head that is not tied to its embedding
    assert [layer.name for layer in only_words.weighted_layers()] == ["model.embed_tokens"]


@pytest.mark.parametrize("make", [gpt2, llama])
def test_mhe_takes_the_labels_of_a_language_model(make):
    model = make()
    tokens = torch.randint(1, 40, (2, 6))
    labels = tokens.masked_fill(torch.tensor([[False] * 6, [False] * 3 + [True] * 3]), -100)
    regularizer = MHE(model, hidden=0)
    energy = regularizer(labels=labels)
    counted = labels[labels != -100].tolist()
    rows = weights(make, model)[1]
    assert energy.item() == pytest.approx(reference.data_dependent(rows, counted, 2), rel=1e-5)
    loss = model(input_ids=tokens, labels=labels).loss + energy
    loss.backward()
    assert torch.isfinite(model.get_output_embeddings().weight.grad).all()


def test_mhe_draws_tokens_of_a_large_vocabulary():
    model = gpt2()
    regularizer = MHE(model, hidden=0, batch=10)
    values = []
    for _ in range(100):
        energy = regularizer()
        values.append(energy.item())
    energy.backward()
    assert (model.lm_head.weight.grad.abs().sum(1) > 0).sum() == 10
    exact = oracle.energy(model.lm_head.weight.detach().numpy(), 2)
    assert np.mean(values) == pytest.approx(exact, abs=4 * np.std(values) / 10)
