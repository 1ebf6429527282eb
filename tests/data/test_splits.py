from dataclasses import replace

import pytest
import torch

from hypersphere.data import DATA, DataSplit, ImageFolderSource, TensorSource, fingerprint_difference
from hypersphere.data.sources import of_classes
from hypersphere.data.splits import (
    frequent_classes,
    join_sources,
    keep_share,
    selection_split,
    split_by_class,
    split_by_sample,
    split_source,
    with_label_noise,
    with_pairs,
)
from picture_files import write_tree


def source_of(counts):
    """Return a source whose input is its position, with labels that alternate as long as possible."""
    labels = sorted((number, label) for label, count in enumerate(counts.values()) for number in range(count))
    total = len(labels)
    names = [f"{list(counts)[label]}/{number}" for number, label in labels]
    return TensorSource(
        torch.arange(total).view(-1, 1), torch.tensor([label for _, label in labels], dtype=torch.int64), counts, names
    )


def names_of(source):
    return [source.name(index) for index in range(len(source))]


def test_split_by_sample_holds_out_the_last_of_each_class():
    data = split_by_sample(source_of({"a": 4, "b": 3, "c": 5}), 2)
    assert not data.open_set
    assert sorted(names_of(data.validation)) == ["a/2", "a/3", "b/1", "b/2", "c/3", "c/4"]
    assert sorted(names_of(data.train)) == ["a/0", "a/1", "b/0", "c/0", "c/1", "c/2"]
    assert data.train.classes == data.validation.classes == ("a", "b", "c")


def test_split_by_sample_keeps_small_classes_for_training():
    data = split_by_sample(source_of({"a": 1, "b": 2, "c": 5}), 3)
    assert sorted(names_of(data.validation)) == ["b/1", "c/2", "c/3", "c/4"]
    with pytest.raises(ValueError, match="data must have a class with two samples"):
        split_by_sample(source_of({"a": 1, "b": 1}), 1)


def test_split_by_sample_accepts_a_fraction():
    data = split_by_sample(source_of({"a": 10, "b": 3, "c": 1}), 0.2)
    assert sorted(names_of(data.validation)) == ["a/8", "a/9", "b/2"]
    for held_out in (0, -1, 1.5, True, "1"):
        with pytest.raises(ValueError, match=r"data\.held_out must be"):
            split_by_sample(source_of({"a": 4}), held_out)


@pytest.mark.parametrize(("held_out", "count"), [(3, 3), (0.25, 2), (0.01, 1), (0.99, 7)])
def test_split_by_class_shares_no_class(held_out, count):
    source = source_of(dict.fromkeys("abcdefgh", 3))
    data = split_by_class(source, held_out, seed=1)
    assert data.open_set
    assert len(data.validation.classes) == count
    assert sorted(data.train.classes + data.validation.classes) == list("abcdefgh")
    for part in (data.train, data.validation):
        assert list(part.classes) == sorted(part.classes)
        assert part.labels.unique().tolist() == list(range(len(part.classes)))
        assert all(name[0] == part.classes[part.labels[at]] for at, name in enumerate(names_of(part)))


def test_split_by_class_depends_on_the_seed_only():
    source = source_of(dict.fromkeys("abcdefgh", 2))
    choices = {split_by_class(source, 3, seed=seed).validation.classes for seed in range(8)}
    assert len(choices) > 1
    assert split_by_class(source, 3, seed=4).validation.classes == split_by_class(source, 3, seed=4).validation.classes
    for held_out in (0, 8, 1.0):
        with pytest.raises(ValueError, match=r"data\.held_out must be"):
            split_by_class(source, held_out)


def test_split_source_has_defaults():
    source = source_of(dict.fromkeys("abcdefghij", 3))
    assert len(split_source(source, "sample", None, 0).validation) == 10
    assert len(split_source(source, "class", None, 0).validation.classes) == 2
    with pytest.raises(ValueError, match=r"data\.split must be 'sample' or 'class', not 'random'"):
        split_source(source, "random", None, 0)


@pytest.mark.parametrize("kind", ["tensor", "files"])
def test_join_sources_aligns_labels_by_name(tmp_path, kind):
    write_tree(tmp_path / "train", {"ant": 2, "bee": 2, "cat": 2})
    write_tree(tmp_path / "val", {"bee": 1, "cat": 2})
    train, validation = ImageFolderSource(tmp_path / "train"), ImageFolderSource(tmp_path / "val")
    if kind == "tensor":
        names = names_of(validation)
        inputs = torch.stack([validation[index] for index in range(3)])
        validation = TensorSource(inputs, validation.labels, validation.classes, names)
    data = join_sources(train, validation)
    assert not data.open_set
    assert data.validation.classes == ("ant", "bee", "cat")
    assert data.validation.labels.tolist() == [1, 2, 2]
    assert data.validation.name(0) == "bee/000.png"


def test_join_sources_of_other_classes_is_an_open_set():
    data = join_sources(source_of({"a": 2, "b": 2}), source_of({"c": 2, "d": 2}))
    assert data.open_set
    assert data.validation.classes == ("c", "d")
    with pytest.raises(ValueError, match=r"validation classes must be .* not \['c'\]"):
        join_sources(source_of({"a": 2, "b": 2}), source_of({"b": 2, "c": 2}))


def test_data_split_outline_builds_a_blank_split():
    data = split_by_sample(TensorSource(torch.zeros(6, 1, 8, 8, dtype=torch.uint8), torch.arange(6) % 2, ("a", "b")), 1)
    outline = data.outline()
    assert outline == {"shape": [1, 8, 8], "dtype": "uint8", "classes": ["a", "b"]}
    blank = DataSplit.random_like(outline)
    assert blank.outline() == outline
    assert blank.train[0].dtype == torch.uint8
    points = DataSplit(TensorSource(torch.zeros(4, 10, 3), torch.zeros(4, dtype=torch.int64), ("a",)))
    assert DataSplit.random_like(points.outline()).train[0].dtype == torch.float32


def test_data_split_needs_samples():
    empty, full = source_of({"a": 0}), source_of({"a": 2})
    with pytest.raises(ValueError, match="data must be at least one training example"):
        DataSplit(TensorSource(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64), ("a",)), full)
    with pytest.raises(ValueError, match="data must be at least one validation example"):
        DataSplit(full, empty)


@pytest.fixture
def tree(tmp_path):
    write_tree(tmp_path, {"ant": 3, "bee": 3, "cat": 3})
    return tmp_path


def opened(root, split="sample"):
    return split_source(ImageFolderSource(root), split, 1, 0)


@pytest.mark.parametrize("split", ["sample", "class"])
def test_fingerprint_is_the_same_for_the_same_data(tree, split):
    assert fingerprint_difference(opened(tree, split).fingerprint(), opened(tree, split).fingerprint()) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: (root / "ant").rename(root / "dragonfly"), "the names or the order of the training classes"),
        (lambda root: (root / "ant" / "002.png").unlink(), "the number of training samples changed from 6 to 5"),
        (lambda root: (root / "ant" / "000.png").rename(root / "ant" / "003.png"), "the names of the training files"),
        (lambda root: (root / "ant" / "000.png").write_bytes(b"x"), "the contents of the training data changed"),
    ],
)
def test_fingerprint_difference_says_what_changed(tree, change, message):
    before = opened(tree).fingerprint()
    change(tree)
    assert message in fingerprint_difference(before, opened(tree).fingerprint())


def test_fingerprint_difference_reports_labels_and_validation():
    source = source_of({"a": 3, "b": 3})
    data = split_by_sample(source, 1)
    other = TensorSource(data.train.inputs, 1 - data.train.labels, ("a", "b"), names_of(data.train))
    difference = fingerprint_difference(data.fingerprint(), replace(data, train=other).fingerprint())
    assert difference == "the labels of the training samples changed"
    difference = fingerprint_difference(data.fingerprint(), replace(data, validation=None).fingerprint())
    assert difference == "the validation data were removed"


def test_with_pairs_reads_pairs_of_validation_names(tmp_path):
    data = split_by_class(source_of(dict.fromkeys("abcd", 2)), 2, seed=0)
    first, second = data.validation.classes
    (tmp_path / "pairs.csv").write_text(f"{first}/0,{first}/1,1\n{first}/0,{second}/1,0\n")
    pairs = with_pairs(data, tmp_path / "pairs.csv").pairs
    assert pairs.same.tolist() == [True, False]
    names = names_of(data.validation)
    assert [names[place] for place in pairs.second.tolist()] == [f"{first}/1", f"{second}/1"]
    assert with_pairs(data, None) is data


def test_frequent_classes_drops_small_classes():
    source = frequent_classes(source_of({"a": 1, "b": 3, "c": 2}), 2)
    assert source.classes == ("b", "c")
    assert torch.bincount(source.labels).tolist() == [3, 2]
    with pytest.raises(ValueError, match=r"data\.at_least must be at most 3"):
        frequent_classes(source_of({"a": 1, "b": 3}), 4)


def test_keep_share_keeps_a_fraction_of_each_class():
    labels = torch.arange(90) % 3
    chosen = keep_share(labels, torch.tensor([1.0, 0.5, 0.0]), None, 0)
    assert torch.bincount(labels[chosen], minlength=3).tolist() == [30, 15, 0]
    assert len(keep_share(labels, torch.ones(3), 20, 0)) == 20


def test_blank_data_are_limited_in_size():
    outline = {"shape": [10**9, 10**9], "dtype": "uint8", "classes": ["a"]}
    with pytest.raises(ValueError, match=r"shape must be at most 268435456 numbers, not \[1000000000, 1000000000\]"):
        DataSplit.random_like(outline)


def test_blank_data_have_fewer_samples_if_they_are_large(monkeypatch):
    monkeypatch.setattr("hypersphere.data.splits.MOST_NUMBERS", 64)
    outline = {"shape": [1, 4, 4], "dtype": "uint8", "classes": ["a"]}
    assert len(DataSplit.random_like(outline).train) == 4
    assert len(DataSplit.random_like({**outline, "shape": [1, 8, 8]}).train) == 2


def test_selection_split_divides_the_samples_of_each_class():
    split = DataSplit(source_of({"a": 10, "b": 20}), source_of({"a": 3, "b": 3}))
    chosen = selection_split(split, 0.2)
    assert len(chosen.validation) == 6
    assert torch.bincount(chosen.validation.labels).tolist() == [2, 4]
    parts = names_of(chosen.train) + names_of(chosen.validation)
    assert sorted(parts) == sorted(names_of(split.train))  # no test sample
    assert not chosen.open_set
    assert names_of(selection_split(split, 0.2).train) == names_of(chosen.train)


def test_selection_split_divides_classes_of_open_set_data():
    train, test = source_of(dict.fromkeys("abcde", 4)), source_of({"x": 3, "y": 3})
    chosen = selection_split(DataSplit(train, test, open_set=True), 0.4)
    assert chosen.open_set
    assert len(chosen.validation.classes) == 2
    assert set(chosen.train.classes) | set(chosen.validation.classes) == set("abcde")


def test_selection_split_uses_the_validation_nodes_of_a_graph():
    split = DATA["generated"](None, kind="graph", size=30)
    chosen = selection_split(split, 0.1)
    assert torch.equal(chosen.validation.inputs.flatten(), split.graph.val.nonzero().flatten())
    assert chosen.train is split.train


@pytest.mark.parametrize("fraction", [0, 1, -0.1, "half"])
def test_selection_split_rejects_what_is_not_a_fraction(fraction):
    with pytest.raises(ValueError, match="selection must be a fraction between 0 and 1"):
        selection_split(DataSplit(source_of({"a": 3}), None), fraction)


def numbered(classes=6, per_class=20):
    """Return a split whose training inputs hold their true class."""
    labels = torch.arange(classes).repeat(per_class)
    names = [f"class {label}" for label in range(classes)]
    return split_by_sample(TensorSource(labels.view(-1, 1).clone(), labels, names), 3)


@pytest.mark.parametrize(("fraction", "count"), [(0.2, 20), (0.4, 41), (0.005, 1), (0.004, 0), (1, 102)])
def test_label_noise_replaces_the_exact_fraction_by_other_classes(fraction, count):
    clean = numbered()
    noisy = with_label_noise(clean, fraction, seed=3)
    true_labels = noisy.train.inputs.flatten()
    assert int((noisy.train.labels != true_labels).sum()) == count == round(fraction * 102)
    assert torch.equal(noisy.true_labels, true_labels)
    assert torch.equal(clean.train.labels, clean.train.inputs.flatten())  # the argument does not change
    assert bool(((noisy.train.labels >= 0) & (noisy.train.labels < 6)).all())
    assert noisy.validation is clean.validation


def test_label_noise_draws_wrong_classes_uniformly():
    noisy = with_label_noise(numbered(per_class=5003), 0.5, seed=0)
    is_wrong = noisy.train.labels != noisy.true_labels
    counts = torch.zeros(6, 6).index_put_(
        (noisy.true_labels[is_wrong], noisy.train.labels[is_wrong]), torch.ones(()), accumulate=True
    )
    assert not counts.diagonal().any()
    # 500 are expected in each of the 30 cells, with a standard deviation of 22.
    off_diagonal = counts[~torch.eye(6, dtype=torch.bool)]
    assert 400 < float(off_diagonal.min()) <= float(off_diagonal.max()) < 600


def test_label_noise_depends_on_the_seed_and_grows_with_the_fraction():
    clean = numbered()
    few, many = (with_label_noise(clean, fraction, seed=1) for fraction in (0.2, 0.4))
    assert torch.equal(few.train.labels, with_label_noise(clean, 0.2, seed=1).train.labels)
    assert not torch.equal(few.train.labels, with_label_noise(clean, 0.2, seed=2).train.labels)
    is_wrong_in_both = (few.train.labels != few.true_labels) <= (many.train.labels != many.true_labels)
    assert bool(is_wrong_in_both.all())


def test_label_noise_changes_the_fingerprint_of_training_labels_only():
    clean = numbered()
    noisy = with_label_noise(clean, 0.2, seed=1)
    difference = fingerprint_difference(clean.fingerprint(), noisy.fingerprint())
    assert difference == "the labels of the training samples changed"
    assert clean.fingerprint()["validation"] == noisy.fingerprint()["validation"]
    assert with_label_noise(clean, 0, seed=1) is clean


def test_label_noise_keeps_files_where_they_are(tree):
    clean = opened(tree)
    noisy = with_label_noise(clean, 0.5, seed=0)
    assert names_of(noisy.train) == names_of(clean.train)
    assert int((noisy.train.labels != clean.train.labels).sum()) == 3
    assert torch.equal(noisy.train[2], clean.train[2])


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan"), "half", None, True])
def test_label_noise_rejects_what_is_not_a_fraction(fraction):
    message = rf"^data\.label_noise must be a fraction in \[0, 1\], not {fraction!r}$"
    with pytest.raises(ValueError, match=message):
        with_label_noise(numbered(), fraction, seed=0)


def test_label_noise_needs_two_classes_and_no_graph():
    with pytest.raises(ValueError, match=r"^data\.label_noise must be 0 for a single class, not 0\.5$"):
        with_label_noise(DataSplit(source_of({"a": 4})), 0.5, seed=0)
    with pytest.raises(ValueError, match=r"^data\.label_noise must be 0 for a graph, not 0\.5$"):
        DATA["generated"](None, kind="graph", label_noise=0.5)


@pytest.mark.parametrize("open_set", [False, True])
def test_selection_split_chooses_on_true_labels(open_set):
    clean = replace(numbered(classes=10), open_set=open_set)
    chosen = selection_split(with_label_noise(clean, 0.4, seed=5), 0.2)
    without = selection_split(clean, 0.2)
    assert torch.equal(chosen.validation.labels, without.validation.labels)
    assert torch.equal(chosen.validation.inputs, without.validation.inputs)
    # The part for training has the same samples, and the same fraction of wrong labels.
    assert torch.equal(chosen.train.inputs, without.train.inputs)
    assert torch.equal(chosen.true_labels, without.train.labels)
    count = int((chosen.train.labels != chosen.true_labels).sum())
    assert count == round(0.4 * len(chosen.train))


def test_of_classes_rejects_repeated_names():
    source = TensorSource(torch.zeros(2, 1), torch.tensor([0, 1]), ["a", "b"])
    with pytest.raises(ValueError, match="classes must be different names, not 'a' twice"):
        of_classes(source, ["a", "a"])
