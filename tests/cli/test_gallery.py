"""`enroll`, `search` and `serve`: from a folder of images to answers over HTTP."""

import functools
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image

from hypersphere._files import locking
from hypersphere.cli.enroll import LOCK
from hypersphere.cli.opening import LoadedRun, open_run
from hypersphere.cli.service import Service
from hypersphere.gallery import Gallery, fingerprint_of
from hypersphere.training import Run

from .conftest import invoke, train

PEOPLE = [f"person-{number:02d}" for number in range(20)]


@pytest.fixture(scope="module")
def calibrated(people, tmp_path_factory):
    """The run with a calibration."""
    folder = shutil.copytree(people.folder, tmp_path_factory.mktemp("calibrated") / "run")
    invoke("evaluate", folder, "--calibrate", "--far", "0.1,0.02", "--bootstrap", 0)
    return Run.open(folder)


@pytest.fixture(scope="module")
def enrolled_photos(photos, tmp_path_factory):
    """All photos except the first of each person, which are the queries."""
    folder = shutil.copytree(photos, tmp_path_factory.mktemp("enrolled") / "photos")
    for path in folder.glob("*/0.png"):
        path.unlink()
    return folder


@pytest.fixture(scope="module")
def gallery(calibrated, enrolled_photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gallery") / "gallery"
    invoke("enroll", calibrated.folder, enrolled_photos, "--gallery", folder)
    return folder


@functools.cache
def network(folder):
    return Run.open(folder).experiment(with_data=False).network


def unit_embedding(run, path):
    """Return the normalised embedding of an image file, read with Pillow."""
    image = np.asarray(Image.open(path), dtype=np.float32)[None, None] / 255
    with torch.no_grad():
        x = network(run.folder)(torch.from_numpy(image))[0].double().numpy()
    return x / np.linalg.norm(x)


def nearest_people(run, folder, query):
    """Return names and cosines of the best photo of each person, best first, by comparing all photos."""
    x = unit_embedding(run, query)
    best = {}
    for path in sorted(folder.glob("*/*.png")):
        best[path.parent.name] = max(best.get(path.parent.name, -1), float(x @ unit_embedding(run, path)))
    return sorted(best.items(), key=lambda item: -item[1])


@pytest.mark.parametrize("is_new", [False, True])
def test_enroll_keeps_what_another_command_enrols_in_the_meantime(
    is_new, calibrated, enrolled_photos, gallery, succeeds, monkeypatch, tmp_path
):
    folder = tmp_path / "gallery"
    before = 0
    if not is_new:
        shutil.copytree(gallery, folder)
        before = len(Gallery.load(folder))
    embed = LoadedRun.embed

    def embed_while_another_command_saves(self, source, **options):
        features, labels = embed(self, source, **options)
        other = Gallery(features.shape[1], fingerprint=self.fingerprint) if is_new else Gallery.load(folder)
        other.enroll(["someone else"], features[:1])
        other.save(folder)
        return features, labels

    monkeypatch.setattr(LoadedRun, "embed", embed_while_another_command_saves)
    succeeds("enroll", calibrated.folder, enrolled_photos, "--gallery", folder)
    names = Gallery.load(folder).names
    assert names.count("someone else") == 1
    assert len(names) == before + 1 + len([*enrolled_photos.glob("*/*.png")])


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locks")
def test_enroll_waits_for_another_command_that_saves(
    calibrated, enrolled_photos, gallery, succeeds, monkeypatch, tmp_path
):
    folder = tmp_path / "gallery"
    shutil.copytree(gallery, folder)
    before = len(Gallery.load(folder))
    embed, locked, embedded = LoadedRun.embed, threading.Event(), threading.Event()

    def embed_after_the_other_has_the_lock(self, source, **options):
        locked.wait(60)
        result = embed(self, source, **options)
        embedded.set()
        return result

    def other_command():
        with locking(folder / LOCK):
            locked.set()
            embedded.wait(60)
            time.sleep(0.5)  # time for the first command to save too early
            other = Gallery.load(folder)
            other.enroll(["someone else"], torch.ones(1, other.dim))
            other.save(folder)

    monkeypatch.setattr(LoadedRun, "embed", embed_after_the_other_has_the_lock)
    thread = threading.Thread(target=other_command)
    thread.start()
    succeeds("enroll", calibrated.folder, enrolled_photos, "--gallery", folder)
    thread.join()
    names = Gallery.load(folder).names
    assert names.count("someone else") == 1
    assert len(names) == before + 1 + len([*enrolled_photos.glob("*/*.png")])


def test_enroll_names_images_by_their_folder(calibrated, gallery):
    stored = Gallery.load(gallery)
    assert sorted(set(stored.names)) == PEOPLE
    assert (len(stored), stored.dtype, stored.index) == (100, "float32", "exact")
    assert stored.fingerprint == fingerprint_of(calibrated.experiment(with_data=False).network)


def test_enroll_adds_and_replaces(calibrated, enrolled_photos, succeeds, fails, tmp_path):
    words = ["enroll", calibrated.folder, enrolled_photos, "--gallery", tmp_path / "gallery"]
    assert "100 images of 20 names enrolled" in succeeds(*words, "--dtype", "int8")
    assert Gallery.load(tmp_path / "gallery").dtype == "int8"
    assert "20 of these names were there before and now have more images" in succeeds(*words)
    assert len(Gallery.load(tmp_path / "gallery")) == 200
    assert "20 of these names were replaced" in succeeds(*words, "--replace")
    assert len(Gallery.load(tmp_path / "gallery")) == 100
    assert "--dtype must be int8, as in" in fails(2, *words, "--dtype", "float16")
    assert "dtype must be one of" in fails(2, *words[:3], "--gallery", tmp_path / "new", "--dtype", "int4")
    assert not (tmp_path / "new").exists()


def test_enroll_keeps_the_storage_of_an_empty_gallery(calibrated, enrolled_photos, succeeds, tmp_path):
    Gallery(6, "int8").save(tmp_path / "gallery")
    succeeds("enroll", calibrated.folder, enrolled_photos, "--gallery", tmp_path / "gallery")
    assert Gallery.load(tmp_path / "gallery").dtype == "int8"


def test_enroll_refuses_a_file_as_gallery_before_opening_the_run(calibrated, enrolled_photos, fails, tmp_path):
    (tmp_path / "gallery").touch()
    (tmp_path / "run").mkdir()
    shutil.copy(calibrated.path, tmp_path / "run")  # without checkpoints it cannot be opened
    line = fails(2, "enroll", tmp_path / "run", enrolled_photos, "--gallery", tmp_path / "gallery")
    assert f"--gallery must be a folder, not 'the file {tmp_path / 'gallery'}'" in line


def test_enroll_names_single_images_by_their_file(calibrated, enrolled_photos, succeeds, tmp_path):
    (tmp_path / "faces").mkdir()
    for name in ("ada", "emmy"):
        shutil.copy(enrolled_photos / "person-00" / "1.png", tmp_path / "faces" / f"{name}.png")
    succeeds("enroll", calibrated.folder, tmp_path / "faces", "--gallery", tmp_path / "gallery")
    assert Gallery.load(tmp_path / "gallery").names == ("ada", "emmy")


def test_search_finds_the_nearest_people(calibrated, enrolled_photos, gallery, photos, succeeds):
    queries = [photos / name / "0.png" for name in ("person-03", "person-11")]
    words = ["search", gallery, *queries, "--run", calibrated.folder, "-k", 4]
    found = json.loads(succeeds(*words, "--json"))
    calibration = calibrated.calibration().calibration
    for result, query in zip(found, queries, strict=True):
        expected = nearest_people(calibrated, enrolled_photos, query)[:4]
        assert result["image"] == str(query)
        assert [match["name"] for match in result["matches"]] == [name for name, _ in expected]
        cosines = [match["cosine"] for match in result["matches"]]
        assert cosines == pytest.approx([cosine for _, cosine in expected], abs=1e-5)
        probabilities = [match["probability"] for match in result["matches"]]
        assert probabilities == pytest.approx(calibration.probability(cosines).tolist(), rel=1e-6)
    table = succeeds(*words)
    for match in found[1]["matches"]:
        assert f"{match['cosine']:.4f}" in table
    by_photo = json.loads(succeeds(*words, "--json", "--photos"))
    assert all(len(result["matches"]) == 4 for result in by_photo)


def test_search_without_calibration_has_cosines_only(people, enrolled_photos, photos, succeeds, tmp_path):
    succeeds("enroll", people.folder, enrolled_photos, "--gallery", tmp_path / "gallery")
    words = ["search", tmp_path / "gallery", photos / "person-00" / "0.png", "--run", people.folder]
    assert "probability" not in succeeds(*words, "--json")
    assert "robability" not in succeeds(*words)


def test_search_in_signs_has_no_probabilities(calibrated, enrolled_photos, photos, succeeds, tmp_path):
    query = photos / "person-00" / "0.png"
    succeeds("enroll", calibrated.folder, enrolled_photos, "--gallery", tmp_path / "gallery", "--dtype", "binary")
    words = ["search", tmp_path / "gallery", query, "--run", calibrated.folder]
    assert "probability" not in succeeds(*words, "--json")
    assert "Cosine: with the signs" in succeeds(*words)
    opened = open_run(calibrated.folder, with_data=False)
    service = Service.of(opened, Gallery.load(tmp_path / "gallery"), max_pixels=1000)
    (match,) = service.search(service.embed(query.read_bytes(), "query"), 1, True)["matches"]
    assert set(match) == {"name", "cosine"}


def test_gallery_commands_refuse_another_model(gallery, enrolled_photos, photos, fails, tmp_path):
    data = {"name": "image_folder", "path": str(photos), "size": 8, "split": "class", "held_out": 10}
    other = train(tmp_path / "other", data=data, epochs=1, seed=1)
    before = (gallery / "gallery.json").read_bytes()
    line = "cosines between models have no meaning"
    assert line in fails(2, "enroll", other.folder, enrolled_photos, "--gallery", gallery)
    assert line in fails(2, "search", gallery, photos / "person-00" / "0.png", "--run", other.folder)
    assert line in fails(2, "serve", gallery, "--run", other.folder)
    assert (gallery / "gallery.json").read_bytes() == before


def test_gallery_commands_report_wrong_input(calibrated, gallery, photos, fails, tmp_path):
    image = photos / "person-00" / "0.png"
    assert "is not a gallery" in fails(2, "search", tmp_path, image, "--run", calibrated.folder)
    assert "--run must be the folder of a run" in fails(2, "search", gallery, image, "--run", tmp_path)
    assert "FOLDER must be an existing folder" in fails(2, "enroll", calibrated.folder, image, "--gallery", tmp_path)
    (tmp_path / "faces" / "ada").mkdir(parents=True)
    (tmp_path / "faces" / "ada" / "1.png").write_bytes(image.read_bytes()[:60])
    broken = tmp_path / "faces" / "ada" / "1.png"
    assert "1.png is not a readable image" in fails(
        3, "enroll", calibrated.folder, tmp_path / "faces", "--gallery", tmp_path / "new"
    )
    assert f"{broken} is not a readable image" in fails(3, "search", gallery, broken, "--run", calibrated.folder)
    assert not (tmp_path / "new").exists()
    damaged = shutil.copytree(gallery, tmp_path / "damaged")
    (names,) = damaged.glob("names-*.json")
    names.write_text("[]")
    assert "is damaged" in fails(3, "search", damaged, image, "--run", calibrated.folder)


def test_serve_names_missing_packages(calibrated, gallery, fails, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "this needs uvicorn: pip install 'torch-hypersphere[serve]'" in fails(
        2, "serve", gallery, "--run", calibrated.folder
    )


@pytest.fixture(scope="module")
def server(calibrated, gallery):
    """An HTTP client of a server in another process, which is stopped at the end."""
    httpx = pytest.importorskip("httpx")
    for package in ("fastapi", "uvicorn", "python_multipart"):
        pytest.importorskip(package)
    words = [
        "serve",
        gallery,
        "--run",
        calibrated.folder,
        "--port",
        0,
        "--max-megabytes",
        0.2,
        "--max-megapixels",
        0.01,
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "hypersphere", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    deadline = threading.Timer(300, process.kill)
    deadline.start()
    try:
        line = process.stdout.readline()
        match = re.search(r"100 photos at (http://127\.0\.0\.1:\d+)", line)
        assert match, line or process.stderr.read()
        with httpx.Client(base_url=match[1], timeout=60) as client:
            yield client
    finally:
        deadline.cancel()
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            process.kill()
        process.stdout.close()
        process.stderr.close()


def upload(path):
    return (path.name, path.read_bytes(), "image/png")


@pytest.mark.slow
def test_server_reports_its_gallery(server, calibrated):
    answer = server.get("/health")
    model = fingerprint_of(calibrated.experiment(with_data=False).network)
    expected = {"photos": 100, "names": 20, "dim": 6, "calibrated": True, "fingerprint": model}
    assert (answer.status_code, answer.json()) == (200, expected)


def test_server_searches_like_the_command(server, calibrated, gallery, photos, succeeds):
    query = photos / "person-07" / "0.png"
    answer = server.post("/search", params={"k": 3}, files={"image": upload(query)}).json()
    expected = json.loads(succeeds("search", gallery, query, "--run", calibrated.folder, "-k", 3, "--json"))[0][
        "matches"
    ]
    assert [match["name"] for match in answer["matches"]] == [match["name"] for match in expected]
    for match, other in zip(answer["matches"], expected, strict=True):
        assert (match["cosine"], match["probability"]) == pytest.approx(
            (other["cosine"], other["probability"]), abs=1e-5
        )


def test_server_embeds_and_searches_embeddings_of_its_model_only(server, calibrated, photos):
    query = photos / "person-07" / "0.png"
    embedded = server.post("/embed", files={"image": upload(query)}).json()
    x = np.array(embedded["embedding"])
    assert x / np.linalg.norm(x) == pytest.approx(unit_embedding(calibrated, query), abs=1e-5)
    matches = server.post("/search/embedding", json=embedded).json()["matches"]
    assert matches == server.post("/search", files={"image": upload(query)}).json()["matches"]
    other = server.post("/search/embedding", json=embedded | {"fingerprint": "0" * 32})
    assert (other.status_code, "another model" in other.json()["detail"]) == (409, True)
    assert server.post("/search/embedding", json={"embedding": embedded["embedding"]}).status_code == 422
    assert server.post("/search/embedding", json=embedded | {"embedding": [1.0]}).status_code == 422


def test_server_verifies_two_images(server, calibrated, photos):
    paths = [photos / "person-12" / f"{number}.png" for number in (0, 1)]
    answer = server.post("/verify", files=dict(zip(("first", "second"), map(upload, paths), strict=True))).json()
    cosine = float(unit_embedding(calibrated, paths[0]) @ unit_embedding(calibrated, paths[1]))
    stored = calibrated.calibration()
    assert answer["cosine"] == pytest.approx(cosine, abs=1e-5)
    assert answer["probability"] == pytest.approx(float(stored.calibration.probability(cosine)), abs=1e-4)
    assert answer["accepted_at_far"] == {str(far): cosine >= at for far, at in stored.thresholds.items()}
    assert server.post("/verify", files={"first": upload(paths[0])}).status_code == 422


def test_server_refuses_large_requests(server):
    body = {"image": ("x.png", b"0" * 300_000, "image/png")}
    answer = server.post("/search", files=body)
    assert (answer.status_code, answer.json()) == (413, {"detail": "a request must have at most 209715 bytes"})

    def chunks():  # without an announced length
        head = "--x\r\nContent-Disposition: form-data; name=image; filename=x.png\r\n\r\n"
        yield head.encode()
        for _ in range(30):
            yield b"0" * 10_000

    answer = server.post("/search", content=chunks(), headers={"Content-Type": "multipart/form-data; boundary=x"})
    assert answer.status_code == 413
    assert server.get("/health").status_code == 200


def test_server_refuses_images_with_many_pixels_before_decoding(server):
    content = io.BytesIO()
    Image.new("L", (4000, 4000)).save(content, "PNG")  # 16 kB
    assert len(content.getvalue()) < 100_000
    answer = server.post("/embed", files={"image": ("big.png", content.getvalue(), "image/png")})
    assert (answer.status_code, "at most 10000 pixels" in answer.json()["detail"]) == (422, True)


@pytest.mark.parametrize("content", [b"", b"no image", b"GIF89a", b"\x89PNG\r\n\x1a\n broken", b"%PDF-1.4"])
def test_server_refuses_files_that_are_not_images(content, server, photos):
    answer = server.post("/embed", files={"image": ("x.png", content, "image/png")})
    assert answer.status_code == 422
    half = (photos / "person-00" / "0.png").read_bytes()[:80]
    assert server.post("/embed", files={"image": ("x.png", half, "image/png")}).status_code == 422


def test_server_reads_no_file_by_its_path(server, photos):
    path = str(photos / "person-00" / "0.png")
    assert server.post("/embed", data={"image": path}).status_code == 422
    assert server.post("/embed", json={"image": path}).status_code == 422
    assert server.post("/embed", params={"image": path}).status_code == 422
    assert server.get("/../../etc/passwd").status_code == 404


def test_server_checks_parameters_and_the_host(server, photos):
    files = {"image": upload(photos / "person-00" / "0.png")}
    for k in (0, 101, "many"):
        assert server.post("/search", params={"k": k}, files=files).status_code == 422
    assert server.get("/search").status_code == 405
    assert server.get("/health", headers={"Host": "evil.example"}).status_code == 400
