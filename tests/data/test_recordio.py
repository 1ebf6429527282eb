import pickle
import struct

import numpy as np
import pytest
import torch

from hypersphere.data import BinSource, BrokenSample, DamagedData, ForbiddenGlobal, MissingData, RecordSource
from picture_files import encoded, pixels

MAGIC = struct.pack("<I", 0xCED7230A)


def framed(content):
    """Return a record as dmlc-core writes it: divided at each magic number that is aligned to four bytes."""
    parts, start = [], 0
    for at in range(0, len(content) - 3, 4):
        if content[at : at + 4] == MAGIC:
            parts.append(content[start:at])
            start = at + 4
    parts.append(content[start:])
    written = b""
    for number, part in enumerate(parts):
        kind = 0 if len(parts) == 1 else 1 if number == 0 else 3 if number == len(parts) - 1 else 2
        written += MAGIC + struct.pack("<I", kind << 29 | len(part)) + part + b"\0" * (-len(part) % 4)
    return written


def image_record(label, image, labels=()):
    return struct.pack("<IfQQ", len(labels), label, 0, 0) + struct.pack(f"<{len(labels)}f", *labels) + image


def write_records(path, records, index=True):
    """Write a .rec file of {key: content} and its .idx file."""
    content, lines = b"", ""
    for key, record in records.items():
        lines += f"{key}\t{len(content)}\n"
        content += framed(record)
    path.write_bytes(content)
    if index:
        path.with_suffix(".idx").write_text(lines)
    return path


def images(count=5):
    return [encoded(pixels(number)) for number in range(count)]


def test_record_source_reads_the_files_of_insightface(tmp_path):
    """Key 0 describes the file, the images are 1..5, then one record per identity."""
    records = {0: image_record(0, b"", [6, 9])}
    labels = [70, 70, 3, 3, 12]
    for number, image in enumerate(images()):
        # insightface writes the label as a number, or as the first of two in aligned sets
        record = image_record(labels[number], image) if number % 2 else image_record(0, image, [labels[number], 1])
        records[number + 1] = record
    for key in (6, 7, 8):
        records[key] = image_record(0, b"", [1, 3])
    write_records(tmp_path / "train.rec", records)
    source = RecordSource(tmp_path)
    assert source.classes == ("3", "12", "70")
    assert source.labels.tolist() == [2, 2, 0, 0, 1]
    for index in (4, 0, 2):
        assert np.array_equal(source[index].permute(1, 2, 0).numpy(), pixels(index))
    assert source.name(0) == "train.rec/1"
    assert torch.equal(pickle.loads(pickle.dumps(source))[3], source[3])


@pytest.mark.parametrize("index", [True, False])
def test_record_source_reads_plain_records_with_and_without_an_index(tmp_path, index):
    records = {number: image_record(number % 2, image) for number, image in enumerate(images())}
    source = RecordSource(write_records(tmp_path / "data.rec", records, index))
    assert source.labels.tolist() == [0, 1, 0, 1, 0]
    assert np.array_equal(source[3].permute(1, 2, 0).numpy(), pixels(3))


@pytest.mark.parametrize("index", [True, False])
def test_record_source_joins_records_that_contain_the_magic_number(tmp_path, index):
    image = encoded(np.full((8, 8, 3), 9, np.uint8), "BMP")
    image += b"\0" * (-(24 + len(image)) % 4) + MAGIC + b"abcd" + MAGIC  # BMP readers ignore what follows the pixels
    records = {0: image_record(1, image), 1: image_record(0, images(1)[0])}
    source = RecordSource(write_records(tmp_path / "data.rec", records, index))
    assert source.read(0) == image
    assert source[0].unique().tolist() == [9]
    assert source.labels.tolist() == [1, 0]


def test_record_source_names_damaged_records(tmp_path):
    records = {number: image_record(number, image) for number, image in enumerate(images(3))}
    path = write_records(tmp_path / "data.rec", records)
    source = RecordSource(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(BrokenSample, match=r"data\.rec/2 .* the file ends after"):
        source[2]
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    with pytest.raises(BrokenSample, match="magic number"):
        source[0]
    with pytest.raises(DamagedData, match=r"data\.rec: record 0 at offset 0 is damaged"):
        RecordSource(path)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (struct.pack("<IfQQ", 2**31, 0, 0, 0), "at most 64 labels"),
        (struct.pack("<IfQQ", 0, float("nan"), 0, 0), "label must be an integer, not nan"),
        (struct.pack("<IfQQ", 0, float("inf"), 0, 0), "label must be an integer, not inf"),
        (struct.pack("<IfQQf", 1, 0, 0, 0, float("-inf")), "label must be an integer, not -inf"),
        (struct.pack("<IfQQ", 0, 2.0**31, 0, 0), "label must be an integer, not 2147483648"),
        (struct.pack("<IfQQ", 0, 0.5, 0, 0), "label must be an integer, not 0.5"),
        (b"short", "buffer"),
    ],
)
def test_record_source_rejects_malformed_headers(tmp_path, record, message):
    with pytest.raises(DamagedData, match=message):
        RecordSource(write_records(tmp_path / "data.rec", {0: record}))


def test_record_source_checks_the_index(tmp_path):
    path = write_records(tmp_path / "data.rec", {0: image_record(0, images(1)[0])})
    path.with_suffix(".idx").write_text("0\t0\nnonsense\n")
    with pytest.raises(DamagedData, match=r"data\.idx line 2 must be a key and an offset"):
        RecordSource(path)
    path.with_suffix(".idx").write_text("0\t99999999\n")
    with pytest.raises(DamagedData, match="at offset 99999999"):
        RecordSource(path)
    with pytest.raises(MissingData, match=r"train\.rec not found"):
        RecordSource(tmp_path)
    path.with_suffix(".idx").write_text("")
    with pytest.raises(MissingData, match="no image records"):
        RecordSource(path)


def test_record_source_fingerprint_changes_with_the_labels(tmp_path):
    prints = []
    for labels in ([0, 1, 1], [1, 0, 1], [0, 1, 2]):
        records = {key: image_record(label, images(3)[key]) for key, label in enumerate(labels)}
        prints.append(RecordSource(write_records(tmp_path / "data.rec", records)).fingerprint())
    assert prints[0] != prints[1] != prints[2] != prints[0]


def python2_pickle(contents, flags):
    """Return a pickle of protocol 2 as Python 2 writes it: byte strings as BINSTRING."""
    strings = b"".join(b"T" + struct.pack("<i", len(one)) + one for one in contents)
    booleans = b"".join(b"\x88" if flag else b"\x89" for flag in flags)
    return b"\x80\x02](" + strings + b"e](" + booleans + b"e\x86."


FLAGS = [True, False, True, False, False, True, True, False, False, True, False, True]


@pytest.mark.parametrize("writer", ["python2", 2, 4, 5, "arrays"])
def test_bin_source_reads_every_kind_of_pickle(tmp_path, writer):
    contents = images(24)
    if writer == "python2":
        content = python2_pickle(contents, FLAGS)
    elif writer == "arrays":
        arrays = [np.frombuffer(one, np.uint8).copy() for one in contents]
        content = pickle.dumps((arrays, np.array(FLAGS)), 2)
    else:
        content = pickle.dumps((contents, FLAGS), writer)
    (tmp_path / "lfw.bin").write_bytes(content)
    source = BinSource(tmp_path / "lfw.bin")
    assert len(source) == 24
    for index in (0, 23, 7):
        assert np.array_equal(source[index].permute(1, 2, 0).numpy(), pixels(index))
    assert source.pairs.same.tolist() == FLAGS
    assert source.pairs.first.tolist() == list(range(0, 24, 2))
    assert source.pairs.second.tolist() == list(range(1, 24, 2))
    # As sklearn.model_selection.KFold(10) divides twelve pairs.
    assert source.pairs.fold.tolist() == [0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    same = source.labels[source.pairs.first] == source.labels[source.pairs.second]
    assert same.tolist() == FLAGS
    assert len(source.classes) == int(source.labels.max()) + 1
    assert source.fingerprint() == BinSource(tmp_path / "lfw.bin").fingerprint()


class Attack:
    def __reduce__(self):
        return (print, ("executed",))


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_bin_source_runs_nothing(tmp_path, protocol, capsys):
    (tmp_path / "evil.bin").write_bytes(pickle.dumps(([Attack()], [True]), protocol))
    with pytest.raises(ForbiddenGlobal, match="print"):
        BinSource(tmp_path / "evil.bin")
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps([b"x", b"y"]),
        pickle.dumps(([b"x"], [True])),
        pickle.dumps(([b"x", b"y"], [2])),
        pickle.dumps(([1.5, 2.5], [True])),
        pickle.dumps(([], [])),
        pickle.dumps(([b"x", b"y"], "yes")),
        pickle.dumps(([np.zeros(3), np.zeros(3)], [True])),
        b"no pickle",
    ],
)
def test_bin_source_rejects_other_content(tmp_path, content):
    (tmp_path / "other.bin").write_bytes(content)
    with pytest.raises(DamagedData, match=r"other\.bin|array"):
        BinSource(tmp_path / "other.bin")
