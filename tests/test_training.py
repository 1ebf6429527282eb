import pytest
import torch
from torch import nn

import hypersphere as hs
from hypersphere.training import Batches, embed, fit, predict


def blobs(n=60, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    return 2 * torch.eye(classes)[y] + 0.3 * torch.randn(n, classes, generator=generator), y


def trained(seed=0, epochs=20, **more):
    torch.manual_seed(seed)
    x, y = blobs()
    model, head = nn.Linear(3, 2), hs.heads.modified_softmax(2, 3)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=0.05)
    data = Batches(x, y, 16, torch.Generator().manual_seed(seed))
    history = fit(model, head, data, epochs=epochs, optimizer=optimizer, **more)
    return model, head, history


def test_learns_what_can_be_learned_and_repeats_itself():
    model, head, history = trained()
    x, y = blobs(seed=1)
    features, labels = embed(model, Batches(x, y, 7))
    assert torch.equal(labels, y)
    assert (predict(head, features) == y).float().mean() > 0.9
    assert history[-1].loss < history[0].loss
    assert [e.number for e in history] == list(range(1, 21))
    assert torch.equal(trained()[1].weight, head.weight)
    assert not torch.equal(trained(seed=1)[1].weight, head.weight)


def test_a_data_loader_serves_as_well():
    x, y = blobs()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    model, head = nn.Linear(3, 2), hs.heads.softmax(2, 3)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    assert len(fit(model, head, loader, epochs=2, optimizer=optimizer)) == 2


def test_regularizers_are_added():
    seen = []
    head_energy = lambda: (seen.append(1), torch.zeros(()))[1]  # noqa: E731
    _, _, plain = trained(epochs=1)
    _, _, lifted = trained(epochs=1, regularizers=[head_energy, lambda: torch.tensor(10.0)])
    assert lifted[0].loss == pytest.approx(plain[0].loss + 10, abs=1e-4)
    assert len(seen) == 4


def test_a_loss_that_is_not_finite_stops_before_the_step():
    x, y = blobs()
    model, head = nn.Linear(3, 2), hs.heads.softmax(2, 3)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    broken = [lambda: torch.tensor(float("nan"))]
    with pytest.raises(FloatingPointError, match="in epoch 1"):
        fit(model, head, Batches(x, y, 16), epochs=1, optimizer=optimizer, regularizers=broken)
    assert torch.equal(before, model.weight)


def test_embed_leaves_the_mode_as_it_was():
    x, y = blobs()
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
    features, _ = embed(model, Batches(x, y, 10))
    again, _ = embed(model, Batches(x, y, 60))
    torch.testing.assert_close(features, again)
    assert model.training


def test_batches_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match="labels must be one for each of the 3 inputs"):
        Batches(torch.zeros(3, 1), torch.zeros(2), 1)
    with pytest.raises(ValueError, match="batch_size must be"):
        Batches(torch.zeros(3, 1), torch.zeros(3), 0)
    images = torch.full((2, 1, 2, 2), 255, dtype=torch.uint8)
    assert next(iter(Batches(images, torch.zeros(2), 2)))[0].max() == 1.0
