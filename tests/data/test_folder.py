import io
import tarfile

import pytest
import torch

from hypersphere.data import DamagedData, MissingData, image_folder, image_names

Image = pytest.importorskip("PIL.Image")


def picture(colour, size=(4, 3), mode="RGB", form="PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size, colour).save(buffer, form)
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
    write("pets/cat/x.bmp", picture(7, mode="L", form="BMP"))
    write("pets/cat/.hidden.png", b"nothing")
    write("pets/cat/notes.txt", b"not an image")
    write("pets/loose.png", picture(1, mode="L"))
    return write("pets/README", b"pets").parent


def test_classes_and_names_are_in_order(pets):
    data = image_folder(pets)
    assert data.classes == ("cat", "dog")
    assert data.names == ("cat/x.bmp", "dog/a.png", "dog/b.png")
    assert data.labels.tolist() == [0, 1, 1]
    assert data.images.shape == (3, 3, 3, 4)
    assert data.images[:, :, 0, 0].tolist() == [[7, 7, 7], [4, 5, 6], [1, 2, 3]]
    assert image_names(pets) == data.names


def test_an_archive_reads_like_its_folder(pets, tmp_path):
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


def test_grey_and_size_and_classes(pets):
    assert image_folder(pets, classes=["cat"]).images.shape == (1, 1, 3, 4)
    assert image_folder(pets, grey=True, size=5).images.shape == (3, 1, 5, 5)
    assert image_folder(pets, grey=False, classes=["cat"], size=(6, 2)).images.shape == (1, 3, 6, 2)
    chosen = image_folder(pets, classes=["dog", "cat"])
    assert chosen.classes == ("dog", "cat")
    assert chosen.labels.tolist() == [1, 0, 0]
    assert image_names(pets, classes=["dog"]) == ("dog/a.png", "dog/b.png")


def test_different_sizes_need_a_size(pets, write):
    write("pets/cat/y.png", picture(0, size=(9, 9), mode="L"))
    with pytest.raises(ValueError, match=r"one size, not 3x4 \(cat/x\.bmp\) and 9x9 \(cat/y\.png\)"):
        image_folder(pets)
    assert len(image_folder(pets, size=4)) == 4


@pytest.mark.parametrize("size", [0, (3,), (2, -1)])
def test_a_bad_size_is_refused(pets, size):
    with pytest.raises(ValueError, match="size must be"):
        image_folder(pets, size=size)


def test_absent_classes_and_folders_are_named(pets, tmp_path):
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
def test_broken_images_are_named(write, content):
    root = write("pets/cat/z.png", content).parents[1]
    with pytest.raises(DamagedData, match=r"cat/z\.png is not a readable image"):
        image_folder(root)


def test_sixteen_bits_are_refused(write):
    root = write("pets/cat/z.png", picture(1000, mode="I;16")).parents[1]
    with pytest.raises(DamagedData, match="8 bits a channel"):
        image_folder(root)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("../cat/a.png", picture(1, mode="L"))], "paths inside it"),
        ([("pets/../../cat/a.png", picture(1, mode="L"))], "paths inside it"),
        ([("/cat/a.png", picture(1, mode="L"))], "paths inside it"),
        ([("pets/cat/a.png", None)], "plain file"),
        ([("a.png", picture(1, mode="L"))], "class folder"),
        ([("x/cat/a.png", picture(1, mode="L")), ("y/cat/a.png", picture(1, mode="L"))], "class folder"),
        ([("cat/a.png", picture(1, mode="L"))] * 2, "not twice"),
    ],
)
def test_unsafe_archives_are_refused(tmp_path, members, message):
    with pytest.raises(DamagedData, match=message):
        image_folder(archive(tmp_path / "pets.tar.gz", members))


@pytest.fixture
def hundred(tmp_path):
    """A hundred images, each a block of header and a block of content."""
    members = [(f"cat/{number:03d}.png", picture(number, mode="L")) for number in range(100)]

    def pack(mode="w"):
        return archive(tmp_path / "pets.tar", members, mode)

    return pack


@pytest.mark.parametrize("read", [image_folder, image_names])
@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[: 1024 * 30] + bytes([whole[1024 * 30] ^ 1]) + whole[1024 * 30 + 1 :],
        lambda whole: whole[: 1024 * 30] + bytes(512) + whole[1024 * 30 + 512 :],
        lambda whole: whole[: 1024 * 30],
        lambda whole: whole[: 1024 * 30 + 100],
        lambda whole: whole[: 1024 * 30 + 550],
        lambda whole: whole[: 1024 * 100],
    ],
    ids=["flipped header", "blank header", "cut before a header", "cut header", "cut content", "no end"],
)
def test_a_damaged_archive_loses_no_image_in_silence(hundred, damage, read):
    path = hundred()
    whole = path.read_bytes()
    assert len(read(path)) == 100
    path.write_bytes(damage(whole))
    with pytest.raises(DamagedData, match="not a complete tar archive"):
        read(path)


@pytest.mark.parametrize(("mode", "place"), [("w:gz", -6), ("w:bz2", -4)])
def test_the_sum_of_a_compressed_archive_is_checked(hundred, mode, place):
    path = hundred(mode)
    whole = bytearray(path.read_bytes())
    whole[place] ^= 16
    path.write_bytes(whole)
    with pytest.raises(DamagedData, match="not a complete tar archive"):
        image_folder(path)


def test_broken_xz_content_is_named(hundred):
    path = hundred("w:xz")
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 255
    path.write_bytes(whole)
    with pytest.raises(DamagedData, match="not a complete tar archive"):
        image_folder(path)


@pytest.mark.parametrize("key", ["GNU.sparse.map", "GNU.sparse.size", "size"])
def test_broken_pax_headers_are_named(tmp_path, key):
    info = tarfile.TarInfo("cat/a.png")
    info.pax_headers = {"GNU.sparse.size": "1", key: "many"}
    with tarfile.open(tmp_path / "pets.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info)
    with pytest.raises(DamagedData):
        image_folder(tmp_path / "pets.tar")


def test_hidden_folders_are_no_classes(pets, write, tmp_path):
    write("pets/.ipynb_checkpoints/a.png", picture(1, mode="L"))
    members = [(f"pets/{file.relative_to(pets)}", file.read_bytes()) for file in pets.glob("*/*.png")]
    assert image_folder(pets).classes == ("cat", "dog")
    assert image_folder(archive(tmp_path / "pets.tar", members)).classes == ("dog",)


def test_a_class_may_be_named_once(pets):
    for read in (image_folder, image_names):
        with pytest.raises(ValueError, match=r"classes must be different names, not \['cat', 'cat'\]"):
            read(pets, classes=["cat", "cat"])


@pytest.mark.parametrize("keep", [0, 10, 150, -30])
def test_truncated_archives_are_named(tmp_path, keep):
    noise = torch.randint(256, (40, 40), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise.numpy()).save(buffer, "PNG")
    path = archive(tmp_path / "pets.tar.gz", [("cat/a.png", buffer.getvalue()), ("cat/b.png", buffer.getvalue())])
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DamagedData, match="not a complete tar archive"):
        image_folder(path)
