import zipfile

import numpy as np
import pytest
import torch

from hypersphere.data import DamagedData, modelnet10


def shapes(**change):
    arrays = {
        "points": (np.eye(3)[None].repeat(4, axis=0) * 32767).astype(np.int16),
        "label": np.array([0, 1, 0, 1], dtype=np.uint8),
        "test": np.array([0, 0, 1, 0], dtype=np.uint8),
        "classes": np.array(["bed", "chair"]),
    }
    return arrays | change


def test_modelnet10_scales_to_the_unit_ball(tmp_path, save):
    save("modelnet10/modelnet10_1024.npz", shapes())
    data = modelnet10(root=tmp_path, verify=False)
    assert data.labels.tolist() == [0, 1, 1]
    assert torch.equal(data.points[0], torch.eye(3))
    assert len(modelnet10("test", tmp_path, verify=False)) == 1
    with pytest.raises(DamagedData, match="must contain 3991 shapes for train, not 3"):
        modelnet10(root=tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"points": np.zeros((4, 3, 3))}, "points must be int16"),
        ({"label": np.array([0, 1, 0, 2], dtype=np.uint8)}, "label must be in 0..1, not 0..2"),
        ({"test": np.zeros(3, dtype=np.uint8)}, r"test must be integers \(4,\)"),
        ({"classes": np.array("bed")}, "classes must be a 1-d array of names"),
    ],
)
def test_modelnet10_rejects_invalid_arrays(tmp_path, save, change, message):
    save("modelnet10/modelnet10_1024.npz", shapes(**change))
    with pytest.raises(DamagedData, match=message):
        modelnet10(root=tmp_path, verify=False)


def test_modelnet10_rejects_damaged_npz_files(tmp_path, save, write):
    path = save("modelnet10/modelnet10_1024.npz", shapes())
    content = path.read_bytes()
    for damaged in (b"", b"PK", content[:-40], content[:100], b"cos\nsystem\n(S'true'\ntR."):
        path.write_bytes(damaged)
        with pytest.raises(DamagedData, match="not a readable npz file"):
            modelnet10(root=tmp_path, verify=False)
    flipped = bytearray(content)
    flipped[70] ^= 255
    path.write_bytes(bytes(flipped))
    with pytest.raises(DamagedData, match="npz"):
        modelnet10(root=tmp_path, verify=False)
    arrays = shapes()
    del arrays["test"]
    save("modelnet10/modelnet10_1024.npz", arrays)
    with pytest.raises(DamagedData, match="arrays points, label, test, classes, not points, label, classes"):
        modelnet10(root=tmp_path, verify=False)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(DamagedData, match="npz file, not a single array"):
        modelnet10(root=tmp_path, verify=False)


def header(shape: str) -> bytes:
    text = f"{{'descr': '<i2', 'fortran_order': False, 'shape': {shape}}}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize("member", ["points.npy", "points"])
@pytest.mark.parametrize(
    "content",
    [b"not an array", b"", header("(4, 1" + "0" * 10 + ", 3)"), header(f"({2**62}, 3)"), header(f"(0, {2**70}, 3)")],
    ids=["text", "empty", "large", "larger", "flat"],
)
def test_modelnet10_rejects_members_that_are_not_arrays(tmp_path, save, member, content):
    arrays = shapes()
    del arrays["points"]
    path = save("modelnet10/modelnet10_1024.npz", arrays)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr(member, content)
    with pytest.raises(DamagedData, match=r"points must be an array, not bytes|not a readable npz file"):
        modelnet10(root=tmp_path, verify=False)


def test_modelnet10_rejects_arrays_that_decompress_to_more_than_the_limit(tmp_path, save, monkeypatch):
    save("modelnet10/modelnet10_1024.npz", shapes(points=np.zeros((4, 10000, 3), dtype=np.int16)))
    monkeypatch.setattr("hypersphere.data._files.MAX_FILE_BYTES", 2**16)
    with pytest.raises(DamagedData, match="arrays of at most 65536 bytes, not 240128"):
        modelnet10(root=tmp_path, verify=False)


def test_modelnet10_reads_the_real_file(real):
    data = modelnet10("test", real("modelnet10"))
    assert data.points.shape == (908, 1024, 3)
    assert data.points.norm(dim=2).max() < 1.001
    assert data.classes[0] == "bathtub"
