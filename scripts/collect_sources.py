"""Write `src/hypersphere/recipes/sources.json`: every table and figure of the sources, with the numbers they print.

    python scripts/collect_sources.py FOLDER

FOLDER contains `ids.txt` (one identifier and its kind per line) and one YAML file per part of the library, in which
each entry has an identifier, its columns and its rows.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

TARGET = Path(__file__).parent.parent / "src/hypersphere/recipes/sources.json"
PARTS = ("objectives", "architectures", "energy", "rotation")
IDENTIFIER = re.compile(r"[A-Z][A-Z-]*[\d.]+[a-z]?(?= |$)")  # such as T2.8, O-T10 or F3.3a; a remark may follow it


def collect(folder: Path) -> dict[str, Any]:
    """Return the entries of all parts by identifier, in the order of `ids.txt`."""
    entries = {
        entry["id"]: {"part": part, **entry}
        for part in PARTS
        for entry in yaml.safe_load((folder / f"{part}.yaml").read_text(encoding="utf-8"))
    }
    lines = (folder / "ids.txt").read_text(encoding="utf-8").splitlines()
    kinds = dict(line.split("\t") for line in lines if line.strip())
    return {name: _entry(kind, entries[name]) for name, kind in kinds.items()}


def _entry(kind: str, entry: dict[str, Any]) -> dict[str, Any]:
    metric = entry.get("metric") or {}
    columns = [str(column) for column in entry.get("columns") or []]
    rows = {
        str(name): cells if isinstance(cells, list) else [cells] for name, cells in (entry.get("rows") or {}).items()
    }
    kept = {
        "part": entry["part"],
        "kind": kind,
        "metric": str(metric.get("name", "")) if isinstance(metric, dict) else str(metric),
        "columns": columns,
        "rows": rows,
        "same_as": [name[0] for text in entry.get("same_as") or [] if (name := IDENTIFIER.match(str(text)))],
    }
    return {key: value for key, value in kept.items() if value}


def main() -> None:
    """Write the file."""
    sources = collect(Path(sys.argv[1]))
    lines = [f"{json.dumps(name)}: {json.dumps(entry, ensure_ascii=False)}" for name, entry in sources.items()]
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{len(sources)} entries in {TARGET}")


if __name__ == "__main__":
    main()
