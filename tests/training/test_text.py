import math

import pytest
import torch
from torch import nn

from hypersphere.models import SphereTransformer
from hypersphere.training import minimize
from hypersphere.training.text import NextToken, TextWindows


def test_text_windows_are_parts_of_the_text_with_the_tokens_that_follow():
    tokens = torch.randperm(50)
    place = {int(token): at for at, token in enumerate(tokens)}
    windows = TextWindows(tokens, 6, 40, torch.Generator().manual_seed(0))
    inputs, labels = next(iter(windows))
    for x, y in zip(inputs, labels, strict=True):
        start = place[int(x[0])]
        assert x.equal(tokens[start : start + 6])
        assert y.equal(tokens[start + 1 : start + 7])
    starts = {place[int(x[0])] for x in inputs}
    assert min(starts) >= 0
    assert max(starts) <= 43
    assert not inputs.equal(next(iter(windows))[0])


def test_text_windows_reach_both_ends_of_the_text():
    inputs, labels = next(iter(TextWindows(torch.arange(4), 2, 200)))
    assert set(inputs[:, 0].tolist()) == {0, 1}
    assert labels.max() == 3


def test_text_windows_reject_a_text_that_is_too_short():
    with pytest.raises(ValueError, match="tokens must be a text of more than 4 tokens, not 4"):
        TextWindows(torch.arange(4), 4, 1)


def test_next_token_loss_of_equal_logits_is_the_logarithm_of_the_vocabulary():
    model = nn.Embedding(7, 7)
    nn.init.zeros_(model.weight)
    loss = NextToken(model).mean_loss(torch.randint(7, (30,)), length=4, batch=3)
    assert loss == pytest.approx(math.log(7))


def test_next_token_mean_loss_weights_all_windows_equally():
    torch.manual_seed(0)
    objective, tokens = NextToken(nn.Embedding(5, 5)), torch.randint(5, (23,))
    logits = objective.model(tokens[:20])
    expected = nn.functional.cross_entropy(logits, tokens[1:21]).item()
    for batch in (1, 2, 5):
        assert objective.mean_loss(tokens, length=4, batch=batch) == pytest.approx(expected, rel=1e-6)


def test_minimize_trains_a_transformer_on_a_text():
    torch.manual_seed(0)
    tokens = torch.tensor(list(b"abcabdabe" * 30))
    model = SphereTransformer(vocabulary=128, context=16, dim=16, depth=1, heads=2)
    objective = NextToken(model)
    before = objective.mean_loss(tokens, 16, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    minimize(
        objective,
        TextWindows(tokens, 16, 8),
        optimizer=optimizer,
        steps=40,
        on_step=lambda progress: model.normalize_weights_(),
    )
    assert objective.mean_loss(tokens, 16, 8) < 0.7 * before


def test_next_token_accumulates_the_gradient_of_a_large_batch():
    tokens = torch.randint(5, (6, 5))
    labels = tokens.roll(-1, 1)
    labels[0, :3] = -100
    weights = []
    for batches, accumulate in (([(tokens, labels)], 1), (list(zip(tokens.split(2), labels.split(2), strict=True)), 3)):
        torch.manual_seed(0)
        objective = NextToken(nn.Embedding(5, 5))
        optimizer = torch.optim.SGD(objective.parameters(), lr=0.1)
        minimize(objective, batches, optimizer=optimizer, steps=1, accumulate=accumulate)
        weights.append(objective.model.weight.detach())
    torch.testing.assert_close(*weights)
