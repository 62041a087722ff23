"""The order of operations is torch's own: what its schedules run, not what they print."""

from types import SimpleNamespace
from typing import Any

import pytest

from wlb.errors import UserError
from wlb.schedules.operations import BACKWARD, FORWARD, Operation, rank_operations

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

SHAPES = [(1, 1), (1, 4), (2, 2), (2, 6), (4, 4), (4, 8), (8, 8), (3, 7)]


class _RecordingStage:
    """Stands where torch expects a pipeline stage; computes and sends nothing, remembers the calls."""

    def __init__(self, index: int, stages: int) -> None:
        self.stage_index = index
        self.num_stages = stages
        self.is_last = index == stages - 1
        self.has_backward = True
        self.device = "cpu"
        self.calls: list[Operation] = []

    def forward_one_chunk(self, micro_batch: int, *_: Any, **__: Any) -> None:
        self.calls.append(Operation(self.stage_index, micro_batch, FORWARD))

    def backward_one_chunk(self, micro_batch: int, **_: Any) -> None:
        self.calls.append(Operation(self.stage_index, micro_batch, BACKWARD))

    def _no_transfers(self, micro_batch: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _no_transfers

    def perform_reduce_grad(self, _: int) -> None:
        pass

    def release_fwd_send_outputs(self, _: int) -> None:
        """Called since torch 2.15."""


def _calls_of_torch(pp: int, micro_batches: int, rank: int) -> list[Operation]:
    stage = _RecordingStage(rank, pp)
    schedule = schedules.Schedule1F1B(stage, micro_batches)
    schedule._initialize_stage = lambda *_: None
    schedule._step_microbatches([()] * micro_batches, [{}] * micro_batches)
    return stage.calls


@pytest.mark.parametrize(("pp", "micro_batches"), SHAPES)
def test_1f1b_runs_in_the_order_of_torch(pp, micro_batches):
    for rank, operations in enumerate(rank_operations("1f1b", pp, micro_batches)):
        assert list(operations) == _calls_of_torch(pp, micro_batches, rank)


@pytest.mark.parametrize("virtual_stages", [2, 3, 4])
@pytest.mark.parametrize(
    ("pp", "rounds", "more"), [(1, 3, 0), (2, 1, 0), (2, 3, 0), (4, 1, 0), (4, 1, 3), (4, 2, 0), (4, 2, 1), (8, 4, 0)]
)
def test_interleaved_runs_in_the_order_of_torch(pp, rounds, more, virtual_stages):
    """``more`` micro-batches in a round than ranks; there are too few for another round."""
    micro_batches = (pp + more) * rounds
    torch_schedule = SimpleNamespace(
        n_local_stages=virtual_stages,
        pp_group_size=pp,
        microbatches_per_round=pp + more,
        _n_microbatches=micro_batches,
    )
    for rank, operations in enumerate(rank_operations("interleaved_1f1b", pp, micro_batches, virtual_stages)):
        actions = schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations(torch_schedule, rank)
        kinds = {schedules.FORWARD: FORWARD, schedules.FULL_BACKWARD: BACKWARD}
        expected = [Operation(a.stage_index, a.microbatch_index, kinds[a.computation_type]) for a in actions if a]
        assert list(operations) == expected


def test_interleaving_one_stage_is_1f1b():
    """So the trainer runs it, with any number of micro-batches."""
    assert rank_operations("interleaved_1f1b", 4, 6, 1) == rank_operations("1f1b", 4, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zero_bubble", 2, 2, 1), "choose from auto, 1f1b, interleaved_1f1b"),
        (("1f1b", 2, 4, 2), "use 'interleaved_1f1b'"),
        (("interleaved_1f1b", 4, 9, 2), "rounds of at least pp = 4; 9 micro-batches cannot be divided into 2"),
    ],
)
def test_mistakes_are_named_in_one_line(arguments, message):
    with pytest.raises(UserError, match=message) as caught:
        rank_operations(*arguments)
    assert "\n" not in str(caught.value)
