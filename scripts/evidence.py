"""Write `docs/evidence.md` from the records in `results/`: every claim that they decide, with its verdict.

    python scripts/evidence.py

`results/reading.md` has one section per part, with the paragraph that is printed below its table. The claims of
`HEADLINES` are also drawn, in `docs/assets/evidence.svg`, and listed in the README between two comments.
"""

from __future__ import annotations

import re
from pathlib import Path

import altair as alt
import vl_convert

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
# Claims that are drawn and listed in the README: of each table or figure the first that is decided and begins with the
# words after the colon, if there are any.
HEADLINES = (
    "T2.2", "T2.3", "T2.8", "T2.9", "F3.3b", "F3.5", "T4.3", "T4.7", "T6.1",
    "T6.1: CoMHE has a lower error than weight", "T5.1", "T5.2", "T6.4", "T6.5", "T5.7", "F5.4", "T5.8", "T-E.6",
    "T-E.6: RP-CoMHE", "T7.3", "T7.3: From Xavier", "T7.4", "T7.5", "T7.1", "T7.2", "O-T10", "T-F.5", "O-F9",
    "O-T8", "O-T9",
)  # fmt: skip
COLORS = {"yes": "#1a7f37", "no": "#b42318", "not resolved": "#6b7280"}
COLUMNS = ("claim", "source", "printed difference", "here", "seeds", "verdict", "recipe")
INTRODUCTION = """# Evidence

What the experiments of the sources show when they are run with this library. The experiments here are smaller than
those of the sources: each recipe says how. Where a recipe tunes settings, all its methods have the same number of
trials on data held out from training, and the plan is part of the recipe; the notes of the others say that nothing is
tuned. A difference is the value of the method that the claim names first minus that of the other. Differences are
paired by seed, with a 95 % interval of Student's t. A claim is decided *yes* or *no* if the interval does not contain
zero, else *not resolved*.
`hypersphere reproduce NAME` runs a recipe again, and `hypersphere report results/NAME` makes its page.

![The main claims: the difference measured here with its interval, next to that of the source.](assets/evidence.svg)
"""


def main() -> None:
    """Write the page."""
    results = {name: current_records(recipe) for name, recipe in RECIPES.items()}
    (ROOT / "docs" / "evidence.md").write_text(page(results), encoding="utf-8")
    (ROOT / "docs" / "assets" / "evidence.svg").write_text(picture(headlines(results)), encoding="utf-8")
    readme = ROOT / "README.md"
    readme.write_text(with_headlines(readme.read_text(encoding="utf-8"), headlines(results)), encoding="utf-8")


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


def headlines(results: dict[str, list[Record]]) -> list[Decision]:
    """Return the decided claims of `HEADLINES`, in their order."""
    decided = [
        one
        for recipe in RECIPES.values()
        for one in decide_claims(recipe, results[recipe.name])
        if one.difference is not None
    ]
    chosen = []
    for headline in HEADLINES:
        source, _, beginning = headline.partition(": ")
        of_source = (one.claim for one in decided if one.claim.source == source)
        claim = next((one for one in of_source if one.text.startswith(beginning)), None)
        chosen += [one for one in decided if one.claim == claim]
    return chosen


def with_headlines(readme: str, decisions: list[Decision]) -> str:
    """Return the README with a table of the decisions between the comments `evidence` and `/evidence`."""
    names = ("claim", "in the source", "here, with its 95 % interval", "verdict")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for one in decisions:
        assert one.difference is not None
        printed = "–" if one.source is None else f"{one.source:+{one.metric.format}}"
        text = f"{one.claim.text.rstrip('.')} ({one.claim.source}; {one.metric.heading})"
        lines.append(f"| {text} | {printed} | {format_difference(one.difference, one.metric)} | {one.verdict} |")
    before, _, rest = readme.partition("<!-- evidence -->\n")
    _, _, after = rest.partition("<!-- /evidence -->\n")
    return "".join([before, "<!-- evidence -->\n", "\n".join(lines), "\n<!-- /evidence -->\n", after])


def picture(decisions: list[Decision]) -> str:
    """Return an SVG image of the decisions in percentage points: intervals here, and the differences of the source."""
    rows = []
    for one in decisions:
        if "%" in one.metric.heading and one.difference is not None:
            # Positive values speak for the claim, whether the metric is an error or an accuracy.
            sign = 1 if one.metric.higher_is_better else -1
            ends = sorted((sign * one.difference.low, sign * one.difference.high))
            row = {"claim": f"{one.claim.text.rstrip('.')} ({one.claim.source})", "verdict": one.verdict}
            row |= {"low": ends[0], "high": ends[1], "here": sign * one.difference.mean}
            rows.append(row | {"source": None if one.source is None else sign * one.source})
    axis = "points in favour of the claim: here with its 95 % interval, and in the source (diamonds)"
    claim = alt.Y("claim:N", sort=None, title=None, axis=alt.Axis(labelLimit=600, labelFontSize=12))
    color = alt.Color("verdict:N", scale=alt.Scale(domain=list(COLORS), range=list(COLORS.values())), title=None)
    base = alt.Chart(alt.Data(values=rows)).encode(y=claim)
    bars = base.mark_rule(strokeWidth=3).encode(x=alt.X("low:Q", title=axis), x2="high:Q", color=color)
    here = base.mark_circle(size=90, opacity=1).encode(x="here:Q", color=color)
    source = base.mark_point(shape="diamond", size=90, color="#16191f").encode(x="source:Q")
    zero = alt.Chart(alt.Data(values=[{"x": 0}])).mark_rule(strokeDash=[4, 4], color="#6b7280").encode(x="x:Q")
    chart = alt.layer(zero, bars, here, source).properties(width=430, height=alt.Step(24), background="#ffffff")
    chart = chart.configure_view(stroke=None).configure_legend(orient="bottom", labelFontSize=12)
    svg = vl_convert.vegalite_to_svg(chart.to_dict())
    return svg.replace("<svg ", '<svg role="img" aria-label="Claims of the sources and what the records say" ', 1)


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
