"""A benchmark as the module that it is, for the test file that has its name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    name = request.module.__name__.rpartition(".test_")[2]
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module(name)
    sys.modules.pop(name)
