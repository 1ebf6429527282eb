import importlib
import subprocess
import sys

import pytest

from hypersphere import data
from hypersphere.data import MissingData, data_root
from hypersphere.data.errors import require_package


def test_root_comes_from_the_argument_then_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERSPHERE_DATA", str(tmp_path))
    assert data_root() == tmp_path
    (tmp_path / "other").mkdir()
    assert data_root(tmp_path / "other") == tmp_path / "other"


@pytest.mark.parametrize("value", [None, ""])
def test_no_root_says_how_to_give_one(monkeypatch, value):
    monkeypatch.delenv("HYPERSPHERE_DATA", raising=False)
    if value is not None:
        monkeypatch.setenv("HYPERSPHERE_DATA", value)
    with pytest.raises(MissingData, match="pass root= or set the environment variable HYPERSPHERE_DATA"):
        data_root()


def test_a_root_that_does_not_exist_is_named(tmp_path, monkeypatch):
    with pytest.raises(MissingData, match=r"root must be an existing folder, not .*nowhere"):
        data_root(tmp_path / "nowhere")
    monkeypatch.setenv("HYPERSPHERE_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="HYPERSPHERE_DATA must be"):
        data_root()


@pytest.mark.parametrize("name", [name for name in data.DATASETS if name not in ("digits", "image_folder")])
def test_every_loader_says_what_is_missing_where_and_how_to_get_it(tmp_path, name, monkeypatch):
    idx = importlib.import_module("hypersphere.data.idx")
    monkeypatch.setattr(idx, "DEBIAN_FASHION", tmp_path / "debian")
    with pytest.raises(MissingData) as caught:
        data.DATASETS[name](tmp_path)
    message = str(caught.value)
    assert "not found; looked in" in message
    assert str(tmp_path) in message
    assert "in the folder" in message
    assert "http" not in message


def test_every_loader_has_a_one_line_summary_and_is_public():
    for name, loader in data.DATASETS.items():
        assert (loader.__doc__ or "").splitlines()[0].endswith((".", "planetoid."))
        assert getattr(data, name) is loader
    assert all(hasattr(data, name) for name in data.__all__)


@pytest.mark.parametrize("name", ["mnist", "cifar10", "omniglot", "modelnet10"])
def test_an_unknown_split_lists_the_choices(tmp_path, name):
    with pytest.raises(ValueError, match=r"split must be one of .*, not 'weekend'"):
        data.DATASETS[name](tmp_path, "weekend")


def test_a_missing_package_names_the_extra():
    with pytest.raises(ImportError, match=r"needs nothing-real: pip install 'hypersphere\[eval\]'"):
        require_package("no_such_module_at_all", "nothing-real", "eval")


def test_importing_the_room_imports_nothing_heavy():
    code = "import sys, hypersphere.data; print([m for m in ('sklearn', 'scipy', 'PIL', 'socket') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = out.stdout.strip()
    assert "sklearn" not in found
    assert "scipy" not in found
    assert "PIL" not in found
