"""The worked example in the docstring of ``locality``; ``test_batch`` checks its counts against those of plans."""

import doctest

from wlb.sharding import pieces


def test_the_worked_example():
    results = doctest.testmod(pieces)
    assert results.attempted
    assert not results.failed
