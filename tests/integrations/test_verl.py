"""verl's own functions, with its balancing replaced by ours."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import pytest

if find_spec("verl") is None:  # a broken one fails
    pytest.skip("needs verl", allow_module_level=True)

import torch  # verl decides whether this file runs
import verl.utils.seqlen_balancing as verl_balancing
from tensordict import TensorDict

from wlb.errors import UserError
from wlb.integrations.verl import balanced_partitions, reroute_balancing

LENGTHS = np.minimum(np.random.default_rng(0).lognormal(6, 1.2, 96).astype(int) + 8, 4096)
THEIRS = verl_balancing.get_seqlen_balanced_partitions


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl_balancing, "get_seqlen_balanced_partitions", THEIRS)


@pytest.mark.parametrize("equal_size", [True, False])
@pytest.mark.parametrize("parts", [2, 8, 48])
def test_partitions_keep_what_verl_promises_and_are_at_least_as_even(parts: int, equal_size: bool):
    prices = verl_balancing.calculate_workload(torch.from_numpy(LENGTHS))  # as its trainers call it
    ours = balanced_partitions(prices, k_partitions=parts, equal_size=equal_size)
    theirs = THEIRS(prices.tolist(), k_partitions=parts, equal_size=equal_size)
    assert sorted(index for part in ours for index in part) == list(range(len(LENGTHS)))
    assert all(part == sorted(part) and part for part in ours)
    if equal_size:
        assert {len(part) for part in ours} == {len(LENGTHS) // parts}
    heaviest = [max(int(prices[part].sum()) for part in division) for division in (ours, theirs)]
    assert heaviest[0] <= heaviest[1] * (1 + 1e-6)


def test_a_trainer_that_has_imported_the_function_is_rerouted(monkeypatch: pytest.MonkeyPatch):
    trainer = ModuleType("verl.trainer.imported_before")
    trainer.get_seqlen_balanced_partitions = THEIRS  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, trainer.__name__, trainer)
    reroute_balancing()
    reroute_balancing()
    assert trainer.get_seqlen_balanced_partitions is balanced_partitions
    assert verl_balancing.get_seqlen_balanced_partitions is balanced_partitions


def test_micro_batches_of_verl_keep_its_limit_and_hold_every_document():
    reroute_balancing()
    widest = int(LENGTHS.max())
    mask = torch.arange(widest)[None, :] < torch.from_numpy(LENGTHS)[:, None]
    batch = TensorDict({"input_ids": mask.long(), "attention_mask": mask.long()}, batch_size=[len(LENGTHS)])
    micro_batches, indices = verl_balancing.rearrange_micro_batches(batch, max_token_len=widest)
    assert sorted(index for part in indices for index in part) == list(range(len(LENGTHS)))
    assert all(0 < int(part["attention_mask"].sum()) <= widest for part in micro_batches)


def test_a_verl_without_the_function_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(verl_balancing, "get_seqlen_balanced_partitions")
    with pytest.raises(UserError, match=r"no verl.utils.seqlen_balancing\.get_seqlen_balanced_partitions"):
        reroute_balancing()
