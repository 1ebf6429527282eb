"""The site builds without a warning, has every public name, and asks for nothing from the network."""

import html
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hypersphere as hs

ROOT = Path(__file__).parents[2]
MODULES = [name for name in hs.__all__ if name not in ("__version__", "functions")]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in ("mkdocs", "material", "mkdocstrings_handlers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", out]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_every_public_name_is_on_a_page(site):
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html"))
    for module in MODULES:
        room = getattr(hs, module)
        for name in room.__all__:
            assert f'id="{room.__name__}.{name}"' in pages, f"{room.__name__}.{name} is on no page"


def test_nothing_is_asked_from_the_network(site):
    loaded = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
    for page in site.rglob("*.html"):
        assert not loaded.search(page.read_text(encoding="utf-8")), page.name


def test_examples_of_docstrings_are_code(site):
    for page in (site / "api").glob("*.html"):
        text = page.read_text(encoding="utf-8")
        outside = re.sub(r"<(pre|code)\b.*?</\1>", "", text, flags=re.S)
        assert ">>>" not in html.unescape(re.sub(r"<[^>]+>", "", outside)), page.name
        assert "math::" not in outside, page.name
