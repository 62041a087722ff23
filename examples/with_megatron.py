"""Megatron-Core's scheduler for packed sequences and ours, on the same global batches, without a GPU.

    wlb prepare --stdlib --train-bpe 1024 --out demo/corpus
    python examples/with_megatron.py demo/corpus

Needs Megatron-LM's main (0.20) or dev. Runs what Megatron-Core runs on the CPU, the division of a global batch into
micro-batches; attention over them needs GPUs. Seconds are predicted, for a 7B model on H100.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets import data_schedule

from wlb.documents.store.reader import TokenStore
from wlb.integrations.megatron import register
from wlb.workload import make_workload

CP, DP = 2, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("store", type=Path)
    parser.add_argument("--max-seqlen-per-dp-cp-rank", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=300, help="of a global batch")
    parser.add_argument("--batches", type=int, default=10)
    arguments = parser.parse_args()
    lengths = TokenStore.open(arguments.store).lengths
    lengths = lengths[lengths <= arguments.max_seqlen_per_dp_cp_rank * CP]
    order = np.random.default_rng(0).permutation(len(lengths))[: arguments.samples * arguments.batches]
    padded = -(-lengths[order] // (2 * CP)) * (2 * CP)  # as Transformer Engine wants
    batches = padded.reshape(-1, arguments.samples)
    key = next(key for key in data_schedule.scheduler_map if getattr(key, "value", key) == "dp_balanced")
    original = data_schedule.scheduler_map[key]
    register("7b", "h100")  # what a user adds before training
    ours = data_schedule.scheduler_map[key]
    made = {
        each.__name__: of(each(arguments.max_seqlen_per_dp_cp_rank, CP, DP, None), batches) for each in (original, ours)
    }
    print(json.dumps(made, indent=2))


def of(scheduler: Any, batches: np.ndarray[Any, Any]) -> dict[str, Any]:
    """What a scheduler makes of all batches: seconds of shape (micro-batches, data-parallel ranks)."""
    workload, once, slots = make_workload("7b", "h100", cp=CP), True, []
    for lengths in batches:
        groups = scheduler.get_groups_and_subsamples([(i, int(length)) for i, length in enumerate(lengths)])
        once &= sorted(i for slot in groups for of_rank in slot[::CP] for i in of_rank) == list(range(len(lengths)))
        seconds = workload.document_seconds(lengths)
        slots += [[float(seconds[of_rank].sum()) for of_rank in slot[::CP]] for slot in groups]
    loads = np.array(slots)
    slowest, mean = float(loads.max(axis=1).sum()), float(loads.mean(axis=1).sum())
    return {"samples_once": once, "predicted_lock_step": slowest / mean, "predicted_critical_seconds": slowest}


if __name__ == "__main__":
    main()
