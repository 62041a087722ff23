"""Options of the test suite."""

from __future__ import annotations

import pytest
from hypothesis import settings

# A deadline is an assertion about time, and fails on a busy machine.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-layouts", action="store_true", help="tests/training/test_equivalence.py: every layout of up to 8 ranks"
    )
