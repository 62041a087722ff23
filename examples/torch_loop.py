"""A training loop of your own with DDP, balanced.

torchrun --standalone --nproc-per-node 2 examples/torch_loop.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from stand_ins import DEVICE, MODEL, WINDOW, documents, join, llama
from wlb.integrations.huggingface import register_attention
from wlb.integrations.packed import packed_batches


def train() -> None:
    model = llama().to(DEVICE)
    register_attention(model)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters(), 1e-3)
    steps = packed_batches(documents(), context_window=WINDOW, micro_batches=2, model=MODEL, hardware="cpu")
    for step in steps:  # steps.state_dict() belongs in the checkpoint
        for batch in step.batches:
            logits = parallel(**batch).logits
            batch.loss(logits).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    join()
    train()
    dist.destroy_process_group()
