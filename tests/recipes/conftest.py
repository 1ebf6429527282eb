"""Records that several tests read."""

import pytest


@pytest.fixture(scope="session")
def smoke_folder(tmp_path_factory):
    """A folder for records at the smoke scale without overrides: `execute` trains a row once and then reads it."""
    return tmp_path_factory.mktemp("smoke")
