"""The callback of Hugging Face's Trainer measures, and trains the same weights to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from wlb.integrations.shadow import ShadowCallback
from wlb.workload.profile import read_profile


def trained(folder: Path, callback: ShadowCallback | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    rows: list[dict[str, Any]] = [{"input_ids": [*range(size)], "labels": [*range(size)]} for size in range(4, 36)]

    def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        sizes = [len(row["input_ids"]) for row in rows]
        ids = torch.tensor([row["input_ids"] + [0] * (max(sizes) - len(row["input_ids"])) for row in rows])
        return {
            "input_ids": ids,
            "labels": ids,
            "attention_mask": torch.arange(max(sizes)) < torch.tensor(sizes)[:, None],
        }

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        eval_strategy="steps",
        eval_steps=3,
    )
    callbacks: list[Any] = [callback] if callback else []
    Trainer(model, arguments, padded, rows, rows[:4], callbacks=callbacks).train()
    return [*model.parameters()]


def test_a_trainer_under_shadow_trains_the_same_weights(tmp_path):
    callback = ShadowCallback(profile=tmp_path / "prices.json")
    pairs = zip(trained(tmp_path, callback), trained(tmp_path, None), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    shadow: Any = callback.shadow
    gain = shadow.gain
    assert gain.steps == 24  # three epochs
    assert gain.own >= gain.unpadded > 0
    assert read_profile(tmp_path / "prices.json").model.hidden == 16
