"""The protocol of MegaFace against explicit loops."""

import numpy as np
import pytest
import torch

from hypersphere.evaluation import identify, mates, rank_mates, roc


def faces(seed, people=5, images=3, distractors=70, dim=4):
    generator = torch.Generator().manual_seed(seed)
    probes = torch.randn(people * images, dim, generator=generator, dtype=torch.float64)
    return (
        probes,
        torch.arange(people).repeat_interleave(images),
        torch.randn(distractors, dim, generator=generator, dtype=torch.float64),
    )


def cosine(a, b):
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


@pytest.mark.parametrize("block", [7, 8192])
def test_rank_mates_equals_a_loop_over_trials(monkeypatch, block):
    monkeypatch.setattr(mates, "PROBE_ROWS", 4)
    probes, labels, distractors = faces(0)
    result = rank_mates(probes, labels, distractors, sizes=[10, 30], block=block)
    x, d = probes.numpy(), distractors.numpy()
    trials = [(i, j) for i in range(15) for j in range(15) if i != j and labels[i] == labels[j]]
    assert list(zip(result.probe.tolist(), result.mate.tolist(), strict=True)) == trials
    for size in (10, 30, 70):
        expected = [1 + sum(cosine(x[i], other) >= cosine(x[i], x[j]) for other in d[:size]) for i, j in trials]
        assert result.ranks[size].tolist() == expected
        assert result.rate(3, size) == np.mean([rank <= 3 for rank in expected])
    assert result.cmc(5).tolist() == [result.rate(rank) for rank in range(1, 6)]


def test_rank_mates_verification_agrees_with_the_exact_curve():
    probes, labels, distractors = faces(1)
    result = rank_mates(probes, labels, distractors)
    x = torch.nn.functional.normalize(probes)
    negatives = (x @ torch.nn.functional.normalize(distractors).mT).flatten()
    scores = torch.cat([result.scores, negatives])
    exact = roc(scores, torch.arange(len(scores)) < len(result.scores))
    curve = result.roc()
    assert (curve.positives, curve.negatives) == (30, 15 * 70)
    for far in (1e-3, 1e-2, 0.1, 0.5):
        assert curve.tar_at(far) == exact.tar_at(far)
    assert curve.auc == pytest.approx(exact.auc, abs=1e-4)


def test_rank_mates_equals_identify_for_one_mate_per_probe():
    probes, labels, distractors = faces(2, images=2)
    result = rank_mates(probes, labels, distractors)
    for probe, mate, rank in zip(result.probe.tolist(), result.mate.tolist(), result.ranks[70].tolist(), strict=True):
        one = identify(probes[[probe]], [0], probes[[mate]], [0], distractors=distractors)
        assert int(one.ranks[0]) == rank


def test_rank_mates_counts_a_tie_against_the_mate():
    probes = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    result = rank_mates(probes, [0, 0], torch.tensor([[1.0, -1.0], [0.0, 1.0]]))
    assert result.ranks[2].tolist() == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": [0, 1, 2]}, "labels must contain a person with two or more images"),
        ({"sizes": [0]}, r"sizes must be integers in 1\.\.4, the number of distractors"),
        ({"sizes": [5]}, r"sizes must be integers in 1\.\.4"),
        ({"sizes": [2.7]}, r"sizes must be integers in 1\.\.4"),
        ({"block": 0}, "block must be an integer >= 1"),
    ],
)
def test_rank_mates_names_a_wrong_argument(arguments, message):
    given = {"labels": [0, 0, 1], **arguments}
    with pytest.raises(ValueError, match=message):
        rank_mates(torch.eye(3), given.pop("labels"), torch.ones(4, 3), **given)
    result = rank_mates(torch.eye(3), [0, 0, 1], torch.ones(4, 3))
    with pytest.raises(ValueError, match="distractors must be one of 4, not 3"):
        result.rate(1, 3)


def test_rank_mates_is_the_same_under_autocast():
    generator = torch.Generator().manual_seed(0)
    probes, distractors = torch.randn(6, 8, generator=generator), torch.randn(20, 8, generator=generator)
    expected = rank_mates(probes, [0, 0, 1, 1, 2, 2], distractors, sizes=[7])
    with torch.autocast("cpu", torch.bfloat16):
        result = rank_mates(probes, [0, 0, 1, 1, 2, 2], distractors, sizes=[7])
    for size in (7, 20):
        assert torch.equal(result.ranks[size], expected.ranks[size])
