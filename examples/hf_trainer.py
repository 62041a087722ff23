"""Hugging Face's Trainer, as it was and balanced.

torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainingArguments

from comparison import Run, llama, run_example, trainer_class, trainer_settings


def train(use_wlb: bool, run: Run, documents: Any, arguments: Any) -> None:
    trainer = trainer_class(Trainer, use_wlb, run, arguments)(
        model=llama(run, documents),
        args=TrainingArguments(**trainer_settings(documents, arguments)),
        train_dataset=documents,
        data_collator=run,
    )
    with run.training():
        trainer.train()


if __name__ == "__main__":
    run_example(__doc__, train)
