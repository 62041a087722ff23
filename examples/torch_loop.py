"""A training loop of one's own with DDP, as it was and balanced.

torchrun --standalone --nproc-per-node 2 examples/torch_loop.py
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from comparison import SHAPE, Run, TinyTransformer, run_example, usual_batch
from wlb.integrations.checks import check_packing
from wlb.integrations.packed import packed_batches


def train_original(documents: Any, arguments: Any, run: Run, model: Any, optimizer: Any) -> None:
    sampler: Any = DistributedSampler(documents, seed=0)
    per_batch = usual_batch(documents, arguments)
    loader = list(DataLoader(documents, batch_size=per_batch, sampler=sampler, collate_fn=run))
    for first in range(0, len(loader), arguments.micro_batches):
        step = loader[first : first + arguments.micro_batches]
        loss_tokens = torch.tensor(sum(int((batch["labels"] >= 0).sum()) for batch in step))
        dist.all_reduce(loss_tokens)
        for batch in step:
            labels = torch.cat([batch["labels"][0, 1:], torch.tensor([-100])])
            lengths = batch["cu_seq_lens_q"].diff().tolist()
            with run.computing():
                logits = model(batch["input_ids"][0], batch["position_ids"][0], lengths)
                loss = F.cross_entropy(logits, labels, reduction="sum") * dist.get_world_size() / loss_tokens
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train_balanced(documents: Any, arguments: Any, run: Run, model: Any, optimizer: Any) -> None:
    rank = dist.get_rank()
    steps = packed_batches(
        documents,
        context_window=arguments.context_window,
        micro_batches=arguments.micro_batches,
        model=SHAPE,
        hardware="cpu",
    )
    for step in steps:  # steps.state_dict() belongs into the checkpoint
        for batch, planned in zip(step.batches, step.plan.ranks[rank], strict=True):
            run.batches.append([segment.document for segment in planned.segments])
            with run.computing():
                logits = model(batch.tokens, batch.position_ids, batch.segment_lengths)
                batch.loss(logits).backward()
        optimizer.step()
        optimizer.zero_grad()


def check(documents: Any, model: TinyTransformer, arguments: Any) -> float:
    """The gradient of one micro-batch against that of its documents one at a time."""
    sizes = {"context_window": arguments.context_window, "micro_batches": 1, "model": SHAPE, "hardware": "cpu"}
    (batch,) = next(packed_batches(documents, dp=1, **sizes)).batches

    def loss(start: int, stop: int, lengths: Any) -> torch.Tensor:
        run = slice(start, stop)
        logits = model(batch.tokens[run], batch.position_ids[run], lengths)
        return F.cross_entropy(logits, batch.labels[run], reduction="sum")

    singles = [partial(loss, start, stop, (stop - start,)) for start, stop in pairwise(batch.cu_seqlens.tolist())]
    packed = partial(loss, 0, len(batch.tokens), batch.segment_lengths)
    return check_packing(model, packed, singles).gradient_error


def train(way: str, run: Run, documents: Any, arguments: Any) -> None:
    torch.manual_seed(0)
    plain = TinyTransformer()
    run.gradient_error = check(documents, plain, arguments)
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    (train_balanced if way == "balanced" else train_original)(documents, arguments, run, model, optimizer)


if __name__ == "__main__":
    run_example(__doc__, train)
