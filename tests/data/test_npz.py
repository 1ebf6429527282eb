import zipfile

import numpy as np
import pytest
import torch

from hypersphere.data import DamagedData, modelnet10, omniglot


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


def shapes(**change):
    arrays = {
        "points": (np.eye(3)[None].repeat(4, axis=0) * 32767).astype(np.int16),
        "label": np.array([0, 1, 0, 1], dtype=np.uint8),
        "test": np.array([0, 0, 1, 0], dtype=np.uint8),
        "classes": np.array(["bed", "chair"]),
    }
    return arrays | change


@pytest.fixture
def save(tmp_path):
    def save_arrays(name, arrays):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        np.savez_compressed(path, **arrays)
        return path

    return save_arrays


def test_omniglot_unpacks_and_shrinks(tmp_path, save):
    save("omniglot/omniglot.npz", drawings())
    full = omniglot(tmp_path, size=105, verify=False)
    assert full.images.shape == (4, 1, 105, 105)
    assert full.images.unique().tolist() == [0, 255]
    assert (full.images[1] == 255).sum() == 30 * 105
    small = omniglot(tmp_path, size=7, verify=False)
    assert (small.images[1] == 255).sum() == 2 * 7
    assert small.classes == ("Greek/alpha", "Greek/beta")
    assert omniglot(tmp_path, verify=False).images.shape == (4, 1, 28, 28)


def test_omniglot_evaluation_has_its_own_labels(tmp_path, save):
    save("omniglot/omniglot.npz", drawings())
    data = omniglot(tmp_path, "evaluation", verify=False)
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
        ({"char_names": np.array("alpha")}, "char_names must be one row of names"),
    ],
)
def test_bad_omniglot_is_named(tmp_path, save, change, message):
    save("omniglot/omniglot.npz", drawings(**change))
    with pytest.raises(DamagedData, match=message):
        omniglot(tmp_path, verify=False)


def test_other_drawings_fail_the_check(tmp_path, save):
    save("omniglot/omniglot.npz", drawings())
    with pytest.raises(DamagedData, match="published drawings, not others; pass verify=False"):
        omniglot(tmp_path)


@pytest.mark.parametrize("size", [0, 106])
def test_omniglot_size_is_bounded(tmp_path, size):
    with pytest.raises(ValueError, match=f"size must be in 1..105, not {size}"):
        omniglot(tmp_path, size=size)


def test_modelnet_scales_to_the_unit_ball(tmp_path, save):
    save("modelnet10/modelnet10_1024.npz", shapes())
    data = modelnet10(tmp_path, verify=False)
    assert data.labels.tolist() == [0, 1, 1]
    assert torch.equal(data.points[0], torch.eye(3))
    assert len(modelnet10(tmp_path, "test", verify=False)) == 1
    with pytest.raises(DamagedData, match="must hold 3991 shapes for train, not 3"):
        modelnet10(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"points": np.zeros((4, 3, 3))}, "points must be int16"),
        ({"label": np.array([0, 1, 0, 2], dtype=np.uint8)}, "label must be in 0..1, not 0..2"),
        ({"test": np.zeros(3, dtype=np.uint8)}, r"test must be integers \(4,\)"),
        ({"classes": np.array("bed")}, "classes must be one row of names"),
    ],
)
def test_bad_modelnet_is_named(tmp_path, save, change, message):
    save("modelnet10/modelnet10_1024.npz", shapes(**change))
    with pytest.raises(DamagedData, match=message):
        modelnet10(tmp_path, verify=False)


def test_broken_npz_files_are_named(tmp_path, save, write):
    path = save("modelnet10/modelnet10_1024.npz", shapes())
    whole = path.read_bytes()
    for content in (b"", b"PK", whole[:-40], whole[:100], b"cos\nsystem\n(S'true'\ntR."):
        path.write_bytes(content)
        with pytest.raises(DamagedData, match="not a readable npz file"):
            modelnet10(tmp_path, verify=False)
    flipped = bytearray(whole)
    flipped[70] ^= 255
    path.write_bytes(bytes(flipped))
    with pytest.raises(DamagedData, match="npz"):
        modelnet10(tmp_path, verify=False)
    arrays = shapes()
    del arrays["test"]
    save("modelnet10/modelnet10_1024.npz", arrays)
    with pytest.raises(DamagedData, match="arrays points, label, test, classes, not points, label, classes"):
        modelnet10(tmp_path, verify=False)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(DamagedData, match="npz file, not a single array"):
        modelnet10(tmp_path, verify=False)


def header(shape: str) -> bytes:
    text = f"{{'descr': '<i2', 'fortran_order': False, 'shape': {shape}}}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize("member", ["points.npy", "points"])
@pytest.mark.parametrize(
    "content",
    [b"not an array", b"", header("(4, 1" + "0" * 10 + ", 3)"), header(f"({2**62}, 3)"), header(f"(0, {2**70}, 3)")],
    ids=["text", "empty", "large", "larger", "flat"],
)
def test_members_that_are_no_arrays_are_named(tmp_path, save, member, content):
    arrays = shapes()
    del arrays["points"]
    path = save("modelnet10/modelnet10_1024.npz", arrays)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr(member, content)
    with pytest.raises(DamagedData, match=r"points must be an array, not bytes|not a readable npz file"):
        modelnet10(tmp_path, verify=False)


def test_an_npz_bomb_is_refused(tmp_path, save, monkeypatch):
    save("modelnet10/modelnet10_1024.npz", shapes(points=np.zeros((4, 10000, 3), dtype=np.int16)))
    monkeypatch.setattr("hypersphere.data.content.LARGEST_FILE", 2**16)
    with pytest.raises(DamagedData, match="arrays of at most 65536 bytes, not 240128"):
        modelnet10(tmp_path, verify=False)


def test_real_omniglot(real):
    data = omniglot(real("omniglot"), "evaluation", size=14)
    assert torch.bincount(data.labels).tolist() == [20] * 659
    assert 0.02 < data.tensors()[0].mean() < 0.2


def test_real_modelnet(real):
    data = modelnet10(real("modelnet10"), "test")
    assert data.points.shape == (908, 1024, 3)
    assert data.points.norm(dim=2).max() < 1.001
    assert data.classes[0] == "bathtub"
