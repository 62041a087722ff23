"""Options of the test suite."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from tests.limits import EXHAUSTIVE_EXAMPLES, USUAL_EXAMPLES

# A deadline is an assertion about time, and fails on a busy machine; so does the check that drawing examples is quick.
ANY_TIME = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("usual", ANY_TIME, max_examples=USUAL_EXAMPLES)
settings.register_profile("exhaustive", ANY_TIME, max_examples=EXHAUSTIVE_EXAMPLES)
settings.load_profile("usual")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-layouts", action="store_true", help="tests/training/test_equivalence.py: every layout of up to 8 ranks"
    )
