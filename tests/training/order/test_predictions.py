"""The memory model, and the bytes that the simulator prices, against fake ranks of large jobs."""

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.order.calls import GRADIENTS, KEYS_AND_VALUES, STAGES, TENSOR_PARALLEL, WEIGHTS
from tests.training.order.fake_rank import RankRun, run_fake_ranks
from wlb.job.config_file import load_config
from wlb.job.job import Job
from wlb.job.memory.fit import predicted_memory
from wlb.job.memory.layers import Exchange
from wlb.job.memory.walk import Walk
from wlb.sharding.latency import Shards
from wlb.simulate.costs import JobCosts
from wlb.simulate.rate import simulate_steps
from wlb.training.dry_run import find_problems
from wlb.workload.links import Link

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
OF_FOUR_LAYERS = ("7b_128k", "model.layers=4", "packing.global_batch=4")
LARGE = (*OF_FOUR_LAYERS, "packing.grouping=even", "parallel.schedule=1f1b", "parallel.head=last")
EXCHANGING = (
    *(*LARGE, "packing.global_batch=2"),
    *("training.activation_checkpointing=none", "sharding.strategy=per_document"),
)
OF_EACH_STAGE = (0, 16, 32, 48)
ALONE = ("parallel.pp=1", "parallel.cp=1", "parallel.dp=2", "parallel.tp=2")
LEVEL = ("tiny_balanced", "data.context_window=2048", "packing.global_batch=4")
INTERLEAVED = ("parallel.pp=2", "parallel.virtual_pp=2", "parallel.schedule=interleaved_1f1b")


@cache
def runs_of(name: str, *settings: str, ranks: tuple[int, ...] = (0,)) -> tuple[Job, dict[int, RankRun]]:
    """The first step of a shipped configuration with changed settings."""
    nowhere = ["data.store=/nowhere/store", "metrics.dir=/nowhere/metrics", "checkpoint.dir=/nowhere/checkpoints"]
    config = load_config(CONFIGS / f"{name}.toml", [*nowhere, *settings])
    hardware = "h100" if config.training.device == "cuda" else "cpu"
    return find_problems(config, hardware)[0].job, run_fake_ranks(config, hardware, ranks)


def exchanged(job: Job, run: RankRun, dp: int, cp: int) -> Shards:
    """Tokens that a rank exchanges in each of its micro-batches."""
    shards = simulate_steps([run.plan], job).shards.map(lambda column: column[0])
    mine = [index for index, part in enumerate(run.plan.ranks[dp]) if not part.ranks or cp in part.ranks]
    return shards.map(lambda column: column[dp, mine, cp] if column.ndim == 3 else column[dp, mine])


def shipped(*names: str) -> list[Any]:
    """Jobs as they are shipped, which repeat, over minutes, what a few layers show."""
    marks = pytest.mark.exhaustive, pytest.mark.timeout(7200)
    return [pytest.param((name,), (0,), id=name, marks=marks) for name in names]


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        pytest.param(EXCHANGING, OF_EACH_STAGE, id="pipeline, none"),
        pytest.param(
            (*LARGE, "training.activation_checkpointing=keep_attention"), (56,), id="last stage, keep_attention"
        ),
        pytest.param((*LARGE, *ALONE, "training.activation_checkpointing=full"), (0,), id="no pipeline, full"),
        pytest.param((*LARGE, *INTERLEAVED), (0,), id="interleaved"),
        pytest.param(LEVEL, (0,), id="level steps on CPUs"),
        *shipped("70b_128k"),
    ],
)
def test_a_rank_holds_what_the_memory_model_says(settings, ranks):
    job, runs = runs_of(*settings, ranks=ranks)
    for rank, run in runs.items():
        shape = job.layout.pp, job.layout.pools, job.layout.pool_size, job.layout.tp
        pp, dp, cp, _ = map(int, np.unravel_index(rank, shape))
        shards = exchanged(job, run, dp, cp)
        exchanges = [
            Exchange(int(received) if kept else 0, int(max(received, sent)))
            for received, sent, kept in zip(shards.received, shards.sent, shards.kept, strict=True)
        ]
        exchanges += [Exchange(0, 0)] * (len(run.rows) - len(exchanges))  # an empty one may follow
        operations = job.layout.operations(len(run.rows))[pp]
        predicted = Walk(job).over(pp, [*zip(run.rows, exchanges, strict=False)], operations)
        assert predicted.total == pytest.approx(run.peak, rel=0.05), (rank, predicted)


def test_the_simulator_prices_the_bytes_that_ranks_receive(monkeypatch):
    """On links that move a byte a second; it leaves out the weights of norms."""
    job, runs = runs_of(*EXCHANGING, ranks=OF_EACH_STAGE)
    for module in ("wlb.job.job", "wlb.simulate.costs", "wlb.workload.costs"):
        monkeypatch.setattr(f"{module}.group_link", lambda *_, **__: Link(latency=0.0, bandwidth=1.0))
    costs, received = JobCosts(job), Counter[str]()
    for run in runs.values():
        for call in run.steps[0]:
            received[call.purpose] += call.received
    run = runs[0]
    shards = exchanged(job, run, 0, 0)
    assert shards.received.any()
    messages = 2 * (job.layout.stages - 1)
    gathered = (costs.job.stage_blocks * costs.block_gather + costs.root_gather).sum()
    assert received[WEIGHTS] == pytest.approx(gathered, rel=1e-3)
    assert received[GRADIENTS] == pytest.approx(costs.rank_reduction.sum(), rel=1e-3)
    assert received[TENSOR_PARALLEL] == pytest.approx(2 * costs.rank.tp_seconds(run.rows).sum())
    assert received[STAGES] == pytest.approx(messages * costs.job.transfer_seconds(run.rows).sum())
    keys = shards.received * np.where(shards.kept, 1, 2) + shards.sent
    assert received[KEYS_AND_VALUES] == pytest.approx(costs.rank.exchange_seconds(keys, job.layout.pool_size).sum())


TIGHT = (
    *(*OF_FOUR_LAYERS, "training.activation_checkpointing=none"),
    *("training.memory_gib=8", "packing.rank_micro_batches=12"),
)


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        pytest.param(TIGHT, OF_EACH_STAGE[::3], id="both ends of a pipeline, which hold most"),
        *shipped("7b_128k", "30b_128k", "405b_128k"),
    ],
)
def test_no_rank_of_a_planned_pipeline_holds_more_than_the_job_may(settings, ranks):
    """In lists made for the step, with slices that keep keys and values, and late weight parts as memory allows."""
    job, runs = runs_of(*settings, ranks=ranks)
    assert job.plans_operations
    assert job.slices_documents
    assert max(run.peak for run in runs.values()) <= predicted_memory(job).total
