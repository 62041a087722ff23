"""Planned steps under Accelerate: exact on two processes, and what would step or divide otherwise is refused."""

import os
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist

from tests.integrations.test_packed import SIZES, Bigrams, error_of, mixed
from tests.training.distributed import run_ranks
from wlb.errors import UserError
from wlb.integrations.accelerate import balanced_steps


def _errors(own_lists: bool) -> tuple[list[float], int, list[str]]:
    """Of each step's gradients, how often they were reduced, and what is said of a loop with ``accumulate``."""
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="0")
    accelerator = accelerate.Accelerator(cpu=True)
    settings: dict[str, Any] = SIZES | {"own_lists": own_lists}
    model = Bigrams()
    with pytest.raises(UserError) as unprepared:
        balanced_steps(accelerator, model, mixed(), **settings)
    trained, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.0))
    reduced: list[int] = []
    trained.register_comm_hook(reduced, lambda state, bucket: _counted(state, bucket))
    errors: list[float] = []
    planning, again, untrained = (balanced_steps(accelerator, trained, mixed(), **settings) for _ in range(3))
    steps = balanced_steps(accelerator, trained, mixed(), **settings, calibrate=1000)
    for step in steps:
        for batch in step:
            accelerator.backward(batch.loss(trained(batch.tokens)))
        errors.append(error_of(model, next(planning._planned), averaged=True))
        optimizer.step()
        optimizer.zero_grad()
    assert steps.state_dict(step) == steps.state_dict()
    assert steps.calibration is not None
    assert steps.calibration.state_dict()["steps"] == len(errors)
    accelerator.register_for_checkpointing(again)

    def trains(step: Any, skipped: Any = None) -> None:
        for batch in step:
            if batch is not skipped:
                accelerator.backward(batch.loss(trained(batch.tokens)))

    def scores(step: Any) -> None:
        for batch in step:
            with torch.no_grad():
                trained(batch.tokens)

    told = [unprepared]
    for early in (
        partial(_accumulated, accelerator, trained),
        list,
        lambda step: [trained(batch.tokens) for batch in step],
        scores,
        lambda step: trains(step, step.batches[-1]),
        lambda step: next(iter(step)) and again.state_dict(),
        lambda step: next(iter(step)) and list(next(again)),
    ):
        state = again.state_dict()
        with pytest.raises(UserError) as ahead:
            early(next(again))
        told.append(ahead)
        optimizer.zero_grad()
        again.load_state_dict(state)
    for step in (again_and_again := next(again), again_and_again):
        trains(step)
        errors.append(error_of(model, next(untrained._planned), averaged=True))
        untrained.load_state_dict(state)
    accelerator.prepare(torch.optim.lr_scheduler.LinearLR(optimizer))
    with pytest.raises(UserError) as scheduled:
        trains(next(again))
    return errors, len(reduced), [str(error.value) for error in (*told, scheduled)]


def _accumulated(accelerator: Any, model: Any, step: Any) -> None:
    for batch in step:
        with accelerator.accumulate(model):
            accelerator.backward(batch.loss(model(batch.tokens)))


def _counted(reduced: list[int], bucket: Any) -> Any:
    reduced.append(1)
    done = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return done.then(lambda future: future.value()[0] / dist.get_world_size())


@pytest.mark.proves("Accelerate")
@pytest.mark.parametrize("own_lists", [False, True])
def test_the_gradients_of_a_step_are_those_of_single_documents_and_reduced_once(own_lists: bool):
    for errors, reduced, (unprepared, accumulated, *early, saved, left, scheduled) in run_ranks(2, _errors, own_lists):
        assert len(errors) > 5
        assert all(error < 1e-12 for error in errors)
        assert reduced == len(errors)
        assert "the model is a Bigrams; give the model that accelerator.prepare returns" in unprepared
        assert "accelerator.accumulate steps after every batch" in accumulated
        assert {*early} == {"the previous batch had no backward yet; loop over step, and not over list(step)"}
        assert saved == left
        assert re.fullmatch(
            r"a step was left before its end, .* not reduced; loop over all of it, or load a state.*", left
        )
        assert scheduled.startswith("a scheduler that Accelerate prepared steps 2 times a step, once for each process;")


def test_what_does_not_leave_steps_to_the_loop_is_refused():
    engine = type("DeepSpeedEngine", (Bigrams,), {})()
    for model, size, message in (
        (engine, 1, "is a DeepSpeedEngine"),
        (Bigrams(), 2, "parallelism_config has tp"),
    ):
        sizes = SimpleNamespace(non_data_parallel_size=size)
        with pytest.raises(UserError, match=message):
            balanced_steps(SimpleNamespace(num_processes=1, parallelism_config=sizes), model, mixed(), **SIZES)
