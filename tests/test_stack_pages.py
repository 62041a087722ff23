"""Blocks of pages that run on two processes train there, on a tiny model, and train every document once.

A block leaves the names open that are its reader's: ``_names`` defines them. Windows are smaller than in the pages.
"""

import os
import sys
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.code_blocks import PAGES, ROOT, blocks_of
from tests.training.distributed import run_ranks

# Of each block its place, its text, and what it needs.
BLOCKS = [(str(b), b.text, b.on_two["package"]) for page in PAGES for b in blocks_of(page) if b.on_two]
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "logger": False}


@pytest.mark.parametrize("package", [None, "lightning"])
def test_blocks_train_every_document_once(package: str | None, tmp_path: Any):
    blocks = [block for block in BLOCKS if (block[2] == "lightning") == (package == "lightning")]
    assert blocks
    for found in run_ranks(2, _run_blocks, blocks, str(tmp_path)):
        assert found == {where: (True, True) for where, *_ in blocks}


def _run_blocks(blocks: list[tuple[str, str, str | None]], folder: str) -> dict[str, tuple[bool, bool]]:
    """Of each block whether every token was trained once, and whether all processes hold the same new weights."""
    from transformers import LlamaForCausalLM

    from studies.benchmarks.recorder import recording

    sys.path += [str(ROOT), str(ROOT / "examples")]
    from tests.examples.run import every_token_once

    stand_ins: Any = import_module("stand_ins")
    stand_ins.WINDOW, stand_ins.DOCUMENTS = 96, 48
    rank, found = str(dist.get_rank()), {}
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="0")
    for where, text, package in blocks:
        names = _names(stand_ins, folder)
        _provide(package, names)
        before = _weights(names["model"])
        # A Trainer runs two micro-batches a step, and more in the check before the first.
        with recording(LlamaForCausalLM, per_step=2 if "balanced(" in text else None) as recorder:
            exec(compile(text.replace("8192", str(stand_ins.WINDOW)), where, "exec"), names)
        after: list[Any] = [None, None]
        dist.all_gather_object(after, _weights(names["model"]))
        same = np.array_equal(*after) or "wlb.shadow" in text  # which leaves a loop what it is, here two alone
        found[where] = every_token_once(recorder, names["documents"]), same and not np.array_equal(before, after[0])
    return found


def _names(stand_ins: Any, folder: str) -> dict[str, Any]:
    """What the pages leave open."""
    from accelerate import Accelerator
    from transformers import TrainingArguments

    model, documents = stand_ins.llama(), stand_ins.documents()
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    args = TrainingArguments(folder, num_train_epochs=1, gradient_accumulation_steps=2, learning_rate=1e-3, **quiet)
    return {
        "model": model,
        "documents": documents,
        "dataset": documents,
        "optimizer": torch.optim.AdamW(model.parameters(), 1e-3),
        "args": args,
        "accelerator": Accelerator(cpu=True),
        "loader": DataLoader(documents[dist.get_rank() :: 2], collate_fn=_row),
    }


def _row(documents: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([documents[0]["input_ids"]])
    return {"input_ids": ids, "labels": ids, "position_ids": torch.arange(ids.shape[1])[None]}


def _weights(model: Any) -> Any:
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return torch.cat([p.detach().flatten() for p in whole]).numpy().copy()


def _provide(package: str | None, names: dict[str, Any]) -> None:
    """Set up ``package``, or a stand-in that makes a Trainer as it does, of what it holds in these places."""
    from transformers import Trainer

    given = {"model": names["model"], "args": names["args"], "train_dataset": names["dataset"]}
    if package == "lightning":
        lightning = import_module("lightning")
        ranks: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}
        vars(lightning)["Trainer"] = partial(import_module("lightning.pytorch").Trainer, **ranks, **QUIET)
    elif package == "llamafactory":
        workflow = _module("llamafactory.train.sft.workflow", CustomSeq2SeqTrainer=Trainer)

        def run_exp() -> None:
            collator = workflow.SFTDataCollatorWith4DAttentionMask(template="llama3", block_diag_attn=False)
            workflow.CustomSeq2SeqTrainer(data_collator=collator, **given).train()

        _module("llamafactory.train.tuner", run_exp=run_exp)
    elif package == "swift":
        trainers = _module("swift.trainers", Seq2SeqTrainer=Trainer)
        _module("swift.pipelines.train.sft", sft_main=lambda: trainers.Seq2SeqTrainer(**given).train())


def _module(name: str, **contents: Any) -> Any:
    """A module of this name in packages that are made for it."""
    module = sys.modules.get(name) or ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module
    parent, _, own = name.rpartition(".")
    if parent:
        _module(parent, **{own: module})
    return module
