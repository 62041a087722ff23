"""Unmodified Hugging Face models under our attention and sampler, against one document at a time in float64."""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.training.distributed import run_ranks
from wlb.errors import UserError
from wlb.integrations.huggingface import (
    balanced,
    check_batch,
    context_parallel_group,
    context_parallel_share,
    model_shape_of,
    register_attention,
)
from wlb.integrations.packed import FlatteningCollator

transformers = pytest.importorskip("transformers")

RANDOM = np.random.default_rng(0)
DOCUMENTS = [{"input_ids": RANDOM.integers(0, 97, length).tolist()} for length in (300, 5, 87, 120, 33)]
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "use_cache": False,
}
FAMILIES = ("Llama", "Qwen2", "Qwen3")


def model(family: str = "Llama", attention: str = "sdpa", **settings: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | settings, attn_implementation=attention)
    return getattr(transformers, f"{family}ForCausalLM")(config).double().train()


def gradient(of: Any) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in of.parameters()])


def single_gradient(family: str, documents: list[Any] = DOCUMENTS) -> torch.Tensor:
    """Of the summed loss, one document at a time, by transformers' own attention."""
    oracle = model(family)
    for document in documents:
        ids = torch.tensor([document["input_ids"]])
        oracle(input_ids=ids, labels=ids, num_items_in_batch=1).loss.backward()
    return gradient(oracle)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_train_as_single_ones(family: str):
    packed = model(family)
    register_attention(packed)
    batch = FlatteningCollator()(DOCUMENTS)
    packed(**batch, num_items_in_batch=1).loss.backward()
    assert relative(gradient(packed), single_gradient(family)) < 1e-7  # transformers takes the loss in float32
    assert check_batch(packed, batch).passed


def _context_parallel_gradient(family: str, sharding: str) -> torch.Tensor:
    rank = dist.get_rank()
    packed = model(family)
    register_attention(packed, group=context_parallel_group(2))
    for share in (DOCUMENTS, DOCUMENTS[1:2]):  # under hybrid sharding one rank has nothing of the second
        batch = context_parallel_share(FlatteningCollator()(share), 2, rank, sharding)
        packed(**batch, num_items_in_batch=1).loss.backward()
    total = gradient(packed)
    dist.all_reduce(total)
    return total


@pytest.mark.parametrize(
    ("family", "sharding"),
    [
        ("Llama", "hybrid"),
        ("Llama", "per_document"),
        ("Llama", "per_sequence"),
        ("Llama", "elastic"),
        ("Qwen3", "hybrid"),
    ],
)
def test_context_parallel_ranks_train_an_unmodified_model(family: str, sharding: str):
    expected = single_gradient(family, [*DOCUMENTS, DOCUMENTS[1]])
    for total in run_ranks(2, _context_parallel_gradient, family, sharding):
        assert relative(total, expected) < 1e-7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask": torch.ones(1, 545)}, r"attention_mask of shape \(1, 545\)"),
        ({"cu_seq_lens_q": None}, "no cu_seq_lens_q"),
        ({"input_ids": torch.zeros(2, 545, dtype=torch.int64)}, "a batch of 2 rows"),
    ],
)
def test_what_would_silently_train_something_else_is_refused(change: dict[str, Any], message: str):
    packed = model()
    register_attention(packed)
    batch = FlatteningCollator()(DOCUMENTS) | change
    if change.get("cu_seq_lens_q", 0) is None:
        del batch["cu_seq_lens_q"]
    if "input_ids" in change:
        batch = {"input_ids": change["input_ids"], "cu_seq_lens_q": batch["cu_seq_lens_q"]}
    with pytest.raises(UserError, match=message):
        packed(**batch)


def test_caches_dropout_and_windows_are_refused():
    with pytest.raises(UserError, match="use_cache = True"):
        register_attention(model(use_cache=True))
    batch = FlatteningCollator()(DOCUMENTS)
    dropping = model(attention_dropout=0.1)
    register_attention(dropping)
    with pytest.raises(UserError, match=r"attention_dropout = 0.1"):
        dropping(**batch)
    register_attention()
    windowed = model("Mistral", "wlb", sliding_window=16)
    with pytest.raises(UserError, match="sliding_window = 16"):
        windowed(**batch)
    cached = model(attention="wlb")
    before = cached(**batch | {"use_cache": True})
    with pytest.raises(UserError, match="there is a cache"):
        cached(input_ids=torch.zeros(1, 1, dtype=torch.int64), past_key_values=before.past_key_values, use_cache=True)


def test_documents_are_priced_for_the_model():
    shape = model_shape_of(model().config)
    assert (shape.hidden, shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (32, 2, 4, 2, 8)
    gemma = transformers.Gemma3TextConfig(
        layer_types=["sliding_attention"] * 5 + ["full_attention"], num_hidden_layers=6
    )
    assert model_shape_of(gemma).full_attention_every == 6
    assert model_shape_of(transformers.Phi3Config()).layers == 32  # of no family that is known: a dense decoder


# A Trainer needs accelerate.

LENGTHS = RANDOM.lognormal(3.2, 0.9, 90).astype(int).clip(4, 128)
DATA = [{"input_ids": RANDOM.integers(0, 97, length).tolist(), "number": n} for n, length in enumerate(LENGTHS)]


def arguments(folder: str, **settings: Any) -> Any:
    usual: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "ddp_backend": "gloo" if dist.is_initialized() else None,
        "optim": "sgd",
    }
    return transformers.TrainingArguments(**usual | settings)


class Recording(FlatteningCollator):
    """Also writes down which documents went through."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, documents: Any) -> dict[str, Any]:
        self.seen += [document["number"] for document in documents]
        return super().__call__(documents)


def train(
    folder: str, resume: bool | str = False, planning: dict[str, Any] | None = None, **settings: Any
) -> tuple[torch.Tensor, list[int], Any]:
    """Weights afterwards, the documents of this process, and what the monitor measured."""
    packed = model()
    register_attention(packed)
    collator = Recording()
    trainer = balanced(transformers.Trainer, **{"context_window": 128, "monitor": True, **(planning or {})})(
        model=packed, args=arguments(folder, **settings), train_dataset=DATA, data_collator=collator
    )
    trainer.train(resume_from_checkpoint=resume)
    weights = torch.cat([parameter.detach().flatten() for parameter in packed.parameters()])
    assert len(trainer.balance_monitor.predicted) == len(trainer.balance_monitor.measured)
    return weights, collator.seen, trainer.state.global_step


def one_at_a_time(**planning: Any) -> torch.Tensor:
    """The same steps of plain SGD, a document at a time in one process, by transformers' own attention."""
    from wlb.batches import PlannedBatchSampler

    oracle = model()
    planned = PlannedBatchSampler(
        LENGTHS,
        context_window=128,
        micro_batches=2,
        epochs=2,
        model=model_shape_of(oracle.config),
        hardware="cpu",
        seed=42,
        **planning,
    )
    for plan in planned.steps():
        oracle.zero_grad()
        for segment in plan.segments:
            ids = torch.tensor([DATA[segment.document % len(DATA)]["input_ids"]])
            labelled = sum(s.length - 1 for s in plan.segments)
            oracle(input_ids=ids, labels=ids, num_items_in_batch=labelled).loss.backward()
        with torch.no_grad():
            for parameter in oracle.parameters():
                parameter -= 1e-3 * parameter.grad
    return torch.cat([parameter.detach().flatten() for parameter in oracle.parameters()])


def test_a_trainer_takes_every_document_once_an_epoch_and_resumes_exactly(tmp_path: Path):
    pytest.importorskip("accelerate")
    save: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5}
    weights, seen, steps = train(str(tmp_path / "whole"), **save)
    assert Counter(seen) == dict.fromkeys(range(len(DATA)), 2)
    assert relative(weights, one_at_a_time()) < 1e-7
    # A loader with workers is ahead of what a checkpoint has trained.
    train(str(tmp_path / "ahead"), **save, dataloader_num_workers=2, max_steps=7)
    again, rest, of_all = train(str(tmp_path / "ahead"), resume=str(tmp_path / "ahead" / "checkpoint-5"))
    assert torch.equal(again, weights)
    assert of_all == steps
    assert len(rest) < len(seen)


def test_a_trainer_learns_what_masks_let_without_padding(tmp_path: Path):
    pytest.importorskip("accelerate")
    few, none = [], []
    for ids in (document["input_ids"] for document in DATA[:8]):
        padded = {"input_ids": [*ids, 0], "attention_mask": [1] * len(ids) + [0]}
        few.append(padded | {"completion_mask": [0] * (len(ids) - 2) + [1] * 3})
        none.append(padded | {"completion_mask": [0] * (len(ids) + 1)})
    for documents in (few, none):
        packed, oracle = model(), model()
        register_attention(packed)
        trainer = balanced(transformers.Trainer, context_window=128)(
            model=packed,
            args=arguments(str(tmp_path), num_train_epochs=1, gradient_accumulation_steps=8),
            train_dataset=documents,
        )
        assert trainer.train_sampler.micro_batches_of_steps() == [8]
        trainer._set_signature_columns_if_needed()
        assert {"completion_mask", "loss_mask", "length"} < {*trainer._signature_columns}
        with nullcontext() if documents is few else pytest.warns(UserWarning, match="a step has no labelled token"):
            trainer.train()
        for document in few if documents is few else []:
            ids = torch.tensor([document["input_ids"][:-1]])
            labels = ids.where(torch.tensor([document["completion_mask"][:-1]]) > 0, -100)
            oracle(input_ids=ids, labels=labels, num_items_in_batch=2 * len(few)).loss.backward()
        for trained, expected in zip(packed.parameters(), oracle.parameters(), strict=True):
            change = 0 if expected.grad is None else 1e-3 * expected.grad
            torch.testing.assert_close(trained, expected - change, rtol=1e-9, atol=1e-9)


def _train_on_a_rank(
    folder: str, planning: dict[str, Any], resume: bool = False, **settings: Any
) -> tuple[torch.Tensor, list[int], int]:
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="0")
    return train(folder, resume, planning, **settings)


def test_a_trainer_resumes_with_other_settings_and_loses_nothing(tmp_path: Path):
    pytest.importorskip("accelerate")
    save: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    folder, seen = str(tmp_path), Counter[int]()
    seen.update(train(folder, **save, max_steps=3)[1])
    for rank in run_ranks(2, partial(_train_on_a_rank, folder, {}, True, **save, max_steps=6)):
        seen.update(rank[1])
    seen.update(run_ranks(2, partial(_train_on_a_rank, folder, {"cp": 2}, True, **save, max_steps=9))[0][1])
    save["gradient_accumulation_steps"] = 4
    seen.update(train(folder, True, **save, max_steps=12, save_only_model=True)[1])
    elastic = {"context_window": 160, "preset": "elastic", "pool": 1, "pool_micro_batches": 3}
    seen.update(train(folder, True, elastic, **save)[1])
    assert seen == dict.fromkeys(range(len(DATA)), 2)


def test_a_trainer_refuses_to_resume_in_another_order(tmp_path: Path):
    pytest.importorskip("accelerate")
    folder = str(tmp_path)
    train(folder, save_strategy="steps", save_steps=2, max_steps=2)
    with pytest.raises(UserError, match="saved with seed = 42, this run has 7; continue with what it was saved with"):
        train(folder, True, seed=7)
    state = tmp_path / "checkpoint-2" / "trainer_state.json"
    plain = json.loads(state.read_text())
    del plain["stateful_callbacks"]["BalancedState"]
    state.write_text(json.dumps(plain))  # as another Trainer saves it
    with pytest.raises(UserError, match="checkpoint-2 does not say which documents were trained"):
        train(folder, True)
    _, seen, _ = train(folder, True, ignore_data_skip=True, save_strategy="steps", save_steps=3, max_steps=3)
    assert seen


@pytest.mark.parametrize(
    ("planning", "readers"),
    [({}, 1), ({"cp": 2}, 2), ({"preset": "elastic", "pool": 2, "pool_micro_batches": 3}, 2)],
)
def test_two_processes_train_as_one(tmp_path: Path, planning: dict[str, Any], readers: int):
    pytest.importorskip("accelerate")
    results = run_ranks(2, _train_on_a_rank, str(tmp_path), planning)
    expected = one_at_a_time(**planning | {"dp": 2 // planning.get("cp", 1)})
    for weights, _, _ in results:
        assert relative(weights, expected) < 1e-7
    seen = Counter(document for _, documents, _ in results for document in documents)
    assert seen == dict.fromkeys(range(len(DATA)), 2 * readers)  # ranks that share micro-batches read the same


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        ({"num_train_epochs": 1.5}, {}, "num_train_epochs = 1.5"),
        ({"save_strategy": "epoch"}, {}, 'save_strategy = "epoch"'),
        ({"use_cache": True}, {"use_cache": True}, "use_cache = True"),
    ],
)
def test_a_trainer_refuses_what_breaks_packing(
    tmp_path: Path, settings: dict[str, Any], change: dict[str, Any], message: str
):
    pytest.importorskip("accelerate")
    with pytest.raises(UserError, match=message):
        balanced(transformers.Trainer, context_window=128)(
            model=model(**change), args=arguments(str(tmp_path), **settings), train_dataset=DATA
        )
