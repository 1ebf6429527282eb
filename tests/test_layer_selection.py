"""`hs.layers_of`: which weights are selected or skipped, and how their rows are read and written."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import hypersphere as hs


def names(layers):
    return [layer.name for layer in layers]


def reasons(selection):
    return {skip.name: skip.reason for skip in selection.skipped}


def brute_force_rows(module):
    """Read neurons from the outputs: the response to the i-th unit vector is column i of the weight matrix."""
    with torch.no_grad():
        bias = module(torch.zeros(1, module.weight.shape[0]))
        return (module(torch.eye(module.weight.shape[0])) - bias).T


class HuggingFaceConv1D(nn.Module):
    """The linear layer of GPT-2: the weight is stored as (in, out)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


class FusedExperts(nn.Module):
    """Three experts in one module: weights (experts, out, in), or (experts, in, out) if `transposed`."""

    def __init__(self, transposed=False):
        super().__init__()
        self.num_experts, self.hidden_size = 3, 4
        up, down = ((3, 4, 10), (3, 5, 4)) if transposed else ((3, 10, 4), (3, 4, 5))
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.randn(up)), nn.Parameter(torch.randn(down))


# Rows ----------------------------------------------------------------------------------------------------------------


def test_linear_rows_are_the_rows_of_the_weight():
    layer = hs.layers_of(nn.Linear(3, 5))[0]
    assert (layer.name, layer.weight_name, layer.parameter, layer.groups) == ("weight", "weight", "weight", 1)
    torch.testing.assert_close(layer.rows(), layer.module.weight, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_convolution_rows_are_flattened_filters_per_group(kind):
    module = kind(6, 4, 3, groups=2)
    layer = hs.layers_of(module)[0]
    taps = 3 ** (module.weight.ndim - 2)
    assert layer.shape == (2, 2, 3, taps)
    expected = module.weight.detach().numpy().reshape(2, 2, 3 * taps)
    np.testing.assert_array_equal(layer.row_sets().detach(), expected)
    np.testing.assert_array_equal(layer.rows().detach(), expected.reshape(4, -1))


@pytest.mark.parametrize(("groups", "shape"), [(4, (4, 1, 2, 3)), (8, (8, 1, 1, 3))])
def test_conv1d_with_one_filter_per_group_is_not_mistaken_for_experts(groups, shape):
    module = nn.Conv1d(8, groups, 3, groups=groups)  # the weight is (groups, in/groups, 3)
    layer = hs.layers_of(module)[0]
    assert layer.shape == shape
    torch.testing.assert_close(layer.rows(), module.weight.flatten(1), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d])
def test_transposed_convolution_rows_collect_one_output_channel(kind):
    module = kind(6, 4, 2, groups=2)  # weight (in, out/groups, *kernel)
    weight = module.weight.detach().numpy()
    expected = [[weight[3 * g : 3 * g + 3, n].ravel() for n in range(2)] for g in range(2)]
    np.testing.assert_array_equal(hs.layers_of(module)[0].row_sets().detach(), expected)


def test_hugging_face_conv1d_rows_are_the_columns_of_the_weight():
    module = HuggingFaceConv1D(5, 3)
    torch.testing.assert_close(hs.layers_of(module)[0].rows().detach(), brute_force_rows(module))


def test_attention_q_k_v_are_separate_layers_of_one_group():
    module = nn.MultiheadAttention(8, 2)
    selection = hs.layers_of(module)
    assert names(selection) == ["q", "k", "v", "out_proj"]
    assert [layer.weight_name for layer in selection[:3]] == ["in_proj_weight"] * 3
    stacked = torch.cat([layer.rows() for layer in selection[:3]])
    torch.testing.assert_close(stacked, module.in_proj_weight, rtol=0, atol=0)


def test_attention_per_head_has_one_group_per_head():
    module = nn.MultiheadAttention(8, 2)
    layer = hs.layers_of(module, per_head=True)[1]
    assert layer.groups == 2
    torch.testing.assert_close(layer.row_sets()[1], module.in_proj_weight[12:16], rtol=0, atol=0)


def test_attention_with_separate_projections_reads_each_weight():
    module = nn.MultiheadAttention(8, 2, kdim=3, vdim=5)
    assert [layer.length for layer in hs.layers_of(module)[:3]] == [8, 3, 5]


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, "ifgo"), (nn.GRU, "rzn")])
def test_recurrent_weights_have_one_layer_per_gate(kind, gates):
    module = kind(3, 4)
    selection = hs.layers_of(module)
    assert names(selection) == [f"weight_{kind_}_l0.{gate}" for kind_ in ("ih", "hh") for gate in gates]
    torch.testing.assert_close(selection[1].rows(), module.weight_ih_l0[4:8], rtol=0, atol=0)


def test_recurrent_weights_without_gates_are_one_layer():
    assert names(hs.layers_of(nn.RNN(3, 4))) == ["weight_ih_l0", "weight_hh_l0"]
    projection = hs.layers_of(nn.LSTM(3, 4, proj_size=2))[-1]
    assert projection.name == "weight_hr_l0"
    assert projection.shape[:3] == (1, 2, 4)


def test_recurrent_cells_have_one_layer_per_gate():
    assert names(hs.layers_of(nn.GRUCell(3, 4)))[:2] == ["weight_ih.r", "weight_ih.z"]


def test_embedding_has_the_role_embedding():
    selection = hs.layers_of(nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 4), nn.Linear(4, 2)))
    assert names(selection.embeddings) == ["0"]
    assert names(selection.hidden) == ["1"]


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_are_groups_in_both_orientations_of_the_weight(transposed):
    module = FusedExperts(transposed)
    up, down = hs.layers_of(module)
    assert up.shape == (3, 10, 4, 1)
    assert down.shape == (3, 4, 5, 1)
    weight = module.gate_up_proj.mT if transposed else module.gate_up_proj
    torch.testing.assert_close(up.row_sets(), weight, rtol=0, atol=0)


def test_parametrised_weight_is_evaluated_at_every_call():
    module = parametrizations.weight_norm(nn.Linear(3, 4))
    layer = hs.layers_of(module)[0]
    before = layer.rows().detach().clone()
    with torch.no_grad():
        module.parametrizations.weight.original0.mul_(2)
    torch.testing.assert_close(layer.rows().detach(), 2 * before)


@pytest.mark.parametrize("where", [None, lambda name, module: False], ids=["selected", "excluded"])
@pytest.mark.parametrize(
    "layer", [nn.Linear(30, 40), nn.Conv2d(8, 40, 3), nn.Embedding(40, 30)], ids=lambda layer: type(layer).__name__
)
def test_layers_of_does_not_advance_the_power_iteration_of_spectral_norm(layer, where):
    module = parametrizations.spectral_norm(copy.deepcopy(layer))
    before = copy.deepcopy(module.state_dict())
    hs.layers_of(module, where=where)
    for key, value in module.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)


def test_quantised_weight_is_dequantised_and_cannot_be_written():
    quantized = pytest.importorskip("torch.ao.nn.quantized.dynamic")
    plain = nn.Linear(4, 3)
    module = quantized.Linear(4, 3)
    scale = float(plain.weight.detach().abs().max()) / 127
    module.set_weight_bias(torch.quantize_per_tensor(plain.weight.detach(), scale, 0, torch.qint8), plain.bias)
    layer = hs.layers_of(nn.Sequential(module, nn.Linear(3, 2)))[0]
    torch.testing.assert_close(layer.rows(), plain.weight.detach(), rtol=0, atol=scale)
    assert not layer.writable
    with pytest.raises(ValueError, match="0 must be a layer whose weight can be written, but its weight is computed"):
        layer.write(torch.zeros(3, 4))


def test_quantised_layers_are_not_mistaken_for_tied_ones():
    quantized = pytest.importorskip("torch.ao.nn.quantized.dynamic")
    assert len(hs.layers_of(nn.Sequential(*[quantized.Linear(4, 4) for _ in range(20)]))) == 20


def test_computed_weights_are_not_mistaken_for_tied_ones():
    class Scaled(nn.Linear):
        weight = property(lambda self: self.free * 2)

        def __init__(self):
            nn.Module.__init__(self)
            self.in_features, self.out_features = 4, 4
            self.free = nn.Parameter(torch.randn(4, 4))

    selection = hs.layers_of(nn.Sequential(*[Scaled() for _ in range(20)]))
    assert sum(layer.parameter == "weight" for layer in selection) == 20


def test_rows_are_float32_and_differentiable_in_half_precision():
    module = nn.Linear(3, 4, dtype=torch.bfloat16)
    rows = hs.layers_of(module)[0].rows()
    assert rows.dtype == torch.float32
    rows.sum().backward()
    torch.testing.assert_close(module.weight.grad, torch.ones(4, 3, dtype=torch.bfloat16))


# Writing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(3, 4),
        nn.Conv2d(4, 6, 3, groups=2),
        nn.ConvTranspose2d(4, 6, 3, groups=2),
        HuggingFaceConv1D(5, 3),
        nn.MultiheadAttention(8, 2),
        nn.LSTM(3, 4),
        FusedExperts(),
        FusedExperts(transposed=True),
        nn.Embedding(5, 3),
    ],
    ids=lambda module: type(module).__name__,
)
def test_rows_are_what_write_has_written(module):
    for layer in hs.layers_of(module):
        written = torch.randn_like(layer.rows())
        layer.write(written)
        torch.testing.assert_close(layer.rows().detach(), written, rtol=0, atol=0)


def test_write_changes_only_the_slice_of_a_fused_weight():
    module = nn.MultiheadAttention(4, 2)
    before = module.in_proj_weight.detach().clone()
    hs.layers_of(module)[1].write(torch.zeros(4, 4))
    assert bool((module.in_proj_weight[4:8] == 0).all())
    torch.testing.assert_close(module.in_proj_weight[8:].detach(), before[8:], rtol=0, atol=0)


def test_write_uses_the_inverse_of_a_parametrisation():
    module = parametrizations.weight_norm(nn.Linear(3, 4))
    layer = hs.layers_of(module)[0]
    written = torch.randn(4, 3)
    layer.write(written)
    torch.testing.assert_close(module.weight.detach(), written)


def test_write_rejects_a_wrong_shape():
    with pytest.raises(ValueError, match=r"rows must be a tensor of shape \(4, 3\), not \(3, 4\)"):
        hs.layers_of(nn.Linear(3, 4))[0].write(torch.zeros(3, 4))
    for rows in (3, [[0.0] * 3] * 4, None):
        with pytest.raises(ValueError, match=r"rows must be a tensor of shape \(4, 3\), not '(int|list|NoneType)'"):
            hs.layers_of(nn.Linear(3, 4))[0].write(rows)


# Roles ---------------------------------------------------------------------------------------------------------------


def test_output_is_the_end_of_nested_sequentials():
    nested = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    assert names(hs.layers_of(nested).outputs) == ["1.1"]


def test_output_with_a_classifier_name_takes_precedence_over_the_last_layer():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.classifier = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
            self.body = nn.Linear(3, 4)

    assert names(hs.layers_of(Net()).outputs) == ["classifier.1"]
    wrapped = nn.Module()
    wrapped.module = Net()  # as in DistributedDataParallel
    assert names(hs.layers_of(wrapped).outputs) == ["module.classifier.1"]


def test_output_is_all_heads_instead_of_the_last_linear_layer():
    model = nn.ModuleList([hs.heads.arcface(4, 3), nn.Linear(5, 4)])
    selection = hs.layers_of(model)
    assert names(selection.outputs) == ["0"]
    assert hs.layers_of(model, output_layer=None).outputs == ()
    assert names(hs.layers_of(model, output_layer="1").outputs) == ["0", "1"]


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_output_is_not_guessed_in_a_transformer_layer(kind):
    selection = hs.layers_of(kind(8, 2, 16))
    assert selection.outputs == ()
    with pytest.warns(UserWarning, match="the last linear layer is 'linear2'"):
        selection.warn_if_output_is_unknown()
    assert names(hs.layers_of(kind(8, 2, 16), output_layer="linear2").outputs) == ["linear2"]


def test_single_layer_has_no_output_and_no_note():
    selection = hs.layers_of(nn.Linear(3, 4))
    assert (selection.outputs, selection.note) == ((), None)


def test_unknown_output_name_lists_the_layers():
    with pytest.raises(ValueError, match=r"output_layer must be 'auto', None or one of '0', '1', not 'fc'"):
        hs.layers_of(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), output_layer="fc")


def test_tied_weight_is_listed_once_as_output():
    model = nn.ModuleDict({"embed": nn.Embedding(7, 4), "body": nn.Linear(4, 4), "decode": nn.Linear(4, 7, bias=False)})
    model["decode"].weight = model["embed"].weight
    selection = hs.layers_of(model)
    assert names(selection) == ["embed", "body"]
    assert selection[0].aliases == ("decode",)
    assert selection[0].role == "output"
    assert "tied to decode" in selection.report()


def test_hugging_face_models_have_outputs_and_experts():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    mixtral = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)
    )
    selection = hs.layers_of(mixtral)
    assert names(selection.outputs) == ["lm_head"]
    experts = {layer.name.rpartition(".")[2]: layer.shape for layer in selection if layer.groups == 4}
    assert experts == {"gate_up_proj": (4, 48, 16, 1), "down_proj": (4, 16, 24, 1)}
    gpt = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=8, bos_token_id=0, eos_token_id=0
        )
    )
    selection = hs.layers_of(gpt)
    assert selection.outputs[0].aliases == ("lm_head",)
    fused = [layer for layer in selection if layer.weight_name.endswith("c_attn.weight")]
    assert [layer.name.rpartition(".")[2] for layer in fused] == ["q", "k", "v"]
    rows = torch.cat([layer.rows().detach() for layer in fused])
    torch.testing.assert_close(rows, brute_force_rows(fused[0].module), rtol=1e-4, atol=1e-6)
    fused[1].write(torch.zeros_like(fused[1].rows()))
    assert [bool(layer.rows().any()) for layer in fused] == [True, False, True]


def test_only_the_attention_of_gpt2_is_split_and_not_a_wide_feed_forward_layer():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_embd=8, n_head=2, n_inner=24, vocab_size=20, n_positions=8, add_cross_attention=True
    )
    layers = {layer.name.removeprefix("h.0."): layer.shape for layer in hs.layers_of(transformers.GPT2Model(config))}
    assert {name: shape[1:3] for name, shape in layers.items() if "." in name} == {
        "attn.c_attn.q": (8, 8),
        "attn.c_attn.k": (8, 8),
        "attn.c_attn.v": (8, 8),
        "attn.c_proj": (8, 8),
        "crossattention.c_attn.k": (8, 8),
        "crossattention.c_attn.v": (8, 8),
        "crossattention.q_attn": (8, 8),
        "crossattention.c_proj": (8, 8),
        "mlp.c_fc": (24, 8),
        "mlp.c_proj": (8, 24),
    }


# Skipped weights -----------------------------------------------------------------------------------------------------


def test_skipped_layers_have_reasons():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.zeros(5, 4))

    model = nn.Sequential(Positions(), nn.LayerNorm([2, 3]), nn.LazyLinear(4), nn.Linear(3, 4), nn.Linear(4, 2))
    assert reasons(hs.layers_of(model)) == {
        "0.table": "Positions is not a known kind of layer",
        "1.weight": "parameters of a normalisation",
        "1.bias": "parameters of a normalisation",
        "2": "its weight is not initialised: run a batch through the model first",
    }


def test_where_excludes_layers_and_reports_them_as_skipped():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    selection = hs.layers_of(model, where=lambda name, module: name != "1")
    assert names(selection) == ["0", "2"]
    assert reasons(selection) == {"1": "excluded by `where`"}


def test_without_moves_layers_to_skipped():
    selection = hs.layers_of(nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 2)))
    fewer = selection.without(lambda layer: "one neuron" if layer.shape[1] == 1 else None)
    assert names(fewer) == ["1"]
    assert reasons(fewer) == {"0": "one neuron"}


def test_lora_adapters_are_skipped_and_base_layers_selected():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), peft.LoraConfig(target_modules=["0"], r=2)
    )
    selection = hs.layers_of(model)
    assert [name.rpartition("model.")[2] for name in names(selection)] == ["0.base_layer", "1"]
    assert set(reasons(selection).values()) == {"part of a LoRA adapter"}


# Named tensors -------------------------------------------------------------------------------------------------------


def test_named_tensors_are_layers_without_a_module():
    selection = hs.layers_of({"a": torch.randn(4, 3), "b": torch.randn(4, 3, 2)})
    assert [layer.shape for layer in selection] == [(1, 4, 3, 1), (1, 4, 3, 2)]
    assert selection[0].module is None
    selection[0].write(torch.zeros(4, 3))
    assert float(selection[0].tensor.abs().sum()) == 0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("resnet", "model must be a module, a mapping"),
        ([torch.zeros(2, 2)], "an iterable with Tensor"),
        (
            [("a", torch.zeros(2))],
            r"a must be a floating-point tensor \(N, ...\) of neurons, not 'torch.float32 \(2,\)'",
        ),
        ([("a", [1.0])], r"a must be a floating-point tensor \(N, ...\) of neurons, not 'list'"),
        ([("a", torch.zeros(2, 2)), ("a", torch.zeros(2, 2))], "'a' twice"),
    ],
)
def test_layers_of_rejects_invalid_models(source, message):
    with pytest.raises(ValueError, match=message):
        hs.layers_of(source)


def test_layers_of_includes_distributed_heads_on_request(monkeypatch):
    model = nn.ModuleList([nn.Linear(4, 8), hs.heads.ShardedHead(hs.heads.arcface(8, 5))])
    monkeypatch.setattr(type(model[1].processes), "size", property(lambda processes: 2))
    selection = hs.layers_of(model)
    assert names(selection) == ["0"]
    assert reasons(selection) == {"1": "its class vectors are distributed over 2 processes"}
    assert names(hs.layers_of(model, local_classes=True)) == ["0", "1.head"]
    assert list(reasons(hs.layers_of(model[1]))) == ["ShardedHead"]


@pytest.mark.parametrize(
    ("module", "orientation"),
    [
        (nn.Linear(3, 4), "rows"),
        (nn.ConvTranspose1d(3, 4, 2), "transposed"),
        (HuggingFaceConv1D(4, 3), "columns"),
    ],
)
def test_layer_orientation_says_how_neurons_are_stored(module, orientation):
    assert hs.layers_of(module)[0].orientation == orientation


def test_layers_of_requires_names_of_output_layers():
    with pytest.raises(ValueError, match="output_layer must be 'auto', None, a name or several names, not 3"):
        hs.layers_of(nn.Linear(3, 2), output_layer=3)


def test_subclasses_of_recurrent_layers_have_gates():
    class Encoder(nn.LSTM):
        pass

    names = [layer.name for layer in hs.layers_of(Encoder(3, 2), output_layer=None)]
    assert names == [layer.name for layer in hs.layers_of(nn.LSTM(3, 2), output_layer=None)]
    assert len(names) == 8


def test_neuron_layer_accepts_the_old_name_of_weight_name():
    (layer,) = hs.layers_of(nn.Linear(3, 4))
    with pytest.warns(DeprecationWarning, match=r"NeuronLayer\.group is deprecated, use NeuronLayer\.weight_name"):
        assert layer.group == layer.weight_name == "weight"


def test_layers_of_accepts_the_old_name_of_output_layer():
    with pytest.warns(DeprecationWarning, match="use output_layer instead"):
        assert hs.layers_of(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), output=None).outputs == ()
