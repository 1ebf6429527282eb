import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from hypersphere import _numerics
from hypersphere.evaluation import first_of_each, identification, identify, identify_by_first
from hypersphere.evaluation.identification import Mates

from . import reference

TOLERANCE = _numerics.tie_tolerance(torch.float64)


def people(seed=0, classes=8, each=3, dim=5, noise=0.6):
    rng = np.random.default_rng(seed)
    centers = rng.standard_normal((classes, dim))
    labels = np.repeat(np.arange(classes), each)
    return centers[labels] + noise * rng.standard_normal((len(labels), dim)), labels


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("block", [1, 7, 2048])
def test_identify_ranks_match_brute_force(seed, block):
    rng = np.random.default_rng(seed)
    x, y = people(seed)
    order = rng.permutation(len(x))
    probes, gallery = order[:9], order[9:]
    others = rng.standard_normal((40, 5))
    result = identify(x[probes], y[probes], x[gallery], y[gallery], distractors=others, block=block)
    everyone = np.concatenate([x[gallery], others])
    expected = reference.ranks(x[probes], y[probes], everyone, [*y[gallery], *[-1] * 40], TOLERANCE)
    assert result.mated.tolist() == [r is not None for r in expected]
    ranks = [r for r in expected if r is not None]
    assert result.ranks.tolist() == ranks
    assert result.accuracy == pytest.approx({k: np.mean(np.array(ranks) <= k) for k in (1, 5, 10)})
    assert result.entries == len(everyone)


@given(st.integers(0, 10**6), st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_cmc_rises_to_one_and_distractors_never_help(seed, each):
    x, y = people(seed, each=each + 1)
    first = np.arange(len(x)) % (each + 1) == 0
    alone = identify(x[first], y[first], x[~first], y[~first])
    curve = alone.cmc(alone.entries)
    assert (curve.diff() >= 0).all()
    assert curve[-1] == 1
    assert curve[0].item() == alone.accuracy_at(1)
    crowded = identify(
        x[first], y[first], x[~first], y[~first], distractors=np.random.default_rng(seed).standard_normal((50, 5))
    )
    assert (crowded.ranks >= alone.ranks).all()
    assert (crowded.cmc(60) <= alone.cmc(60)).all()


@pytest.mark.parametrize("block", [3, 64, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_identify_counts_ties_against_the_probe(block, dtype):
    """A network that maps everything to one point must be ranked last, although the rounding of products varies."""
    point = torch.randn(1, 127, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = point * torch.linspace(0.5, 2, 300).to(dtype)[:, None]
    labels = torch.arange(300)
    result = identify(
        point.expand(20, -1), labels[:20], x if dtype != torch.float16 else point.expand(300, -1), labels, block=block
    )
    assert result.ranks.tolist() == [300] * 20
    assert result.accuracy_at(299) == 0


def test_identify_ignores_other_entries_of_the_same_identity():
    gallery = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])
    result = identify([[1.0, 0.0]], [5], gallery, [5, 5, 5, 6])
    assert result.ranks.tolist() == [1]
    assert result.mate_scores.tolist() == [1.0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rank", [1, 3])
def test_open_set_rates_match_brute_force(seed, rank):
    x, y = people(seed, classes=20, each=2)
    gallery = (np.arange(len(x)) % 2 == 0) & (y < 12)
    probes = np.arange(len(x)) % 2 == 1
    result = identify(x[probes], y[probes], x[gallery], y[gallery])
    scores = reference.unit(x[probes]) @ reference.unit(x[gallery]).T
    strangers = scores[12:].max(1)
    mate_scores = scores[np.arange(12), np.arange(12)]
    ranks = np.array(reference.ranks(x[probes][:12], y[probes][:12], x[gallery], y[gallery], TOLERANCE))
    np.testing.assert_allclose(result.top_scores, strangers, atol=1e-12)
    np.testing.assert_allclose(result.mate_scores, mate_scores, atol=1e-12)
    for fpir in (0.5, 0.25, 0.126, 0.01):
        expected = reference.tpir(mate_scores[ranks <= rank], strangers, 12, fpir)
        assert result.tpir_at(fpir, rank=rank) == pytest.approx(expected)
    curve = result.open_set(rank)
    assert (curve.tpir.diff() >= 0).all()
    assert (curve.fpir.diff() >= 0).all()
    assert curve.tpir[-1].item() == pytest.approx(result.accuracy_at(rank))
    assert curve.fpir[-1] == 1
    assert not curve.at(0.01).resolved
    torch.testing.assert_close(curve.fnir, 1 - curve.tpir)
    assert "8 strangers" in repr(curve)


def test_open_set_rate_is_zero_if_no_probe_is_identified():
    result = identify([[1.0, 0.0], [0.0, 1.0]], [0, 9], [[0.0, 1.0], [1.0, 0.0]], [0, 1])
    assert result.tpir_at(0.5) == 0
    assert result.accuracy_at(2) == 1


def test_identify_searches_a_memory_mapped_half_precision_gallery(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2600, 16)).astype(np.float16)
    np.save(tmp_path / "gallery.npy", x)
    gallery = np.load(tmp_path / "gallery.npy", mmap_mode="r")
    y = np.arange(2600) // 2
    probes = x.astype(np.float32) + 1.3 * rng.standard_normal(x.shape).astype(np.float32)
    result = identify(probes, y, gallery, y)
    scores = reference.unit(probes) @ reference.unit(x).T
    mates = y[:, None] == y
    best = np.where(mates, scores, -2).max(1)
    expected = 1 + ((scores >= best[:, None] - _numerics.tie_tolerance(torch.float32)) & ~mates).sum(1)
    assert (result.ranks.numpy() != expected).mean() < 2e-3  # scores may differ by less than the rounding error
    assert abs(result.ranks.numpy() - expected).max() <= 1
    assert repr(result).startswith("Identification(2600 probes among 2600: rank-1 0.")


@pytest.mark.parametrize("block", [1, 7, 2048])
def test_identify_neighbours_match_brute_force(block, monkeypatch):
    monkeypatch.setattr("hypersphere.evaluation.identification.PROBE_ROWS", 4)
    rng = np.random.default_rng(0)
    x, y = people(classes=10)
    gallery, others = x[y < 8], rng.standard_normal((13, 5))
    result = identify(x, y, gallery, y[y < 8], distractors=others, neighbours=np.int64(6), block=block)
    order = np.argsort(-reference.unit(x) @ reference.unit(np.concatenate([gallery, others])).T, axis=1)
    assert result.neighbours.tolist() == order[:, :6].tolist()  # also for strangers
    assert identify(x, y, gallery, y[y < 8]).neighbours is None
    everyone = identify(x[:1], y[:1], gallery, y[y < 8], neighbours=len(gallery)).neighbours
    assert sorted(everyone[0].tolist()) == list(range(len(gallery)))
    for invalid in (0, len(gallery) + 1, 1.5):
        with pytest.raises(ValueError, match=f"neighbours must be an integer from 1 to {len(gallery)}"):
            identify(x, y, gallery, y[y < 8], neighbours=invalid)


def test_identify_accepts_an_array_of_ranks():
    result = identify(np.eye(3), [0, 1, 2], np.eye(3), [0, 1, 2], ranks=np.array([1, 2]))
    assert result.accuracy == {1: 1.0, 2: 1.0}
    assert result.accuracy_at(np.int64(1)) == result.cmc(np.int64(2))[0] == 1
    assert all(type(rank) is int for rank in result.reported_ranks)
    with pytest.warns(DeprecationWarning, match=r"Identification.shown is deprecated, use Identification.reported_ran"):
        assert result.shown == (1, 2)


def test_identify_handles_zero_and_huge_embeddings():
    gallery = torch.tensor([[0.0, 0.0], [3e30, 0.0], [1e-30, 1e-30], [-1.0, 0.0]])
    result = identify([[1.0, 0.0], [1.0, 1.0], [1.0, 0.0]], [1, 2, 0], gallery, [0, 1, 2, 3])
    assert result.ranks.tolist() == [1, 1, 3]  # the zero vector has cosine 0


@pytest.mark.parametrize("neighbours", [None, 5])
def test_identify_needs_the_memory_of_one_block(neighbours):
    x = torch.randn(40_000, 32)
    labels = torch.arange(40_000)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        identify(x[:500], labels[:500], x, labels, block=1024, neighbours=neighbours)
    level = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    assert 0 < peak < 4 * (500 * 1024 + 6 * 1024 * 32) + 40_000 * 8 * 6  # scores and rows of one block, labels


def test_identify_accepts_blocks_larger_than_the_gallery():
    x, y = people()
    for distractors in (None, np.concatenate([x, x + 1])):  # also more distractors than entries of the gallery
        expected = identify(x, y, distractors=distractors, block=7)
        result = identify(x, y, distractors=distractors, block=2**50)  # a buffer of this size could not be allocated
        assert torch.equal(result.ranks, expected.ranks)


def test_mates_list_all_pairs_with_equal_labels():
    rng = np.random.default_rng(0)
    probes, gallery = torch.tensor(rng.integers(0, 9, 30)), torch.tensor(rng.integers(4, 14, 50))
    mates = Mates(probes, gallery)
    listed = set()
    for start in range(0, 50, 8):
        pairs = list(zip(*(t.tolist() for t in mates.between(start, start + 8)), strict=True))
        assert all(start <= entry < start + 8 for _, entry in pairs)
        listed |= set(pairs)
    assert listed == {(p, g) for p in range(30) for g in range(50) if probes[p] == gallery[g]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"probes": np.ones((3, 4))}, "gallery must be a matrix with 4 columns"),
        ({"probes": np.ones((0, 2))}, "probes must be a non-empty matrix"),
        ({"probe_labels": [0, 1]}, "probe_labels must be a vector of 3 integers"),
        ({"probe_labels": [0.0, 1.0, 2.0]}, "probe_labels must be a vector of 3 integers, not 'torch.float64"),
        ({"probe_labels": [7, 8, 9]}, "probe_labels must have a label in common with gallery_labels"),
        ({"gallery_labels": [0]}, "gallery_labels must be a vector of 3 integers"),
        ({"distractors": np.ones((5, 3))}, "distractors must be a matrix with 2 columns"),
        ({"distractors": np.array([[1, 2], [np.nan, 1]])}, "distractors must be finite, but row 1 is not"),
        ({"ranks": [0]}, "ranks must be integers >= 1"),
        ({"block": 0}, "block must be an integer >= 1"),
        ({"ranks": 1}, "ranks must be a sequence of numbers, not 1"),
    ],
)
def test_identify_rejects_invalid_input(change, message):
    valid = {
        "probes": np.ones((3, 2)),
        "probe_labels": [0, 1, 2],
        "gallery": np.ones((3, 2)),
        "gallery_labels": [0, 1, 2],
    }
    with pytest.raises(ValueError, match=message):
        identify(**(valid | change))


def test_open_set_rejects_missing_strangers_and_invalid_ranks():
    result = identify(np.eye(2), [0, 1], np.eye(2), [0, 1])
    with pytest.raises(ValueError, match="probes without a mate in the gallery, but all 2 have one"):
        result.tpir_at(0.1)
    for call in (lambda: result.cmc(0), lambda: result.accuracy_at(0), lambda: result.open_set(0)):
        with pytest.raises(ValueError, match="an integer >= 1, not 0"):
            call()


@pytest.mark.parametrize("count", [1, 2, 500])
def test_first_of_each_matches_a_loop(count):
    labels = np.random.default_rng(count).integers(-3, 40, size=count)
    expected, seen = [], set()
    for label in labels.tolist():
        expected.append(label not in seen)
        seen.add(label)
    assert first_of_each(labels).tolist() == expected
    assert first_of_each(torch.from_numpy(labels)).tolist() == expected
    assert first_of_each(labels.tolist()).tolist() == expected


def test_first_of_each_rejects_invalid_labels():
    with pytest.raises(ValueError, match="labels must be integers, not 'ann'"):
        first_of_each(["ann", "bob"])
    with pytest.raises(ValueError, match="labels must be a non-empty vector of integers"):
        first_of_each(torch.zeros(2, 2, dtype=torch.int64))


def test_identify_by_first_needs_a_class_of_two_samples():
    with pytest.raises(ValueError, match="labels must have a label that occurs twice, but there is none"):
        identify_by_first(torch.eye(3), [0, 1, 2])


@pytest.mark.parametrize("block", [3, 8192])
def test_identify_without_a_gallery_leaves_the_probe_out(monkeypatch, block):
    monkeypatch.setattr(identification, "PROBE_ROWS", 4)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(14, 5, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 4, 5, 5, 5])  # the people 3 and 4 have one image
    others = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    result = identify(x, labels, distractors=others, neighbours=3, block=block)
    assert result.mated.tolist() == [label not in (3, 4) for label in labels.tolist()]
    assert result.entries == 13 + 6
    ranks, top_scores = [], []
    for probe in range(14):
        rest = [i for i in range(14) if i != probe]
        entries = torch.cat([x[rest], others])
        entry_labels = [*labels[rest].tolist(), *[-1] * 6]
        one = identify(x[[probe]], labels[[probe]], entries, entry_labels) if result.mated[probe] else None
        cosines = torch.cosine_similarity(x[[probe]], entries)
        if one is None:
            top_scores.append(float(cosines.max()))
        else:
            ranks.append(int(one.ranks[0]))
        nearest = [(rest + list(range(14, 20)))[i] for i in cosines.argsort(descending=True)[:3].tolist()]
        assert result.neighbours[probe].tolist() == nearest
    assert result.ranks.tolist() == ranks
    assert result.top_scores.tolist() == pytest.approx(top_scores)
    assert identify(x, labels, x, labels).accuracy_at(1) == 1  # here each probe finds itself


def test_identify_without_a_gallery_needs_a_person_with_two_images():
    with pytest.raises(ValueError, match="probe_labels must have a label that occurs twice, but there is none"):
        identify(torch.eye(3), [0, 1, 2])
    with pytest.raises(ValueError, match="gallery_labels must be given with a gallery, not None"):
        identify(torch.eye(3), [0, 1, 2], torch.eye(3))
