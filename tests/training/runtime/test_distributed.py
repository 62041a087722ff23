"""The harness itself: results come back in rank order, and no failure goes unseen or hangs."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.limits import HUNG_SECONDS
from tests.training.distributed import RankFailure, run_ranks


def _sum_of_ranks(offset: int) -> tuple[int, int]:
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def _fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("the reason")
    dist.barrier()


def _die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    time.sleep(HUNG_SECONDS)


def test_results_come_back_in_rank_order() -> None:
    assert run_ranks(3, _sum_of_ranks, 10) == [(0, 33), (1, 33), (2, 33)]


def test_a_failing_rank_fails_the_call_with_its_traceback() -> None:
    with pytest.raises(RankFailure, match="the reason"):
        run_ranks(2, _fail_on_rank_1)


def test_a_dying_rank_fails_the_call() -> None:
    with pytest.raises(RankFailure, match="rank 1 died"):
        run_ranks(2, _die_on_rank_1)


def test_a_rank_that_takes_too_long_fails_the_call() -> None:
    with pytest.raises(RankFailure, match="ran out of time"):
        run_ranks(1, time.sleep, 60, seconds=2)
