"""Properties of all commands: help, error messages and exit codes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from hypersphere import recipes
from hypersphere.cli import opening
from hypersphere.cli.commands import app

GROUP = typer.main.get_command(app)
COMMANDS = {name: GROUP.get_command(None, name) for name in GROUP.list_commands(None)}


def words(text):
    """Return the words of a help text without line breaks."""
    return " ".join(text.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_every_text_unchanged(name, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    code, out, _ = command(name, "--help")
    assert code == 0
    shown = words(out)
    assert words(COMMANDS[name].help) in shown
    for parameter in COMMANDS[name].params:
        text = getattr(parameter, "help", None)
        if text:
            assert words(text) in shown, parameter.name


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_complete_option_names_on_a_narrow_terminal(name, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = command(name, "--help")[1]
    assert max(map(len, shown.splitlines())) <= 80
    for parameter in COMMANDS[name].params:
        for option in (*parameter.opts, *parameter.secondary_opts) if parameter.param_type_name == "option" else ():
            assert option in shown.replace("/", " ").replace(",", " ").split(), option


@pytest.mark.parametrize("name", COMMANDS)
def test_docs_page_lists_every_option(name):
    page = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {name}\n(.*?)^## ", page, re.S | re.M)[1]
    words = re.sub("```.*?```", "", section, flags=re.S)
    assert len(words.split()) > 10  # the section has text, not only code
    options = {word for parameter in COMMANDS[name].params for word in parameter.opts if word.startswith("--")}
    for option in options - {"--help"}:
        assert f"`{option}`" in section if name != "cite" else option in section, option


def test_docs_page_names_every_extra_and_dependency():
    tomllib = pytest.importorskip("tomllib")  # new in Python 3.11
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (root / "docs" / "index.md").read_text(encoding="utf-8")
    for extra in project["optional-dependencies"]:
        assert f"`{extra}`" in page or f"[{extra}]" in page or extra == "dev", extra
    for package in project["dependencies"]:
        assert re.match(r"[a-z]+", package)[0] in page, package


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_overview_lists_all_commands_without_importing_them(arguments):
    code = "import runpy, sys; sys.argv = ['hypersphere', *{}]\n"
    code += "try: runpy.run_module('hypersphere', run_name='__main__')\n"
    code += "finally: print(sorted(name for name in sys.modules if name.startswith(('rich', 'hypersphere.cli.'))))"
    done = subprocess.run([sys.executable, "-c", code.format(arguments)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.findall(r"^  (\w+) +\S", done.stdout.partition("Commands:")[2], re.M) == list(COMMANDS)
    assert done.stdout.splitlines()[-1] == "['hypersphere.cli.commands', 'hypersphere.cli.output']"


def test_pack_prints_one_shard_in_the_singular(draw_images, command, tmp_path):
    draw_images(tmp_path / "images", {f"{kind}/{n}.png": 9 * n for kind in "ab" for n in range(2)})
    assert command("pack", tmp_path / "images", "--out", tmp_path / "packed")[1].startswith("1 shard with ")


def test_help_shows_brackets_in_the_format_of_pairs(command):
    assert "`name name 0|1 [fold]`" in words(command("evaluate", "--help")[1])


def test_help_of_commands_does_not_import_torch():
    names = list(COMMANDS)
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from hypersphere.cli.commands import app\n"
        f"for name in {names}:\n"
        "    assert 'Usage' in CliRunner().invoke(app, [name, '--help']).output, name\n"
        "assert 'torch' not in sys.modules\n"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


@pytest.fixture
def empty_run(tmp_path):
    """A folder that `is_run` accepts, but that cannot be opened."""
    (tmp_path / "config.json").touch()
    return tmp_path


def fail_with(error):
    def fail(*_, **__):
        raise error

    return fail


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("evaluate", "interrupted"),
        ("export", "interrupted"),
        ("inspect", "interrupted"),
        ("reproduce", "interrupted; finished rows are kept"),
    ],
)
def test_interrupt_message_mentions_kept_rows_only_for_reproduce(name, line, plain, fails, monkeypatch):
    monkeypatch.setattr(opening, "open_run", fail_with(KeyboardInterrupt()))
    monkeypatch.setattr(recipes, "execute", fail_with(KeyboardInterrupt()))
    assert fails(130, name, "digits" if name == "reproduce" else plain.folder) == f"hypersphere: {line}\n"


@pytest.mark.parametrize(("module", "line"), [("typer", ["--version"]), ("torch", ["evaluate", "."])])
def test_interrupt_during_import_is_one_line(module, line, tmp_path):
    (tmp_path / f"{module}.py").write_text("raise KeyboardInterrupt")
    done = subprocess.run(
        [sys.executable, "-m", "hypersphere", *line],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "hypersphere: interrupted\n")


FULL = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "out of memory; try a smaller number of --pairs"),
        (
            RuntimeError(f"{FULL}4000000000000 bytes. Error code 12 (Cannot allocate memory)\nmore"),
            "out of memory (could not allocate 4000000000000 bytes); try a smaller number of --pairs",
        ),
        (
            RuntimeError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"),
            "out of memory (could not allocate 2.50 GiB); try a smaller number of --pairs",
        ),
    ],
)
def test_out_of_memory_is_one_line_with_advice(error, line, fails, monkeypatch, empty_run):
    monkeypatch.setattr(opening, "open_run", fail_with(error))
    assert fails(1, "evaluate", empty_run) == f"hypersphere: {line}\n"
    monkeypatch.setattr(recipes, "execute", fail_with(error))
    assert fails(1, "reproduce").endswith("; try a machine with more memory\n")


def test_out_of_memory_of_torch_is_recognised(fails, monkeypatch, empty_run):
    import torch

    monkeypatch.setattr(opening, "open_run", lambda *_, **__: torch.empty(2**60, dtype=torch.uint8))
    assert "out of memory" in fails(1, "evaluate", empty_run)


def test_unexpected_errors_are_raised(command, monkeypatch, empty_run):
    monkeypatch.setattr(opening, "open_run", fail_with(RuntimeError("a mistake")))
    with pytest.raises(RuntimeError, match="a mistake"):
        command("evaluate", empty_run)


def test_control_characters_in_names_are_escaped(fails, tmp_path):
    line = fails(2, "evaluate", tmp_path / "evil\x1b[31m\x07.npy")
    assert "\x1b" not in line
    assert "evil\\x1b[31m\\x07.npy not found" in line


def test_missing_data_message_names_the_command_line_option(fails, monkeypatch, tmp_path):
    monkeypatch.delenv("HYPERSPHERE_DATA", raising=False)
    line = fails(2, "reproduce", "omniglot", "--out", tmp_path)
    assert line.startswith("hypersphere: no data folder: pass --data-root or set the environment variable")
    line = fails(2, "reproduce", "omniglot", "--data-root", tmp_path / "none", "--out", tmp_path)
    assert line == f"hypersphere: --data-root must be an existing folder, not {str(tmp_path / 'none')!r}\n"


def test_reproduce_suggests_the_nearest_recipe(fails):
    assert "not 'digts'; did you mean digits?" in fails(2, "reproduce", "digts")


@pytest.mark.parametrize("name", ["embed", "export", "report", "evaluate", "inspect", "fold", "attack", "cite"])
@pytest.mark.parametrize("kind", ["missing", "folder", "file"])
def test_commands_name_the_path_that_is_not_a_run(name, kind, fails, tmp_path):
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
    if kind == "file":
        path.write_text("no run")
    accepted = "RUN must be the folder of a run of `hypersphere train` (with a config.json)"
    line = fails(2, name, path)
    if (name, kind) == ("inspect", "file"):
        assert f"must be a .safetensors file or one of .pt, .pth, .bin, .ckpt, not '{path}'" in line
    else:
        assert line.startswith(f"hypersphere: {accepted}")
        assert line.endswith(f", not {str(path)!r}{', which does not exist' * (kind == 'missing')}\n")
