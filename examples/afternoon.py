"""One job three ways: as it is with its gain measured, balanced, and back without WLB; docs/afternoon.md explains them.

torchrun --standalone --nproc-per-node 2 examples/afternoon.py shadow
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainingArguments

import stand_ins
from wlb.integrations.huggingface import balanced
from wlb.integrations.packed import FlatteningCollator
from wlb.integrations.shadow import ShadowCallback

stand_ins.WINDOW, stand_ins.DOCUMENTS = 1024, 416
STEPS, HELD_OUT = 200, 16


def padded(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What most jobs train: a row for each document, filled up to the longest."""
    rows = [torch.tensor(document["input_ids"]) for document in documents]
    ids, ones = (pad_sequence(tensors, batch_first=True) for tensors in (rows, [torch.ones_like(row) for row in rows]))
    return {"input_ids": ids, "attention_mask": ones, "labels": ids.masked_fill(ones == 0, -100)}


def train(way: str) -> float:
    """Train in one ``way``, and return the loss on documents held out."""
    documents, is_back = stand_ins.documents(), way == "back"
    settings = TrainingArguments(
        output_dir=f"runs/afternoon/{way}",
        max_steps=STEPS + 20 * is_back,
        ignore_data_skip=is_back,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        save_steps=STEPS,
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
    )
    kind = balanced(Trainer, context_window=stand_ins.WINDOW) if way == "balanced" else Trainer
    trainer = kind(
        model=stand_ins.llama(),
        args=settings,
        data_collator=FlatteningCollator() if way == "balanced" else padded,
        train_dataset=documents[HELD_OUT:],
        eval_dataset=documents[:HELD_OUT],
    )
    if way == "shadow":
        trainer.add_callback(ShadowCallback())
    trainer.train(resume_from_checkpoint=f"runs/afternoon/balanced/checkpoint-{STEPS}" if is_back else None)
    loss = float(trainer.evaluate()["eval_loss"])
    if trainer.is_world_process_zero():
        print(f"{way}: held-out loss {loss:.4f} after {trainer.state.global_step} steps")
    return loss


if __name__ == "__main__":
    train(sys.argv[1])
