"""Orthogonal fine-tuning of trained weights: nothing changes at the start, and folding changes nothing at the end."""

import pytest
import torch
from torch import nn

from hypersphere.functions.orthogonal import Cayley
from hypersphere.rotation import degrees_of_freedom, fold_, orthogonality_error, rotate_, rotated_layers

from .test_convert import shake_


@pytest.mark.parametrize("blocks", [1, 4, 8])
def test_three_by_three_convolutions_over_many_patches(blocks):
    torch.manual_seed(0)
    conv, x = nn.Conv2d(8, 6, 3, padding=1), torch.randn(3, 8, 17, 19)
    before = conv(x)
    rotate_(conv, "cayley", blocks=blocks)
    torch.testing.assert_close(conv(x), before, atol=0, rtol=0)
    shake_(conv)
    turned = conv(x)
    assert (turned - before).abs().max() > 0.01
    torch.testing.assert_close(fold_(conv)(x), turned, atol=1e-5, rtol=0)


def test_the_constrained_form_stays_near_the_trained_weights():
    torch.manual_seed(0)
    layer = nn.Linear(16, 16)
    v = layer.weight.detach().clone()
    rotate_(layer, Cayley(bound=1e-2), blocks=4)
    shake_(layer, 10.0)
    assert 0 < (layer.weight - v).norm() / v.norm() < 2.5e-2
    assert orthogonality_error(layer) < 1e-5


def test_a_transformer_with_random_weights():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=50, **size)).eval()
    tokens = torch.randint(50, (2, 9))
    before = model(tokens).last_hidden_state
    rotate_(model, "cayley", blocks=8, where=lambda name, module: "attention.self" in name)
    assert len(list(rotated_layers(model))) == 6
    torch.testing.assert_close(model(tokens).last_hidden_state, before, atol=1e-6, rtol=0)
    for p in model.parameters():
        p.requires_grad_(False)
    for _, _, turning in rotated_layers(model):
        turning.parameter.requires_grad_()
    assert degrees_of_freedom(model) == 6 * 8 * 6
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=0.05)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = -model(tokens).last_hidden_state[..., 0].mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    tuned = model(tokens).last_hidden_state
    torch.testing.assert_close(fold_(model)(tokens).last_hidden_state, tuned, atol=1e-5, rtol=0)


def test_linear_layers_agree_with_peft():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 3))
    weight, x = plain[0].weight.detach().clone(), torch.randn(5, 12)
    config = peft.OFTConfig(target_modules=["0"], oft_block_size=4, r=0, use_cayley_neumann=False, init_weights=True)
    theirs = peft.get_peft_model(plain, config)
    numbers = next(p for name, p in theirs.named_parameters() if "oft_" in name and p.requires_grad)
    with torch.no_grad():
        numbers.normal_(std=0.2)
    expected = theirs.merge_and_unload()[0].weight.detach()
    ours = nn.Linear(12, 7)
    with torch.no_grad():
        ours.weight.copy_(weight)
    rotate_(ours, "free", blocks=3)
    blocks = torch.linalg.lstsq(weight.view(7, 3, 4).transpose(0, 1), expected.view(7, 3, 4).transpose(0, 1)).solution
    with torch.no_grad():
        next(iter(rotated_layers(ours)))[2].parameter.copy_(blocks.mT)
    torch.testing.assert_close(ours.weight.detach(), expected, atol=1e-5, rtol=0)
    assert orthogonality_error(ours) < 1e-5  # theirs is a rotation of the same blocks
    assert ours(x).shape == (5, 7)
