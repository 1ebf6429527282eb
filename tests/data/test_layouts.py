import pickle

import numpy as np
import pytest
import torch

from hypersphere.data import DATA, BrokenSample, DamagedData, MissingData, Source
from hypersphere.data.layouts import _parse_off, _surface_points
from picture_files import encoded, pixels, write_tree

CUBE = """OFF
8 6 0
0 0 0
1 0 0
1 1 0
0 1 0
0 0 1
1 0 1
1 1 1
0 1 1
4 0 1 2 3
4 4 5 6 7
4 0 1 5 4
4 2 3 7 6
4 0 3 7 4
4 1 2 6 5
"""


def test_imagenet_reads_class_folders(tmp_path):
    write_tree(tmp_path / "imagenet" / "train", {"n01": 3, "n02": 2}, size=(40, 60), kind="JPEG")
    write_tree(tmp_path / "imagenet" / "val", {"n01": 1, "n02": 2}, size=(60, 40), kind="JPEG")
    data = DATA["imagenet"](tmp_path, size=32)
    assert data.classes == ("n01", "n02")
    assert data.train[0].shape == (3, 32, 32)
    assert data.validation.labels.tolist() == [0, 1, 1]
    assert not data.open_set
    cut = DATA["imagenet"](tmp_path, size=32, margin=4)
    assert cut.train[0].shape == (3, 32, 32)
    assert torch.equal(cut.validation[1], data.validation[1][:, 2:30, 2:30])
    assert cut.fingerprint() == data.fingerprint()


def test_imagenet_reads_the_archive_of_kaggle(tmp_path):
    base = tmp_path / "ILSVRC" / "Data" / "CLS-LOC"
    write_tree(base / "train", {"n01": 2, "n02": 2}, kind="JPEG")
    (base / "val").mkdir()
    rows = ["ImageId,PredictionString"]
    for number, name in ((1, "n02"), (2, "n01"), (3, "n02")):
        (base / "val" / f"ILSVRC2012_val_{number:08d}.JPEG").write_bytes(encoded(pixels(number)))
        rows.append(f"ILSVRC2012_val_{number:08d},{name} 85 1 499 272 ")
    with pytest.raises(MissingData, match=r"LOC_val_solution\.csv"):
        DATA["imagenet"](tmp_path, size=8)
    (tmp_path / "LOC_val_solution.csv").write_text("\n".join(rows))
    data = DATA["imagenet"](tmp_path, size=8)
    assert data.validation.labels.tolist() == [1, 0, 1]
    assert np.array_equal(data.validation[0].permute(1, 2, 0).numpy(), pixels(1))
    with pytest.raises(MissingData, match="contains train"):
        DATA["imagenet"](base)


@pytest.mark.parametrize("layout", ["lists", "folders"])
@pytest.mark.parametrize(("part", "classes"), [("val", ("n03",)), ("test", ("n04", "n05"))])
def test_mini_imagenet_is_an_open_set(tmp_path, layout, part, classes):
    base = tmp_path / "mini-imagenet"
    parts = {"train": {"n01": 3, "n02": 3}, "val": {"n03": 3}, "test": {"n04": 2, "n05": 2}}
    for name, counts in parts.items():
        if layout == "folders":
            write_tree(base / name, counts)
            continue
        (base / "images").mkdir(parents=True, exist_ok=True)
        rows = ["filename,label"]
        for label, count in counts.items():
            for number in range(count):
                file = f"{label}{number:08d}.jpg"
                (base / "images" / file).write_bytes(encoded(pixels(number), "JPEG"))
                rows.append(f"{file},{label}")
        (base / f"{name}.csv").write_text("\n".join(rows))
    data = DATA["mini_imagenet"](tmp_path, size=12, validation=part)
    assert data.open_set
    assert data.classes == ("n01", "n02")
    assert data.validation.classes == classes
    assert data.train[5].shape == (3, 12, 12)
    with pytest.raises(ValueError, match=r"data\.validation must be 'val' or 'test'"):
        DATA["mini_imagenet"](tmp_path, validation="train")
    with pytest.raises(MissingData, match="mini-imagenet not found"):
        DATA["mini_imagenet"](base)


def test_casia_webface_holds_out_people(tmp_path):
    write_tree(tmp_path / "casia-webface", {f"{number:07d}": 3 for number in range(10)}, size=(20, 16))
    data = DATA["casia_webface"](tmp_path, held_out=3)
    assert data.open_set
    assert len(data.classes) == 7
    assert data.train[0].shape == (3, 112, 96)


def test_casia_webface_validates_on_a_bin_file_or_lfw(tmp_path, monkeypatch):
    from hypersphere.data.lfw import SHA256

    base = tmp_path / "casia-webface"
    write_tree(base, {"0000001": 2, "0000002": 2})
    (base / "lfw.bin").write_bytes(pickle.dumps(([encoded(pixels(at)) for at in range(4)], [True, False])))
    data = DATA["casia_webface"](tmp_path, size=8, validation="lfw.bin")
    assert data.pairs.same.tolist() == [True, False]
    assert data.open_set
    assert len(data.validation) == 4
    for person in ("A_A", "B_B"):
        (tmp_path / "lfw" / "lfw" / person).mkdir(parents=True)
        for number in (1, 2):
            (tmp_path / "lfw" / "lfw" / person / f"{person}_{number:04d}.jpg").write_bytes(encoded(pixels(number)))
    (tmp_path / "lfw" / "pairs.txt").write_text("1\t1\nA_A\t1\t2\nA_A\t1\tB_B\t2\n")
    monkeypatch.setitem(SHA256, "pairs.txt", None)
    data = DATA["casia_webface"](tmp_path, size=8, validation="lfw")
    assert data.pairs.second.tolist() == [1, 3]
    with pytest.raises(ValueError, match=r"data\.validation must be"):
        DATA["casia_webface"](tmp_path, validation="pairs")


def write_resampled(root):
    base = root / "modelnet40_normal_resampled"
    base.mkdir()
    (base / "modelnet40_shape_names.txt").write_text("airplane\nnight_stand\n")
    lists = {"train": ["airplane_0001", "night_stand_0002", "airplane_0003"], "test": ["night_stand_0004"]}
    clouds = {}
    for part, shapes in lists.items():
        (base / f"modelnet40_{part}.txt").write_text("\n".join(shapes) + "\n")
        for at, shape in enumerate(shapes):
            folder = base / shape.rpartition("_")[0]
            folder.mkdir(exist_ok=True)
            cloud = np.random.default_rng(at).normal(size=(50, 6))
            np.savetxt(folder / f"{shape}.txt", cloud, delimiter=",", fmt="%.6f")
            clouds[shape] = np.round(cloud, 6)
    return base, clouds


def test_modelnet40_reads_resampled_points(tmp_path):
    _, clouds = write_resampled(tmp_path)
    data = DATA["modelnet40"](tmp_path, points=32)
    assert isinstance(data.train, Source)
    assert data.classes == ("airplane", "night_stand")
    assert data.train.labels.tolist() == [0, 1, 0]
    assert data.validation.labels.tolist() == [1]
    cloud = clouds["night_stand_0002"][:32, :3]
    cloud = cloud - cloud.mean(0)
    cloud /= np.linalg.norm(cloud, axis=1).max()
    np.testing.assert_allclose(data.train[1].numpy(), cloud, atol=1e-6)
    assert data.outline() == {"shape": [32, 3], "dtype": "float32", "classes": ["airplane", "night_stand"]}


def test_modelnet40_names_broken_files_and_lists(tmp_path):
    base, _ = write_resampled(tmp_path)
    data = DATA["modelnet40"](tmp_path, points=32)
    before = data.fingerprint()
    (base / "airplane" / "airplane_0001.txt").write_text("1,2\n")
    with pytest.raises(BrokenSample, match=r"airplane/airplane_0001\.txt is not a readable point cloud"):
        data.train[0]
    assert data.fingerprint() != before
    with pytest.raises(BrokenSample, match="it must begin with 64 lines"):
        DATA["modelnet40"](tmp_path, points=64).train[1]
    (base / "modelnet40_test.txt").write_text("spaceship_0001\n")
    with pytest.raises(DamagedData, match="not 'spaceship_0001'"):
        DATA["modelnet40"](tmp_path)
    with pytest.raises(MissingData, match="ModelNet40 not found"):
        DATA["modelnet40"](base)


def test_modelnet40_draws_points_from_meshes(tmp_path):
    for name in ("bed", "chair"):
        for part in ("train", "test"):
            folder = tmp_path / "ModelNet40" / name / part
            folder.mkdir(parents=True)
            (folder / f"{name}_0001.off").write_text(CUBE if name == "bed" else CUBE.replace("OFF\n", "OFF"))
    data = DATA["modelnet40"](tmp_path, points=500)
    assert data.train.labels.tolist() == [0, 1]
    cloud = data.train[0]
    assert cloud.shape == (500, 3)
    assert torch.equal(cloud, data.train[0])  # the same points each time
    assert float(cloud.norm(dim=1).max()) == pytest.approx(1)
    assert not torch.equal(cloud, data.validation[0])


def test_surface_points_are_uniform_on_the_surface():
    vertices, faces = _parse_off(CUBE)
    assert faces.shape == (12, 3)
    points = _surface_points(vertices, faces, 60_000, 0)
    on_face = [np.isclose(points[:, axis], side) for axis in range(3) for side in (0.0, 1.0)]
    assert np.stack(on_face).any(0).all()
    counts = np.array([face.sum() for face in on_face])
    assert np.abs(counts / 10_000 - 1).max() < 0.05
    # Uniform within a face: a quarter of the points in each quadrant.
    face = points[on_face[0]][:, 1:]
    quadrants = np.histogram2d(face[:, 0], face[:, 1], bins=2)[0] / len(face)
    assert np.abs(quadrants - 0.25).max() < 0.03


@pytest.mark.parametrize(
    "content",
    ["", "PLY", "OFF\n", "OFF\n1 1 0\n0 0 0\n3 0 0 5\n", "OFF\n99999999 1 0\n", "OFF\n1 1 0\n0 0 0\n3 0 0 0\n"],
)
def test_meshes_are_checked(tmp_path, content):
    folder = tmp_path / "ModelNet40" / "bed"
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True)
        (folder / part / "a.off").write_text(content)
    with pytest.raises(BrokenSample, match=r"bed/train/a\.off is not a readable point cloud"):
        DATA["modelnet40"](tmp_path).train[0]
