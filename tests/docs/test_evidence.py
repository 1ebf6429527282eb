"""The page of evidence is the one that the records give."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def evidence():
    if not (ROOT / "scripts" / "evidence.py").is_file():
        pytest.skip("the scripts are not part of this copy")
    spec = importlib.util.spec_from_file_location("evidence", ROOT / "scripts" / "evidence.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_evidence_page_is_up_to_date(evidence):
    results = {name: evidence.current_records(recipe) for name, recipe in evidence.RECIPES.items()}
    page = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    assert page == evidence.page(results), "run `python scripts/evidence.py`"


def test_readme_lists_the_main_claims(evidence):
    results = {name: evidence.current_records(recipe) for name, recipe in evidence.RECIPES.items()}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "| verdict |\n" in readme
    assert readme == evidence.with_headlines(readme, evidence.headlines(results)), "run `python scripts/evidence.py`"
    drawn = (ROOT / "docs" / "assets" / "evidence.svg").read_text(encoding="utf-8")
    shown = [one for one in evidence.headlines(results) if "%" in one.metric.heading]
    assert all(f"({one.claim.source})" in drawn for one in shown)


def test_evidence_page_gives_an_interval_with_every_difference():
    page = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if re.search(r"\*\*(yes|no|not resolved)\*\*", line)]
    assert rows
    for row in rows:
        assert re.fullmatch(r"[+-][\d.]+ \([+-][\d.]+ to [+-][\d.]+\)", row[3]), row


def test_evidence_page_links_to_files_of_the_repository():
    page = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\((\.\./results/[^)]+)\)", page)
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).is_file()] == []
