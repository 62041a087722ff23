"""Jobs of 32 and 64 real processes on one machine, which lose a node: ``make rehearsal``.

A tiny model is trained in float64 over gloo, dp x cp x pp x tp, also in slices of documents. It has to have the losses
of one process that runs one document at a time. Then the same job loses a quarter of its processes by SIGKILL and
continues from its checkpoint on the others, with dp 3 instead of 4; its losses have to be the same again.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.training.distributed import RankFailure, run_ranks
from tests.training.jobs import job, read_steps, trainer_of, write_store
from tests.training.oracle import losses_of_single_documents, remembered_plans
from tests.training.processes import wait_until
from wlb.job.config import JobConfig
from wlb.packing.plan import StepPlan
from wlb.training.checkpoint.files import newest_checkpoint

STEPS, LOST_AFTER, CHECKPOINT_EVERY = 5, 3, 2
WINDOWS = {"balanced": 64, "slices": 1024, "wlb-llm": 64}  # slices have several tiles
SECONDS = 1800.0  # after which a job counts as hung
LAYOUTS = [{"dp": 4, "cp": 2, "pp": 2, "tp": 2}, {"dp": 4, "cp": 2, "pp": 4, "tp": 2}]


def _configure(folder: Path, store: Path, preset: str, layout: dict[str, Any]) -> JobConfig:
    """There are two pools, of four ranks, or with a node less of three."""
    pools = {"pool": layout["dp"] * layout["cp"] // 2} if preset != "wlb-llm" else {}
    packing: dict[str, Any] = {"global_batch": 6 * layout["pp"]} | ({"rank_micro_batches": 4} if pools else {})
    if preset == "slices":  # a global batch of two windows
        packing |= {"grouping": "slices", "global_batch": 2, "rank_micro_batches": 2 * layout["pp"]}
    return job(
        folder,
        "balanced" if pools else preset,
        model={"layers": 4, "heads": 4, "kv_heads": 2, "vocab_size": 68},
        data={"context_window": WINDOWS[preset], "store": str(store)},
        parallel=layout | pools,
        packing=packing,
        training={"steps": STEPS, "dtype": "float64", "learning_rate": 0.02, "timeout_seconds": SECONDS},
        checkpoint={"dir": str(folder / "checkpoints"), "every": CHECKPOINT_EVERY},
    )


def _train(config: JobConfig) -> tuple[int, list[StepPlan]]:
    """The number of the first step, and the plans from it on."""
    trainer = trainer_of(config)
    plans, first = remembered_plans(trainer), trainer.step + 1
    trainer.run()
    return first, plans


def _train_and_lose_a_node(config: JobConfig) -> None:
    world_size = config.parallel.layout.world_size
    for step in trainer_of(config).steps():
        if step == LOST_AFTER and dist.get_rank() >= world_size - world_size // config.parallel.dp:
            wait_until(lambda: newest_checkpoint(config.checkpoint) is not None, SECONDS)
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.exhaustive
@pytest.mark.timeout(4 * SECONDS)
@pytest.mark.parametrize("preset", WINDOWS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=["32", "64"])
def test_many_processes_have_the_losses_of_single_documents_with_a_node_less_too(tmp_path, layout, preset):
    write_store(tmp_path / "store", longest=1024 if preset == "slices" else 512)
    straight = _configure(tmp_path / "straight", tmp_path / "store", preset, layout)
    _, plans = run_ranks(straight.parallel.layout.world_size, _train, straight, seconds=SECONDS)[0]
    _check_losses(straight, tmp_path / "straight", plans)
    if preset == "slices":
        assert any(part.earlier for plan in plans for part in plan.micro_batches)
    whole = _configure(tmp_path / "killed", tmp_path / "store", preset, layout)
    with pytest.raises(RankFailure, match="died"):
        run_ranks(whole.parallel.layout.world_size, _train_and_lose_a_node, whole, seconds=SECONDS)
    fewer = _configure(tmp_path / "killed", tmp_path / "store", preset, layout | {"dp": 3})
    first, rest = run_ranks(fewer.parallel.layout.world_size, _train, fewer, seconds=SECONDS)[0]
    _check_losses(fewer, tmp_path / "killed", plans[: first - 1] + rest)


def _check_losses(config: JobConfig, folder: Path, plans: list[StepPlan]) -> None:
    losses = [row["loss"] for row in read_steps(folder)]
    assert losses == pytest.approx(losses_of_single_documents(config, plans), rel=1e-9)
