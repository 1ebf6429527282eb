import pickle

import numpy as np
import pytest
import torch

from hypersphere.data import BrokenSample, ImageFolderSource, MissingData, Source, TensorSource, of_classes, subset
from hypersphere.data.sources import Names, first_sample, spaced_positions
from picture_files import encoded, pixels, write_tree


@pytest.fixture
def pets(tmp_path):
    root = tmp_path / "pets"
    return root, write_tree(root, {"cat": 3, "dog": 2})


def test_names_returns_every_string():
    strings = ["", "a", "ä/ö.png", "x" * 1000, "a b\tc", "caf\udce9"]  # the last is not valid UTF-8
    names = Names(strings)
    assert list(names) == strings
    assert names[-1] == strings[-1]
    assert names[1:3] == strings[1:3]
    assert list(names.take(np.array([2, 0]))) == [strings[2], strings[0]]
    assert list(pickle.loads(pickle.dumps(names))) == strings
    with pytest.raises(IndexError):
        names[6]


def test_names_digest_depends_on_order_and_boundaries():
    digests = {Names(strings).digest() for strings in (["ab", "c"], ["a", "bc"], ["c", "ab"], ["abc"], [])}
    assert len(digests) == 5
    assert Names(["ab", "c"]).digest() == Names(iter(["ab", "c"])).digest()


def test_names_take_a_few_bytes_per_name():
    strings = [f"class{number // 100:04d}/{number:06d}.jpg" for number in range(40_000)]
    assert len(pickle.dumps(Names(strings))) < sum(map(len, strings)) + 9 * len(strings) + 1000


def test_image_folder_source_reads_like_the_files(pets):
    root, written = pets
    source = ImageFolderSource(root)
    assert isinstance(source, Source)
    assert source.classes == ("cat", "dog")
    assert source.labels.tolist() == [0, 0, 0, 1, 1]
    assert [source.name(index) for index in range(5)] == list(written)
    for index in range(5):
        assert np.array_equal(source[index].permute(1, 2, 0).numpy(), written[source.name(index)])


def test_image_folder_source_is_as_the_images_in_memory(pets):
    from hypersphere.data import image_folder

    lazy, eager = ImageFolderSource(pets[0], size=5), image_folder(pets[0], size=5)
    assert torch.equal(torch.stack([lazy[index] for index in range(5)]), eager.images)
    assert torch.equal(lazy.labels, eager.labels)
    assert tuple(lazy.names) == eager.names


def test_image_folder_source_skips_hidden_and_other_files(pets):
    root = pets[0]
    (root / "cat" / ".hidden.png").write_bytes(b"")
    (root / "cat" / "notes.txt").write_text("no image")
    (root / "cat" / "folder.png").mkdir()
    (root / ".git").mkdir()
    assert len(ImageFolderSource(root)) == 5


def test_image_folder_source_reports_empty_class_folders(pets):
    root = pets[0]
    (root / "bird").mkdir()
    (root / "ant\x1b[2J").mkdir()
    with pytest.warns(UserWarning, match="class folders without images are ignored") as caught:
        source = ImageFolderSource(root)
    assert source.classes == ("cat", "dog")
    assert "bird" in str(caught[0].message)
    assert "\x1b" not in str(caught[0].message)
    assert caught[0].filename == __file__  # the warning names the line of the caller
    with pytest.raises(ValueError, match=r"classes must be subfolders of .* with images, not 'bird'"):
        ImageFolderSource(root, classes=["cat", "bird"])


def test_image_folder_source_names_ten_of_many_empty_class_folders(pets):
    for number in range(12):
        (pets[0] / f"empty{number:02}").mkdir()
    with pytest.warns(UserWarning, match=r"ignored: empty00, .*, empty09, … \(12 in total\)$"):
        ImageFolderSource(pets[0])


def test_image_folder_source_selects_classes_in_the_given_order(pets):
    source = ImageFolderSource(pets[0], classes=["dog", "cat"])
    assert source.classes == ("dog", "cat")
    assert source.labels.tolist() == [0, 0, 1, 1, 1]
    for classes in (["absent"], ["../pets/cat"]):
        with pytest.raises(ValueError, match="classes must be"):
            ImageFolderSource(pets[0], classes=classes)


def test_image_folder_source_names_missing_folders(tmp_path):
    with pytest.raises(MissingData, match="nowhere not found"):
        ImageFolderSource(tmp_path / "nowhere")
    with pytest.raises(MissingData, match="no images in"):
        ImageFolderSource(tmp_path)


def test_image_folder_source_needs_a_size_if_images_differ(pets):
    root = pets[0]
    (root / "dog" / "large.png").write_bytes(encoded(pixels(0, 9, 9)))
    source = ImageFolderSource(root)
    assert source[0].shape == (3, 8, 8)
    with pytest.raises(ValueError, match=r"same size, not 8x8 and 9x9 \(dog/large\.png\); pass size") as caught:
        source[5]
    assert not isinstance(caught.value, BrokenSample)  # skipping would hide a wrong setting
    assert ImageFolderSource(root, size=6)[5].shape == (3, 6, 6)


def test_image_folder_source_decides_on_the_number_of_channels(tmp_path):
    write_tree(tmp_path, {"a": 2}, channels=1)
    assert ImageFolderSource(tmp_path)[0].shape == (1, 8, 8)
    assert ImageFolderSource(tmp_path, grey=False)[0].shape == (3, 8, 8)
    source = ImageFolderSource(tmp_path)
    (tmp_path / "a" / "000.png").write_bytes(encoded(pixels(0)))  # becomes coloured after the source was opened
    with pytest.raises(ValueError, match=r"grey must be True or False, because a/000\.png has colours"):
        source[0]
    assert ImageFolderSource(tmp_path)[1].shape == (3, 8, 8)


def test_image_folder_source_names_broken_files(pets):
    root = pets[0]
    (root / "cat" / "000.png").write_bytes(b"no image")
    source = ImageFolderSource(root)
    with pytest.raises(BrokenSample, match=r"cat/000\.png is not a readable image"):
        source[0]
    assert torch.equal(first_sample(source), source[1])


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "cat").rename(root / "tiger"),
        lambda root: (root / "cat" / "000.png").rename(root / "dog" / "zzz.png"),
        lambda root: (root / "cat" / "000.png").unlink(),
        lambda root: (root / "cat" / "000.png").rename(root / "cat" / "0000.png"),
        lambda root: (root / "cat" / "000.png").write_bytes(encoded(pixels(0, 9, 9))),
    ],
    ids=["rename class", "move file", "delete file", "rename file", "replace file"],
)
def test_image_folder_source_fingerprint_changes_with_the_files(pets, change):
    root = pets[0]
    before = ImageFolderSource(root).fingerprint()
    assert before == ImageFolderSource(root).fingerprint()
    change(root)
    assert ImageFolderSource(root).fingerprint() != before


def test_image_folder_source_fingerprint_notices_files_of_equal_names_and_sizes(tmp_path):
    root = tmp_path / "images"
    write_tree(root, {"cat": 3, "dog": 3}, kind="BMP")  # without compression, so all sizes are equal
    sizes = {path.stat().st_size for path in root.rglob("*.bmp")}
    assert len(sizes) == 1
    before = ImageFolderSource(root).fingerprint()
    (root / "cat").rename(root / "other")
    (root / "dog").rename(root / "cat")
    (root / "other").rename(root / "dog")
    swapped = ImageFolderSource(root).fingerprint()
    assert swapped != before
    (root / "cat" / "001.bmp").write_bytes(encoded(pixels(99), "BMP"))
    assert ImageFolderSource(root).fingerprint() not in (before, swapped)
    source = ImageFolderSource(root)
    (root / "cat" / "001.bmp").unlink()
    assert source.fingerprint() != swapped  # a file that is missing is no error


def test_image_folder_source_is_small_and_picklable(pets):
    source = pickle.loads(pickle.dumps(ImageFolderSource(pets[0])))
    assert source[0].shape == (3, 8, 8)
    assert len(pickle.dumps(source)) < 3000


def test_tensor_source_holds_samples_with_names():
    source = TensorSource(torch.arange(6).view(3, 2), torch.tensor([1, 0, 1]), ("a", "b"), ("x", "y", "z"))
    assert isinstance(source, Source)
    assert source[1].tolist() == [2, 3]
    part = subset(source, [2, 0])
    assert isinstance(part, TensorSource)
    assert [part.name(0), part.name(1)] == ["z", "x"]
    assert part.labels.tolist() == [1, 1]
    with pytest.raises(ValueError, match="labels must be one label per input"):
        TensorSource(torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64), ("a",))


def test_tensor_source_fingerprint_depends_on_samples_and_labels():
    inputs, labels = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])
    prints = [
        TensorSource(inputs, labels, ("a", "b")).fingerprint(),
        TensorSource(inputs + 1, labels, ("a", "b")).fingerprint(),
        TensorSource(inputs, 1 - labels, ("a", "b")).fingerprint(),
        TensorSource(inputs, labels, ("b", "a")).fingerprint(),
    ]
    assert all(prints[a] != prints[b] for a in range(4) for b in range(a))
    assert prints[0] == TensorSource(inputs.clone(), labels.clone(), ("a", "b")).fingerprint()


def test_tensor_source_fingerprint_of_bfloat16_depends_on_samples():
    labels = torch.tensor([0, 1])
    sources = [TensorSource(torch.full((2, 3), value, dtype=torch.bfloat16), labels, ("a", "b")) for value in (1, 2)]
    assert sources[0].fingerprint() != sources[1].fingerprint()


@pytest.mark.parametrize("kind", ["files", "tensor"])
def test_subset_and_of_classes_select_samples(pets, kind):
    source = ImageFolderSource(pets[0])
    if kind == "tensor":
        names = [source.name(index) for index in range(5)]
        source = TensorSource(torch.stack([source[index] for index in range(5)]), source.labels, source.classes, names)
    part = subset(source, torch.tensor([True, False, False, True, True]))
    assert [part.name(index) for index in range(3)] == ["cat/000.png", "dog/000.png", "dog/001.png"]
    assert part.labels.tolist() == [0, 1, 1]
    assert part.classes == ("cat", "dog")
    assert torch.equal(part[1], source[3])
    dogs = of_classes(source, ["dog"])
    assert dogs.classes == ("dog",)
    assert dogs.labels.tolist() == [0, 0]
    assert dogs.name(1) == "dog/001.png"
    assert torch.equal(dogs[1], source[4])
    assert dogs.fingerprint() != source.fingerprint()
    with pytest.raises(ValueError, match="classes must be among the 2 classes of the data, not 'bird'"):
        of_classes(source, ["bird"])
    with pytest.raises(IndexError):
        subset(source, [5])


def test_spaced_positions_are_distinct_and_cover_the_range():
    for count in (1, 5, 100, 257):
        positions = spaced_positions(count, 10)
        assert positions[0] == 0
        assert positions == sorted(set(positions))
        assert len(positions) == min(count, 10)
        assert positions[-1] >= count - 1 - count // len(positions)
