"""Options of the test suite."""

from __future__ import annotations

import pytest
from hypothesis import settings

# A deadline is an assertion about time, and fails on a busy machine.
settings.register_profile("usual", deadline=None, max_examples=60)
settings.register_profile("exhaustive", deadline=None, max_examples=300)
settings.load_profile("usual")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-layouts", action="store_true", help="tests/training/test_equivalence.py: every layout of up to 8 ranks"
    )
