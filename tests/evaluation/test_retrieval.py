import pytest
import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN

from hypersphere.evaluation import retrieval, retrieve


def samples(seed, noise=0.7):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(8).repeat_interleave(5)
    x = torch.randn(8, 6, generator=generator)[labels] + noise * torch.randn(40, 6, generator=generator)
    labels[0] = 8  # a class with one sample has no mates
    labels[1:3] = 7  # and classes of different sizes
    return x, labels


def brute_force(queries, labels, entries, entry_labels, ks, itself):
    """Return recalls, R-precision and MAP@R by loops over queries and entries."""
    rows = []
    for query, vector in enumerate(queries):
        others = [place for place in range(len(entries)) if not (itself and place == query)]
        relevant = sum(int(entry_labels[place] == labels[query]) for place in others)
        if not relevant:
            continue
        ranked = sorted(others, key=lambda place: -float(torch.cosine_similarity(vector, entries[place], dim=0)))
        hits = [int(entry_labels[place] == labels[query]) for place in ranked]
        precision = [sum(hits[: k + 1]) / (k + 1) for k in range(relevant)]
        average = sum(p * hit for p, hit in zip(precision, hits, strict=False)) / relevant
        rows.append([*(max(hits[:k]) for k in ks), sum(hits[:relevant]) / relevant, average])
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("seed", range(3))
def test_retrieve_agrees_with_a_loop_over_queries(monkeypatch, seed):
    monkeypatch.setattr(retrieval, "QUERY_ROWS", 7)
    x, labels = samples(seed)
    result = retrieve(x, labels, ks=[3, 100])
    expected = brute_force(x.double(), labels, x.double(), labels, [1, 3, 100], itself=True)
    assert [*result.recall.values(), result.r_precision, result.map_at_r] == pytest.approx(expected)
    assert list(result.recall) == [1, 3, 100]
    assert result.recall_at_1 == result.recall[1]
    assert (result.queries, result.without_mates) == (39, 1)
    assert retrieve(x.numpy(), [100 * label for label in labels.tolist()], ks=[3, 100]) == result


@pytest.mark.parametrize("seed", range(3))
def test_retrieve_agrees_with_pytorch_metric_learning(seed):
    x, labels = samples(seed)
    metrics = ("precision_at_1", "r_precision", "mean_average_precision_at_r")
    calculator = AccuracyCalculator(include=metrics, k="max_bin_count", knn_func=CustomKNN(CosineSimilarity()))
    peer = calculator.get_accuracy(x, labels)
    result = retrieve(x, labels)
    assert [result.recall[1], result.r_precision, result.map_at_r] == pytest.approx([peer[name] for name in metrics])
    split = calculator.get_accuracy(x[:20], labels[:20], x[20:], labels[20:])
    with_gallery = retrieve(x[:20], labels[:20], x[20:], labels[20:])
    assert [with_gallery.recall[1], with_gallery.r_precision, with_gallery.map_at_r] == pytest.approx(
        [split[name] for name in metrics]
    )


def test_retrieve_searches_a_gallery():
    x, labels = samples(4)
    result = retrieve(x[::2], labels[::2], x[1::2], labels[1::2], ks=[2])
    expected = brute_force(x[::2].double(), labels[::2], x[1::2].double(), labels[1::2], [1, 2], itself=False)
    assert [*result.recall.values(), result.r_precision, result.map_at_r] == pytest.approx(expected)
    assert result.without_mates == 1
    # An entry that equals the query is a mate like any other.
    assert retrieve(x, labels, x, labels).recall[1] == 1


def test_retrieve_skips_or_counts_queries_without_mates():
    x, labels = samples(5)
    skipped, missed = (retrieve(x, labels, without_mates=rule) for rule in ("skip", "miss"))
    assert (skipped.queries, missed.queries) == (39, 40)
    for name in ("recall_at_1", "r_precision", "map_at_r"):
        assert getattr(missed, name) == pytest.approx(getattr(skipped, name) * 39 / 40)


def test_retrieve_counts_ties_against_the_query():
    labels = torch.arange(4).repeat_interleave(3)
    collapsed = retrieve(torch.ones(12, 5), labels, ks=[1, 9, 10])
    # Nine entries of other classes are as near as the two mates.
    assert collapsed.recall == {1: 0, 9: 0, 10: 1}
    assert (collapsed.r_precision, collapsed.map_at_r) == (0, 0)


def test_retrieve_accepts_half_precision():
    x, labels = samples(6, noise=0.2)
    assert retrieve(x.bfloat16(), labels).map_at_r == pytest.approx(retrieve(x.double(), labels).map_at_r, abs=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "labels must have a class that has two samples, but there is none"),
        ({"gallery": torch.eye(3)}, "gallery_labels must be given with a gallery, not None"),
        (
            {"gallery": torch.eye(3), "gallery_labels": [7, 8, 9]},
            "labels must have a class in common with gallery_labels, but there is none",
        ),
        ({"ks": [0]}, r"ks must be integers >= 1, not \[0\]"),
        ({"without_mates": "drop"}, "without_mates must be 'skip' or 'miss', not 'drop'"),
    ],
)
def test_retrieve_rejects_invalid_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        retrieve(torch.eye(3), torch.arange(3), **arguments)
