"""The outside reference of ``training.py``: a Hugging Face ``Trainer`` on the same documents, with the same model.

    torchrun --standalone --nproc-per-node 2 benchmarks/parts/training/hf_trainer.py --store PREFIX --out DIRECTORY

What that stack offers for documents of different lengths is padding-free packing: documents follow each other, cut at
the window, and ``position_ids`` that start anew tell attention where a document ends. Two data-parallel processes (DDP)
with one thread each, gradients accumulated over the micro-batches of a step, torch's scaled dot-product attention,
AdamW. Writes ``steps.jsonl`` with the seconds and tokens of every step, over both processes.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from wlb.documents.order import DocumentStream
from wlb.documents.store.reader import TokenStore
from wlb.job.config import DataConfig
from wlb.packing.plan import MicroBatch
from wlb.packing.registry import make_packer
from wlb.training.data.batch import make_batch
from wlb.workload import make_workload, model_shape

CONTEXT_WINDOW = 4096


class MicroBatches(Dataset[dict[str, Any]]):
    """Sequentially packed micro-batches, as a list that ``Trainer`` deals to its processes in turn."""

    def __init__(self, store: TokenStore, count: int) -> None:
        self._store = store
        stream = DocumentStream(store.lengths, DataConfig(store=store.prefix, context_window=CONTEXT_WINDOW))
        packer = make_packer(
            "sequential", micro_batches=1, context_window=CONTEXT_WINDOW, workload=make_workload("tiny", "cpu")
        )
        self._micro_batches: list[MicroBatch] = []
        while len(self._micro_batches) < count:
            self._micro_batches += [plan.micro_batches[0] for plan in packer.plan(stream.take(64))]

    def __len__(self) -> int:
        return len(self._micro_batches)

    def __getitem__(self, index: int) -> dict[str, Any]:
        batch = make_batch(self._micro_batches[index], self._store)
        # LlamaForCausalLM moves labels by one itself; what precedes the first token of a document has none.
        labels = batch.tokens.masked_fill(batch.positions == 0, -100)
        return {"input_ids": batch.tokens, "position_ids": batch.positions, "labels": labels}


class Stopwatch(TrainerCallback):
    """Seconds and tokens of every optimizer step."""

    def __init__(self, path: Path, tokens: int) -> None:
        self._path = path
        self._tokens = tokens
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if dist.get_rank() == 0:
            row = {"step_seconds": time.perf_counter() - self._began, "tokens": self._tokens}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = TrainingArguments(
        output_dir=str(arguments.out),
        max_steps=arguments.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=arguments.micro_batches // 2,
        learning_rate=1e-3,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        train_sampling_strategy="sequential",
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    shape = model_shape("tiny")
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            intermediate_size=shape.ffn_hidden,
            vocab_size=shape.vocab_size,
            max_position_embeddings=CONTEXT_WINDOW,
        )
    )
    trainer = Trainer(
        model=model,
        args=settings,
        train_dataset=MicroBatches(TokenStore.open(arguments.store), arguments.steps * arguments.micro_batches),
        callbacks=[Stopwatch(arguments.out / "steps.jsonl", arguments.micro_batches * CONTEXT_WINDOW)],
    )
    trainer.train()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
