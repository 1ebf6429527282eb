"""Build the distributions, install the wheel into an environment with only the core dependencies, and use it there.

Nothing here needs a network: hatchling is part of the development environment, and the core dependencies of the clean
environment are links to the packages that are already installed.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import hypersphere as hs

ROOT = Path(__file__).parent.parent
EXTRAS = ("sklearn", "PIL", "altair", "vl_convert", "onnx", "tensorboard", "beartype", "pytest")

FORWARD_AND_BACKWARD = """
import torch, hypersphere as hs
head = hs.heads.arcface(8, 5)
x = torch.randn(4, 8, requires_grad=True)
loss = head(x, torch.tensor([0, 1, 2, 3]))
loss.backward()
assert torch.isfinite(loss) and x.grad.abs().sum() > 0 and head.weight.grad.abs().sum() > 0
print(hs.__version__, hs.__file__)
"""


def run(*command: object, folder: Path) -> str:
    """Run a command without the variables that would let it see this checkout; return its output."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "PYTEST_ADDOPTS")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source: Path, target: Path) -> None:
    # The interpreter of the tests finds hatchling; its environment is kept.
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def core_distributions() -> list[importlib.metadata.Distribution]:
    """Return the installed distributions that the package needs without extras, directly or indirectly."""
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("\ndependencies = [")[1].split("]")[0]
    pending = [Requirement(text.strip(' "\n')) for text in declared.split(",")]
    closure: dict[str, importlib.metadata.Distribution] = {}
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        if name not in closure:
            closure[name] = importlib.metadata.distribution(requirement.name)
            needed = map(Requirement, closure[name].requires or ())
            pending += [r for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
    return list(closure.values())


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the paths of the wheel and of the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def clean_python(tmp_path_factory: pytest.TempPathFactory, distributions: tuple[Path, Path]) -> Path:
    """Return the interpreter of an environment that holds the wheel and the core dependencies, and nothing else."""
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", folder=folder)
    python = folder / "venv" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder).strip())
    for distribution in core_distributions():
        for entry in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / entry).exists():
                (site / entry).symlink_to(Path(str(distribution.locate_file(entry))).resolve())
    options = ("--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", "-q")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, distributions[0], folder=folder)
    return python


def test_distributions_have_the_name_and_version_of_the_project(distributions):
    wheel, sdist = distributions
    assert wheel.name == f"torch_hypersphere-{hs.__version__}-py3-none-any.whl"
    assert sdist.name == f"torch_hypersphere-{hs.__version__}.tar.gz"


def test_wheel_holds_the_sources_and_nothing_else(distributions):
    packed = {name for name in zipfile.ZipFile(distributions[0]).namelist() if ".dist-info/" not in name}
    package = ROOT / "src" / "hypersphere"
    files = {path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert packed == {path.relative_to(package.parent).as_posix() for path in files}


def test_source_distribution_builds_the_same_wheel(distributions, tmp_path):
    wheel, sdist = distributions
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert {"tests", "docs", "run", "LICENSE"} <= {path.name for path in source.iterdir()}
    build(source, tmp_path / "again")
    (rebuilt,) = (tmp_path / "again").glob("*.whl")
    assert zipfile.ZipFile(rebuilt).namelist() == zipfile.ZipFile(wheel).namelist()


def test_clean_environment_has_no_extras(clean_python, tmp_path):
    script = f"import importlib.util as u; print([name for name in {EXTRAS!r} if u.find_spec(name)])"
    assert run(clean_python, "-c", script, folder=tmp_path).strip() == "[]"


@pytest.mark.slow
def test_installed_head_computes_a_loss_and_gradients(clean_python, tmp_path):
    version, path = run(clean_python, "-c", FORWARD_AND_BACKWARD, folder=tmp_path).split()
    assert version == hs.__version__
    assert Path(path).is_relative_to(clean_python.parent.parent)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "expected"), [(["--help"], "reproduce"), (["list"], "arcface")])
def test_installed_command_answers(clean_python, tmp_path, words, expected):
    assert expected in run(clean_python.parent / "hypersphere", *words, folder=tmp_path)
