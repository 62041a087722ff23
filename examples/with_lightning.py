"""Lightning with DDP, as it was and balanced.

    torchrun --standalone --nproc-per-node 2 examples/with_lightning.py

(A file called lightning.py would be imported in place of the package.)
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, DistributedSampler

from comparison import SHAPE, Run, TinyTransformer, run_example, usual_batch
from torch_loop import check
from wlb.integrations.batches import PlannedBatchSampler
from wlb.integrations.lightning import LightningLoss
from wlb.integrations.packed import packed_loss


class Module(lightning.LightningModule):
    """The model; ``loss`` is of scores, the labels to predict and the trainer's step."""

    def __init__(self, model: TinyTransformer, run: Run, loss: Any) -> None:
        super().__init__()
        self.model, self.run, self.loss = model, run, loss

    def training_step(self, batch: Any, index: int) -> Any:
        labels = torch.cat([batch["labels"][0, 1:], torch.tensor([-100])])
        logits = self.model(batch["input_ids"][0], batch["position_ids"][0], batch["cu_seq_lens_q"].diff().tolist())
        return self.loss(logits, labels, self.global_step)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def original(documents: Any, run: Run, arguments: Any) -> tuple[DataLoader[Any], Any]:
    """The usual loader, and the usual loss: the mean over a micro-batch."""
    sampler: Any = DistributedSampler(documents, seed=0)
    loader = DataLoader(documents, batch_size=usual_batch(documents, arguments), sampler=sampler, collate_fn=run)
    return loader, lambda logits, labels, step: packed_loss(logits, labels, (labels >= 0).sum())


def balanced(documents: Any, run: Run, arguments: Any) -> tuple[DataLoader[Any], Any]:
    sampler = PlannedBatchSampler(
        [document["length"] for document in documents],
        context_window=arguments.context_window,
        micro_batches=arguments.micro_batches,
        rank=dist.get_rank(),
        model=SHAPE,
        hardware="cpu",
    )
    loader = DataLoader(documents, batch_sampler=sampler, collate_fn=run)
    return loader, LightningLoss(sampler, arguments.micro_batches)


def train(way: str, run: Run, documents: Any, arguments: Any) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model = TinyTransformer()
    run.gradient_error = check(documents, model, arguments)
    loader, loss = (balanced if way == "balanced" else original)(documents, run, arguments)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=DDPStrategy(process_group_backend="gloo"),
        accumulate_grad_batches=arguments.micro_batches,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        callbacks=[MicroBatchClock(run)],
    )
    trainer.fit(Module(model, run, loss), loader)


class MicroBatchClock(lightning.Callback):
    """Counts the computing of every micro-batch."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def on_train_batch_start(self, *_: Any) -> None:
        self._context = self._run.computing()
        self._context.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self._context.__exit__(None, None, None)


if __name__ == "__main__":
    run_example(__doc__, train)
