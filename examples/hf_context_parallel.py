"""Context parallelism for an unmodified Hugging Face Llama: all processes share every micro-batch.

    torchrun --standalone --nproc-per-node 2 examples/hf_context_parallel.py

Short documents stay whole on a rank, long ones are divided.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from stand_ins import DEVICE, MODEL, WINDOW, documents, join, llama
from wlb.integrations.huggingface import register_attention
from wlb.integrations.packed import packed_batches


def train() -> None:
    cp = dist.get_world_size()  # or any divisor of it
    model = llama().to(DEVICE)
    register_attention(model)
    parallel = DistributedDataParallel(model)  # over all ranks: each has a part of the gradient
    optimizer = torch.optim.AdamW(parallel.parameters(), 1e-3)
    steps = packed_batches(documents(), context_window=WINDOW, micro_batches=2, cp=cp, model=MODEL, hardware="cpu")
    for step in steps:
        for batch in step.batches:
            logits = parallel(**batch).logits
            batch.loss(logits).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    join()
    train()
    dist.destroy_process_group()
