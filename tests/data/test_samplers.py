from collections import Counter

import pytest
import torch

from hypersphere.data import SAMPLERS


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def labels_of(counts):
    """Return shuffled labels with this number of samples of each class."""
    labels = torch.cat([torch.full((count,), label) for label, count in counts.items()])
    return labels[torch.randperm(len(labels), generator=seeded(7))]


@pytest.mark.parametrize("name", SAMPLERS)
def test_sampler_order_follows_from_the_state_of_the_generator(name):
    sampler = SAMPLERS[name](labels_of({0: 30, 1: 12, 4: 3}), 5)
    first, second = (sampler.order(sampler.generator, 8) for _ in range(2))
    again = seeded(5)
    assert torch.equal(sampler.order(again, 8), first)
    assert torch.equal(sampler.order(again, 8), second)
    assert name == "sequential" or not torch.equal(first, second)
    assert len(first) == len(sampler)
    assert first.min() >= 0
    assert first.max() < 45


def test_shuffled_and_sequential_visit_every_sample_once():
    labels = torch.zeros(50, dtype=torch.int64)
    assert SAMPLERS["sequential"](labels, 0).order(seeded(), 8).tolist() == list(range(50))
    assert sorted(SAMPLERS["shuffled"](labels, 0).order(seeded(), 8).tolist()) == list(range(50))


@pytest.mark.parametrize("samples", [None, 7, 100, 1000])
def test_class_balanced_draws_every_class_equally_often(samples):
    counts = {0: 50, 1: 5, 3: 1}
    labels = labels_of(counts)
    order = SAMPLERS["class_balanced"](labels, 0, samples=samples).order(seeded(), 8)
    total = 56 if samples is None else samples
    assert len(order) == total
    drawn = Counter(labels[order].tolist())
    assert set(drawn) == set(counts)
    assert max(drawn.values()) - min(drawn.values()) <= 1
    # Within a class, no sample is drawn twice more often than another.
    for label in counts:
        times = Counter(order[labels[order] == label].tolist())
        missing = counts[label] - len(times)
        assert max(times.values()) - (0 if missing else min(times.values())) <= 1


def test_class_balanced_mixes_the_classes():
    labels = labels_of({0: 500, 1: 500})
    order = SAMPLERS["class_balanced"](labels, 0).order(seeded(), 8)
    half = labels[order[:500]].float().mean()
    assert 0.4 < half < 0.6


@pytest.mark.parametrize(("m", "batch_size"), [(1, 5), (2, 8), (4, 16), (4, 20), (3, 15)])
def test_m_per_class_fills_batches_with_m_samples_of_different_classes(m, batch_size):
    labels = labels_of({0: 50, 1: 20, 2: 11, 5: 4, 9: 3})
    order = SAMPLERS["m_per_class"](labels, 0, m=m).order(seeded(), batch_size)
    assert len(order) == 88 // m * m
    for batch in order.split(batch_size):
        drawn = labels[batch]
        counts = Counter(drawn.tolist())
        assert all(count == m for count in counts.values())
        assert len(counts) == len(batch) // m
    # A group has different samples if its class has enough.
    for group in order.split(m):
        assert len(set(group.tolist())) == min(m, int((labels == labels[group[0]]).sum()))


def test_m_per_class_visits_classes_equally_often_and_all_their_samples():
    labels = labels_of(dict.fromkeys(range(6), 8))
    sampler = SAMPLERS["m_per_class"](labels, 0, m=4, samples=96)
    order = sampler.order(seeded(), 12)
    assert Counter(labels[order].tolist()) == dict.fromkeys(range(6), 16)
    assert Counter(order.tolist()) == dict.fromkeys(range(48), 2)


@pytest.mark.parametrize(
    ("batch_size", "message"), [(10, r"batch_size must be a multiple of sampler\.m \(4\), not 10"), (16, "at most 4")]
)
def test_m_per_class_rejects_batches_that_cannot_be_filled(batch_size, message):
    sampler = SAMPLERS["m_per_class"](labels_of({0: 10, 1: 10, 2: 10}), 0, m=4)
    with pytest.raises(ValueError, match=message):
        sampler.order(seeded(), batch_size)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("m_per_class", {"m": 0}, r"sampler\.m must be"),
        ("m_per_class", {"samples": 2}, r"sampler\.samples must be"),
        ("class_balanced", {"samples": 0}, r"sampler\.samples must be"),
        ("shuffled", {"seed": 2**70}, "seed must be"),
    ],
)
def test_sampler_rejects_invalid_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        SAMPLERS[name](torch.zeros(8, dtype=torch.int64), **options)
