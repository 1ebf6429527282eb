"""`hypersphere cite`: print BibTeX entries for the works behind the components of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from hypersphere.cli.options import check_run

__all__ = ["cite", "read_references", "works_of"]

FRAMEWORK = "liu2020thesis"  # cited by every run


def cite(
    folder: Annotated[Path | None, typer.Argument(metavar="RUN", help="Folder of the run.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Print all works that the library implements.")] = False,
) -> None:
    """Print the BibTeX entries of the works that a run used."""
    if (folder is None) != everything:
        raise ValueError("cite needs either the folder of a run or --all")
    references = read_references()
    if folder is None:
        uses = {key: keywords for key, (_, keywords) in references.items()}
        uses[FRAMEWORK] = ["the framework", *uses[FRAMEWORK]]
    else:
        from hypersphere.training import Run

        uses = works_of(Run.open(check_run(folder)).config.settings())
    for key, components in uses.items():
        print(f"% {', '.join(components)}\n{references[key][0]}\n")


def read_references() -> dict[str, tuple[str, list[str]]]:
    """Return the entries of references.bib by key: BibTeX without the field `keywords`, and the keywords.

    >>> entry, keywords = read_references()["liu2016large"]
    >>> entry.partition(",")[0], keywords[0]
    ('@inproceedings{liu2016large', 'head l_softmax')
    """
    references = {}
    text = files("hypersphere.cli").joinpath("references.bib").read_text(encoding="utf-8")
    for entry in re.findall(r"^@.*?^}$", text, re.M | re.S):
        key = re.match(r"@\w+\{(\w+)", entry)[1]  # type: ignore[index]
        bibtex, _, keywords = entry.partition(",\n  keywords = {")
        names = " ".join(keywords.removesuffix("}\n}").split())
        references[key] = f"{bibtex}\n}}", names.split(", ") if names else []
    return references


def works_of(settings: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the keys of the works that an experiment uses, each with the components that use it; the thesis first.

    >>> works_of({"head": {"name": "a_softmax", "m": 3}, "rotation": {"name": "cayley", "refine": "mhe"}})
    {'liu2020thesis': ['the framework'], 'liu2017sphereface': ['head a_softmax'],
     'liu2021orthogonal': ['rotation cayley'], 'liu2018energy': ['rotation.refine mhe']}
    """
    by_keyword: dict[str, list[str]] = {}
    for key, (_, keywords) in read_references().items():
        for keyword in keywords:
            by_keyword.setdefault(keyword, []).append(key)
    uses: dict[str, list[str]] = {FRAMEWORK: ["the framework"]}
    for keyword, words in _keywords(settings):
        for key in by_keyword.get(keyword, ()):
            uses.setdefault(key, []).append(words)
    return uses


def _keywords(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keywords of settings, as they may occur in references.bib, each with words for the comment."""
    for setting, value in settings.items():
        kind = setting.removesuffix("s")  # keywords are singular: an item of `regularizers` is a regularizer
        for component in value if isinstance(value, list) else [value]:
            if not isinstance(component, Mapping) or "name" not in component:
                continue
            words = f"{kind} {component['name']}"
            yield words, words
            for option, given in component.items():
                words = f"{kind}.{option}" if isinstance(given, list) else f"{kind}.{option} {given}"
                yield words, words
                if isinstance(given, (int, float)):
                    yield from ((f"{kind}.{option} >= {bound}", words) for bound in (0, 2) if given >= bound)
