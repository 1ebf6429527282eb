import re
from pathlib import Path

import pytest

from hypersphere.cli.cite import read_references, works_of
from hypersphere.robustness import ATTACKS
from hypersphere.training.components import MENUS

ROOT = Path(__file__).parents[2]
REFERENCES = read_references()
KEYWORDS = {keyword for _, keywords in REFERENCES.values() for keyword in keywords}
# Components without a reference: textbook ones, those of this library, and adapters.
UNCITED = {
    "data": {"generated", "image_folder", "image_list", "shards", "recordio", "hf_dataset"},
    "model": {"auto", "toy_cnn", "embedding_cnn", "mlp"},
    "operator": {"none"},
    "head": {"softmax"},
    "regularizer": {"none"},
    "rotation": {"none"},
    "attack": set(),
}


@pytest.mark.parametrize("part", UNCITED)
def test_every_menu_entry_has_a_reference_or_needs_none(part):
    menu = ATTACKS if part == "attack" else MENUS[part]
    cited = {keyword.split(" ", 1)[1] for keyword in KEYWORDS if keyword.startswith(f"{part} ")}
    assert cited | UNCITED[part] == {*menu, *getattr(menu, "synonyms", ())}
    assert not cited & UNCITED[part]


def test_every_reference_has_keywords():
    assert all(keywords for _, keywords in REFERENCES.values())


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
    ours = {}
    for entry, _ in REFERENCES.values():
        author, title = (re.search(rf"{name} = {{+(.*?)}}+,$", entry, re.M)[1] for name in ("author", "title"))
        ours[title] = author, int(re.search(r"year = {(\d+)}", entry)[1])
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
    found = works_of({"regularizers": [{"name": "mhe"}], "rotation": {"name": "cayley", "bound": 0.1, "refine": "mhe"}})
    assert set(found) == {"liu2020thesis", "liu2021orthogonal", "qiu2023controlling", "liu2018energy"}
    assert found["liu2018energy"] == ["regularizer mhe", "rotation.refine mhe"]


def test_works_of_includes_options_of_heads():
    settings = {"head": {"name": "arcface", "centers": 3, "hard_negatives": 5, "class_sizes": [3, 5]}}
    found = works_of(settings)
    assert set(found) == {"liu2020thesis", "deng2019arcface", "deng2020subcenter", "zhao2022multi", "cao2019learning"}
    assert set(works_of({"head": {"name": "arcface", "centers": 1}})) == {"liu2020thesis", "deng2019arcface"}


def test_cite_all_prints_every_reference_in_ascii(succeeds):
    out = succeeds("cite", "--all")
    assert len(re.findall(r"^@", out, re.M)) == len(REFERENCES)
    for entry in out.split("\n\n"):
        assert entry.count("{") == entry.count("}")
    out.encode("ascii")  # old versions of BibTeX need ASCII


def test_cite_rejects_invalid_input(plain, fails, tmp_path):
    assert "cite needs either the folder of a run or --all" in fails(2, "cite")
    assert "cite needs either the folder of a run or --all" in fails(2, "cite", plain.folder, "--all")
    assert "RUN must be the folder of a run of `hypersphere train`" in fails(2, "cite", tmp_path)
