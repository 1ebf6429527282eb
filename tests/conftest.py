"""Shared by all tests: checked shapes, seeded random numbers, and one browser per worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import shape_checks
import torch
from report.browser import MISSING, Browser, find_chromium

# Done while pytest loads this file, before the test modules import the functions that are wrapped.
shape_checks.enforce()


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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at the end how many browser tests were skipped and how to enable them."""
    reasons = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", ()) if report.longrepr]
    count = sum(MISSING in reason for reason in reasons)
    if count:
        terminalreporter.write_line(f"{count} browser tests were skipped. {MISSING}", yellow=True, bold=True)
