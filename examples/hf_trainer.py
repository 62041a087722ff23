"""Hugging Face's Trainer, as it was and balanced.

torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import Trainer, TrainingArguments

from comparison import Run, compare, join, leave, llama, parse_arguments, stdlib_texts, usual_batch
from wlb.integrations.huggingface import balanced, check_batch, register_attention
from wlb.integrations.packed import FlatteningCollator


def training_arguments(folder: Path, documents: Any, arguments: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=usual_batch(documents, arguments),  # the balanced Trainer has no use for it
        gradient_accumulation_steps=arguments.micro_batches,
        num_train_epochs=1,
        learning_rate=1e-3,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )


def train(use_wlb: bool, run: Run, documents: Any, arguments: Any, folder: Path) -> None:
    model = llama()
    register_attention(model)  # both attend with it: packed documents need no mask of tokens x tokens
    run.gradient_error = check_batch(model, FlatteningCollator()(documents[:8])).gradient_error
    trainer_class = run.timed(Trainer)
    if use_wlb:
        trainer_class = balanced(trainer_class, context_window=arguments.context_window, check=False)  # see above
    trainer = trainer_class(
        model=model,
        args=training_arguments(folder, documents, arguments),
        train_dataset=documents,
        data_collator=run,
    )
    with run.training():
        trainer.train()


def main() -> None:
    arguments = parse_arguments(__doc__)
    join()
    documents = stdlib_texts(arguments.documents, arguments.context_window)
    with TemporaryDirectory() as folder:
        compare(arguments, lambda use_wlb, run: train(use_wlb, run, documents, arguments, Path(folder)), documents)
    leave()


if __name__ == "__main__":
    main()
