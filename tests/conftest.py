"""Options of the test suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-layouts", action="store_true", help="tests/training/test_equivalence.py: every layout of up to 8 ranks"
    )
