"""Jobs of these tests are small."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def small_jobs(kernels_launched_at_once: None) -> None:
    """Their kernels take no time to launch."""
