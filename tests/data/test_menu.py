import inspect
import io
import tarfile

import numpy as np
import pytest
import torch

from hypersphere.data import (
    DATA,
    SAMPLERS,
    Graph,
    ImageFolderSource,
    LabelledImages,
    Loader,
    MissingData,
    PointClouds,
    TensorSource,
    draw_pairs,
    menu,
    pack,
)
from picture_files import encoded, pixels, write_tree

IN_MEMORY = ("digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "cifar100_fifth", "modelnet10")


def images(count=30, classes=("a", "b", "c")):
    generator = torch.Generator().manual_seed(count)
    values = torch.randint(256, (count, 1, 8, 8), dtype=torch.uint8, generator=generator)
    return LabelledImages(values, torch.arange(count) % len(classes), classes)


def load(name="digits", train=None, test=None, **options):
    """Call an entry made for a loader that returns these data."""
    parts = {"train": train or images(30), "test": test or images(12)}
    return menu._classification(lambda split, root: parts[split])(None, **options)


@pytest.mark.parametrize("name", DATA)
def test_data_entries_take_a_root_and_named_options_and_are_documented(name):
    first, *options = inspect.signature(DATA[name]).parameters.values()
    assert first.name == "root"
    assert all(option.kind is option.KEYWORD_ONLY for option in options)
    assert len((DATA[name].__doc__ or "").splitlines()[0]) > 20
    # Every option is explained by its name in backquotes.
    if name not in ("cora", "citeseer", "pubmed"):
        for option in options:
            assert f"`{option.name}`" in DATA[name].__doc__, option.name


def test_digits_are_read_with_their_options():
    data = DATA["digits"](None, limit=200)
    assert data.train.inputs.shape == (200, 1, 8, 8)
    assert len(data.validation) == 500
    assert len(data.classes) == 10


def test_entry_reads_both_splits():
    data = load()
    assert torch.equal(data.train.inputs, images(30).images)
    assert torch.equal(data.validation.inputs, images(12).images)
    assert data.graph is None
    assert not data.open_set


def test_entry_pools_images():
    data = load(pool=2)
    expected = images(30).images.double().reshape(30, 1, 4, 2, 4, 2).mean((3, 5)).round()
    assert torch.equal(data.train.inputs.double(), expected)
    with pytest.raises(ValueError, match=r"data\.pool must be"):
        load(pool=0)
    clouds = PointClouds(torch.zeros(4, 10, 3), torch.zeros(4, dtype=torch.int64), ("a",))
    with pytest.raises(ValueError, match=r"data\.pool must be"):
        load(train=clouds, test=clouds, pool=2)
    assert load(train=clouds, test=clouds).train[0].shape == (10, 3)


def test_entry_keeps_shares_of_classes():
    counts = torch.bincount(load(keep={"b": 0.5, "2": 0.0}).train.labels, minlength=3)
    assert counts.tolist() == [10, 5, 0]
    counts = torch.bincount(load(rising=True).train.labels, minlength=3)
    assert counts.tolist() == [3, 7, 10]
    assert torch.bincount(load(keep={2: 0.0}).train.labels, minlength=3).tolist() == [10, 10, 0]
    for keep in ({"d": 0.5}, {"3": 0.5}, {"²": 0.5}, {None: 0.5}):
        with pytest.raises(ValueError, match=r"data\.keep must be some of the 3 classes, by name or index, not '.*'$"):
            load(keep=keep)
    for keep in (5, 0, "a", [0.5]):
        with pytest.raises(ValueError, match=r"data\.keep must be a mapping of classes to fractions"):
            load(keep=keep)
    for share in (2, -0.1, float("nan"), "half", None, True):
        with pytest.raises(ValueError, match=rf"data\.keep\.a must be a fraction in \[0, 1\], not {share!r}"):
            load(keep={"a": share})
    with pytest.raises(ValueError, match=r"data\.rising must be true or false, not 'yes'"):
        load(rising="yes")


def test_entry_holds_out_training_examples_instead_of_the_test_data():
    data = load(held_out=8, seed=2)
    assert len(data.train) == 22
    assert len(data.validation) == 8
    rows = torch.cat([data.train.inputs, data.validation.inputs]).flatten(1)
    assert sorted(rows.tolist()) == sorted(images(30).images.flatten(1).tolist())
    for held_out in (30, -1, 2.5):
        with pytest.raises(ValueError, match=r"data\.held_out must be an integer in \[0, 30\)"):
            load(held_out=held_out)


def test_entry_limits_the_training_examples():
    assert len(load(limit=7).train) == 7
    assert not torch.equal(load(limit=7, seed=1).train.inputs, load(limit=7).train.inputs)
    for limit in (0, 1.5):
        with pytest.raises(ValueError, match=r"data\.limit must be"):
            load(limit=limit)


def test_entries_replace_training_labels_and_keep_those_of_the_test_data():
    noisy, clean = load(limit=20, label_noise=0.25, seed=4), load(limit=20, seed=4)
    assert torch.equal(noisy.train.inputs, clean.train.inputs)
    assert int((noisy.train.labels != clean.train.labels).sum()) == 5
    assert torch.equal(noisy.validation.labels, clean.validation.labels)
    assert clean.true_labels is None
    with pytest.raises(ValueError, match=r"^data\.label_noise must be a fraction in \[0, 1\], not 2$"):
        load(label_noise=2)
    for open_set in (False, True):
        noisy, clean = (DATA["generated"](None, open_set=open_set, label_noise=part, seed=1) for part in (0.25, 0))
        assert int((noisy.train.labels != clean.train.labels).sum()) == round(0.25 * len(clean.train))
        assert torch.equal(noisy.true_labels, clean.train.labels)
        assert torch.equal(noisy.validation.labels, clean.validation.labels)


def test_graph_entries_give_node_indices():
    masks = torch.eye(6, dtype=torch.bool)
    graph = Graph(
        torch.zeros(6, 2), torch.arange(6) % 2, torch.zeros(2, 0, dtype=torch.int64),
        masks[0] | masks[2], masks[3], masks[4] | masks[5], ("a", "b"),
    )  # fmt: skip
    data = menu._graph(lambda root: graph)(None)
    assert data.train.inputs.tolist() == [0, 2]
    assert data.validation.inputs.tolist() == [4, 5]
    assert data.graph is graph
    assert data.outline() is None


@pytest.fixture
def photos(tmp_path):
    write_tree(tmp_path / "photos", {"ant": 4, "bee": 3, "cat": 5, "dog": 3, "elk": 1})
    return tmp_path


def test_image_folder_splits_by_sample(photos):
    data = DATA["image_folder"](photos, path="photos", size=6)
    assert isinstance(data.train.source, ImageFolderSource)  # nothing is decoded into memory
    assert data.outline()["shape"] == [3, 6, 6]
    assert len(data.validation) == 4
    assert data.validation.name(0) == "ant/003.png"
    assert len(DATA["image_folder"](photos, path="photos", held_out=2).validation) == 8
    assert DATA["image_folder"](photos, path="photos", at_least=3).classes == ("ant", "bee", "cat", "dog")


def test_image_folder_splits_by_class(photos):
    data = DATA["image_folder"](None, path=str(photos / "photos"), split="class", held_out=2, seed=1)
    assert data.open_set
    assert len(data.validation.classes) == 2
    assert not set(data.train.classes) & set(data.validation.classes)


@pytest.mark.parametrize("name", menu.VALIDATION_FOLDERS)
def test_image_folder_reads_two_folders(tmp_path, name):
    write_tree(tmp_path / "train", {"ant": 2, "bee": 2}, channels=1)
    write_tree(tmp_path / name, {"bee": 3})
    data = DATA["image_folder"](None, path=str(tmp_path), split="folders")
    assert data.validation.labels.tolist() == [1, 1, 1]
    assert data.validation[0].shape == data.train[0].shape == (1, 8, 8)
    with pytest.raises(ValueError, match=r"data\.held_out must be unset"):
        DATA["image_folder"](None, path=str(tmp_path), split="folders", held_out=1)


def test_image_folder_names_missing_folders(tmp_path):
    write_tree(tmp_path / "train", {"ant": 2})
    with pytest.raises(MissingData, match="must contain one of the folders val, validation, valid, test"):
        DATA["image_folder"](None, path=str(tmp_path), split="folders")
    with pytest.raises(MissingData, match="absent not found"):
        DATA["image_folder"](tmp_path, path="absent")
    with pytest.raises(ValueError, match=r"data\.split must be"):
        DATA["image_folder"](tmp_path, path="train", split="random")


def test_image_folder_reads_archives_into_memory(tmp_path):
    with tarfile.open(tmp_path / "pets.tar.gz", "w:gz") as archive:
        for number in range(4):
            content = encoded(pixels(number))
            member = tarfile.TarInfo(f"pets/{'ab'[number % 2]}/{number}.png")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    data = DATA["image_folder"](tmp_path, path="pets.tar.gz")
    assert isinstance(data.train, TensorSource)
    assert data.validation.name(0) == "a/2.png"
    assert np.array_equal(data.validation[0].permute(1, 2, 0).numpy(), pixels(2))


def test_image_folder_reads_pairs(photos):
    lines = "ant/000.png bee/000.png 0\ncat/000.png cat/001.png 1\n"
    (photos / "pairs.txt").write_text(lines)
    with pytest.raises(ValueError, match=r"line 1 must name two of the 4 images, not 'ant/000\.png'"):
        DATA["image_folder"](photos, path="photos", pairs="pairs.txt")
    write_tree(photos / "two" / "train", {"elk": 2, "fox": 2})
    write_tree(photos / "two" / "val", {"ant": 2, "bee": 2, "cat": 2})
    data = DATA["image_folder"](photos, path="two", split="folders", pairs="pairs.txt")
    assert data.open_set
    assert data.pairs.same.tolist() == [False, True]


def write_lists(root):
    write_tree(root / "images", {"ant": 3, "bee": 3})
    names = [f"{name}/{number:03d}.png" for name in ("ant", "bee") for number in range(3)]
    rows = [f"{name},{name[:3]},{'val' if '002' in name else 'train'}" for name in names]
    (root / "all.csv").write_text("path,label,part\n" + "\n".join(rows))
    for part in ("train", "val"):
        chosen = [row for row in rows if row.endswith(part)]
        (root / f"{part}.csv").write_text("path,label,part\n" + "\n".join(chosen))


@pytest.mark.parametrize(
    "options",
    [
        {"path": "train.csv", "validation": "val.csv"},
        {"path": "all.csv", "split_column": "part"},
        {"path": "all.csv", "split": "sample"},
    ],
)
def test_image_list_divides_by_file_column_or_sample(tmp_path, options):
    write_lists(tmp_path)
    data = DATA["image_list"](tmp_path, images="images", **options)
    assert len(data.train) == 4
    assert [data.validation.name(at) for at in range(2)] == ["ant/002.png", "bee/002.png"]
    assert data.validation.labels.tolist() == [0, 1]
    assert data.validation[0].shape == (3, 8, 8)


def test_shards_entry_reads_what_pack_wrote(photos):
    pack(photos / "photos", photos / "packed")
    from_shards, from_folder = DATA["shards"](photos, path="packed"), DATA["image_folder"](photos, path="photos")
    assert from_shards.classes == from_folder.classes
    assert torch.equal(from_shards.train.labels, from_folder.train.labels)
    assert all(torch.equal(from_shards.validation[at], from_folder.validation[at]) for at in range(4))
    data = DATA["shards"](photos, path="packed", validation="packed")
    assert len(data.validation) == 16
    assert DATA["shards"](photos, path="packed", split="class", held_out=2).open_set


def test_lfw_fold_trains_on_other_people_and_validates_on_the_pairs(tmp_path, monkeypatch):
    from hypersphere.data.lfw import SHA256

    people = [f"P_{number}" for number in range(6)]
    for number, person in enumerate(people):
        (tmp_path / "lfw" / "lfw" / person).mkdir(parents=True)
        for image in (1, 2, 3):
            content = encoded(pixels(10 * number + image))
            (tmp_path / "lfw" / "lfw" / person / f"{person}_{image:04d}.png").write_bytes(content)
    (tmp_path / "lfw" / "people.txt").write_text("2\n3\nP_0\t3\nP_2\t3\nP_4\t3\n3\nP_1\t3\nP_3\t3\nP_5\t3\n")
    pairs = "2\t1\nP_0\t1\t2\nP_0\t1\tP_2\t3\nP_1\t2\t3\nP_3\t1\tP_5\t2\n"
    (tmp_path / "lfw" / "pairs.txt").write_text(pairs)
    for name in list(SHA256):
        monkeypatch.setitem(SHA256, name, None)
    data = DATA["lfw"](tmp_path, split="fold", fold=1, at_least=1)
    assert data.open_set
    assert data.classes == ("P_0", "P_2", "P_4")
    assert data.validation.classes == ("P_1", "P_3", "P_5")
    names = [data.validation.name(at) for at in range(9)]
    ends = [(names[a], names[b]) for a, b in zip(data.pairs.first.tolist(), data.pairs.second.tolist(), strict=True)]
    assert ends == [
        ("P_1/P_1_0002.png", "P_1/P_1_0003.png"),
        ("P_3/P_3_0001.png", "P_5/P_5_0002.png"),
    ]
    assert data.pairs.same.tolist() == [True, False]
    by_class = DATA["lfw"](tmp_path, split="class", held_out=2, at_least=1)
    assert len(by_class.validation.classes) == 2
    assert len(DATA["lfw"](tmp_path, at_least=3, held_out=1).validation) == 6
    for options in ({"split": "fold", "fold": 1}, {"split": "class", "held_out": 2}, {"split": "sample"}):
        clean, noisy = (DATA["lfw"](tmp_path, at_least=1, label_noise=part, **options) for part in (0.0, 1 / 3))
        assert int((noisy.train.labels != clean.train.labels).sum()) == round(len(clean.train) / 3)
        assert torch.equal(noisy.validation.labels, clean.validation.labels)
    with pytest.raises(ValueError, match=r"data\.at_least must be at most 3"):
        DATA["lfw"](tmp_path, at_least=4)


def test_open_set_validation_feeds_a_verification_protocol(photos):
    data = DATA["image_folder"](photos, path="photos", split="class", held_out=3, seed=0)
    pairs = draw_pairs(data.validation.labels, folds=1, per_fold=3)
    assert int(pairs.second.max()) < len(data.validation)
    loader = Loader(data.validation, batch_size=4, sampler=SAMPLERS["sequential"](data.validation.labels, 0))
    assert sum(len(labels) for _, labels in loader) == len(data.validation)


def test_omniglot_validates_on_other_drawings_or_on_other_characters(monkeypatch):
    def characters(split, root, *, size):
        count = {"background": 4, "evaluation": 3}[split]
        names = tuple(f"{split} {number}" for number in range(count))
        labels = torch.arange(count).repeat_interleave(5)
        return LabelledImages(torch.zeros(len(labels), 1, size, size, dtype=torch.uint8), labels, names)

    monkeypatch.setattr(menu, "omniglot", characters)
    closed, opened = (DATA["omniglot"](None, split=split, held_out=2) for split in ("sample", "class"))
    assert (len(closed.train), len(closed.validation), closed.open_set) == (12, 8, False)
    assert (len(opened.train), len(opened.validation), opened.open_set) == (20, 15, True)
    assert opened.validation.classes == ("evaluation 0", "evaluation 1", "evaluation 2")
    for split, clean in (("sample", closed), ("class", opened)):
        noisy = DATA["omniglot"](None, split=split, held_out=2, label_noise=0.5, seed=1)
        assert int((noisy.train.labels != clean.train.labels).sum()) == len(clean.train) // 2
        assert torch.equal(noisy.validation.labels, clean.validation.labels)
    with pytest.raises(ValueError, match=r"data.split must be 'sample' or 'class', not 'fold'"):
        DATA["omniglot"](None, split="fold")
    few = DATA["omniglot"](None, split="class", characters=2)
    assert few.classes == ("background 0", "background 2")
    assert few.train.labels.tolist() == [0] * 5 + [1] * 5
    assert few.validation.classes == opened.validation.classes
    for characters in (0, 5, 2.0):
        with pytest.raises(ValueError, match=r"^data\.characters must be None or an integer in 1\.\.4, not"):
            DATA["omniglot"](None, characters=characters)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"held_out": 2, "validation": "other.csv"}, "data.held_out must be unset with validation, not 2"),
        ({"held_out": 2, "split_column": "part"}, "data.held_out must be unset with split_column, not 2"),
        ({"split": "typo", "validation": "other.csv"}, "data.split must be 'sample' or 'class', not 'typo'"),
    ],
)
def test_image_list_rejects_settings_without_effect(options, message, tmp_path):
    (tmp_path / "list.csv").write_text("path,label,part\na.png,0,train\n")
    with pytest.raises(ValueError, match=message):
        DATA["image_list"](tmp_path, path="list.csv", **options)
