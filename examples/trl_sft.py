"""TRL's SFTTrainer on instruction data with masked prompts, as it was and balanced.

    torchrun --standalone --nproc-per-node 2 examples/trl_sft.py

The first quarter of every document is its prompt, which is read and not learnt.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from comparison import Run, compare, join, leave, llama, parse_arguments, stdlib_texts, usual_batch
from wlb.integrations.huggingface import balanced, check_batch, register_attention
from wlb.integrations.packed import FlatteningCollator


def with_prompts(documents: Any) -> list[dict[str, Any]]:
    masked = []
    for document in documents:
        prompt = document["length"] // 4
        masked.append(document | {"labels": [-100] * prompt + document["input_ids"][prompt:]})
    return masked


def training_arguments(folder: Path, documents: Any, arguments: Any) -> SFTConfig:
    return SFTConfig(
        output_dir=str(folder),
        packing=False,
        padding_free=True,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        per_device_train_batch_size=usual_batch(documents, arguments),
        gradient_accumulation_steps=arguments.micro_batches,
        num_train_epochs=1,
        learning_rate=1e-3,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )


def train(use_wlb: bool, run: Run, documents: Any, arguments: Any, folder: Path, tokenizer: Any) -> None:
    model = llama()
    register_attention(model)
    run.gradient_error = check_batch(model, FlatteningCollator()(documents[:8])).gradient_error
    trainer_class = run.timed(SFTTrainer)
    if use_wlb:
        trainer_class = balanced(trainer_class, context_window=arguments.context_window, check=False)  # see above
    trainer = trainer_class(
        model=model,
        args=training_arguments(folder, documents, arguments),
        train_dataset=Dataset.from_list(documents),
        processing_class=tokenizer,
    )
    trainer.data_collator = run  # SFTTrainer makes its own; this one takes the same documents and writes them down
    with run.training():
        trainer.train()


def byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({chr(byte): byte for byte in range(256)}, unk_token=chr(0)))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=chr(0), eos_token=chr(1))


def main() -> None:
    arguments = parse_arguments(__doc__)
    join()
    documents = with_prompts(stdlib_texts(arguments.documents, arguments.context_window))
    tokenizer = byte_tokenizer()
    with TemporaryDirectory() as folder:

        def run_one(use_wlb: bool, run: Run) -> None:
            train(use_wlb, run, documents, arguments, Path(folder), tokenizer)

        compare(arguments, run_one, documents)
    leave()


if __name__ == "__main__":
    main()
