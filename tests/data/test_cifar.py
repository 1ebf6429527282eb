import pytest
import torch

from hypersphere.data import DamagedData, cifar, cifar10, cifar100, cifar100_fifth


def record(labels: tuple[int, ...], value: int) -> bytes:
    return bytes(labels) + bytes([value]) * 1024 + bytes([value + 1]) * 1024 + bytes([value + 2]) * 1024


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_cifar10_reads_its_batches_in_order(tmp_path, write, suffix):
    for number in range(1, 6):
        write(f"cifar-10-batches-bin/data_batch_{number}.bin{suffix}", record((number,), 10 * number) * 2)
    write(f"cifar-10-batches-bin/test_batch.bin{suffix}", record((9,), 0))
    train = cifar10(root=tmp_path, verify=False)
    assert train.labels.tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert train.images.shape == (10, 3, 32, 32)
    assert train.images[9].amax(dim=(1, 2)).tolist() == [50, 51, 52]
    assert cifar10("test", tmp_path, verify=False).classes[9] == "truck"


@pytest.mark.parametrize(("loader", "folder"), [(cifar100, "cifar-100-binary"), (cifar100_fifth, "cifar100-fifth")])
def test_cifar100_reads_the_fine_label(tmp_path, write, loader, folder):
    write(f"{folder}/test.bin.gz", record((19, 99), 7) + record((0, 0), 1))
    data = loader("test", tmp_path, verify=False)
    assert [data.classes[label] for label in data.labels.tolist()] == ["worm", "apple"]
    assert data.images[0, 2].unique().tolist() == [9]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "complete records of 3073 bytes, not 0"),
        (record((1,), 0)[:-1], "not 3072 bytes"),
        (record((10,), 0), "labels in 0..9, not 10"),
    ],
)
def test_cifar_rejects_damaged_records(tmp_path, write, content, message):
    write("cifar-10-batches-bin/test_batch.bin", content)
    with pytest.raises(DamagedData, match=message):
        cifar10("test", tmp_path, verify=False)


def test_cifar_verifies_class_counts_and_checksums(tmp_path, write):
    write("cifar-10-batches-bin/test_batch.bin", record((1,), 0))
    with pytest.raises(DamagedData, match="1000 images of every class, not 0 of class 0"):
        cifar10("test", tmp_path)
    write("cifar100-fifth/test.bin", record((0, 1), 0))
    with pytest.raises(DamagedData, match="SHA-256"):
        cifar100_fifth("test", tmp_path)


def test_cifar_decompresses_no_more_than_a_file_should_contain(tmp_path, write, monkeypatch):
    write("cifar-10-batches-bin/test_batch.bin.gz", bytes(2**26))
    with pytest.raises(DamagedData, match="1000 images of every class, not 10001 of class 0"):
        cifar10("test", tmp_path)
    monkeypatch.setattr("hypersphere.data._files.MAX_FILE_BYTES", 2**20)
    with pytest.raises(DamagedData, match=r"at most 1048576 bytes \(decompressed\), not more"):
        cifar10("test", tmp_path, verify=False)


def test_cifar100_has_a_hundred_sorted_classes():
    assert len(set(cifar.CIFAR100_CLASSES)) == 100
    assert list(cifar.CIFAR100_CLASSES) == sorted(cifar.CIFAR100_CLASSES)


def test_cifar100_fifth_reads_the_real_files(real):
    data = cifar100_fifth("test", real("cifar100-fifth"))
    assert torch.bincount(data.labels).tolist() == [50] * 100
    assert data.images.shape == (5000, 3, 32, 32)
    assert 60 < data.images.float().std() < 75


def test_cifar10_reads_the_real_files(real):
    data = cifar10("test", real("cifar-10-batches-bin"))
    assert data.labels[:5].tolist() == [3, 8, 8, 0, 6]
