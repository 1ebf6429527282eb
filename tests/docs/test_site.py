"""The site builds without a warning, shows every public name, and works without a network."""

import html
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import hypersphere as hs

ROOT = Path(__file__).parents[2]
PACKAGES = [getattr(hs, name) for name in hs.__all__ if hasattr(getattr(hs, name), "__all__") and name != "functions"]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def load(name):
    """Import a script of the docs folder, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in ("mkdocs", "material", "mkdocstrings_handlers", "latex2mathml"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    out = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        out,
    ]  # --quiet would hide warnings from --strict
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stdout + process.stderr
    return out


@pytest.mark.slow
def test_site_shows_every_public_name(site):
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html"))
    for package in PACKAGES:
        for name in package.__all__:
            assert f'id="{package.__name__}.{name}"' in pages, f"{package.__name__}.{name} is on no page"
    for name in ("layers_of", "LayerSelection", "NeuronLayer"):
        assert f'id="hypersphere._layer_selection.{name}"' in pages


def test_api_pages_begin_with_what_users_reach_for_first(site):
    for package, names in load("docstrings").FIRST.items():
        page = site / "api" / ("selection.html" if package == "_layer_selection" else f"{package}.html")
        text = page.read_text(encoding="utf-8")
        positions = [text.find(f'id="hypersphere.{package}.{name}"') for name in names]
        assert -1 not in positions, f"{package}: {names[positions.index(-1)]} is not on its page"
        assert positions == sorted(positions), package


def test_site_loads_nothing_from_the_network(site):
    loads = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
    for page in site.rglob("*.html"):
        assert not loads.search(page.read_text(encoding="utf-8")), page.name


def test_formulas_are_converted(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        outside_code = re.sub(r"<(pre|code|math|script)\b.*?</\1>", "", text, flags=re.S)
        assert "arithmatex" not in outside_code, page.name
        assert not re.search(r"\\(?:frac|theta|lVert|hat|cos)\b|\$\$", outside_code), page.name
    assert (site / "math.html").read_text(encoding="utf-8").count("<math ") > 80


def test_tags_of_formulas_become_numbers():
    pytest.importorskip("latex2mathml")
    page = load("mathml").on_page_content(r'<div class="arithmatex">\[a \le b \tag{2.20}\]</div>')
    assert '<span class="number">(2.20)</span>' in page
    assert "tag" not in page


def test_docstring_examples_are_code_blocks(site):
    for page in (site / "api").glob("*.html"):
        text = page.read_text(encoding="utf-8")
        outside_code = re.sub(r"<(pre|code)\b.*?</\1>", "", text, flags=re.S)
        assert ">>>" not in html.unescape(re.sub(r"<[^>]+>", "", outside_code)), page.name
        assert "math::" not in outside_code, page.name


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no browser is installed")
def test_search_works_from_disk(site, tmp_path):
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
    address = f"file://{site}/index.html?q=cayley"
    command = [CHROMIUM, *flags, f"--user-data-dir={tmp_path}", "--virtual-time-budget=10000", "--dump-dom", address]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120)
    match = re.search(r"(\d+) matching documents?", process.stdout)
    assert match, process.stderr[-500:]
    assert int(match[1]) >= 1


@pytest.mark.parametrize(
    ("room", "name", "argument"), [("layers", "DecoupledConv2d", "in_channels"), ("energy", "Orthonormal", "weight=")]
)
def test_api_shows_the_signature_of_an_inherited_constructor(site, room, name, argument):
    text = (site / "api" / f"{room}.html").read_text(encoding="utf-8")
    section = text[text.index(f'id="hypersphere.{room}.{name}"') :][:4000]
    assert argument in html.unescape(re.sub(r"<[^>]+>", "", section))


def test_api_shows_every_example_as_code(site):
    for page in (site / "api").glob("*.html"):
        assert "<blockquote>" not in page.read_text(encoding="utf-8"), page.name


def test_search_lists_decisions_last(site):
    entries = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    assert {entry.get("boost") for entry in entries if entry["location"].startswith("adr/")} == {0.2}
    assert all("boost" not in entry for entry in entries if not entry["location"].startswith("adr/"))


def test_draw_sphere_trains_and_draws():
    script = load("draw_sphere")
    features, labels, accuracy = script.train_and_embed(hs.heads.softmax(3, 10), epochs=1)
    assert features.shape == (500, 3)
    assert 0 < accuracy < 1
    parts = script.panel("softmax", "one epoch", features, labels, cx=240.0)
    drawing = ElementTree.fromstring(f"<svg>{''.join(parts)}</svg>")
    assert len(drawing.findall("circle")) == 501  # the sphere and one dot per test image


def test_front_page_picture_is_well_formed_and_follows_the_colour_scheme():
    text = (ROOT / "docs" / "assets" / "sphere.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert "prefers-color-scheme:dark" in text
    assert len(text) < 150_000
