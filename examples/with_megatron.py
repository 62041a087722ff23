"""Megatron-Core's scheduler for packed sequences and ours, on the same global batches, without a GPU.

    wlb prepare --stdlib --train-bpe 1024 --out demo/corpus
    python examples/with_megatron.py demo/corpus

Needs Megatron-LM's main (0.20). Runs what Megatron-Core runs on the CPU, the division of a global batch's samples into
micro-batches; attention over them needs GPUs. Seconds are predicted, for a 7B model on H100.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets import data_schedule

from wlb.documents.store.reader import TokenStore
from wlb.integrations.megatron.packed_sequences import padded_lengths
from wlb.integrations.megatron.scheduler import register
from wlb.workload import make_workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("store", type=Path)
    parser.add_argument("--max-seqlen-per-dp-cp-rank", type=int, default=8192)
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--dp", type=int, default=4)
    parser.add_argument("--samples", type=int, default=300, help="of a global batch")
    parser.add_argument("--batches", type=int, default=10)
    arguments = parser.parse_args()
    lengths = TokenStore.open(arguments.store).lengths
    lengths = lengths[lengths <= arguments.max_seqlen_per_dp_cp_rank * arguments.cp]
    order = np.random.default_rng(0).permutation(len(lengths))[: arguments.samples * arguments.batches]
    batches = np.array(padded_lengths(lengths[order].tolist(), arguments.cp)).reshape(-1, arguments.samples)
    original = data_schedule.scheduler_map[data_schedule.PackingSchedulerEnum.DP_BALANCED]
    register("7b", "h100")  # as balanced_steps does in a training script
    ours = data_schedule.scheduler_map[data_schedule.PackingSchedulerEnum.DP_BALANCED]
    results = {scheduler.__name__: of(scheduler, batches, arguments) for scheduler in (original, ours)}
    print(json.dumps(results, indent=2))


def of(scheduler_class: Any, batches: np.ndarray[Any, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """What a scheduler makes of all batches, as seconds of shape (micro-batches, data-parallel ranks) for each."""
    cp, dp, workload = arguments.cp, arguments.dp, make_workload("7b", "h100", cp=arguments.cp)
    scheduler = scheduler_class(arguments.max_seqlen_per_dp_cp_rank, cp, dp, None)
    digest, slots, planning = hashlib.sha256(), [], 0.0
    for lengths in batches:
        samples = [(index, int(length)) for index, length in enumerate(lengths)]
        started = time.process_time()
        groups = scheduler.get_groups_and_subsamples(samples)
        planning += time.process_time() - started
        digest.update(np.sort([i for slot in groups for rank in range(dp) for i in slot[rank * cp]]).tobytes())
        seconds = workload.document_seconds(lengths)
        slots += [[float(seconds[slot[rank * cp]].sum()) for rank in range(dp)] for slot in groups]
    loads = np.array(slots)
    everything = hashlib.sha256(np.tile(np.arange(arguments.samples), len(batches)).tobytes())
    return {
        "samples_once": digest.digest() == everything.digest(),
        "micro_batches_per_rank": len(loads),
        "predicted_imbalance": round(float(loads.max() / loads.mean()), 3),
        "predicted_lock_step": round(float(loads.max(axis=1).sum() / loads.mean(axis=1).sum()), 3),
        "predicted_critical_seconds": round(float(loads.max(axis=1).sum()), 4),
        "planning_ms_per_batch": round(1000 * planning / len(batches), 2),
    }


if __name__ == "__main__":
    main()
