"""Traces of all ranks."""

import gzip
import json
from pathlib import Path

from tests.training.distributed import run_ranks
from tests.training.jobs import job, train


def names_in_trace(folder: Path, rank: int) -> set[str]:
    (path,) = folder.glob(f"rank-{rank}.*.json.gz")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return {event.get("name", "") for event in json.load(file)["traceEvents"]}


def test_a_job_leaves_traces_of_all_ranks(folder):
    config = job(
        folder,
        parallel={"pp": 2, "cp": 2},
        packing={"global_batch": 2, "rank_micro_batches": 2},
        sharding={"strategy": "per_document"},
        checkpoint={"dir": str(folder / "checkpoints"), "every": 2},
        metrics={"profile": True},
        training={"steps": 4},
    )
    run_ranks(4, train, config)
    for rank in range(4):
        names = names_in_trace(folder / "metrics" / "trace", rank)
        expected = {"data", "plan agreement", "gradient norm", "optimizer", "checkpoint"}
        expected |= {"key/value exchange", "attention own", "attention received"}
        expected |= {f"{phase} micro-batch {i}" for phase in ("forward", "backward") for i in range(2)}
        assert expected <= names
        assert ("loss micro-batch 1" in names) == (rank >= 2)
