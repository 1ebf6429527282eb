"""Run the Python blocks of every page, compare what they print with the page, and check what the text claims.

The blocks of a page run from top to bottom in one namespace. What a block prints is shown in an ``output`` fence under
it, and a figure that a block writes is shown from ``docs/figures``. Blocks with a title are also written as files of
that name. The commands in ``sh`` blocks run if the head of the page says ``commands: run``. To rewrite outputs and
figures from what the code gives:

    HYPERSPHERE_UPDATE_DOCS=1 pytest tests/docs/test_pages.py
"""

import contextlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FIGURES = DOCS / "figures"
UPDATE = os.environ.get("HYPERSPHERE_UPDATE_DOCS") == "1"

# A block of code, with the block of its output if the page has one.
CODE = re.compile(
    r'^```python(?: title="[^"\n]*")?\n(?P<code>.*?)^```\n(?:\n```output\n(?P<output>.*?)^```\n)?', re.S | re.M
)
FILE = re.compile(r'^```(?:python|yaml) title="(?P<name>[^"\n]+)"\n(?P<content>.*?)^```$', re.S | re.M)
SHELL = re.compile(r"^```sh\n(?P<lines>.*?)^```$", re.S | re.M)
NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
FIGURE = re.compile(r"!\[[^\]]*\]\((?:\.\./)*figures/([\w.-]+)\)")


def code_blocks(page):
    """Return the Python blocks of a page, each moved down to its line there so that errors name the right one."""
    text = page.read_text(encoding="utf-8")
    return ["\n" * text.count("\n", 0, match.start("code")) + match["code"] for match in CODE.finditer(text)]


def page_head(page):
    """Return the settings in the head of a page."""
    match = re.match(r"---\n(.*?)^---\n", page.read_text(encoding="utf-8"), re.S | re.M)
    return dict(re.findall(r"^(\w+): (.*)$", match[1], re.M)) if match else {}


def required_packages(page):
    """Return the packages that the head of a page names beyond those of the tests."""
    return [name for name in page_head(page).get("needs", "").split(", ") if name]


def same_output(expected, printed):
    """Return True if two texts have the same words and numbers that agree to 5 % or 0.03.

    Training on another processor rounds differently, so accuracies in the second decimal may differ.
    """
    if NUMBER.sub("0", expected).split() != NUMBER.sub("0", printed).split():
        return False
    numbers = zip(map(float, NUMBER.findall(expected)), map(float, NUMBER.findall(printed)), strict=True)
    return all(abs(a - b) <= max(0.03, 0.05 * abs(a)) for a, b in numbers)


PAGES = {page.relative_to(DOCS).as_posix(): page for page in sorted(DOCS.rglob("*.md")) if code_blocks(page)}
PAGES["README.md"] = ROOT / "README.md"
# These pages train networks or start many processes.
SLOW_PAGES = {
    "how-to/energy-transformer.md",
    "how-to/gallery.md",
    "how-to/hugging-face.md",
    "how-to/onnx.md",
    "how-to/photos.md",
    "how-to/transformer.md",
    "tutorials/architectures.md",
    "tutorials/objectives.md",
    "tutorials/rotation.md",
}


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
    for before, after in zip(page["before"].layers, page["after"].layers, strict=True):
        half_space = before.name != "5"
        assert after.energy(half_space=half_space).value < before.energy(half_space=half_space).value
    assert page["least"] == pytest.approx(49.165253, abs=1e-6)


def rotation(page):
    assert page["energy_after"] == pytest.approx(page["energy_before"], rel=1e-5)
    assert page["s_opt"] > 0.85
    assert page["plain_accuracy"] > page["mirrored_before"] + 0.3
    assert page["mirrored_after"] > page["mirrored_before"] + 0.3
    assert page["trained_numbers"] < page["all_numbers"] / 10


def lemma_2(page):
    """Lemma 2 of chapter 3 is false as printed, and holds if the rows are renormalised."""
    U, V, cosine, condition_number = (page[name] for name in ("U", "V", "cosine", "condition_number"))
    scaled = [condition_number(cosine, c * U, V / c) for c in (1, 2, 4, 8)]
    assert scaled == pytest.approx([11.8, 108, 1.7e3, 2.7e4], rel=0.01)
    renormalised = page["hs"].sphere.normalize(8 * U), page["hs"].sphere.normalize(V / 8)
    assert condition_number(cosine, *renormalised) == pytest.approx(scaled[0])
    assert condition_number(page["plain"], 8 * U, V / 8) > 8**2 * condition_number(page["plain"], U, V)


def scaling(page):
    assert all(sum(job.memory.values()) < 4e9 for job in page["jobs"].values())
    assert page["jobs"]["a tenth, SGD"].checkpoint == 4 * 512 * 10**8 / 1024


CLAIMS = {
    "tutorials/objectives.md": objectives,
    "tutorials/architectures.md": architectures,
    "tutorials/energy.md": energy,
    "tutorials/rotation.md": rotation,
    "how-to/energy-transformer.md": lambda page: page["means"][1.0] < page["means"][0.0] - 0.01,
    "how-to/transformer.md": lambda page: page["accuracy"] > 0.85,
    "how-to/many-classes.md": lambda page: page["accuracy"] > 0.9,
    "math.md": lemma_2,
    "scaling.md": scaling,
}


def run_page(page):
    """Run the blocks of a page; return its namespace and what each block printed."""
    text, namespace, printed = page.read_text(encoding="utf-8"), {"__name__": "__main__"}, []
    write_files(text)
    code = [(match.start(), block) for match, block in zip(CODE.finditer(text), code_blocks(page), strict=True)]
    runs_commands = page_head(page).get("commands") == "run"
    commands = [(match.start(), match) for match in SHELL.finditer(text) if runs_commands]
    for _, block in sorted([*code, *commands], key=lambda item: item[0]):
        if isinstance(block, re.Match):
            run_commands(block["lines"])
            continue
        with contextlib.redirect_stdout(io.StringIO()) as stream:
            exec(compile(block, page, "exec"), namespace)
        printed.append(stream.getvalue())
    return namespace, printed


def write_files(text):
    """Write the titled blocks of a page to the current folder; blocks with the same title are parts of one file."""
    contents = {}
    for match in FILE.finditer(text):
        contents[match["name"]] = contents.get(match["name"], "") + match["content"]
    for name, content in contents.items():
        Path(name).write_text(content, encoding="utf-8")


def run_commands(lines):
    """Run the commands of this library in a block of a shell."""
    from typer.testing import CliRunner

    from hypersphere.cli.commands import app

    for line in re.findall(r"^hypersphere (.*)", lines, re.M):
        result = CliRunner().invoke(app, shlex.split(line, comments=True))
        assert result.exit_code == 0, f"hypersphere {line}\n{result.output}\n{result.exception!r}"


def with_outputs(text, printed):
    """Return the text of a page with its output blocks replaced by what was printed."""
    outputs = iter(printed)

    def rewrite(match):
        code = match[0][: match.end("code") - match.start()] + "```\n"
        output = "\n".join(line.rstrip() for line in next(outputs).rstrip().splitlines())
        return f"{code}\n```output\n{output}\n```\n" if output else code

    return CODE.sub(rewrite, text)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW_PAGES else ()) for name in PAGES]
)
def test_page_runs_and_shows_what_it_prints(name, tmp_path, monkeypatch):
    page = PAGES[name]
    for package in required_packages(page):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    text = page.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYPERSPHERE_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    torch.manual_seed(0)
    namespace, printed = run_page(page)

    for figure in FIGURE.findall(text):
        assert (tmp_path / figure).exists(), f"the page shows {figure}, but its code does not write it"
        if UPDATE:
            FIGURES.mkdir(exist_ok=True)
            shutil.copyfile(tmp_path / figure, FIGURES / figure)
        assert (FIGURES / figure).exists(), f"{figure} is not committed"
    if UPDATE:
        page.write_text(with_outputs(text, printed), encoding="utf-8")
    else:
        for match, output in zip(CODE.finditer(text), printed, strict=True):
            line = text.count("\n", 0, match.start()) + 1
            expected = match["output"] or ""
            assert same_output(expected, output), f"{name}:{line} shows\n{expected}\nbut prints\n{output}"
    if name in CLAIMS:
        assert CLAIMS[name](namespace) is not False


def test_same_output_tolerates_rounding_and_nothing_else():
    assert same_output("accuracy 0.970, 12 steps", "accuracy 0.962, 12 steps")
    assert not same_output("accuracy 0.970", "accuracy 0.870")
    assert not same_output("accuracy 0.970", "error 0.970")
    assert not same_output("", "something")


def test_with_outputs_adds_replaces_and_removes_blocks():
    page = "```python\nprint(1)\n```\n\nText.\n\n```python\nx = 2\n```\n\n```output\nold\n```\n"
    updated = with_outputs(page, ["1\n", ""])
    assert updated == "```python\nprint(1)\n```\n\n```output\n1\n```\n\nText.\n\n```python\nx = 2\n```\n"
    assert with_outputs(updated, ["1\n", ""]) == updated


def test_write_files_joins_blocks_with_the_same_title(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = (f'```python title="a.py"\n{line}\n```\n' for line in ("x = 1", "z = 3"))
    write_files(f'{first}\n```yaml title="b.yaml"\ny: 2\n```\n\n{second}')
    assert Path("a.py").read_text() == "x = 1\nz = 3\n"
    assert Path("b.yaml").read_text() == "y: 2\n"


def test_page_head_is_read_only_from_the_beginning(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("---\nneeds: onnx, kornia\ncommands: run\n---\n# Title\n\nneeds: nothing\n")
    assert required_packages(page) == ["onnx", "kornia"]
    assert page_head(page)["commands"] == "run"
    page.write_text("# Title\n\n---\nneeds: onnx\n---\n")
    assert required_packages(page) == []


def test_every_figure_is_shown_by_a_page():
    shown = {name for page in DOCS.rglob("*.md") for name in FIGURE.findall(page.read_text(encoding="utf-8"))}
    assert shown == {path.name for path in FIGURES.glob("*")}


def test_claims_belong_to_pages():
    assert set(CLAIMS) <= set(PAGES)
    tutorials = {f"tutorials/{part}.md" for part in ("objectives", "architectures", "energy", "rotation")}
    assert {name for name in PAGES if name.startswith("tutorials/")} == tutorials


@pytest.mark.slow
def test_sharded_script_runs_under_torchrun(tmp_path):
    (tmp_path / "train.py").write_text(code_blocks(PAGES["how-to/many-classes.md"])[0], encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    match = re.search(r"2 processes, 5 of 10 classes here, accuracy (0\.\d+)", process.stdout)
    assert match, process.stdout
    assert float(match[1]) > 0.9
    state = torch.load(tmp_path / "head.pt")
    assert state["weight"].shape == (10, 16)


def test_commands_on_the_pages_exist():
    import typer.main

    from hypersphere.cli.commands import app

    group = typer.main.get_command(app)
    commands = {name: group.get_command(None, name) for name in group.list_commands(None)}
    for page in [*sorted(DOCS.rglob("*.md")), ROOT / "README.md"]:
        for block in re.findall(r"^```sh\n(.*?)^```$", page.read_text(encoding="utf-8"), re.S | re.M):
            for line in re.findall(r"^hypersphere (.*)", block, re.M):
                command, *rest = line.split("#")[0].split()
                assert command in commands, f"{page.name}: hypersphere {command}"
                options = {option for parameter in commands[command].params for option in parameter.opts}
                given = {option.split(".")[0].split("=")[0] for option in rest if option.startswith("-")}
                assert given <= options, f"{page.name}: {line}"


def test_names_in_the_table_of_symbols_exist():
    import hypersphere as hs

    rows = re.findall(r"^\|.*\|$", (DOCS / "math.md").read_text(encoding="utf-8"), re.M)
    names = [name for row in rows for name in re.findall(r"`([a-z0-9_.A-Z]+)`", row)]
    assert len(names) > 50
    for name in names:
        value = hs
        for part in name.split("."):
            value = getattr(value, part)
