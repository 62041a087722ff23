"""TRL's SFTTrainer on instruction data with masked prompts, as it was and balanced.

    torchrun --standalone --nproc-per-node 2 examples/trl_sft.py

The first quarter of every document is its prompt, which is read and not learnt.
"""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from comparison import Run, llama, run_example, trainer_class, trainer_settings


def train(way: str, run: Run, documents: Any, arguments: Any) -> None:
    settings = SFTConfig(
        packing=False,
        padding_free=True,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        bf16=False,
        gradient_checkpointing=False,
        **trainer_settings(documents, arguments),
    )
    trainer = trainer_class(SFTTrainer, way, run, arguments)(
        model=llama(run, documents),
        args=settings,
        train_dataset=Dataset.from_list(documents),
        processing_class=byte_tokenizer(),
    )
    trainer.data_collator = run  # SFTTrainer makes its own; this one takes the same documents and writes them down
    trainer.train()


def byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({chr(byte): byte for byte in range(256)}, unk_token=chr(0)))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=chr(0), eos_token=chr(1))


if __name__ == "__main__":
    run_example(__doc__, train, masked=True)
