import pytest
import torch

from hypersphere.evaluation import retrieve


@pytest.mark.parametrize("seed", range(3))
def test_retrieve_agrees_with_a_loop_over_queries(seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(8).repeat_interleave(5)
    x = torch.randn(8, 6, generator=generator)[labels] + 0.7 * torch.randn(40, 6, generator=generator)
    labels[0] = 8  # a class with one sample is no query
    unit = x / x.norm(dim=1, keepdim=True)
    recalls, precisions = [], []
    for query in range(len(x)):
        others = [place for place in range(len(x)) if place != query]
        relevant = sum(int(labels[place] == labels[query]) for place in others)
        if not relevant:
            continue
        ranked = sorted(others, key=lambda place: -float(unit[query] @ unit[place]))
        hits = [int(labels[place] == labels[query]) for place in ranked[:relevant]]
        recalls.append(hits[0])
        precisions.append(sum(sum(hits[: k + 1]) / (k + 1) * hits[k] for k in range(relevant)) / relevant)
    found = retrieve(x, labels)
    assert found.recall_at_1 == pytest.approx(sum(recalls) / len(recalls))
    assert found.map_at_r == pytest.approx(sum(precisions) / len(precisions))
    assert found.queries == 39
    assert retrieve(x.numpy(), [100 * label for label in labels.tolist()]) == found


def test_retrieve_needs_a_class_with_two_samples():
    with pytest.raises(ValueError, match="labels must be labels with a class that has two samples, not 'none'"):
        retrieve(torch.randn(3, 2), torch.arange(3))
