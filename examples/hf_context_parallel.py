"""Context parallelism for an unmodified Hugging Face Llama: two processes share every micro-batch.

    torchrun --standalone --nproc-per-node 2 examples/hf_context_parallel.py

The original shares micro-batches of random documents per sequence, each rank a head and a tail chunk, as ring attention
usually does; the balanced one plans them and keeps short documents whole on a rank (hybrid sharding).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from comparison import SHAPE, Run, llama, prices, run_example, usual_batch
from wlb.integrations.batches import PlannedBatchSampler
from wlb.integrations.huggingface import context_parallel_share
from wlb.training.observe.monitor import PredictedLoad


def original_batches(documents: Any, arguments: Any) -> list[list[int]]:
    """Random documents, equally many in every micro-batch."""
    order = np.random.default_rng(0).permutation(len(documents)).tolist()
    count = usual_batch(documents, arguments)
    return [order[first : first + count] for first in range(0, len(order), count)]


def balanced_batches(documents: Any, arguments: Any) -> PlannedBatchSampler:
    lengths = [document["length"] for document in documents]
    return PlannedBatchSampler(
        lengths,
        context_window=arguments.context_window,
        micro_batches=arguments.micro_batches,
        cp=dist.get_world_size(),
        rank=dist.get_rank(),
        model=SHAPE,
        hardware="cpu",
    )


def train(way: str, run: Run, documents: Any, arguments: Any) -> None:
    model = llama(run, documents)
    batches = balanced_batches(documents, arguments) if way == "balanced" else original_batches(documents, arguments)
    sharding = "hybrid" if way == "balanced" else "per_sequence"
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    load = PredictedLoad(SHAPE, "cpu", [range(SHAPE.layers)])
    loader = list(DataLoader(documents, batch_sampler=batches, collate_fn=run))
    for first in range(0, len(loader), arguments.micro_batches):
        step = loader[first : first + arguments.micro_batches]
        loss_tokens = sum(int((batch["labels"] >= 0).sum()) for batch in step)
        for batch in step:
            share = context_parallel_share(batch, dist.get_world_size(), dist.get_rank(), sharding, prices())
            run.predicted.append(float(load.seconds([share["shard_plan"]])[0, dist.get_rank()]))
            with run.computing():
                model(**share, num_items_in_batch=loss_tokens).loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # the ranks' losses add up to that of the step
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    run_example(__doc__, train, shared=True)
