import pickle
import struct
import sys
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from hypersphere.data import BrokenSample, DamagedData
from hypersphere.data.images import (
    MAX_IMAGE_BYTES,
    decode_image,
    grey_in_header,
    height_and_width,
    read_image_file,
)
from picture_files import encoded, pixels


def test_decode_image_returns_the_pixels_of_a_lossless_file():
    values = pixels(0, 5, 7)
    assert np.array_equal(decode_image(encoded(values), "a").permute(1, 2, 0).numpy(), values)
    grey = pixels(1, 5, 7, 1)
    assert np.array_equal(decode_image(encoded(grey), "a")[0].numpy(), grey)
    assert decode_image(encoded(grey), "a", grey=False).shape == (3, 5, 7)
    assert decode_image(encoded(values), "a", grey=True).shape == (1, 5, 7)


def test_decode_image_without_pillow_names_the_extra_of_the_docs(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"this needs Pillow: pip install 'torch-hypersphere\[eval\]'"):
        decode_image(b"", "a")


def test_decode_image_stretches_to_the_size():
    values = pixels(0, 12, 20)
    expected = np.array(Image.fromarray(values).resize((6, 4), Image.Resampling.BILINEAR))
    assert np.array_equal(decode_image(encoded(values), "a", size=(4, 6)).permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize(("shape", "box"), [((8, 16), (2, 0, 6, 4)), ((16, 8), (0, 2, 4, 6))])
def test_decode_image_crops_the_centre(shape, box):
    values = pixels(0, *shape)
    # The usual transform: resize the shorter side, then crop the centre.
    resized = Image.fromarray(values).resize((shape[1] // 2, shape[0] // 2), Image.Resampling.BILINEAR)
    image = decode_image(encoded(values), "a", size=(4, 4), fit="crop")
    # Pillow may round the two passes in another order.
    difference = image.permute(1, 2, 0).numpy().astype(int) - np.array(resized.crop(box))
    assert np.abs(difference).max() <= 1


def test_decode_image_scaled_by_the_jpeg_decoder_is_close_to_the_full_one():
    smooth = np.array(Image.fromarray(pixels(0, 8, 8)).resize((640, 640), Image.Resampling.BICUBIC))
    content = encoded(smooth, "JPEG", quality=95)
    exact = decode_image(content, "a", size=(64, 64)).float()
    fast = decode_image(content, "a", size=(64, 64), fast=True).float()
    assert (exact - fast).abs().mean() < 2
    assert (exact - fast).abs().max() < 16


@pytest.mark.parametrize("content", [b"", b"GIF89a", b"%!PS-Adobe-3.0 EPSF-3.0", b"\x00" * 100])
def test_decode_image_names_what_is_not_an_image(content):
    for read in (decode_image, grey_in_header):
        with pytest.raises(BrokenSample, match=r"^cat/1\.png is not a readable image"):
            read(content, "cat/1.png")


def png_header(width, height):
    """Return a PNG file that announces this size and contains no pixels."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(8193, 8192), (2**16, 2**16), (2**31 - 1, 1)])
def test_decode_image_refuses_absurd_sizes(size):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(BrokenSample, match="huge"):
            decode_image(png_header(*size), "huge", size=(8, 8))


def test_read_image_file_has_a_size_limit(tmp_path):
    file = tmp_path / "sparse.png"
    with file.open("wb") as handle:
        handle.truncate(6 * 2**30)  # sparse, so that it takes no space
    with pytest.raises(BrokenSample, match=f"at most {MAX_IMAGE_BYTES} bytes, not {6 * 2**30}"):
        read_image_file(file)
    with pytest.raises(BrokenSample, match="No such file"):
        read_image_file(tmp_path / "absent.png")


def test_broken_sample_survives_pickling_and_is_damaged_data():
    error = pickle.loads(pickle.dumps(BrokenSample("a.off", "empty", "point cloud")))
    assert isinstance(error, DamagedData)
    assert (error.name, error.reason) == ("a.off", "empty")
    assert str(error) == "a.off is not a readable point cloud: empty"


def test_messages_escape_control_characters():
    assert str(BrokenSample("\x1b[2Jä.png", "empty")) == r"\x1b[2Jä.png is not a readable image: empty"


def test_height_and_width_accepts_lists_of_settings_files():
    assert height_and_width([112, 96]) == (112, 96)
    assert height_and_width(8) == (8, 8)
    assert height_and_width(None) is None
    for size in (0, (3,), (2, -1), (2, 2.5)):
        with pytest.raises(ValueError, match="size must be"):
            height_and_width(size)


def test_decode_image_result_can_be_written_to():
    image = decode_image(encoded(pixels(0)), "a")
    image += 1
    assert image.dtype == torch.uint8


@pytest.mark.parametrize("side", [225, 232, 450, 457, 506, 900])
def test_crop_accepts_every_side(side):
    for shape in ((side, side + 150), (side + 150, side)):
        assert decode_image(encoded(pixels(0, *shape)), "a.png", size=(224, 224), fit="crop").shape[-2:] == (224, 224)
