"""Jobs of 32 and 64 real processes on one machine: ``make rehearsal``.

    python -m tests.training.rehearsal [--processes 32,64] [--presets best,elastic] [--out FILE]

Each job trains a tiny model in float64 over gloo, dp x cp x pp x tp, for five steps, and has to have the losses of one
process that runs one document at a time (``tests/training/oracle.py``). Then the same job loses a node, a quarter of
its processes, by SIGKILL after its third step, and continues from its checkpoint on the others, with dp 3 instead
of 4; its losses have to be the same again.

Prints how long it took to start, to make a step and to stop, and what a process holds. Processes are forked from one
that has imported torch, whose pages they share.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.training.distributed import RankFailure, run_ranks
from tests.training.jobs import read_steps, settings, trainer_of, write_store
from tests.training.oracle import losses_of_single_documents, remembered_plans
from tests.training.processes import wait_until
from wlb.job.config import JobConfig
from wlb.packing.plan import StepPlan
from wlb.training.checkpoint.resuming import newest_checkpoint

STEPS, LOST_AFTER, CHECKPOINT_EVERY = 5, 3, 2
WINDOW = 64
TOLERANCE = 1e-9  # relative, as of the equivalence of steps
LAYOUTS: dict[int, dict[str, Any]] = {
    32: {"dp": 4, "cp": 2, "pp": 2, "tp": 2},
    64: {"dp": 4, "cp": 2, "pp": 4, "tp": 2},
}
PRESETS = ("best", "elastic")
_SECONDS = 1800.0  # after which a job counts as hung


class RankTimes(NamedTuple):
    """What a rank tells of its job: moments in seconds of the machine's clock, and bytes of memory at the end.

    ``step_ends`` has the moment in which training began before those in which its steps were done. ``own_bytes`` counts
    shared pages by the share of each process.
    """

    first_step: int
    plans: list[StepPlan]
    step_ends: list[float]
    resident_bytes: int
    own_bytes: int


@dataclass(frozen=True)
class Row:
    """What was measured of one job; seconds, GiB, and the largest relative error of a loss."""

    preset: str
    layout: str
    processes: int
    start_seconds: float
    step_seconds: float
    stop_seconds: float
    resident_gib: float
    memory_gib: float
    error: float


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["wlb.training.trainer"])
    rows: list[Row] = []
    for processes in map(int, options.processes.split(",")):
        for preset in options.presets.split(","):
            with tempfile.TemporaryDirectory() as folder:
                rows += rehearse(Path(folder), preset, LAYOUTS[processes])
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if options.out:
        options.out.write_text(json.dumps({"versions": versions, "rows": [asdict(row) for row in rows]}, indent=1))
    return int(any(row.error > TOLERANCE for row in rows))


def rehearse(folder: Path, preset: str, layout: dict[str, Any]) -> list[Row]:
    """Train five steps; train again, lose a node and go on without it."""
    write_store(folder / "store", longest=8 * WINDOW)
    straight = _measured(_job(folder / "straight", folder, preset, layout), preset, [])
    config = _job(folder / "killed", folder, preset, layout)
    try:
        run_ranks(config.parallel.layout.world_size, _train_and_lose_a_node, config, seconds=_SECONDS)
        raise AssertionError("no process was lost")
    except RankFailure as failure:
        if "died" not in str(failure):
            raise
    fewer = _job(folder / "killed", folder, preset, layout | {"dp": layout["dp"] - 1})
    resumed = _measured(fewer, preset, straight.plans)
    return [straight.row, resumed.row]


class _Measured(NamedTuple):
    row: Row
    plans: list[StepPlan]


def _measured(config: JobConfig, preset: str, before: list[StepPlan]) -> _Measured:
    """Train ``config`` to its end, and compare it with single documents; ``before`` are the plans of earlier steps."""
    processes = config.parallel.layout.world_size
    began = time.time()
    ranks: list[RankTimes] = run_ranks(processes, _train, config, seconds=_SECONDS)
    ended = time.time()
    first = ranks[0]
    plans = before[: first.first_step - 1] + first.plans
    losses = [row["loss"] for row in _rows_of(config)]
    exact = losses_of_single_documents(config, plans)
    seconds = [after - at for at, after in zip(first.step_ends, first.step_ends[1:], strict=False)]
    sizes = config.parallel
    row = Row(
        preset=preset,
        layout=f"dp {sizes.dp} x cp {sizes.cp} x pp {sizes.pp} x tp {sizes.tp}",
        processes=processes,
        start_seconds=first.step_ends[0] - began,
        step_seconds=statistics.median(seconds),
        stop_seconds=ended - max(rank.step_ends[-1] for rank in ranks),
        resident_gib=max(rank.resident_bytes for rank in ranks) / 2**30,
        memory_gib=sum(rank.own_bytes for rank in ranks) / 2**30,
        error=max(abs(loss / one - 1) for loss, one in zip(losses, exact, strict=True)),
    )
    print(json.dumps(asdict(row)), flush=True)
    return _Measured(row, plans)


def _job(folder: Path, data: Path, preset: str, layout: dict[str, Any]) -> JobConfig:
    """There are two pools, of four ranks, or with a node less of three."""
    pools = {"pool": layout["dp"] * layout["cp"] // 2} if preset == "elastic" else {}
    sections = settings(
        folder,
        model={"layers": 4, "heads": 4, "kv_heads": 2, "vocab_size": 68},
        data={"context_window": WINDOW, "store": str(data / "store")},
        parallel=layout | pools,
        packing={"micro_batches": 6 * layout["pp"], "pool_micro_batches": 4},
        training={"steps": STEPS, "dtype": "float64", "learning_rate": 0.02, "timeout_seconds": _SECONDS},
        checkpoint={"dir": str(folder / "checkpoints"), "every": CHECKPOINT_EVERY},
    )
    return JobConfig.model_validate({"preset": preset, **sections})


def _rows_of(config: JobConfig) -> list[dict[str, Any]]:
    assert config.metrics.dir is not None
    return read_steps(config.metrics.dir.parent)


def _train(config: JobConfig) -> RankTimes:
    trainer = trainer_of(config)
    plans = remembered_plans(trainer)
    first_step = trainer.step + 1
    step_ends = [time.time(), *(time.time() for _ in trainer.steps())]
    return RankTimes(first_step, plans, step_ends, *_memory())


def _train_and_lose_a_node(config: JobConfig) -> None:
    trainer = trainer_of(config)
    node = config.parallel.layout.world_size // config.parallel.dp
    rank = int(torch.distributed.get_rank())
    for step in trainer.steps():
        if step == LOST_AFTER and rank >= config.parallel.layout.world_size - node:
            wait_until(lambda: newest_checkpoint(config.checkpoint) is not None, _SECONDS)
            os.kill(os.getpid(), signal.SIGKILL)


def _memory() -> tuple[int, int]:
    """Bytes that are resident, and those of them that are this process's by its share."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return sizes["Rss"], sizes["Pss"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", default=",".join(map(str, LAYOUTS)), help="of 32 and 64; default: both")
    parser.add_argument("--presets", default=",".join(PRESETS))
    parser.add_argument("--out", type=Path, help="where results go, as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
