import sys
import types

import numpy as np
import pytest

from hypersphere.data import DATA, BrokenSample, HuggingFaceSource
from picture_files import encoded, pixels


class FakeDataset:
    """The part of `datasets.Dataset` that is used: columns, features, rows, and casting of a column."""

    def __init__(self, columns, names=None, decoded=True):
        self.columns, self.decoded = columns, decoded
        self.column_names = list(columns)
        self.features = {name: types.SimpleNamespace() for name in columns}
        if names is not None:
            self.features["label"] = types.SimpleNamespace(names=names)

    def cast_column(self, column, feature):
        assert feature.decode is False
        return FakeDataset(self.columns, decoded=False)

    def __getitem__(self, key):
        if isinstance(key, str):
            return self.columns[key]
        assert not self.decoded, "rows are read without decoding"
        return {name: values[key] for name, values in self.columns.items()}


@pytest.fixture
def library(monkeypatch):
    module = types.ModuleType("datasets")
    module.Image = lambda decode: types.SimpleNamespace(decode=decode)
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def columns(count=6, labels=None):
    contents = [{"bytes": encoded(pixels(number)), "path": None} for number in range(count)]
    return {"image": contents, "label": labels or [number % 2 for number in range(count)]}


def test_hugging_face_source_decodes_rows(library):
    source = HuggingFaceSource(FakeDataset(columns(), names=["cat", "dog"]))
    assert source.classes == ("cat", "dog")
    assert source.labels.tolist() == [0, 1] * 3
    assert np.array_equal(source[3].permute(1, 2, 0).numpy(), pixels(3))
    assert source.fingerprint() != HuggingFaceSource(FakeDataset(columns(5))).fingerprint()


def test_hugging_face_source_reads_text_labels_and_paths(library, tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(pixels(7)))
    given = columns(labels=list("abcabc"))
    given["image"][1] = {"bytes": None, "path": str(tmp_path / "a.png")}
    given["image"][2] = {"bytes": b"nothing", "path": None}
    given["image"][3] = {"bytes": None, "path": None}
    source = HuggingFaceSource(FakeDataset(given))
    assert source.classes == ("a", "b", "c")
    assert np.array_equal(source[1].permute(1, 2, 0).numpy(), pixels(7))
    for index in (2, 3):
        with pytest.raises(BrokenSample, match=f"^{index} is not a readable image"):
            source[index]
    with pytest.raises(ValueError, match="column must be one of image, label, not 'picture'"):
        HuggingFaceSource(FakeDataset(given), image="picture")


def test_hugging_face_source_names_missing_images(library):
    given = columns()
    given["image"][2] = None  # as a null value of the column is returned
    source = HuggingFaceSource(FakeDataset(given))
    with pytest.raises(BrokenSample, match=r"^2 is not a readable image"):
        source[2]
    assert np.array_equal(source[3].permute(1, 2, 0).numpy(), pixels(3))
    assert source.fingerprint() != HuggingFaceSource(FakeDataset(columns())).fingerprint()


def test_hf_dataset_entry_loads_by_name_or_from_a_folder(library, tmp_path):
    asked = []
    splits = {"train": FakeDataset(columns(8), ["cat", "dog"]), "test": FakeDataset(columns(4), ["cat", "dog"])}

    def load_dataset(path, name):
        asked.append((path, name))
        return splits

    def load_from_disk(path):
        asked.append(path)
        return splits

    library.load_dataset, library.load_from_disk = load_dataset, load_from_disk
    data = DATA["hf_dataset"](None, path="user/pets", name="small", validation="test")
    assert len(data.train) == 8
    assert len(data.validation) == 4
    (tmp_path / "saved").mkdir()
    assert len(DATA["hf_dataset"](tmp_path, path="saved").validation) == 2
    assert asked == [("user/pets", "small"), str(tmp_path / "saved")]
    with pytest.raises(ValueError, match="one of the splits train, test, not 'val'"):
        DATA["hf_dataset"](None, path="user/pets", validation="val")


def test_hugging_face_source_names_the_missing_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"torch-hypersphere\[data\]"):
        HuggingFaceSource(FakeDataset(columns()))
