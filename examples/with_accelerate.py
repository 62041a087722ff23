"""Accelerate, balanced: torchrun --standalone --nproc-per-node 2 examples/with_accelerate.py"""

import torch
from accelerate import Accelerator

from stand_ins import MODEL, WINDOW, documents, llama
from wlb.integrations.accelerate import balanced_steps
from wlb.integrations.huggingface import register_attention


def train() -> None:
    accelerator, model = Accelerator(cpu=True), llama()
    register_attention(model)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))
    steps = balanced_steps(
        accelerator, model, documents(), context_window=WINDOW, micro_batches=2, model=MODEL, hardware="cpu"
    )
    for step in steps:  # accelerator.register_for_checkpointing(steps) saves their state with the rest
        for batch in step:
            accelerator.backward(batch.loss(model(**batch).logits))
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    train()
