"""One thread in the test process too: models this small lose far more to thread switches than threads win."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training.jobs import write_store

torch.set_num_threads(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the store of a small job."""
    write_store(tmp_path / "store")
    return tmp_path
