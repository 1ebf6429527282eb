"""Shared by all tests: shape checks, random seeds, an empty compiler cache, one browser per worker, and the order."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import shape_checks
import torch
from report.browser import MISSING, Browser, find_chromium

# Done while pytest loads this file, before the test modules import the functions that are wrapped.
shape_checks.enforce()

# Files with tests of several seconds, mostly of other processes. They run first: a long test at the end would leave the
# other workers idle.
LONG_FILES = (
    "tests/cli/test_train_processes.py",
    "tests/training/test_foreign_job.py",
    "tests/training/test_checkpoint.py",
    "tests/training/test_distributed.py",
    "tests/training/test_trainer.py",
    "tests/docs/",
    "tests/examples/",
    "tests/test_packaging.py",
    "tests/recipes/test_execution.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the tests of `LONG_FILES` to the front; their order and that of the others stays the same."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG_FILES))


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Seed PyTorch before each test, so that its outcome does not depend on the tests that ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A headless Chromium; a test that asks for it is skipped where there is none."""
    if find_chromium() is None:
        pytest.skip(MISSING)
    with Browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


def pytest_unconfigure(config: pytest.Config) -> None:
    """Say in the last lines of the output how many browser tests were skipped and how to enable them."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = () if reporter is None else reporter.stats.get("skipped", ())
    count = sum(MISSING in str(report.longrepr) for report in skipped)
    if count:
        reporter.write_line(f"\n{count} browser tests were skipped. {MISSING}", yellow=True, bold=True)


@pytest.fixture(autouse=True)
def _reset_compiler() -> None:
    """Remove the graphs that earlier tests compiled, which count towards the limit of recompilations."""
    if "torch._dynamo" in sys.modules:  # nothing has been compiled before this import, which is slow
        torch.compiler.reset()
