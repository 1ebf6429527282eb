import numpy as np
import pytest
import torch

from hypersphere.data import DamagedData, omniglot


def drawings(**change):
    ink = np.zeros((6, 105, 105), dtype=np.uint8)
    for number in range(6):
        ink[number, : 15 * (number + 1)] = 1
    arrays = {
        "bits": np.packbits(ink.reshape(6, -1), axis=1),
        "char": np.array([0, 0, 1, 1, 2, 2], dtype=np.int16),
        "drawer": np.array([1, 2, 1, 2, 1, 2], dtype=np.uint8),
        "evaluation": np.array([0, 0, 0, 0, 1, 1], dtype=np.uint8),
        "char_names": np.array(["Greek/alpha", "Greek/beta", "Latin/a"]),
    }
    return arrays | change


def test_omniglot_unpacks_and_shrinks(tmp_path, save):
    save("omniglot/omniglot.npz", drawings())
    full = omniglot(root=tmp_path, size=105, verify=False)
    assert full.images.shape == (4, 1, 105, 105)
    assert full.images.unique().tolist() == [0, 255]
    assert (full.images[1] == 255).sum() == 30 * 105
    small = omniglot(root=tmp_path, size=7, verify=False)
    assert (small.images[1] == 255).sum() == 2 * 7
    assert small.classes == ("Greek/alpha", "Greek/beta")
    assert omniglot(root=tmp_path, verify=False).images.shape == (4, 1, 28, 28)


def test_omniglot_labels_count_the_classes_of_the_split(tmp_path, save):
    save("omniglot/omniglot.npz", drawings())
    data = omniglot("evaluation", tmp_path, verify=False)
    assert data.classes == ("Latin/a",)
    assert data.labels.tolist() == [0, 0]
    assert data.names == ("Latin/a/01", "Latin/a/02")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": np.zeros((6, 10), dtype=np.uint8)}, r"bits must be uint8 \(N, 1379\)"),
        ({"char": np.zeros(5, dtype=np.int16)}, r"char must be integers \(6,\)"),
        ({"char": np.zeros(6)}, "char must be integers"),
        ({"char": np.full(6, 3)}, "char must be in 0..2, not 3..3"),
        ({"drawer": np.array([{}] * 6, dtype=object)}, "allow_pickle=False"),
        ({"bits": np.uint8(1)}, "bits must be uint8"),
        ({"char_names": np.array("alpha")}, "char_names must be a 1-d array of names"),
    ],
)
def test_omniglot_rejects_invalid_arrays(tmp_path, save, change, message):
    save("omniglot/omniglot.npz", drawings(**change))
    with pytest.raises(DamagedData, match=message):
        omniglot(root=tmp_path, verify=False)


def test_omniglot_verifies_the_drawings(tmp_path, save):
    save("omniglot/omniglot.npz", drawings())
    with pytest.raises(DamagedData, match="published drawings; pass verify=False"):
        omniglot(root=tmp_path)


@pytest.mark.parametrize("size", [0, 106])
def test_omniglot_size_is_bounded(tmp_path, size):
    with pytest.raises(ValueError, match=f"size must be in 1..105, not {size}"):
        omniglot(root=tmp_path, size=size)


def test_omniglot_reads_the_real_file(real):
    data = omniglot("evaluation", real("omniglot"), size=14)
    assert torch.bincount(data.labels).tolist() == [20] * 659
    assert 0.02 < data.tensors()[0].mean() < 0.2
