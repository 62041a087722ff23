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
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, DistributedSampler

from comparison import SHAPE, Run, TinyTransformer, run_example, usual_batch
from torch_loop import check
from wlb.integrations.packed import packed_batches


class Original(lightning.LightningModule):
    """The usual loader, and the usual loss: the mean over a micro-batch."""

    def __init__(self, model: TinyTransformer, run: Run, documents: Any, arguments: Any) -> None:
        super().__init__()
        self.model, self.run, self.documents, self.arguments = model, run, documents, arguments

    def train_dataloader(self) -> Any:
        sampler: Any = DistributedSampler(self.documents, seed=0)
        per_batch = usual_batch(self.documents, self.arguments)
        return DataLoader(self.documents, batch_size=per_batch, sampler=sampler, collate_fn=self.run)

    def training_step(self, batch: Any, index: int) -> Any:
        labels = torch.cat([batch["labels"][0, 1:], torch.tensor([-100])])
        logits = self.model(batch["input_ids"][0], batch["position_ids"][0], batch["cu_seq_lens_q"].diff().tolist())
        return F.cross_entropy(logits, labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Balanced(Original):
    """One call of ``training_step`` trains a whole planned step. docs/adoption.md has it with a state that resumes."""

    automatic_optimization = False

    def train_dataloader(self) -> Any:
        sizes = {name: getattr(self.arguments, name) for name in ("context_window", "micro_batches")}
        return packed_batches(self.documents, **sizes, model=SHAPE, hardware="cpu")

    def training_step(self, step: Any, index: int) -> None:
        optimizer: Any = self.optimizers()
        for batch, planned in zip(step.batches, step.plan.ranks[self.global_rank], strict=True):
            self.run.batches.append([segment.document for segment in planned.segments])
            with self.run.computing():
                logits = self.model(batch.tokens, batch.position_ids, batch.segment_lengths)
                self.manual_backward(batch.loss(logits))
        optimizer.step()
        optimizer.zero_grad()


def train(way: str, run: Run, documents: Any, arguments: Any) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model = TinyTransformer()
    run.gradient_error = check(documents, model, arguments)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=DDPStrategy(process_group_backend="gloo"),
        accumulate_grad_batches=1 if way == "balanced" else arguments.micro_batches,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        callbacks=[] if way == "balanced" else [MicroBatchClock(run)],
    )
    trainer.fit((Balanced if way == "balanced" else Original)(model, run, documents, arguments))


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
