"""Hugging Face's Trainer: random micro-batches, its own ``batch_rebalance`` (transformers 5.23), and balanced.

torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainingArguments, trainer_pt_utils

from comparison import WAYS, Run, llama, run_example, trainer_class, trainer_settings


def train(way: str, run: Run, documents: Any, arguments: Any) -> None:
    strategy: dict[str, Any] = {"train_sampling_strategy": way} if way == "batch_rebalance" else {}
    trainer = trainer_class(Trainer, way, run, arguments)(
        model=llama(run, documents),
        args=TrainingArguments(**trainer_settings(documents, arguments), **strategy),
        train_dataset=documents,
        data_collator=run,
    )
    trainer.train()


if __name__ == "__main__":
    rebalances = hasattr(trainer_pt_utils, "BatchRebalanceSampler")
    run_example(__doc__, train, ways=("original", "batch_rebalance", "balanced") if rebalances else WAYS)
