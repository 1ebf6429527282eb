"""Every Python block of a page runs, from top to bottom in one namespace, and what the words promise is so."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r'^```python(?: title="[^"\n]*")?\n(.*?)^```$', re.S | re.M)


def blocks(page):
    """The Python blocks of a page, each moved down to the line it has there, so that errors name the right one."""
    text = page.read_text(encoding="utf-8")
    return ["\n" * text.count("\n", 0, found.start(1)) + found[1] for found in FENCE.finditer(text)]


def needs(page):
    """What a page says at its head that it needs beyond the extras of the tests."""
    found = re.match(r"---\nneeds: (.*)\n---\n", page.read_text(encoding="utf-8"))
    return found[1].split(", ") if found else []


PAGES = {page.relative_to(DOCS).as_posix(): page for page in sorted(DOCS.rglob("*.md")) if blocks(page)}


def objectives(page):
    results = page["results"]
    accuracies = [result["accuracy"] for result in results.values()]
    assert min(accuracies) > max(accuracies) - 0.03 > 0.9
    assert results["A-Softmax"]["within"] < results["softmax"]["within"] - 2
    assert results["AM-Softmax"]["within"] > results["softmax"]["within"]
    assert results["A-Softmax"]["fisher"] < results["softmax"]["fisher"]
    assert page["verified"].accuracy > 0.9
    assert 0.5 < page["open_set"].accuracy < 1


def architectures(page):
    robust = page["robust"]
    for result in robust.values():
        assert result.clean > 0.9
        assert result.clean >= result.accuracies[0] >= result.accuracies[1]
    weak = {name: result.accuracies[0] for name, result in robust.items()}
    assert weak["sphere"] < min(weak["plain"], weak["tanh"])
    assert abs(weak["tanh"] - weak["plain"]) < 0.08


def energy(page):
    assert page["accuracy"](page["plain"]) > 0.9
    assert page["accuracy"](page["regularised"]) > 0.9
    for before, after in zip(page["seen"].layers, page["spread_out"].layers, strict=True):
        assert after.energy(half_space=before.name != "5").value < before.energy(half_space=before.name != "5").value
    assert page["least"] == pytest.approx(49.165253, abs=1e-6)


def rotation(page):
    assert page["trained_energy"] == pytest.approx(page["energy"], rel=1e-5)
    assert page["s_opt"] > 0.85
    assert page["learned"] > page["mirrored"] + 0.3
    assert page["tuned"] > page["mirrored"] + 0.3
    assert page["few"] < page["all_"] / 10


CLAIMS = {
    "tutorials/objectives.md": objectives,
    "tutorials/architectures.md": architectures,
    "tutorials/energy.md": energy,
    "tutorials/rotation.md": rotation,
    "how-to/transformer.md": lambda page: page["accuracy"] > 0.85,
    "how-to/many-classes.md": lambda page: page["accuracy"] > 0.9,
}


@pytest.mark.parametrize("name", PAGES)
def test_blocks_run_and_claims_hold(name, tmp_path, monkeypatch):
    page = PAGES[name]
    for package in needs(page):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYPERSPHERE_DATA", raising=False)
    torch.manual_seed(0)
    namespace = {"__name__": "__main__"}
    for block in blocks(page):
        exec(compile(block, page, "exec"), namespace)
    if name in CLAIMS:
        assert CLAIMS[name](namespace) is not False


def test_every_tutorial_is_there_and_every_claim_has_a_page():
    assert set(CLAIMS) <= set(PAGES)
    assert {name for name in PAGES if name.startswith("tutorials/")} == {
        f"tutorials/{part}.md" for part in ("objectives", "architectures", "energy", "rotation")
    }


def test_the_sharded_script_runs_under_torchrun(tmp_path):
    (tmp_path / "train.py").write_text(blocks(PAGES["how-to/many-classes.md"])[0], encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = re.search(r"2 processes, 5 of 10 classes here, accuracy (0\.\d+)", done.stdout)
    assert found, done.stdout
    assert float(found[1]) > 0.9
    state = torch.load(tmp_path / "head.pt")
    assert state["weight"].shape == (10, 16)


def test_commands_of_the_pages_exist():
    import typer.main

    from hypersphere.cli.commands import app

    commands = typer.main.get_command(app).commands
    for page in sorted(DOCS.rglob("*.md")):
        for block in re.findall(r"^```sh\n(.*?)^```$", page.read_text(encoding="utf-8"), re.S | re.M):
            for line in re.findall(r"^hypersphere (.*)", block, re.M):
                word, *rest = line.split()
                assert word in commands, f"{page.name}: hypersphere {word}"
                known = {option for parameter in commands[word].params for option in parameter.opts}
                given = {option.split(".")[0].split("=")[0] for option in rest if option.startswith("-")}
                assert given <= known, f"{page.name}: {line}"


def test_symbols_have_names_that_exist():
    import hypersphere as hs

    rows = re.findall(r"^\|.*\|$", (DOCS / "math.md").read_text(encoding="utf-8"), re.M)
    names = [name for row in rows for name in re.findall(r"`([a-z0-9_.A-Z]+)`", row)]
    assert len(names) > 50
    for name in names:
        value = hs
        for part in name.split("."):
            value = getattr(value, part)
