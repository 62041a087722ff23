"""Unmodified Hugging Face models under our attention and sampler, against one document at a time in float64."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests.training.distributed import run_ranks
from wlb.attention import segment_attention
from wlb.errors import UserError
from wlb.integrations.batches import PlannedBatchSampler
from wlb.integrations.checks import check_packing
from wlb.integrations.huggingface import (
    balanced,
    check_batch,
    context_parallel_group,
    context_parallel_share,
    model_shape_of,
    register_attention,
)
from wlb.integrations.huggingface.resuming import TrainedBatches
from wlb.integrations.packed import FlatteningCollator, packed_batches

transformers: Any = pytest.importorskip("transformers")

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
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 16},
    "Llama4": {**EXPERTS, "attention_chunk_size": 300, "head_dim": 8, "intermediate_size_mlp": 64},
    "DeepseekV3": {**EXPERTS, **LATENT, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1},
}


def model(family: str = "Llama", attention: str | None = "sdpa", **settings: Any) -> Any:
    torch.manual_seed(0)
    chosen = SIZES | FAMILIES.get(family, {}) | {"experts_implementation": "eager"} | settings
    named = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = named(**chosen, attn_implementation=attention)
    of_family = getattr(transformers, f"{family}ForCausalLM", None) or getattr(transformers, f"{family}LMHeadModel")
    return of_family(config).double().train()


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


def _loop_gradient(documents: list[Any], window: int = 64, group: Any = None, **sizes: Any) -> torch.Tensor:
    """Of the loop in the README, summed over all steps of the loss over their labelled tokens."""
    packed = model("Mistral", sliding_window=window)
    register_attention(packed, group=group)
    for step in packed_batches(documents, context_window=300, model="tiny", hardware="cpu", **sizes):
        for batch in step.batches:
            batch.loss(packed(**batch.hf_kwargs()).logits[0], summed=True).backward()
    return gradient(packed)


def _loop_oracle(documents: list[Any], window: int = 64, **sizes: Any) -> torch.Tensor:
    """The same, one document at a time by transformers' own attention."""
    oracle = model("Mistral", sliding_window=window)
    for step in packed_batches(documents, context_window=300, model="tiny", hardware="cpu", **sizes):
        for segment in step.plan.segments:
            ids = torch.tensor(documents[segment.document]["input_ids"])
            scores = oracle(input_ids=ids[None]).logits[0, :-1]
            (torch.nn.functional.cross_entropy(scores, ids[1:], reduction="sum") / step.loss_tokens).backward()
    return gradient(oracle)


@pytest.mark.parametrize("window", [64, 4096], ids=["documents over the window", "Mistral's default"])
def test_the_loop_of_the_readme_trains_as_single_documents(window: int):
    found = _loop_gradient(DOCUMENTS, window, micro_batches=1)
    assert relative(found, _loop_oracle(DOCUMENTS, window, micro_batches=1)) < 1e-12


def test_packed_documents_train_as_single_ones_under_autocast():
    packed = model().float()
    register_attention(packed)
    with torch.autocast("cpu", torch.bfloat16):  # queries and keys come in float32 and values do not
        assert 0 < check_batch(packed, FlatteningCollator()(DOCUMENTS)).gradient_error < 2e-2


SHARED = (
    ("Llama", "hybrid", "of the model"),
    ("Llama", "per_document", "of labels"),
    ("Llama", "per_sequence", "of the model"),
    ("Llama", "elastic", "of the model"),
    ("Qwen3", "hybrid", "of labels"),
    ("Mistral", "per_document", "of the model"),
    ("DeepseekV3", "hybrid", "of the model"),
)


LOOPS = (DOCUMENTS, DOCUMENTS[1:2])  # under hybrid sharding one rank has nothing of the second


def _context_parallel_gradients() -> tuple[list[torch.Tensor], tuple[float, bool], list[torch.Tensor]]:
    group = context_parallel_group(2)
    loops = [_loop_gradient(documents, group=group, micro_batches=1, cp=2) for documents in LOOPS]
    for total in loops:
        dist.all_reduce(total)
    return [_context_parallel_gradient(group, *case) for case in SHARED], _check_of_sharded_weights(), loops


def _check_of_sharded_weights() -> tuple[float, bool]:
    """The check's error under FSDP2, and whether it leaves no gradient behind."""
    sharded = model()
    register_attention(sharded)
    fully_shard(sharded)
    batches = [FlatteningCollator()(documents) for documents in (DOCUMENTS, *([one] for one in DOCUMENTS))]
    packed, *singles = (lambda batch=batch: sharded(**batch, num_items_in_batch=1).loss for batch in batches)
    error = check_packing(sharded, packed, singles, sharded=True).gradient_error
    return error, all(parameter.grad is None for parameter in sharded.parameters())


def _context_parallel_gradient(group: Any, family: str, sharding: str, loss: str) -> torch.Tensor:
    packed = model(family)
    register_attention(packed, group=group)
    for documents in (DOCUMENTS, DOCUMENTS[1:2]):  # under hybrid sharding one rank has nothing of the second
        batch = context_parallel_share(FlatteningCollator()(documents), 2, dist.get_rank(), sharding)
        output = packed(**batch, num_items_in_batch=1)
        if loss == "of labels":  # as compute_loss_func gets them, and label smoothing: still to be shifted
            scores, labels = output.logits[0, :-1], batch["labels"][0, 1:]
            torch.nn.functional.cross_entropy(scores, labels, reduction="sum").backward()
        else:
            output.loss.backward()
    total = gradient(packed)
    dist.all_reduce(total)
    return total


def test_context_parallel_ranks_train_an_unmodified_model(two_processes: list[FoundByRank]):
    expected = {family: single_gradient(family, [*DOCUMENTS, DOCUMENTS[1]]) for family, *_ in SHARED}
    of_loops = [_loop_oracle(documents, micro_batches=1) for documents in LOOPS]
    for totals, (sharded_error, restored), loops in (of_rank.gradients for of_rank in two_processes):
        assert max(map(relative, loops, of_loops)) < 1e-12
        assert sharded_error < 1e-7
        assert restored
        errors = {case: relative(total, expected[case[0]]) for case, total in zip(SHARED, totals, strict=True)}
        assert max(errors.values()) < 1e-7, errors


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


def test_caches_and_dropout_are_refused():
    with pytest.raises(UserError, match="use_cache = True"):
        register_attention(model(use_cache=True))
    batch = FlatteningCollator()(DOCUMENTS)
    dropping = model(attention_dropout=0.1)
    register_attention(dropping)
    with pytest.raises(UserError, match=r"attention_dropout = 0.1"):
        dropping(**batch)
    cached = model(attention="wlb")
    before = cached(**batch | {"use_cache": True})
    with pytest.raises(UserError, match="there is a cache"):
        cached(input_ids=torch.zeros(1, 1, dtype=torch.int64), past_key_values=before.past_key_values, use_cache=True)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Llama4"])
def test_a_model_that_trains_packed_generates_and_takes_padded_batches_without_gradients(family: str):
    packed, usual = model(family), model(family)
    register_attention(packed)
    ids = torch.tensor([DOCUMENTS[2]["input_ids"][:40], [0] * 10 + DOCUMENTS[3]["input_ids"][:30]])
    padded = {"input_ids": ids, "attention_mask": (torch.arange(40) >= torch.tensor([[0], [10]])).long()}
    together = FlatteningCollator()(DOCUMENTS)
    by_positions = {name: together[name] for name in ("input_ids", "position_ids")}
    for of_model in (packed.eval(), usual.eval()):
        of_model.generation_config.update(max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=None)
    for use_cache in (True, False):
        assert torch.equal(*(one.generate(**padded, use_cache=use_cache) for one in (packed, usual)))
    with torch.no_grad():
        for batch in (padded, by_positions, together):
            found, expected = (one(**{"use_cache": False} | batch).logits for one in (packed, usual))
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        with pytest.raises(UserError, match="attention_mask of shape"):
            packed(**together, attention_mask=torch.ones(1, 545))


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("Bloom", {}, "BloomForCausalLM does not say that it attends through"),
        ("Mamba", {}, "MambaForCausalLM has layers of"),
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "Lfm2ForCausalLM has layers of conv"),
        ("Llama4", {"attention_chunk_size": 128}, "a document has 300 tokens, over the 128 of"),
        ("Gemma2", {"head_dim": 8}, "softcap = 50.0 is not supported"),
        ("GptOss", {"head_dim": 8, **EXPERTS}, r"s_aux of shape \(4,\) is not supported"),
        ("Llama", {"is_causal": False}, "attention that is not causal"),
    ],
)
def test_a_model_that_cannot_be_trained_exactly_is_refused(family: str, settings: dict[str, Any], message: str):
    of_family = model(family, None, **settings)

    def train_packed() -> None:
        register_attention(of_family)
        of_family(**FlatteningCollator()(DOCUMENTS))

    with pytest.raises(UserError, match=message):
        train_packed()


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}
BY_LENGTH: dict[str, dict[str, Any]] = {
    "Phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128, "pad_token_id": 0},
    "Llama": {
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        "max_position_embeddings": 128,
    },
}


@pytest.mark.parametrize("family", BY_LENGTH)
def test_documents_that_change_the_rotary_scaling_of_others_are_refused(tmp_path: Path, family: str):
    scaled = model(family, **BY_LENGTH[family])
    register_attention(scaled)
    message = "a document has 300 tokens, and past 128 the model's rotary scaling, (longrope|dynamic), changes"
    packed = FlatteningCollator()(DOCUMENTS)
    with pytest.raises(UserError, match=message):
        scaled(**packed)
    with pytest.raises(UserError, match=message):
        check_batch(scaled, packed)
    assert check_batch(scaled, FlatteningCollator()(DOCUMENTS[1:])).gradient_error < 1e-7
    if importlib.util.find_spec("accelerate"):
        by_sdpa = model(family, **BY_LENGTH[family])
        with pytest.raises(UserError, match=message):
            balanced(transformers.Trainer, context_window=300)(by_sdpa, arguments(str(tmp_path)), None, DOCUMENTS)


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
    """Also writes down which documents went through, after those of the check."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def forget_the_check(self) -> Any:
        collator = self

        class Callback(transformers.TrainerCallback):
            def on_epoch_begin(self, *positional: Any, **arguments: Any) -> None:
                collator.seen.clear()

        return Callback()

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
    trainer.add_callback(collator.forget_the_check())
    trainer.train(resume_from_checkpoint=resume)
    weights = torch.cat([parameter.detach().flatten() for parameter in packed.parameters()])
    assert len(trainer.balance_monitor.predicted) == len(trainer.balance_monitor.measured)
    return weights, collator.seen, trainer.state.global_step


def one_at_a_time(epochs: int, smoothing: float = 0.0, **planning: Any) -> torch.Tensor:
    """The same steps of plain SGD, a document at a time in one process, by transformers' own attention."""
    from wlb.integrations.batches import PlannedBatchSampler

    oracle = model()
    planned = PlannedBatchSampler(
        LENGTHS,
        context_window=128,
        micro_batches=2,
        epochs=epochs,
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
            scores = oracle(input_ids=ids).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(scores, ids[0, 1:], reduction="sum", label_smoothing=smoothing)
            (loss / labelled).backward()
        with torch.no_grad():
            for parameter in oracle.parameters():
                parameter -= 1e-3 * parameter.grad
    return torch.cat([parameter.detach().flatten() for parameter in oracle.parameters()])


def test_a_trainer_takes_every_document_once_an_epoch_and_resumes_exactly(tmp_path: Path):
    pytest.importorskip("accelerate")
    save: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5}
    weights, seen, steps = train(str(tmp_path / "whole"), **save)
    assert Counter(seen) == dict.fromkeys(range(len(DATA)), 2)
    assert relative(weights, one_at_a_time(2)) < 1e-7
    # A loader with workers is ahead of what a checkpoint has trained.
    train(str(tmp_path / "ahead"), **save, dataloader_num_workers=2, max_steps=7)
    again, rest, of_all = train(str(tmp_path / "ahead"), resume=str(tmp_path / "ahead" / "checkpoint-5"))
    assert torch.equal(again, weights)
    assert of_all == steps
    assert len(rest) < len(seen)


def test_samples_in_a_second_count_the_documents_of_all_epochs(tmp_path: Path):
    pytest.importorskip("accelerate")

    def samples(**settings: Any) -> float:
        trainer = balanced(transformers.Trainer, context_window=128)(
            model(), arguments(str(tmp_path), **settings), None, DATA
        )
        values: Any = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
        return float(values[3])

    assert samples() == 2 * len(DATA)
    assert samples(num_train_epochs=3) == 3 * len(DATA)
    sampler = PlannedBatchSampler(
        LENGTHS,
        context_window=128,
        micro_batches=2,
        epochs=None,
        model=model_shape_of(model().config),
        hardware="cpu",
        seed=42,
    )
    assert samples(max_steps=7) == sum(
        len([*plan.segments]) for plan, _ in zip(sampler.steps(), range(7), strict=False)
    )


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


def test_a_trainer_resumes_with_other_settings_and_loses_nothing(two_processes: list[FoundByRank], tmp_path: Path):
    one, other = two_processes
    seen = Counter([*one.first, *one.apart, *other.apart, *one.together])
    folder, save = str(tmp_path), {**SAVING, "gradient_accumulation_steps": 4}
    shutil.copytree(one.folder, folder, dirs_exist_ok=True)
    seen.update(train(folder, True, **save, max_steps=12, save_only_model=True)[1])
    elastic = {"context_window": 160, "preset": "elastic", "pool": 1, "pool_micro_batches": 3}
    seen.update(train(folder, True, elastic, **save)[1])
    assert seen == dict.fromkeys(range(len(DATA)), 2)


def test_a_last_step_of_more_micro_batches_is_several_of_the_trainers_and_loses_nothing():
    lengths = [21, 25, 13, 16, 32, 26, 32, 13]
    sampler = PlannedBatchSampler(lengths, context_window=32, model="tiny", micro_batches=2, dp=2, epochs=2)
    assert sampler.micro_batches_of_steps() == [2, 3]
    batches = TrainedBatches(sampler, max_steps=-1)
    assert Counter(index for batch in batches for index in batch) == Counter([*range(8)] * 2)
    assert batches.state_after(1) is not None
    assert batches.state_after(2) is None  # the last micro-batches are still to come
    assert batches.state_after(3) is not None


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


SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
PLANNINGS: tuple[tuple[dict[str, Any], int, float], ...] = (  # planning, readers of a document, label smoothing
    ({}, 1, 0.0),
    ({"cp": 2}, 2, 0.1),
    ({"preset": "elastic", "pool": 2, "pool_micro_batches": 3}, 2, 0.0),
)


class FoundByRank(NamedTuple):
    """What one of two processes found."""

    gradients: tuple[list[torch.Tensor], tuple[float, bool], list[torch.Tensor]]
    trained: list[tuple[torch.Tensor, list[int], int]]
    # A job in ``folder``, step by step: documents of three steps of one process, of three with a share for each rank,
    # and of three in which both share every micro-batch.
    folder: str
    first: list[int]
    apart: list[int]
    together: list[int]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> list[FoundByRank]:
    """One start for all tests, as importing transformers takes a process seconds."""
    pytest.importorskip("accelerate")
    folder = str(tmp_path_factory.mktemp("resumed"))
    first = train(folder, **SAVING, max_steps=3)[1]
    return run_ranks(2, _find_on_a_rank, str(tmp_path_factory.mktemp("trained")), folder, first)


def _find_on_a_rank(folder: str, resumed: str, first: list[int]) -> FoundByRank:
    gradients = _context_parallel_gradients()
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="0")
    trained = _train_on_a_rank(folder)
    apart = train(resumed, True, **SAVING, max_steps=6)[1]
    dist.barrier()  # the checkpoint is there
    together = train(resumed, True, {"cp": 2}, **SAVING, max_steps=9)[1]
    return FoundByRank(gradients, trained, resumed, first, apart, together)


def _train_on_a_rank(folder: str) -> list[tuple[torch.Tensor, list[int], int]]:
    with pytest.raises(UserError, match=r"would train different plans: digest of lengths .* differ"):
        # Before the check, in which other documents would be other collectives.
        balanced(transformers.Trainer, context_window=128)(
            model=model(), args=arguments(folder), train_dataset=DATA[dist.get_rank() :][:80]
        ).train()
    for trainer_class in (ForgetsProcesses, RemembersProcesses):
        trainer = balanced(trainer_class, context_window=128)(
            model=model(), args=arguments(folder, max_steps=1), train_dataset=DATA
        )
        with (
            pytest.raises(UserError, match=r"compute_loss divides by num_items_in_batch.* be 2 times too small")
            if trainer_class is ForgetsProcesses
            else nullcontext()
        ):
            trainer.train()
        assert trainer.state.global_step == (trainer_class is RemembersProcesses)
    return [
        train(folder, planning=planning, label_smoothing_factor=smoothing, num_train_epochs=1)
        for planning, _, smoothing in PLANNINGS
    ]


def test_two_processes_train_as_one(two_processes: list[FoundByRank]):
    ranks = zip(*(of_rank.trained for of_rank in two_processes), strict=True)
    for (planning, readers, smoothing), results in zip(PLANNINGS, ranks, strict=True):
        expected = one_at_a_time(1, smoothing, **planning | {"dp": 2 // planning.get("cp", 1)})
        for weights, _, _ in results:
            assert relative(weights, expected) < 1e-7, planning
        seen = Counter(document for _, documents, _ in results for document in documents)
        assert seen == dict.fromkeys(range(len(DATA)), readers)  # ranks that share micro-batches read the same


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        ({"num_train_epochs": 1.5}, {}, "num_train_epochs = 1.5"),
        ({"save_strategy": "epoch"}, {}, 'save_strategy = "epoch"'),
        ({"use_cache": True}, {"use_cache": True}, "use_cache = True"),
        ({"train_sampling_strategy": "group_by_length"}, {}, 'train_sampling_strategy = "group_by_length"'),
        ({"ignore_data_skip": True}, {}, "ignore_data_skip = True"),
        (
            {"neftune_noise_alpha": 5.0},
            {},
            "neftune_noise_alpha = 5.0: NEFTune divides its noise by the root of a row's",
        ),
        ({}, {"family": "Bloom", "attention": None}, "BloomForCausalLM does not say that it attends"),
        ({}, {"accepts_loss_kwargs": False}, "takes no num_items_in_batch"),
    ],
)
def test_a_trainer_refuses_what_breaks_packing(
    tmp_path: Path, settings: dict[str, Any], change: dict[str, Any], message: str
):
    pytest.importorskip("accelerate")
    packed = model(**change)
    packed.accepts_loss_kwargs = change.get("accepts_loss_kwargs", True)
    with pytest.raises(UserError, match=message):
        balanced(transformers.Trainer, context_window=128)(
            model=packed, args=arguments(str(tmp_path), **settings), train_dataset=DATA
        )


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"loss_mask": [0, 1]}, "not known to read loss_mask"),
        ({"attention_mask": [1, 0]}, "not known to cut off padding"),
    ],
)
def test_masks_that_another_collator_would_pass_over_are_refused(
    tmp_path: Path, field: dict[str, list[int]], message: str
):
    pytest.importorskip("accelerate")
    with pytest.raises(UserError, match=message):
        balanced(transformers.Trainer, context_window=128)(
            model=model(),
            args=arguments(str(tmp_path)),
            train_dataset=[{"input_ids": [1, 2], **field}],
            data_collator=transformers.DataCollatorWithFlattening(),
        )


class Table(list[dict[str, Any]]):
    """The part of ``datasets.Dataset`` that a Trainer uses which removes no columns."""

    @property
    def column_names(self) -> list[str]:
        return list(super().__getitem__(0))

    def __getitem__(self, key: Any) -> Any:
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("length", ["tokens", "characters", "padded tokens"])
def test_a_column_of_lengths_is_held_to_the_documents(tmp_path: Path, length: str, check: bool):
    pytest.importorskip("accelerate")
    factor, added = {"tokens": (1, 0), "characters": (4, 0), "padded tokens": (1, 1)}[length]
    rows: Any = Table(
        {"input_ids": [5] * tokens + [0] * added, "attention_mask": [1] * tokens + [0] * added}
        | {"length": factor * tokens + added, "text": "as long as it is"}
        for tokens in (20, 9, 31, 14)
    )
    installed = importlib.util.find_spec("datasets") is not None
    settings = {"max_steps": 1, "gradient_accumulation_steps": 1, "remove_unused_columns": installed}
    rows = importlib.import_module("datasets").Dataset.from_list(rows) if installed else rows
    trainer = balanced(transformers.Trainer, context_window=128, check=check)(
        model(), arguments(str(tmp_path), **settings), None, rows
    )
    if length == "tokens":
        trainer.train()
    else:
        with pytest.raises(UserError, match=r"a document has \d+ tokens, and \d+ by the data set's column length"):
            trainer.train()
    assert trainer.state.global_step == (length == "tokens")


@pytest.mark.parametrize("check", [True, False])
def test_a_collator_that_pads_documents_to_rows_is_refused(tmp_path: Path, check: bool):
    pytest.importorskip("accelerate")

    def padding(documents: Any) -> dict[str, Any]:
        rows = [torch.tensor(document["input_ids"]) for document in documents]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.where(ids > 0, -100)}

    trainer = balanced(transformers.Trainer, context_window=128, check=check)(
        model(), arguments(str(tmp_path)), padding, DATA
    )
    with pytest.raises(UserError, match=r"the data collator padding makes \d+ padded rows of documents"):
        trainer.train()


def test_arguments_are_left_alone_and_planned_by(tmp_path: Path):
    pytest.importorskip("accelerate")
    given = arguments(str(tmp_path), num_train_epochs=3, max_steps=2)
    alone = [{"input_ids": [5] * 128}] * 6  # no micro-batch has several, in a stream that does not end
    trainer = balanced(transformers.Trainer, context_window=128)(model(), given, None, alone)
    trainer.train()
    assert (given.num_train_epochs, trainer.state.global_step) == (3, 2)
    trainer.args.gradient_accumulation_steps = 4
    with pytest.raises(UserError, match="gradient_accumulation_steps was 2 when the steps were planned, and is 4"):
        trainer.train()
    trainer.train_dataset = [*alone, alone[0]]
    with pytest.raises(UserError, match="train_dataset is another one than the steps were planned by"):
        trainer.train()


class OwnModel(torch.nn.Module):
    """A model without a configuration, which keeps documents apart by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(97, 16, dtype=torch.float64)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None, **batch: Any
    ) -> dict[str, torch.Tensor]:
        hidden = self.embedding(input_ids[0])
        heads = hidden[:, None]
        hidden = hidden + segment_attention(heads, heads, heads, batch["cu_seq_lens_q"].diff().tolist())[:, 0]
        scores = hidden @ self.embedding.weight.T
        total = torch.nn.functional.cross_entropy(scores[:-1], labels[0, 1:], reduction="sum")
        return {"loss": total / num_items_in_batch}


def without_positions(documents: Any) -> dict[str, Any]:
    batch = FlatteningCollator()(documents)
    return {name: value for name, value in batch.items() if name != "position_ids"}


@pytest.mark.parametrize("collator", [None, without_positions])
def test_a_model_without_a_configuration_is_trained_with_a_shape_to_price_it_by(tmp_path: Path, collator: Any):
    pytest.importorskip("accelerate")
    trainer_class = balanced(transformers.Trainer, context_window=128, model="tiny")
    trainer = trainer_class(OwnModel(), arguments(str(tmp_path), max_steps=2), collator, DATA)
    trainer.train()
    assert trainer.state.global_step == 2
    with pytest.raises(UserError, match=r"OwnModel has no config to price documents by; give balanced\(\.\.\., model="):
        balanced(transformers.Trainer, context_window=128)(OwnModel(), arguments(str(tmp_path)), None, DATA)
    with pytest.raises(UserError, match="OwnModel is no model of transformers"):
        register_attention(OwnModel())


def test_a_trainer_without_training_documents_evaluates(tmp_path: Path):
    pytest.importorskip("accelerate")
    packed = model()
    register_attention(packed)
    trainer = balanced(transformers.Trainer, context_window=128)(
        packed, arguments(str(tmp_path), per_device_eval_batch_size=90), eval_dataset=DATA
    )
    oracle, total = model(), 0.0
    for document in DATA:
        ids = torch.tensor([document["input_ids"]])
        total += oracle(input_ids=ids, labels=ids, num_items_in_batch=1).loss.item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(total / sum(LENGTHS - 1), rel=1e-6)
    with pytest.raises(UserError, match="there are no documents to train; give train_dataset"):
        trainer.train()


@pytest.mark.parametrize("name", ["DPOTrainer", "GRPOTrainer", "RewardTrainer"])
def test_trainers_of_other_than_documents_are_refused(name: str):
    if importlib.util.find_spec("trl"):
        trainer_class = getattr(importlib.import_module("trl"), name)
    else:
        trainer_class = type(name, (transformers.Trainer,), {"__module__": f"trl.trainer.{name}"})
    with pytest.raises(UserError, match=f"{name} learns from pairs, rewards or what it generates"):
        balanced(trainer_class, context_window=128)


def _documents() -> Any:
    yield from DATA


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"train": DATA, "test": DATA}, "train_dataset is a dict of train, test, and not a sequence"),
        ({"input_ids": [[1, 2, 3], [4, 5]]}, r"a dict of input_ids.* datasets\.Dataset\.from_dict"),
        (_documents, "train_dataset is the function _documents; give what it returns"),
        (_documents(), "a stream of documents has no lengths to plan by"),
    ],
)
def test_a_trainer_refuses_what_holds_no_documents(tmp_path: Path, dataset: Any, message: str):
    pytest.importorskip("accelerate")
    with pytest.raises(UserError, match=message):
        balanced(transformers.Trainer, context_window=128)(model(), arguments(str(tmp_path)), None, dataset)


def test_a_trainer_refuses_classification_prompt_tuning_and_packing_by_others(tmp_path: Path):
    pytest.importorskip("accelerate")
    trainer_class, args = balanced(transformers.Trainer, context_window=128), arguments(str(tmp_path))
    torch.manual_seed(0)
    classifier = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES, pad_token_id=0))
    labelled = [document | {"label": 1} for document in DATA]
    with pytest.raises(UserError, match="LlamaForSequenceClassification does not learn the next token"):
        trainer_class(classifier, args, None, labelled)
    if importlib.util.find_spec("peft"):
        peft = importlib.import_module("peft")
        prompted = peft.get_peft_model(model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    else:
        prompted = model()
        prompted.peft_config = {"default": SimpleNamespace(is_prompt_learning=True)}
    with pytest.raises(UserError, match="prompt and prefix tuning put their tokens before a row"):
        trainer_class(prompted, args, None, DATA)
    args.packing = True
    with pytest.raises(UserError, match="SFTTrainer must leave packing to the sampler; set packing=False"):
        trainer_class(model(), args, None, DATA)


class Leaking(transformers.LlamaForCausalLM):
    def forward(self, *positional: Any, position_ids: Any = None, **arguments: Any) -> Any:
        return super().forward(*positional, **arguments)  # so that documents attend each other


class Here(NamedTuple):
    """Where a model lets documents attend each other: of the kind given, everywhere else it does not."""

    long: bool = False
    many: bool = False
    training: bool = False


class LeakingAtTimes(transformers.LlamaForCausalLM):
    here = Here()

    def forward(self, *positional: Any, position_ids: Any = None, **arguments: Any) -> Any:
        lengths = arguments["cu_seq_lens_q"].diff().tolist()
        leaks = Here(max(lengths) == max(LENGTHS), len(lengths) > 6, self.training)
        if any(leaking and here for leaking, here in zip(leaks, self.here, strict=True)):
            position_ids = None
        return super().forward(*positional, position_ids=position_ids, **arguments)


class LearnsFirst(FlatteningCollator):
    def __call__(self, documents: Any) -> dict[str, Any]:
        batch = super().__call__(documents)
        return {**batch, "labels": batch["input_ids"].clone()}


class ForgetsProcesses(transformers.Trainer):
    def compute_loss(self, model: Any, inputs: Any, *_: Any, num_items_in_batch: Any = None, **more: Any) -> Any:
        return model(**inputs, num_items_in_batch=num_items_in_batch).loss


class RemembersProcesses(ForgetsProcesses):
    def compute_loss(self, *positional: Any, num_items_in_batch: Any = None, **more: Any) -> Any:
        loss = super().compute_loss(*positional, num_items_in_batch=num_items_in_batch, **more)
        return loss if num_items_in_batch is None else loss * self.accelerator.num_processes


@pytest.mark.parametrize("here", [Here(long=True), Here(many=True), Here(training=True), Here()], ids=str)
def test_the_check_sees_long_documents_many_short_ones_and_training_mode(tmp_path: Path, here: Here):
    pytest.importorskip("accelerate")
    leaking = LeakingAtTimes(model().config).double()
    leaking.here = here
    trainer = balanced(transformers.Trainer, context_window=128)(
        leaking, arguments(str(tmp_path), max_steps=1), None, DATA
    )
    if any(here):
        with pytest.raises(UserError, match="packed documents train something else"):
            trainer.train()
    else:
        trainer.train()
    assert trainer.state.global_step == (not any(here))


def test_the_check_sees_labels_as_the_collator_makes_them(tmp_path: Path):
    pytest.importorskip("accelerate")
    trainer = balanced(transformers.Trainer, context_window=128)(model(), arguments(str(tmp_path)), LearnsFirst(), DATA)
    with pytest.raises(UserError, match="packed documents train something else"):
        trainer.train()


def test_the_check_sees_dropout_that_our_attention_has_not(tmp_path: Path):
    pytest.importorskip("accelerate")
    dropping = model(attention_dropout=0.1)
    register_attention(dropping)
    trainer = balanced(transformers.Trainer, context_window=128)(dropping, arguments(str(tmp_path)), None, DATA)
    with pytest.raises(UserError, match=r"attention_dropout = 0.1 is not supported"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert dropping.config.attention_dropout == 0.1


class AveragedLoss(transformers.Trainer):
    def compute_loss(self, model: Any, inputs: Any, *positional: Any, **arguments: Any) -> Any:
        return model(**inputs).loss


@pytest.mark.parametrize(
    ("trainer_class", "family", "settings"),
    [
        (transformers.Trainer, "Leaking", {}),
        (transformers.Trainer, "Mixtral", {**EXPERTS, "output_router_logits": True}),  # an auxiliary loss is a mean
        (AveragedLoss, "Llama", {}),
    ],
)
def test_training_does_not_begin_where_packing_changes_it(
    tmp_path: Path, trainer_class: Any, family: str, settings: dict[str, Any]
):
    pytest.importorskip("accelerate")
    leaking = Leaking(model().config).double() if family == "Leaking" else model(family, None, **settings)
    documents = [{**document, "loss_mask": [0] * len(document["input_ids"])} for document in DATA]
    trainer = balanced(trainer_class, context_window=128)(
        model=leaking, args=arguments(str(tmp_path)), train_dataset=documents if family == "Leaking" else DATA
    )
    with pytest.raises(UserError, match="packed documents train something else"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert all(parameter.grad is None for parameter in leaking.parameters())


def _count_tokens(module: Any, positional: Any, arguments: dict[str, Any]) -> None:
    module.tokens += arguments["input_ids"].numel()


def test_the_check_changes_nothing_that_is_trained(tmp_path: Path):
    pytest.importorskip("accelerate")
    weights = []
    for check in (True, False):
        dropping = model("OPT", dropout=0.1, ffn_dim=64, word_embed_proj_dim=32)  # dropout by the layers themselves
        dropping.register_buffer("tokens", torch.zeros(()))
        dropping.register_forward_pre_hook(_count_tokens, with_kwargs=True)
        register_attention(dropping)
        settings = {"max_steps": 2, "gradient_checkpointing": True}
        trainer = balanced(transformers.Trainer, context_window=128, check=check)(
            model=dropping, args=arguments(str(tmp_path), **settings), train_dataset=DATA
        )
        trainer.train()
        weights.append(torch.cat([value.flatten() for value in dropping.state_dict().values()]))
    assert torch.equal(*weights)
