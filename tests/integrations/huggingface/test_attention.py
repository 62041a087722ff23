"""Unmodified Hugging Face models under our attention, against one document at a time in float64."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests.cases import in_turn
from tests.integrations.huggingface.models import (
    DOCUMENTS,
    EXPERTS,
    FAMILIES,
    gradient,
    model,
    relative,
    single_gradient,
    transformers,
)
from tests.training.distributed import run_ranks
from wlb.errors import UserError
from wlb.integrations.huggingface import check_packing, register_attention
from wlb.integrations.packed import FlatteningCollator, packed_batches
from wlb.workload.model_json import shape_of_config


def checked(of: Any, **wrapped: Any) -> float:
    """The error that the check finds."""
    batches = [FlatteningCollator()(documents) for documents in (DOCUMENTS, *([one] for one in DOCUMENTS))]
    together, *singles = (lambda batch=batch: of(**batch, num_items_in_batch=1).loss for batch in batches)
    return check_packing(of, together, singles, **wrapped)


@pytest.mark.proves("packed batches")
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_train_as_single_ones(family: str):
    packed = model(family)
    register_attention(packed)
    batch = FlatteningCollator()(DOCUMENTS)
    packed(**batch, num_items_in_batch=1).loss.backward()
    assert relative(gradient(packed), single_gradient(family)) < 1e-7  # transformers takes the loss in float32
    assert checked(packed, wrapped=torch.compile(packed)) < 1e-7  # nothing runs compiled, which would take minutes


PLANNED: dict[str, Any] = {"context_window": 300, "micro_batches": 1, "model": "tiny", "hardware": "cpu"}


def _loop_gradient(documents: list[Any], window: int = 64, **sizes: Any) -> torch.Tensor:
    """Of the loop in the README, summed over all steps of the loss over their labelled tokens."""
    packed = model("Mistral", sliding_window=window)
    register_attention(packed)
    for step in packed_batches(documents, **PLANNED, **sizes):
        for batch in step.batches:
            (batch.loss(packed(**batch).logits) / batch.ranks).backward()
    return gradient(packed)


def _loop_oracle(documents: list[Any], window: int = 64, **sizes: Any) -> torch.Tensor:
    """The same, one document at a time by transformers' own attention."""
    oracle = model("Mistral", sliding_window=window)
    for step in packed_batches(documents, **PLANNED, **sizes):
        for segment in step.plan.segments:
            ids = torch.tensor(documents[segment.document]["input_ids"])
            scores = oracle(input_ids=ids[None]).logits[0, :-1]
            (torch.nn.functional.cross_entropy(scores, ids[1:], reduction="sum") / step.loss_tokens).backward()
    return gradient(oracle)


@pytest.mark.proves("packed batches")
@pytest.mark.parametrize("window", [64, 4096], ids=["documents over the window", "Mistral's default"])
def test_the_loop_of_the_readme_trains_as_single_documents(window: int):
    found = _loop_gradient(DOCUMENTS, window)
    assert relative(found, _loop_oracle(DOCUMENTS, window)) < 1e-12


def test_ranks_cannot_share_layers_with_a_state(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "causal_conv1d", ModuleType("causal_conv1d"))
    register_attention()  # for no model: its name
    shared = model("Lfm2", attention="wlb", layer_types=["full_attention", "conv"])
    with pytest.raises(
        UserError, match=r"layers of conv(, which learn where documents end since| cannot be shared by ranks)"
    ):
        shared(**next(packed_batches(DOCUMENTS, dp=1, cp=2, rank=0, **PLANNED)).batches[0])


def test_packed_documents_train_as_single_ones_under_autocast():
    packed = model().float()
    register_attention(packed)
    with torch.autocast("cpu", torch.bfloat16):  # queries and keys come in float32 and values do not
        assert 0 < checked(packed) < 2e-2


SHARED = (
    ("Llama", "adaptive", "of the model"),
    ("Llama", "per_document", "of labels"),
    ("Llama", "per_sequence", "of the model"),
    ("Llama", "balanced", "of the model"),
    ("Qwen3", "balanced", "of labels"),
    ("Mistral", "per_document", "of the model"),
    ("DeepseekV3", "balanced", "of the model"),
)
LOOPS = (DOCUMENTS, DOCUMENTS[1:2])  # under balanced sharding one rank has nothing of the second


def _context_parallel_gradients() -> tuple[list[torch.Tensor], tuple[float, bool], list[torch.Tensor]]:
    loops = [_loop_gradient(documents, cp=2) for documents in LOOPS]
    for total in loops:
        dist.all_reduce(total)
    return [_context_parallel_gradient(*case) for case in SHARED], _check_of_sharded_weights(), loops


def _check_of_sharded_weights() -> tuple[float, bool]:
    """The check's error under FSDP2, and whether it leaves no gradient behind."""
    sharded = model()
    register_attention(sharded)
    fully_shard(sharded)
    return checked(sharded, wrapped=sharded), all(parameter.grad is None for parameter in sharded.parameters())


def _context_parallel_gradient(family: str, sharding: str, loss: str) -> torch.Tensor:
    """With the inputs of a Trainer."""
    packed = model(family)
    register_attention(packed)
    steps = [step for documents in LOOPS for step in packed_batches(documents, cp=2, sharding=sharding, **PLANNED)]
    for batch in (batch.with_labels() for step in steps for batch in step.batches):
        output = packed(**batch, num_items_in_batch=1)
        if loss == "of labels":  # as compute_loss_func gets them, and label smoothing: still to be shifted
            scores, labels = output.logits[0, :-1], batch["labels"][0, 1:]
            torch.nn.functional.cross_entropy(scores, labels, reduction="sum").backward()
        else:
            output.loss.backward()
    total = gradient(packed)
    dist.all_reduce(total)
    return total


@pytest.mark.proves("context parallelism")
def test_context_parallel_ranks_train_an_unmodified_model():
    expected = {family: single_gradient(family, [*DOCUMENTS, DOCUMENTS[1]]) for family, *_ in SHARED}
    of_loops = [_loop_oracle(documents) for documents in LOOPS]
    for totals, (sharded_error, restored), loops in run_ranks(2, _context_parallel_gradients):
        assert all(error < 1e-12 for error in map(relative, loops, of_loops))
        assert sharded_error < 1e-7
        assert restored
        errors = {case: relative(total, expected[case[0]]) for case, total in zip(SHARED, totals, strict=True)}
        assert all(error < 1e-7 for error in errors.values()), errors


def test_what_would_silently_train_something_else_is_refused():
    packed = model()
    register_attention(packed)
    batch = FlatteningCollator()(DOCUMENTS)
    rows = {"input_ids": torch.zeros(2, 545, dtype=torch.int64), "cu_seq_lens_q": batch["cu_seq_lens_q"]}
    for given, message in (
        (batch | {"attention_mask": torch.ones(1, 545)}, r"attention_mask of shape \(1, 545\)"),
        ({name: value for name, value in batch.items() if name != "cu_seq_lens_q"}, "no cu_seq_lens_q"),
        (rows, "a batch of 2 rows"),
    ):
        with pytest.raises(UserError, match=message):
            packed(**given)
    with pytest.raises(UserError, match="use_cache = True"):
        register_attention(model(use_cache=True))
    dropping, cached = model(attention="wlb", attention_dropout=0.1), model(attention="wlb")
    with pytest.raises(UserError, match=r"attention_dropout = 0.1"):
        dropping(**batch)
    before = cached(**batch | {"use_cache": True})
    cache = {name: before[name] for name in ("cache", "past_key_values") if name in before}  # its new name, and the old
    with pytest.raises(UserError, match="there is a cache"):
        cached(input_ids=torch.zeros(1, 1, dtype=torch.int64), **cache, use_cache=True)


class Wrapped(torch.nn.Module):
    """As DDP holds a model."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, **batch: Any) -> Any:
        return self.module(**batch)


@in_turn(
    ("family", "settings", "message"),
    [
        ("GPT2", {}, "GPT2LMHeadModel attends with sdpa, which may mix the documents of a PackedBatch; call register"),
        ("Falcon", {}, "FalconForCausalLM attends with sdpa"),
        ("Mamba", {"attention": None}, "MambaForCausalLM attends with"),
        ("Mixtral", {"attention": "flash_attention_2"}, "output_router_logits = True adds a router loss"),
        ("Llama", {"attention": "flash_attention_2", "cp": 2}, "LlamaForCausalLM attends with flash_attention_2"),
    ],
)
def test_a_model_that_mixes_the_documents_of_a_loop_is_refused(family: str, settings: dict[str, Any], message: str):
    cp, attention = settings.get("cp", 1), settings.get("attention", "sdpa")
    of_family = model(family, None if attention == "flash_attention_2" else attention)
    if attention == "flash_attention_2":  # its kernels are not here
        of_family.config._attn_implementation_internal = attention
    of_family.config.output_router_logits = family == "Mixtral"
    batch = next(packed_batches(DOCUMENTS, dp=1, cp=cp, rank=0, **PLANNED)).batches[0]
    for of_model in (of_family, Wrapped(of_family)):
        keywords = {**batch}
        of_family.get_input_embeddings()(torch.ones(1, dtype=torch.int64))  # not the model that gets them
        with pytest.raises(UserError, match=message):
            of_model(**keywords)


def test_a_loop_cannot_give_labels_which_a_model_averages_over_the_micro_batch():
    packed = model()
    register_attention(packed)
    batch = next(packed_batches(DOCUMENTS, **PLANNED)).batches[0]
    with pytest.raises(TypeError, match="multiple values for keyword argument 'labels'"):
        packed(**batch, labels=batch.labels[None])


class OnGpu(torch.Tensor):
    """Boundaries that are read as if from a GPU."""

    device = torch.device("cuda")
    reads = 0

    def tolist(self) -> Any:
        OnGpu.reads += 1
        return super().tolist()


def test_boundaries_that_are_written_again_are_read_again_and_those_of_a_gpu_once_a_micro_batch():
    packed = model()
    register_attention(packed)
    first, second = (FlatteningCollator()(documents) for documents in (DOCUMENTS, DOCUMENTS[::-1]))
    expected = packed(**second).logits
    static = first["cu_seq_lens_q"].numpy().copy()
    for boundaries in (torch.from_numpy(static), first["cu_seq_lens_q"].as_subclass(OnGpu)):
        packed(**first | {"cu_seq_lens_q": boundaries})
        if isinstance(boundaries, OnGpu):
            boundaries.copy_(second["cu_seq_lens_q"])
        else:
            static[:] = second["cu_seq_lens_q"]  # torch does not count this
        torch.testing.assert_close(packed(**second | {"cu_seq_lens_q": boundaries}).logits, expected)
    assert OnGpu.reads == 2  # for two layers each


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


OF_128 = {"max_position_embeddings": 128, "original_max_position_embeddings": 128, "pad_token_id": 0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
SCALED = "a document has 300 tokens, and over 128 tokens rotary scaling "


@in_turn(
    ("family", "settings", "message"),
    [
        ("Phi3", OF_128 | {"rope_parameters": LONGROPE}, f"{SCALED}longrope changes"),
        ("Llama", OF_128 | {"rope_parameters": DYNAMIC}, f"{SCALED}dynamic changes"),
        ("Bloom", {}, "BloomForCausalLM does not use transformers' AttentionInterface"),
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


def test_documents_are_priced_for_the_model():
    shape = shape_of_config(model().config)
    assert (shape.hidden, shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (32, 2, 4, 2, 8)
    gemma = transformers.Gemma3TextConfig(
        layer_types=["sliding_attention"] * 5 + ["full_attention"], num_hidden_layers=6
    )
    assert shape_of_config(gemma).full_attention_every == 6
    assert shape_of_config(transformers.Phi3Config()).layers == 32  # of no family that is known: a dense decoder
