"""The folder of a small job."""

from pathlib import Path

import pytest

from tests.training.jobs import write_store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the store of a small job."""
    write_store(tmp_path / "store")
    return tmp_path
