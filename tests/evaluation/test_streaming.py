import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hypersphere.evaluation import AllPairs, cosine_scores, rank_mates, roc, streaming, verify_blocks

RATES = (0.999, 0.5, 0.1, 0.01, 1e-3, 1e-6)


def exact(curve, rates, rule):
    return tuple(curve.at(rate, rule=rule) for rate in rates)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", ["step", "linear"])
@pytest.mark.parametrize("step", [None, 0.25])
@pytest.mark.parametrize("seed", range(3))
def test_verify_blocks_is_exactly_the_in_memory_curve(monkeypatch, dtype, rule, step, seed):
    monkeypatch.setattr(streaming, "CHUNK", 100)
    generator = torch.Generator().manual_seed(seed)
    same = torch.rand(3000, generator=generator) < 0.2
    scores = torch.randn(3000, generator=generator, dtype=dtype) + 1.5 * same
    scores = scores if step is None else (scores / step).round() * step
    curve = roc(scores, same)
    result = verify_blocks(list(zip(scores.split(700), same.split(700), strict=True)), RATES, rule=rule)
    assert result.points == exact(curve, RATES, rule)
    assert result.eer == curve.eer
    assert (result.same, result.different) == (curve.positives, curve.negatives)
    assert result.tar == {rate: curve.tar_at(rate, rule=rule) for rate in RATES}
    assert result.thresholds == {rate: curve.at(rate).threshold for rate in RATES}


@given(
    st.lists(
        st.tuples(st.floats(width=32, allow_nan=False, allow_infinity=False), st.booleans()), min_size=1, max_size=12
    )
)
@settings(max_examples=30, deadline=None)
def test_verify_blocks_handles_every_float(pairs):
    pairs = [*pairs, (0.0, True), (-0.0, False)]
    scores, same = torch.tensor([s for s, _ in pairs]), torch.tensor([f for _, f in pairs])
    for values in (scores, scores.double()):
        result, curve = verify_blocks([(values, same)], (0.5, 0.1)), roc(values, same)
        assert result.points == exact(curve, (0.5, 0.1), "step")
        assert result.eer == curve.eer


@pytest.mark.parametrize("block", [7, 2048])
def test_all_pairs_are_compared_once_and_never_with_themselves(block):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(5, (30,), generator=generator)
    first, second = torch.triu_indices(30, 30, offset=1)
    expected = roc(cosine_scores(x[first], x[second]), labels[first] == labels[second])
    result = verify_blocks(AllPairs(x, labels, block=block), RATES)
    assert (result.same, result.different) == (expected.positives, expected.negatives)
    assert list(result.tar.values()) == [expected.tar_at(rate) for rate in RATES]
    for point in result.points:
        assert point.threshold == pytest.approx(expected.at(point.requested_rate).threshold, abs=1e-12)


def test_all_pairs_with_a_gallery_are_the_product():
    generator = torch.Generator().manual_seed(1)
    x, gallery = torch.randn(11, 6, generator=generator), torch.randn(17, 6, generator=generator)
    labels, gallery_labels = (torch.randint(4, (n,), generator=generator) for n in (11, 17))
    blocks = list(AllPairs(x, labels, gallery, gallery_labels, block=5))
    assert sum(scores.numel() for scores, _ in blocks) == 11 * 17
    assert sum(int(same.sum()) for _, same in blocks) == int((labels[:, None] == gallery_labels).sum())
    assert {scores.dtype for scores, _ in blocks} == {torch.float32}


def test_verify_blocks_gives_the_exact_rates_of_the_megaface_protocol():
    generator = torch.Generator().manual_seed(2)
    probes, distractors = torch.randn(12, 6, generator=generator), torch.randn(90, 6, generator=generator)
    people = torch.arange(12) // 3
    ranked = rank_mates(probes, people, distractors)

    def blocks():
        yield ranked.scores, torch.ones(len(ranked.scores), dtype=torch.bool)
        yield from AllPairs(probes, people, distractors, torch.full((90,), -1), block=8)

    result, binned = verify_blocks(blocks, (0.1, 0.01)), ranked.roc()
    assert (result.same, result.different) == (binned.positives, binned.negatives)
    for point in result.points:
        negatives = torch.cosine_similarity(probes[:, None], distractors, dim=2)
        assert point.false_rate == (negatives >= point.threshold - 1e-6).double().mean()
        assert point.threshold == pytest.approx(binned.at(point.requested_rate).threshold, abs=2**-18)


class LargestTensor(TorchDispatchMode):
    """Record the largest number of elements of any tensor that an operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.numel())
        return result


def test_verify_blocks_needs_memory_for_blocks_and_counts_only():
    x, labels = torch.randn(1500, 8), torch.randint(50, (1500,))  # 1.1 million pairs
    with LargestTensor() as mode:
        result = verify_blocks(AllPairs(x, labels, block=128), (0.1, 1e-3))
    assert result.same + result.different == 1500 * 1499 // 2
    # Two rates and the equal error rate have two prefixes each, with counts of two kinds by 2^16 digits.
    assert mode.largest <= 6 * 2 * 2**16


def test_verify_blocks_reads_functions_and_lists_but_no_generators():
    scores, same = [torch.tensor([0.9, 0.8, 0.7, 0.3])], [torch.tensor([1, 0, 1, 0])]

    def blocks():
        yield from zip(scores, same, strict=True)

    assert verify_blocks(blocks, [0.5]).tar == {0.5: 1.0}
    assert verify_blocks([(np.array([0.9, 0.8]), [1, 0]), (np.array([0.7, 0.3]), [1, 0])], [0.5]).tar == {0.5: 1.0}
    with pytest.raises(ValueError, match="blocks must be readable several times: pass a list or a function"):
        verify_blocks(blocks(), [0.5])
    once = blocks()
    with pytest.raises(ValueError, match="blocks must be the same in each pass"):
        verify_blocks(lambda: once, [0.5])


@pytest.mark.parametrize(
    ("blocks", "rates", "message"),
    [
        ([], [0.1], "blocks must contain at least one score"),
        ([([0.1, 0.2], [1, 1])], [0.1], r"at least one negative \(different\) pair, but none of 2 is"),
        ([([0.1, 0.2], [0, 0])], [0.1], r"at least one positive \(same\) pair"),
        ([([0.1, math.nan], [0, 1])], [0.1], "blocks must be finite, but row 1 is not"),
        ([([0.1, 0.2], [0, 1, 1])], [0.1], r"real scores and flags of equal shape, not '\(2,\) and \(3,\)'"),
        ([([0.1, 0.2], [0, 2])], [0.1], "flags that are booleans or 0 and 1"),
        ([([0.1, 0.2], [0, 1]), (torch.ones(1), [1])], [0.1], "blocks must be scores of one dtype, torch.float64"),
        ([([0.1, 0.2], [0, 1])], [1.0], r"far must be rates in \(0, 1\), not 1.0"),
    ],
)
def test_verify_blocks_rejects_invalid_input(blocks, rates, message):
    with pytest.raises(ValueError, match=message):
        verify_blocks(blocks, rates)


def test_all_pairs_rejects_invalid_input():
    with pytest.raises(ValueError, match="block must be an integer >= 1, not 0"):
        AllPairs(torch.eye(2), [0, 1], block=0)
    with pytest.raises(ValueError, match="gallery_labels must be given with a gallery, not None"):
        AllPairs(torch.eye(2), [0, 1], torch.eye(2))
    with pytest.raises(ValueError, match="gallery must be a matrix with 2 columns"):
        AllPairs(torch.eye(2), [0, 1], torch.eye(3), [0, 1, 2])
