"""Megatron-Core's contract for sequence-packing schedulers, held by ours; and a training step of its own.

Its own code moves tensors to CUDA; where it runs here, ``_OnCpu`` leaves them on the CPU.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from tests.code_blocks import ROOT, blocks_of
from tests.training.distributed import run_ranks

if not (  # importing it to find out would take seconds
    (found := find_spec("megatron"))
    and (home := found.submodule_search_locations)
    and (source := Path(home[0], "core/datasets/data_schedule.py")).is_file()
    and "\nscheduler_map" in source.read_text()
):
    pytest.skip("needs Megatron-LM's main (0.20): no Megatron-Core with a scheduler_map", allow_module_level=True)

from megatron.core.datasets import data_schedule

from wlb.errors import UserError  # Megatron-Core decides whether this file runs
from wlb.integrations.megatron import BalancedScheduler, register
from wlb.workload import make_workload

LENGTHS = np.minimum(np.random.default_rng(0).lognormal(7, 1.3, 300).astype(int) + 16, 65536)
SAMPLES = [(index, int(length)) for index, length in enumerate(LENGTHS)]
MOST, CP, DP = 32768, 2, 4  # tokens per rank
DP_BALANCED = next(key for key in data_schedule.scheduler_map if getattr(key, "value", key) == "dp_balanced")


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(data_schedule.scheduler_map, DP_BALANCED, data_schedule.DpBalancedScheduler)
    monkeypatch.setattr(BalancedScheduler, "workload", BalancedScheduler.workload)


def _slot_waiting(groups: list[list[list[int]]]) -> float:
    """Sum over slots of the dearest rank's seconds, over the mean: what ranks that run in lock-step wait."""
    seconds = make_workload("7b").document_seconds(LENGTHS)
    loads = np.array([[seconds[slot[rank * CP]].sum() for rank in range(DP)] for slot in groups])
    return float(loads.max(axis=1).sum() / loads.mean(axis=1).sum())


@pytest.mark.parametrize("group_size", [None, 3])
def test_every_sample_is_trained_once_within_the_limit(group_size: int | None):
    groups = BalancedScheduler(MOST, CP, DP, group_size).get_groups_and_subsamples(SAMPLES)
    assert len(groups) % (group_size or 1) == 0
    assert {len(slot) for slot in groups} == {CP * DP}
    for slot in groups:
        for first in range(0, CP * DP, CP):
            assert slot[first] == slot[first + 1]  # of one data-parallel rank
            assert 0 < LENGTHS[slot[first]].sum() <= MOST * CP
    assert sorted(i for slot in groups for i in [i for rank in range(DP) for i in slot[rank * CP]]) == [*range(300)]


def test_ranks_wait_less_than_under_the_scheduler_of_megatron():
    theirs = data_schedule.DpBalancedScheduler(MOST, CP, DP, None).get_groups_and_subsamples(SAMPLES)
    ours = BalancedScheduler(MOST, CP, DP, None).get_groups_and_subsamples(SAMPLES)
    assert len(ours) <= len(theirs)
    assert _slot_waiting(ours) < 1 + (_slot_waiting(theirs) - 1) / 2


def test_registered_it_is_what_megatron_makes():
    (block,) = (b for b in blocks_of(ROOT / "docs" / "stacks" / "pretraining.md") if "import register" in b.text)
    exec(block.text, {})
    ours = data_schedule.scheduler_map[DP_BALANCED](MOST, CP, DP, None)
    theirs = data_schedule.DpBalancedScheduler(MOST, CP, DP, None)
    assert isinstance(ours, BalancedScheduler)
    assert ours.get_required_sample_keys() == theirs.get_required_sample_keys()


def test_a_sample_over_the_limit_is_refused():
    with pytest.raises(UserError, match="over max_tokens = 65536"):
        BalancedScheduler(MOST, CP, DP, None).get_groups_and_subsamples([(0, 65537), *[(i, 10) for i in range(1, 9)]])


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = dict(options or {})
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        return arguments[0] if function is torch.Tensor.cuda else function(*arguments, **options)


class _Model(torch.nn.Module):
    """One weight for each token, times its position: a sample lost, repeated or cut changes the gradient."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.model_type = config, None
        self.weight = torch.nn.Parameter(torch.ones(64, dtype=torch.float64))

    def set_input_tensor(self, tensor: Any) -> None:
        pass

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.weight[tokens] ** 2 * (positions + 1)


def gradient(model: _Model) -> torch.Tensor:
    assert model.weight.grad is not None
    return model.weight.grad


def _forward_step(data_iterator: Any, model: _Model) -> Any:
    tokens, _, mask, _, positions, *_ = data_schedule.get_batch_on_this_rank_for_sequence_packing(data_iterator)
    losses = model(tokens, positions)

    def loss(output: torch.Tensor) -> Any:
        return (output * mask).sum(), mask.sum().int(), {"tokens": int(mask.sum())}

    return losses, loss


def _sample(length: int, seed: int) -> dict[str, torch.Tensor]:
    tokens = torch.from_numpy(np.random.default_rng(seed).integers(0, 64, length))
    mask = torch.ones(length)
    mask[-1] = 0
    sizes = {name: torch.tensor([length]) for name in ("original_seq_len", "padded_seq_len")}
    return {"tokens": tokens, "labels": tokens, "loss_mask": mask, "position_ids": torch.arange(length), **sizes}


def _step(lengths: list[int]) -> tuple[list[float], list[int]]:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, calculate_per_token_loss=True)
    model = _Model(config)

    def finalize(models: Any, tokens: torch.Tensor, **_: Any) -> None:
        dist.all_reduce(model.weight.grad)
        dist.all_reduce(tokens)
        gradient(model).div_(tokens)

    config.finalize_model_grads_func = finalize
    mine = range(dist.get_rank(), len(lengths), 2)
    register()
    config.max_seqlen_per_dp_cp_rank, config.sequence_packing_scheduler = 256, "dp_balanced"
    samples = iter([_sample(lengths[i], i) for i in mine])
    with _OnCpu():
        packed, number, *_ = data_schedule.wrap_data_iterator(samples, config, len(mine), None)  # as train_step does
        results = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=packed,
            model=[model],
            num_microbatches=number,
            seq_length=256,
            micro_batch_size=1,
        )
    return gradient(model).tolist(), [result["tokens"] for result in results]


@pytest.mark.proves("packed batches")
def test_a_training_step_of_megatron_trains_every_sample_once_in_balanced_micro_batches():
    lengths = [200, 40, 60, 100, 180, 30, 90, 110, 120, 50, 70, 80]
    (grads, tokens), (others, their_tokens) = run_ranks(2, _step, lengths)
    assert len(tokens) == len(their_tokens) == 3, "of six samples a rank"
    assert all(count <= 256 for count in tokens + their_tokens)
    model = _Model(None)
    samples = [_sample(length, i) for i, length in enumerate(lengths)]
    total = sum((model(s["tokens"], s["position_ids"]) * s["loss_mask"]).sum() for s in samples)
    (total / sum(length - 1 for length in lengths)).backward()
    assert grads == others
    assert np.abs(np.array(grads) - gradient(model).numpy()).max() < 1e-12


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"calculate_per_token_loss": False}, "calculate_per_token_loss is off"),
        ({"pipeline_model_parallel_size": 2}, "variable_seq_lengths is off"),
        ({"hybrid_context_parallel": True}, "switch it off"),
        ({"dynamic_context_parallel": True}, "switch it off"),
    ],
)
def test_a_step_that_would_train_something_else_is_refused(settings: dict[str, Any], message: str):
    config = {"calculate_per_token_loss": True, "pipeline_model_parallel_size": 1, "variable_seq_lengths": False}
    with pytest.raises(UserError, match=message):
        BalancedScheduler(MOST, CP, DP, None).run(iter(()), 1, *[None] * 5, SimpleNamespace(**config | settings))


def test_no_micro_batch_has_more_samples_than_static_buffers_hold():
    scheduler = BalancedScheduler(MOST, CP, DP, None)
    scheduler.max_num_seqs = 4
    groups = scheduler.get_groups_and_subsamples(SAMPLES)
    assert max(len(samples) for slot in groups for samples in slot) == 4
