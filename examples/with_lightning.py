"""Lightning with DDP, balanced: torchrun --standalone --nproc-per-node 2 examples/with_lightning.py"""

import os
from typing import Any

import lightning
import torch

from stand_ins import MODEL, WINDOW, documents, llama
from wlb.integrations.huggingface import register_attention
from wlb.integrations.packed import packed_batches


class Balanced(lightning.LightningModule):
    automatic_optimization = False  # one call of training_step trains a whole planned step

    def __init__(self) -> None:
        super().__init__()
        self.model, self.state = llama(), None
        register_attention(self.model)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)

    def train_dataloader(self) -> Any:
        sizes: Any = {"context_window": WINDOW, "micro_batches": 2}
        steps = packed_batches(documents(), **sizes, model=MODEL, hardware="cpu", state=self.state)
        return ((step, steps.state_dict()) for step in steps)  # Lightning reads one step ahead

    def training_step(self, planned: Any, index: int) -> None:
        step, self.state = planned
        optimizer: Any = self.optimizers()
        for batch in step.batches:
            self.manual_backward(batch.loss(self.model(**batch).logits))
        optimizer.step()
        optimizer.zero_grad()

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["documents"] = self.state

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        self.state = checkpoint["documents"]


def train() -> None:
    ranks: Any = {"accelerator": "cpu", "devices": int(os.environ.get("WORLD_SIZE", "1"))}  # on GPUs leave them out
    files: Any = {"enable_checkpointing": False, "logger": False}
    lightning.Trainer(max_epochs=1, strategy="ddp", use_distributed_sampler=False, **ranks, **files).fit(Balanced())


if __name__ == "__main__":
    train()
