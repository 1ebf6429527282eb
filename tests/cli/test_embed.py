import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from hypersphere.cli import embeddings
from hypersphere.cli.opening import Opened


def features(run, pixels):
    """Return the features of images in [0, 1]."""
    with torch.no_grad():
        return run.assembly().network(torch.as_tensor(pixels, dtype=torch.float32)).numpy()


def test_embed_writes_the_test_data_of_a_run(plain, succeeds):
    out = succeeds("embed", plain.folder)
    assert "500 embeddings with 6 dimensions" in out
    found = load_file(plain.folder / "embeddings.safetensors")
    task = plain.assembly().task
    np.testing.assert_allclose(found["features"], features(plain, task.test_inputs / 255), rtol=1e-4, atol=1e-5)
    assert torch.equal(found["labels"], task.test_labels)
    words = json.loads((plain.folder / "embeddings.json").read_text())
    assert words == {"names": None, "labels": task.test_labels.tolist(), "classes": list(task.classes)}


def test_embed_appends_features_of_mirrored_images(plain, succeeds, tmp_path):
    succeeds("embed", plain.folder, "--mirror", "--out", tmp_path / "e.npy", "--batch", "64")
    pixels = plain.assembly().task.test_inputs.numpy() / 255
    both = np.concatenate([features(plain, pixels), features(plain, pixels[..., ::-1].copy())], axis=1)
    np.testing.assert_allclose(np.load(tmp_path / "e.npy"), both, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("flat", [False, True])
def test_embed_resizes_a_folder_of_images(flat, plain, draw_images, succeeds, tmp_path):
    greys = {"b/2.png": 200, "a/1.png": 40, "a/0.jpg": 90}
    names = [name.replace("/", "-") if flat else name for name in greys]
    images = draw_images(tmp_path / "images", dict(zip(names, greys.values(), strict=True)))
    Image.new("RGB", (5, 30), (255, 0, 0)).save(images / sorted(names)[0])  # a colour image of another size
    (images / "notes.txt").write_text("no image")
    succeeds("embed", plain.folder, images, "--out", tmp_path / "out" / "e.npy")
    words = json.loads((tmp_path / "out" / "e.json").read_text())
    assert words["names"] == sorted(names)
    assert (words["labels"], words["classes"]) == ((None, None) if flat else ([0, 0, 1], ["a", "b"]))
    grey = np.full((3, 1, 8, 8), [[[[76]]], [[[40]]], [[[200]]]], dtype=np.float32)  # red has the luminance 76 of 255
    np.testing.assert_allclose(np.load(tmp_path / "out" / "e.npy"), features(plain, grey / 255), rtol=1e-2, atol=1e-2)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["e.json", "e.npy"]


def test_embed_rejects_invalid_input_without_writing(plain, draw_images, fails, tmp_path):
    images = draw_images(tmp_path / "images", {"0.png": 1, "a/1.png": 2})
    out = tmp_path / "e.npy"
    for words, message in [
        ([plain.folder, images], "a folder of images needs --out"),
        ([plain.folder, images, "--out", out], "must be either images or folders of images, not 'a'"),
        ([plain.folder, tmp_path / "none", "--out", out], "not found"),
        ([plain.folder, "--out", tmp_path / "e.csv"], "--out must be a file with suffix .npy or .safetensors"),
        ([plain.folder, "--out", images / "0.png" / "e.npy"], "--out must be a file in a writable folder"),
        ([tmp_path], "is not a run of `hypersphere train`"),
    ]:
        assert message in fails(2, "embed", *words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images"]


def test_embed_reports_a_damaged_image(plain, draw_images, fails, tmp_path):
    images = draw_images(tmp_path / "images", {"0.png": 1})
    (images / "1.png").write_bytes((images / "0.png").read_bytes()[:40])
    assert "1.png is not a readable image" in fails(3, "embed", plain.folder, images, "--out", tmp_path / "e.npy")
    assert not (tmp_path / "e.npy").exists()


def test_embed_leaves_no_files_if_the_disk_is_full(plain, fails, monkeypatch, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(embeddings.json, "dumps", full)  # after the matrix was written
    assert "No space left on device" in fails(1, "embed", plain.folder, "--out", tmp_path / "e.npy")
    assert list(tmp_path.iterdir()) == []


def test_features_of_points_reject_mirror():
    job = SimpleNamespace(data={"name": "modelnet10"})
    task = SimpleNamespace(inputs=torch.zeros(2, 1024, 3), graph=None)
    opened = Opened(SimpleNamespace(job=job), SimpleNamespace(task=task), 1, torch.device("cpu"))
    with pytest.raises(ValueError, match="--mirror needs a run on images, not on modelnet10"):
        opened.features(task.inputs, mirror=True)
