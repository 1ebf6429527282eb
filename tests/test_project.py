"""What holds for the repository as a whole."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md"]  # the others are run by tests/docs


def python(*words, **more):
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=300, **more)


def test_rooms_import_only_what_lies_below():
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_room_is_in_the_import_contract():
    layers = (ROOT / "pyproject.toml").read_text().split("layers = [")[1]
    rooms = set(re.findall(r"hypersphere\.(\w+)", layers))
    for path in (ROOT / "src" / "hypersphere").iterdir():
        if (path.suffix == ".py" or (path / "__init__.py").exists()) and not path.name.startswith("__"):
            assert path.stem in rooms, f"{path.stem} has no layer"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_of_the_pages_run(page):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)
    script = "\n".join(blocks)
    if page.name == "README.md":
        assert blocks
    if script:
        done = python("-c", script)
        assert done.returncode == 0, done.stderr


def test_help_answers_without_torch():
    done = python("-X", "importtime", "-m", "hypersphere", "--help")
    assert done.returncode == 0
    assert "reproduce" in done.stdout
    assert not re.search(r"\| +torch$", done.stderr, re.M)


def test_import_loads_nothing_heavy():
    done = python("-c", "import hypersphere, sys; print('torch' in sys.modules, hypersphere.__version__)")
    assert done.stdout.split()[0] == "False"


def test_rooms_are_found_lazily_and_unknown_ones_are_not():
    import hypersphere as hs

    assert hs.margin.Multiplicative is hs.functions.margin.Multiplicative
    for name in hs.__all__:
        assert getattr(hs, name) is not None
    assert dir(hs) == hs.__all__
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = hs.nonsense


def test_only_the_sphere_has_epsilons_and_arc_cosines():
    allowed = [ROOT / "src" / "hypersphere" / name for name in ("sphere.py", "_numerics.py")]
    for path in (ROOT / "src").rglob("*.py"):
        if path in allowed or "recipes" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            tiny = isinstance(node, ast.Constant) and isinstance(node.value, float) and 0 < abs(node.value) < 1e-6
            forbidden = isinstance(node, ast.Attribute) and node.attr in {"acos", "arccos", "acos_", "normalize", "eps"}
            theirs = forbidden and isinstance(node.value, ast.Name) and node.value.id == "sphere"
            assert not tiny, f"{path.name}:{node.lineno} has an epsilon"
            assert not forbidden or theirs, f"{path.name}:{node.lineno} uses {node.attr}"


def test_the_version_is_said_alike_everywhere():
    import hypersphere as hs

    for page in ("pyproject.toml", "CITATION.cff"):
        assert re.search(rf"^version(:| =) \"?{re.escape(hs.__version__)}\"?$", (ROOT / page).read_text(), re.M), page


def test_unwanted_packages_stay_out():
    project = (ROOT / "pyproject.toml").read_text()
    assert '"torch>=2.10"' in project  # a range: users bring their own build
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()
    for unwanted in ("torchvision", "timm", "torchattacks", "advertorch"):
        assert unwanted not in project
