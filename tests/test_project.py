"""Properties of the repository as a whole: layers of imports, lazy loading, versions, wording."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md"]  # tests/docs runs the other pages

# Wording that readers stumble over; CONTRIBUTING.md says what to write instead.
_UNIT = "patch|row|class|layer|filter|sample|seed|step|epoch|process|number|pair|neuron|block|channel|run"
_COUNTED = "one|two|numbers?|lines?|files?|rows?|records?|bits"
IDIOMS = re.compile(
    r"\b(?:anew|beside(?!\")|so many|(?:is|are) told|told from|gone through|gone over|cannot do with|whom|does? as well"
    rf"|(?:can|to) be had|likewise|(?:{_COUNTED}) an? (?:{_UNIT}))\b",
    re.IGNORECASE,
)


def python(*arguments):
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_packages_import_only_from_lower_layers():
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_import_contract_names_every_package():
    layers = (ROOT / "pyproject.toml").read_text().split("layers = [")[1]
    rooms = set(re.findall(r"hypersphere\.(\w+)", layers))
    for path in (ROOT / "src" / "hypersphere").iterdir():
        if (path.suffix == ".py" or (path / "__init__.py").exists()) and not path.name.startswith("__"):
            assert path.stem in rooms, f"{path.stem} has no layer"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_readme_python_blocks_run(page):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)
    script = "\n".join(blocks)
    if page.name == "README.md":
        assert blocks
    if script:
        done = python("-c", script)
        assert done.returncode == 0, done.stderr


def test_help_does_not_import_torch():
    done = python("-X", "importtime", "-m", "hypersphere", "--help")
    assert done.returncode == 0
    assert "reproduce" in done.stdout
    assert not re.search(r"\| +torch$", done.stderr, re.M)


def test_import_does_not_load_torch():
    done = python("-c", "import hypersphere, sys; print('torch' in sys.modules, hypersphere.__version__)")
    assert done.stdout.split()[0] == "False"


def test_packages_load_lazily_and_unknown_names_raise():
    import hypersphere as hs

    assert hs.margin.Multiplicative is hs.functions.margin.Multiplicative
    for name in hs.__all__:
        assert getattr(hs, name) is not None
    assert dir(hs) == hs.__all__
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = hs.nonsense


def test_epsilons_and_arc_cosines_are_only_in_sphere_and_numerics():
    allowed = [ROOT / "src" / "hypersphere" / name for name in ("sphere.py", "_numerics.py")]
    for path in (ROOT / "src").rglob("*.py"):
        if path in allowed or "recipes" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            tiny = isinstance(node, ast.Constant) and isinstance(node.value, float) and 0 < abs(node.value) < 1e-6
            forbidden = isinstance(node, ast.Attribute) and node.attr in {"acos", "arccos", "acos_", "normalize", "eps"}
            # `layer.eps` is the option of a BatchNorm layer.
            is_ours = forbidden and isinstance(node.value, ast.Name) and node.value.id in ("sphere", "config", "layer")
            # `self.normalize` is an option of a rotation.
            is_ours |= forbidden and ast.unparse(node) == "self.normalize"
            assert not tiny, f"{path.name}:{node.lineno} has an epsilon"
            assert not forbidden or is_ours, f"{path.name}:{node.lineno} uses {node.attr}"


def test_version_is_the_same_everywhere():
    import hypersphere as hs

    for page in ("pyproject.toml", "CITATION.cff"):
        assert re.search(rf"^version(:| =) \"?{re.escape(hs.__version__)}\"?$", (ROOT / page).read_text(), re.M), page


def test_dependencies_are_as_decided():
    project = (ROOT / "pyproject.toml").read_text()
    assert '"torch>=2.10"' in project  # a range, because users install the build for their hardware
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()
    for excluded in ("torchvision", "timm", "torchattacks", "advertorch"):
        assert excluded not in project


def test_texts_avoid_idioms():
    paths = [ROOT / "README.md"]
    paths += [path for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py")]
    paths += (ROOT / "docs").rglob("*.md")
    offenders = []
    for path in sorted(paths):
        name = path.relative_to(ROOT).as_posix()
        if path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            offenders += [f"{name}:{number}: {match.group()!r}" for match in IDIOMS.finditer(line)]
    assert not offenders, "\n".join(offenders)
