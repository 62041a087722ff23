"""Level steps in a loop of your own with FSDP2: each process has its own micro-batches, and all finish together.

torchrun --standalone --nproc-per-node 2 examples/own_lists.py
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from stand_ins import DEVICE, MODEL, WINDOW, documents, join, llama
from wlb.integrations.huggingface import register_attention
from wlb.integrations.packed import packed_batches
from wlb.runtime import level_step


def train() -> None:
    model = llama().to(DEVICE)
    register_attention(model)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    steps = packed_batches(
        documents(), context_window=WINDOW, micro_batches=2, own_lists=True, model=MODEL, hardware="cpu"
    )
    for step in steps:  # steps.state_dict() belongs in the checkpoint
        level_step(model, step.batches, lambda batch: batch.loss(model(**batch).logits))
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    join()
    train()
    dist.destroy_process_group()
