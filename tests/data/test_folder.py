import io
import os
import tarfile
import warnings
from pathlib import Path

import pytest
import torch

from hypersphere.data import DamagedData, MissingData, image_folder, image_names, open_images
from hypersphere.data.folder import MAX_IMAGE_BYTES
from hypersphere.data.images import decode_image

Image = pytest.importorskip("PIL.Image")


def picture(colour, size=(4, 3), mode="RGB", file_format="PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size, colour).save(buffer, file_format)
    return buffer.getvalue()


def archive(path, members, mode="w:gz"):
    with tarfile.open(path, mode) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if content is None:
                info.type, info.linkname = tarfile.SYMTYPE, "/etc/hostname"
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture
def pets(write):
    write("pets/dog/b.png", picture((1, 2, 3)))
    write("pets/dog/a.png", picture((4, 5, 6)))
    write("pets/cat/x.bmp", picture(7, mode="L", file_format="BMP"))
    write("pets/cat/.hidden.png", b"nothing")
    write("pets/cat/notes.txt", b"not an image")
    write("pets/loose.png", picture(1, mode="L"))
    return write("pets/README", b"pets").parent


def test_image_folder_orders_classes_and_names(pets):
    data = image_folder(pets)
    assert data.classes == ("cat", "dog")
    assert data.names == ("cat/x.bmp", "dog/a.png", "dog/b.png")
    assert data.labels.tolist() == [0, 1, 1]
    assert data.images.shape == (3, 3, 3, 4)
    assert data.images[:, :, 0, 0].tolist() == [[7, 7, 7], [4, 5, 6], [1, 2, 3]]
    assert image_names(pets) == data.names


def test_image_folder_reads_an_archive_like_its_folder(pets, tmp_path):
    members = [(f"some/where/{name}", (pets / name).read_bytes()) for name in image_names(pets)[::-1]]
    for suffix, mode in ((".tar.gz", "w:gz"), (".tgz", "w:gz"), (".tar", "w"), (".tar.bz2", "w:bz2")):
        packed = image_folder(archive(tmp_path / f"pets{suffix}", members, mode))
        plain = image_folder(pets)
        assert torch.equal(packed.images, plain.images)
        assert packed.names == plain.names
        assert packed.labels.tolist() == plain.labels.tolist()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["pets", "pets.tar.gz", "pets.tgz", "pets.tar", "pets.tar.bz2"]
    )


def test_image_folder_converts_resizes_and_selects(pets):
    assert image_folder(pets, classes=["cat"]).images.shape == (1, 1, 3, 4)
    assert image_folder(pets, grey=True, size=5).images.shape == (3, 1, 5, 5)
    assert image_folder(pets, grey=False, classes=["cat"], size=(6, 2)).images.shape == (1, 3, 6, 2)
    chosen = image_folder(pets, classes=["dog", "cat"])
    assert chosen.classes == ("dog", "cat")
    assert chosen.labels.tolist() == [1, 0, 0]
    assert image_names(pets, classes=["dog"]) == ("dog/a.png", "dog/b.png")


def test_image_folder_needs_a_size_if_images_differ(pets, write):
    write("pets/cat/y.png", picture(0, size=(9, 9), mode="L"))
    with pytest.raises(ValueError, match=r"the same size, not 3x4 \(cat/x\.bmp\) and 9x9 \(cat/y\.png\)"):
        image_folder(pets)
    assert len(image_folder(pets, size=4)) == 4


@pytest.mark.parametrize("size", [0, (3,), (2, -1)])
def test_image_folder_rejects_an_invalid_size(pets, size):
    with pytest.raises(ValueError, match="size must be"):
        image_folder(pets, size=size)


def test_image_folder_names_missing_classes_and_folders(pets, tmp_path):
    with pytest.raises(ValueError, match="'bird'"):
        image_folder(pets, classes=["cat", "bird"])
    with pytest.raises(MissingData, match="nowhere"):
        image_folder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="root must be a folder or an archive"):
        image_folder(pets / "README")
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingData, match="no images in"):
        image_folder(tmp_path / "empty")


@pytest.mark.parametrize("content", [b"", b"GIF89a", picture((1, 2, 3))[:40], b"%!PS-Adobe-3.0 EPSF-3.0"])
def test_image_folder_names_damaged_images(write, content):
    root = write("pets/cat/z.png", content).parents[1]
    with pytest.raises(DamagedData, match=r"cat/z\.png is not a readable image"):
        image_folder(root)


def test_image_folder_rejects_sixteen_bits_per_channel(write):
    root = write("pets/cat/z.png", picture(1000, mode="I;16")).parents[1]
    with pytest.raises(DamagedData, match="8 bits per channel"):
        image_folder(root)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("../cat/a.png", picture(1, mode="L"))], "paths inside it"),
        ([("pets/../../cat/a.png", picture(1, mode="L"))], "paths inside it"),
        ([("/cat/a.png", picture(1, mode="L"))], "paths inside it"),
        ([("pets/cat/a.png", None)], "regular file"),
        ([("a.png", picture(1, mode="L"))], "class folder"),
        ([("x/cat/a.png", picture(1, mode="L")), ("y/cat/a.png", picture(1, mode="L"))], "class folder"),
        ([("cat/a.png", picture(1, mode="L"))] * 2, "not twice"),
    ],
)
@pytest.mark.parametrize("read", [image_folder, image_names])
def test_image_folder_rejects_unsafe_archives(tmp_path, members, message, read):
    with pytest.raises(DamagedData, match=message):
        read(archive(tmp_path / "pets.tar.gz", members))


@pytest.fixture
def hundred(tmp_path):
    """An archive of a hundred images, each with one header block and one content block."""
    members = [(f"cat/{number:03d}.png", picture(number, mode="L")) for number in range(100)]

    def pack(mode="w"):
        return archive(tmp_path / "pets.tar", members, mode)

    return pack


@pytest.mark.parametrize("read", [image_folder, image_names])
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: 1024 * 30] + bytes([content[1024 * 30] ^ 1]) + content[1024 * 30 + 1 :],
        lambda content: content[: 1024 * 30] + bytes(512) + content[1024 * 30 + 512 :],
        lambda content: content[: 1024 * 30],
        lambda content: content[: 1024 * 30 + 100],
        lambda content: content[: 1024 * 30 + 550],
        lambda content: content[: 1024 * 100],
    ],
    ids=["flipped header", "blank header", "no header", "truncated header", "truncated content", "no end"],
)
def test_image_folder_damaged_archive_is_an_error_instead_of_a_shorter_one(hundred, damage, read):
    path = hundred()
    content = path.read_bytes()
    assert len(read(path)) == 100
    path.write_bytes(damage(content))
    with pytest.raises(DamagedData, match="not a complete tar archive"):
        read(path)


@pytest.mark.parametrize(("mode", "position"), [("w:gz", -6), ("w:bz2", -4)])
def test_image_folder_compares_the_checksum_of_a_compressed_archive(hundred, mode, position):
    path = hundred(mode)
    content = bytearray(path.read_bytes())
    content[position] ^= 16
    path.write_bytes(content)
    with pytest.raises(DamagedData, match="not a complete tar archive"):
        image_folder(path)


def test_image_folder_damaged_xz_content_is_an_error(hundred):
    path = hundred("w:xz")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    with pytest.raises(DamagedData, match="not a complete tar archive"):
        image_folder(path)


@pytest.mark.parametrize("key", ["GNU.sparse.map", "GNU.sparse.size", "size"])
def test_image_folder_damaged_pax_headers_are_an_error(tmp_path, key):
    info = tarfile.TarInfo("cat/a.png")
    info.pax_headers = {"GNU.sparse.size": "1", key: "many"}
    with tarfile.open(tmp_path / "pets.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info)
    with pytest.raises(DamagedData):
        image_folder(tmp_path / "pets.tar")


def test_image_folder_hidden_folders_are_not_classes(pets, write, tmp_path):
    write("pets/.ipynb_checkpoints/a.png", picture(1, mode="L"))
    members = [(f"pets/{file.relative_to(pets)}", file.read_bytes()) for file in pets.glob("*/*.png")]
    assert image_folder(pets).classes == ("cat", "dog")
    assert image_folder(archive(tmp_path / "pets.tar", members)).classes == ("dog",)


def test_image_folder_classes_must_be_different(pets):
    for read in (image_folder, image_names):
        with pytest.raises(ValueError, match="classes must be different names, not 'cat' twice"):
            read(pets, classes=["cat", "cat"])


@pytest.mark.parametrize("keep", [0, 10, 150, -30])
def test_image_folder_truncated_archives_are_an_error(tmp_path, keep):
    noise = torch.randint(256, (40, 40), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise.numpy()).save(buffer, "PNG")
    path = archive(tmp_path / "pets.tar.gz", [("cat/a.png", buffer.getvalue()), ("cat/b.png", buffer.getvalue())])
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DamagedData, match="not a complete tar archive"):
        image_folder(path)


def test_image_folder_rejects_files_above_the_size_limit(pets):
    with (pets / "cat" / "huge.png").open("wb") as file:
        file.truncate(MAX_IMAGE_BYTES + 1)  # sparse, so that it takes no space
    with pytest.raises(DamagedData, match=r"huge\.png .*it must have at most 67108864 bytes, not 67108865"):
        image_folder(pets)
    assert "cat/huge.png" in image_names(pets)


def test_image_folder_warns_of_class_folders_without_images(pets, write):
    (pets / "bird").mkdir()
    write("pets/fish/notes.txt", b"not an image")
    (pets / ".cache").mkdir()
    for read in (image_folder, image_names):
        with pytest.warns(UserWarning, match=r"class folders without images are ignored: bird, fish$") as caught:
            read(pets)
        assert caught[0].filename == __file__  # the warning names the line of the caller
    assert image_folder(pets, classes=["cat", "dog"]).classes == ("cat", "dog")


def test_image_folder_warns_of_empty_class_folders_in_an_archive(pets, write, tmp_path):
    (pets / "bird").mkdir()
    with tarfile.open(tmp_path / "pets.tar", "w") as tar:
        tar.add(pets, "pets")
    (pets / "loose.png").unlink()
    with tarfile.open(tmp_path / "top.tar", "w") as tar:
        tar.add(pets, ".")
    with pytest.raises(DamagedData, match="class folder"):  # loose.png is not in a class folder
        image_folder(tmp_path / "pets.tar")
    with pytest.warns(UserWarning, match=r"class folders without images are ignored: bird$"):
        assert image_folder(tmp_path / "top.tar").classes == ("cat", "dog")


def test_image_folder_without_classes_has_no_images(pets, tmp_path):
    members = [(f"pets/{file.relative_to(pets)}", file.read_bytes()) for file in pets.glob("dog/*.png")]
    for root in (pets, archive(tmp_path / "pets.tar", members)):
        for read in (image_folder, image_names):
            with pytest.raises(MissingData, match="no images in"):
                read(root, classes=[])


def test_image_folder_does_not_warn_if_every_class_has_images(pets):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert image_folder(pets).classes == ("cat", "dog")
        assert image_folder(pets, classes=["dog"]).classes == ("dog",)


def test_image_folder_with_classes_opens_no_other_folder(pets, monkeypatch):
    (pets / "secret").mkdir()
    listed = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (listed.append(Path(path).name), scandir(path))[1])
    assert image_folder(pets, classes=["dog"]).names == ("dog/a.png", "dog/b.png")
    assert listed == ["dog"]


@pytest.mark.skipif(
    os.name == "nt" or os.geteuid() == 0,
    reason="the superuser may read any folder, and Windows has no such permissions",
)
def test_image_folder_with_classes_needs_no_permission_for_siblings(pets):
    (pets / "secret").mkdir(mode=0)
    pets.chmod(0o111)
    try:
        assert image_folder(pets, classes=["cat"]).names == ("cat/x.bmp",)
    finally:
        pets.chmod(0o755)


@pytest.mark.parametrize("name", ["../pets/cat", "cat/../dog", ".", "..", "", ".hidden"])
def test_image_folder_classes_must_be_names_of_subfolders(pets, write, name):
    write("pets/.hidden/a.png", picture(1, mode="L"))
    with pytest.raises(ValueError, match="classes must be subfolders of"):
        image_folder(pets, classes=[name])


def test_open_images_crops_or_stretches(write):
    write("wide/a/1.png", picture((255, 0, 0), size=(8, 2)))
    folder = write("wide/b/1.png", picture((0, 0, 9), size=(2, 8))).parents[1]
    for fit in ("stretch", "crop"):
        source, labelled = open_images([folder], size=2, fit=fit)
        assert (labelled, source.fit, source[0].shape) == (True, fit, (3, 2, 2))
    with pytest.raises(ValueError, match="fit must be one of stretch, crop, not 'pad'"):
        open_images([folder], size=2, fit="pad")


def test_decode_image_checks_the_number_of_pixels_before_decoding():
    content = picture((1, 2, 3), size=(40, 30))
    assert decode_image(content, "x", max_pixels=1200).shape == (3, 30, 40)
    with pytest.raises(DamagedData, match="at most 1199 pixels, not 40x30"):
        decode_image(content, "x", max_pixels=1199)
    with pytest.raises(DamagedData, match="at most 1199 pixels"):
        decode_image(content[:60], "x", max_pixels=1199)  # nothing behind the header is needed


def test_archive_with_an_enormous_name_is_rejected_without_reading_it(tmp_path):
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 8 * 2**30
    (tmp_path / "bomb.tar").write_bytes(header.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(DamagedData, match="a name must have at most 1048576 bytes"):
        image_folder(tmp_path / "bomb.tar")
