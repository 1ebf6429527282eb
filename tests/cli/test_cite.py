import re
from pathlib import Path

import pytest

from hypersphere.cli.cite import OPTIONS, SOURCES, works_of
from hypersphere.cli.references import REFERENCES
from hypersphere.heads import PRESETS
from hypersphere.robustness import ATTACKS
from hypersphere.training.job import REGULARIZERS
from hypersphere.training.job_network import NETWORKS, OPERATORS
from hypersphere.training.job_rotating import ROTATIONS
from hypersphere.training.task import TASKS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("part", "menu"),
    [
        ("data", TASKS),
        ("model", NETWORKS),
        ("operator", OPERATORS),
        ("head", PRESETS),
        ("regularizer", REGULARIZERS),
        ("rotation", ROTATIONS),
        ("attack", ATTACKS),
    ],
)
def test_cite_has_sources_for_every_menu_entry(part, menu):
    assert set(SOURCES[part]) == set(menu)


def test_cite_uses_every_reference():
    cited = {key for by_name in SOURCES.values() for keys in by_name.values() for key in keys}
    cited |= {key for keys in OPTIONS.values() for key in keys.values()}
    assert cited == set(REFERENCES)


def test_references_agree_with_the_citation_file():
    """Titles, authors and years."""
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8").split("references:")[1]
    works = {}
    for entry in text.split("- type:")[1:]:
        title = re.search(r"title: \"?(.*?)\"?$", entry, re.M)[1]
        names = re.findall(r"family-names: ([^,]+), given-names: ([^}]+)", entry)
        works[title] = (
            " and ".join(f"{family}, {given}" for family, given in names),
            int(re.search(r"year: (\d+)", entry)[1]),
        )
    ours = {reference.title: (reference.author, reference.year) for reference in REFERENCES.values()}
    assert works == {title: ours[title] for title in works}
    assert len(works) >= 6


def test_cite_prints_the_works_of_a_run(rotated, succeeds):
    out = succeeds("cite", rotated.folder)
    keys = re.findall(r"^@\w+\{(\w+),$", out, re.M)
    assert keys == [
        "liu2020thesis", "alpaydin1998cascading", "liu2017sphereface", "liu2018energy", "liu2021orthogonal",
    ]  # fmt: skip
    assert "% regularizer mhe\n@inproceedings{liu2018energy," in out


def test_works_of_includes_options():
    settings = {
        "rotation": {"name": "cayley", "factors": 2, "bound": None},
        "head": {"name": "arcface", "gradient": "true"},
    }
    assert set(works_of(settings)) == {"liu2020thesis", "liu2021orthogonal", "liu2024boft", "deng2019arcface"}
    found = works_of({"regularizer": {"name": "mhe"}, "rotation": {"name": "cayley", "bound": 0.1, "refine": "mhe"}})
    assert set(found) == {"liu2020thesis", "liu2021orthogonal", "qiu2023controlling", "liu2018energy"}
    assert found["liu2018energy"] == ["regularizer mhe", "rotation.refine mhe"]


def test_cite_all_prints_every_reference_in_ascii(succeeds):
    out = succeeds("cite", "--all")
    assert len(re.findall(r"^@", out, re.M)) == len(REFERENCES)
    for entry in out.split("\n\n"):
        assert entry.count("{") == entry.count("}")
    out.encode("ascii")  # old versions of BibTeX need ASCII


def test_cite_rejects_invalid_input(plain, fails, tmp_path):
    assert "cite needs either the folder of a run or --all" in fails(2, "cite")
    assert "cite needs either the folder of a run or --all" in fails(2, "cite", plain.folder, "--all")
    assert "is not a run of `hypersphere train`" in fails(2, "cite", tmp_path)
