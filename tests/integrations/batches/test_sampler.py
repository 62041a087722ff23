"""The planned batch sampler: every document once an epoch, whole steps, no empty batch, and exact states."""

import importlib
import json
from collections import Counter
from functools import partial
from itertools import chain, islice, product
from pathlib import Path
from typing import Any, cast

import accelerate
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.cases import in_turn
from tests.workload.profiles import analytic_profile
from wlb.errors import UserError
from wlb.integrations.batches import PlannedBatchSampler
from wlb.integrations.packed import FlatteningCollator, packed_batches
from wlb.workload import model_shape
from wlb.workload.phases import DocumentPhases
from wlb.workload.profile import write_profile

LENGTHS = np.random.default_rng(0).lognormal(5, 1.2, 300).astype(int).clip(8, 1024)


def sampler(lengths: Any = LENGTHS, **settings: Any) -> PlannedBatchSampler:
    usual: dict[str, Any] = {"context_window": 1024, "micro_batches": 2, "dp": 2, "model": "tiny"}
    return PlannedBatchSampler(lengths, **usual | settings)


def of_ranks(*arguments: Any, ranks: int = 2, **settings: Any) -> list[list[list[int]]]:
    return [list(sampler(*arguments, rank=rank, **settings)) for rank in range(ranks)]


@in_turn(("preset", "epochs"), [("wlb-llm", 3), ("fixed-4d", 1), ("balanced", 3)])
def test_every_document_is_trained_once_an_epoch_and_no_batch_is_empty(preset: str, epochs: int):
    first, second = of_ranks(preset=preset, epochs=epochs)
    assert len(sampler(preset=preset, epochs=epochs)) == len(first) == len(second)
    assert all(first + second)
    assert Counter(chain(*first, *second)) == dict.fromkeys(range(len(LENGTHS)), epochs)


@given(st.lists(st.integers(1, 48), min_size=4, max_size=40), st.integers(1, 4), st.integers(1, 3), st.integers(1, 2))
def test_small_data_sets_lose_nothing(lengths: list[int], dp: int, micro_batches: int, epochs: int):
    settings: dict[str, Any] = {"context_window": 64, "dp": dp, "micro_batches": micro_batches, "epochs": epochs}
    by_rank = of_ranks(lengths, ranks=dp, **settings)
    batches = list(chain(*by_rank))
    assert all(batches)
    assert len({*map(len, by_rank)}) == 1
    assert Counter(chain(*batches)) == dict.fromkeys(range(len(lengths)), epochs)
    capacity = sampler(lengths, **settings).job.max_tokens
    assert all(sum(lengths[i] for i in batch) <= capacity for batch in batches)


def test_ranks_that_share_micro_batches_have_the_same():
    by_rank = of_ranks(cp=2, ranks=4)
    assert by_rank[0] == by_rank[1] != by_rank[2] == by_rank[3]
    assert list(sampler(dp=None)) == list(sampler(dp=1, rank=0))


def test_batches_are_even_and_passes_differ():
    # Fewer tokens take longer than reading the weights.
    planned = sampler(hardware="cpu", rank=0, global_batch=16, max_length_factor=6)
    assert np.mean([plan.imbalance for plan in islice(planned.steps(), 10)]) < 1.1
    first, second = list(planned), list(planned)
    assert first != second
    planned.set_epoch(0)
    assert list(planned) == first


@pytest.mark.parametrize("asks_for_more", [True, False])  # many loops stop after len(loader) batches
def test_what_is_said_of_a_pass_is_of_the_one_that_comes(asks_for_more: bool):
    planned = sampler(LENGTHS[:60], rank=0, epochs=2)
    said: list[Any] = []
    documents: Any = range(60)
    for _ in range(4):
        plans = [[[part.document % 60 for part in m.segments] for m in plan.ranks[0]] for plan in planned.steps()]
        said.append([len(planned), *chain(*plans)])
        loader: Any = DataLoader(documents, batch_sampler=planned, collate_fn=list)
        trained = [*islice(loader, None if asks_for_more else len(loader))]
        assert said[-1] == [len(trained), *trained]
    assert len({*map(str, said)}) == 4


def test_a_pass_that_was_broken_off_is_not_repeated_unasked():
    expected, planned = list(sampler(rank=0)), sampler(rank=0)
    head = [*islice(planned, 5)]
    with pytest.raises(UserError, match="the last pass of this sampler ended early, and the next would repeat it"):
        iter(planned)
    planned.load_state_dict(planned.state_dict())
    assert head + list(planned) == expected
    planned.set_epoch(0)
    assert [*islice(planned, 5)] == head


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_workers_continues_from_a_state_too(workers: int):  # it calls ``iter`` twice
    expected, planned = list(sampler(rank=0)), sampler(rank=0)
    assert len([*islice(planned, 3)]) == 3
    resumed, documents = sampler(rank=0), cast("Any", range(len(LENGTHS)))
    resumed.load_state_dict(planned.state_dict())
    loader: Any = DataLoader(documents, batch_sampler=resumed, collate_fn=list, num_workers=workers)
    assert list(loader) == expected[3:]


@in_turn(("epochs", "taken"), product([2, None], [0, 3, 4, 29, 42]))
def test_a_state_continues_after_any_batch(epochs: int | None, taken: int):
    expected = list(islice(sampler(epochs=epochs, rank=1), 60))
    planned = sampler(epochs=epochs, rank=1)
    batches = iter(planned)
    assert list(islice(batches, taken)) == expected[:taken]
    state = json.loads(json.dumps(planned.state_dict()))
    next(batches, None)  # what happens afterwards does not reach into the state
    fresh = sampler(epochs=epochs, rank=1)
    fresh.load_state_dict(state)
    fresh.set_epoch(0)  # as loops do when they begin
    assert fresh.state_dict() == state
    assert list(islice(fresh, 60 - taken)) == expected[taken:]


def test_loaders_that_would_train_other_documents_or_lose_where_steps_end_are_refused():
    def read(dataset: Any) -> int:
        return sum(DataLoader(dataset, batch_sampler=sampler(rank=0, dp=1), collate_fn=len))

    assert read(range(300)) == 300
    with pytest.raises(UserError, match="data set has 301 documents and the sampler 300 lengths"):
        read(range(301))
    documents: Any = [[1] * length for length in LENGTHS]
    loaders: list[Any] = [
        DataLoader(rows, batch_sampler=sampler(rank=0, dp=1), collate_fn=FlatteningCollator())
        for rows in (documents, documents[::-1])
    ]
    assert next(iter(loaders[0]))["input_ids"].numel() > 0
    with pytest.raises(UserError, match=r"document 0 has \d+ tokens, and lengths say \d+; give the lengths of this"):
        iter(loaders[1])
    dealt = importlib.import_module("accelerate.data_loader").BatchSamplerShard(sampler(), 2, 0, even_batches=False)
    with pytest.raises(UserError, match=r"use balanced_steps of wlb"):
        list(dealt)
    accumulating = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    try:
        for reads in (
            partial(read, range(300)),
            partial(next, packed_batches([[1, 2]], context_window=4, micro_batches=1)),
        ):
            with pytest.raises(UserError, match=r"gradient_accumulation_steps=2\) divides every loss by 2"):
                reads()
    finally:
        accumulating.gradient_accumulation_steps = 1


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_keeps_the_state_with_workers(workers: int):

    def loader() -> Any:
        return StatefulDataLoader(
            range(len(LENGTHS)), batch_sampler=sampler(epochs=2, rank=0), num_workers=workers, collate_fn=list
        )

    expected = list(loader())
    first = loader()
    batches = iter(first)
    head = [next(batches) for _ in range(9)]
    state = first.state_dict()
    second = loader()
    second.load_state_dict(state)
    assert head + list(second) == expected


@in_turn(
    ("settings", "message"),
    [
        ({"lengths": [5, 2000]}, "document 1 has 2000 tokens, over context_window = 1024"),
        ({"lengths": [5, 0]}, "document 1 has 0 tokens"),
        ({"lengths": []}, "there are no documents to train; give at least one"),
        ({"epochs": 0}, "epochs = 0 is not a whole number >= 1"),
        ({"rank": 2}, "rank = 2 is not below dp x cp = 2"),
        ({"preset": "no"}, "preset 'no' is unknown"),
        (
            {"lengths": [5, 5, 5], "dp": 4, "rank": 0},
            "3 documents are too few for a micro-batch on each of dp = 4",
        ),
        ({}, "dp x cp = 2, and rank is missing"),
    ],
)
def test_mistakes_are_one_line(settings: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        list(sampler(**settings))


def test_an_odd_document_of_a_window_is_trained_in_the_last_step():
    batches = [batch for rank in range(2) for batch in sampler([1024] * 41, micro_batches=2, rank=rank)]
    assert sorted(chain(*batches)) == list(range(41))
    assert [len(batch) for batch in batches].count(2) == 1
    batches = list(chain(*of_ranks([1024] * 55, ranks=8, dp=8, micro_batches=1, global_batch=7)))
    assert max(map(len, batches)) == 2
    assert sorted(chain(*batches)) == list(range(55))


CHANGES: list[dict[str, Any]] = [
    {"micro_batches": 4},
    {"dp": 1},
    {"dp": 4, "cp": 2},
    {"context_window": 1500},
    {"preset": "wlb-llm"},
    {"preset": "balanced", "pool": 1, "rank_micro_batches": 3},
    {"model": "7b"},
    {"epochs": 3},
]


@in_turn(("change", "taken"), product(CHANGES, [2, 50]))  # batches: after one step, and among the last
def test_a_state_between_steps_continues_with_other_settings(change: dict[str, Any], taken: int):
    trained: Counter[int] = Counter()
    for rank in range(2):
        first = sampler(epochs=2, rank=rank)
        trained += Counter(chain(*islice(first, taken)))
        state = json.loads(json.dumps(first.state_dict()))
    assert state["taken"] == 0
    layout = sampler(**{"epochs": 2, **change}).job.layout
    for rank in range(0, layout.dp_cp, layout.pool_size):
        resumed = sampler(**{"epochs": 2, **change, "rank": rank})
        resumed.load_state_dict(state)
        trained += Counter(chain(*resumed))
    assert trained == dict.fromkeys(range(len(LENGTHS)), change.get("epochs", 2))


def test_epochs_are_added_after_the_last_one_was_drained():
    first = sampler(dp=1)
    assert list(first)
    ended = sampler(dp=1)
    ended.load_state_dict(first.state_dict())
    assert list(ended) == []
    longer = sampler(dp=1, epochs=2)
    longer.load_state_dict(first.state_dict())
    assert Counter(chain(*longer)) == dict.fromkeys(range(len(LENGTHS)), 1)
    shorter = sampler(dp=1)
    with pytest.raises(UserError, match="the state is in epoch 2 and this run ends with epoch 1"):
        shorter.load_state_dict(longer.state_dict())


@in_turn(
    ("taken", "change", "message"),
    [
        (2, {"lengths": LENGTHS[1:]}, "documents = 300 and this run has 299"),
        (2, {"seed": 7}, "saved with seed = 0 and this run has 7"),
        (2, {"shuffle": False}, "saved with shuffle = True and this run has False"),
        (2, {"lengths": LENGTHS[::-1]}, "saved with digest of lengths = "),
        (3, {"micro_batches": 4}, "inside a step with global_batch = 4 and this run has 8"),
        (3, {"context_window": 1500}, "inside a step with context_window = 1024 and this run has 1500"),
    ],
)
def test_what_a_state_cannot_be_continued_with_is_refused(taken: int, change: dict[str, Any], message: str):
    first = sampler(rank=0)
    list(islice(first, taken))
    with pytest.raises(UserError, match=message):
        sampler(**change).load_state_dict(first.state_dict())


def test_a_measured_profile_prices_documents_and_names_the_model(tmp_path: Path):
    shape = model_shape("tiny")
    write_profile(analytic_profile(shape), tmp_path / "profile.json")
    job = sampler(model=None, profile=tmp_path / "profile.json").job
    assert job.shape == shape
    assert job.profile is not None
    assert job.costs.attention_seconds(512) == job.profile.attention_seconds(512)
    with pytest.raises(UserError, match="the profile was measured with another model"):
        sampler(model="7b", profile=job.profile)


def test_own_prices_are_packed_by():
    class Tokens:
        def document_seconds(self, lengths: Any) -> Any:
            return np.asarray(lengths, float)

    (plan,) = islice(sampler(workload=Tokens()).steps(), 1)
    assert [micro_batch.workload for micro_batch in plan.micro_batches] == [m.tokens for m in plan.micro_batches]


def test_pools_are_chosen_where_asked():
    assert (
        sampler([900] * 8, micro_batches=1, model="7b", pool="auto", max_length_factor="auto").job.layout.pool_size == 2
    )
    assert sampler([50] * 300, pool=1).job.layout.pool_size == 1
    assert sampler([50] * 300, pool=2).job.layout.pool_size == 2
    assert sampler([50] * 300, pool="auto").job.layout.pool_size == 1


def test_processes_and_states_with_other_phases_are_told_apart():
    lengths = [30, 20, 10, 40] * 4
    settings: Any = {"context_window": 64, "dp": 1}
    ones = DocumentPhases({"encoder": np.ones(16)})
    assert sorted(chain(*sampler(lengths, **settings, phases=ones))) == [*range(16)]
    batches = iter(sampler(lengths, **settings, phases=ones))
    next(batches)
    other = sampler(lengths, **settings, phases=DocumentPhases({"encoder": 2 * np.ones(16)}))
    with pytest.raises(UserError, match="inside a step with phases = "):
        other.load_state_dict(batches.state_dict())
    with pytest.raises(UserError, match="phases cover 3 documents, but there are 16"):
        list(sampler(lengths, **settings, phases=DocumentPhases({"encoder": [1, 2, 3]})))
