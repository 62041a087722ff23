"""Stages of a pipeline can send every message, in any order of operations, wherever its heads are dealt."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.limits import examples
from tests.schedules.by_chance import operations_by_chance
from tests.training.order.calls import STAGES, Call, CallLog
from tests.training.order.fake_rank import StepWatcher, fake_process_group
from tests.training.order.order import OrderError, check_order
from wlb.runtime.stage import PlannedStage, pipeline, run_order
from wlb.schedules.operations import HEAD, RankOperations

WIDTH = 4


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, 1) * self.scale if x.dim() == 1 else x * self.scale


def calls_of(
    of_ranks: dict[int, RankOperations], per_rank: int, rows: list[int], deals_head: bool
) -> dict[int, list[Call]]:
    """The messages of each rank that runs its lists of ``of_ranks``, which should be the same for all."""
    calls, pp, device = {}, len(of_ranks), torch.device("cpu")
    for rank, operations in of_ranks.items():
        log = CallLog()
        with (
            fake_process_group(rank, pp),
            log.listening(),
            StepWatcher(log),
            FakeTensorMode(allow_non_fake_inputs=True),
        ):
            stages = [
                PlannedStage(Part(), stage, pp * per_rank, width=WIDTH, device=device, dtype=torch.float32)
                for stage in range(rank, pp * per_rank, pp)
            ]
            pipe = pipeline(stages, len(rows), lambda x, _: x.sum(), deals_head=deals_head)
            tokens = [torch.zeros(count) for count in rows]
            run_order(pipe, operations, tokens, rows, [{}] * len(rows), [None] * len(rows))
        calls[rank] = [call for call in log.calls if call.purpose == STAGES]
    return calls


@settings(max_examples=examples(20), deadline=None)
@given(
    seed=st.integers(0, 10_000),
    pp=st.sampled_from([2, 3, 4]),
    per_rank=st.sampled_from([1, 2]),
    count=st.integers(1, 6),
    deals_head=st.booleans(),
)
def test_every_message_of_any_lists_can_be_sent(
    seed: int, pp: int, per_rank: int, count: int, deals_head: bool
) -> None:
    operations = operations_by_chance(seed, pp, per_rank, count, deals_head=deals_head)
    heads = [rank for rank, of_rank in enumerate(operations) for one in of_rank if one.kind == HEAD]
    calls = calls_of(dict.fromkeys(range(pp), operations), per_rank, [*range(1, 1 + count)], deals_head)
    travelling = count * (pp * per_rank - 1) + sum(rank != pp - 1 for rank in heads)
    assert sum(call.operation == "send" for of_rank in calls.values() for call in of_rank) == 2 * travelling
    assert check_order(calls) == 4 * travelling


def test_ranks_that_deal_heads_by_other_lists_wait_for_each_other() -> None:
    one, other = (operations_by_chance(seed, 4, 1, 6, deals_head=True) for seed in (0, 1))
    check_order(calls_of(dict.fromkeys(range(4), one), 1, [*range(1, 7)], True))
    with pytest.raises(OrderError):
        check_order(calls_of({0: one, 1: one, 2: one, 3: other}, 1, [*range(1, 7)], True))
