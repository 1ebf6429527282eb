import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from hypersphere.cli.opening import LoadedRun
from hypersphere.data import embeddings
from hypersphere.training import Config

from .conftest import train


def features(run, pixels):
    """Return the features of images in [0, 1]."""
    with torch.no_grad():
        return run.experiment().network(torch.as_tensor(pixels, dtype=torch.float32)).numpy()


def test_embed_writes_the_test_data_of_a_run(plain, succeeds):
    out = succeeds("embed", plain.folder)
    assert "500 embeddings with 6 dimensions" in out
    found = load_file(plain.folder / "embeddings.safetensors")
    data = plain.experiment().data.validation
    np.testing.assert_allclose(found["features"], features(plain, data.inputs / 255), rtol=1e-4, atol=1e-5)
    assert torch.equal(found["labels"], data.labels)
    words = json.loads((plain.folder / "embeddings.json").read_text())
    assert (words.pop("note"), words.pop("file")) == ("written by hypersphere", "embeddings.safetensors")
    names = [str(place) for place in range(500)]
    assert words == {"names": names, "labels": data.labels.tolist(), "classes": list(data.classes)}
    succeeds("embed", plain.folder)  # its own files are replaced


def test_embed_keeps_the_labels_of_embeddings_with_another_suffix(plain, succeeds, fails, tmp_path):
    succeeds("embed", plain.folder, "--out", tmp_path / "e.npy")
    before = (tmp_path / "e.json").read_bytes()
    (tmp_path / "e.safetensors").write_text("mine")
    message = fails(2, "embed", plain.folder, "--out", tmp_path / "e.safetensors")
    assert f"--out: {tmp_path / 'e.json'} has the labels of e.npy; choose another name" in message
    assert (tmp_path / "e.json").read_bytes() == before
    assert (tmp_path / "e.safetensors").read_text() == "mine"


def test_embed_appends_features_of_mirrored_images(plain, succeeds, tmp_path):
    succeeds("embed", plain.folder, "--mirror", "--out", tmp_path / "e.npy", "--batch", "64")
    pixels = plain.experiment().data.validation.inputs.numpy() / 255
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
        ([plain.folder, images / "0.png", tmp_path], "images must be image files, or a single folder"),
        ([plain.folder, images, "--out", out], "must contain either images or folders of images, but has 0.png and a/"),
        ([plain.folder, tmp_path / "none", "--out", out], f"{tmp_path / 'none'} not found"),
        ([plain.folder, __file__, "--out", out], "images must be image files, a folder or an archive (.tar, .tar.gz, "),
        ([plain.folder, "--out", tmp_path / "e.csv"], "--out must be a file with suffix .npy or .safetensors"),
        ([plain.folder, "--out", images / "0.png" / "e.npy"], "--out must be a file in a writable folder"),
        ([tmp_path], "RUN must be the folder of a run of `hypersphere train` (with a config.json), not"),
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

    monkeypatch.setattr(embeddings, "json", SimpleNamespace(dumps=full, loads=json.loads))  # after the matrix
    assert "No space left on device" in fails(1, "embed", plain.folder, "--out", tmp_path / "e.npy")
    assert list(tmp_path.iterdir()) == []


def test_features_of_points_reject_mirror():
    run = SimpleNamespace(config=Config.of({"data": "modelnet10"}))
    split = SimpleNamespace(train=torch.zeros(2, 1024, 3), graph=None)
    experiment = SimpleNamespace(data=split, input_shape=(1024, 3), embed=lambda *_, **__: (None, None))
    opened = LoadedRun(run, experiment, 1)
    with pytest.raises(ValueError, match="--mirror needs a run on images, not on modelnet10"):
        opened.embed(split.train, mirror=True)


def test_embed_single_images_writes_to_the_current_folder(plain, draw_images, succeeds, monkeypatch, tmp_path):
    draw_images(tmp_path, {"photo.png": 90, "other.jpg": 30})
    monkeypatch.chdir(tmp_path)
    out = succeeds("embed", plain.folder, "photo.png", "other.jpg")
    assert "2 embeddings with 6 dimensions: embeddings.safetensors" in out
    words = json.loads((tmp_path / "embeddings.json").read_text())
    assert (words["names"], words["labels"]) == (["photo.png", "other.jpg"], None)


def test_embed_does_not_replace_files_of_others(plain, fails, tmp_path):
    for name in ("e.npy", "e.json"):
        (tmp_path / name).write_text("mine")
        line = fails(2, "embed", plain.folder, "--out", tmp_path / "e.npy")
        assert f"{tmp_path / name} exists and was not written by this command" in line
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()
    before = (plain.folder / "config.json").read_bytes()
    assert "exists" in fails(2, "embed", plain.folder, "--out", plain.folder / "config.npy")
    assert (plain.folder / "config.json").read_bytes() == before


def test_embed_reads_only_the_given_folder(plain, draw_images, succeeds, tmp_path):
    images = draw_images(tmp_path / "images", {"0.png": 1})
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "0.png").write_text("no image")
    (tmp_path / "locked").mkdir(mode=0)
    succeeds("embed", plain.folder, images, "--out", tmp_path / "out" / "e.npy")
    assert np.load(tmp_path / "out" / "e.npy").shape == (1, 6)
    assert json.loads((tmp_path / "out" / "e.json").read_text())["names"] == ["0.png"]


def test_embed_resizes_images_as_in_training(photos, succeeds, tmp_path):
    data = {"name": "image_folder", "path": str(photos), "size": 8, "split": "class", "held_out": 10, "fit": "crop"}
    run = train(tmp_path / "run", data=data, epochs=1)
    square = np.asarray(Image.open(photos / "person-00" / "0.png"))
    # A square picture with black borders to its left and right: cropping removes them, stretching would not.
    Image.fromarray(np.pad(square, ((0, 0), (8, 8)))).save(tmp_path / "wide.png")
    succeeds("embed", run.folder, tmp_path / "wide.png", "--out", tmp_path / "e.npy")
    expected = features(run, square[None, None] / 255)
    np.testing.assert_allclose(np.load(tmp_path / "e.npy"), expected, rtol=1e-3, atol=1e-4)
