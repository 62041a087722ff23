"""Lightning with DDP, balanced. (A file called lightning.py would be imported in place of the package.)

    torchrun --standalone --nproc-per-node 2 examples/with_lightning.py

docs/adoption.md has the module with a state that resumes.
"""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy

from stand_ins import MODEL, WINDOW, documents, llama
from wlb.integrations.huggingface import register_attention
from wlb.integrations.packed import PackedStep, packed_batches


class Balanced(lightning.LightningModule):
    """One call of ``training_step`` trains a whole planned step."""

    automatic_optimization = False

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def train_dataloader(self) -> Any:
        return packed_batches(documents(), context_window=WINDOW, micro_batches=2, model=MODEL, hardware="cpu")

    def training_step(self, step: PackedStep, index: int) -> None:
        optimizer: Any = self.optimizers()
        for batch in step.batches:
            self.manual_backward(batch.loss(self.model(**batch).logits))
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def train() -> None:
    model = llama()
    register_attention(model)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),  # on GPUs "auto"
        strategy=DDPStrategy(process_group_backend="gloo"),
        use_distributed_sampler=False,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(Balanced(model))


if __name__ == "__main__":
    train()
