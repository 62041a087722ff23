"""Hugging Face's Trainer, balanced, on one process or several.

torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py
"""

from transformers import Trainer, TrainingArguments

from stand_ins import WINDOW, documents, llama
from wlb.integrations.huggingface import balanced


def train() -> None:
    settings = TrainingArguments(
        output_dir="runs/hf_trainer",
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        learning_rate=1e-3,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    trainer = balanced(Trainer, context_window=WINDOW)(model=llama(), args=settings, train_dataset=documents())
    trainer.train()


if __name__ == "__main__":
    train()
