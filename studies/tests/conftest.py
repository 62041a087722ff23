"""Fixtures of the tests of ``wlb`` that these tests use too."""

from tests.conftest import kernels_launched_at_once

__all__ = ["kernels_launched_at_once"]
