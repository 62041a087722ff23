"""A mistake that only one rank can see ends all of them, at once and in the same words."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.training.distributed import run_ranks
from wlb.errors import UserError
from wlb.runtime.collectives import agreeing_group, device_of, gathered, gathered_rows, on_every_rank


def _check(wrong: int) -> str:
    def check() -> str:
        if dist.get_rank() >= wrong:
            raise UserError(f"rank {dist.get_rank()} has no disk")
        return f"rank {dist.get_rank()} is fine"

    try:
        return on_every_rank(check)
    except UserError as error:
        return str(error)


def test_the_first_problem_is_every_ranks():
    assert run_ranks(3, _check, 1) == ["rank 1 has no disk"] * 3


def test_without_a_problem_every_rank_gets_its_own_result():
    assert run_ranks(2, _check, 2) == ["rank 0 is fine", "rank 1 is fine"]


def _ranks() -> tuple[list[int], list[list[int]]]:
    rank = dist.get_rank()
    return gathered(rank), gathered_rows([rank, 2**62 + rank], torch.int64, torch.device("cpu")).tolist()


def test_values_are_gathered_in_rank_order():
    assert run_ranks(2, _ranks) == [([0, 1], [[0, 2**62], [1, 2**62 + 1]])] * 2


def _agreeing() -> list[Any]:
    half = dist.new_group([0, 1])
    groups = [agreeing_group(), agreeing_group(half)]
    assert [agreeing_group(), agreeing_group(half)] == groups
    assert not {*groups} & {dist.group.WORLD, half}
    training: Any = dist.group.WORLD
    limits = [group._get_backend(torch.device("cpu")).options._timeout for group in (training, groups[0])]
    assert limits[0] == limits[1]
    return [(dist.get_backend(group), gathered(dist.get_rank(), group)) for group in groups]


def test_processes_agree_beside_the_group_that_trains():
    assert run_ranks(2, _agreeing) == [[("gloo", [0, 1])] * 2] * 2


@pytest.mark.parametrize(
    ("backends", "device"), [("cuda:nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cuda"), ("cpu:gloo,cuda:gloo", "cpu")]
)
def test_a_group_with_nccl_exchanges_on_the_gpu(backends: str, device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    assert device_of(None).type == device
