import gzip
import hashlib
import struct
import tracemalloc
from importlib import import_module

import pytest
import torch

from hypersphere.data import DamagedData, MissingData, digits, fashion_mnist, mnist

mnist_module = import_module("hypersphere.data.mnist")  # hypersphere.data.mnist is the loader

IMAGES = bytes((0, 0, 8, 3)) + struct.pack(">3I", 4, 2, 3) + bytes(range(24))
LABELS = bytes((0, 0, 8, 1)) + struct.pack(">I", 4) + bytes((3, 1, 0, 9))


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw"])
def test_mnist_reads_plain_and_gzipped_files(tmp_path, write, suffix, folder):
    write(f"{folder}/t10k-images-idx3-ubyte{suffix}", IMAGES)
    write(f"{folder}/t10k-labels-idx1-ubyte{suffix}", LABELS)
    data = mnist("test", tmp_path, verify=False)
    assert data.images.shape == (4, 1, 2, 3)
    assert data.images.flatten().tolist() == list(range(24))
    assert data.labels.tolist() == [3, 1, 0, 9]
    assert data.classes[9] == "9"


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (b"", LABELS, "idx magic 00000803, not nothing"),
        (b"\x00\x00\x0d\x03" + IMAGES[4:], LABELS, "idx magic 00000803, not 00000d03"),
        (LABELS, LABELS, "idx magic"),
        (IMAGES[:9], LABELS, "a header of 16 bytes, not 9"),
        (IMAGES[:-1], LABELS, "must have 24 bytes .* not 23"),
        (IMAGES + b"x", LABELS, "must have 24 bytes .* not more"),
        (IMAGES, bytes((0, 0, 8, 1)) + struct.pack(">I", 3) + bytes(3), "4 labels, one per image, not 3"),
        (IMAGES, LABELS[:-1] + b"\x0a", "labels in 0..9, not 10"),
    ],
)
def test_mnist_rejects_damaged_files(tmp_path, write, images, labels, message):
    write("mnist/train-images-idx3-ubyte", images)
    write("mnist/train-labels-idx1-ubyte", labels)
    with pytest.raises(DamagedData, match=message) as caught:
        mnist(root=tmp_path, verify=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [gzip.compress(IMAGES)[:-12], b"no gzip at all", b"", gzip.compress(IMAGES)[:5]],
    ids=["truncated", "not gzip", "empty", "header only"],
)
def test_mnist_rejects_damaged_gzip_files(tmp_path, write, content):
    path = write("mnist/train-images-idx3-ubyte", b"")
    path.with_suffix(".gz").write_bytes(content)
    with pytest.raises(DamagedData, match=r"ubyte\.gz"):
        mnist(root=tmp_path, verify=False)


@pytest.mark.parametrize("shape", [(0, 2**32 - 1, 2**32 - 1), (2**32 - 1,) * 3])
def test_mnist_rejects_an_impossible_shape(tmp_path, write, shape):
    write("mnist/train-images-idx3-ubyte", IMAGES[:4] + struct.pack(">3I", *shape))
    with pytest.raises(DamagedData, match="a shape of at most 1073741824 bytes, not"):
        mnist(root=tmp_path, verify=False)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnist_rejects_a_folder_instead_of_a_file(tmp_path, suffix):
    (tmp_path / f"mnist/train-images-idx3-ubyte{suffix}").mkdir(parents=True)
    with pytest.raises(DamagedData, match=r"ubyte.* is not a .* file: .*directory"):
        mnist(root=tmp_path)


@pytest.mark.parametrize("start", [b"", IMAGES])
def test_mnist_decompresses_no_more_than_the_header_announces(tmp_path, write, start):
    write("mnist/train-images-idx3-ubyte.gz", start + bytes(2**26))
    tracemalloc.start()
    with pytest.raises(DamagedData, match=r"idx magic|must have 24 bytes"):
        mnist(root=tmp_path, verify=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_mnist_verifies_the_checksum(tmp_path, write):
    write("mnist/train-images-idx3-ubyte.gz", IMAGES)
    write("mnist/train-labels-idx1-ubyte.gz", LABELS)
    with pytest.raises(DamagedData, match=r"SHA-256 .*, not .* verify=False"):
        mnist(root=tmp_path)


def test_fashion_mnist_falls_back_to_the_debian_folder(tmp_path, write, monkeypatch):
    write("debian/train-images-idx3-ubyte.gz", IMAGES)
    write("debian/train-labels-idx1-ubyte.gz", LABELS)
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(mnist_module, "DEBIAN_FASHION", tmp_path / "debian")
    monkeypatch.delenv("HYPERSPHERE_DATA", raising=False)
    assert len(fashion_mnist(verify=False)) == 4
    data = fashion_mnist(root=tmp_path / "empty", verify=False)
    assert data.classes[data[3][1]] == "ankle boot"
    with pytest.raises(MissingData, match="root must be"):
        fashion_mnist(root=tmp_path / "nowhere")
    monkeypatch.setattr(mnist_module, "DEBIAN_FASHION", tmp_path / "gone")
    with pytest.raises(MissingData, match="HYPERSPHERE_DATA"):
        fashion_mnist()


def test_mnist_reads_the_real_files(real):
    root = real("mnist")
    data = mnist("test", root)
    assert data.images.shape == (10000, 1, 28, 28)
    assert data.labels[:5].tolist() == [7, 2, 1, 0, 4]
    assert torch.bincount(data.labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    train = mnist(root=root)
    assert len(train) == 60000
    assert train.labels[:5].tolist() == [5, 0, 4, 1, 9]


def test_mnist_checksums_are_those_of_the_published_files(real):
    files = sorted((real("mnist") / "mnist").glob("*-ubyte.gz"))
    md5 = [hashlib.md5(gzip.decompress(file.read_bytes()), usedforsecurity=False).hexdigest() for file in files]
    assert md5 == [
        "2646ac647ad5339dbf082846283269ea",
        "27ae3e4e09519cfbb04c329615203637",
        "6bbc9ace898e44ae57da46a324031adb",
        "a25bea736e30d166cdddb491f175f624",
    ]


def test_fashion_mnist_reads_the_real_files(tmp_path, real):
    data = fashion_mnist("test", tmp_path if mnist_module.DEBIAN_FASHION.is_dir() else real("fashion-mnist"))
    assert torch.bincount(data.labels).tolist() == [1000] * 10


def test_digits_split_is_fixed_stratified_and_complete():
    datasets = pytest.importorskip("sklearn.datasets")
    train, test = digits(), digits("test")
    assert (len(train), len(test)) == (1297, 500)
    assert torch.bincount(test.labels).tolist() == [50] * 10
    both = torch.cat((train.images, test.images)).flatten(1)
    source = torch.from_numpy(datasets.load_digits().data * 255 / 16).round().to(torch.uint8)
    assert sorted(map(tuple, both.tolist())) == sorted(map(tuple, source.tolist()))


def test_digits_without_the_file_of_scikit_learn_come_from_its_loader(monkeypatch):
    pytest.importorskip("sklearn.datasets")
    expected = digits("test")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = digits("test")
    assert torch.equal(found.images, expected.images)
    assert torch.equal(found.labels, expected.labels)


def test_digits_keeps_all_grey_levels_distinct():
    pytest.importorskip("sklearn")
    assert len(digits().images.unique()) == 17
    assert digits().images.max() == 255


def test_digits_rejects_an_unknown_split():
    with pytest.raises(ValueError, match="split must be one of 'train', 'test', not 'val'"):
        digits("val")
