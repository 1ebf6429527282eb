import copy
import itertools
import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hypersphere._files import file_summary
from hypersphere.gallery import DamagedGallery, Gallery, Matches, fingerprint_of
from hypersphere.gallery import _search as search_module
from hypersphere.gallery._rows import BLOCK_ROWS, Rows

DTYPES = ["float32", "float16", "int8", "binary"]
ERRORS = {"float32": 1e-6, "float16": 5e-4, "int8": 1e-2}  # of cosines


def unit(x):
    x = np.asarray(x, dtype=np.float64)
    norms = np.linalg.norm(x, axis=-1, keepdims=True)
    return np.divide(x, norms, out=np.zeros_like(x), where=norms > 0)


def brute_force(queries, embeddings, k):
    """Return cosines and numbers of the k best by a complete stable sort in float64."""
    cosines = unit(queries) @ unit(embeddings).T
    order = np.argsort(-cosines, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(cosines, order, 1), order


def random_matrix(rows, dim, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, dim))


def gallery_of(embeddings, *arguments, names=None, **options):
    gallery = Gallery(np.shape(embeddings)[1], *arguments, **options)
    gallery.enroll([str(i) for i in range(len(embeddings))] if names is None else names, embeddings)
    return gallery


# --- exact search


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize(("rows", "dim", "queries", "k"), [(50, 3, 7, 5), (BLOCK_ROWS + 77, 16, 70, 10)])
def test_search_agrees_with_brute_force(dtype, rows, dim, queries, k):
    embeddings, x = random_matrix(rows, dim), random_matrix(queries, dim, seed=1)
    matches = gallery_of(embeddings, dtype).search(x, k)
    cosines, order = brute_force(x, embeddings, k)
    assert matches.scores.dtype == torch.float32
    assert np.abs(matches.scores.numpy() - cosines).max() < ERRORS[dtype]
    if dtype == "float32":
        assert matches.entries.tolist() == order.tolist()
    assert matches.names == tuple(tuple(str(entry) for entry in row) for row in matches.entries.tolist())


# Products of int8 numbers are used for many queries if the processor has an instruction for them.
@pytest.fixture(params=[False, True], ids=["without VNNI", "with VNNI"])
def int8_instruction(request, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: request.param, raising=False)


@pytest.mark.usefixtures("int8_instruction")
@pytest.mark.parametrize(("queries", "dim"), [(1, 32), (4, 48), (4, 20), (5, 32), (130, 7)])
def test_search_in_int8_is_exact_for_the_stored_levels(queries, dim):
    embeddings, x = random_matrix(BLOCK_ROWS + 501, dim), random_matrix(queries, dim, seed=1)
    directions = unit(embeddings).astype(np.float32)
    levels = np.rint(127 * directions / np.abs(directions).max(1, keepdims=True))
    cosines, order = brute_force(x, levels, 10)
    matches = gallery_of(embeddings, "int8").search(x)
    assert np.abs(matches.scores.numpy() - cosines).max() < 1e-6
    assert matches.entries.tolist() == order.tolist()


@pytest.mark.usefixtures("int8_instruction")
def test_search_in_int8_is_exact_if_rounded_queries_cannot_separate_scores():
    embeddings = np.array([1.0] + [0.0] * 15) + 0.01 * random_matrix(3000, 16)
    gallery = gallery_of(embeddings, "int8")
    x = random_matrix(1, 16, seed=1)
    batch = np.concatenate([x, random_matrix(9, 16, seed=2), np.zeros((1, 16))])
    single, several = gallery.search(x), gallery.search(batch)
    directions = unit(embeddings).astype(np.float32)
    levels = np.rint(127 * directions / np.abs(directions).max(1, keepdims=True))
    cosines, order = brute_force(x, levels, 10)
    assert np.abs(single.scores.numpy() - cosines).max() < 1e-6
    assert single.entries.tolist() == several.entries[:1].tolist() == order.tolist()
    assert torch.equal(single.scores, several.scores[:1])
    assert several.scores[-1].tolist() == [0.0] * 10


@pytest.mark.usefixtures("int8_instruction")
@pytest.mark.parametrize("dim", [1, 140_000])
def test_search_in_int8_finds_the_best_of_very_short_and_very_long_rows(dim):
    """Products of int8 numbers are wrong for one column, and overflow for very many."""
    embeddings = random_matrix(60, dim)
    embeddings[:50] = -np.abs(embeddings[:50])
    embeddings[55] = 1
    matches = gallery_of(embeddings, "int8").search(np.ones((6, dim)), 1)
    assert matches.scores.numpy() == pytest.approx(np.ones((6, 1)), abs=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_search_does_not_depend_on_the_default_dtype(dtype):
    embeddings, x = random_matrix(40, 6), random_matrix(9, 6, seed=1)
    expected = gallery_of(embeddings, dtype).search(x)
    torch.set_default_dtype(torch.float64)
    try:
        matches = gallery_of(embeddings, dtype).search(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(matches.scores, expected.scores)
    assert torch.equal(matches.entries, expected.entries)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 9])
def test_search_orders_copies_by_enrolment(dtype, queries):
    x = random_matrix(queries, 20, seed=1)
    copies = random_matrix(1, 20) + 3 * x[:1]
    embeddings = np.concatenate([random_matrix(5, 20), np.repeat(copies, 300, 0), random_matrix(BLOCK_ROWS, 20)])
    embeddings = np.concatenate([embeddings, np.repeat(copies, 300, 0)])
    gallery = gallery_of(embeddings, dtype)
    expected = [5 + i for i in range(50)]
    assert gallery.search(copies, 50).entries[0].tolist() == expected
    assert gallery.search(np.concatenate([x, copies]), 50).entries[-1].tolist() == expected


def test_copies_have_equal_scores_in_every_batch_and_position():
    embeddings = random_matrix(400, 33)
    embeddings[7] = 0  # a zero vector must not change how others are normalised
    gallery = Gallery(33)
    for part in (embeddings, embeddings[100:107], embeddings[:8]):
        gallery.enroll(["x"] * len(part), torch.tensor(part, dtype=torch.float32))
    matches = gallery.search(embeddings[:8].astype(np.float32), 2)
    assert matches.entries[:7].tolist() == [[i, 407 + i] for i in range(7)]
    assert torch.equal(matches.scores[:7, 0], matches.scores[:7, 1])


def test_zero_vectors_have_cosine_zero():
    for dtype in ("float32", "float16", "int8"):
        gallery = gallery_of([[0.0, 0.0], [3.0, 4.0], [-1.0, 0.0]], dtype)
        assert gallery.search([0.0, 0.0]).entries.tolist() == [[0, 1, 2]]
        assert gallery.search([0.0, 0.0]).scores.tolist() == [[0, 0, 0]]
        assert gallery.search([1.0, 0.0]).entries.tolist() == [[1, 0, 2]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_search_lists_all_if_k_is_larger_than_the_gallery(dtype):
    matches = gallery_of(np.eye(4), dtype).search(np.eye(4)[:2], k=100)
    assert matches.scores.shape == (2, 4)
    assert sorted(matches.names[0]) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("per_name", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_galleries_and_empty_queries_give_empty_matches(dtype, per_name):
    empty = Gallery(3, dtype).search(np.eye(3), per_name=per_name)
    assert empty.scores.shape == empty.entries.shape == (3, 0)
    assert empty.names == ((), (), ())
    none = gallery_of(np.eye(3), dtype).search(torch.empty(0, 3), k=2, per_name=per_name)
    assert none.scores.shape == (0, 2)
    assert none.names == ()
    gallery = Gallery(3, dtype)
    gallery.enroll([], [])
    assert len(gallery) == 0
    assert len(gallery.search([])) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_inputs_of_every_dtype_are_accepted(dtype):
    embeddings = torch.tensor([[1, 2, 3], [-2, 0, 1]], dtype=dtype)
    gallery = gallery_of(embeddings)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        matches = gallery.search(embeddings.requires_grad_() if dtype.is_floating_point else embeddings, 1)
    assert torch.allclose(matches.scores, torch.ones(2, 1), atol=1e-6)
    assert not matches.scores.requires_grad


def test_enroll_and_search_accept_a_single_vector():
    gallery = Gallery(3)
    gallery.enroll(["ada"], torch.tensor([0.0, 2.0, 0.0]))
    assert gallery.search(torch.tensor([0.0, 1.0, 0.0])).names == (("ada",),)
    with pytest.raises(ValueError, match="names must be 1 names, one per embedding, not '2 names'"):
        gallery.enroll(["ada", "emmy"], torch.ones(3))


def test_huge_and_tiny_embeddings_keep_their_direction():
    gallery = gallery_of(np.array([[1e200, 0.0], [0.0, 1e-200]]))
    assert gallery.search([[0.0, 1e300]], 1).scores.item() == pytest.approx(1)
    assert gallery.search([[0.0, 1e300]], 1).names == (("1",),)


def test_largest_finds_the_largest_scores_of_grouped_columns():
    scores = torch.randn(9, 4 * search_module.GROUPS)
    values, columns = search_module._largest(scores, 30)
    assert torch.equal(values, scores.gather(1, columns))
    assert torch.equal(values.sort(1, descending=True).values, scores.topk(30).values)


def test_many_candidates_are_merged_in_parts(monkeypatch):
    embeddings, x = random_matrix(3 * BLOCK_ROWS, 4), random_matrix(6, 4, seed=1)
    gallery = gallery_of(embeddings)
    expected = gallery.search(x, 40)
    monkeypatch.setattr(search_module, "UNMERGED", 1)
    assert torch.equal(gallery.search(x, 40).entries, expected.entries)


# --- binary


@pytest.mark.parametrize("dim", [1, 63, 64, 100])
@pytest.mark.parametrize("has_count", [True, False])
def test_binary_candidates_have_the_fewest_different_signs(dim, has_count, monkeypatch):
    if not has_count:  # as in NumPy 1
        monkeypatch.delattr(np, "bitwise_count", raising=False)
    embeddings, x = random_matrix(BLOCK_ROWS + 99, dim), random_matrix(5, dim, seed=1)
    rows = Rows(dim, "binary")
    rows.append(torch.tensor(embeddings, dtype=torch.float32))
    distances = ((x > 0)[:, None] != (embeddings > 0)[None]).sum(2)
    expected = np.argsort(distances, axis=1, kind="stable")[:, :30]
    assert search_module._hamming(rows, torch.tensor(x), 30).tolist() == expected.tolist()


def test_binary_candidates_of_very_wide_rows_have_the_fewest_different_signs():
    """From 65,536 dimensions on, the product of a distance and the number of rows of a block exceeds int32."""
    dim = 2**31 // BLOCK_ROWS
    x = torch.ones(1, dim, dtype=torch.float64)
    embeddings = torch.ones(4, dim)
    for row, different in enumerate((dim, dim - 1, 7, dim // 2)):
        embeddings[row, :different] = -1
    rows = Rows(dim, "binary")
    rows.append(embeddings)
    assert search_module._hamming(rows, x, 4).tolist() == [[2, 3, 1, 0]]
    assert search_module._hamming(rows, x, 1).tolist() == [[2]]


def test_binary_scores_are_cosines_with_the_signs():
    embeddings, x = random_matrix(40, 70), random_matrix(3, 70, seed=1)
    matches = gallery_of(embeddings, "binary").search(x, 40)
    cosines, order = brute_force(x, np.where(embeddings > 0, 1, -1), 40)
    assert np.abs(matches.scores.numpy() - cosines).max() < 1e-6
    assert matches.entries.tolist() == order.tolist()


@pytest.mark.parametrize("dtype", ["float16", "int8", "binary"])
def test_keep_full_gives_exact_scores(dtype):
    embeddings = random_matrix(3000, 128)
    x = embeddings[::300] + 0.3 * random_matrix(10, 128, seed=1)
    matches = gallery_of(embeddings, dtype, keep_full=True).search(x, 3)
    cosines = unit(x) @ unit(embeddings).T
    expected = np.take_along_axis(cosines, matches.entries.numpy(), 1)
    assert np.abs(matches.scores.numpy() - expected).max() < 1e-6
    assert matches.entries[:, 0].tolist() == list(range(0, 3000, 300))


@pytest.mark.parametrize(("dtype", "share"), [("float16", 0.5), ("int8", 0.26), ("binary", 1 / 32)])
def test_compact_galleries_need_a_fraction_of_the_memory(dtype, share):
    embeddings = random_matrix(1000, 128)
    assert gallery_of(embeddings, dtype).nbytes <= share * gallery_of(embeddings).nbytes


# --- names


def test_per_name_lists_each_name_once_with_its_best_embedding():
    embeddings, x = random_matrix(300, 6), random_matrix(8, 6, seed=1)
    # One name has almost all embeddings, so that the first candidates have few names.
    names = [f"rare {i % 5}" if i % 20 == 0 else "common" for i in range(300)]
    matches = gallery_of(embeddings, names=names).search(x, 4, per_name=True)
    cosines = unit(x) @ unit(embeddings).T
    for query, row in enumerate(cosines):
        best = {}
        for entry in np.argsort(-row, kind="stable"):
            best.setdefault(names[entry], entry)
        expected = list(best.items())[:4]
        assert list(zip(matches.names[query], matches.entries[query].tolist(), strict=True)) == expected
        assert matches.scores[query].tolist() == pytest.approx([row[entry] for _, entry in expected], abs=1e-6)


def test_per_name_lists_all_names_if_there_are_fewer_than_k():
    gallery = gallery_of(np.eye(3), names=["a", "b", "a"])
    assert gallery.search([0.1, 0.2, 0.3], 10, per_name=True).names == (("a", "b"),)


NAMES = ["ada", "", "Émilie du Châtelet", "名前", "a/b\\c\n\t\"'", "\x00", "\ud800", "💠", "None", "ada"]


def test_names_are_stored_unchanged(tmp_path):
    gallery = gallery_of(random_matrix(len(NAMES), 4), names=NAMES)
    gallery.save(tmp_path)
    assert Gallery.load(tmp_path).names == gallery.names == tuple(NAMES)
    str(gallery.search(np.ones((1, 4)))).encode()  # what is printed has no invalid characters


# --- enrol and remove


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("enroll"),
            st.lists(
                st.tuples(st.sampled_from("abcd"), st.lists(st.integers(-2, 2), min_size=3, max_size=3)), max_size=6
            ),
        ),
        st.tuples(st.just("remove"), st.sets(st.sampled_from("abcd"), max_size=2)),
        st.tuples(st.just("reload"), st.none()),
    ),
    max_size=8,
)


@settings(max_examples=40, deadline=None)
@given(OPERATIONS, st.lists(st.integers(-2, 2), min_size=3, max_size=3), st.integers(1, 12), st.booleans())
def test_any_sequence_of_changes_gives_the_search_of_a_list(tmp_path_factory, operations, query, k, in_int8):
    folder = tmp_path_factory.mktemp("gallery")
    gallery, entries = Gallery(3, "int8" if in_int8 else "float32"), []
    for kind, value in operations:
        if kind == "enroll":
            gallery.enroll([name for name, _ in value], [vector for _, vector in value])
            entries += value
        elif kind == "remove":
            present = value & {name for name, _ in entries}
            assert gallery.remove(sorted(present)) == sum(name in present for name, _ in entries)
            entries = [entry for entry in entries if entry[0] not in present]
        else:
            gallery.save(folder)
            gallery = Gallery.load(folder)
    assert len(gallery) == len(entries)
    assert gallery.names == tuple(name for name, _ in entries)
    matches = gallery.search([query], k)
    assert matches.scores.shape == (1, min(k, len(entries)))
    if not entries:
        return
    cosines = unit(np.array([vector for _, vector in entries])) @ unit(np.array(query))
    scores, found = matches.scores[0].numpy(), matches.entries[0].tolist()
    tolerance = 1e-2 if in_int8 else 1e-6
    assert len(set(found)) == len(found)
    assert scores == pytest.approx(np.sort(cosines)[::-1][:k], abs=tolerance)
    assert scores == pytest.approx(cosines[found], abs=tolerance)
    assert matches.names[0] == tuple(entries[entry][0] for entry in found)
    for (score, entry), (later_score, later_entry) in itertools.pairwise(zip(scores, found, strict=True)):
        assert score > later_score or (score == later_score and entry < later_entry)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_small_enrolments_equal_one_large(dtype):
    embeddings = random_matrix(500, 8)
    large, small = gallery_of(embeddings, dtype), Gallery(8, dtype)
    sizes = itertools.cycle([1, 7, 2, 30])
    start = 0
    while start < 500:
        stop = min(500, start + next(sizes))
        small.enroll([str(i) for i in range(start, stop)], embeddings[start:stop])
        start = stop
    x = random_matrix(20, 8, seed=1)
    assert torch.equal(small.search(x).entries, large.search(x).entries)
    assert torch.equal(small.search(x).scores, large.search(x).scores)
    assert small.nbytes == large.nbytes


def test_remove_across_blocks_keeps_the_others():
    embeddings = random_matrix(3 * BLOCK_ROWS - 5, 4)
    names = ["gone" if i % 3 == 1 and i > BLOCK_ROWS else str(i) for i in range(len(embeddings))]
    gallery = gallery_of(embeddings, names=names)
    kept = [i for i, name in enumerate(names) if name != "gone"]
    assert gallery.remove("gone") == len(names) - len(kept)
    assert gallery.names == tuple(str(i) for i in kept)
    x = random_matrix(5, 4, seed=1)
    assert gallery.search(x).entries.tolist() == brute_force(x, embeddings[kept], 10)[1].tolist()


def test_invalid_changes_change_nothing():
    gallery = gallery_of(np.eye(3), names=["a", "b", "c"])
    bad = [
        (["d"], [[1.0, 2.0]], r"embeddings must be a matrix \(N, 3\)"),
        (["d"], [[1.0, 2.0, np.nan]], "embeddings must be finite, but row 0"),
        (["d", "e"], [[1.0, 2.0, 3.0]], "names must be 1 names, one per embedding"),
        ("d", [[1.0, 2.0, 3.0]], "names must be a list of strings"),
        ([4], [[1.0, 2.0, 3.0]], "names must be a list of strings"),
        (None, [[1.0, 2.0, 3.0]], "names must be a list of strings"),
        (["d"], [["x", "y", "z"]], "embeddings must be a matrix of numbers"),
        (np.ones((1, 3)), ["d"], "names must be a list of strings, the first argument"),
    ]
    for names, embeddings, message in bad:
        with pytest.raises(ValueError, match=message):
            gallery.enroll(names, embeddings)
    with pytest.raises(ValueError, match="names must be in the gallery, but 'd' is not"):
        gallery.remove(["a", "d"])
    for names in (None, 4, [["a"]]):
        with pytest.raises(ValueError, match="names must be a list of strings"):
            gallery.remove(names)
    assert gallery.names == ("a", "b", "c")
    assert len(gallery) == 3


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0,), {}, "dim must be an integer >= 1, not 0"),
        ((4, "int4"), {}, "dtype must be one of float32, float16, int8, binary, not 'int4'"),
        ((4, "int8", "lsh"), {}, "index must be one of exact, hnsw, ivf, not 'lsh'"),
        ((4, "binary", "hnsw"), {}, "index must be 'exact' if dtype is 'binary'"),
        ((4, "float32"), {"keep_full": True}, "keep_full must be False if dtype is 'float32'"),
        ((4, "float32", "exact", 7), {}, "fingerprint must be a string or None, not 7"),
    ],
)
def test_invalid_settings_are_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        Gallery(*arguments, **options)


@pytest.mark.parametrize("options", [{"k": 0}, {"k": 1.5}, {"effort": 0}])
def test_invalid_search_options_are_refused(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} must be an integer >= 1"):
        gallery_of(np.eye(3)).search(np.eye(3), **options)


def test_search_sees_one_state_while_another_thread_changes_the_gallery():
    gallery, stop, failures = gallery_of(np.eye(4), names=list("abcd")), threading.Event(), []

    def search():
        while not stop.is_set():
            matches = gallery.search(np.eye(4), 3)
            for row, names in enumerate(matches.names):
                if names[0] != "abcd"[row] or len(set(names)) != 3:
                    failures.append(names)

    thread = threading.Thread(target=search)
    thread.start()
    for step in range(200):
        gallery.enroll([f"x{step}"], -np.ones((1, 4)))
        if step % 3 == 2:
            gallery.remove([f"x{step - 1}"])
    stop.set()
    thread.join()
    assert not failures


def test_matches_are_printed_as_a_table():
    gallery = gallery_of([[1.0, 0.0], [0.6, 0.8]], names=["ada", "bell\a"])
    lines = str(gallery.search(np.eye(2))).splitlines()
    assert lines[0] == "2 queries, 2 matches each"
    assert [line.split() for line in lines[1:4]] == [
        ["query", "rank", "cosine", "name"],
        ["0", "1", "1.0000", "ada"],
        ["2", "0.6000", "bell\\x07"],
    ]
    assert "2 embeddings" in repr(gallery)
    assert str(Matches(torch.empty(0, 0), (), torch.empty(0, 0, dtype=torch.int64))).startswith("0 queries")


# --- fingerprints


def test_embeddings_of_another_model_are_refused():
    gallery = gallery_of(np.eye(2), fingerprint="first")
    gallery.search(np.eye(2), fingerprint="first")
    for call in (gallery.search, lambda x, fingerprint: gallery.enroll(["a", "b"], x, fingerprint=fingerprint)):
        with pytest.raises(ValueError, match=r"fingerprint must be that of the gallery, not 'second'.*'first'"):
            call(np.eye(2), fingerprint="second")
    assert len(gallery) == 2


def test_an_empty_gallery_adopts_the_fingerprint_and_a_filled_one_does_not():
    gallery = Gallery(2)
    gallery.enroll(["a"], [[1.0, 0.0]], fingerprint="first")
    assert gallery.fingerprint == "first"
    unknown = gallery_of(np.eye(2))
    with pytest.raises(ValueError, match="unknown model"):
        unknown.enroll(["a"], [[1.0, 0.0]], fingerprint="first")


def test_fingerprint_depends_on_the_weights_only():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    print_ = fingerprint_of(model)
    state = model.state_dict()
    assert fingerprint_of(dict(reversed(state.items()))) == print_
    assert fingerprint_of({f"module.{name}": tensor for name, tensor in state.items()}) == print_
    compiled = {f"module._orig_mod.{name.replace('.', '._orig_mod.')}": tensor for name, tensor in state.items()}
    assert fingerprint_of(compiled) == print_
    assert (
        fingerprint_of({name: tensor.clone().t() if tensor.ndim == 2 else tensor for name, tensor in state.items()})
        != print_
    )
    strided = {name: tensor.t().contiguous().t() if tensor.ndim == 2 else tensor for name, tensor in state.items()}
    assert fingerprint_of(strided) == print_
    assert fingerprint_of(model.bfloat16()) != print_


def test_fingerprint_changes_with_every_tensor():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    seen = {fingerprint_of(model)}
    for tensor in model.state_dict().values():
        tensor += 1
        seen.add(fingerprint_of(model))
    assert len(seen) == len(model.state_dict()) + 1


@pytest.mark.parametrize("value", [7, {}, nn.ReLU()])
def test_fingerprint_needs_tensors(value):
    with pytest.raises(ValueError, match="model must be a module or a state dict"):
        fingerprint_of(value)


# --- migration


def test_migrate_finds_the_rotation_of_scipy():
    linalg = pytest.importorskip("scipy.linalg")
    embeddings, old = random_matrix(30, 6), random_matrix(50, 6, seed=1)
    new = old @ random_matrix(6, 6, seed=2)  # not a rotation
    gallery = gallery_of(embeddings, fingerprint="old")
    migration = gallery.migrate((old, new), fingerprint="new")
    rotation, _ = linalg.orthogonal_procrustes(unit(old), unit(new))
    assert np.abs(migration.rotation.numpy() - rotation).max() < 1e-10
    cosines, order = brute_force(new, embeddings @ rotation, 10)
    matches = gallery.search(new, fingerprint="new")
    assert np.abs(matches.scores.numpy() - cosines).max() < 1e-6
    assert matches.entries.tolist() == order.tolist()
    assert migration.cosine_after == pytest.approx((unit(old) @ rotation * unit(new)).sum(1).mean())
    assert migration.cosine_before == pytest.approx((unit(old) * unit(new)).sum(1).mean())


@pytest.mark.parametrize(
    ("dtype", "keep_full", "error"),
    [
        ("float32", False, 1e-6),
        ("float16", False, 1e-3),
        ("int8", False, 2e-2),
        ("int8", True, 1e-6),
        ("binary", True, 1e-6),
    ],
)
def test_migrate_recovers_a_rotation(dtype, keep_full, error):
    dim = 64 if dtype == "binary" else 8  # eight signs would be equal for many embeddings
    embeddings = random_matrix(BLOCK_ROWS + 10, dim)
    rotation = np.linalg.qr(random_matrix(dim, dim, seed=1))[0]
    gallery = gallery_of(embeddings, dtype, keep_full=keep_full)
    migration = gallery.migrate((embeddings[:100], 3 * embeddings[:100] @ rotation))
    assert migration.cosine_after == pytest.approx(1)
    matches = gallery.search(embeddings[-20:] @ rotation, 1)
    assert matches.scores.numpy() == pytest.approx(np.ones((20, 1)), abs=error)
    if error < 1e-2:
        assert matches.entries.flatten().tolist() == list(range(len(gallery) - 20, len(gallery)))
    assert gallery.fingerprint is None


def test_migrate_refuses_what_it_cannot_do():
    gallery = gallery_of(np.eye(3), "binary")
    with pytest.raises(ValueError, match="binary with keep_full=True"):
        gallery.migrate((np.eye(3), np.eye(3)))
    gallery = gallery_of(np.eye(3))
    with pytest.raises(ValueError, match="pairs must be as many old as new"):
        gallery.migrate((np.eye(3), np.eye(3)[:2]))
    with pytest.raises(ValueError, match="pairs must be a tuple"):
        gallery.migrate(np.eye(3))
    with pytest.warns(UserWarning, match="2 pairs do not determine a rotation in 3 dimensions"):
        gallery.migrate((np.eye(3)[:2], np.eye(3)[:2]))


# --- files


@pytest.mark.parametrize("keep_full", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_loaded_gallery_is_the_saved_one_and_can_be_changed(dtype, keep_full, tmp_path):
    if dtype == "float32" and keep_full:
        pytest.skip("float32 is full precision")
    gallery = gallery_of(random_matrix(100, 12), dtype, fingerprint="model", keep_full=keep_full)
    x = random_matrix(9, 12, seed=1)
    gallery.save(tmp_path / "new" / "gallery")
    loaded = Gallery.load(tmp_path / "new" / "gallery")
    assert repr(loaded) == repr(gallery)
    for each in (gallery, loaded):
        each.enroll(["late"] * 30, random_matrix(30, 12, seed=2))
        each.remove([str(i) for i in range(0, 100, 3)])
    assert loaded.names == gallery.names
    assert torch.equal(loaded.search(x).scores, gallery.search(x).scores)
    again = Gallery.load(tmp_path / "new" / "gallery")  # changes are not written before the next save
    assert len(again) == 100
    loaded.save(tmp_path / "new" / "gallery")
    assert Gallery.load(tmp_path / "new" / "gallery").names == gallery.names
    assert torch.equal(
        again.search(x).scores, gallery_of(random_matrix(100, 12), dtype, keep_full=keep_full).search(x).scores
    )


def test_empty_gallery_can_be_saved(tmp_path):
    Gallery(5, "int8").save(tmp_path)
    loaded = Gallery.load(tmp_path)
    assert (len(loaded), loaded.dim, loaded.dtype) == (0, 5, "int8")
    loaded.enroll(["a"], np.ones((1, 5)))
    assert loaded.search(np.ones(5)).names == (("a",),)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_gallery_with_blocks_of_another_size_can_be_loaded(dtype, tmp_path, monkeypatch):
    from hypersphere.gallery import _rows

    embeddings, x = random_matrix(100, 6), random_matrix(3, 6, seed=1)
    options = {"keep_full": dtype == "int8"}
    expected = gallery_of(embeddings, dtype, **options).search(x)
    with monkeypatch.context() as patch:
        patch.setattr(_rows, "BLOCK_ROWS", 30)
        gallery_of(embeddings, dtype, **options).save(tmp_path)
    assert torch.equal(Gallery.load(tmp_path).search(x).scores, expected.scores)


def test_save_replaces_the_previous_files_and_leaves_others(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "rows-notes.json").write_text("mine")
    for count in (3, 2):
        gallery_of(np.eye(count)).save(tmp_path)
    names = sorted(path.name.split("-")[0] for path in tmp_path.iterdir())
    assert names == [".lock", "gallery.json", "names", "notes.txt", "rows", "rows"]
    assert len(Gallery.load(tmp_path)) == 2


def test_save_does_not_replace_a_file_of_another_program(tmp_path):
    (tmp_path / "gallery.json").write_text("{}")
    with pytest.raises(ValueError, match=r"gallery\.json was not written by this library"):
        gallery_of(np.eye(2)).save(tmp_path)
    assert (tmp_path / "gallery.json").read_text() == "{}"


def test_save_refuses_a_file_instead_of_a_folder(tmp_path):
    (tmp_path / "script.py").write_text("print()")
    with pytest.raises(ValueError, match=r"^folder must be a new or an existing folder, not '.*script\.py'$"):
        gallery_of(np.eye(2)).save(tmp_path / "script.py")
    assert (tmp_path / "script.py").read_text() == "print()"


def test_folder_without_a_gallery_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"is not a gallery: gallery\.json: No such file"):
        Gallery.load(tmp_path / "missing")


def test_damage_of_any_file_is_detected(tmp_path):
    gallery_of(random_matrix(20, 4), "int8", keep_full=True).save(tmp_path)
    for path in sorted(tmp_path.glob("*.*")):
        if path.name == ".lock":
            continue
        content = path.read_bytes()
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        for damaged in (flipped, content[:-2], content + b"\0", b"", b"[]", b"{}"):
            path.write_bytes(damaged)
            with pytest.raises(DamagedGallery, match="damaged"):
                Gallery.load(tmp_path)
        path.unlink()
        with pytest.raises(ValueError, match=r"damaged|not a gallery"):
            Gallery.load(tmp_path)
        path.write_bytes(content)
    assert len(Gallery.load(tmp_path)) == 20


def test_manifest_with_other_settings_or_files_is_refused(tmp_path):
    from hypersphere.gallery import _folder

    gallery_of(random_matrix(20, 4)).save(tmp_path)
    path = tmp_path / "gallery.json"
    original = json.loads(path.read_text())
    outside = {"rows": original["files"]["rows"] | {"name": "../rows.safetensors"}}
    changes = [
        ({"settings": original["settings"] | {"dim": 5}}, "values must be"),
        ({"settings": original["settings"] | {"dtype": "int8"}}, "damaged"),
        ({"settings": original["settings"] | {"embeddings": 21}}, "must be 21 embeddings each"),
        ({"settings": original["settings"] | {"dtype": "float33"}}, "dtype must be"),
        ({"settings": {}}, "damaged"),
        ({"files": original["files"] | outside}, "is not a gallery file name"),
        ({"format": 99}, "must have format 1, not 99"),
    ]
    for change, message in changes:
        manifest = original | change
        manifest["sha256"] = _folder._checksum(manifest)
        path.write_text(json.dumps(manifest))
        with pytest.raises(ValueError, match=message):
            Gallery.load(tmp_path)


def test_load_reads_the_new_gallery_if_another_process_saves_meanwhile(tmp_path, monkeypatch):
    from hypersphere.gallery import _folder

    gallery_of(np.eye(2)).save(tmp_path)
    read_files = _folder._read_files

    def read_late(folder, manifest):
        monkeypatch.setattr(_folder, "_read_files", read_files)
        gallery_of(np.eye(3)).save(tmp_path)
        return read_files(folder, manifest)

    monkeypatch.setattr(_folder, "_read_files", read_late)
    assert len(Gallery.load(tmp_path)) == 3


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kill_at_any_moment_leaves_the_old_or_the_new_gallery(tmp_path):
    command = [sys.executable, Path(__file__).parent / "killed_saver.py", tmp_path / "gallery"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    kills, drafts = map(int, process.stdout.split())
    assert kills >= 15
    assert drafts >= 1  # at least this number of kills came while a file was written


# --- approximate indexes


def test_missing_faiss_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match=r"faiss-cpu: pip install 'torch-hypersphere\[gallery\]'"):
        Gallery(4, index="hnsw")


def people(count=6000, dim=32):
    centres = np.repeat(random_matrix(count // 10, dim), 10, 0)
    embeddings = centres + 0.4 * random_matrix(count, dim, seed=1)
    return embeddings, embeddings[::60] + 0.1 * random_matrix(count // 60, dim, seed=2)


@pytest.fixture(params=["hnsw", "ivf"])
def index(request):
    pytest.importorskip("faiss")
    return request.param


def recall(gallery, x, embeddings, k=1):
    expected = brute_force(x, embeddings, k)[1]
    found = gallery.search(x, k).entries.numpy()
    return np.mean([np.isin(row, best).mean() for row, best in zip(found, expected, strict=True)])


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_index_finds_almost_all_neighbours_with_exact_scores(index, dtype):
    embeddings, x = people()
    gallery = gallery_of(embeddings, dtype, index, keep_full=dtype == "int8")
    assert recall(gallery, x, embeddings) >= 0.99
    assert recall(gallery, x, embeddings, 10) >= 0.95
    matches = gallery.search(x, 5)
    exact = np.take_along_axis(unit(x) @ unit(embeddings).T, matches.entries.numpy(), 1)
    assert np.abs(matches.scores.numpy() - exact).max() < (1e-3 if dtype == "float16" else 1e-6)
    assert bool((matches.scores.diff(dim=1) <= 0).all())


def test_index_follows_enrolments_and_removals(index):
    embeddings, x = people()
    names = [f"{i // 10}" for i in range(len(embeddings))]
    gallery = Gallery(32, index=index)
    for part in (slice(0, 2500), slice(2500, 2600), slice(2600, 6000)):
        gallery.enroll(names[part], embeddings[part])
        gallery.search(x)
    assert recall(gallery, x, embeddings) >= 0.99
    gone = [str(i) for i in range(0, 600, 6)]  # the people of the queries
    gallery.remove(gone)
    kept = np.array([name not in set(gone) for name in names])
    matches = gallery.search(x, 10)
    assert not set(gone) & {name for row in matches.names for name in row}
    assert recall(gallery, x, embeddings[kept], 10) >= 0.9
    # More than half is removed: the index is built again.
    gallery.remove(sorted({name for name in gallery.names if int(name) < 350}))
    last = np.array([name in set(gallery.names) for name in names])
    assert recall(gallery, x, embeddings[last], 10) >= 0.9


def test_index_lists_each_name_once(index):
    embeddings, x = people()
    gallery = gallery_of(embeddings, index=index, names=[f"{i // 10}" for i in range(len(embeddings))])
    matches = gallery.search(x, 3, per_name=True)
    assert all(len(set(row)) == 3 for row in matches.names)
    assert [row[0] for row in matches.names] == [str(6 * i) for i in range(len(x))]


def test_index_is_saved_and_loaded(index, tmp_path):
    embeddings, x = people()
    gallery = gallery_of(embeddings[:5000], "int8", index)
    expected = gallery.search(x)
    gallery.remove(["4999"])
    gallery.save(tmp_path)
    loaded = Gallery.load(tmp_path)
    assert torch.equal(loaded.search(x).entries, gallery.search(x).entries)
    loaded.enroll([str(i) for i in range(5000, 6000)], embeddings[5000:])
    last = loaded.search(embeddings[5000:], 1)
    assert np.mean([name == (str(5000 + i),) for i, name in enumerate(last.names)]) >= 0.98
    assert expected.scores.shape == (100, 10)


def test_index_that_is_not_one_is_refused(index, tmp_path):
    from safetensors.torch import load_file, save_file

    from hypersphere.gallery import _folder

    embeddings, x = people()
    gallery = gallery_of(embeddings, index=index)
    gallery.search(x)
    gallery.save(tmp_path)
    (path,) = tmp_path.glob("index-*")
    tensors = load_file(path)
    tensors["index"] = torch.zeros(100, dtype=torch.uint8)
    path.unlink()
    save_file(tensors, path)
    manifest = json.loads((tmp_path / "gallery.json").read_text())
    manifest["files"]["index"] |= file_summary(path)
    manifest["sha256"] = _folder._checksum(manifest)
    (tmp_path / "gallery.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedGallery, match="damaged"):
        Gallery.load(tmp_path)


def test_index_is_migrated(index):
    embeddings, x = people()
    rotation = np.linalg.qr(random_matrix(32, 32, seed=3))[0]
    gallery = gallery_of(embeddings, index=index)
    gallery.search(x)
    gallery.migrate((embeddings, embeddings @ rotation))
    assert recall(gallery, x @ rotation, embeddings @ rotation) >= 0.99


@pytest.fixture(scope="module")
def names_after_extension():
    """Names found by each index in a process in which faiss was extended for torch."""
    pytest.importorskip("faiss")
    code = (
        "import faiss.contrib.torch_utils, torch\n"
        "from hypersphere.gallery import Gallery\n"
        "for index in ('hnsw', 'ivf'):\n"
        "    gallery = Gallery(4, index=index)\n"
        "    gallery.enroll(['a', 'b', 'c'], torch.eye(3, 4))\n"
        "    print(index, gallery.search(torch.eye(3, 4)[:2], 1).names)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


@pytest.mark.parametrize("index", ["hnsw", "ivf"])
def test_index_works_after_faiss_was_extended_for_torch(index, names_after_extension):
    assert names_after_extension[index] == "(('a',), ('b',))"


def test_binary_gallery_rejects_zero_vectors():
    gallery = Gallery(4, dtype="binary")
    with pytest.raises(ValueError, match="embeddings must not be zero in a binary gallery, but row 1 is"):
        gallery.enroll(["a", "b"], [[1.0, 0.0, 0.0, 0.0], [0.0] * 4])
    assert len(gallery) == 0


# --- copies


@pytest.mark.parametrize("index", ["exact", "hnsw"])
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda gallery: pickle.loads(pickle.dumps(gallery))])
def test_copy_of_a_gallery_is_independent(index, duplicate):
    if index != "exact":
        pytest.importorskip("faiss")
    embeddings, x = random_matrix(1_500, 4), random_matrix(3, 4, seed=1)
    gallery = gallery_of(embeddings, "int8", index)
    expected = gallery.search(x, 2).names
    other = duplicate(gallery)
    assert other.search(x, 2).names == expected
    other.enroll(["new"] * 3, x)
    gallery.enroll(["old"] * 3, x)
    assert {name for name, _ in other.search(x, 2).names} == {"new"}
    assert {name for name, _ in gallery.search(x, 2).names} == {"old"}
