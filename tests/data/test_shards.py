import io
import json
import pickle
import tarfile

import numpy as np
import pytest
import torch

from hypersphere.data import (
    SAMPLERS,
    BrokenSample,
    DamagedData,
    ImageFolderSource,
    Loader,
    MissingData,
    ShardSource,
    pack,
)
from hypersphere.data.shards import INDEX_FILE
from picture_files import encoded, pixels, write_tree


def write_shard(path, members):
    """Write a tar file with Python's own module; it is the reference for the index of offsets."""
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def sample(key, label, seed, suffix="png"):
    return [(f"{key}.{suffix}", encoded(pixels(seed))), (f"{key}.cls", str(label).encode())]


@pytest.fixture
def shards(tmp_path):
    """Seven samples in two shards, in the layout of WebDataset."""
    write_shard(tmp_path / "train-000.tar", [one for at in range(4) for one in sample(f"a/{at:03d}", at % 3, at)])
    write_shard(tmp_path / "train-001.tar", [one for at in range(4, 7) for one in sample(f"b/{at:03d}", at % 3, at)])
    return tmp_path


def test_shard_source_reads_at_random(shards):
    source = ShardSource(shards)
    assert source.classes == ("0", "1", "2")
    assert source.labels.tolist() == [0, 1, 2, 0, 1, 2, 0]
    for index in (6, 0, 3, 5, 1):
        assert np.array_equal(source[index].permute(1, 2, 0).numpy(), pixels(index))
    assert source.name(5) == "b/005.png"
    again = pickle.loads(pickle.dumps(source))
    assert torch.equal(again[4], source[4])


def test_shard_source_accepts_a_pattern_or_a_file(shards):
    assert len(ShardSource(shards / "train-*.tar")) == 7
    assert len(ShardSource(shards / "train-001.tar")) == 3
    with pytest.raises(MissingData, match="no shards at"):
        ShardSource(shards / "test-*.tar")
    (shards / "other.tar.gz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"uncompressed \.tar files"):
        ShardSource(shards / "other.tar.gz")


def test_shard_source_reads_labels_from_json_and_names_from_a_list(tmp_path):
    members = [("x.json", json.dumps({"label": "dog", "note": 1}).encode()), ("x.jpg", encoded(pixels(0), "JPEG"))]
    members += [("y.txt", b"a caption"), *sample("y", "cat", 1)]
    write_shard(tmp_path / "a.tar", members)
    source = ShardSource(tmp_path)
    assert source.classes == ("cat", "dog")
    assert source.labels.tolist() == [1, 0]
    (tmp_path / "classes.txt").write_text("bird\ndog\ncat\n")
    source = ShardSource(tmp_path)
    assert source.classes == ("bird", "dog", "cat")
    assert source.labels.tolist() == [1, 2]
    (tmp_path / "classes.txt").write_text("bird\ndog\n")
    with pytest.raises(DamagedData, match="not 'cat'"):
        ShardSource(tmp_path)
    (tmp_path / "classes.txt").write_bytes(b"bird\n\xff\n")
    with pytest.raises(DamagedData, match=r"classes\.txt line 2 must be UTF-8"):
        ShardSource(tmp_path)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("x.png", b"1"), ("y.png", b"2")], "'x' must have a label"),
        ([("x.png", b"1"), ("x.json", b"{}")], "'x' must have a label"),
        ([("x.png", b"1"), ("x.json", b"{")], "not a complete tar archive"),
        ([("x.png", b"1"), ("x.cls", b"0" * 70_000)], "at most 65536 bytes"),
    ],
)
def test_shard_source_names_samples_without_a_label(tmp_path, members, message):
    write_shard(tmp_path / "a.tar", members)
    with pytest.raises(DamagedData, match=message):
        ShardSource(tmp_path)


def test_shard_source_detects_damaged_shards(shards):
    content = bytearray((shards / "train-000.tar").read_bytes())
    content[1024 + 148 : 1024 + 156] = b"\xff" * 8  # the checksum of the second header
    (shards / "train-000.tar").write_bytes(content)
    with pytest.raises(DamagedData, match=r"train-000\.tar is not a complete tar archive"):
        ShardSource(shards)


def test_shard_source_names_samples_of_a_truncated_shard(shards):
    source = ShardSource(shards)
    with (shards / "train-001.tar").open("r+b") as file:
        file.truncate(600)
    with pytest.raises(BrokenSample, match=r"b/004\.png .* ends after"):
        source[4]
    assert source[0].shape == (3, 8, 8)


@pytest.fixture
def packed(tmp_path):
    root = tmp_path / "pets"
    counts = {"cat": 3, "dog": 2}
    write_tree(root, counts)
    (root / "cat" / "a.b.c.PNG").write_bytes(encoded(pixels(77)))
    (root / "cat" / "a.b_c.png").write_bytes(encoded(pixels(78)))
    return root, pack(root, tmp_path / "out"), tmp_path / "out"


def test_pack_writes_the_layout_of_webdataset(packed):
    root, shards, out = packed
    assert [shard.name for shard in shards] == ["shard-000000.tar"]
    assert (out / "classes.txt").read_text() == "cat\ndog\n"
    with tarfile.open(shards[0]) as archive:
        names = archive.getnames()
        # Every key has an image and a label, next to each other; the only dot of a file name is that of the suffix.
        for image, label in zip(names[::2], names[1::2], strict=True):
            assert image.count(".") == label.count(".") == 1
            assert image.split(".")[0] + ".cls" == label
        assert len(set(names)) == 14
        files = sorted(path for path in root.rglob("*") if path.is_file())
        contents = [archive.extractfile(name).read() for name in names[::2]]
        assert sorted(contents) == sorted(file.read_bytes() for file in files)
        assert {archive.extractfile(name).read() for name in names[1::2]} == {b"0", b"1"}
        assert all(member.mtime == 0 for member in archive)


def test_pack_and_shard_source_give_the_images_of_the_folder(packed):
    root, _, out = packed
    folder = ImageFolderSource(root)
    for source in (ShardSource(out), without_index(out)):
        assert source.classes == folder.classes
        assert torch.equal(source.labels, folder.labels)
        for index in range(len(folder)):
            assert torch.equal(source[index], folder[index])


def without_index(out):
    (out / "index.npz").unlink()
    return ShardSource(out)


def test_shard_source_ignores_an_index_of_other_shards(packed):
    _, shards, out = packed
    expected = ShardSource(out).fingerprint()
    write_shard(shards[0], [one for at in range(3) for one in sample(f"new/{at}", at % 2, at)])
    assert len(ShardSource(out)) == 3
    assert ShardSource(out).fingerprint() != expected


def test_pack_begins_a_new_shard_at_the_size(tmp_path):
    root = tmp_path / "pets"
    write_tree(root, {"cat": 3, "dog": 3}, size=(500, 500), kind="BMP")  # 750 kB each
    shards = pack(root, tmp_path / "out", shard_bytes=2**20, seed=0)
    assert len(shards) == 3
    source, folder = ShardSource(tmp_path / "out"), ImageFolderSource(root)
    assert sorted(source.name(index) for index in range(6)) == sorted(folder.names)
    order = [list(folder.names).index(source.name(index)) for index in range(6)]
    assert order != sorted(order)
    assert source.labels.tolist() == folder.labels[order].tolist()
    assert all(torch.equal(source[index], folder[place]) for index, place in enumerate(order))


def test_pack_does_not_write_into_a_folder_with_files(packed):
    root, _, out = packed
    with pytest.raises(ValueError, match="out must be a new or empty folder"):
        pack(root, out)
    with pytest.raises(ValueError, match="out must be a new or empty folder"):
        pack(root, root / "cat" / "000.png")
    with pytest.raises(ValueError, match="shard_bytes must be"):
        pack(root, out / "new", shard_bytes=10)


def test_shards_resume_with_workers(shards):
    source = ShardSource(shards)

    def made(seed, workers):
        return Loader(source, batch_size=2, sampler=SAMPLERS["shuffled"](source.labels, seed), workers=workers)

    reference, first, second = made(1, 0), made(1, 2), made(2, 2)
    expected = [batch for _ in range(2) for batch in reference]
    batches = iter(first)
    seen = [next(batches)]
    second.load_state_dict(first.state_dict())
    seen += [batch for _ in range(2) for batch in second]
    assert len(seen) == len(expected)
    for (x, y), (a, b) in zip(seen, expected, strict=True):
        assert torch.equal(x, a)
        assert torch.equal(y, b)


@pytest.mark.parametrize("names", [["1", "2", "3"], ["2", "10"], ["a\u2028b", "c"]], ids=repr)
def test_packed_classes_keep_their_images_whatever_they_are_called(names, tmp_path):
    for name in names:
        write_tree(tmp_path / "photos", {name: 2})
    pack(tmp_path / "photos", tmp_path / "shards")
    folder = ImageFolderSource(tmp_path / "photos")
    for index_file in (True, False):
        if not index_file:
            (tmp_path / "shards" / INDEX_FILE).unlink()
        source = ShardSource(tmp_path / "shards")
        assert list(source.classes) == list(folder.classes)
        for number in range(len(source)):
            assert source.name(number).startswith(f"{source.classes[int(source.labels[number])]}/")


def test_pack_rejects_class_names_that_are_no_lines_before_it_writes(tmp_path):
    write_tree(tmp_path / "photos", {"a\nb": 1, "c": 1})
    with pytest.raises(ValueError, match="folder must be one whose class names are lines of UTF-8 text"):
        pack(tmp_path / "photos", tmp_path / "shards")
    assert not (tmp_path / "shards").exists()
