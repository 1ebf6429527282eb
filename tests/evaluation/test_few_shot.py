"""Few-shot episodes: drawing, fine-tuning compared with one classifier at a time, and known accuracies."""

import numpy as np
import pytest
import torch
from torch import nn

from hypersphere.evaluation import draw_episodes, few_shot


def clusters(classes=8, per_class=30, dim=6, noise=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, dim, generator=generator)
    labels = torch.arange(classes).repeat(per_class)
    return centres[labels] + noise * torch.randn(len(labels), dim, generator=generator), labels


def test_draw_episodes_takes_different_examples_of_different_classes():
    labels = torch.arange(7).repeat(12)
    drawn = draw_episodes(labels, ways=4, shots=3, queries=5, episodes=20, generator=torch.Generator().manual_seed(0))
    examples = torch.cat([drawn.support, drawn.queries], 2)
    assert examples.shape == (20, 4, 8)
    for episode in examples:
        assert len(episode.unique()) == 32
        classes = labels[episode]
        assert (classes == classes[:, :1]).all()
        assert len(classes[:, 0].unique()) == 4
    assert len({tuple(one.flatten().tolist()) for one in examples}) == 20


def test_draw_episodes_skips_small_classes_and_needs_enough_of_them():
    labels = [0] * 6 + [1] * 6 + [2] * 5
    drawn = draw_episodes(labels, ways=2, shots=2, queries=4, episodes=5)
    assert int(drawn.queries.max()) < 12
    with pytest.raises(
        ValueError, match=r"labels must contain at least 3 classes with 6 or more examples .* but has 2"
    ):
        draw_episodes(labels, ways=3, shots=2, queries=4)


@pytest.mark.parametrize("scale", [None, 2.0])
def test_few_shot_agrees_with_one_classifier_at_a_time(scale):
    """The same draws, initial values and batches, with nn.Linear and a loop over episodes."""
    features, labels = clusters(noise=1.5)
    options = {"ways": 3, "shots": 2, "queries": 4, "episodes": 6}
    trained = {"epochs": 7, "batch_size": 4, "lr": 0.5, "momentum": 0.9, "dampening": 0.9, "weight_decay": 1e-2}
    result = few_shot(features, labels, scale=scale, **options, **trained, generator=torch.Generator().manual_seed(3))

    generator = torch.Generator().manual_seed(3)
    drawn = draw_episodes(labels, **options, generator=generator)
    bound = 6**-0.5
    weights = torch.empty(6, 3, 6).uniform_(-bound, bound, generator=generator)
    biases = torch.empty(6, 1, 3).uniform_(-bound, bound, generator=generator)
    orders = [torch.rand(6, 6, generator=generator).argsort(1) for _ in range(7)]
    for episode in range(6):
        layer = nn.Linear(6, 3, bias=scale is None)
        with torch.no_grad():
            layer.weight.copy_(weights[episode])
            if scale is None:
                layer.bias.copy_(biases[episode, 0])

        def scores(x, layer=layer):
            return layer(x) if scale is None else scale * nn.functional.cosine_similarity(x[:, None], layer.weight, 2)

        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5, momentum=0.9, dampening=0.9, weight_decay=1e-2)
        support, truth = features[drawn.support[episode].flatten()], torch.tensor([0, 0, 1, 1, 2, 2])
        for order in orders:
            for batch in order[episode].split(4):
                optimizer.zero_grad()
                nn.functional.cross_entropy(scores(support[batch]), truth[batch]).backward()
                optimizer.step()
        predicted = scores(features[drawn.queries[episode].flatten()]).argmax(1)
        expected = (predicted == torch.arange(3).repeat_interleave(4)).double().mean()
        assert result.accuracies[episode] == pytest.approx(float(expected))


def test_few_shot_of_noise_is_chance_and_of_clusters_is_certain():
    features, labels = clusters(noise=0.1)
    options = {"episodes": 60, "generator": torch.Generator().manual_seed(0)}
    assert few_shot(features, labels, lr=1.0, **options).accuracy > 0.95
    chance = few_shot(torch.randn(240, 6), labels, scale=2.0, epochs=5, **options)
    assert chance.accuracy == pytest.approx(0.2, abs=0.05)
    values = chance.accuracies.numpy()
    assert chance.interval == pytest.approx(1.96 * np.std(values) / np.sqrt(60))


def test_few_shot_rejects_a_scale_that_is_not_positive():
    features, labels = clusters()
    with pytest.raises(ValueError, match="scale must be None or a positive number, not 0"):
        few_shot(features, labels, scale=0)
