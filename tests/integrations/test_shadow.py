"""Under shadow mode frameworks train the same: Hugging Face's Trainer to the bit, others each document once."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import wlb
from tests.training.distributed import run_ranks
from wlb.errors import UserError
from wlb.integrations.shadow import ShadowCallback
from wlb.workload.profile import read_profile

SECONDS = [0.0]  # of the injected clock


def trained(folder: Path, callback: ShadowCallback | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    model.register_forward_hook(lambda _, __, out: SECONDS.append(SECONDS.pop() + out.logits.shape[1]))
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


def test_a_trainer_under_shadow_trains_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(time, "thread_time", lambda: SECONDS[0])
    callback = ShadowCallback(profile=tmp_path / "prices.json")
    pairs = zip(trained(tmp_path, callback), trained(tmp_path, None), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    shadow: Any = callback.shadow
    gain = shadow.gain
    assert gain.steps == 24  # three epochs
    assert gain.own >= gain.unpadded > 0
    assert read_profile(tmp_path / "prices.json").model.hidden == 16


def loader() -> Any:
    documents: Any = [torch.full((3 + number % 7,), number) for number in range(32)]
    return DataLoader(documents, batch_size=1, shuffle=True)


def _as_under_torchrun() -> None:
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="0")


def _under_accelerate(stateful: bool) -> tuple[list[int], bool, str]:
    """Which documents are trained, whether they were measured, and what is said of a loader that is not prepared."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    _as_under_torchrun()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=stateful))
    with pytest.raises(UserError) as too_early:
        accelerator.prepare(wlb.shadow(loader()))
    model = nn.Linear(1, 1)
    model, optimizer, prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader())
    shadowed = wlb.shadow(prepared, every=8)
    seen, other = [], accelerator.prepare(loader())
    for batch, _ in zip(accelerator.prepare(shadowed), other, strict=True):
        accelerator.backward(model(batch[:, :1].float()).sum())
        optimizer.step()
        seen.append(int(batch[0, 0]))
        if stateful:
            assert shadowed.state_dict()["_num_yielded"] == other.state_dict()["_num_yielded"]
    return seen, shadowed.gain is not None, str(too_early.value)


@pytest.mark.parametrize("stateful", [False, True])
def test_accelerate_trains_every_document_once(stateful: bool):
    (first, measured, too_early), (second, *_) = run_ranks(2, _under_accelerate, stateful)
    assert sorted(first + second) == [*range(32)]
    assert measured
    assert too_early.endswith("not measured; call wlb.shadow(accelerator.prepare(loader))")


def _under_lightning() -> tuple[list[int], bool]:
    import lightning

    _as_under_torchrun()
    seen: list[int] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(1, 1)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

        def training_step(self, batch: Any, index: int) -> Any:
            seen.append(int(batch[0, 0]))
            return self.model(batch[:, :1].float()).sum()

    quiet: Any = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    files: Any = {"enable_checkpointing": False, "accelerator": "cpu", "devices": 2, "strategy": "ddp"}
    shadowed = wlb.shadow(loader(), every=8)
    lightning.Trainer(max_epochs=1, **quiet, **files).fit(Module(), shadowed)
    return seen, shadowed.gain is not None


def test_lightning_trains_every_document_once():
    (first, measured), (second, _) = run_ranks(2, _under_lightning)
    assert sorted(first + second) == [*range(32)]
    assert measured
