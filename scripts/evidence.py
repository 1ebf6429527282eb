"""Write `docs/evidence.md` from the records in `results/`: every claim that they decide, with its verdict.

    python scripts/evidence.py

`results/reading.md` has one section per part, with the paragraph that is printed below its table.
"""

from __future__ import annotations

import re
from pathlib import Path

from hypersphere.recipes import PARTS, RECIPES, Recipe, read_records, source_entries
from hypersphere.recipes.evidence import Decision, decide_claims, format_difference
from hypersphere.recipes.record import Record

ROOT = Path(__file__).parent.parent
TITLES = {
    "objectives": "Objectives: angular margins",
    "architectures": "Architectures: sphere and decoupled networks",
    "energy": "Energy: regularised neurons",
    "rotation": "Rotation: orthogonal training",
}
COLUMNS = ("claim", "source", "printed difference", "here", "seeds", "verdict", "recipe")
INTRODUCTION = """# Evidence

What the experiments of the sources show when they are run with this library. The experiments here are smaller than
those of the sources: each recipe says how. Where a recipe tunes settings, all its methods have the same number of
trials on data held out from training, and the plan is part of the recipe; the notes of the others say that nothing is
tuned. Differences are paired by seed, with a 95 % interval of Student's t. A claim is decided *yes* or *no* if the
interval does not contain zero, else *not resolved*.
`hypersphere reproduce NAME` runs a recipe again, and `hypersphere report results/NAME` makes its page.
"""


def main() -> None:
    """Write the page."""
    results = {name: current_records(recipe) for name, recipe in RECIPES.items()}
    (ROOT / "docs" / "evidence.md").write_text(page(results), encoding="utf-8")


def current_records(recipe: Recipe) -> list[Record]:
    """Return the records of a recipe that have its present settings."""
    return [one for one in read_records(ROOT / "results", recipe.name) if one.config and one.is_current(recipe)]


def page(results: dict[str, list[Record]]) -> str:
    """Return the page for records by recipe."""
    reading, blocks = sections((ROOT / "results" / "reading.md").read_text(encoding="utf-8")), [INTRODUCTION]
    for part in PARTS:
        recipes = [recipe for recipe in RECIPES.values() if recipe.part == part]
        claims = [(recipe, one) for recipe in recipes for one in decide_claims(recipe, results[recipe.name])]
        decided = [(recipe, one) for recipe, one in claims if one.difference is not None]
        blocks.append(f"## {TITLES[part]}\n")
        if decided:
            lines = [line(recipe, one) for recipe, one in decided]
            blocks.append("\n".join(["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|", *lines]) + "\n")
        blocks.append(reading.get(part, "").strip() + "\n")
        blocks.append(links(recipes, results))
    return "\n".join(blocks).rstrip() + "\n"


def line(recipe: Recipe, decision: Decision) -> str:
    """Return the row of a claim."""
    difference = decision.difference
    assert difference is not None  # the page has the claims that can be decided
    printed = "–" if decision.source is None else f"{decision.source:+{decision.metric.format}}"
    here, seeds = format_difference(difference, decision.metric), str(difference.pairs)
    text = f"{decision.claim.text} ({decision.metric.heading})"
    cells = [text, decision.claim.source, printed, here, seeds, f"**{decision.verdict}**", _link(recipe, recipe.name)]
    return f"| {' | '.join(cells)} |"


def _link(recipe: Recipe, text: str) -> str:
    return f"[{text}](../results/{recipe.name}/table.md)"


def links(recipes: list[Recipe], results: dict[str, list[Record]]) -> str:
    """Return the list of recipes with records, and of those that were not run here."""
    run = [recipe for recipe in recipes if results[recipe.name]]
    listed = []
    for recipe in run:
        covered = ", ".join(recipe.covers) or "not in the sources"
        rows = recipe.rows_at("cpu")
        done = {record.row for record in results[recipe.name]}
        part = f"; {len(done)} of {len(rows)} rows" if len(done) < len(rows) else ""
        listed.append(f"- {_link(recipe, recipe.title)}, `{recipe.name}`: {covered}{part}")
    others = [recipe for recipe in recipes if not results[recipe.name]]
    entries = source_entries()
    missing = [name for recipe in others for name in recipe.covers if name in entries]
    if missing:
        listed.append(f"- Not run here: {', '.join(missing)} ({', '.join(f'`{recipe.name}`' for recipe in others)}).")
    return "\n".join(listed) + "\n"


def sections(text: str) -> dict[str, str]:
    """Return the sections of a Markdown file by their heading."""
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return {name.strip(): body for name, body in zip(parts[1::2], parts[2::2], strict=True)}


if __name__ == "__main__":
    main()
