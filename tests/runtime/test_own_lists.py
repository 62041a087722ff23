"""Level steps in a loop of one's own: exact under DDP and FSDP2, also after a kill, and free of deadlocks."""

import os
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from tests.training.distributed import RankFailure, run_ranks
from wlb.attention import segment_attention
from wlb.documents.segments import Segment
from wlb.errors import UserError
from wlb.integrations.huggingface import register_attention
from wlb.integrations.packed import PackedSteps, packed_batches
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.runtime import level_step, own_lists
from wlb.runtime.own_lists import own_batches, unsharded_bytes
from wlb.workload import make_workload

RANDOM = np.random.default_rng(3)
LENGTHS = [*RANDOM.integers(2, 40, 40), 256, 250, *RANDOM.integers(2, 40, 40)]
DOCUMENTS = [RANDOM.integers(0, 61, length) for length in LENGTHS]


def llama() -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, use_cache=False)).double()
    register_attention(model)
    return model


def steps_of(documents: Any = DOCUMENTS, **settings: Any) -> PackedSteps:
    """No rank holds a document of a whole window, so some are shared."""
    sizes: dict[str, Any] = {"context_window": 256, "micro_batches": 1, "max_length_factor": 0.5}
    return packed_batches(documents, own_lists=True, **sizes | {"model": "tiny"} | settings)


class Holder(nn.Module):
    """A module of the user's that is not itself the one that reduces gradients."""

    def __init__(self, parallel: nn.Module) -> None:
        super().__init__()
        self.parallel = parallel

    def forward(self, **keywords: Any) -> Any:
        return self.parallel(**keywords)


def wrapped(kind: str) -> Any:
    model = llama()
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "held":
        return Holder(DistributedDataParallel(model))
    for block in model.model.layers:
        fully_shard(block)
    return fully_shard(model)


def trained(kind: str, folder: Path | None = None, killed: bool = False) -> tuple[dict[str, Any], list[float], Any]:
    """Weights after all steps, the loss of each, and for every step which of the micro-batches were shared.

    With a ``folder`` rank 0 saves after every step and the ranks go on from there; ``killed``: rank 1 is, in step 3.
    """
    model = wrapped(kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    steps, losses, shared = steps_of(), [], []
    saved = folder / "state.pt" if folder else None
    if saved and saved.exists():
        state = torch.load(saved, weights_only=False)
        set_model_state_dict(model, state["model"])
        steps.load_state_dict(state["steps"])
        losses = state["losses"]
    for step in steps:
        shared.append([batch.is_shared for batch in step.batches])
        if killed and len(losses) == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = level_step(model, step.batches, lambda batch: batch.loss(model(**batch).logits))
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
        inner = model.parallel if kind == "held" else model
        weights = {name: full(weight) for name, weight in get_model_state_dict(inner).items()}
        if saved and dist.get_rank() == 0:
            torch.save({"model": get_model_state_dict(model), "steps": steps.state_dict(), "losses": losses}, saved)
    return weights, losses, shared


def full(weight: Any) -> torch.Tensor:
    whole: torch.Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return whole.detach().clone()


def trained_alone(world_size: int) -> tuple[dict[str, Any], list[float]]:
    """One process, one document at a time, with PyTorch's own attention."""
    model: Any = llama()
    model.set_attn_implementation("sdpa")
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    losses = []
    for step in steps_of(dp=world_size, rank=0):
        documents = [DOCUMENTS[segment.document] for segment in step.plan.segments]
        loss = torch.zeros((), dtype=torch.float64)
        for document in documents:
            ids = torch.from_numpy(document)[None]
            loss = loss + F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum")
        loss = loss / sum(len(document) - 1 for document in documents)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model.state_dict(), losses


@pytest.mark.proves("own lists")
@pytest.mark.parametrize("kind", ["held", "fsdp2"])
def test_level_steps_train_what_one_process_trains_document_by_document(kind):
    weights, losses = trained_alone(2)
    results = run_ranks(2, trained, kind)
    lists = [shared for *_, shared in results]
    assert any(map(any, lists[0]))
    assert any(len({*map(len, of_ranks)}) > 1 for of_ranks in zip(*lists, strict=True))
    for theirs, their_losses, _ in results:
        assert their_losses == pytest.approx(losses, rel=1e-12)
        assert all((theirs[name] - weight).abs().max() < 1e-13 for name, weight in weights.items())


@pytest.mark.proves("resume")
def test_a_killed_job_goes_on_to_the_same_weights(tmp_path):
    undisturbed = run_ranks(2, trained, "ddp")
    # Whichever ends first: the rank that was killed, or the one that reads from it.
    with pytest.raises(RankFailure, match=r"rank 1 died|Connection (reset|closed) by peer"):
        run_ranks(2, trained, "ddp", tmp_path, True)
    for (weights, losses, _), (resumed, all_losses, _) in zip(
        undisturbed, run_ranks(2, trained, "ddp", tmp_path), strict=True
    ):
        assert all_losses == losses
        assert all(torch.equal(weights[name], resumed[name]) for name in weights)


def own(plan: StepPlan, dp_rank: int, cp_rank: int) -> list[MicroBatch]:
    return [*own_batches(plan, dp_rank, cp_rank, lambda part: part)]


def test_the_last_micro_batch_of_a_rank_is_the_last_of_all_that_share_it():
    def micro_batch(document: int, *ranks: int) -> MicroBatch:
        return MicroBatch((Segment(document, 0, 1),), 1.0, ranks)

    both, first, second = micro_batch(0, 0, 1), micro_batch(1, 0), micro_batch(2, 1)
    ends_shared = StepPlan(0, ((first, both),))
    assert own(ends_shared, 0, 0) == [first, both]
    assert own(ends_shared, 0, 1) == [both]
    one_goes_on = StepPlan(0, ((both, first),))
    assert own(one_goes_on, 0, 0) == [both, first]
    assert own(one_goes_on, 0, 1) == [both, MicroBatch((), 0.0, (1,))]
    assert own(StepPlan(0, ((both, second),)), 0, 2) == [MicroBatch((), 0.0, (2,))]
    assert own(StepPlan(0, ((MicroBatch((), 1.0),), (MicroBatch((), 2.0),))), 1, 0) == [MicroBatch((), 2.0)]


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 4)), nn.Linear(4, 2))


def sharded_net() -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = net()
    fully_shard(model[1], mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


class Collectives(TorchDispatchMode):
    """Notes the kind of every collective."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.events.append("gather" if "allgather" in str(func) else "reduce")
        return func(*args, **kwargs or {})


def events_of_a_step() -> tuple[list[str], bool]:
    """What FSDP2 and a rank do in a level step; whether gradients equal those of a reduction in the last backward."""
    events: list[str] = []
    model, plain = sharded_net(), sharded_net()
    inputs = torch.randn(3, 5, 4).unbind()[: 1 + 2 * dist.get_rank()]
    for x in inputs:
        x.requires_grad_().register_hook(lambda _: events.append("backward ends"))

    def loss(x: torch.Tensor) -> torch.Tensor:
        events.append("batch")
        return model(x).square().sum()  # type: ignore[no-any-return]

    with pytest.raises(TypeError):  # a step that failed leaves nothing
        level_step(model, [*inputs, None], loss)  # type: ignore[arg-type]
    events.clear()
    for_ddp: list[Any] = [*inputs, SimpleNamespace(is_empty=True)]
    with Collectives(events):
        level_step(model, for_ddp, loss)
    noted = list(events)
    plain.set_reshard_after_forward(False)
    for index, x in enumerate(inputs):
        plain.set_requires_gradient_sync(index == len(inputs) - 1)
        plain.set_reshard_after_backward(index == len(inputs) - 1)
        plain(x).square().sum().backward()
    same = [
        torch.equal(full(a.grad), full(b.grad)) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    ]
    return noted, all(same)


def test_ranks_meet_at_the_start_and_at_the_end_of_a_step_only():
    ranks = run_ranks(2, events_of_a_step)
    for batches, (events, same) in zip((1, 3), ranks, strict=True):
        assert events == ["gather"] * 2 + ["batch", "backward ends"] * batches + ["reduce"] * 2
        assert same


def gradients_that_would_stay() -> None:
    inner = net()
    cases: list[tuple[Any, Any, str]] = [
        (inner, inner, "Sequential is on 2 processes, and nothing reduces its gradients; give the model that DDP"),
        (DistributedDataParallel(inner), inner, "call the model that it returned, not the module inside it"),
        (DistributedDataParallel(net(), static_graph=True), inner, "static_graph = True of DDP does not accumulate"),
    ]
    mine = torch.full((1, 4), 1.0 + dist.get_rank())
    for model, inside, refusal in cases:
        with pytest.raises(UserError, match=refusal):
            level_step(model, [mine], lambda x: inside(x).sum())  # noqa: B023


def gradients_that_need_no_reduction() -> None:
    own, embedding = net(), nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(own, ["2.weight", "2.bias"])
    mine = torch.full((1, 4), 1.0 + dist.get_rank())
    for model, batch in (DistributedDataParallel(own), mine), (DistributedDataParallel(embedding), mine.long()):
        level_step(model, [batch], lambda x: model(x).sum())  # noqa: B023
    alone = packed_batches(DOCUMENTS, context_window=256, micro_batches=1, model="tiny", dp=1)
    level_step(linear := nn.Linear(1, 1), next(alone).batches, lambda x: linear(x.tokens[:, None] / 9).sum())
    static = DistributedDataParallel(net(), static_graph=True)
    for batch in own_lists.in_turn(static, [mine], keep_weights=False):
        static(batch).sum().backward()


def test_gradients_that_would_stay_on_a_rank_are_refused():
    run_ranks(2, gradients_that_would_stay)
    run_ranks(2, gradients_that_need_no_reduction)


def weights_after_an_evaluation() -> bool:
    """Whether level steps train as plain ones, with an evaluation before every step of the optimizer."""
    model, plain, x = net(), net(), torch.ones(1, 4)
    fully_shard(model[1])
    fully_shard(model)
    for trained_model in (model, plain):
        optimizer = torch.optim.SGD(trained_model.parameters(), 0.1)
        for _ in range(3):
            if trained_model is model:
                level_step(model, [x, x], lambda x: model(x).sum())
            else:
                (2 * plain(x).sum()).backward()
            with torch.no_grad():
                trained_model(x)
            optimizer.step()
            optimizer.zero_grad()
    own_lists.gather_weights(model)
    return torch.allclose(model(x), plain(x))


def test_an_evaluation_before_the_optimizer_leaves_no_old_weights():
    assert run_ranks(1, weights_after_an_evaluation) == [True]


def plans_that_differ() -> None:
    steps = steps_of()
    steps.agree()
    if dist.get_rank():
        next(steps._planned)  # is a step ahead
    with pytest.raises(UserError, match="process 0 planned different steps"):
        next(steps)


def fsdp1_is_refused() -> None:
    model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    with pytest.raises(UserError, match="use fully_shard"):
        level_step(model, [0], lambda _: model(torch.ones(1, 2)).sum())


def test_what_would_deadlock_is_refused():
    run_ranks(2, plans_that_differ)
    run_ranks(1, fsdp1_is_refused)


def test_mistakes_of_a_loop_are_said_in_a_line():
    step = next(packed_batches(DOCUMENTS, context_window=256, micro_batches=1, model="tiny"))
    linear = nn.Linear(2, 2)
    for batches in ((), step):
        with pytest.raises(UserError, match=r"not a list of at least one; give step\.batches"):
            level_step(linear, batches, lambda _: linear(torch.ones(2)).sum())  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"loss_fn returned a NoneType, not a scalar tensor"):
        level_step(linear, [1], lambda _: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(UserError, match=r"logits are a str, and the batch has"):
        step.batches[0].loss("logits")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"give a tensor \(\d+, vocabulary\)"):
        step.batches[0].loss(torch.zeros(2, len(step.batches[0].tokens), 61))
    sizes: dict[str, Any] = {"context_window": 256, "micro_batches": 1, "model": "tiny"}
    for state in ({"step": 1}, {"settings": {"seed": 1}, "first_epoch": 0, "planner": {}}):
        with pytest.raises(UserError, match="the state is no result of state_dict"):
            packed_batches(DOCUMENTS, **sizes, state=state)
    for pool, message in ((1.0, "pool = 1.0 is not a whole number >= 1"), (2, "pool = 2 has no effect with method")):
        with pytest.raises(UserError, match=message):
            packed_batches(DOCUMENTS, **sizes, dp=2, rank=0, pool=pool, preset="plain-4d")
    with pytest.raises(UserError, match=r"packing: max_length_factor = 0\.5 leaves no room for a document"):
        steps_of(dp=1)
    own = {**sizes, "dp": 2, "rank": 0, "own_lists": True}
    assert packed_batches(DOCUMENTS, **own, max_length_factor=np.float32(1.5)).job.max_tokens == 2 * 384
    for changed, message in (
        ({"max_length_factor": "1.5"}, "max_length_factor = '1.5'"),
        ({"workload": make_workload("tiny")}, "workload and phases do not have; leave these out, or own_lists"),
    ):
        with pytest.raises(UserError, match=message):
            packed_batches(DOCUMENTS, **own, **changed)


def test_own_lists_choose_cp_and_preset_and_streams_have_them_too():
    for settings in (
        {"cp": 2, "dp": 1},
        {"preset": "wlb-llm"},
        {"grouping": "level"},
        {"pool": 2},
        {"sharding": "adaptive"},
    ):
        with pytest.raises(UserError, match="own_lists chooses"):
            steps_of(rank=0, **settings)
    stream = steps_of(iter(DOCUMENTS), dp=2, rank=0)
    trained_segments = [segment for step in stream._planned for segment in step.plan.segments]
    assert sum(segment.length for segment in trained_segments) == sum(LENGTHS)


def test_ranks_that_share_experts_run_the_same_micro_batches():
    lists = []
    for rank in range(4):
        steps = steps_of(dp=4, rank=rank, ep=2, model="qwen3-30b-a3b", max_length_factor=0.3)
        mine = [own(plan, 0, rank) for plan in steps.plans()]
        assert any(len(micro_batch.ranks) == 4 for of_step in mine for micro_batch in of_step)
        lists.append([[micro_batch.segments for micro_batch in of_step] for of_step in mine])
    assert lists[0] == lists[1] != lists[2] == lists[3]


class Own(nn.Module):
    """A model that reads nothing but the fields of a batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.qkv, self.head = nn.Embedding(61, 32), nn.Linear(32, 96), nn.Linear(32, 61)

    def forward(self, tokens: torch.Tensor, attention: Any) -> torch.Tensor:
        hidden = self.embedding(tokens)
        heads = self.qkv(hidden).unflatten(1, (3, 2, 16)).unbind(1)
        scores: torch.Tensor = self.head(hidden + attention(*heads).flatten(1))
        return scores


def _own_gradients() -> tuple[bool, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Of a level step under FSDP2, and of the same documents one at a time; whether ranks shared any."""
    model: Any = fully_shard(Own().double())
    alone = Own().double()
    step = next(steps_of())
    level_step(model, step.batches, lambda batch: batch.loss(model(batch.tokens, batch.attention)))
    for segment in step.plan.segments:
        ids = torch.from_numpy(DOCUMENTS[segment.document])
        scores = alone(ids, partial(segment_attention, segment_lengths=[len(ids)], backend="reference"))
        (F.cross_entropy(scores[:-1], ids[1:], reduction="sum") / step.loss_tokens).backward()
    pairs = zip(model.parameters(), alone.named_parameters(), strict=True)
    gradients = {name: (full(ours.grad), full(theirs.grad)) for ours, (name, theirs) in pairs}
    return any(batch.is_shared for batch in step.batches), gradients


def test_a_loop_with_a_module_of_its_own_needs_batches_and_level_step_only():
    for shared, gradients in run_ranks(2, _own_gradients):
        assert shared
        for name, (found, expected) in gradients.items():
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-14, msg=name)


def memory_of_level_steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What two level steps say on a GPU with 1 GB free; their bytes are those that FSDP2 holds before the reduction."""
    model = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.Linear(30, 10))
    model[0].weight.requires_grad_(False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (model[1], model):
        fully_shard(unit, mp_policy=policy)
    held: list[int] = []
    lines: list[str] = []

    def loss_of(batch: int) -> Any:
        if batch:
            states: list[Any] = [unit._get_fsdp_state() for unit in own_lists.fsdp_units(model)]
            params = [param for state in states for param in state._fsdp_param_group.fsdp_params]
            gradients = [param.unsharded_accumulated_grad for param in params]
            tensors = [param.unsharded_param for param in params], [g for g in gradients if g is not None]
            held.extend(sum(tensor.numel() * tensor.element_size() for tensor in kind) for kind in tensors)
        return model(torch.ones(1, 30)).float().sum()

    level_step(model, [0, 1], loss_of)
    assert unsharded_bytes(model) == tuple(held) == (2 * 1240, 4 * (1240 - 900))
    monkeypatch.setattr("warnings.warn", lambda line, **_: lines.append(line))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2480, 80_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 1760)
    for allocated in (401, 400):
        own_lists._MEASURED.clear()
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda allocated=allocated: allocated)
        own_lists.warn_of_memory(model)
        own_lists.warn_of_memory(model)
    return lines


def _memory_of_level_steps() -> list[str]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return memory_of_level_steps(monkeypatch)


def test_too_little_memory_is_said_once():
    (line,), others = run_ranks(2, _memory_of_level_steps)
    assert line.startswith("wlb: a level step holds 0.0 GB of gathered weights and 0.0 GB of unsharded gradi")
    assert others == []
