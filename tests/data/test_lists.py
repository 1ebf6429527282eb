import json

import numpy as np
import pytest

from hypersphere.data import DamagedData, ListSource, MissingData
from hypersphere.data.lists import LabelCodes
from picture_files import write_tree

COUNTS = {"cat": 2, "dog": 3}


def write_list(path, rows):
    """Write rows of a path, a label and a split in the format of the suffix."""
    columns = ("path", "label", "split")
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n\n" for row in rows))
    elif path.suffix == ".parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table(dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True))), path)
    else:
        separator = "\t" if path.suffix == ".tsv" else ","
        path.write_text("\n".join(separator.join(map(str, row)) for row in [columns, *rows]), encoding="utf-8-sig")
    return path


@pytest.fixture
def tree(tmp_path):
    return tmp_path, write_tree(tmp_path / "images", COUNTS)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_list_source_reads_every_format(tree, suffix):
    root, written = tree
    rows = [(f"images/{name}", name.split("/")[0], "train") for name in reversed(written)]
    source = ListSource(write_list(root / f"list{suffix}", rows))
    assert source.classes == ("cat", "dog")
    assert source.labels.tolist() == [1, 1, 1, 0, 0]
    for index, (name, _, _) in enumerate(rows):
        assert source.name(index) == name
        pixels = written[name.removeprefix("images/")]
        assert np.array_equal(source[index].permute(1, 2, 0).numpy(), pixels)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_list_source_accepts_integer_labels_another_folder_and_a_filter(tree, suffix):
    root, written = tree
    rows = [(name, 10 if "cat" in name else 9, "val" if "001" in name else "train") for name in written]
    listed = write_list(root / f"list{suffix}", rows)
    source = ListSource(listed, images=root / "images", where=("split", ["train"]))
    assert source.classes == ("9", "10")
    assert source.labels.tolist() == [1, 0, 0]
    assert source.name(1) == "dog/000.png"
    assert source[1].shape == (3, 8, 8)
    with pytest.raises(MissingData, match="lists no images with split test"):
        ListSource(listed, images=root / "images", where=("split", ["test"]))


def test_list_source_reads_other_columns(tree):
    root, written = tree
    (root / "list.csv").write_text("file,person\n" + "".join(f"{name},{name[0]}\n" for name in written))
    source = ListSource(root / "list.csv", images=root / "images", path_column="file", label_column="person")
    assert source.classes == ("c", "d")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "path,kind\nx.png,1\n", r"a\.csv row 1 must have text or an integer in label; it has path, kind"),
        ("a.csv", b"path,label\n\xff\xfe,1\n", r"a\.csv is not readable"),
        ("a.jsonl", '{"path": "x"}\n', r"a\.jsonl row 1 must have text or an integer in label"),
        ("a.jsonl", '["x", 1]\n', r"a\.jsonl row 1 must be a JSON object"),
        ("a.jsonl", '{"path": "x", "label": "a"}\n{"path"', r"a\.jsonl is not readable after row 1"),
        ("a.jsonl", '{"path": "x", "label": [1]}\n', r"text or an integer in label"),
        ("a.csv", "path,label\nx.png,a\ny.png,\n", r"a\.csv row 2 must have text .* in label, not ''"),
        ("a.csv", "path,label\n,a\n", r"a\.csv row 1 must have text .* in path, not ''"),
        (
            "a.jsonl",
            '\n{"path": "x\\u0000.png", "label": "a"}\n',
            r"a\.jsonl row 2 must have .* in path, not 'x\\x00\.png'",
        ),
        ("a.parquet", b"PAR1 no", r"a\.parquet is not readable"),
    ],
)
def test_list_source_names_damaged_rows(write, name, content, message):
    path = write(name, content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DamagedData, match=message):
        ListSource(path)


def test_list_source_ignores_empty_labels_of_rows_that_are_not_read(tree):
    root, written = tree
    rows = [(f"images/{name}", "" if "001" in name else "a", "test" if "001" in name else "train") for name in written]
    assert ListSource(write_list(root / "list.csv", rows), where=("split", ["train"])).classes == ("a",)


def test_list_source_names_missing_files_and_other_suffixes(tmp_path, write):
    with pytest.raises(MissingData, match=r"none\.csv not found"):
        ListSource(tmp_path / "none.csv")
    with pytest.raises(ValueError, match="path must be a file ending in"):
        ListSource(write("list.txt", b"x"))


def test_list_source_fingerprint_changes_with_labels_and_files(tree):
    root, written = tree
    rows = [(f"images/{name}", name[0], "train") for name in written]
    before = ListSource(write_list(root / "list.csv", rows)).fingerprint()
    rows[0] = (rows[0][0], "d", "train")
    assert ListSource(write_list(root / "list.csv", rows)).fingerprint() != before


def test_label_codes_use_known_classes():
    codes = LabelCodes()
    for text in ("dog", "0", "dog"):
        codes.append(text)
    labels, classes = codes.labels(["cat", "dog"])
    assert labels.tolist() == [1, 0, 1]
    assert classes == ["cat", "dog"]
    codes.append("2")
    with pytest.raises(DamagedData, match="names or positions of the 2 classes, not '2'"):
        codes.labels(["cat", "dog"])
