"""The page is well formed, self-contained, safe, and written atomically."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hypersphere import _files
from hypersphere.report import Column, Sphere, Spheres, Table, Text, write_page

from .document import HOSTILE, Checker


def test_page_is_well_formed(page: Path) -> None:
    document = Checker(page.read_text(encoding="utf-8"))
    assert document.count("html") == document.count("title") == document.count("h1") == 1
    assert document.count("section") == 4
    assert document.count("canvas") == 3
    ids = [attributes["id"] for _, attributes in document.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_page_is_self_contained(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for _, attributes in Checker(text).elements:
        for name in ("src", "href", "action", "srcset", "data"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))
    assert not re.search(r"https?://|@import|url\(|\bimport\b\s*[({'\"]|fetch\(", text)


def test_page_canvases_are_focusable_and_named(page: Path) -> None:
    for tag, attributes in Checker(page.read_text(encoding="utf-8")).elements:
        if tag == "canvas":
            assert attributes["tabindex"] == "0"
            assert "Arrow keys" in (attributes["aria-label"] or "")


def test_page_escapes_all_text(tmp_path: Path) -> None:
    sphere = Sphere(HOSTILE, [[1.0, 0, 0], [0, 1.0, 0]], [0, 1], classes=(HOSTILE, "b"), caption=HOSTILE)
    target = write_page(
        tmp_path / "page.html",
        title=HOSTILE,
        lead=HOSTILE,
        sections=[
            Text(HOSTILE, HOSTILE),
            Table(HOSTILE, [Column(HOSTILE, True, unit=HOSTILE), Column(HOSTILE, True)], [(HOSTILE, 1), (HOSTILE, 2)]),
            Spheres(HOSTILE, [sphere], caption=HOSTILE),
        ],
        meta={HOSTILE: HOSTILE},
    )
    document = Checker(target.read_text(encoding="utf-8"))
    assert document.count("script") == 3  # theme, data, spheres
    assert document.texts["title"] == [HOSTILE]
    assert document.texts["h1"] == [HOSTILE]
    data = json.loads(next(text for text in document.texts["script"] if text.startswith("{")))
    assert data["classes"] == [HOSTILE, "b"]


def test_page_includes_scripts_only_if_needed(tmp_path: Path) -> None:
    text = write_page(tmp_path / "a.html", title="", lead="", sections=[Text("", "words")]).read_text(encoding="utf-8")
    assert not re.search(r"SphereView|class Chart|makeTabs|\.toggles|\.tablist", text)


def test_page_rejects_unknown_sections(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sections\[0\] must be one of Text, Table, Spheres, .*, not 'str'"):
        write_page(tmp_path / "page.html", title="", lead="", sections=["words"])  # type: ignore[list-item]


def test_write_page_failure_keeps_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write_page(tmp_path / "new" / "page.html", title="old", lead="", sections=[])
    old = target.read_text(encoding="utf-8")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(_files.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_page(target, title="new", lead="", sections=[])
    assert target.read_text(encoding="utf-8") == old
    assert [path.name for path in target.parent.iterdir()] == ["page.html"]


def test_write_page_replaces_unpaired_surrogates(tmp_path: Path) -> None:
    lone = "a\ud800b"
    sphere = Sphere(lone, [[1.0, 0, 0]], [0], classes=(lone,))
    sections = [Text(lone, lone), Table(lone, [Column(lone)], [(lone,)]), Spheres(lone, [sphere])]
    target = write_page(tmp_path / "page.html", title=lone, lead=lone, sections=sections, meta={lone: lone})
    assert Checker(target.read_text(encoding="utf-8")).texts["h1"] == ["a?b"]


def test_write_page_is_safe_for_concurrent_writers(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: write_page(tmp_path / "page.html", title="", lead="", sections=[]), range(100)))
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_write_page_samples_many_points(tmp_path: Path) -> None:
    points = np.random.default_rng(0).normal(size=(20_000, 3))
    sphere = Sphere("many", points, np.zeros(20_000, dtype=int))
    target = write_page(tmp_path / "page.html", title="", lead="", sections=[Spheres("", [sphere])])
    assert target.stat().st_size < 250_000
    assert "5,000 of 20,000 features" in target.read_text(encoding="utf-8")
