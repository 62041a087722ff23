from __future__ import annotations

import os
import signal
import time

import pytest

from wlb.documents.prepare.processes import _IN_FLIGHT, map_in_order
from wlb.errors import UserError


def slow_for_early(number):
    time.sleep(0.05 if number < 2 else 0)
    return number * number


def refuse_seven(number):
    if number == 7:
        raise UserError("seven is refused")
    return number


def die(number):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_order_and_items_are_taken_as_needed(workers):
    taken = []

    def items():
        for number in range(40):
            taken.append(number)
            yield number

    for position, result in enumerate(map_in_order(slow_for_early, items(), workers)):
        assert result == position * position
        assert len(taken) <= position + _IN_FLIGHT * workers
    assert taken == list(range(40))


@pytest.mark.parametrize("workers", [1, 2])
def test_errors_of_the_function_are_raised_here(workers):
    results = map_in_order(refuse_seven, range(100), workers)
    with pytest.raises(UserError, match="seven is refused"):
        list(results)


def test_a_killed_worker_is_one_clear_line():
    with pytest.raises(UserError, match=r"worker process was killed.*--workers"):
        list(map_in_order(die, range(3), 2))
