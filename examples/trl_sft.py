"""TRL's SFTTrainer on instruction data with masked prompts, balanced, on one process or several.

    pip install trl
    torchrun --standalone --nproc-per-node 2 examples/trl_sft.py

The first quarter of every document is its prompt, which is read and not learnt.
"""

from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from stand_ins import WINDOW, documents, llama
from wlb.integrations.huggingface import balanced


def train() -> None:
    settings = SFTConfig(
        output_dir="runs/trl_sft",
        dataset_kwargs={"skip_prepare_dataset": True},  # it has tokens already
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
        num_train_epochs=1,
        learning_rate=1e-3,
        bf16=False,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    dataset = Dataset.from_list([each | {"labels": masked(each["input_ids"])} for each in documents()])
    trainer = balanced(SFTTrainer, context_window=WINDOW)(
        model=llama(), args=settings, train_dataset=dataset, processing_class=byte_tokenizer()
    )
    trainer.train()


def masked(ids: list[int]) -> list[int]:
    prompt = len(ids) // 4
    return [-100] * prompt + ids[prompt:]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({chr(byte): byte for byte in range(256)}, unk_token=chr(0)))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=chr(0), eos_token=chr(1))


if __name__ == "__main__":
    train()
